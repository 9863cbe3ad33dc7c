"""The command `unisono` against a real cluster, as a person or a script runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, python_without_torch
from waiting import eventually

pytestmark = pytest.mark.timeout(90)

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
    "--nodes",
    "two\nlines",
    "x" * 100_000,
]


class Cli:
    """Runs `unisono` with a token file, in a folder with a few scripts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cluster = Cluster(folder, "w1", "w2")
        self.python = python_without_torch(folder)
        self.token = self.cluster.server.data_dir / "operator.token"
        self.project = folder / "project"
        self.project.mkdir()

    def environment(self, **extra: str) -> dict[str, str]:
        own = {k: v for k, v in os.environ.items() if not k.startswith("UNISONO_")}
        own |= {"UNISONO_URL": self.cluster.server.url, "UNISONO_TOKEN_FILE": str(self.token)}
        return own | {"COLUMNS": "200"} | extra

    def popen(self, *words: str, **extra: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "unisono.cli", *words],
            cwd=self.project,
            env=self.environment(**extra),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str, code: int = 0, **extra: str) -> tuple[str, str]:
        """What the command wrote to stdout and stderr; it must end with `code`."""
        with self.popen(*words, **extra) as process:
            out, err = process.communicate(timeout=60)
        assert process.returncode == code, f"exit code {process.returncode}\n{out}\n{err}"
        assert "Traceback" not in err or "job's own" in err, err
        return out, err

    def script(self, name: str, code: str) -> str:
        path = self.project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
        return name

    def start(self, *words: str, code: int = 0) -> tuple[str, str]:
        return self.run("job", "start", "--python", self.python, *words, code=code)


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    cli = Cli(tmp_path_factory.mktemp("cli"))
    yield cli
    cli.cluster.close()


def test_arguments_reach_every_rank_unchanged(cli: Cli) -> None:
    """What stands behind -- is the same list on every rank, and nothing is run by a shell."""
    cli.script("args.py", "import json, sys; print(json.dumps(sys.argv[1:]))")
    out, _ = cli.start("args.py", "--nodes", "2", "--ranks-per-node", "2", "--wait", "--json",
                       "--", *ARGUMENTS)  # fmt: skip
    job = json.loads(out)
    assert job["state"] == "completed" and job["world_size"] == 4
    for rank in range(4):
        logs, _ = cli.run("job", "logs", job["id"], "--rank", str(rank))
        assert json.loads(logs) == ARGUMENTS


def test_the_folder_of_the_script_travels(cli: Cli) -> None:
    """Modules beside the script are there on the nodes, ignored files are not."""
    cli.script("trip/helper.py", "WORD = 'helped'")
    cli.script("trip/secret.txt", "no")
    cli.script("trip/.gitignore", "secret.txt\n")
    name = cli.script(
        "trip/main.py",
        "import os, helper; print(helper.WORD, os.path.exists('secret.txt'), os.environ['X'])",
    )
    out, err = cli.start(name, "--set", "X=a=b c", "--wait")
    logs, _ = cli.run("job", "logs", out.strip())
    assert logs == "helped False a=b c\n"
    assert "completed after" in err


def test_a_script_that_is_missing_here_is_named(cli: Cli) -> None:
    """The command fails before anything is sent, with the path and the way out."""
    _, err = cli.start("nowhere.py", code=5)
    assert f"there is no script {cli.project}/nowhere.py" in err
    assert "--no-bundle" in err


def test_a_path_of_the_nodes_that_is_missing_there_is_named(cli: Cli) -> None:
    """With --no-bundle the nodes look, and say which of them did not find what."""
    _, err = cli.start("/nowhere/train.py", "--no-bundle", "--nodes", "2", "--wait", code=1)
    assert "/nowhere/train.py" in err
    assert "node w" in err


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        ("import sys; sys.exit(3)", 1, "exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", 1, "signal 9"),
        ("import sys; sys.exit('the job\\'s own words')", 1, "exit code 1"),
        ("raise ValueError('the job\\'s own words')", 1, "ValueError: the job's own words"),
        ("print('fine')", 0, "completed"),
    ],
)
def test_the_state_is_the_exit_code(cli: Cli, program: str, code: int, said: str) -> None:
    """A waiting command ends with 0 only when every rank did, and says what was wrong."""
    cli.script("end.py", f"import os\nif os.environ['RANK'] == '1':\n    {program}\n")
    _, err = cli.start("end.py", "--ranks-per-node", "2", "--wait", code=code)
    assert said in err
    assert ("rank 1" in err) == (code != 0)


def test_a_cancelled_job_is_no_success(cli: Cli) -> None:
    """Whoever waits for a job that somebody cancels is told by the exit code."""
    cli.script("long.py", "import time; print('on', flush=True); time.sleep(600)")
    out, _ = cli.start("long.py")
    job = out.strip()
    with cli.popen("job", "logs", job, "--follow") as following:
        assert following.stdout is not None
        assert following.stdout.readline() == "on\n"
        with cli.popen("job", "wait", job) as waiting:
            assert waiting.stderr is not None
            assert "running" in waiting.stderr.readline()
            cli.run("job", "cancel", job)
            cli.run("job", "cancel", job)
            assert waiting.wait(30) == 3
            assert "cancelled" in waiting.stderr.read()
        assert following.wait(30) == 0


def test_ctrl_c_leaves_the_job_alone(cli: Cli) -> None:
    """A person who stops waiting is told that the job goes on, and how to end it."""
    cli.script("long.py", "import time; time.sleep(600)")
    out, _ = cli.start("long.py")
    job = out.strip()
    with cli.popen("job", "wait", job) as waiting:
        assert waiting.stderr is not None
        waiting.stderr.readline()
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait(30) == 130
        assert f"unisono job cancel {job}" in waiting.stderr.read()
    assert cli.cluster.api.job(job)["state"] in ("starting", "running")
    cli.run("job", "cancel", job)
    cli.cluster.api.until(job, "cancelled")


def test_a_lost_node_has_its_own_exit_code(cli: Cli) -> None:
    """When a node goes away with its ranks the job is lost, and the exit code says so."""
    agent = cli.cluster.add("w3", 1)
    cli.script("long.py", "import time; time.sleep(600)")
    with cli.popen("job", "start", "--python", cli.python, "long.py", "--on", "w3", "--wait") as it:
        assert it.stdout is not None and it.stderr is not None
        job = it.stdout.readline().strip()
        eventually(lambda: cli.cluster.api.job(job)["state"] == "running", 20)
        agent.kill()
        assert it.wait(40) == 4
        assert "lost" in it.stderr.read()
    agent.clean_up()
    cli.run("node", "remove", "w3")


def test_a_queued_job_says_what_it_waits_for(cli: Cli) -> None:
    """A job that cannot be placed names the reason to whoever waits."""
    cli.script("any.py", "")
    with cli.popen("job", "start", "any.py", "--on", "w9:1", "--wait") as process:
        assert process.stdout is not None and process.stderr is not None
        job = process.stdout.readline().strip()
        line = process.stderr.readline()
        assert "queued: waits for" in line and "w9" in line
        cli.run("job", "cancel", job)
        assert process.wait(30) == 3


def test_refusals_are_told_with_field_and_code(cli: Cli) -> None:
    """The control plane's own words reach the person, without a traceback."""
    cli.script("any.py", "")
    _, err = cli.start("any.py", "--strategy", "nonsense", code=5)
    assert "nonsense" in err and "[input-invalid]" in err
    _, err = cli.run("job", "show", "j-nowhere", code=5)
    assert err == "error: there is no job 'j-nowhere' [job-unknown]\n"


def test_no_answer_is_told_with_the_address(cli: Cli) -> None:
    """An address where nobody listens is named, with what to look at."""
    _, err = cli.run("node", "list", code=5, UNISONO_URL="http://127.0.0.1:9")
    assert "cannot reach the control plane at http://127.0.0.1:9" in err
    assert "unisono serve" in err


def test_lists_show_what_there_is(cli: Cli) -> None:
    """Jobs, nodes and tokens are listed for people and as JSON; markup is text."""
    name = "[red]x[/red]"
    cli.script("any.py", "print('hello')")
    out, _ = cli.start("any.py", "--name", name, "--wait")
    job = out.strip()
    shown, _ = cli.run("job", "list")
    assert job in shown and name in shown
    listed, _ = cli.run("job", "list", "--state", "completed", "--limit", "1", "--json")
    assert [each["id"] for each in json.loads(listed)] == [job]
    shown, _ = cli.run("job", "show", job)
    assert "completed" in shown and "exit code" in shown
    detail, _ = cli.run("job", "show", job, "--json")
    assert json.loads(detail)["ranks"][0]["exit_code"] == 0
    nodes, _ = cli.run("node", "list", "--json")
    assert {node["name"] for node in json.loads(nodes)} >= {"w1", "w2"}
    assert "w1" in cli.run("node", "list")[0]


def test_a_drained_node_gets_no_job(cli: Cli) -> None:
    """After drain a job for that node waits; after resume it runs."""
    cli.script("any.py", "")
    cli.run("node", "drain", "w2")
    out, _ = cli.start("any.py", "--on", "w2:1")
    waiting: Any = eventually(lambda: cli.cluster.api.job(out.strip())["waiting_for"], 10)
    assert "w2" in waiting
    cli.run("node", "resume", "w2")
    cli.run("job", "wait", out.strip())


def test_tokens_are_made_used_and_revoked(cli: Cli, tmp_path: Path) -> None:
    """A viewer's token lists jobs and starts none; revoked it is dead; files are private."""
    path = tmp_path / "viewer.token"
    _, err = cli.run("token", "create", "--role", "viewer", "--ttl", "1h", "-o", str(path))
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text().strip() not in err
    _, err = cli.run("token", "create", "--role", "viewer", "-o", str(path), code=5)
    assert "exists already" in err
    viewer = {"UNISONO_TOKEN_FILE": str(path)}
    cli.run("job", "list", **viewer)
    cli.script("any.py", "")
    _, err = cli.run("job", "start", "any.py", code=5, **viewer)
    assert "viewer" in err
    tokens = json.loads(cli.run("token", "list", "--json")[0])
    (made,) = [each for each in tokens if each["role"] == "viewer"]
    cli.run("token", "revoke", made["id"])
    _, err = cli.run("job", "list", code=5, **viewer)
    assert "[not-authenticated]" in err
    assert path.read_text().strip() not in err


def test_a_login_link_is_printed(cli: Cli) -> None:
    """The link carries its code in the fragment, which no server ever sees."""
    out, _ = cli.run("token", "login")
    assert out.startswith(f"{cli.cluster.server.url}/login#code=")


def test_the_doctor_finds_this_machine_well(cli: Cli) -> None:
    """Python, backend, control plane and token are fine; a dead token is called bad."""
    out, _ = cli.run("doctor", "--json")
    verdicts = {each["what"]: each["verdict"] for each in json.loads(out)}
    for what in ("python", "torch", "backend", "collective", "control plane", "token"):
        assert verdicts[what] == "ok", out
    dead = cli.folder / "dead.token"
    dead.write_text("un_api_dead")
    out, _ = cli.run("doctor", code=1, UNISONO_TOKEN_FILE=str(dead))
    assert "BAD  token" in out and "un_api_dead" not in out


def test_a_closed_pipe_is_no_crash(cli: Cli) -> None:
    """A reader that stops early, such as head, gets no traceback."""
    with cli.popen("job", "list") as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        process.wait(30)
        assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize(
    ("options", "environment", "said"),
    [
        (["--port", "99999"], {}, "--port 99999: "),
        (["--log-level", "loud"], {}, "--log-level 'loud': "),
        ([], {"UNISONO_HEARTBEAT": "soon"}, "UNISONO_HEARTBEAT 'soon': "),
    ],
)
def test_settings_that_make_no_sense_are_named(
    tmp_path: Path, options: list[str], environment: dict[str, str], said: str
) -> None:
    """The server does not start; the message names where the value came from."""
    done = subprocess.run(
        [sys.executable, "-m", "unisono.cli", "serve", "--data-dir", tmp_path / "data", *options],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {said}")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "data").exists()
