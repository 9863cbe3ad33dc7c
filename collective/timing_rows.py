"""What the step clock takes in and gives out; times in monotonic seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from collective.timing_intervals import Interval

#: `Tail.backward_end` of a backward that goes on
RUNNING = float("inf")


class Timing(Protocol):
    """When one collective was issued, began, and was done; a `collective.group.Work.timing`."""

    @property
    def issued(self) -> float: ...
    @property
    def started(self) -> float | None: ...
    @property
    def done(self) -> float | None: ...
    @property
    def waited(self) -> float: ...
    @property
    def sent(self) -> int: ...


@dataclass(slots=True)
class Row:
    """One step, or one phase; seconds, but for `at`: Unix time of its end."""

    step: int
    label: str
    at: float
    total: float = 0.0
    data: float = 0.0
    compute: float = 0.0
    exposed: float = 0.0
    optimizer: float = 0.0
    communication: float = 0.0
    waited: float = 0.0
    sent: int = 0


@dataclass(slots=True)
class Tail:
    """The collectives that one backward issued, and when that backward had nothing else to do."""

    last_issue: float = 0.0
    #: `RUNNING` until it is known; 0 where the end of a backward cannot be seen
    backward_end: float = 0.0
    timings: list[Timing] = field(default_factory=list)

    def interval(self, now: float) -> Interval:
        """When the thread that trains stood still for them, as far as is known."""
        stop = max((timing.done or now for timing in self.timings), default=0.0)
        return max(self.last_issue, self.backward_end), stop
