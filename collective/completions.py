"""A pool of threads that grows: callbacks of operations may wait for further operations."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

_log = logging.getLogger("unisono.collective")
#: seconds after which a thread without work ends
_IDLE = 10.0


class CompletionPool:
    """Runs callables at once: on an idle thread where there is one, else on a new one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[Callable[[], object]]] = []

    def submit(self, call: Callable[[], object]) -> None:
        """Run `call` soon; it may block for as long as it likes."""
        with self._lock:
            inbox = self._idle.pop() if self._idle else None
        if inbox is not None:
            inbox.put(call)
            return
        threading.Thread(
            target=self._work, args=(call,), name="unisono-completion", daemon=True
        ).start()

    def _work(self, call: Callable[[], object]) -> None:
        inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        while True:
            try:
                call()
            except Exception:  # noqa: BLE001 — nobody waits for a callback
                _log.exception("a callback of a finished operation failed")
            with self._lock:
                self._idle.append(inbox)
            try:
                call = inbox.get(timeout=_IDLE)
            except queue.Empty:
                with self._lock:
                    if inbox in self._idle:
                        self._idle.remove(inbox)
                        return
                call = inbox.get()  # handed over in the moment of giving up

    def forget(self) -> None:
        """Drop all threads; for a forked child, which has none of them."""
        self._lock = threading.Lock()
        self._idle = []


pool = CompletionPool()
