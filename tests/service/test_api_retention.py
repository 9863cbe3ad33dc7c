"""Old jobs: deleted whole when they are too many or too old, and nothing else with them."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import time
from collections.abc import Callable

import pytest
from control_plane import Api, ControlPlane
from scripted_agent import ScriptedAgent
from sqlalchemy import func, select, text
from sqlalchemy.orm import Session
from waiting import eventually

from api import models
from api.storage import open_engine

pytestmark = pytest.mark.timeout(60)
MakeAgent = Callable[..., ScriptedAgent]
MakeServer = Callable[..., ControlPlane]

DAY = 86_400.0
TABLES = (
    models.Job,
    models.Attempt,
    models.AttemptNode,
    models.Rank,
    models.Failure,
    models.StepChunk,
    models.Metric,
    models.LogStream,
    models.Idempotency,
    models.Bundle,
    models.Leftover,
)


def archive(name: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.addfile(tarfile.TarInfo(name))
    return gzip.compress(buffer.getvalue(), mtime=0)


def run(api: Api, agent: ScriptedAgent, name: str) -> dict[str, str]:
    """A job with output, steps, metrics and a failure, and a bundle of its own."""
    data = archive(f"{name}.py")
    bundle = api.http.post("/bundles", content=data).raise_for_status().json()["digest"]
    assert bundle == hashlib.sha256(data).hexdigest()
    job = api.http.post(
        "/jobs", json={"script": f"{name}.py", "bundle": bundle}, headers={"Idempotency-Key": name}
    ).json()["id"]
    agent.prepare()
    attempt = agent.launch().attempt
    agent.say(attempt, 0, f"output of {name}\n", 0)
    agent.steps(attempt, 0, 1, 10)
    agent.report(attempt, 0, 10, loss=1.0)
    agent.fail(attempt, 0, "ValueError", "bad")
    agent.exit(attempt, 0, 1)
    agent.over(attempt)
    api.until(job, "failed")
    return {"job": job, "attempt": attempt, "bundle": bundle}


def rows(server: ControlPlane) -> dict[str, int]:
    engine = open_engine(f"sqlite:///{server.data_dir / 'unisono.db'}")
    with Session(engine) as session:
        found = {
            table.__tablename__: session.scalar(select(func.count()).select_from(table)) or 0
            for table in TABLES
        }
    engine.dispose()
    return found


def files(server: ControlPlane) -> set[str]:
    return {
        path.name for folder in ("logs", "bundles") for path in (server.data_dir / folder).iterdir()
    }


def test_only_the_newest_jobs_are_kept(make_server: MakeServer, make_agent: MakeAgent) -> None:
    """The job beyond the number goes with its rows and output; what comes late of it is nobody's;
    its bundle stays for the day in which another job may be started with it."""
    server = make_server(keep_jobs=2)
    api, agent = Api(server), make_agent(server, "w1")
    first = run(api, agent, "first")
    before = rows(server)
    others = [run(api, agent, name) for name in ("second", "third")]
    eventually(lambda: api.http.get(f"/jobs/{first['job']}").status_code == 404)
    eventually(lambda: first["attempt"] not in files(server))
    for table, count in before.items():
        assert rows(server)[table] == count * (3 if table == "bundles" else 2), table
    assert files(server) == {
        *(other["attempt"] for other in others),
        *(f"{one['bundle']}.tar.gz" for one in (first, *others)),
    }
    agent.say(first["attempt"], 0, "late", 100)
    agent.steps(first["attempt"], 0, 11, 1)
    agent.synchronise()
    assert first["attempt"] not in files(server) and rows(server)["log_streams"] == 2
    assert [job["id"] for job in api.http.get("/jobs").json()["items"]] == [
        other["job"] for other in reversed(others)
    ]
    assert "output of third" in api.http.get(f"/jobs/{others[1]['job']}/ranks/0/logs/stdout").text
    again = api.http.post("/jobs", json={"script": "first.py", "bundle": first["bundle"]})
    assert again.status_code == 201, again.text
    api.close()


def test_old_jobs_go_and_a_kill_leaves_no_file(
    make_server: MakeServer, make_agent: MakeAgent
) -> None:
    """At the next start a job that is too old is gone, and a bundle that nobody uses; and so is a
    file whose rows were deleted by a server that was killed before it deleted the file."""
    server = make_server()
    api, agent = Api(server), make_agent(server, "w1")
    old, young = run(api, agent, "old"), run(api, agent, "young")
    server.kill()
    killed = server.data_dir / "logs" / "a-killed"
    killed.mkdir()
    (killed / "0.stdout.0").write_text("rest")
    engine = open_engine(f"sqlite:///{server.data_dir / 'unisono.db'}")
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO leftovers VALUES ('logs/a-killed'), ('logs/a-none')"))
        for statement in (
            "UPDATE jobs SET ended_at = :at WHERE id = :job",
            "UPDATE bundles SET created_at = :at",
        ):
            connection.execute(text(statement), {"at": time.time() - 91 * DAY, "job": old["job"]})
    engine.dispose()
    server.start()
    eventually(lambda: files(server) == {young["attempt"], f"{young['bundle']}.tar.gz"})
    eventually(lambda: rows(server)["leftovers"] == 0)
    assert rows(server)["jobs"] == rows(server)["bundles"] == 1
    assert api.job(young["job"])["state"] == "failed"
    api.close()
