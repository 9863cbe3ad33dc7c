"""How those who wait beside the engine hear that their group is over."""

from __future__ import annotations

import os
import threading


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
