"""Bounded log files."""

from __future__ import annotations

from pathlib import Path

from api.live import LogDelta
from api.logs import SEGMENTS, LogFiles


def read(files: LogFiles, size: int, offset: int = 0, limit: int = 1 << 30) -> bytes:
    return b"".join(piece.data for piece in files.read("a", 0, "stdout", size, offset, limit))


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    """Any range of a stream that fits its limit is what was written, across segments."""
    files, data, size = LogFiles(tmp_path, 8000), bytes(range(256)) * 30, 0
    for start in range(0, len(data), 700):
        size = files.write("a", 0, "stdout", size, data[start : start + 700])
    assert size == len(data)
    assert read(files, size) == data
    for offset, limit in ((0, 10), (995, 10), (1000, 1000), (2500, 4000), (7679, 5), (7680, 5)):
        assert read(files, size, offset, limit) == data[offset : offset + limit]


def test_writing_again_at_the_same_place_changes_nothing(tmp_path: Path) -> None:
    """A write that was not committed is overwritten by the next one, and not seen before."""
    files = LogFiles(tmp_path, 8000)
    size = files.write("a", 0, "stdout", 0, b"committed\n")
    files.write("a", 0, "stdout", size, b"lost in a crash, and longer\n")
    assert read(files, size) == b"committed\n"
    assert read(files, files.write("a", 0, "stdout", size, b"again\n")) == b"committed\nagain\n"


def test_the_middle_is_cut(tmp_path: Path) -> None:
    """Beyond the limit the start and the end are kept, and a mark tells what is missing."""
    files, size = LogFiles(tmp_path, 8000), 0
    for line in range(5000):
        size = files.write("a", 0, "stdout", size, b"%09d\n" % line)
    stored = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert stored <= 8000
    assert len(list((tmp_path / "a").iterdir())) == SEGMENTS
    text = read(files, size)
    lines = text.decode().splitlines()
    assert lines[0] == "000000000" and lines[-1] == "000004999"
    mark = next(line for line in lines if "cut here" in line)
    assert mark == f"[unisono: {size - 8000} bytes were cut here]"
    # A page in the gap is the mark and what follows it.
    assert read(files, size, 20_000, 10).endswith(b"\n")
    assert b"cut here" in read(files, size, 20_000, 10)


def test_a_frame_keeps_the_end_of_much_text() -> None:
    """Live text is bounded; what is left begins at a whole character and says where it is."""
    delta = LogDelta(0)
    data = "žluť".encode() * 10_000
    delta.add(0, data[:31_000])
    delta.add(31_000, data[31_000:])
    assert len(delta.data) <= 16 << 10
    assert delta.offset + len(delta.data) == len(data)
    assert data[delta.offset :] == bytes(delta.data)
    delta.data.decode()
