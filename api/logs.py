"""Output of ranks as append-only files, bounded: the first and the last part are kept.

A stream is stored as segments ``<rank>.<stream>.<start>`` in the attempt's folder, where `start`
is the segment's place in the stream as stored.  Beyond the limit the segments in the middle are
deleted, and reading across the gap shows a mark in their place.

What is stored counts only up to the `size` that the database holds: a segment may end in bytes
of a write that was not committed, and the next write overwrites them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: a stream has this many segments: half of them from its start, half up to its end
SEGMENTS = 8
READ_BLOCK = 256 << 10


@dataclass(frozen=True)
class Piece:
    """Bytes that are stored at `offset` of the stream; or a mark for what is not, with no place."""

    offset: int
    data: bytes
    #: place in the stream behind this piece
    next_offset: int


class LogFiles:
    """The output files below one folder, each stream bounded by `limit` bytes."""

    def __init__(self, root: Path, limit: int) -> None:
        self.root = root
        self.limit = limit
        self.segment = max(1, limit // SEGMENTS)

    def _path(self, attempt: str, rank: int, stream: str, start: int) -> Path:
        return self.root / attempt / f"{rank}.{stream}.{start:016d}"

    def write(self, attempt: str, rank: int, stream: str, size: int, data: bytes) -> int:
        """Store bytes at the place `size`; the new size.  Writing the same twice is harmless.

        Raises:
            OSError: the disk is full, or the folder cannot be written.
        """
        (self.root / attempt).mkdir(parents=True, exist_ok=True)
        view = memoryview(data)
        while view:
            start = size - size % self.segment
            part = view[: start + self.segment - size]
            path = self._path(attempt, rank, stream, start)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                written = 0
                while written < len(part):
                    written += os.pwrite(descriptor, part[written:], size - start + written)
                os.fdatasync(descriptor)
            finally:
                os.close(descriptor)
            size += len(part)
            view = view[len(part) :]
            self._drop(attempt, rank, stream, start)
        return size

    def _drop(self, attempt: str, rank: int, stream: str, newest: int) -> None:
        """Delete the segment that leaves the kept end when `newest` enters it."""
        number = newest // self.segment - SEGMENTS // 2
        if number >= SEGMENTS // 2:
            self._path(attempt, rank, stream, number * self.segment).unlink(missing_ok=True)

    def read(
        self, attempt: str, rank: int, stream: str, size: int, offset: int, limit: int
    ) -> Iterator[Piece]:
        """At most `limit` stored bytes from `offset` on, in pieces, with marks for gaps."""
        while offset < size and limit > 0:
            start = offset - offset % self.segment
            end = min(start + self.segment, size)
            count = min(end - offset, limit, READ_BLOCK)
            try:
                with self._path(attempt, rank, stream, start).open("rb") as file:
                    file.seek(offset - start)
                    data = file.read(count)
            except FileNotFoundError:
                data = b""
            if not data:
                kept = self._next_kept(attempt, rank, stream, end, size)
                yield Piece(offset, cut_mark(kept - offset), kept)
                offset = kept
                continue
            yield Piece(offset, data, offset + len(data))
            offset += len(data)
            limit -= len(data)

    def _next_kept(self, attempt: str, rank: int, stream: str, start: int, size: int) -> int:
        while start < size and not self._path(attempt, rank, stream, start).exists():
            start += self.segment
        return min(start, size)


def cut_mark(dropped: int) -> bytes:
    """The line that stands for bytes that were not kept."""
    return f"\n[unisono: {dropped} bytes were cut here]\n".encode()
