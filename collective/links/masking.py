"""Masking (RFC 6455 §5.3): what a client sends is XORed with a key of four bytes per frame.

On a data link the client sends data only where its peer cannot dial it.  The bytes are XORed in
blocks that stay in the cache while they are copied, so the sender's own memory is not touched.
"""

from __future__ import annotations

import os

import numpy as np

from collective.links.wire import unmask
from collective.reduction import Array

#: bytes XORed at a time; blocks from 32 to 128 KiB took 40 us per MiB, of 4 KiB 200 us
_BLOCK = 64 << 10


class Mask:
    """A frame's key, as far as its payload needs it."""

    def __init__(self, key: bytes, phase: int = 0) -> None:
        """The key of a payload that begins `phase` bytes behind the frame's masked part."""
        turn = phase % 4
        self._key = key[turn:] + key[:turn]
        self._pattern: Array = np.frombuffer(b"", dtype=np.uint8)

    def apply(self, source: memoryview, target: memoryview, phase: int = 0) -> None:
        """XOR bytes that stand `phase` behind the payload's start into `target`, or in place."""
        turn = phase % 4
        size = min(len(source), _BLOCK) + turn
        if len(self._pattern) < size:
            self._pattern = np.frombuffer(self._key * (size // 4 + 1), dtype=np.uint8)
        data, room = (np.frombuffer(view, dtype=np.uint8) for view in (source, target))
        for start in range(0, len(data), _BLOCK):
            part = data[start : start + _BLOCK]
            pattern = self._pattern[turn : turn + len(part)]
            np.bitwise_xor(part, pattern, out=room[start : start + _BLOCK])


class Masker:
    """Makes a client's frames of a server's, in memory of its own."""

    def __init__(self) -> None:
        self._room = bytearray()

    def frame(self, head: bytes, payload: memoryview | None) -> tuple[bytes, memoryview | None]:
        """The same frame with a fresh key; valid until the next one is made."""
        key = os.urandom(4)
        size = {126: 4, 127: 10}.get(head[1], 2)
        start = bytes((head[0], head[1] | 0x80)) + head[2:size] + key
        rest = head[size:]
        masked = None
        if payload is not None and len(payload):
            if len(self._room) < len(payload):
                self._room = bytearray(len(payload))
            masked = memoryview(self._room)[: len(payload)]
            Mask(key, len(rest)).apply(payload, masked)
        return start + unmask(rest, key), masked
