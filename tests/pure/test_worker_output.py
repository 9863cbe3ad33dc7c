"""Output of ranks: chunks of whole lines without gaps, metric lines, tracebacks."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from collective.messages import LogChunk
from worker.output import (
    CHUNK_BYTES,
    LineCutter,
    culprit_of,
    last_traceback,
    last_words,
    metrics_of,
)


@settings(deadline=None)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=40),
            st.sampled_from([b"line\n", b"\r", b"\r\n", "模型🐎".encode(), b"x" * CHUNK_BYTES]),
        ),
        max_size=20,
    ),
    st.integers(min_value=1, max_value=100_000),
    st.lists(st.booleans(), min_size=1),
)
def test_chunks_hold_every_byte_once(parts: list[bytes], size: int, flushes: list[bool]) -> None:
    """However output arrives, chunks follow each other without a gap and end at lines' ends."""
    data = b"".join(parts)
    chunks: list[LogChunk] = []
    cutter = LineCutter("a-1", 0, "stdout", chunks.append, lambda line: None)
    flush = itertools.cycle(flushes)
    for start in range(0, len(data), size):
        cutter.feed(start, 0, data[start : start + size])
        if next(flush):
            cutter.flush()
            last = chunks[-1] if chunks else None
            if last is not None and last.size < CHUNK_BYTES - 3:
                assert last.text.endswith(("\n", "\r"))
    cutter.flush(partial=True)
    offset = 0
    for chunk in chunks:
        assert (chunk.offset, chunk.cut) == (offset, 0)
        assert 0 < chunk.size <= CHUNK_BYTES
        offset += chunk.size
    assert offset == len(data)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return
    assert "".join(chunk.text for chunk in chunks) == text


def test_what_was_lost_is_told_by_the_next_chunk() -> None:
    """A gap ends the chunk before it, and the line that follows it is no metric."""
    chunks: list[LogChunk] = []
    lines: list[bytes] = []
    cutter = LineCutter("a-1", 0, "stdout", chunks.append, lines.append)
    cutter.feed(0, 0, b"one\nhal")
    cutter.feed(107, 100, b"::unisono {}\ntwo\n")
    cutter.flush()
    assert [(c.offset, c.cut, c.text) for c in chunks] == [
        (0, 0, "one\nhal"),
        (107, 100, "::unisono {}\ntwo\n"),
    ]
    assert lines == [b"one", b"two"]


def test_metric_lines_are_read_with_care() -> None:
    """Only objects count, only plain values are kept, and a step is a whole number."""
    found = metrics_of(b'::unisono {"step": true, "a": 1, "b": [1], "c": null, "d": "x"}', "a-1", 0)
    assert found is not None
    assert (found.step, found.values) == (None, {"a": 1, "d": "x"})
    for line in (b"::unisono [1]", b"::unisono", b"::unisono {", b"::unisono " + b"[" * 10_000):
        assert metrics_of(line, "a-1", 0) is None


def test_the_last_traceback_counts() -> None:
    """An earlier exception that was printed and survived is not the cause of the end."""
    text = (
        "Traceback (most recent call last):\n  File x\nKeyError: 'old'\ngoing on\n"
        "Traceback (most recent call last):\n  File y\n"
        "torch.distributed.DistBackendError: NCCL error\nmore of it\n"
    )
    found = last_traceback(text)
    assert found is not None
    assert (found.kind, found.message) == ("DistBackendError", "NCCL error")
    assert "KeyError" not in found.text
    assert last_traceback("no traceback here") is None
    torch = "[rank1]: Traceback (most recent call last):\n[rank1]:   File x\n"
    torch += "[rank1]: RuntimeError: PeerLost: rank 2\n\n[rank1]: At:\n[rank1]:   a.py(1): _run\n"
    found = last_traceback(torch)
    assert found is not None and found.message == "PeerLost: rank 2"
    assert found.text == "Traceback (most recent call last):\n  File x\nRuntimeError: " + (
        "PeerLost: rank 2"
    )
    assert last_words(torch) == "RuntimeError: PeerLost: rank 2"
    assert last_words(torch + "\ngave up\n \n") == "gave up"
    assert last_words(" \n") is None
    assert last_traceback("Traceback (most recent call last):\n  File z\n") is None


def test_the_last_words_are_whole() -> None:
    """A message of several lines is told whole, without the records and lines before it."""
    assert last_words("a\nb\n") == "a\nb"
    assert last_words("usage: x [-h]\nx: error: no data\n") == "usage: x [-h]\nx: error: no data"
    assert last_words("2026-01-01 INFO step\nWARNING:root:slow\nno\n  data\n") == "no\n  data"
    assert last_words("some warning\n\nthe end\n") == "the end"
    assert last_words("text\nERROR:root:last\n") == "ERROR:root:last"
    assert last_words("  3%|=  | 1/30\r  7%|== | 2/30\nout of data") == "out of data"
    told = last_words("\n".join(map(str, range(100))))
    assert told is not None and told.split("\n") == [str(number) for number in range(92, 100)]


def test_the_culprit_is_the_rank_that_the_error_names() -> None:
    """Wrapped or not, an error of a collective names the rank at fault; its own rank is none."""
    assert culprit_of("collective.errors.PeerLost: rank 2 on node w2 is gone", 0) == 2
    assert culprit_of("RuntimeError: … callback: Mismatch: all_reduce of rank 3 has", 0) == 3
    assert culprit_of("PeerLost: rank 2 on node w2", 2) is None
    assert culprit_of("ValueError: rank 2 is bad", 0) is None
