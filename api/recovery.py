"""What was going on when the control plane last ended, read back from the database."""

from __future__ import annotations

import json
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from api import models
from api.attempt import AttemptState, Part, RankInfo
from api.causes import RankFailed
from api.cluster import Cluster
from api.jobs import FINAL
from api.orchestrator import Orchestrator
from api.progress import WINDOW, Progress
from api.steps import unpack
from api.storage import Storage
from collective.messages import Plan, from_plain

#: rows of metrics that progress is rebuilt from
_METRICS = 20_000


@dataclass
class _Found:
    jobs: list[models.Job]
    attempts: list[tuple[AttemptState, Progress]]
    #: stored bytes, by attempt, then by rank and stream
    logs: dict[str, dict[tuple[int, str], int]]


async def recover(storage: Storage, cluster: Cluster, orchestrator: Orchestrator) -> None:
    """Go on with all jobs that are not over; nodes with ranks get one whole timeout."""
    found = await storage.read(_load)
    attempts = {attempt.job: (attempt, progress) for attempt, progress in found.attempts}
    for row in found.jobs:
        job = orchestrator.admit(row)
        if job.id not in attempts:
            continue
        attempt, job.live.progress = attempts[job.id]
        job.live.log_sizes = found.logs[attempt.id]
        orchestrator.attempts[attempt.id] = attempt
        for part in attempt.parts:
            devices = [member.device for member in attempt.members_on(part.name)]
            cluster.hold(part.name, devices, job.id)
            node = cluster.by_id.get(part.node_id)
            if node is not None and not part.done:
                # Silent until heard of again; the watch counts from this server's start.
                node.online = True
        orchestrator.resume(attempt)


def _load(session: Session) -> _Found:
    jobs = session.scalars(
        select(models.Job).where(models.Job.state.not_in(FINAL)).order_by(models.Job.number)
    ).all()
    attempts, logs = [], {}
    for job in jobs:
        if job.attempt is not None:
            row = session.get_one(models.Attempt, job.attempt)
            attempt = _attempt(session, row)
            attempts.append((attempt, _progress(session, attempt)))
            streams = session.scalars(
                select(models.LogStream).where(models.LogStream.attempt_id == attempt.id)
            )
            logs[attempt.id] = {(row.rank, row.stream): row.size for row in streams}
    return _Found(list(jobs), attempts, logs)


def _attempt(session: Session, row: models.Attempt) -> AttemptState:
    plan: Plan = from_plain(Plan, row.plan)
    members = {member.rank: member for member in plan.members}
    parts = [
        Part(
            part.node_id,
            plan.hosts[part.position].node,
            part.state,  # type: ignore[arg-type]
            part.store_port,
            dict(part.versions),
            part.lost_at,
            part.lost_reason,
        )
        for part in session.scalars(
            select(models.AttemptNode)
            .where(models.AttemptNode.attempt_id == row.id)
            .order_by(models.AttemptNode.position)
        )
    ]
    ranks = {
        rank.rank: RankInfo(
            members[rank.rank],
            dict(rank.device),
            rank.state,
            rank.pid,
            rank.exit_code,
            rank.signal,
            rank.message,
            rank.started_at,
            rank.ended_at,
            dict(rank.report),
        )
        for rank in session.scalars(
            select(models.Rank).where(models.Rank.attempt_id == row.id).order_by(models.Rank.rank)
        )
    }
    failures = [
        RankFailed(f.rank, f.kind, f.message, f.traceback, f.culprit, f.at)
        for f in session.scalars(
            select(models.Failure)
            .where(models.Failure.attempt_id == row.id)
            .order_by(models.Failure.id)
        )
    ]
    return AttemptState(
        row.id,
        row.job_id,
        plan,
        parts,
        ranks,
        row.phase,
        row.end_at,
        row.end_reason,
        failures,
    )


def _progress(session: Session, attempt: AttemptState) -> Progress:
    progress = Progress(len(attempt.ranks))
    for rank in attempt.ranks:
        # A chunk holds about a second, so the window is in the last chunks, few or many.
        chunks = session.scalars(
            select(models.StepChunk.data)
            .where(models.StepChunk.attempt_id == attempt.id, models.StepChunk.rank == rank)
            .order_by(models.StepChunk.last_step.desc())
            .limit(WINDOW)
        ).all()
        for blob in reversed(chunks):
            progress.add_steps(rank, unpack(blob))
    rows = session.execute(
        select(models.Metric.rank, models.Metric.step, models.Metric.values)
        .where(models.Metric.attempt_id == attempt.id)
        .order_by(models.Metric.id.desc())
        .limit(_METRICS)
    ).all()
    for number, step, values in reversed(rows):
        progress.add_metrics(number, step, json.loads(values))
    return progress
