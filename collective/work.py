"""What a call returns: a handle to an operation that may still be under way."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from collective import device_copies, timing_observer
from collective.operation import Operation

if TYPE_CHECKING:
    from collective.issuing import Issuing

#: what a handle resolves to: the tensors that were given for it
Result = torch.Tensor | list[torch.Tensor] | None


@dataclass(frozen=True)
class Timing:
    """When an operation happened, in monotonic seconds, and what it moved.

    Attributes:
        issued: the call.
        started: nothing was ahead of it any more.
        done: its result was final.
        waited: seconds from `started` until the last peer that sends to this rank had arrived.
        sent: bytes given to links, headers included.
    """

    issued: float
    started: float
    done: float
    waited: float
    sent: int


class Work:
    """A handle to one operation.

    Attributes:
        name: the operation, such as ``all_reduce``.
        bytes: size of the tensor in memory.
        asynchronous: the caller did not wait in the call.
        operation: what the engine has in hand; None for one that needs no engine.
    """

    def __init__(
        self,
        group: Issuing,
        name: str,
        operation: Operation | None,
        result: Result,
        nbytes: int,
        asynchronous: bool,
    ) -> None:
        self.group = group
        self.name = name
        self.bytes = nbytes
        self.asynchronous = asynchronous
        self.operation = operation
        self._result = result
        given = result if isinstance(result, list) else [result]
        #: results on devices, whose last copies may still be under way when the operation is done
        self._on_devices = [tensor for tensor in given if tensor is not None and tensor.is_cuda]
        device_copies.follow(self._on_devices)

    def __repr__(self) -> str:
        state = "done" if self.done() else "under way"
        if self.exception() is not None:
            state = "failed"
        return f"<Work {self.name} of group {self.group.name}: {state}>"

    def settle(self) -> None:
        """Have this thread's current streams wait for results on devices; `wait` does it too.

        Not for those of an operation that failed: they may never come.
        """
        if self._on_devices and self.operation is not None and self.operation.error is None:
            device_copies.settle(self._on_devices)
            self.operation.settle()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the result is final.

        Returns:
            False when `timeout` seconds passed before; the operation goes on.

        Raises:
            CollectiveError: the operation failed.
        """
        operation = self.operation
        if operation is None:
            return True
        clock = timing_observer.current
        start = 0.0 if clock is None else time.monotonic()
        try:
            if not operation.join(timeout):
                return False
        finally:
            if clock is not None:
                clock.blocked(start, time.monotonic())
        operation.raise_error()
        self.settle()
        return True

    def resolve(self) -> Result:
        """Wait, and return the result."""
        self.wait()
        return self._result

    def result(self) -> Result:
        """The result; the same as `resolve`."""
        return self.resolve()

    def done(self) -> bool:
        """Whether the operation is finished, well or not."""
        return self.operation is None or self.operation.finished

    def exception(self) -> BaseException | None:
        """What ended a finished operation, or None."""
        return self.operation.error if self.operation is not None else None

    def add_done_callback(self, callback: Callable[[Work], object]) -> None:
        """Call `callback(work)` once the operation is finished, on a thread where it may block."""
        if self.operation is None:
            callback(self)
            return

        def call() -> None:
            self.settle()
            callback(self)

        self.operation.on_finish(call)

    @property
    def source_rank(self) -> int:
        """Of a receive: the rank that sent; −1 for other operations."""
        peer = getattr(self.operation, "peer", None)
        return -1 if peer is None else int(peer)

    @property
    def timing(self) -> Timing:
        """Times and bytes of a finished operation."""
        operation = self.operation
        if operation is None:
            return Timing(0.0, 0.0, 0.0, 0.0, 0)
        return Timing(
            operation.issued,
            operation.started,
            operation.done_at,
            operation.waited,
            operation.sent,
        )


CollectiveTensor = Work
