"""What agents spool: stored at most once, in batches over all nodes, acknowledged after commit."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import insert, select, update
from sqlalchemy.orm import Session

from api import models
from api.cluster import Connection, NodeState
from api.logs import LogFiles, cut_mark
from api.progress import plain
from api.settings import Settings
from api.steps import Columns, UnevenColumns, columns_of, pack
from api.storage import Storage, StorageUnavailable
from collective.messages import Ack, LogChunk, RankState, Spooled

log = logging.getLogger("unisono.ingest")

#: most entries of one transaction, so that acknowledgements keep flowing
_BATCH = 2048
#: seconds between tries while the database takes nothing
RETRY = 2.0


@dataclass
class Arrived:
    """One entry, and what storing it found out."""

    node: NodeState
    connection: Connection
    entry: Spooled
    #: when it was spooled, on this server's clock
    at: float
    stored: bool = False
    columns: Columns | None = None
    metric_id: int = 0
    log_text: bytes = b""
    #: place of `log_text` in the stored stream
    log_offset: int = 0


@dataclass
class Rows:
    """What one transaction writes at its end, many rows at a time."""

    streams: dict[tuple[str, int, str], models.LogStream] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    metrics: list[tuple[Arrived, models.Metric]] = field(default_factory=list)


class Ingest:
    """Stores spool entries and hands them on once they are committed."""

    def __init__(
        self,
        settings: Settings,
        storage: Storage,
        files: LogFiles,
        apply: Callable[[Arrived], None],
    ) -> None:
        self._settings = settings
        self._storage = storage
        self._files = files
        self._apply = apply
        self._waiting: list[Arrived] = []
        self._pending: dict[str, int] = {}
        self._arrived = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        # Used in the writer's thread only.
        self._ranks: dict[str, dict[int, str]] = {}

    def start(self) -> None:
        """Begin to store."""
        self._task = asyncio.create_task(self._run(), name="ingest")

    async def stop(self) -> None:
        """Stop; what is not stored yet comes again from the agents."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def add(self, node: NodeState, connection: Connection, entry: Spooled) -> None:
        """Queue an entry of a node's spool."""
        waiting = self._pending.get(node.id, 0) + 1
        # Twice the window: after a reconnect what still waits may come a second time.
        if waiting > 2 * self._settings.spool_window:
            log.warning("node %s sends more than its window: disconnected", node.name)
            connection.close()
            return
        self._pending[node.id] = waiting
        self._waiting.append(Arrived(node, connection, entry, entry.at + node.skew))
        self._arrived.set()

    async def acknowledged(self, node_id: str) -> int:
        """Highest number stored of a node, after all that was queued before."""
        return await self._storage.write(lambda s: self._known(s, node_id))

    async def _run(self) -> None:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._waiting:
                batch, self._waiting = self._waiting[:_BATCH], self._waiting[_BATCH:]
                await self._store(batch)
                self._finish(batch)

    async def _store(self, batch: list[Arrived]) -> None:
        told = False
        while True:
            try:
                await self._storage.write(lambda s: self._write(s, batch))
                return
            except StorageUnavailable as error:
                if not told:
                    log.error("what agents send waits until it can be stored: %s", error)
                told = True
                await asyncio.sleep(RETRY)
            except Exception:
                # One entry that the database refuses must not hold up all others for ever.
                log.exception("a batch of %d spool entries was refused", len(batch))
                break
        for arrived in batch:
            try:
                await self._storage.write(functools.partial(self._write, batch=[arrived]))
            except StorageUnavailable:
                await self._store([arrived])
            except Exception:
                log.exception(
                    "spool entry %d of node %s is left out",
                    arrived.entry.number,
                    arrived.node.name,
                )
                await self._storage.write(functools.partial(self._skip, arrived=arrived))

    def _finish(self, batch: list[Arrived]) -> None:
        last: dict[str, Arrived] = {}
        for arrived in batch:
            self._pending[arrived.node.id] -= 1
            last[arrived.node.id] = arrived
            if arrived.stored:
                self._apply(arrived)
        for arrived in last.values():
            arrived.connection.send(Ack(number=arrived.entry.number))

    # --- in the writer's thread ---------------------------------------------------------

    def forget(self, attempt: str) -> None:
        """An attempt is deleted: what still comes of it is nobody's."""
        self._ranks.pop(attempt, None)

    def _known(self, session: Session, node_id: str) -> int:
        return session.get_one(models.Node, node_id).acknowledged

    def _skip(self, session: Session, arrived: Arrived) -> None:
        session.get_one(models.Node, arrived.node.id).acknowledged = arrived.entry.number

    def _write(self, session: Session, batch: list[Arrived]) -> None:
        nodes = {arrived.node.id for arrived in batch}
        known = select(models.Node.id, models.Node.acknowledged).where(models.Node.id.in_(nodes))
        acknowledged = {row.id: row.acknowledged for row in session.execute(known)}
        rows = Rows()
        with session.no_autoflush:
            for arrived in batch:
                arrived.stored = False
                if arrived.entry.number <= acknowledged[arrived.node.id]:
                    continue
                acknowledged[arrived.node.id] = arrived.entry.number
                arrived.stored = self._write_entry(session, arrived, rows)
        session.flush()
        if rows.steps:
            session.execute(insert(models.StepChunk), rows.steps)
        session.execute(
            update(models.Node),
            [{"id": node, "acknowledged": number} for node, number in acknowledged.items()],
        )
        for arrived, metric in rows.metrics:
            arrived.metric_id = metric.id

    def _write_entry(self, session: Session, arrived: Arrived, rows: Rows) -> bool:
        entry = arrived.entry
        if entry.attempt_over is not None:
            return self._attempt_over(session, arrived, entry.attempt_over.attempt)
        first = entry.log or entry.steps or entry.metrics
        part = first or entry.rank or entry.failure or entry.report
        if part is None:
            log.warning("spool entry %d of node %s is empty", entry.number, arrived.node.name)
            return False
        if self._members(session, part.attempt).get(part.rank) != arrived.node.name:
            log.warning(
                "node %s tells of rank %d of attempt %s, which is not its own",
                arrived.node.name,
                part.rank,
                part.attempt,
            )
            return False
        if entry.log is not None:
            self._log(session, arrived, entry.log, rows.streams)
        elif entry.steps is not None:
            try:
                arrived.columns = columns_of(entry.steps)
            except UnevenColumns as error:
                log.warning("node %s: %s", arrived.node.name, error)
                return False
            steps = entry.steps.step
            if steps:
                rows.steps.append(
                    {
                        "attempt_id": part.attempt,
                        "rank": part.rank,
                        "first_step": steps[0],
                        "last_step": steps[-1],
                        "data": pack(arrived.columns),
                    }
                )
        elif entry.metrics is not None:
            metric = models.Metric(
                attempt_id=part.attempt,
                rank=part.rank,
                step=entry.metrics.step,
                at=arrived.at,
                values=clean(json.dumps(entry.metrics.values)),
            )
            session.add(metric)
            rows.metrics.append((arrived, metric))
        elif entry.rank is not None:
            return _rank_state(session, arrived, entry.rank)
        elif entry.failure is not None:
            failure = entry.failure
            session.add(
                models.Failure(
                    attempt_id=failure.attempt,
                    rank=failure.rank,
                    kind=clean(failure.kind)[:200],
                    message=clean(failure.message),
                    traceback=clean(failure.traceback),
                    culprit=failure.culprit,
                    at=arrived.at,
                )
            )
        elif entry.report is not None:
            row = session.get_one(models.Rank, (part.attempt, part.rank))
            row.report = row.report | plain(json.loads(clean(json.dumps(entry.report.values))))
        return True

    def _members(self, session: Session, attempt: str) -> dict[int, str]:
        known = self._ranks.get(attempt)
        if known is None:
            rows = session.execute(
                select(models.Rank.rank, models.Rank.node).where(models.Rank.attempt_id == attempt)
            )
            known = {row.rank: row.node for row in rows}
            if known:
                self._ranks[attempt] = known
                while len(self._ranks) > 256:
                    del self._ranks[next(iter(self._ranks))]
        return known

    def _log(
        self,
        session: Session,
        arrived: Arrived,
        chunk: LogChunk,
        streams: dict[tuple[str, int, str], models.LogStream],
    ) -> None:
        key = (chunk.attempt, chunk.rank, chunk.stream)
        row = streams.get(key) or session.get(models.LogStream, key)
        if row is None:
            row = models.LogStream(
                attempt_id=chunk.attempt,
                rank=chunk.rank,
                stream=chunk.stream,
                next_offset=0,
                size=0,
            )
            session.add(row)
        streams[key] = row
        dropped = max(chunk.cut, chunk.offset - row.next_offset)
        data = chunk.text.encode("utf-8", "replace")
        if dropped > 0:
            data = cut_mark(dropped) + data
        arrived.log_text, arrived.log_offset = data, row.size
        row.size = self._files.write(chunk.attempt, chunk.rank, chunk.stream, row.size, data)
        row.next_offset = max(row.next_offset, chunk.offset + chunk.size)

    def _attempt_over(self, session: Session, arrived: Arrived, attempt: str) -> bool:
        row = session.get(models.AttemptNode, (attempt, arrived.node.id))
        if row is None or row.state in ("over", "lost"):
            return False
        row.state = "over"
        return True


def _rank_state(session: Session, arrived: Arrived, state: RankState) -> bool:
    row = session.get_one(models.Rank, (state.attempt, state.rank))
    if row.state in ("exited", "failed-to-start"):
        return False
    if state.state == "running":
        row.started_at = row.started_at or arrived.at
    else:
        row.ended_at = arrived.at
        row.exit_code, row.signal = state.exit_code, state.signal
        row.message = clean(state.message) if state.message is not None else None
    # A rank that was counted as lost stays so in its job, but what it did is worth knowing.
    row.state = state.state
    row.pid = state.pid if state.pid is not None else row.pid
    return True


def clean(text: str) -> str:
    """Text that every database takes: no NUL, no half surrogate pairs."""
    text = text.replace("\x00", "\ufffd").replace("\\u0000", "\\ufffd")
    return text.encode("utf-8", "replace").decode()
