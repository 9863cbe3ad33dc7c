"""Old jobs: deleted with all that was stored of them, once they are too old or too many.

One transaction deletes a job's rows and notes its files as leftovers; after the commit they are
deleted, and only then the notes.  So a kill at any point leaves nothing behind but notes, which
the next start works off.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import delete, or_, select
from sqlalchemy.orm import Session

from api import models
from api.bundles import file_name
from api.jobs import FINAL
from api.settings import Settings
from api.storage import Storage, StorageUnavailable

log = logging.getLogger("unisono.retention")

#: seconds between two looks
_INTERVAL = 3600.0
#: a bundle may have been uploaded so long, in seconds, before the job that uses it is started
_UNUSED = 86_400.0
#: everything that is stored of an attempt
_PARTS = (
    models.AttemptNode,
    models.Rank,
    models.Failure,
    models.StepChunk,
    models.Metric,
    models.LogStream,
)


class Retention:
    """Deletes what the settings `keep_jobs` and `keep_jobs_for` do not keep."""

    def __init__(self, settings: Settings, storage: Storage, forget: Callable[[str], None]) -> None:
        """`forget` is told, in the writer's thread, of each attempt that is deleted."""
        self._settings = settings
        self._storage = storage
        self._forget = forget
        self._job_over = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look."""
        self._task = asyncio.create_task(self._run(), name="retention")

    async def stop(self) -> None:
        """Stop; the next start goes on."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def job_over(self) -> None:
        """One more job is over: there may be too many."""
        if self._settings.keep_jobs:
            self._job_over.set()

    async def _run(self) -> None:
        while True:
            try:
                await self._storage.write(self._delete_files)
                if self._settings.keep_jobs or self._settings.keep_jobs_for:
                    # One job at a time, so that what agents send is stored in between.
                    while await self._storage.write(self._delete_job):
                        await self._storage.write(self._delete_files)
                    await self._storage.write(self._delete_bundles)
                    await self._storage.write(self._delete_files)
            except StorageUnavailable as error:
                log.warning("old jobs are kept for another hour: %s", error)
            except Exception:
                # Whatever is wrong with one job, the next look may find it mended.
                log.exception("an old job could not be deleted")
            try:
                async with asyncio.timeout(_INTERVAL):
                    await self._job_over.wait()
            except TimeoutError:
                pass
            self._job_over.clear()

    # --- in the writer's thread ---------------------------------------------------------

    def _delete_job(self, session: Session) -> bool:
        """Delete the oldest job that is not kept; whether there was one."""
        job, keep, seconds = models.Job, self._settings.keep_jobs, self._settings.keep_jobs_for
        over = select(job).where(job.state.in_(FINAL))
        limits = []
        if seconds:
            limits.append(job.ended_at < time.time() - seconds)
        if keep:
            newest = over.with_only_columns(job.number).order_by(job.number.desc())
            limits.append(job.number <= newest.offset(keep).limit(1).scalar_subquery())
        row = session.scalar(over.where(or_(*limits)).order_by(job.number).limit(1))
        if row is None:
            return False
        attempts = session.scalars(
            select(models.Attempt.id).where(models.Attempt.job_id == row.id)
        ).all()
        for attempt in attempts:
            self._forget(attempt)
            for part in _PARTS:
                session.execute(delete(part).where(part.attempt_id == attempt))
            session.add(models.Leftover(path=f"logs/{attempt}"))
        session.execute(delete(models.Attempt).where(models.Attempt.job_id == row.id))
        session.execute(delete(models.Idempotency).where(models.Idempotency.job_id == row.id))
        session.delete(row)
        return True

    def _delete_bundles(self, session: Session) -> None:
        """Delete the bundles that no job uses any more, and none will that is being started."""
        used = models.Job.spec["bundle"].as_string()
        unused = select(models.Bundle).where(
            models.Bundle.created_at < time.time() - _UNUSED,
            models.Bundle.digest.not_in(select(used).where(used.is_not(None))),
        )
        for bundle in session.scalars(unused):
            session.add(models.Leftover(path=f"bundles/{file_name(bundle.digest)}"))
            session.delete(bundle)

    def _delete_files(self, session: Session) -> None:
        for leftover in session.scalars(select(models.Leftover)):
            path: Path = self._settings.data_dir / leftover.path
            try:
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
            except OSError as error:
                log.warning("%s cannot be deleted: %s", path, error.strerror)
            else:
                session.delete(leftover)
