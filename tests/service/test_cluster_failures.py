"""Agents and control planes that are killed, stopped, removed or replaced under running jobs."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import Agent, Cluster, python_without_torch
from waiting import eventually

from worker.supervisor import marked_processes

pytestmark = pytest.mark.timeout(90)

OVER = ("completed", "failed", "cancelled", "lost")

# A wrapper's program with children, as data loaders are: one in a session of its own.
TREE = """
import os, signal, time
for number in range(3):
    if os.fork() == 0:
        time.sleep(1000)
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print('ready')
    time.sleep(1000)
time.sleep(1000)
"""

# Writes a numbered line now and then; ends as its argument says when the file `go` appears.
TICKER = """
import os, sys, time
number = 0
while not os.path.exists(sys.argv[1]):
    print('tick', number)
    number += 1
    time.sleep(0.05)
print('last', number)
if sys.argv[2] == 'killed':
    os.kill(os.getpid(), 9)
sys.exit(int(sys.argv[2]))
"""


class Lab:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cluster = Cluster(folder)
        self.api = self.cluster.api
        self.python = python_without_torch(folder)

    def script(self, name: str, code: str) -> str:
        path = self.folder / f"{name}.py"
        path.write_text(code)
        return str(path)

    def start(self, node: str, code: str, *args: str, ranks: int = 1, **job: Any) -> dict[str, Any]:
        script = self.script(f"program{time.monotonic_ns()}", code)
        return self.api.start(
            script=script, args=list(args), python=self.python, on={node: ranks}, **job
        )

    def running_tree(self, node: str) -> dict[str, Any]:
        command = ["bash", "-c", f'"{self.python}" "$0"; exit $?', self.script("tree", TREE)]
        job = self.api.start(script=None, command=command, on={node: 1}, grace=30)
        eventually(lambda: "ready" in self.cluster.log(job["id"]))
        assert len(self.cluster.processes(job)) == 6
        return job


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab = Lab(tmp_path_factory.mktemp("failures"))
    yield lab
    lab.cluster.close()


@pytest.fixture
def agent(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Agent]:
    """An agent of the test's own, which may be killed."""
    name = f"n{len(lab.cluster.agents)}"
    agent = lab.cluster.add(name, 3)
    yield agent
    agent.clean_up()


def test_a_killed_agent_takes_its_ranks_along(lab: Lab, agent: Agent) -> None:
    """SIGKILL of an agent: no process of its job lives 10 s later, the job is lost, and a new
    start of the agent is welcome."""
    job = lab.running_tree(agent.name)
    attempt = lab.api.job(job["id"])["attempt"]
    agent.kill()
    eventually(lambda: not marked_processes({"UNISONO_ATTEMPT": attempt}), 10.0)
    found = lab.api.until(job["id"], *OVER)
    assert found["state"] == "lost"
    assert found["cause"]["node"] == agent.name
    assert lab.api.node(agent.name)["state"] == "offline"
    agent.start(token=None)
    job = lab.start(agent.name, "print('again')")
    lab.api.until(job["id"], "completed")
    assert agent.stop() == 0


def test_an_agent_finds_what_its_earlier_life_left_behind(lab: Lab, agent: Agent) -> None:
    """Processes that survived both agent and supervisors are ended by the next start."""
    job = lab.running_tree(agent.name)
    attempt = lab.api.job(job["id"])["attempt"]
    marker = {"UNISONO_ATTEMPT": attempt}
    # Supervisors carry no marker; they are the parents of the ranks.
    parents = {_parent(pid) for pid in marked_processes(marker)} - set(marked_processes(marker))
    (supervisor,) = parents
    assert agent.process is not None
    agent.process.send_signal(signal.SIGSTOP)
    os.kill(supervisor, signal.SIGKILL)
    agent.kill()
    assert marked_processes(marker) != []
    agent.start(token=None)
    assert marked_processes(marker) == []
    assert "earlier life" in agent.log()
    found = lab.api.until(job["id"], *OVER)
    assert found["state"] in ("lost", "failed")


def test_a_stopped_agent_ends_its_ranks_and_leaves(lab: Lab, agent: Agent) -> None:
    """SIGTERM of an agent ends the ranks with their handlers; the job has not completed."""
    code = (
        "import signal, sys\n"
        "def clean(number, frame):\n"
        "    print('cleaned')\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, clean)\n"
        "print('ready')\n"
        "while True: signal.pause()\n"
    )
    job = lab.start(agent.name, code)
    eventually(lambda: "ready" in lab.cluster.log(job["id"]))
    assert agent.stop() == 0
    assert lab.cluster.processes(job) == []
    found = lab.api.until(job["id"], *OVER)
    assert found["state"] == "failed"
    assert lab.cluster.log(job["id"]) == "ready\ncleaned\n"
    assert f"the agent on {agent.name} was stopped (SIGTERM)" in found["cause"]["message"]


def test_a_second_signal_is_impatient(lab: Lab, agent: Agent) -> None:
    """Ranks that use their whole grace are killed at the second signal."""
    job = lab.running_tree(agent.name)
    assert agent.process is not None
    agent.process.send_signal(signal.SIGINT)
    eventually(lambda: "leaving" in agent.log())
    assert agent.stop(signal.SIGINT, 10.0) == 0
    assert lab.cluster.processes(job) == []


def test_a_control_plane_may_die_while_jobs_end(lab: Lab, agent: Agent) -> None:
    """Jobs that ended while the control plane was dead have their true states and all lines, and
    a queued one starts once, with the tokens and names of before."""
    go = lab.folder / "go-end"
    ends = {"0": ("completed", 0, None), "3": ("failed", 3, None), "killed": ("failed", None, 9)}
    started = {end: lab.start(agent.name, TICKER, str(go), end) for end in ends}
    queued = lab.start(agent.name, "print('once')", ranks=3)
    attempts = []
    for job in started.values():
        eventually(lambda job=job: "tick 3" in lab.cluster.log(job["id"]))  # type: ignore[misc]
        attempts.append(lab.api.job(job["id"])["attempt"])
    lab.cluster.server.kill()
    go.touch()
    for attempt in attempts:
        eventually(lambda mark=attempt: not marked_processes({"UNISONO_ATTEMPT": mark}))  # type: ignore[misc]
    lab.cluster.server.start()
    for end, (state, exit_code, number) in ends.items():
        job = lab.api.until(started[end]["id"], *OVER, timeout=20.0)
        assert job["state"] == state
        (rank,) = lab.api.ranks(job["id"])
        assert (rank["exit_code"], rank["signal"]) == (exit_code, number)
        lines = lab.cluster.log(job["id"]).splitlines()
        count = len(lines) - 1
        assert lines == [f"tick {index}" for index in range(count)] + [f"last {count}"]
    lab.api.until(queued["id"], "completed", timeout=20.0)
    assert lab.cluster.log(queued["id"]) == "once\n"


def test_training_is_untouched_by_a_restart_of_the_control_plane(lab: Lab, agent: Agent) -> None:
    """A job goes on through a restart and its log has no gap; the node is never called dead."""
    go = lab.folder / "go-on"
    job = lab.start(agent.name, TICKER, str(go), "0")
    eventually(lambda: "tick 3" in lab.cluster.log(job["id"]))
    (pid,) = lab.cluster.processes(job)
    lab.cluster.server.kill()
    lab.cluster.server.start()
    size = len(eventually(lambda: lab.cluster.log(job["id"])))
    eventually(lambda: len(lab.cluster.log(job["id"])) > size + 50)
    assert lab.cluster.processes(job) == [pid]
    assert lab.api.job(job["id"])["state"] == "running"
    go.touch()
    lab.api.until(job["id"], "completed")
    lines = lab.cluster.log(job["id"]).splitlines()
    assert lines[:-1] == [f"tick {index}" for index in range(len(lines) - 1)]


def test_a_stalled_control_plane_declares_nobody_dead(lab: Lab, agent: Agent) -> None:
    """After its own stall, longer than the node timeout, the control plane expires no node."""
    go = lab.folder / "go-stalled"
    job = lab.start(agent.name, TICKER, str(go), "0")
    eventually(lambda: "tick 3" in lab.cluster.log(job["id"]))
    server = lab.cluster.server.process
    assert server is not None
    server.send_signal(signal.SIGSTOP)
    stalled_at = time.monotonic()
    # what is tested is a stall that outlasts the node timeout of 2 s
    eventually(lambda: time.monotonic() - stalled_at > 2.6)
    server.send_signal(signal.SIGCONT)
    assert lab.api.node(agent.name)["state"] == "online"
    assert lab.api.job(job["id"])["state"] == "running"
    go.touch()
    lab.api.until(job["id"], "completed")
    assert "connected again" not in agent.log()


def test_a_rank_that_hogs_the_machine_does_not_look_dead(lab: Lab, agent: Agent) -> None:
    """Both cores busy and an interpreter held in C code: the agent's heartbeats go on."""
    code = "import re\nprint('begin')\nre.match('(a|a)*$', 'a' * 24 + 'b')\nprint('done')"
    job = lab.start(agent.name, code, ranks=2)
    seen = set()

    def over() -> bool:
        seen.add(lab.api.node(agent.name)["state"])
        return lab.api.job(job["id"])["state"] in OVER

    eventually(over, 60.0)
    assert lab.api.job(job["id"])["state"] == "completed"
    assert seen == {"online"}


def test_a_drained_node_takes_no_job_and_a_removed_one_is_out(lab: Lab, agent: Agent) -> None:
    """A removed node's agent ends, and its credential is dead."""
    http = lab.api.http
    http.post(f"/nodes/{agent.name}/drain").raise_for_status()
    job = lab.start(agent.name, "print('hello')")
    waiting = lab.api.job(job["id"])
    assert waiting["state"] == "queued" and agent.name in str(waiting["waiting_for"])
    http.post(f"/nodes/{agent.name}/resume").raise_for_status()
    lab.api.until(job["id"], "completed")
    http.delete(f"/nodes/{agent.name}").raise_for_status()
    assert agent.wait() == 3
    assert "fenced" in agent.log()
    agent.start(wait=False, token=None)
    assert agent.wait() == 3
    assert "does not know this node's credential" in agent.log()
    agent.start()  # a new join token lets it in again
    assert agent.stop() == 0


def test_a_newer_incarnation_fences_the_older_one(lab: Lab, agent: Agent) -> None:
    """A copy of an agent's state takes its place; the old one ends its ranks and stops."""
    job = lab.running_tree(agent.name)
    copy = Agent(lab.cluster.server, lab.folder / "copy", agent.name)
    shutil.copytree(agent.state, copy.state, ignore=shutil.ignore_patterns("*.sock", "runs"))
    assert agent.process is not None
    agent.process.send_signal(signal.SIGSTOP)
    try:
        copy.start()
        agent.process.send_signal(signal.SIGCONT)
        assert agent.wait() == 3
        assert lab.cluster.processes(job) == []
        assert lab.api.node(agent.name)["state"] == "online"
        assert copy.stop() == 0
    finally:
        copy.clean_up()


@pytest.mark.parametrize(
    ("options", "exit_code", "said"),
    [
        (["--token-file", "/nowhere"], 4, "token file /nowhere cannot be read"),
        ([], 3, "has not joined yet: give a join token"),
        (["--name", "a/b"], 2, "not a node name"),
        (["--advertise", "fdaa:1:2::3:29521"], 2, "[fdaa:1:2::3]:29521"),
        (["--env", "train=/nowhere/python"], 2, "/nowhere/python does not exist"),
    ],
)
def test_wrong_options_say_what_to_do(
    lab: Lab, tmp_path: Path, options: list[str], exit_code: int, said: str
) -> None:
    """Each mistake ends with its exit code and a message that names value and way out."""
    agent = Agent(lab.cluster.server, tmp_path, "wrong", 1, *options)
    agent.start(wait=False, token=None)
    assert agent.wait() == exit_code
    assert said in " ".join(agent.log().replace("│", " ").split())


def test_a_wrong_token_and_a_taken_name_are_refused(lab: Lab, agent: Agent, tmp_path: Path) -> None:
    """The control plane's refusal is shown, and the agent does not try for ever."""
    other = Agent(lab.cluster.server, tmp_path / "a", agent.name)
    other.start(wait=False)
    assert other.wait() == 3
    assert f"cannot join as '{agent.name}'" in other.log() and "--name" in other.log()
    token = tmp_path / "token"
    token.write_text("wrong\n")
    stranger = Agent(lab.cluster.server, tmp_path / "b", "stranger", 2, "--token-file", str(token))
    stranger.start(wait=False, token=None)
    assert stranger.wait() == 3
    assert "does not accept the join token" in stranger.log()
    assert "wrong" not in stranger.log().replace("is wrong", "")


def test_a_state_folder_serves_one_agent(lab: Lab, agent: Agent) -> None:
    """A second agent on the same state folder is told which process holds it."""
    assert agent.process is not None
    first = agent.process
    agent.start(wait=False)
    second = agent.process
    assert second is not None and second.wait(20) == 4
    assert f"another agent (pid {first.pid}) uses the state folder" in agent.log()
    agent.process = first


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
