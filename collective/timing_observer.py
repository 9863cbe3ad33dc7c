"""What this process tells its step clock about collectives; nothing where no clock runs.

The torch surface and the native API call `Observer`'s methods; `current` is None outside a job,
so that a call then costs one look at a module's variable.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict

import torch

from collective.timing_clock import MAX_TAILS, StepClock
from collective.timing_rows import RUNNING, Tail, Timing


class Observer:
    """Feeds one `StepClock` with the collectives of the thread that trains and its backwards."""

    def __init__(self, clock: StepClock) -> None:
        self.clock = clock
        #: the thread that steps; hooks correct it
        self.thread = threading.get_ident()
        self._tails: OrderedDict[int, Tail] = OrderedDict()
        self._last: Tail | None = None
        self._now = clock.now

    def issued(self, timing: Timing) -> None:
        """A collective was issued."""
        self.clock.issued(timing)

    def blocked(self, start: float, stop: float) -> None:
        """The calling thread stood still for communication; counts if it is one that trains."""
        if threading.get_ident() == self.thread or torch._C._current_graph_task_id() != -1:
            self.clock.blocked(start, stop)

    def awaited(self, timing: Timing) -> None:
        """Somebody will wait for the collective's future: in a backward, at the backward's end."""
        graph = torch._C._current_graph_task_id()
        if graph == -1:
            # a communication hook that goes on in a callback, such as PowerSGD's
            if self._last is not None and threading.get_ident() != self.thread:
                self._last.timings.append(timing)
            return
        tail = self._tails.get(graph)
        if tail is None:
            tail = self._tails[graph] = self._last = self.clock.tail()
            if len(self._tails) > MAX_TAILS:
                self._tails.popitem(last=False)
            self._when_backward_ends(tail)
        tail.timings.append(timing)
        tail.last_issue = timing.issued

    def _when_backward_ends(self, tail: Tail) -> None:
        def ended() -> None:
            tail.backward_end = self._now()

        tail.backward_end = RUNNING
        # private, but what torch's own FSDP uses; DDP queues its wait after it
        torch.autograd.Variable._execution_engine.queue_callback(ended)


#: None where no steps are timed
current: Observer | None = None


def _forget() -> None:
    global current
    current = None


# a data-loader worker is no rank
os.register_at_fork(after_in_child=_forget)
