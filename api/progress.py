"""How far a job is: computed from steps and metrics as they come, in bounded memory."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any, NamedTuple

from api.steps import Columns

#: steps of each rank that rates and medians look at
WINDOW = 256
#: reports of `parameters_sha256` that are compared before the oldest is given up
_DIGESTS = 64

Value = float | int | str | bool


#: share of a step from which on a loss is worth a word
_MATTERS = 0.1


class _Rank:
    __slots__ = ("exposed", "figures", "own", "samples", "step", "total")

    def __init__(self) -> None:
        self.step: int | None = None
        self.total: deque[float] = deque(maxlen=WINDOW)
        self.exposed: deque[float] = deque(maxlen=WINDOW)
        #: total − exposed: what the rank did itself
        self.own: deque[float] = deque(maxlen=WINDOW)
        #: (step, samples) as reported
        self.samples: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self.figures: _Figures | None = None

    def window(self) -> _Figures:
        """What the window comes to: worked out once after each change, since pages ask often."""
        if self.figures is None:
            own = statistics.median(self.own) if self.own else 0.0
            samples = list(self.samples)
            span = samples[-1][0] - samples[0][0] if samples else 0
            # A report covers the steps since the one before it.
            each = sum(number for _, number in samples[1:]) / span if span > 0 else 0.0
            self.figures = _Figures(sum(self.total), sum(self.exposed), own, each)
        return self.figures


class _Figures(NamedTuple):
    total: float
    exposed: float
    #: median
    own: float
    #: per step
    samples: float


class Progress:
    """The `progress` of a job on `world_size` ranks."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._ranks: dict[int, _Rank] = {}
        self._metric_step: int | None = None
        self._last: dict[str, tuple[int, Value]] = {}
        self._digests: dict[int | None, dict[int, str]] = {}
        self._identical: bool | None = None

    def add_steps(self, rank: int, columns: Columns) -> None:
        """Take in steps of one rank; warm-up steps count for the position only."""
        entry = self._ranks.setdefault(rank, _Rank())
        entry.figures = None
        for step, total, exposed, label in zip(
            columns["step"], columns["total"], columns["exposed"], columns["label"], strict=True
        ):
            entry.step = step if entry.step is None else max(entry.step, step)
            if label == "step":
                entry.total.append(total)
                entry.exposed.append(exposed)
                entry.own.append(total - exposed)

    def add_metrics(self, rank: int, step: int | None, values: dict[str, Value]) -> None:
        """Take in what the program reported at one step of one rank."""
        if step is not None:
            self._metric_step = max(step, self._metric_step or 0)
        for name, value in values.items():
            known = self._last.get(name)
            # The lowest rank that reports a value speaks for it.
            if known is None or rank <= known[0]:
                self._last[name] = (rank, value)
        samples = values.get("samples")
        if step is not None and isinstance(samples, int | float):
            entry = self._ranks.setdefault(rank, _Rank())
            entry.figures = None
            entry.samples.append((step, float(samples)))
        digest = values.get("parameters_sha256")
        if isinstance(digest, str):
            self._add_digest(rank, step, digest)

    def _add_digest(self, rank: int, step: int | None, digest: str) -> None:
        at_step = self._digests.setdefault(step, {})
        at_step[rank] = digest
        if len(at_step) == self.world_size:
            self._identical = len(set(at_step.values())) == 1
        while len(self._digests) > _DIGESTS:
            del self._digests[next(iter(self._digests))]

    def step_of(self, rank: int) -> int | None:
        """The last step of a rank."""
        entry = self._ranks.get(rank)
        return entry.step if entry is not None else None

    def slowest(self) -> int | None:
        """The rank with the largest median of its own time; None below two ranks with steps."""
        medians = {rank: entry.window().own for rank, entry in self._ranks.items() if entry.own}
        if len(medians) < 2:
            return None
        return max(sorted(medians), key=lambda rank: medians[rank])

    def held_back_by(self) -> str | None:
        """What steps lose most to: ``rank 3``, ``communication``, or None where neither matters.

        A slow rank costs what it is slower by than the others, and waits least itself; what even
        that one waits is the communication's own.
        """
        slowest = self.slowest()
        timed = {rank: e.window() for rank, e in self._ranks.items() if e.own}
        if slowest is None:
            return None
        others = [figures.own for rank, figures in timed.items() if rank != slowest]
        behind = timed[slowest].own - statistics.median(others)
        waits = [timed[rank].exposed / len(self._ranks[rank].own) for rank in timed]
        step = statistics.median(timed[rank].total / len(self._ranks[rank].own) for rank in timed)
        if max(behind, min(waits)) < _MATTERS * step:
            return None
        return f"rank {slowest}" if behind >= min(waits) else "communication"

    def snapshot(self) -> dict[str, Any]:
        """The `progress` object of a job."""
        timed = [entry for entry in self._ranks.values() if entry.total]
        total = sum(entry.window().total for entry in timed)
        rates = [len(entry.total) / spent for entry in timed if (spent := entry.window().total) > 0]
        rate = statistics.median(rates) if rates else None
        steps = [entry.step for entry in self._ranks.values() if entry.step is not None]
        if self._metric_step is not None and not steps:
            steps = [self._metric_step]
        return {
            "step": max(steps) if steps else None,
            "steps_total": self._number("steps_total"),
            "steps_per_second": rate,
            "loss": self._number("loss"),
            "samples_per_second": self._samples_per_second(rate),
            "exposed_share": sum(e.window().exposed for e in timed) / total if total > 0 else None,
            "slowest_rank": self.slowest(),
            "held_back_by": self.held_back_by(),
            "accuracy": self._number("accuracy"),
            "replicas_identical": self._identical,
        }

    def _number(self, name: str) -> Any:
        value = self._last.get(name, (0, None))[1]
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return plain(value)

    def _samples_per_second(self, rate: float | None) -> float | None:
        reported = self._number("samples_per_second")
        if isinstance(reported, int | float):
            return float(reported)
        if rate is None:
            return None
        return sum(entry.window().samples for entry in self._ranks.values()) * rate or None


def plain(value: Any) -> Any:
    """A value as JSON can hold it: NaN and the infinities as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return value
