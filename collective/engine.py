"""The engine: one per rank; drives all active operations of all its groups.

At any moment one thread drives: the thread of a synchronous call when nothing else is under way
(no hand-over, the fast path), else the engine's own thread.  Whoever drives serves every group,
so that groups progress independently of which call came first.
"""

from __future__ import annotations

import mmap
import os
import select
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from collective.communicator import Communicator
from collective.completions import pool
from collective.errors import CollectiveError, GroupClosed
from collective.links.link import EDGE, EndOfLink, Inlet, Outlet, note
from collective.message import Message
from collective.operation import LinkLost, Operation
from collective.program import SEGMENT
from collective.reduction import Array

#: the interpreter's switch interval while an engine thread is busy beside Python code, seconds
_SWITCH = 0.0005
#: scratch segments that are kept for reuse
_ROOMS = 16

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


class Engine:
    """Drives operations until they are finished."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._bell, select.EPOLLIN)
        self._links: dict[int, tuple[Communicator, Outlet | Inlet, int, bool]] = {}
        self._belled: list[Outlet | Inlet] = []
        self._groups: list[Communicator] = []
        self._inbox: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._driven = False
        self._wake = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._closing = False
        self._rooms: list[Array] = []
        self.forked = False
        _engines.add(self)

    # -- groups and links ---------------------------------------------------------------------

    @property
    def bell(self) -> int:
        """An eventfd that peers in shared memory ring when a link may go on."""
        return self._bell

    def add(self, communicator: Communicator) -> None:
        """Serve a group and its links."""

        def enter() -> None:
            self._groups.append(communicator)
            for peer, outlet in communicator.outlets.items():
                self._register(communicator, outlet, peer, p2p=False)
            for peer, inlet in communicator.inlets.items():
                self._register(communicator, inlet, peer, p2p=False)

        self.call(enter)

    def add_message_link(self, communicator: Communicator, peer: int, link: Outlet | Inlet) -> None:
        """Serve a link for point-to-point messages with `peer`."""

        def enter() -> None:
            if communicator.closed:
                link.close()
                return
            if isinstance(link, Outlet):
                communicator.messaging.outlets[peer] = link
            else:
                communicator.messaging.inlets[peer] = link
            self._register(communicator, link, peer, p2p=True)

        self.call(enter)

    def _register(
        self, communicator: Communicator, link: Outlet | Inlet, peer: int, *, p2p: bool
    ) -> None:
        descriptor = link.endpoint.fileno()
        self._links[descriptor] = (communicator, link, peer, p2p)
        if link.belled:
            self._belled.append(link)
        self._epoll.register(descriptor, EDGE)
        for other in link.others:
            self._register(communicator, other, peer, p2p=p2p)

    def remove(self, communicator: Communicator) -> list[Outlet | Inlet]:
        """Stop serving a group; its links, for the caller to end."""
        links: list[Outlet | Inlet] = []

        def leave() -> None:
            communicator.closed = True
            if communicator in self._groups:
                self._groups.remove(communicator)
            for descriptor, entry in list(self._links.items()):
                if entry[0] is communicator:
                    self._epoll.unregister(descriptor)
                    del self._links[descriptor]
                    links.append(entry[1])
            self._belled = [link for link in self._belled if link not in links]

        self.call(leave)
        return links

    # -- calls --------------------------------------------------------------------------------

    def run(self, operation: Operation, *, wait: bool) -> None:
        """Issue an operation; with `wait`, return when it is finished.

        Raises:
            GroupClosed: the engine belongs to another process or is closed.
        """
        communicator = operation.communicator
        with self._lock:
            self._check()
            if not isinstance(operation, Message):
                communicator.issued += 1
                operation.sequence = communicator.issued
            self._inbox.append(lambda: self._take(operation))
            if self._driven:
                self._ring()
                inline = False
            elif wait:
                self._driven = inline = True
            else:
                inline = False
                self._start_thread()
        if inline:
            self._drive_inline(operation)
        elif wait:
            try:
                operation.join()
            except BaseException as error:
                self._interrupt(communicator, error)
                raise

    def refuse(self, communicator: Communicator, error: CollectiveError) -> None:
        """This rank refuses what would have been its next collective; tell the others."""
        with self._lock:
            self._check()
            communicator.issued += 1
            sequence = communicator.issued
        error.sequence = sequence
        if communicator.error is None:
            self.call(lambda: communicator.refuse(sequence, error))

    def call(self, what: Callable[[], None]) -> None:
        """Run `what` on the thread that drives, and return when it has run."""
        done = threading.Event()
        failures: list[BaseException] = []

        def task() -> None:
            try:
                what()
            except Exception as error:  # noqa: BLE001 — raised below, where the caller is
                failures.append(error)
            finally:
                done.set()

        with self._lock:
            self._check()
            self._inbox.append(task)
            if self._driven:
                self._ring()
                inline = False
            else:
                self._driven = inline = True
        if inline:
            self._run_inbox()
        else:
            done.wait()
        if failures:
            raise failures[0]

    def post(self, what: Callable[[], None]) -> None:
        """Run `what` on the thread that drives, soon; nothing happens once the engine is closed."""
        with self._lock:
            if self._closing or self.forked:
                return
            self._inbox.append(what)
            if self._driven:
                self._ring()
            else:
                self._start_thread()

    def _check(self) -> None:
        if self.forked:
            raise GroupClosed(
                "this group was made before os.fork() and belongs to the parent process: "
                "make a group of its own in the child, or start children with 'spawn'"
            )
        if self._closing:
            raise GroupClosed("the group is closed")

    def _take(self, operation: Operation) -> None:
        communicator = operation.communicator
        if communicator.closed:
            operation.finish(GroupClosed(f"group {communicator.name} is closed"))
            return
        try:
            if isinstance(operation, Message):
                communicator.messaging.take(operation)
            else:
                communicator.take(operation)
        except LinkLost as lost:
            communicator._lose(lost.peer, lost.reason)
        except CollectiveError as error:
            communicator.fail(error)
        except Exception as error:  # noqa: BLE001 — ends its group, not the thread that serves all
            communicator.interrupt(error)
        if communicator.error is not None:
            operation.finish(communicator.error)

    def _interrupt(self, communicator: Communicator, error: BaseException) -> None:
        """A waiting thread was interrupted: its group cannot go on."""
        self.post(lambda: communicator.interrupt(error))

    # -- driving ------------------------------------------------------------------------------

    def _ring(self) -> None:
        os.eventfd_write(self._bell, 1)

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="unisono-engine", daemon=True)
            self._thread.start()
        self._wake.notify()

    def _drive_inline(self, operation: Operation) -> None:
        try:
            with np.errstate(all="ignore"):
                self._drive(operation)
        except BaseException as error:
            if not operation.finished:
                operation.communicator.interrupt(error)
            raise
        finally:
            self._step_down()

    def _run_inbox(self) -> None:
        try:
            while self._inbox:
                self._inbox.popleft()()
        finally:
            self._step_down()

    def _step_down(self) -> None:
        with self._lock:
            self._driven = False
            if self._inbox or any(group.attended for group in self._groups):
                self._start_thread()

    def _serve(self) -> None:
        while True:
            with self._lock:
                while self._driven or not (
                    self._closing or self._inbox or any(group.attended for group in self._groups)
                ):
                    self._wake.wait()
                if self._closing and not self._inbox:
                    return
                self._driven = True
            _hurry.enter()
            try:
                with np.errstate(all="ignore"):  # inf and NaN are results, not warnings
                    self._drive(None)
            finally:
                _hurry.leave()
                with self._lock:
                    self._driven = False

    def _drive(self, operation: Operation | None) -> None:
        """Serve until `operation` is finished; without one, until nothing is under way."""
        inbox, groups = self._inbox, self._groups
        while True:
            while inbox:
                inbox.popleft()()
            if operation is not None and operation.finished:
                return
            moved = False
            for group in groups:
                if group.attended and group.progress():
                    moved = True
                    group.moved_at = 0.0
            if operation is not None:
                if operation.finished:
                    return
            elif not moved and not inbox and not any(group.attended for group in groups):
                return
            if not moved and not inbox:
                self._wait()

    def _wait(self) -> None:
        now = time.monotonic()
        timeout: float | None = None
        for group in self._groups:
            if not group.moved_at:
                group.moved_at = now
            due = group.next_tick(now)
            if due is not None and (timeout is None or due < timeout):
                timeout = due
        # Python looks at nothing when a process goes on that was stopped for longer than this time
        events = self._epoll.poll(timeout) or self._epoll.poll(0)
        for descriptor, mask in events:
            entry = self._links.get(descriptor)
            if entry is None:
                if descriptor == self._bell:
                    try:
                        os.eventfd_read(self._bell)
                    except BlockingIOError:
                        continue  # two rings, one reading
                    for link in self._belled:
                        link.readable = link.writable = True
                continue
            self._note(entry, mask)
        if timeout is not None and not events:
            # with events, look at them first: this process may have been held up, not its peers
            now = time.monotonic()
            for group in self._groups:
                due = group.next_tick(now)
                if due is not None and due <= 0.0:
                    group.tick(now)

    def _note(self, entry: tuple[Communicator, Outlet | Inlet, int, bool], mask: int) -> None:
        communicator, link, peer, p2p = entry
        note(link, mask)
        if mask & select.EPOLLOUT and isinstance(link, Inlet):
            try:
                link.flush()
            except EndOfLink:
                link.readable = True  # the end is met, and told, where it is read
        if isinstance(link, Outlet) and link.readable and not p2p:
            communicator.control_ready.add(peer)

    # -- scratch memory -----------------------------------------------------------------------

    def take_room(self) -> Array:
        """A scratch segment."""
        if self._rooms:
            return self._rooms.pop()
        return np.frombuffer(mmap.mmap(-1, SEGMENT, flags=mmap.MAP_PRIVATE), dtype=np.uint8)

    def give_room(self, room: Array) -> None:
        """Give a scratch segment back."""
        if len(self._rooms) < _ROOMS:
            self._rooms.append(room)

    # -- the end ------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop; groups must have been closed before."""
        with self._lock:
            if self._closing or self.forked:
                return
            self._closing = True
            self._wake.notify_all()
            if self._driven:
                self._ring()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)
        self._epoll.close()
        os.close(self._bell)
        self._rooms.clear()
        _engines.discard(self)

    def _abandon(self) -> None:
        """In a forked child: hold no copy of a socket that keeps the parent's peers waiting."""
        self.forked = True
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        for _, link, _, _ in self._links.values():
            link.endpoint.abandon()
        self._links.clear()
        self._epoll.close()
        os.close(self._bell)


class _Hurry:
    """Lowers the interpreter's switch interval while any engine thread is busy."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = 0.0

    def enter(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before, _SWITCH))

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                sys.setswitchinterval(self._before)


_hurry = _Hurry()


def _after_fork(*_: Any) -> None:
    global _hurry
    _hurry = _Hurry()
    pool.forget()
    for engine in list(_engines):
        engine._abandon()


os.register_at_fork(after_in_child=_after_fork)
