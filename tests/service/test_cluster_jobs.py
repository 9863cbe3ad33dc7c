"""Jobs on a real cluster: arguments, output, exit codes, causes, cancelling."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, python_without_torch
from waiting import eventually

pytestmark = pytest.mark.timeout(60)

OVER = ("completed", "failed", "cancelled", "lost")


class Jobs:
    """Starts programs on two shared nodes, with a Python that has no torch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cluster = Cluster(folder, "w1", "w2", slots=3)
        self.api = self.cluster.api
        self.python = python_without_torch(folder)

    def start(self, code: str, **job: Any) -> dict[str, Any]:
        script = self.folder / f"program{time.monotonic_ns()}.py"
        script.write_text(code)
        if "on" not in job:
            job = {"nodes": 2, "ranks_per_node": 1} | job
        return self.api.start(**({"script": str(script), "python": self.python} | job))

    def run(self, code: str, state: str, **job: Any) -> dict[str, Any]:
        """The job in its final state, which must be `state`, with nothing of it left."""
        started = self.start(code, **job)
        found = self.api.until(started["id"], *OVER, timeout=25.0)
        assert found["state"] == state, found
        assert self.cluster.processes(found) == []
        return found


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    jobs = Jobs(tmp_path_factory.mktemp("cluster"))
    yield jobs
    codes = {name: agent.stop() for name, agent in jobs.cluster.agents.items()}
    jobs.cluster.close()
    assert codes == {"w1": 0, "w2": 0}


ARGUMENTS = [
    "I'm a student",
    'he said "-4C outside"',
    "",
    '{"a": "b c"}',
    "*",
    "$HOME;echo x",
    "模型 žluť 🐎",
    "-4C",
    "--",
    "two\nlines",
    "x" * 100_000,
]


def test_arguments_arrive_unchanged_on_every_rank(jobs: Jobs) -> None:
    """Spaces, quotes, dashes, unicode, newlines and 100 kB: the same list on all ranks."""
    code = "import json, sys\nprint(json.dumps(sys.argv[1:]))"
    job = jobs.run(code, "completed", args=ARGUMENTS, ranks_per_node=2)
    for rank in range(4):
        assert json.loads(jobs.cluster.log(job["id"], rank)) == ARGUMENTS
    command = [jobs.python, "-c", code, *ARGUMENTS]
    started = jobs.api.start(script=None, command=command, nodes=1)
    jobs.api.until(started["id"], "completed")
    assert json.loads(jobs.cluster.log(started["id"])) == ARGUMENTS


def test_ranks_know_who_and_where_they_are(jobs: Jobs) -> None:
    """The environment is torchrun's; each rank has the run folder of its node."""
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "MASTER_PORT", "UNISONO_NODE", "X"]
    names.append("OMP_NUM_THREADS")
    code = (
        "import json, os\n"
        f"print(json.dumps([os.environ[name] for name in {names}]))\n"
        "open(os.environ['UNISONO_RUN_DIR'] + '/result', 'w').write('kept')\n"
    )
    job = jobs.run(code, "completed", on={"w2": 1, "w1": 2}, set={"X": "a $b"})
    found = [json.loads(jobs.cluster.log(job["id"], rank)) for rank in range(3)]
    assert sorted((row[5], row[1]) for row in found) == [("w1", "0"), ("w1", "1"), ("w2", "0")]
    assert [row[0] for row in found] == ["0", "1", "2"]
    assert {row[2] for row in found} == {"3"} and {row[6] for row in found} == {"a $b"}
    assert len({row[4] for row in found}) == 1
    # both nodes are this machine, whose cores all three ranks share
    shared = str(max(1, len(os.sched_getaffinity(0)) // 3))
    assert {row[7] for row in found} == {os.environ.get("OMP_NUM_THREADS", shared)}
    for name in ("w1", "w2"):
        state = jobs.cluster.agents[name].state
        assert (state / "runs" / job["attempt"] / "result").read_text() == "kept"


@pytest.mark.parametrize(
    ("code", "exit_code", "number"),
    [
        ("import sys; sys.exit(3)", 3, None),
        ("import os; os.kill(os.getpid(), 9)", None, 9),
        (r"import sys; sys.exit('no data here:\nlook there')", 1, None),
    ],
)
def test_a_failed_rank_fails_its_job(
    jobs: Jobs, code: str, exit_code: int | None, number: int | None
) -> None:
    """Whatever way rank 1 fails, the job is failed, it is the cause, and rank 0 is ended."""
    program = f"import os, time\nif os.environ['RANK'] == '1':\n    {code}\ntime.sleep(1000)"
    job = jobs.run(program, "failed")
    cause = job["cause"]
    assert (cause["rank"], cause["node"]) == (1, "w2")
    assert (cause["exit_code"], cause["signal"]) == (exit_code, number)
    ranks = jobs.api.ranks(job["id"])
    assert (ranks[1]["exit_code"], ranks[1]["signal"]) == (exit_code, number)
    assert ranks[0]["signal"] == signal.SIGTERM
    if exit_code == 1:
        assert cause["message"] == ranks[1]["message"] == "no data here:\nlook there"


def test_the_exception_comes_first_and_names_its_rank(jobs: Jobs) -> None:
    """A rank that raises while others wait ends the job, with its traceback as the cause."""
    code = (
        "import os, time\n"
        "if os.environ['RANK'] == '2':\n"
        "    raise ValueError('bad sample 17')\n"
        "time.sleep(1000)\n"
    )
    job = jobs.run(code, "failed", ranks_per_node=2)
    cause = job["cause"]
    assert (cause["rank"], cause["node"], cause["kind"]) == (2, "w2", "ValueError")
    assert cause["message"] == "bad sample 17"
    assert "raise ValueError('bad sample 17')" in cause["traceback"]


def test_a_script_missing_on_one_node_fails_at_once(jobs: Jobs) -> None:
    """The job fails within seconds with node and resolved path; no rank waits for a peer."""
    home = jobs.cluster.agents["w1"].home
    (home / "train.py").write_text("import time; time.sleep(1000)")
    # the first node's Python has torch, whose store takes seconds to come up: it is not waited for
    started = jobs.api.start(script="train.py", nodes=2, ranks_per_node=1)
    job = jobs.api.until(started["id"], "failed", timeout=5.0)
    text = json.dumps(job, ensure_ascii=False)
    missing = jobs.cluster.agents["w2"].home
    assert f"w2: the script {missing}/train.py does not exist" in text
    assert f"(working directory {missing})" in text
    assert "w1: " not in text
    eventually(lambda: jobs.cluster.processes(job) == [])


def test_a_program_that_cannot_start_is_no_success(jobs: Jobs) -> None:
    """An executable that is missing on the nodes fails the job."""
    started = jobs.api.start(script=None, command=["/nowhere/program"], nodes=2)
    job = jobs.api.until(started["id"], *OVER)
    assert job["state"] == "failed" and "/nowhere/program" in json.dumps(job)


def test_a_node_that_is_done_early_spares_the_others(jobs: Jobs) -> None:
    """A rank may go on after the other node, an agent on the same machine, is over."""
    code = (
        "import os, time\n"
        "while os.environ['RANK'] == '0' and not os.path.exists('go'): time.sleep(0.02)\n"
    )
    started = jobs.start(code)
    eventually(lambda: f"attempt {jobs.api.job(started['id'])['attempt']}" in _over(jobs, "w2"))
    assert len(jobs.cluster.processes(started)) == 1
    (jobs.cluster.agents["w1"].home / "go").touch()
    jobs.api.until(started["id"], "completed")


def _over(jobs: Jobs, name: str) -> str:
    """What an agent said about attempts that are over."""
    lines = jobs.cluster.agents[name].log().splitlines()
    return "\n".join(line for line in lines if "over on this node" in line)


def test_output_is_there_while_the_job_runs(jobs: Jobs) -> None:
    """Lines are served within seconds, in order, and none is lost to a SIGKILL."""
    code = (
        "import os, signal, subprocess, sys\n"
        "for i in range(5):\n"
        "    print('out', i)\n"
        "    print('err', i, file=sys.stderr)\n"
        "subprocess.run([sys.executable, '-c', 'print(\"child\")'])\n"
        "signal.pause()\n"
    )
    started = jobs.start(code, nodes=1)
    expected = "".join(f"out {i}\n" for i in range(5)) + "child\n"
    jobs.api.until(started["id"], "running")
    eventually(lambda: jobs.cluster.log(started["id"]) == expected, 5.0)
    errors = "".join(f"err {i}\n" for i in range(5))
    eventually(lambda: jobs.cluster.log(started["id"], stream="stderr") == errors, 5.0)
    os.kill(jobs.api.ranks(started["id"])[0]["pid"], signal.SIGKILL)
    job = jobs.api.until(started["id"], *OVER)
    assert (job["state"], job["cause"]["signal"]) == ("failed", 9)
    assert jobs.cluster.log(started["id"]) == expected


def test_a_users_own_buffering_wins(jobs: Jobs) -> None:
    """PYTHONUNBUFFERED is set for ranks unless the job says something else."""
    code = "import os; print(repr(os.environ.get('PYTHONUNBUFFERED')))"
    job = jobs.run(code, "completed", nodes=1, set={"PYTHONUNBUFFERED": ""})
    assert jobs.cluster.log(job["id"]) == "''\n"


def test_huge_logs_are_kept_within_bounds(jobs: Jobs) -> None:
    """Seventy megabytes arrive and are read whole, and the control plane's memory does not grow."""
    process = jobs.cluster.server.process
    assert process is not None

    def resident() -> int:
        status = Path(f"/proc/{process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) * 1024

    before = resident()
    code = (
        "import sys\nblock = ('x' * 99 + '\\n') * 1000\n"
        "for i in range(700): sys.stdout.write(block)\nprint('the end')"
    )
    job = jobs.run(code, "completed", nodes=1)
    (rank,) = jobs.api.ranks(job["id"])
    assert rank["logs"]["stdout"] == 70_000_008
    tail = jobs.api.http.get(f"/jobs/{job['id']}/ranks/0/logs/stdout", params={"offset": -8})
    assert tail.text == "the end\n"
    with jobs.api.http.stream("GET", f"/jobs/{job['id']}/ranks/0/logs/stdout") as whole:
        assert sum(map(len, whole.iter_bytes())) == 70_000_008
    assert resident() - before < 100 << 20


def test_metric_lines_reach_the_job(jobs: Jobs) -> None:
    """A metric line on stdout is a metric of the job, and stays in the log."""
    code = 'print(\'::unisono {"step": 12, "loss": 0.25}\')'
    job = jobs.run(code, "completed", nodes=1)
    (row,) = jobs.api.http.get(f"/jobs/{job['id']}/metrics").json()["items"]
    assert (row["rank"], row["step"], row["values"]) == (0, 12, {"loss": 0.25})
    assert "::unisono" in jobs.cluster.log(job["id"])


TRAINER = """
import os, signal, sys, time
if os.fork() == 0:
    time.sleep(1000)
if os.fork() == 0:
    os.setsid()
    time.sleep(1000)
def clean(number, frame):
    print('cleaning')
    time.sleep(1.0)
    print('cleaned')
    sys.exit(0)
signal.signal(signal.SIGTERM, clean)
print('ready')
while True:
    time.sleep(1000)
"""


def test_cancelling_gives_grace_and_ends_all_but_the_neighbour(jobs: Jobs) -> None:
    """Handlers get their time, the state is cancelling until nothing lives, neighbours go on."""
    neighbour = jobs.start("import signal; print('up'); signal.pause()")
    script = jobs.folder / "train.py"
    script.write_text(TRAINER)
    command = ["bash", "-c", f'"{jobs.python}" "$0"; exit $?', str(script)]
    started = jobs.api.start(script=None, command=command, nodes=2, grace=5)
    for rank in range(2):
        eventually(lambda rank=rank: "ready" in jobs.cluster.log(started["id"], rank))  # type: ignore[misc]
    assert len(jobs.cluster.processes(started)) == 8
    for _ in range(2):
        answer = jobs.api.http.post(f"/jobs/{started['id']}/cancel")
        assert answer.status_code == 202
    eventually(lambda: "cleaning" in jobs.cluster.log(started["id"], 1))
    assert jobs.api.job(started["id"])["state"] == "cancelling"
    assert jobs.cluster.processes(started) != []
    job = jobs.api.until(started["id"], *OVER)
    assert job["state"] == "cancelled"
    assert jobs.cluster.processes(job) == []
    for rank in range(2):
        assert jobs.cluster.log(started["id"], rank).endswith("cleaned\n")
    assert jobs.api.job(neighbour["id"])["state"] == "running"
    assert len(jobs.cluster.processes(neighbour)) == 2
    jobs.api.http.post(f"/jobs/{neighbour['id']}/cancel")
    jobs.api.until(neighbour["id"], "cancelled")


def test_a_job_cancelled_in_its_first_moment_leaves_nothing(jobs: Jobs) -> None:
    """Cancelling while a job is placed, prepared or started ends it like any other."""
    for _ in range(3):
        started = jobs.start("import time; time.sleep(1000)")
        jobs.api.http.post(f"/jobs/{started['id']}/cancel").raise_for_status()
        job = jobs.api.until(started["id"], *OVER)
        assert job["state"] == "cancelled"
        assert jobs.cluster.processes(job) == []
