"""Stores decisions about jobs, or keeps them in memory until the database takes them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from sqlalchemy import update
from sqlalchemy.orm import Session

from api import models
from api.attempt import UNSETTLED, AttemptState, Part
from api.inbox import Inbox
from api.jobs import JobState, store
from api.storage import Storage, StorageUnavailable

log = logging.getLogger("unisono.jobs")

#: seconds between tries to store a decision while the database does not take it
RETRY = 2.0


class Keeper:
    """The last decision on each job, attempt and part goes to the database, sooner or later."""

    def __init__(self, storage: Storage, inbox: Inbox) -> None:
        self._storage = storage
        self._inbox = inbox
        self._unsaved: dict[str, Callable[[Session], None]] = {}
        self._retry: asyncio.TimerHandle | None = None
        #: jobs that are over, but whose end is not stored yet
        self.ended: dict[str, JobState] = {}

    def stop(self) -> None:
        """Try no more."""
        if self._retry is not None:
            self._retry.cancel()

    async def job(self, job: JobState) -> None:
        """Store a job's state."""
        row = job.row()
        await self._keep(job.id, lambda session: store(session, job.id, row))

    def closed(self, job: JobState) -> None:
        """A job is over: remember it for as long as its end is not stored."""
        if job.id in self._unsaved:
            self.ended[job.id] = job

    async def phase(self, attempt: AttemptState) -> None:
        """Store an attempt's phase, and the end of its ranks when it is over."""
        values = {
            "phase": attempt.phase,
            "end_at": attempt.end_at,
            "end_reason": attempt.end_reason,
        }

        def work(session: Session) -> None:
            row = session.get_one(models.Attempt, attempt.id)
            for name, value in values.items():
                setattr(row, name, value)
            if values["phase"] == "over":
                rank = models.Rank
                for state, end in UNSETTLED.items():
                    unsettled = (rank.attempt_id == attempt.id, rank.state == state)
                    session.execute(update(rank).where(*unsettled).values(state=end))

        await self._keep(attempt.id, work)

    async def part(self, attempt: AttemptState, part: Part) -> None:
        """Store how far a node is, and that its ranks are lost if it is."""
        values = {
            "state": part.state,
            "store_port": part.store_port,
            "versions": part.versions,
            "lost_at": part.lost_at,
            "lost_reason": part.lost_reason,
        }
        lost = [m.rank for m in attempt.members_on(part.name)] if part.state == "lost" else []

        def work(session: Session) -> None:
            row = session.get_one(models.AttemptNode, (attempt.id, part.node_id))
            for name, value in values.items():
                setattr(row, name, value)
            for rank in lost:
                found = session.get_one(models.Rank, (attempt.id, rank))
                if found.state not in ("exited", "failed-to-start"):
                    found.state = "lost"

        await self._keep(f"{attempt.id} {part.node_id}", work)

    async def _keep(self, key: str, work: Callable[[Session], None]) -> None:
        # What nodes must be told cannot wait for space on a disk.
        self._unsaved.pop(key, None)
        try:
            await self._storage.write(work)
        except StorageUnavailable as error:
            self._unsaved[key] = work
            self._arm(error)

    def _arm(self, error: StorageUnavailable) -> None:
        if self._retry is None:
            log.error("decisions are kept in memory until they can be stored: %s", error)
            self._retry = self._inbox.later(RETRY, self._again)

    async def _again(self) -> None:
        self._retry = None
        for key, work in list(self._unsaved.items()):
            try:
                await self._storage.write(work)
            except StorageUnavailable as error:
                self._arm(error)
                return
            del self._unsaved[key]
            self.ended.pop(key, None)
