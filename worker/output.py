"""A rank's output: cut into chunks of whole lines, metric lines, and the traceback at its end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from collective.messages import LogChunk, Metrics

__all__ = [
    "CHUNK_BYTES",
    "LineCutter",
    "Traceback",
    "culprit_of",
    "last_traceback",
    "last_words",
    "metrics_of",
]

#: a chunk has at most this many bytes; a longer line is spread over several
CHUNK_BYTES = 64 << 10
#: the line on stdout by which a program reports metrics
METRIC_PREFIX = b"::unisono "
#: a metric line longer than this is only a line
METRIC_BYTES = 16 << 10
METRIC_VALUES = 64

_COLLECTIVE = (
    "PeerLost|DeadlineExceeded|Mismatch|OperationAborted|GroupClosed|RendezvousFailed|"
    "LibraryFailed|ProtocolError"
)
_NAMES_RANK = re.compile(rf"\b(?:{_COLLECTIVE})\b[^\n]*?\brank (\d+)\b")
#: what torch puts before each line of a traceback that ended a rank
_TORCH_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
#: lines of stderr that are shown, at most, as the reason of a rank's end
LAST_LINES = 8
#: how records of logging and progress bars begin
_RECORD = re.compile(
    r"\s*(?:\[|\d{4}-\d\d-\d\d|\d\d?:\d\d|\d+%|(?:DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL)\b)"
)
_EXCEPTION = re.compile(r"^([A-Za-z_][\w.]*)(?:: ?(.*))?$")


class LineCutter:
    """Bytes of one stream in, `LogChunk`s of whole lines out.

    A carriage return ends a line too, so that progress bars are seen while they move.

    Args:
        emit: gets each chunk.
        on_line: gets each whole line of at most `METRIC_BYTES`, without its end.
    """

    def __init__(
        self,
        attempt: str,
        rank: int,
        stream: str,
        emit: Callable[[LogChunk], None],
        on_line: Callable[[bytes], None] | None = None,
    ) -> None:
        self._attempt = attempt
        self._rank = rank
        self._stream = stream
        self._emit = emit
        self._on_line = on_line
        self._pending = bytearray()
        self._offset = 0
        self._cut = 0
        self._line = bytearray()
        self._line_too_long = False

    @property
    def waiting(self) -> bool:
        """Whether whole lines wait for `flush`."""
        return self._line_end() > 0

    def feed(self, offset: int, cut: int, data: bytes) -> None:
        """Take the next bytes; `cut` bytes before `offset` were lost."""
        if cut:
            self.flush(partial=True)
            self._cut += cut
            self._line_too_long = True  # what follows is the end of a line nobody saw begin
            self._line.clear()
        if not self._pending:
            self._offset = offset
        self._pending += data
        if self._on_line is not None:
            self._find_lines(data)
        while len(self._pending) >= CHUNK_BYTES:
            self._take(self._line_end(CHUNK_BYTES) or _character_end(self._pending, CHUNK_BYTES))

    def flush(self, *, partial: bool = False) -> None:
        """Emit all whole lines; with `partial` also the beginning of one."""
        end = len(self._pending) if partial else self._line_end()
        if end or (partial and self._cut):
            self._take(end)

    def _line_end(self, limit: int | None = None) -> int:
        stop = len(self._pending) if limit is None else limit
        newline = self._pending.rfind(b"\n", 0, stop) + 1
        # "\r" at the very end may be the first half of "\r\n"
        carriage = self._pending.rfind(b"\r", newline, max(newline, stop - 1)) + 1
        return max(newline, carriage)

    def _take(self, size: int) -> None:
        data = bytes(self._pending[:size])
        del self._pending[:size]
        self._emit(
            LogChunk(
                attempt=self._attempt,
                rank=self._rank,
                stream="stdout" if self._stream == "stdout" else "stderr",
                offset=self._offset,
                text=data.decode("utf-8", "replace"),
                size=size,
                cut=self._cut,
            )
        )
        self._offset += size
        self._cut = 0

    def _find_lines(self, data: bytes) -> None:
        assert self._on_line is not None
        first, *others = data.split(b"\n")
        self._append(first)
        for part in others:
            if not self._line_too_long and self._line:
                self._on_line(bytes(self._line))
            self._line.clear()
            self._line_too_long = False
            self._append(part)

    def _append(self, part: bytes) -> None:
        if self._line_too_long:
            return
        if len(self._line) + len(part) > METRIC_BYTES:
            self._line_too_long = True
            self._line.clear()
        else:
            self._line += part


def _character_end(data: bytearray, limit: int) -> int:
    """The largest size up to `limit` that does not cut a UTF-8 character in two."""
    for back in range(1, 4):
        byte = data[limit - back]
        if byte & 0xC0 != 0x80:  # the first byte of a character; its high bits tell its length
            length = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
            return limit if back >= length else limit - back
    return limit


def metrics_of(line: bytes, attempt: str, rank: int) -> Metrics | None:
    """The metrics that a line of output reports, or None if it is just a line."""
    if not line.startswith(METRIC_PREFIX):
        return None
    try:
        body = json.loads(line[len(METRIC_PREFIX) :])
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict):
        return None
    step = body.pop("step", None)
    if isinstance(step, bool) or not isinstance(step, int):
        step = None
    values = {
        str(name)[:200]: value[:1000] if isinstance(value, str) else value
        for name, value in list(body.items())[:METRIC_VALUES]
        if isinstance(value, bool | int | float | str)
    }
    return Metrics(attempt=attempt, rank=rank, step=step, values=values)


@dataclass(frozen=True)
class Traceback:
    """An exception as Python prints it at the end of a program."""

    kind: str
    message: str
    text: str


def last_traceback(stderr: str) -> Traceback | None:
    """The last traceback in a rank's stderr, with the exceptions that led to it."""
    stderr = _TORCH_PREFIX.sub("", stderr)
    marker = "Traceback (most recent call last):"
    start = stderr.rfind(marker)
    if start < 0:
        return None
    lines = stderr[start:].splitlines()
    for index, line in enumerate(lines[1:], 1):
        if line.startswith((" ", "\t")) or not line.strip():
            continue
        found = _EXCEPTION.match(line)
        if found is None:
            continue
        first = start
        while True:
            before = stderr[:first].rstrip()
            if not before.endswith(
                (
                    "During handling of the above exception, another exception occurred:",
                    "The above exception was the direct cause of the following exception:",
                )
            ):
                break
            earlier = stderr.rfind(marker, 0, len(before))
            if earlier < 0:
                break
            first = earlier
        end = start + len("\n".join(lines[: index + 1]))
        return Traceback(
            kind=found[1].rpartition(".")[2],
            message=(found[2] or "")[:4000],
            text=stderr[first:end][-16_000:],
        )
    return None


def last_words(stderr: str) -> str | None:
    """What a rank's stderr says of its end; None if it says nothing.

    ``sys.exit("two\\nlines")`` leaves only text: it is the last lines that follow each other
    without a blank one, without what logging or a progress bar wrote before.
    """
    lines = [line.rstrip() for line in stderr.rstrip().splitlines()]
    if not lines:
        return None
    if _TORCH_PREFIX.match(lines[-1]) and (found := last_traceback(stderr)) is not None:
        # Behind the exception torch may list the frames of another thread.
        return f"{found.kind}: {found.message}"[:500]
    first = len(lines) - 1
    while (
        first > max(0, len(lines) - LAST_LINES)
        and not _RECORD.match(lines[first])
        and lines[first - 1].strip()
        and not _RECORD.match(lines[first - 1])
    ):
        first -= 1
    return "\n".join(lines[first:]).strip()[:500]


def culprit_of(text: str, rank: int) -> int | None:
    """The other rank that an error of a collective names, or None."""
    found = _NAMES_RANK.search(text)
    if found is None or int(found[1]) == rank:
        return None
    return int(found[1])
