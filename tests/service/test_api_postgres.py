"""The control plane on PostgreSQL: the same jobs, on a private server of the test's own."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from control_plane import Api, ControlPlane
from scripted_agent import ScriptedAgent
from sqlalchemy import create_engine
from waiting import eventually

pytestmark = pytest.mark.timeout(90)


def find_binaries() -> Path | None:
    """The folder of PostgreSQL's server programs; distributions keep it out of PATH."""
    found = shutil.which("postgres")
    if found:
        return Path(found).parent
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    return installed[-1].parent if installed else None


@pytest.fixture
def database_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A fresh PostgreSQL server that listens on a socket in its own folder."""
    binaries = find_binaries()
    if binaries is None:
        pytest.skip("PostgreSQL's server is not installed")
    # A short path, since the name of a Unix socket holds 107 bytes; and one that the server's
    # user can reach, which pytest's own folders are not.
    home = Path(
        subprocess.check_output(["mktemp", "-d", "/tmp/unisono-pg-XXXXXX"], text=True).strip()
    )
    user: str | None = None
    if os.geteuid() == 0:
        # PostgreSQL refuses to run as root.
        user = "postgres"
        owner = pwd.getpwnam(user)
        os.chown(home, owner.pw_uid, owner.pw_gid)
    data = home / "data"
    run = {"user": user, "cwd": home, "stdin": subprocess.DEVNULL, "env": {"LC_ALL": "C"}}
    if user is not None:
        run |= {"group": user, "extra_groups": []}
    subprocess.run(
        [binaries / "initdb", "-D", data, "-U", "unisono", "-A", "trust", "-E", "UTF8", "-N"],
        check=True,
        stdout=subprocess.DEVNULL,
        **run,  # type: ignore[call-overload]
    )
    server = subprocess.Popen(
        [binaries / "postgres", "-D", data, "-k", home, "-c", "listen_addresses=", "-F"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        **run,  # type: ignore[call-overload]
    )
    url = f"postgresql://unisono@/postgres?host={home}"
    try:
        eventually(lambda: (home / ".s.PGSQL.5432").exists(), 20, "PostgreSQL listens")
        yield url
    finally:
        server.terminate()
        server.wait(20)
        shutil.rmtree(home)


def test_a_job_runs_on_postgresql(
    database_url: str,
    make_server: Callable[..., ControlPlane],
    make_agent: Callable[..., ScriptedAgent],
) -> None:
    """Jobs, output, timings and failures are kept in PostgreSQL, through a kill as well, and
    deleted when they are too old."""
    server = make_server(database_url=database_url)
    agent = make_agent(server, "w1")
    api = Api(server)
    job = api.start(ranks_per_node=2, name="žluť")["id"]
    agent.prepare()
    attempt = agent.launch().attempt
    api.until(job, "running")
    agent.say(attempt, 0, "a\x00b\n", 0)
    agent.steps(attempt, 0, 1, 5)
    agent.report(attempt, 0, 5, loss=float("nan"), note="a\x00b")
    agent.synchronise()
    server.kill()
    api.close()
    agent.close()
    agent.fail(attempt, 1, "ValueError", "bad\x00sample")
    agent.exit(attempt, 1, 1)
    agent.exit(attempt, 0, None, 15)
    agent.over(attempt)
    agent.held[attempt] = "ended"
    server.start()
    api = Api(server)
    agent.connect()
    failed = api.until(job, "failed")
    assert failed["cause"]["rank"] == 1 and failed["cause"]["message"].startswith("bad")
    assert api.http.get(f"/jobs/{job}/ranks/0/logs/stdout").content == b"a\x00b\n"
    steps = api.http.get(f"/jobs/{job}/steps").json()["ranks"]
    assert steps[0]["step"] == [1, 2, 3, 4, 5]
    metrics = api.http.get(f"/jobs/{job}/metrics").json()["items"]
    assert metrics[0]["values"] == {"loss": "NaN", "note": "a\ufffdb"}
    assert not (server.data_dir / "unisono.db").exists()
    api.close()
    assert server.stop() == 0
    engine = create_engine(database_url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM jobs").scalar() == 1
    engine.dispose()
    server.settings["keep_jobs_for"] = 1e-3
    server.start()
    api = Api(server)
    eventually(lambda: api.http.get("/jobs").json()["items"] == [])
    eventually(lambda: not (server.data_dir / "logs" / attempt).exists())
    api.close()
