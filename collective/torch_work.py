"""Handles of operations as torch knows them: `torch.distributed.Work` and its futures.

An error reaches torch's C++ code as a future whose callback raises: `Future.set_exception` would
end the process in DDP's backward, while an exception of a ``then`` callback comes out of
``backward()`` as a ``RuntimeError`` with our text, after which the model can still be used.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from collective import timing_observer
from collective.device_copies import on_stream
from collective.environment import LONGEST_TIMEOUT
from collective.errors import DeadlineExceeded
from collective.work import Work

Future = torch.futures.Future[Any]


def seconds(timeout: timedelta | float | None) -> float | None:
    """A timeout of torch in seconds; None where torch means "the group's" (zero or negative)."""
    if timeout is None:
        return None
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    return min(value, LONGEST_TIMEOUT) if value > 0 else None


def raising(error: BaseException) -> Callable[[Future], Any]:
    """A ``then`` callback that raises the error."""

    def fail(_: Future) -> Any:
        raise error

    return fail


def future_on(tensors: Sequence[torch.Tensor]) -> Future:
    """A future whose value may hold tensors on these tensors' devices."""
    devices: list[int | str | torch.device] = []
    for tensor in tensors:
        if tensor.is_cuda and tensor.device not in devices:
            devices.append(tensor.device)
    return torch.futures.Future(devices=devices) if devices else torch.futures.Future()


@lru_cache
def _future_stream(device: torch.device) -> torch.cuda.Stream:
    """Where futures wait for results: the program's own streams go on meanwhile."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _called_by_engine() -> bool:
    """Whether C++ code asks for a future (DDP's reducer), and not a hook written in Python.

    The frame behind `TorchWork.get_future` is then that of the running backward, or none at all in
    a thread of the autograd engine.
    """
    try:
        frame = sys._getframe(2)
    except ValueError:
        return True
    return "/torch/autograd/" in frame.f_code.co_filename


class TorchWork(dist.Work):
    """One operation, or several that were asked for in one call."""

    def __init__(self, works: Sequence[Work], tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._works = works
        self._tensors = tensors
        self._future: Future | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | float = timedelta(0)) -> bool:
        """Wait until it is done.

        Raises:
            CollectiveError: what went wrong, with its own type.
        """
        limit = seconds(timeout)
        for work in self._works:
            if not work.wait(limit):
                raise DeadlineExceeded(
                    f"{work.name} was not done within the {limit:g} s given to wait(); it goes on",
                    operation=work.name,
                )
        return True

    def is_completed(self) -> bool:
        return all(work.done() for work in self._works)

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Any:
        for work in self._works:
            if work.done() and (error := work.exception()) is not None:
                return error
        return None

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """The tensors that hold the result, once it is done."""
        self.wait()
        return self._tensors

    def source_rank(self) -> int:
        """The rank that a receive from anybody was served by."""
        return self._works[0].source_rank if self._works else -1

    _source_rank = source_rank

    def get_future(self) -> Future:
        """A future with the result, completed on a thread that may wait for other collectives.

        A communication hook of DDP that is written in Python gets one that is done: its callbacks
        (PowerSGD's issue further collectives) then run at once, in the order of the buckets, which
        is the same on all ranks.  On threads they would race, and ranks would mix them up.
        """
        if torch._C._current_graph_task_id() != -1 and not _called_by_engine():
            for work in self._works:
                operation = work.operation
                if operation is not None and not operation.finished:
                    start = time.monotonic()
                    operation.join()
                    if (observer := timing_observer.current) is not None:
                        observer.blocked(start, time.monotonic())
        with self._lock:
            if self._future is None:
                self._future = self._make_future()
            return self._future

    def _make_future(self) -> Future:
        observer = timing_observer.current
        if observer is not None:
            for work in self._works:
                if work.operation is not None:
                    observer.awaited(work.operation)
        base = future_on(self._tensors)
        tensors = self._tensors

        def value(_: Future) -> list[torch.Tensor]:
            for work in self._works:
                if (error := work.exception()) is not None:
                    raise error
            return tensors

        handed_out = base.then(value)
        left = len(self._works)
        lock = threading.Lock()

        aside = [
            _future_stream(device) for device in {one.device for one in tensors if one.is_cuda}
        ]
        for stream in aside:  # results of calls that are over may still be behind this thread's own
            stream.wait_stream(torch.cuda.current_stream(stream.device))

        def complete() -> None:
            # the future notes what the current streams have in hand: who waits, waits for that
            with ExitStack() as streams:
                for stream in aside:
                    streams.enter_context(on_stream(stream))
                for work in self._works:
                    work.settle()
                base.set_result(tensors)

        if self.is_completed():
            complete()
            return handed_out

        def one_done() -> None:
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            if last:
                complete()

        for work in self._works:
            if work.operation is None:
                one_done()
            else:
                work.operation.on_finish(one_done)
        return handed_out


class FinishedWork(TorchWork):
    """An operation that is over: a synchronous call, or one without anything to do."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__((), tensors)


class FailedWork(TorchWork):
    """An operation that could not be issued, for callers in C++ that cannot take an exception."""

    def __init__(self, error: BaseException, tensors: list[torch.Tensor]) -> None:
        super().__init__((), tensors)
        self._error = error

    def wait(self, timeout: timedelta | float = timedelta(0)) -> bool:
        raise self._error

    def is_completed(self) -> bool:
        return True

    def exception(self) -> Any:
        return self._error

    def _make_future(self) -> Future:
        base = future_on(self._tensors)
        failed = base.then(raising(self._error))
        base.set_result(self._tensors)
        return failed
