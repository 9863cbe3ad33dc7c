"""The database: its migrations, and a full disk."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.util import CommandError
from sqlalchemy import text
from sqlalchemy.orm import Session

import migrations
from api.models import Base, Job
from api.settings import Settings
from api.storage import Storage, StorageFull, open_engine


def test_migrations_make_the_tables_of_the_models(tmp_path: Path) -> None:
    """After all migrations the database is what the models say, and running them again is fine."""
    engine = open_engine(f"sqlite:///{tmp_path / 'a.db'}")
    migrations.upgrade(engine)
    migrations.upgrade(engine)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
        assert connection.execute(text("PRAGMA journal_mode")).scalar() == "wal"
    engine.dispose()


def test_ranks_that_never_started_are_ended_by_the_migration(tmp_path: Path) -> None:
    """Where their attempt was over before the migration; what runs meanwhile waits on."""
    engine = open_engine(f"sqlite:///{tmp_path / 'a.db'}")
    migrations.upgrade(engine, "0001")
    with engine.begin() as connection:
        for attempt, phase in (("a-old", "over"), ("a-now", "starting")):
            connection.execute(
                text("INSERT INTO attempts (id, job_id, created_at, phase, plan) "
                     "VALUES (:attempt, 'j', 0, :phase, '{}')"),
                {"attempt": attempt, "phase": phase},
            )  # fmt: skip
            for rank, state in enumerate(("waiting", "exited")):
                connection.execute(
                    text("INSERT INTO ranks "
                         "(attempt_id, rank, node, local_rank, device, state, report) "
                         "VALUES (:attempt, :rank, 'w1', 0, '{}', :state, '{}')"),
                    {"attempt": attempt, "rank": rank, "state": state},
                )  # fmt: skip
    migrations.upgrade(engine)
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT attempt_id, state FROM ranks"))
        found = sorted(tuple(row) for row in rows)
    engine.dispose()
    assert found == [
        ("a-now", "exited"), ("a-now", "waiting"), ("a-old", "exited"), ("a-old", "not-started"),
    ]  # fmt: skip


def test_a_newer_database_is_refused(tmp_path: Path) -> None:
    """A database that a newer version has migrated is left alone."""
    engine = open_engine(f"sqlite:///{tmp_path / 'a.db'}")
    migrations.upgrade(engine)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(CommandError, match="9999"):
        migrations.upgrade(engine)
    engine.dispose()


def test_a_full_database_refuses_writes_and_goes_on_reading(tmp_path: Path) -> None:
    """SQLite's word for a full disk becomes `StorageFull`, and nothing of the write is kept."""
    url = f"sqlite:///{tmp_path / 'a.db'}"
    engine = open_engine(url)
    migrations.upgrade(engine)
    engine.dispose()
    storage = Storage(url)

    def fill(session: Session) -> None:
        pages = session.execute(text("PRAGMA page_count")).scalar_one()
        session.execute(text(f"PRAGMA max_page_count = {pages + 2}"))
        for number in range(200):
            job = Job(id=f"j-{number}", name="x" * 200, state="queued", created_at=0.0)
            job.spec, job.nodes, job.consequences, job.created_by = {"a": "b" * 1000}, [], [], "me"
            session.add(job)

    async def scene() -> int:
        with pytest.raises(StorageFull, match="full"):
            await storage.write(fill)
        return await storage.read(lambda s: s.query(Job).count())

    assert asyncio.run(scene()) == 0
    storage.close()


def test_database_urls_name_the_installed_driver() -> None:
    """A plain PostgreSQL URL is opened with psycopg."""
    settings = Settings(database_url="postgresql://u@h/d")
    assert settings.url == "postgresql+psycopg://u@h/d"
