"""The clock of a rank's training steps: what each second of a step was spent on.

The clock is told when things happen (a forward starts, an optimizer steps, a collective is
issued and done, a thread is blocked on one) and cuts the time into rows, one per step.  It knows
nothing of torch; `collective.timing_hooks` feeds it.  All times are monotonic seconds.

**A step** ends when an optimizer has stepped and the next forward begins, counted back to the end
of that optimizer step; several optimizers that step with no forward between them belong to one
step.  Once a program calls `collective.step()`, only those calls end a step.  A step begins where
the one before it ended; the first begins with its first forward.  ``total`` is its length without
the phases inside it, and is the sum of four parts:

``data``
    from the step's begin to its first forward, without exposed communication: waiting for the
    next batch, and whatever else the loop does between two steps.
``exposed``
    the thread that trains stood still for communication: in a synchronous collective, in
    ``Work.wait()``, or after a backward (from the later of its end and its last bucket's issue)
    until the collectives that the backward issued were done.
``optimizer``
    inside ``Optimizer.step()``, without exposed communication.
``compute``
    the rest: forward and backward.

Two more figures are measured inside a step: ``communication``, during which at least one
collective was under way, hidden or not; and ``waited``, the part of ``exposed`` in which this rank
waited for the data of others to begin to arrive.

**A phase** ("eval", or any name given to `collective.phase`) is cut out of the step in which it
happens and gets a row of its own under its name, numbered like the last complete step.  A forward
without gradients, or in evaluation mode, of a module that training steps begin with starts the
phase "eval", which lasts until the next training forward.  Optimizer steps inside a phase are
part of the phase.

The first steps (`warmup` of them) carry the label ``warmup``: caches are cold, kernels are
compiled, memory grows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from collective.timing_intervals import Interval, intersection, length, union
from collective.timing_rows import RUNNING, Row, Tail, Timing

#: intervals kept in detail; above it the past is summed up early
MAX_DETAIL = 2048
#: backwards whose collectives may be under way at one time
MAX_TAILS = 16
_DATA, _COMPUTE, _OPTIMIZER = "data", "compute", "optimizer"
_STEP = frozenset((_DATA, _COMPUTE, _OPTIMIZER))
#: before the first step: belongs to nothing
_OUTSIDE = "outside"


class StepClock:
    """See the module's docstring.  Calls may come from any thread."""

    def __init__(
        self,
        emit: Callable[[Row], None],
        *,
        warmup: int = 5,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._emit = emit
        self._warmup = warmup
        self.now = now
        #: Unix time = monotonic time + offset
        self._offset = wall() - now()
        self._lock = threading.RLock()
        #: steps that are complete
        self.steps = 0
        #: called when a step may have ended without anything that confirms it yet
        self.stir: Callable[[], None] = lambda: None
        self._explicit = False
        #: whether the phase "eval" goes on that a forward without gradients began
        self.evaluating = False
        #: what each moment belongs to, from the mark's time to the next mark's
        self._marks: list[tuple[float, str]] = [(now(), _OUTSIDE)]
        #: end of the last optimizer step, when it may have been the step's end
        self._candidate: float | None = None
        #: optimizers that are stepping, the outermost first
        self._stepping: list[int] = []
        self._timings: list[Timing] = []
        self._blocked: list[Interval] = []
        self._tails: list[Tail] = []
        #: the open step under "", and phases under their names
        self._sums: dict[str, Row] = {}

    # --- what happens ---------------------------------------------------------------------

    def forward(self) -> bool:
        """A forward begins; whether it was the first of a training step."""
        with self._lock:
            now = self.now()
            self._close_candidate()
            region = self._region()
            if region == _OUTSIDE:
                self._settle(now)
            elif region != _DATA and not self.evaluating:
                return region in _STEP
            self._mark(now, _COMPUTE)
            if self.evaluating:
                self.evaluating = False
                self._phases_over(now)
            return True

    def evaluation(self) -> None:
        """A forward without gradients of the module that training steps begin with begins."""
        with self._lock:
            if self._region() == _DATA:
                self._close_candidate()
                self._mark(self.now(), "eval")
                self.evaluating = True

    def optimizer_begins(self, key: int) -> None:
        """An optimizer, identified by `key`, begins to step."""
        with self._lock:
            now = self.now()
            if key in self._stepping:
                # its last step was left by an exception
                del self._stepping[self._stepping.index(key) :]
            self._withdraw_candidate()
            if not self._stepping and self._region() in _STEP:
                self._mark(now, _OPTIMIZER)
            self._stepping.append(key)

    def optimizer_ends(self, key: int) -> None:
        """That optimizer has stepped."""
        with self._lock:
            if key not in self._stepping:
                return
            now = self.now()
            del self._stepping[self._stepping.index(key) :]
            if self._stepping or self._region() != _OPTIMIZER:
                return
            self._mark(now, _COMPUTE if self._explicit else _DATA)
            if not self._explicit:
                self._candidate = now
                self.stir()

    def step(self) -> None:
        """The program says that a step ends here; from now on nothing else ends one."""
        with self._lock:
            self._explicit = True
            self._withdraw_candidate()
            now = self.now()
            self._close(now)
            if self._region() in _STEP or self._region() == _OUTSIDE:
                self._mark(now, _DATA)

    def enter(self, name: str) -> str:
        """A phase begins; returns what `leave` must be given."""
        with self._lock:
            self._close_candidate()
            before = self._region()
            self._mark(self.now(), name)
            return before

    def leave(self, before: str) -> None:
        """The phase ends; what was before it goes on."""
        with self._lock:
            now = self.now()
            self._mark(now, before)
            if self._candidate is None:
                self._phases_over(now)

    def issued(self, timing: Timing) -> None:
        """A collective was issued."""
        with self._lock:
            self._timings.append(timing)
            if len(self._timings) > MAX_DETAIL:
                self._compact()

    def blocked(self, start: float, stop: float) -> None:
        """The thread that trains stood still for communication."""
        with self._lock:
            self._blocked.append((start, stop))
            if len(self._blocked) > MAX_DETAIL:
                self._compact()

    def tail(self) -> Tail:
        """A backward begins to issue collectives."""
        tail = Tail()
        with self._lock:
            self._tails.append(tail)
        return tail

    def idle(self, age: float) -> bool:
        """Close a step whose optimizer has stepped at least `age` seconds ago.

        Returns:
            Whether a younger one is left.
        """
        with self._lock:
            if self._candidate is not None and self.now() - self._candidate >= age:
                self._close_candidate()
            return self._candidate is not None

    @property
    def current(self) -> int:
        """The number of the step that goes on, or of the last one between two steps."""
        with self._lock:
            between = self._candidate is None and self._region() in (_DATA, _OUTSIDE)
            return self.steps if between else self.steps + 1

    # --- the sums -------------------------------------------------------------------------

    def _region(self) -> str:
        return self._marks[-1][1]

    def _mark(self, now: float, region: str) -> None:
        self._marks.append((now, region))
        if len(self._marks) > MAX_DETAIL:
            self._compact()

    def _close_candidate(self) -> None:
        if self._candidate is not None:
            end, self._candidate = self._candidate, None
            self._close(end)

    def _withdraw_candidate(self) -> None:
        """The step went on after the optimizer: what followed was part of it."""
        if self._candidate is not None:
            candidate, self._candidate = self._candidate, None
            self._marks = [
                (at, _COMPUTE if at >= candidate and region == _DATA else region)
                for at, region in self._marks
            ]

    def _compact(self) -> None:
        """Sum up what is certain, so that memory stays bounded however long a step is."""
        self._settle(self.now() if self._candidate is None else self._candidate)
        # work that never ends, or a candidate that is never confirmed, must not pile up either
        del self._timings[:-MAX_DETAIL], self._blocked[:-MAX_DETAIL]

    def _close(self, end: float) -> None:
        self._settle(end)
        self._emit_phases()
        self.steps += 1
        row = self._sums.pop("", None) or Row(0, "", 0.0)
        row.step = self.steps
        row.label = "warmup" if self.steps <= self._warmup else "step"
        row.at = end + self._offset
        self._emit(row)

    def _phases_over(self, now: float) -> None:
        self._settle(now)
        self._emit_phases()

    def _emit_phases(self) -> None:
        """Rows of the phases that are over, whole."""
        for name in [name for name in self._sums if name and name != self._region()]:
            row = self._sums.pop(name)
            row.step = self.steps
            self._emit(row)

    def _settle(self, until: float) -> None:
        """Add the time before `until` to the sums and forget its details."""
        segments: list[tuple[str, Interval]] = []
        rest: list[tuple[float, str]] = []
        for index, (start, region) in enumerate(self._marks):
            last = index + 1 == len(self._marks)
            stop = until if last else self._marks[index + 1][0]
            if region != _OUTSIDE and start < min(stop, until):
                segments.append((region, (start, min(stop, until))))
            if last or stop > until:
                rest.append((max(start, until), region))
        self._marks = rest
        exposed = union([*self._blocked, *(tail.interval(until) for tail in self._tails)])
        busy: list[Interval] = []
        waits: list[Interval] = []
        sent: list[tuple[float, int]] = []
        open_timings: list[Timing] = []
        for timing in self._timings:
            done = timing.done
            if done is None or done > until:
                open_timings.append(timing)
                busy.append((timing.issued, until if done is None else done))
            else:
                busy.append((timing.issued, done))
                sent.append((done, timing.sent))
            waited = timing.waited
            if waited > 0 and timing.started is not None:
                waits.append((timing.started, timing.started + waited))
        self._timings = open_timings
        under_way = union(busy)
        waiting = intersection(union(waits), exposed)
        for region, interval in segments:
            row = self._row(region)
            inside = [interval]
            total = interval[1] - interval[0]
            still = length(intersection(inside, exposed))
            row.total += total
            row.exposed += still
            row.communication += length(intersection(inside, under_way))
            row.waited += length(intersection(inside, waiting))
            row.at = interval[1] + self._offset
            if region == _DATA:
                row.data += total - still
            elif region == _OPTIMIZER:
                row.optimizer += total - still
            else:
                row.compute += total - still
        if segments:
            for done, count in sent:
                self._row(_at(segments, done)).sent += count
        self._blocked = [interval for interval in self._blocked if interval[1] > until]
        self._tails = [
            tail
            for tail in self._tails
            if tail.backward_end == RUNNING
            or any(timing.done is None or timing.done > until for timing in tail.timings)
        ]
        # a backward that raised has no end
        del self._tails[:-MAX_TAILS]

    def _row(self, region: str) -> Row:
        name = "" if region in _STEP else region
        row = self._sums.get(name)
        if row is None:
            row = self._sums[name] = Row(0, name, 0.0)
        return row


def _at(segments: list[tuple[str, Interval]], moment: float) -> str:
    """The region of the segment that holds the moment, or the nearest before or after it."""
    found = segments[0][0]
    for region, (start, _) in segments:
        if start > moment:
            break
        found = region
    return found
