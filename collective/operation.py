"""Operations: what the engine has in hand, from the call until its result is final."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from collective.completions import pool
from collective.descriptor import Descriptor
from collective.errors import CollectiveError, Refused

if TYPE_CHECKING:
    from collective.communicator import Communicator

_log = logging.getLogger("unisono.collective")


class LinkLost(Exception):
    """The link to a peer ended; becomes a `PeerLost` unless someone gave the reason before."""

    def __init__(self, peer: int, reason: str) -> None:
        super().__init__(reason)
        self.peer = peer
        self.reason = reason


class Operation:
    """Base: state, timing and completion; subclasses move the bytes.

    Attributes:
        sequence: number in the group, from 1; 0 for point-to-point.
        issued, started, done_at: monotonic seconds; `started` is when nothing was ahead any more.
        heard: monotonic time at which the last peer's first bytes had arrived, or 0.
        sent: bytes given to links.
    """

    def __init__(self, communicator: Communicator, descriptor: Descriptor, timeout: float) -> None:
        self.communicator = communicator
        self.descriptor = descriptor
        self.sequence = 0
        self.issued = time.monotonic()
        self.deadline = self.issued + timeout
        self.timeout = timeout
        self.started = 0.0
        self.heard = 0.0
        self.done_at = 0.0
        self.sent = 0
        self.finished = False
        self.error: BaseException | None = None
        #: what ends it at its deadline, if that is known before
        self.failure: CollectiveError | None = None
        self.epilogue: Callable[[], Any] | None = None
        #: takes back what was done to the caller's tensor, when a rank refused the operation
        self.undo: Callable[[], Any] | None = None
        #: called at once where the operation finishes; must be quick and must not wait
        self.on_finish_inline: Callable[[], object] | None = None
        self._event: threading.Event | None = None
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], object]] = []

    # -- for the engine ---------------------------------------------------------------------

    def start(self) -> None:
        """Called once, when the operation becomes active."""
        self.started = time.monotonic()

    def advance(self) -> bool:
        """Move what can be moved without blocking; whether anything moved."""
        raise NotImplementedError

    @property
    def complete(self) -> bool:
        """Whether all that this rank has to send and receive has been."""
        raise NotImplementedError

    def missing(self) -> list[int]:
        """The peers that this rank waits for."""
        raise NotImplementedError

    @property
    def blind(self) -> bool:
        """Whether another library has it in hand, so that nobody here sees who is late."""
        return False

    def phase(self) -> str:
        """What the operation is doing, in words."""
        return ""

    def release(self) -> None:
        """Give back what an operation holds that ends early."""

    def finish(self, error: BaseException | None = None) -> None:
        """Make the result final and wake who waits."""
        if error is None and self.epilogue is not None:
            try:
                self.epilogue()
            except Exception as failure:  # noqa: BLE001 — reported by the operation
                error = failure
        if self.undo is not None and isinstance(error, Refused):
            self.undo()
        self.done_at = time.monotonic()
        with self._lock:
            if self.finished:
                return
            self.error = error
            self.finished = True
            event = self._event
            callbacks, self._callbacks = self._callbacks, []
        self.epilogue = self.undo = None
        if self.on_finish_inline is not None:
            try:
                self.on_finish_inline()
            except Exception:  # noqa: BLE001 — who waits for the result must be woken
                _log.exception("an observer of finished operations failed")
        if event is not None:
            event.set()
        for callback in callbacks:
            pool.submit(callback)

    # -- for the step clock (`collective.timing_rows.Timing`) ---------------------------------

    @property
    def done(self) -> float | None:
        """When the result was final, or None while it is not."""
        return self.done_at or None

    @property
    def waited(self) -> float:
        """Seconds from `started` until the last peer that sends to this rank had arrived."""
        return max(0.0, self.heard - self.started) if self.heard else 0.0

    # -- for callers ------------------------------------------------------------------------

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the operation is finished; whether it is."""
        if self.finished:
            return True
        with self._lock:
            if self.finished:
                return True
            if self._event is None:
                self._event = threading.Event()
        return self._event.wait(timeout)

    def on_finish(self, callback: Callable[[], object]) -> None:
        """Run `callback` on the pool once the operation is finished."""
        with self._lock:
            if not self.finished:
                self._callbacks.append(callback)
                return
        pool.submit(callback)

    def settle(self) -> None:
        """Have this thread's current streams wait for what the operation left to a device."""

    def raise_error(self) -> None:
        """Raise what ended the operation, if anything did."""
        if self.error is not None:
            raise again(self.error)


def again(error: BaseException) -> BaseException:
    """A fresh exception like `error`, with it as the cause: each raise has its own traceback."""
    if not isinstance(error, CollectiveError):
        return error
    copy = type(error)(
        str(error),
        rank=error.rank,
        node=error.node,
        operation=error.operation,
        sequence=error.sequence,
        phase=error.phase,
    )
    copy.__cause__ = error.__cause__
    return copy
