"""Wire format 1: what a frame on a link looks like, byte by byte.

Each frame is one binary WebSocket message (RFC 6455, FIN set, no extension) of at most
`MAX_FRAME` bytes: a fixed little-endian header, then for the first frame of an operation its
descriptor, then the payload.  Data goes from the server of the handshake to the client, so it
is not masked; what goes the other way is control: small, masked and rare.  Only where the receiver
cannot dial the sender it is the other way round, and the data are masked.
"""

from __future__ import annotations

import os
import struct
from enum import IntEnum
from typing import NamedTuple

MAX_FRAME = 1 << 20
HEADER = struct.Struct("<BBHIQQII")
HEADER_SIZE = HEADER.size  # 32


class FrameKind(IntEnum):
    """What a frame is for; those below 16 flow with the data, the rest against them."""

    DATA = 1  # a segment of a collective, or of a tensor that is downloaded
    MESSAGE = 2  # a segment of a point-to-point message
    TENSOR = 3  # what a downloaded tensor is: JSON
    REFUSAL = 4  # why there is no download: JSON
    CALL = 5  # the client is asked to dial, since the server cannot: JSON
    PROBED = 6  # bytes without a meaning, by which a link is measured
    TURN = 7  # the next frame comes on connection `sequence` of the link
    HELLO = 16  # the dialler is ready to receive; what it says of itself: JSON
    ABORT = 17  # an operation is given up: JSON
    LEFT = 18  # this rank left the group in order, after operation `sequence`
    STATUS = 19  # where this rank is: JSON
    OFFER = 20  # a send waits for its receiver: JSON
    WANT = 21  # a receive waits for its sender: JSON
    FETCH = 22  # which tensor is to be downloaded, and from which byte on: JSON
    DONE = 23  # the tensor is here and its checksum is right; the link has been measured
    PROBE = 24  # asks for `sequence` bytes, to measure the link
    FIGURES = 25  # what a rank has measured: JSON


#: flag: the descriptor follows the header; its length is in the header's third field
WITH_DESCRIPTOR = 1


class Header(NamedTuple):
    """The fixed part of a frame.

    `sequence` is the operation's number in its group (for MESSAGE: the number that the receiver
    gave in WANT), `offset` the payload's place in the bytes that this operation sends on this
    link, `length` the payload's bytes, `checksum` the CRC-32 of the operation's descriptor.
    """

    kind: int
    flags: int
    descriptor_length: int
    epoch: int
    sequence: int
    offset: int
    length: int
    checksum: int


def plain(message: bytes, opcode: int = 0x82) -> bytes:
    """A whole small message from a server."""
    head = unmasked(len(message))
    return bytes((opcode,)) + head[1:] + message


def unmasked(length: int) -> bytes:
    """The WebSocket header of a binary message of `length` bytes from a server."""
    if length < 126:
        return bytes((0x82, length))
    if length < 65536:
        return b"\x82\x7e" + length.to_bytes(2, "big")
    return b"\x82\x7f" + length.to_bytes(8, "big")


def masked(message: bytes, opcode: int = 0x82) -> bytes:
    """A whole small message from a client, with a fresh masking key (RFC 6455 §5.3)."""
    key = os.urandom(4)
    length = len(message)
    if length < 126:
        head = bytes((opcode, 0x80 | length))
    elif length < 65536:
        head = bytes((opcode, 0xFE)) + length.to_bytes(2, "big")
    else:
        raise ValueError(f"a control message has at most 65535 bytes, not {length}")
    return head + key + unmask(message, key)


def unmask(data: bytes | bytearray | memoryview, key: bytes) -> bytes:
    """XOR `data` with the repeated four bytes of `key`."""
    length = len(data)
    if not length:
        return b""
    pattern = (key * (length // 4 + 1))[:length]
    return (int.from_bytes(data, "big") ^ int.from_bytes(pattern, "big")).to_bytes(length, "big")


class WebSocketHead(NamedTuple):
    """A parsed WebSocket frame header: its own size, opcode, masking key and payload length."""

    size: int
    opcode: int
    key: bytes | None
    length: int


def parse_head(data: memoryview) -> WebSocketHead | None:
    """The WebSocket frame header at the start of `data`, or None when bytes are missing."""
    have = len(data)
    if have < 2:
        return None
    first, second = data[0], data[1]
    if first & 0x70 or not first & 0x80:
        raise ValueError(f"fragmented or extended WebSocket frame (first byte {first:#04x})")
    length = second & 0x7F
    size = 2
    if length == 126:
        size = 4
        if have < size:
            return None
        length = int.from_bytes(data[2:4], "big")
    elif length == 127:
        size = 10
        if have < size:
            return None
        length = int.from_bytes(data[2:10], "big")
    key = None
    if second & 0x80:
        if have < size + 4:
            return None
        key = bytes(data[size : size + 4])
        size += 4
    if length > MAX_FRAME:
        raise ValueError(f"a frame of {length} bytes; at most {MAX_FRAME} are allowed")
    return WebSocketHead(size, first & 0x0F, key, length)
