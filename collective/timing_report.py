"""Sends a rank's step timings to its agent: columns of many steps, about once a second."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from collective.messages import Message, RankSteps, Steps
from collective.timing_rows import Row

#: seconds between two batches
INTERVAL = 1.0
#: rows that wait at most; the oldest are dropped and counted
MAX_ROWS = 10_000
#: rows in one message, far below the largest message
BATCH = 1000


class StepReporter:
    """Collects rows and sends them from a thread of its own; never holds the caller up."""

    def __init__(
        self,
        attempt: str,
        rank: int,
        send: Callable[[Message], bool],
        *,
        idle: Callable[[float], bool] = lambda age: False,
        interval: float = INTERVAL,
    ) -> None:
        """Start the thread.

        `idle` is asked before each batch to close a step that ended that many seconds ago, and
        says whether a younger one is left.
        """
        self._attempt = attempt
        self._rank = rank
        self._send = send
        self._idle = idle
        self._interval = interval
        self._rows: deque[Row] = deque(maxlen=MAX_ROWS)
        self._changed = threading.Condition()
        self._active = False
        self._closing = False
        #: rows that were dropped because nobody took them in time
        self.dropped = 0
        self._thread = threading.Thread(target=self._work, name="unisono-timings", daemon=True)
        self._thread.start()

    def emit(self, row: Row) -> None:
        """Queue a row."""
        with self._changed:
            if len(self._rows) == MAX_ROWS:
                self.dropped += 1
            self._rows.append(row)
        self.stir()

    def stir(self) -> None:
        """Something happened that will have to be reported within the interval."""
        if not self._active:
            with self._changed:
                self._active = True
                self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._active or self._closing)
                # one batch per interval, however many steps that is
                self._changed.wait_for(lambda: self._closing, self._interval)
                self._active = False
                closing = self._closing
            if self._idle(0.0 if closing else self._interval):
                self._active = True
            self._flush()
            if closing:
                return

    def _flush(self) -> None:
        while True:
            with self._changed:
                rows = [self._rows.popleft() for _ in range(min(BATCH, len(self._rows)))]
            if not rows:
                return
            if not self._send(RankSteps(steps=columns(self._attempt, self._rank, rows))):
                self.dropped += len(rows)

    def close(self, timeout: float = 2.0) -> None:
        """Send what is there, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout)


def columns(attempt: str, rank: int, rows: list[Row]) -> Steps:
    """Rows as columns; times to the microsecond."""

    def seconds(name: str) -> list[float]:
        return [round(getattr(row, name), 6) for row in rows]

    return Steps(
        attempt=attempt,
        rank=rank,
        step=[row.step for row in rows],
        at=seconds("at"),
        total=seconds("total"),
        data=seconds("data"),
        compute=seconds("compute"),
        exposed=seconds("exposed"),
        optimizer=seconds("optimizer"),
        communication=seconds("communication"),
        waited=seconds("waited"),
        sent=[row.sent for row in rows],
        label=[row.label for row in rows],
    )
