"""Looking after the peers of a group while its links are made."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from collective import diagnosis
from collective.errors import CollectiveError
from collective.greetings import last_words, lost
from collective.links.doorman import Connection
from collective.links.link import Outlet

#: seconds after which a peer whose connection ended is lost: until then it may come again, if it
#: gave up one try only, or somebody may say why it left
_AGAIN = 1.0


class _Link(NamedTuple):
    peer: int
    #: None for a link of another group, which is read there
    connection: Connection | None
    #: whether the peer made it
    came: bool


class Watch:
    """Looks after the connections of a group's peers, on a thread, until it is closed."""

    def __init__(
        self,
        nodes: Sequence[str],
        known: Mapping[int, Outlet],
        on_end: Callable[[CollectiveError], None],
    ) -> None:
        """Watch links of another group; those of this one are added as they come.

        Args:
            nodes: of each rank.
            known: by rank of this group: a link of another group.
            on_end: is told who is lost.
        """
        self._nodes = nodes
        self._on_end = on_end
        self._lock = threading.Lock()
        self._links: dict[int, _Link] = {}
        #: by peer, and whether it made the connection that ended: when it counts as lost
        self._doubts: dict[tuple[int, bool], float] = {}
        #: what a peer said, or the end of a link of another group
        self._told: CollectiveError | None = None
        self._closed = False
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        #: readable from the time on when the group's links were given up
        self.over = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.epoll()
        self._poll.register(self._bell, select.EPOLLIN)
        for peer, outlet in known.items():
            self._register(outlet.endpoint.fileno(), _Link(peer, None, False))
        self._thread = threading.Thread(target=self._run, name="unisono-watch", daemon=True)
        self._thread.start()

    def _register(self, descriptor: int, link: _Link) -> None:
        self._links[descriptor] = link
        self._poll.register(descriptor, select.EPOLLRDHUP)

    def add(self, peer: int, connection: Connection) -> None:
        """Watch a connection that this rank made, or had made."""
        self._add(_Link(peer, connection, False))

    def came(self, peer: int, connection: Connection) -> None:
        """Watch a connection that `peer` made; it takes the place of an earlier one."""
        self._add(_Link(peer, connection, True))

    def _add(self, link: _Link) -> None:
        assert link.connection is not None
        descriptor = link.connection.sock.fileno()
        with self._lock:
            if self._closed:
                return
            if link.came:
                self._doubts.pop((link.peer, True), None)
            old = self._links.get(descriptor)
            if old is None or old.connection is None or old.connection.sock.fileno() < 0:
                self._register(descriptor, link)

    def told(self, peer: int, content: dict[str, object] | None) -> None:
        """Who reads a connection tells what `peer` said last on it, or that it ended without."""
        with self._lock:
            if self._closed:
                return
            if content is None:
                self._doubts.setdefault((peer, False), time.monotonic() + _AGAIN)
            else:
                self._told = diagnosis.from_content(self._nodes, peer, 0, content)
            os.eventfd_write(self._bell, 1)

    def end(self) -> None:
        """The group's links were given up."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self.over, 1)

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                due = min(self._doubts.values(), default=None)
            left = -1.0 if due is None else max(0.0, due - time.monotonic())
            for descriptor, _ in self._poll.poll(left):
                if descriptor == self._bell:
                    os.eventfd_read(descriptor)
                else:
                    with self._lock:
                        self._look(descriptor)
            with self._lock:
                error = self._error(time.monotonic())
            if error is not None:
                self._on_end(error)
                return

    def _look(self, descriptor: int) -> None:
        """A connection ended; under the lock."""
        link = self._links.pop(descriptor, None)
        if link is None or self._closed:
            return
        if link.connection is not None and link.connection.sock.fileno() != descriptor:
            return  # it was closed here, and its number may be another's by now
        try:
            self._poll.unregister(descriptor)
        except OSError:
            pass  # it was closed here at this very moment
        if link.connection is None:
            self._told = self._told or lost(link.peer, self._nodes)
            return
        content = last_words(link.connection)
        if content is not None:
            self._told = diagnosis.from_content(self._nodes, link.peer, 0, content)
        else:
            self._doubts.setdefault((link.peer, link.came), time.monotonic() + _AGAIN)

    def _error(self, now: float) -> CollectiveError | None:
        """What is known by a time; under the lock."""
        gone = [peer for (peer, _), until in self._doubts.items() if until <= now]
        return self._told or (lost(gone[0], self._nodes) if gone else None)

    def wait(self) -> None:
        """Wait until the links are given up, as they will be soon if one has ended."""
        if not self._closed:
            poll = select.poll()
            poll.register(self.over, select.POLLIN)
            poll.poll(2000 * _AGAIN)

    def close(self) -> None:
        """Look no more; harmless when repeated."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.eventfd_write(self._bell, 1)
        self._thread.join()
        self._poll.close()
        os.close(self._bell)
        os.close(self.over)
