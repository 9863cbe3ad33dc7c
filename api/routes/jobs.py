"""Jobs: start, list, show, cancel, and what their ranks tell."""

from __future__ import annotations

import functools
import hashlib
import json
import secrets
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from sqlalchemy import select
from sqlalchemy.orm import Session

from api import examples, models, queries
from api.auth import Principal
from api.control import Control
from api.deps import ControlDep, Operator, Viewer
from api.errors import Problem
from api.events import encode
from api.examples import answer
from api.jobs import show
from api.logs import Piece
from api.schemas import Job, JobPage, JobRequest, RankPage
from collective.messages import MAX_MESSAGE

router = APIRouter(prefix="/jobs", tags=["jobs"])
State = Literal[
    "queued", "starting", "running", "cancelling", "completed", "failed", "cancelled", "lost"
]
#: as the header, for a browser's stream that was closed and is opened again by the page
LastEventId = Annotated[str | None, Query(max_length=100)]
Number = Annotated[int, Query(gt=-queries.MOST, lt=queries.MOST)]
RankNumber = Annotated[int | None, Query(ge=0, lt=1 << 31)]
#: a job travels to its nodes in one message, whose size is bounded
SPEC_LIMIT = MAX_MESSAGE - (64 << 10)
Cursor = Annotated[str | None, Query(max_length=200)]


async def start_job(
    control: Control, request: JobRequest, who: Principal, key: str | None = None
) -> tuple[dict[str, Any], bool]:
    """Store and queue a job; it, and whether an earlier call with the same key started it.

    Raises:
        Problem: its bundle is unknown, or the key was used for another job.
    """
    spec = request.model_dump(exclude={"name"}, exclude_none=True)
    size = len(json.dumps(spec, ensure_ascii=False).encode())
    if size > SPEC_LIMIT:
        raise Problem(
            422,
            "job-too-large",
            f"the arguments and variables of this job take {size} bytes, of {SPEC_LIMIT} that it "
            "may have: put them into a file of the bundle",
        )
    digest = hashlib.sha256(
        json.dumps([request.title(), spec], sort_keys=True).encode("utf-8", "surrogatepass")
    ).hexdigest()
    now = time.time()

    def work(session: Session) -> tuple[models.Job, bool]:
        if key is not None:
            used = session.get(models.Idempotency, (who.id, key))
            if used is not None:
                if used.digest != digest:
                    raise Problem(
                        409,
                        "idempotency-key-reused",
                        f"Idempotency-Key {key!r:.60} started job {used.job_id} with another "
                        "body: use a new key for a new job",
                    )
                query = select(models.Job).where(models.Job.id == used.job_id)
                return session.scalars(query).one(), True
        if request.bundle is not None and session.get(models.Bundle, request.bundle) is None:
            raise Problem(422, "bundle-unknown", f"bundle {request.bundle} has not been uploaded")
        row = models.Job(
            id=f"j-{secrets.token_hex(6)}",
            name=request.title(),
            state="queued",
            created_at=now,
            spec=spec,
            nodes=[],
            consequences=[],
            created_by=who.name,
        )
        session.add(row)
        if key is not None:
            session.add(models.Idempotency(owner=who.id, key=key, digest=digest, job_id=row.id))
        session.flush()
        return row, False

    row, replayed = await control.storage.write(work)
    if replayed:
        live = control.orchestrator.jobs.get(row.id)
        return live.shown() if live else show(row, None, row.progress), True
    job = control.orchestrator.admit(row)
    control.orchestrator.schedule()
    return job.shown(), False


@router.post("", status_code=201, response_model=Job)
async def post_job(
    control: ControlDep,
    who: Operator,
    request: JobRequest,
    response: Response,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=200)] = None,
) -> Any:
    """Start a job; it runs as soon as there is room for it."""
    job, replayed = await start_job(control, request, who, idempotency_key)
    if replayed:
        response.headers["Idempotency-Replayed"] = "true"
    response.headers["Location"] = f"/api/v1/jobs/{job['id']}"
    return job


@router.get("", response_model=JobPage)
async def get_jobs(
    control: ControlDep,
    _who: Viewer,
    state: State | None = None,
    cursor: Cursor = None,
    limit: int | None = None,
) -> Any:
    """Jobs, newest first."""
    return await queries.list_jobs(control, state, cursor, limit)


@router.get("/{job_id}", response_model=Job)
async def get_job(control: ControlDep, _who: Viewer, job_id: str) -> Any:
    """One job."""
    return await queries.get_job(control, job_id)


@router.post("/{job_id}/cancel", status_code=202, response_model=Job)
async def cancel_job(control: ControlDep, who: Operator, job_id: str) -> Any:
    """Cancel a job; harmless when it is being cancelled, or over."""
    job = await control.orchestrator.cancel(job_id, who.name)
    return job if job is not None else await queries.get_job(control, job_id)


@router.get("/{job_id}/ranks", response_model=RankPage)
async def get_ranks(
    control: ControlDep,
    _who: Viewer,
    job_id: str,
    cursor: Cursor = None,
    limit: int | None = None,
) -> Any:
    """The ranks of a job's attempt."""
    return await queries.list_ranks(control, job_id, cursor, limit)


@router.get("/{job_id}/steps", responses=answer(examples.STEPS))
async def get_steps(
    control: ControlDep,
    _who: Viewer,
    job_id: str,
    from_step: Number = 0,
    limit: int | None = None,
    rank: RankNumber = None,
) -> Response:
    """Step timings in columns, rank by rank."""
    return await _json(control, await queries.read_steps(control, job_id, from_step, limit, rank))


@router.get("/{job_id}/metrics", responses=answer(examples.METRICS))
async def get_metrics(
    control: ControlDep,
    _who: Viewer,
    job_id: str,
    rank: RankNumber = None,
    after: Number = 0,
    limit: int | None = None,
) -> Response:
    """What the program reported, in order of arrival."""
    return await _json(control, await queries.read_metrics(control, job_id, rank, after, limit))


async def _json(control: Control, found: dict[str, Any]) -> Response:
    """An answer of megabytes, made in a reader's thread, for the event loop goes on meanwhile."""
    text = await control.storage.run(functools.partial(encode, found))
    return Response(text, media_type="application/json")


@router.get("/{job_id}/ranks/{rank}/logs/{stream}", response_class=StreamingResponse)
async def get_log(
    control: ControlDep,
    _who: Viewer,
    job_id: str,
    rank: int,
    stream: Literal["stdout", "stderr"],
    offset: Number = 0,
    limit: Annotated[int | None, Query(ge=0)] = None,
    follow: bool = False,
) -> StreamingResponse:
    """Output of a rank as it was stored: a range of it, or all of it as it comes."""
    attempt, size = await queries.log_size(control, job_id, rank, stream)
    start = max(0, size + offset) if offset < 0 else min(offset, size)
    end = size if limit is None else min(size, start + limit)
    headers = {"Unisono-Offset": str(start), "Unisono-Size": str(size)}
    if not follow:
        headers["Unisono-Next-Offset"] = str(end)
    return StreamingResponse(
        _log_bytes(control, job_id, attempt, rank, stream, start, None if follow else end),
        headers=headers,
        media_type="text/plain; charset=utf-8",
    )


async def _log_bytes(
    control: Control,
    job_id: str,
    attempt: str | None,
    rank: int,
    stream: str,
    offset: int,
    end: int | None,
) -> AsyncIterator[bytes]:
    """Stored bytes up to `end`, block by block; None: until the rank's output is over."""
    while True:
        news = control.follow(attempt or job_id, rank, stream) if end is None else None
        over = job_id not in control.orchestrator.jobs
        if end is None:
            attempt, size = await queries.log_size(control, job_id, rank, stream)
        else:
            size = end
        while attempt is not None and offset < size:
            piece = await control.storage.run(
                functools.partial(_next_piece, control, attempt, rank, stream, size, offset)
            )
            if piece is None:
                break
            offset = piece.next_offset
            yield piece.data
        if news is None or over or control.closing.is_set():
            return
        await news.wait()


def _next_piece(
    control: Control, attempt: str, rank: int, stream: str, size: int, offset: int
) -> Piece | None:
    return next(control.files.read(attempt, rank, stream, size, offset, size - offset), None)


@router.get("/{job_id}/events", response_class=StreamingResponse)
async def get_events(
    request: Request,
    control: ControlDep,
    who: Viewer,
    job_id: str,
    last_event_id: LastEventId = None,
) -> StreamingResponse:
    """Server-sent events of one job."""
    await queries.job_row(control, job_id)
    return event_stream(
        control.hub.stream(
            control.channel_of(job_id),
            who,
            request.headers.get("last-event-id", last_event_id),
            lambda: queries.job_snapshot(control, job_id),
        )
    )


def event_stream(frames: AsyncIterator[str]) -> StreamingResponse:
    """An answer that goes on; proxies are asked not to gather it."""
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(frames, headers=headers, media_type="text/event-stream")
