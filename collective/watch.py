"""How those who wait for one thing hear of another: a peer that is lost, a group that is over."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Sequence

from collective.errors import PeerLost
from collective.links.link import Outlet


class Bells:
    """Eventfds of those who wait beside the engine, and must hear that their group is over."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bells: set[int] = set()
        self._rung = False

    def __bool__(self) -> bool:
        return bool(self._bells)

    def add(self, bell: int) -> None:
        """Ring `bell` when the group is over; at once if it is."""
        with self._lock:
            if self._rung:
                os.eventfd_write(bell, 1)
            else:
                self._bells.add(bell)

    def discard(self, bell: int) -> None:
        """Do not ring `bell` any more: it may be closed."""
        with self._lock:
            self._bells.discard(bell)

    def ring(self) -> None:
        """The group is over."""
        with self._lock:
            self._rung = True
            while self._bells:
                os.eventfd_write(self._bells.pop(), 1)


class Watch:
    """Looks after the links of peers that are expected, on a thread while there are any."""

    def __init__(
        self, links: Sequence[tuple[Outlet, int, str]], on_end: Callable[[PeerLost], None]
    ) -> None:
        """Watch `links`, each with its rank and that rank's node."""
        self._on_end = on_end
        self._error: PeerLost | None = None
        self._thread: threading.Thread | None = None
        if links:
            self._peers = {link.endpoint.fileno(): (rank, node) for link, rank, node in links}
            self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._thread = threading.Thread(target=self._look, name="unisono-watch", daemon=True)
            self._thread.start()

    def _look(self) -> None:
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        for descriptor in self._peers:
            poll.register(descriptor, select.POLLRDHUP)
        for descriptor, _ in poll.poll():
            if descriptor != self._bell:
                rank, node = self._peers[descriptor]
                self._error = PeerLost(
                    f"lost rank {rank} on node {node} before it came: its connection ended",
                    rank=rank,
                    node=node,
                )
                self._on_end(self._error)
                return

    def check(self) -> None:
        """Raise if a link ended."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Look no more."""
        if self._thread is not None:
            os.eventfd_write(self._bell, 1)
            self._thread.join()
            os.close(self._bell)
