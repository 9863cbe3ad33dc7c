"""Supervisors: what ranks write, how they end, and that nothing of them is left."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import worker_lab
from waiting import eventually
from worker_lab import Lab

from worker.supervisor import descendants, marked_processes

pytestmark = pytest.mark.timeout(60)

PYTHON = [sys.executable, "-S", "-c"]
MARKER = {"UNISONO_ATTEMPT": "a-lab"}

# A process tree as data loaders make it: children, one in a session of its own that ignores
# SIGTERM, and a grandchild.
TREE = """
import os, signal, time
if os.fork() == 0:
    time.sleep(1000)
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        time.sleep(1000)
    open("tree", "w").close()
    time.sleep(1000)
while True:
    time.sleep(1000)
"""


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path)
    yield lab
    lab.close()
    assert marked_processes(MARKER) == []


@pytest.mark.parametrize(
    ("code", "exit_code", "number", "message"),
    [
        ("", 0, None, None),
        ("import os; os._exit(3)", 3, None, None),
        ("import sys; sys.exit('no data')", 1, None, "no data"),
        ("import os; os.kill(os.getpid(), 9)", None, 9, None),
        ("import os; os.abort()", None, 6, None),
    ],
)
def test_exit_status_is_the_kernels(
    lab: Lab, code: str, exit_code: int | None, number: int | None, message: str | None
) -> None:
    """Exit codes and signals are reported as the kernel gave them, never as success."""
    lab.run(code)
    running, exited = lab.states()
    assert running.state == "running" and running.pid
    assert (exited.state, exited.exit_code, exited.signal) == ("exited", exit_code, number)
    assert exited.message == message


def test_traceback_becomes_a_failure(lab: Lab) -> None:
    """An exception at the end of a rank is told before its exit, with kind and traceback."""
    entries = lab.run("try:\n    {}['x']\nexcept KeyError:\n    raise ValueError('bad sample 17')")
    (failure,) = lab.failures()
    assert (failure.kind, failure.message) == ("ValueError", "bad sample 17")
    assert "KeyError" in failure.traceback and failure.traceback.startswith("Traceback")
    assert failure.culprit is None
    kinds = ["failure" if e.failure else e.rank.state if e.rank else "log" for e in entries]
    assert kinds == ["running", "log", "failure", "exited"]


def test_a_lost_peer_is_named_as_culprit(lab: Lab) -> None:
    """A collective's error that names another rank is marked as that rank's consequence."""
    lab.run("class PeerLost(Exception): pass\nraise PeerLost('rank 2 on node w2 is gone')")
    assert lab.failures()[0].culprit == 2


def test_a_reported_failure_is_not_told_twice(lab: Lab) -> None:
    """A rank that reported its failure by the socket has no second one from its stderr."""
    lab.reported = True
    lab.run("raise ValueError('bad')")
    assert lab.failures() == []


def test_lines_are_seen_while_the_rank_runs(lab: Lab) -> None:
    """Lines appear while the program goes on, from its children too, and survive its SIGKILL."""
    lab.start(
        [
            *PYTHON,
            "import subprocess, sys, signal\n"
            "for i in range(5):\n"
            "    print('out', i)\n"
            "    print('err', i, file=sys.stderr)\n"
            "subprocess.run([sys.executable, '-S', '-c', 'print(\"child\")'])\n"
            "sys.stdout.write('half a line')\n"
            "sys.stdout.flush()\n"
            "signal.pause()",
        ]
    )
    eventually(lambda: lab.text().endswith("child\n"), 5.0)
    assert lab.text() == "".join(f"out {i}\n" for i in range(5)) + "child\n"
    eventually(lambda: lab.text("stderr") == "".join(f"err {i}\n" for i in range(5)))
    assert not lab.exited.is_set()
    os.kill(lab.states()[0].pid or 0, signal.SIGKILL)
    lab.finish()
    assert lab.text().endswith("child\nhalf a line")
    assert lab.states()[-1].signal == 9


def test_long_lines_are_spread_over_chunks(lab: Lab) -> None:
    """A line longer than a chunk arrives whole, cut between characters only."""
    lab.run("print('x' + '模型🐎' * 30000, flush=True)", environment={"PYTHONIOENCODING": "utf-8"})
    chunks = lab.logs()
    assert len(chunks) > 1
    assert "".join(chunk.text for chunk in chunks) == "x" + "模型🐎" * 30000 + "\n"
    for first, following in itertools.pairwise(chunks):
        assert following.offset == first.offset + first.size


def test_metric_lines_are_metrics_and_lines(lab: Lab) -> None:
    """A metric line is recognised and stays in the log; a broken one is only a line."""
    lab.run(
        'print(\'::unisono {"step": 12, "loss": 0.4, "note": "ok", "list": [1]}\')\n'
        "print('::unisono {broken')\n"
        "print(' ::unisono {\"step\": 1}')"
    )
    (metrics,) = lab.metrics()
    assert (metrics.step, metrics.values) == (12, {"loss": 0.4, "note": "ok"})
    assert lab.text().count("::unisono") == 3


def test_much_output_is_complete(lab: Lab) -> None:
    """Fifty megabytes written at once arrive without a gap while somebody takes them."""
    lab.run(
        "import sys\nblock = ('x' * 99 + '\\n') * 1000\n"
        "for i in range(500): sys.stdout.write(block)",
    )
    assert sum(chunk.size for chunk in lab.logs()) == 50_000_000
    assert all(chunk.cut == 0 for chunk in lab.logs())


def test_a_full_spool_cuts_output_and_says_so(tmp_path: Path) -> None:
    """Beyond its bound the spool leaves output out, marks how much, and keeps the exit code."""
    lab = Lab(tmp_path, limit=2 << 20)
    lab.run("import sys\nfor i in range(100000): print('y' * 99)")
    chunks = lab.logs()
    assert sum(chunk.size + chunk.cut for chunk in chunks) == 10_000_000
    assert sum(chunk.cut for chunk in chunks) > 0
    assert sum(path.stat().st_size for path in (tmp_path / "spool").iterdir()) < 2 << 20
    assert lab.states()[-1].exit_code == 0
    lab.close()


def test_a_stopped_agent_does_not_block_the_rank(tmp_path: Path) -> None:
    """While its agent stands still a rank writes on; what was lost is counted afterwards."""
    rank = (
        "import sys\n"
        "block = b'z' * 999 + b'\\n'\n"
        "import os, time\n"
        "while not os.path.exists('go'): time.sleep(0.02)\n"
        "for i in range(40000): sys.stdout.buffer.write(block)\n"
        "sys.stdout.flush()\n"
        "open('written', 'w').close()\n"
    )
    agent = subprocess.Popen(
        [sys.executable, worker_lab.__file__, str(tmp_path), *PYTHON, rank], stdout=subprocess.PIPE
    )
    with agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == b"started\n"
        agent.send_signal(signal.SIGSTOP)
        (tmp_path / "go").touch()
        eventually((tmp_path / "written").exists, 20.0)
        agent.send_signal(signal.SIGCONT)
        assert agent.wait(30.0) == 0
    lab = Lab(tmp_path)
    assert sum(chunk.size + chunk.cut for chunk in lab.logs()) == 40_000_000
    assert sum(chunk.cut for chunk in lab.logs()) > 0
    assert lab.states()[-1].exit_code == 0
    lab.close()


def test_a_killed_agent_leaves_no_process(tmp_path: Path) -> None:
    """SIGKILL of the agent ends the rank's tree, also what is in another session, in seconds."""
    command = ["bash", "-c", f"{sys.executable} -S -c '{TREE}'; true"]
    agent = subprocess.Popen(
        [sys.executable, worker_lab.__file__, str(tmp_path), *command], stdout=subprocess.PIPE
    )
    with agent:
        eventually((tmp_path / "tree").exists)
        assert len(marked_processes(MARKER)) >= 5
        agent.kill()
    eventually(lambda: not marked_processes(MARKER), 10.0)


def test_a_killed_wrapper_takes_its_tree_along(lab: Lab) -> None:
    """When only the shell around a program is killed, the program and its children end too."""
    lab.start(["bash", "-c", f"{sys.executable} -S -c '{TREE}'; true"], grace=1.0)
    eventually((lab.folder / "tree").exists)
    os.kill(lab.states()[0].pid or 0, signal.SIGKILL)
    lab.finish(10.0)
    assert lab.states()[-1].signal == 9


def test_a_killed_supervisor_takes_its_rank_along(lab: Lab) -> None:
    """SIGKILL of a supervisor ends its rank and what that started, and is told as a failure."""
    process = lab.start([*PYTHON, TREE], grace=1.0)
    eventually((lab.folder / "tree").exists)
    process._process.kill()
    lab.finish(10.0)
    state = lab.states()[-1]
    assert (state.state, state.exit_code) == ("exited", None)
    assert state.message == "the supervisor of this rank was killed"


def test_ending_gives_the_grace_and_spares_neighbours(lab: Lab, tmp_path: Path) -> None:
    """A handler of SIGTERM gets its time under a shell, then all is ended but the neighbour."""
    other = Lab(tmp_path / "other", attempt="a-other")
    other.start([*PYTHON, "import signal; print('up'); signal.pause()"])
    handler = (
        "import signal, sys, time\n"
        "def clean(number, frame):\n"
        "    time.sleep(0.7)\n"
        "    print('cleaned')\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, clean)\n"
        + TREE.replace("while True:", "print('ready')\nwhile True:")
    )
    (tmp_path / "train.py").write_text(handler)
    lab.start(["bash", "-c", f"{sys.executable} -S train.py"], grace=3.0)
    eventually(lambda: "ready" in lab.text() and (tmp_path / "tree").exists())
    lab.process.end(3.0, "cancelled")
    lab.process.end(3.0, "cancelled")
    lab.finish(10.0)
    assert "cleaned" in lab.text()
    assert lab.states()[-1].message == "cancelled"
    assert marked_processes(MARKER) == []
    assert not other.exited.is_set() and len(marked_processes({"UNISONO_ATTEMPT": "a-other"})) == 1
    other.close()


def test_an_order_to_end_right_behind_the_start_is_obeyed(lab: Lab) -> None:
    """A rank that is ended in the moment of its start does not run on."""
    lab.start([*PYTHON, "import time; time.sleep(1000)"])
    lab.process.end(5.0, "cancelled")
    lab.finish(5.0)
    assert (lab.states()[-1].signal, lab.states()[-1].message) == (15, "cancelled")


def test_what_a_finished_rank_left_running_is_ended(lab: Lab) -> None:
    """A program that ends well but leaves children is over when they are gone."""
    before = set(descendants(os.getpid()))
    lab.run("import os, time\nif os.fork() == 0: time.sleep(1000)", grace=2.0)
    assert lab.states()[-1].exit_code == 0
    assert set(descendants(os.getpid())) <= before


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["/nowhere/program"], "No such file"),
        ([sys.executable, "x" * 200_000], "longer than Linux allows"),
    ],
)
def test_what_cannot_be_started_says_why(lab: Lab, argv: list[str], said: str) -> None:
    """A rank whose program cannot be executed failed to start, with the kernel's reason."""
    lab.start(argv)
    lab.finish()
    (state,) = lab.states()
    assert state.state == "failed-to-start" and said in (state.message or "")
