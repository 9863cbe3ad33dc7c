"""What must not be lost, on the node's disk until the control plane has stored it.

Entries are numbered from 1 for the whole life of an agent's state folder.  They lie in segment
files of lines, ``NUMBER TAB JSON``, each file named by its first number; a file is deleted when
all of it is acknowledged.  A line is written with one ``write``, so what was added survives the
death of the process (not that of the machine: nothing is synced); half a line at the end, from a
kill in the middle of it, is removed when the spool is opened.

The size is bounded.  Output of ranks is left out first and its next chunk says how much is
missing; then timings and metrics, which are counted; never an exit code.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from collective.messages import LogChunk, Spooled, decode, encode
from worker.errors import LocalProblem

__all__ = ["Spool"]

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 4 << 20
#: shares of the bound that logs and timings may fill; the rest is for exit codes and failures
LOG_SHARE = 0.90
TIMING_SHARE = 0.97


class Spool:
    """The agent's spool; safe to use from several threads."""

    def __init__(self, folder: Path, limit: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._limit = limit
        self._changed = threading.Condition()
        #: first number → size in bytes, in order
        self._segments: dict[int, int] = {}
        self._next = 1
        self._acknowledged = 0
        self._cut: dict[tuple[str, int, str], int] = {}
        #: attempt → its last entry's number
        self._attempts: dict[str, int] = {}
        self._closed = False
        #: what must not be lost, while the disk is full: (kind, value, Unix time)
        self._backlog: deque[tuple[str, Any, float]] = deque()
        self.disk_full = False
        #: timings and metrics left out because the spool was full
        self.dropped = 0
        self._file = self._open()

    # -- writing

    def add(self, **part: Any) -> int | None:
        """Append one entry, given as one part of `Spooled`.

        Returns:
            Its number, or None if it was left out, or has to wait for room on the disk.
        """
        (kind, value), *others = part.items()
        assert not others, "a spool entry has exactly one part"
        with self._changed:
            if self._closed:
                raise LocalProblem("the spool is closed")
            self._write_backlog()
            size = sum(self._segments.values())
            if kind == "log":
                return self._add_log(value, size)
            if kind in ("steps", "metrics"):
                number = None
                if size <= self._limit * TIMING_SHARE and not self._backlog:
                    number = self._append(kind, value, time.time())
                self.dropped += number is None
                return number
            self._backlog.append((kind, value, time.time()))
            self._write_backlog()
            return None if self._backlog else self._next - 1

    def _add_log(self, chunk: LogChunk, size: int) -> int | None:
        key = (chunk.attempt, chunk.rank, chunk.stream)
        missing = self._cut.get(key, 0)
        if missing:
            chunk = replace(chunk, cut=chunk.cut + missing)
        number = None
        if size + chunk.size <= self._limit * LOG_SHARE and not self._backlog:
            number = self._append("log", chunk, time.time())
        if number is None:
            self._cut[key] = chunk.cut + chunk.size
        else:
            self._cut.pop(key, None)
        return number

    def close_stream(self, attempt: str, rank: int, stream: str, offset: int) -> None:
        """Mark a cut at the very end of a stream, where no chunk follows to carry the mark."""
        with self._changed:
            missing = self._cut.pop((attempt, rank, stream), 0)
            if missing:
                chunk = LogChunk(
                    attempt=attempt,
                    rank=rank,
                    stream="stdout" if stream == "stdout" else "stderr",
                    offset=offset,
                    text="",
                    size=0,
                    cut=missing,
                )
                self._backlog.append(("log", chunk, time.time()))
            self._write_backlog()

    def _write_backlog(self) -> None:
        """Write what must not be lost and found no room on the disk before."""
        while self._backlog:
            if self._append(*self._backlog[0]) is None:
                return
            self._backlog.popleft()

    def _append(self, kind: str, value: Any, at: float) -> int | None:
        number = self._next
        entry = Spooled(number=number, at=at, **{kind: value})
        line = f"{number}\t{encode(entry)}\n".encode("utf-8", "replace")
        first = next(reversed(self._segments))
        try:
            if self._segments[first] + len(line) > SEGMENT_BYTES and self._segments[first]:
                self._file = self._new_segment(number)
                first = number
            written = os.write(self._file, line)
        except OSError as error:
            written, reason = 0, error.strerror
        else:
            reason = "no space left"
        if written != len(line):
            if not self.disk_full:
                logger.error("the spool %s takes nothing more: %s", self._folder, reason)
            self.disk_full = True
            if written:
                os.ftruncate(self._file, self._segments[first])
            return None
        self.disk_full = False
        self._segments[first] += len(line)
        self._next = number + 1
        self._attempts[value.attempt] = number
        self._changed.notify_all()
        return number

    # -- acknowledgements

    @property
    def acknowledged(self) -> int:
        """The highest number that the control plane has stored."""
        return self._acknowledged

    @property
    def last(self) -> int:
        """The number of the newest entry; 0 when there never was one."""
        return self._next - 1

    def attempts(self) -> list[str]:
        """Attempts with entries that are not acknowledged."""
        with self._changed:
            return [name for name, last in self._attempts.items() if last > self._acknowledged]

    def acknowledge(self, number: int) -> None:
        """All entries up to `number` are stored elsewhere: their room is free."""
        with self._changed:
            if number <= self._acknowledged:
                return
            self._acknowledged = number
            if number >= self._next:
                # the folder was emptied by somebody: numbers must not be used twice
                self._next = number + 1
                self._file = self._new_segment(self._next)
            for name, last in list(self._attempts.items()):
                if last <= number:
                    del self._attempts[name]
            firsts = list(self._segments)
            for first, following in itertools.pairwise(firsts):
                if following <= number + 1:
                    self._path(first).unlink(missing_ok=True)
                    del self._segments[first]
            if self._acknowledged == self._next - 1 and self._segments[firsts[-1]]:
                self._file = self._new_segment(self._next)
                self._path(firsts[-1]).unlink()
                del self._segments[firsts[-1]]
            if not self._closed:
                self._write_backlog()
            self._changed.notify_all()

    def wait_acknowledged(self, timeout: float) -> bool:
        """Wait until everything is acknowledged; False when time was up before."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._acknowledged >= self._next - 1 and not self._backlog, timeout
            )

    # -- reading

    def entries(self, after: int, stop: threading.Event) -> Iterator[tuple[int, str]]:
        """Numbers and messages behind `after`, in order, waiting for new ones until `stop`.

        Whoever sets `stop` calls `wake` too.
        """
        number = after + 1
        reading, offset = 0, 0
        while True:
            with self._changed:
                while not stop.is_set() and self._next <= number:
                    self._changed.wait()
                if stop.is_set():
                    return
                number = max(number, next(iter(self._segments)))
                first = [first for first in self._segments if first <= number][-1]
                newest = self._next - 1
            if first != reading:
                reading, offset = first, 0
            with self._path(first).open("rb") as file:
                file.seek(offset)
                for line in file:
                    head, _, body = line.partition(b"\t")
                    found = int(head)
                    if found > newest or stop.is_set():
                        break
                    offset += len(line)
                    if found >= number:
                        yield found, body[:-1].decode()
                        number = found + 1

    def wait(self, wanted: int, stop: threading.Event) -> None:
        """Wait until `wanted` is acknowledged, or `stop` is set."""
        with self._changed:
            self._changed.wait_for(lambda: stop.is_set() or self._acknowledged >= wanted)

    def wake(self) -> None:
        """Make waiting readers look at their stop event."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Close the file; what is not acknowledged stays for the next start."""
        with self._changed:
            if not self._closed:
                self._closed = True
                os.close(self._file)
            self._changed.notify_all()

    # -- files

    def _path(self, first: int) -> Path:
        return self._folder / f"{first:012d}.jsonl"

    def _open(self) -> int:
        self._file = -1
        for path in sorted(self._folder.glob("*.jsonl")):
            first = int(path.stem)
            data = path.read_bytes()
            whole = data.rfind(b"\n") + 1
            if whole != len(data):
                os.truncate(path, whole)
            self._segments[first] = whole
            self._next = first
            for line in data[:whole].splitlines():
                head, _, body = line.partition(b"\t")
                self._next = int(head) + 1
                entry = decode(body)
                assert isinstance(entry, Spooled)
                for part in (entry.log, entry.steps, entry.metrics, entry.rank, entry.failure,
                             entry.report, entry.attempt_over):  # fmt: skip
                    if part is not None:
                        self._attempts[part.attempt] = entry.number
        if not self._segments:
            return self._new_segment(1)
        self._acknowledged = next(iter(self._segments)) - 1
        return os.open(
            self._path(next(reversed(self._segments))), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        )

    def _new_segment(self, first: int) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(self._path(first), flags, 0o600)
        if self._file >= 0:
            os.close(self._file)
        self._segments[first] = 0
        return descriptor
