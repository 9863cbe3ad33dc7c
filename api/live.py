"""Jobs as pages see them live: progress and the frames of each running job's event stream."""

from __future__ import annotations

from typing import Any

from api.events import Channel, Hub
from api.ingest import Arrived
from api.progress import Progress
from api.steps import Columns, merge

#: text of one stream that one frame carries; more is left out and can be fetched
_FRAME_TEXT = 16 << 10
_FRAME_METRICS = 1000


class LogDelta:
    """New text of one stream since the last frame: its end, where it was too much."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.data = bytearray()

    def add(self, offset: int, data: bytes) -> None:
        """Text that was stored at `offset`."""
        self.data += data
        excess = len(self.data) - _FRAME_TEXT
        if excess > 0:
            # Cut between characters: continuation bytes of UTF-8 are 10xxxxxx.
            while excess < len(self.data) and self.data[excess] & 0xC0 == 0x80:
                excess += 1
            del self.data[:excess]
        self.offset = offset + len(data) - len(self.data)


class LiveJob:
    """The live side of one job that is not over."""

    def __init__(self, hub: Hub, job_id: str) -> None:
        self.job_id = job_id
        self.progress: Progress | None = None
        self.channel = Channel(hub, self._compose)
        #: set by the orchestrator: the job, and its ranks by number, as pages show them
        self.show_job: Any = None
        self.show_rank: Any = None
        self._job = False
        self._ranks: set[int] = set()
        self._steps: dict[int, Columns] = {}
        self._metrics: list[dict[str, Any]] = []
        self._logs: dict[tuple[int, str], LogDelta] = {}
        #: stored bytes of each stream
        self.log_sizes: dict[tuple[int, str], int] = {}

    def job_changed(self) -> None:
        """State, cause or what it waits for changed."""
        self._job = True
        self.channel.touch()

    def rank_changed(self, rank: int) -> None:
        """A rank started or ended, or told facts."""
        if self.channel.wanted:
            self._ranks.add(rank)
        self.channel.touch()

    def take(self, arrived: Arrived) -> None:
        """Steps, metrics or text that have just been stored."""
        entry = arrived.entry
        wanted = self.channel.wanted
        if entry.steps is not None and arrived.columns is not None:
            if self.progress is not None:
                self.progress.add_steps(entry.steps.rank, arrived.columns)
            if wanted:
                merge(self._steps.setdefault(entry.steps.rank, {}), arrived.columns)
            self._job = True
        elif entry.metrics is not None:
            metrics = entry.metrics
            if self.progress is not None:
                self.progress.add_metrics(metrics.rank, metrics.step, metrics.values)
            if wanted and len(self._metrics) < _FRAME_METRICS:
                self._metrics.append(
                    {
                        "id": arrived.metric_id,
                        "rank": metrics.rank,
                        "step": metrics.step,
                        "at": arrived.at,
                        "values": metrics.values,
                    }
                )
            self._job = True
        elif entry.log is not None:
            key = (entry.log.rank, entry.log.stream)
            self.log_sizes[key] = arrived.log_offset + len(arrived.log_text)
            if not wanted:
                return
            delta = self._logs.setdefault(key, LogDelta(arrived.log_offset))
            delta.add(arrived.log_offset, arrived.log_text)
        self.channel.touch()

    def _rank(self, rank: int) -> dict[str, Any]:
        logs = {name: self.log_sizes.get((rank, name), 0) for name in ("stdout", "stderr")}
        step = self.progress.step_of(rank) if self.progress is not None else None
        return self.show_rank(rank) | {"step": step, "logs": logs}  # type: ignore[no-any-return]

    def _compose(self) -> dict[str, Any] | None:
        payload: dict[str, Any] = {}
        if self._job:
            payload["job"] = self.show_job()
        if self._ranks:
            payload["ranks"] = [self._rank(rank) for rank in sorted(self._ranks)]
        if self._steps:
            payload["steps"] = [{"rank": rank} | cols for rank, cols in self._steps.items()]
        if self._metrics:
            payload["metrics"] = self._metrics
        if self._logs:
            payload["logs"] = [
                {
                    "rank": rank,
                    "stream": stream,
                    "offset": delta.offset,
                    "next_offset": delta.offset + len(delta.data),
                    "text": delta.data.decode("utf-8", "replace"),
                }
                for (rank, stream), delta in self._logs.items()
            ]
        self._job, self._ranks, self._steps = False, set(), {}
        self._metrics, self._logs = [], {}
        return payload or None
