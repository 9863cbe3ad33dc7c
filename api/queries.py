"""What REST and pages show of the past and the present, read from the database and memory."""

from __future__ import annotations

import base64
import json
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from api import models
from api.control import Control
from api.errors import Problem, not_found
from api.jobs import show, summary
from api.steps import Columns, cut, merge, unpack

#: beyond what a database's integers hold
MOST = 1 << 62
#: of a snapshot, as docs/protocols.md says
SNAPSHOT_STEPS = 240
SNAPSHOT_RANKS = 64
SNAPSHOT_LOG_RANKS = 16
SNAPSHOT_LOG_BYTES = 8 << 10


def encode_cursor(value: int | list[Any]) -> str:
    """A place in a list, opaque to callers."""
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


def decode_cursor(cursor: str | None, kind: type) -> Any:
    """The place that a cursor names; None for none.

    Raises:
        Problem: it is not one of this list.
    """
    if cursor is None:
        return None
    try:
        value = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except ValueError:
        value = None
    fits = not isinstance(value, int) or abs(value) < MOST
    if not isinstance(value, kind) or isinstance(value, bool) or not fits:
        raise Problem(
            422, "cursor-invalid", f"cursor {cursor!r:.60} is not a next_cursor of this list"
        )
    return value


def page_size(control: Control, limit: int | None, default: int = 50) -> int:
    """The number of items of a page.

    Raises:
        Problem: outside the allowed range.
    """
    most = control.settings.page_limit
    size = min(default, most) if limit is None else limit
    if not 1 <= size <= most:
        raise Problem(422, "limit-invalid", f"limit is {limit}; it must be between 1 and {most}")
    return size


# --- jobs -------------------------------------------------------------------------------


def _job(control: Control, row: models.Job) -> dict[str, Any]:
    live = control.orchestrator.find(row.id)
    return live.shown() if live is not None else show(row, None, row.progress)


async def list_jobs(
    control: Control,
    state: str | None = None,
    cursor: str | None = None,
    limit: int | None = None,
) -> dict[str, Any]:
    """A page of summaries of jobs, newest first."""
    size, before = page_size(control, limit), decode_cursor(cursor, int)
    query = select(models.Job).order_by(models.Job.number.desc()).limit(size + 1)
    if state is not None:
        query = query.where(models.Job.state == state)
    if before is not None:
        query = query.where(models.Job.number < before)
    rows = await control.storage.read(lambda s: s.scalars(query).all())
    more = encode_cursor(rows[size - 1].number) if len(rows) > size else None
    items = [summary(_job(control, row)) for row in rows[:size]]
    return {"items": items, "next_cursor": more}


async def get_job(control: Control, job_id: str) -> dict[str, Any]:
    """One job.

    Raises:
        Problem: there is none.
    """
    return _job(control, await job_row(control, job_id))


async def job_row(control: Control, job_id: str) -> models.Job:
    """A job's row.

    Raises:
        Problem: there is none.
    """
    row = await control.storage.read(
        lambda s: s.scalar(select(models.Job).where(models.Job.id == job_id))
    )
    if row is None:
        raise not_found("job", job_id)
    return row


async def list_ranks(
    control: Control, job_id: str, cursor: str | None = None, limit: int | None = None
) -> dict[str, Any]:
    """A page of the ranks of a job's attempt, by number."""
    job = await job_row(control, job_id)
    size, after = page_size(control, limit), decode_cursor(cursor, int)
    if job.attempt is None:
        return {"items": [], "next_cursor": None}
    attempt = job.attempt
    first = 0 if after is None else after + 1
    rows = await control.storage.read(lambda s: _ranks(s, attempt, first, size + 1))
    more = encode_cursor(rows[size - 1]["rank"]) if len(rows) > size else None
    return {"items": rows[:size], "next_cursor": more}


def _ranks(session: Session, attempt: str, first: int, limit: int) -> list[dict[str, Any]]:
    names = "rank node local_rank device state pid exit_code signal message started_at ended_at"
    rank, chunk, stream = models.Rank, models.StepChunk, models.LogStream
    # One look into the index for each rank; to group millions of chunks would take seconds.
    newest = (
        select(chunk.last_step)
        .where(chunk.attempt_id == attempt, chunk.rank == rank.rank)
        .order_by(chunk.last_step.desc())
        .limit(1)
        .scalar_subquery()
    )
    wanted = (rank.attempt_id == attempt, rank.rank >= first)
    rows = session.execute(
        select(rank, newest).where(*wanted).order_by(rank.rank).limit(limit)
    ).all()
    logs: dict[int, dict[str, int]] = {}
    if rows:
        last = rows[-1][0].rank
        for entry in session.scalars(
            select(stream).where(stream.attempt_id == attempt, stream.rank.between(first, last))
        ):
            logs.setdefault(entry.rank, {})[entry.stream] = entry.size
    return [
        {name: getattr(row, name) for name in names.split()}
        | {
            "report": row.report,
            "step": step,
            "logs": {"stdout": 0, "stderr": 0} | logs.get(row.rank, {}),
        }
        for row, step in rows
    ]


# --- steps and metrics ------------------------------------------------------------------


async def read_steps(
    control: Control,
    job_id: str,
    from_step: int = 0,
    limit: int | None = None,
    rank: int | None = None,
) -> dict[str, Any]:
    """Steps of each rank from a step on; negative: the last ones."""
    job = await job_row(control, job_id)
    most = control.settings.step_limit
    size = min(1000, most) if limit is None else limit
    if not 1 <= size <= most:
        raise Problem(422, "limit-invalid", f"limit is {limit}; it must be between 1 and {most}")
    attempt = job.attempt
    if attempt is None:
        return {"ranks": [], "next_step": None}
    return await control.storage.read(lambda s: _steps(s, attempt, from_step, size, rank))


def _steps(
    session: Session, attempt: str, from_step: int, limit: int, only: int | None, most: int = 4096
) -> dict[str, Any]:
    chunk, numbers = models.StepChunk, models.Rank.rank
    query = select(numbers).where(models.Rank.attempt_id == attempt).order_by(numbers).limit(most)
    ranks = session.scalars(query).all() if only is None else [only]
    result, following = [], []
    for rank in ranks:
        mine = select(chunk.data).where(chunk.attempt_id == attempt, chunk.rank == rank)
        # Read until there is enough: a long job has thousands of chunks of each rank.
        mine = mine.execution_options(yield_per=16)
        columns: Columns = {}
        if from_step < 0:
            wanted = min(-from_step, limit)
            parts: list[Columns] = []
            newest = mine.order_by(chunk.last_step.desc(), chunk.id.desc())
            with session.scalars(newest) as blobs:
                for blob in blobs:
                    parts.insert(0, unpack(blob))
                    if sum(len(part["step"]) for part in parts) >= wanted:
                        break
            for part in parts:
                merge(columns, part)
            count = len(columns.get("step", []))
            columns = cut(columns, max(0, count - wanted), count)
        else:
            later = mine.where(chunk.last_step >= from_step).order_by(chunk.last_step, chunk.id)
            with session.scalars(later) as blobs:
                for blob in blobs:
                    merge(columns, unpack(blob))
                    if len(columns["step"]) > limit + 4096:
                        break
            start = next(
                (i for i, step in enumerate(columns.get("step", [])) if step >= from_step), 0
            )
            if len(columns.get("step", [])) > start + limit:
                following.append(columns["step"][start + limit])
            columns = cut(columns, start, start + limit)
        if columns.get("step"):
            result.append({"rank": rank} | columns)
    return {"ranks": result, "next_step": min(following) if following else None}


async def read_metrics(
    control: Control,
    job_id: str,
    rank: int | None = None,
    after: int = 0,
    limit: int | None = None,
) -> dict[str, Any]:
    """Rows of metrics behind one of them; a negative `after`: the last ones."""
    job = await job_row(control, job_id)
    size = 1000 if limit is None else limit
    if not 1 <= size <= 10_000:
        raise Problem(422, "limit-invalid", f"limit is {limit}; it must be between 1 and 10000")
    attempt = job.attempt
    if attempt is None:
        return {"items": [], "next_after": None}
    items = await control.storage.read(lambda s: _metrics(s, attempt, rank, after, size + 1))
    if after < 0:
        return {"items": items[1:] if len(items) > size else items, "next_after": None}
    more = items[size - 1]["id"] if len(items) > size else None
    return {"items": items[:size], "next_after": more}


def _metrics(
    session: Session, attempt: str, rank: int | None, after: int, limit: int
) -> list[dict[str, Any]]:
    metric = models.Metric
    query = select(metric).where(metric.attempt_id == attempt)
    if rank is not None:
        query = query.where(metric.rank == rank)
    if after < 0:
        rows = session.scalars(query.order_by(metric.id.desc()).limit(min(-after, limit))).all()
        rows = list(reversed(rows))
    else:
        rows = session.scalars(
            query.where(metric.id > after).order_by(metric.id).limit(limit)
        ).all()
    return [
        {
            "id": row.id,
            "rank": row.rank,
            "step": row.step,
            "at": row.at,
            "values": json.loads(row.values),
        }
        for row in rows
    ]


async def log_size(control: Control, job_id: str, rank: int, stream: str) -> tuple[str | None, int]:
    """The attempt of a job and how much of one output stream is stored.

    Raises:
        Problem: there is no such job or rank.
    """
    job = await job_row(control, job_id)
    if job.attempt is None:
        return None, 0
    attempt = job.attempt
    if job.world_size is None or not 0 <= rank < job.world_size:
        raise not_found("rank", str(rank))
    row = await control.storage.read(lambda s: s.get(models.LogStream, (attempt, rank, stream)))
    return attempt, row.size if row is not None else 0


# --- snapshots of event streams ---------------------------------------------------------


async def job_snapshot(control: Control, job_id: str) -> dict[str, Any]:
    """The first frame of a job's event stream."""
    job = await job_row(control, job_id)
    shown = _job(control, job)
    attempt = shown["attempt"]
    if attempt is None:
        return {"job": shown, "ranks": [], "steps": [], "metrics": [], "logs": []}

    def work(session: Session) -> dict[str, Any]:
        steps = _steps(session, attempt, -SNAPSHOT_STEPS, SNAPSHOT_STEPS, None, SNAPSHOT_RANKS)
        return {
            "ranks": _ranks(session, attempt, 0, 4096),
            "steps": steps["ranks"],
            "metrics": _metrics(session, attempt, None, -SNAPSHOT_STEPS, SNAPSHOT_STEPS),
            "logs": _tails(control, session, attempt),
        }

    return {"job": shown} | await control.storage.read(work)


def _tails(control: Control, session: Session, attempt: str) -> list[dict[str, Any]]:
    tails = []
    for row in session.scalars(
        select(models.LogStream)
        .where(models.LogStream.attempt_id == attempt, models.LogStream.rank < SNAPSHOT_LOG_RANKS)
        .order_by(models.LogStream.rank, models.LogStream.stream.desc())
    ):
        start = max(0, row.size - SNAPSHOT_LOG_BYTES)
        pieces = control.files.read(
            attempt, row.rank, row.stream, row.size, start, SNAPSHOT_LOG_BYTES
        )
        data = b"".join(piece.data for piece in pieces)
        skip = 0
        # The tail may begin within a character: skip its continuation bytes (10xxxxxx).
        while start and skip < len(data) and data[skip] & 0xC0 == 0x80:
            skip += 1
        tails.append(
            {
                "rank": row.rank,
                "stream": row.stream,
                "offset": start + skip,
                "next_offset": row.size,
                "text": data[skip:].decode("utf-8", "replace"),
            }
        )
    return tails


async def cluster_snapshot(control: Control) -> dict[str, Any]:
    """The first frame of the cluster's event stream."""
    jobs = (await list_jobs(control, limit=min(50, control.settings.page_limit)))["items"]
    return {"nodes": list_nodes(control), "jobs": jobs}


def list_nodes(control: Control) -> list[dict[str, Any]]:
    """All nodes, in the order in which they joined."""
    return [node.shown() for node in control.cluster.by_id.values()]
