"""A job in memory while it is not over, and its row in the database."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import update
from sqlalchemy.orm import Session

from api import models
from api.live import LiveJob
from api.placement import Wish

FINAL = frozenset({"completed", "failed", "cancelled", "lost"})
#: columns that a state change may touch
_MUTABLE = (
    "state",
    "reason",
    "started_at",
    "ended_at",
    "attempt",
    "nodes",
    "world_size",
    "cause",
    "consequences",
    "progress",
)


@dataclass
class JobState:
    """One job that is not over."""

    id: str
    number: int
    name: str
    spec: dict[str, Any]
    created_at: float
    created_by: str
    live: LiveJob
    state: str = "queued"
    reason: str | None = None
    waiting_for: str | None = None
    started_at: float | None = None
    ended_at: float | None = None
    attempt: str | None = None
    nodes: list[str] = field(default_factory=list)
    world_size: int | None = None
    cause: dict[str, Any] | None = None
    consequences: list[dict[str, Any]] = field(default_factory=list)
    progress: dict[str, Any] | None = None

    def wish(self) -> Wish:
        """What the job asks of the nodes."""
        on = self.spec.get("on")
        return Wish(
            nodes=self.spec.get("nodes"),
            ranks_per_node=self.spec.get("ranks_per_node") or 1,
            on=tuple(on.items()) if on else None,
            all_free=bool(self.spec.get("all_free")),
            env_name=self.spec.get("env_name"),
        )

    def row(self) -> dict[str, Any]:
        """The columns that may have changed."""
        return {name: getattr(self, name) for name in _MUTABLE}

    def shown(self) -> dict[str, Any]:
        """The job as REST and pages show it."""
        progress = self.live.progress
        return show(self, self.waiting_for, progress.snapshot() if progress else self.progress)

    def shown_short(self) -> dict[str, Any]:
        """The job as lists show it."""
        return summary(self.shown())


def show(job: JobState | models.Job, waiting_for: str | None, progress: Any) -> dict[str, Any]:
    """A job, from memory or from its row, as REST and pages show it."""
    names = ("id", "name", "state", "reason", "created_at", "started_at", "ended_at")
    later = ("spec", "attempt", "nodes", "world_size", "cause", "consequences", "created_by")
    body = {name: getattr(job, name) for name in names}
    body["waiting_for"] = waiting_for
    body |= {name: getattr(job, name) for name in later}
    body["strategy"] = job.spec.get("strategy", "auto")
    body["engine"] = job.spec.get("engine", "unisono")
    body["progress"] = progress
    return body


def summary(job: dict[str, Any]) -> dict[str, Any]:
    """A job as lists show it: without what may be long."""
    long = ("args", "command", "set")
    spec = {key: value for key, value in job["spec"].items() if key not in long}
    cause = job["cause"]
    if cause is not None:
        cause = {k: v for k, v in cause.items() if k != "traceback"}
        cause["message"] = cause["message"][:500]
    return job | {"spec": spec, "cause": cause, "consequences": []}


def store(session: Session, job_id: str, row: dict[str, Any]) -> None:
    """Write a job's columns, within a transaction."""
    session.execute(update(models.Job).where(models.Job.id == job_id).values(**row))
