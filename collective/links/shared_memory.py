"""The shared-memory link between ranks of one node: a ring of slots, bells, and a Unix socket.

The receiver makes a nameless memory file (`memfd_create`) and hands its descriptor over the Unix
socket on which both shook hands; the memory is gone with the last of the two processes, whatever
ends them.  A frame fills one slot: its head, then the payload at an aligned place, so that the
receiver can fold straight from the sender's slot.  Each side rings the other's bell, an eventfd
that the engine polls beside its sockets, after every slot filled or emptied.  Control and the end
of a peer come over the Unix socket.

Where a payload lies in memory that both share already (`collective.links.arena`), the slot says
only where, and the receiver reads it there.  The sender gets it back when the slot is emptied.

One writer and one reader share two counters, each written by one side as a single aligned word;
the system call that rings a bell orders the memory before it (x86 and arm64 Linux).
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket

import numpy as np

from collective.errors import ProtocolError
from collective.links.arena import NAME, Arena, Borrowed, borrow
from collective.links.endpoint import SocketEndpoint
from collective.links.link import EndOfLink, Inlet, Outlet
from collective.links.wire import HEADER, HEADER_SIZE, Header, parse_head
from collective.program import SEGMENT
from collective.reduction import Array

#: slots per link: one in the making, one in use, and some for small messages in a row
SLOTS = 4
_PAGE = 4096
#: a slot's head: two lengths and, for a payload that lies elsewhere, 1 + its place there (8 bytes
#: each), then the frame's bytes before its payload
_HEAD = _PAGE
_WORDS = 24
_SLOT = _HEAD + SEGMENT
SIZE = _PAGE + SLOTS * _SLOT
#: indexes of the counters, in words of eight bytes; each in a cache line of its own
_FILLED, _EMPTIED = 0, 8
#: where it stands below which number of a frame the sender has taken back what it lent
_TAKEN_BACK = 16


class _Ring:
    """The mapped memory of one link."""

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, SIZE)
        self.bytes: Array = np.frombuffer(self._map, dtype=np.uint8)
        #: the file as words of eight bytes: counters, and the lengths at a slot's start
        self.words = memoryview(self._map).cast("Q")
        self.view = memoryview(self._map)

    def slot(self, number: int) -> int:
        """Where slot `number` starts."""
        return _PAGE + number % SLOTS * _SLOT

    def close(self) -> None:
        self.words.release()
        self.view.release()
        self.bytes = np.empty(0, dtype=np.uint8)
        try:
            self._map.close()
        except BufferError:
            pass  # an operation that was given up still looks at a slot; freed with it


def make_memory() -> int:
    """A descriptor of fresh memory for one link."""
    descriptor = os.memfd_create("unisono-link", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, SIZE)
    # neither side can take memory away under the other's feet
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return descriptor


class SharedOutlet(Outlet):
    """The sending end over shared memory."""

    belled = True

    def __init__(
        self, sock: socket.socket, memory: int, peer_bell: int, unread: bytes = b""
    ) -> None:
        """Take over a connected Unix socket, the memory's descriptor and the peer's bell."""
        super().__init__(SocketEndpoint(sock), unread)
        self._ring = _Ring(memory)
        os.close(memory)
        self._socket = sock
        self._peer_bell = peer_bell
        self._filled = 0
        #: head, payload, and 1 + its place where it is lent
        self._frame: tuple[bytes, memoryview | None, int, int] | None = None
        self._handed_over: Arena | None = None

    @property
    def idle(self) -> bool:
        return self._frame is None

    def begin(self, head: bytes, payload: memoryview | None) -> bool:
        self._frame = (head, payload, 0 if payload is None else len(payload), 0)
        return self.flush()

    def lends(self, memory: Arena) -> bool:
        if self._handed_over is not memory:
            try:
                socket.send_fds(self._socket, [memory.name], [memory.descriptor])
            except OSError:
                return False  # full, or the peer is gone, which is noticed where it is read
            self._handed_over = memory
        return True

    def lend(self, head: bytes, offset: int, size: int) -> int:
        self._frame = (head, None, size, 1 + offset)
        return self._filled

    @property
    def returned(self) -> int:
        return self._ring.words[_EMPTIED]

    def take_back(self) -> None:
        self._ring.words[_TAKEN_BACK] = self._filled + (self._frame is not None)

    def flush(self) -> bool:
        if self._frame is None:
            return True
        if not self.writable:
            return False
        ring = self._ring
        if self._filled - ring.words[_EMPTIED] >= SLOTS:
            if self.hung_up:
                raise EndOfLink("the peer's end of the shared memory is closed")
            self.writable = False
            return False
        head, payload, size, lent = self._frame
        start = ring.slot(self._filled)
        words = start >> 3
        ring.words[words], ring.words[words + 1], ring.words[words + 2] = len(head), size, lent
        ring.view[start + _WORDS : start + _WORDS + len(head)] = head
        if payload is not None:
            place = start + _HEAD
            ring.bytes[place : place + size] = np.frombuffer(payload, dtype=np.uint8)
        self._filled += 1
        ring.words[_FILLED] = self._filled
        self._frame = None
        self.sent += len(head) + (0 if lent else size)
        os.eventfd_write(self._peer_bell, 1)
        return True

    def close(self) -> None:
        super().close()
        if self._peer_bell >= 0:
            self._ring.close()
            os.close(self._peer_bell)
            self._peer_bell = -1


class SharedInlet(Inlet):
    """The receiving end over shared memory."""

    belled = True

    def __init__(self, sock: socket.socket, memory: int, peer_bell: int) -> None:
        super().__init__(SocketEndpoint(sock))
        self._ring = _Ring(memory)
        os.close(memory)
        self._socket = sock
        self._peer_bell = peer_bell
        self._emptied = 0
        self._current: Header | None = None
        #: where the current payload lies, and whether that is the sender's own memory
        self._payload = memoryview(b"")
        self._lent = False
        self._borrowed: Borrowed | None = None

    def header(self) -> Header | None:
        if self._current is not None:
            return self._current
        ring = self._ring
        if ring.words[_FILLED] == self._emptied:
            if self.hung_up:
                raise EndOfLink("the peer's end of the shared memory is closed")
            self.readable = False
            return None
        start = ring.slot(self._emptied)
        length = ring.words[start >> 3]
        if not HEADER_SIZE < length <= _HEAD - _WORDS:
            raise ProtocolError(f"a frame with a head of {length} bytes in shared memory")
        view = ring.view[start + _WORDS : start + _WORDS + length]
        try:
            head = parse_head(view)
        except ValueError as error:
            raise ProtocolError(str(error)) from None
        if head is None or length < head.size + HEADER_SIZE:
            raise ProtocolError("a frame without a header in shared memory")
        header = Header._make(HEADER.unpack_from(view, head.size))
        if (
            header.length != ring.words[(start >> 3) + 1]
            or header.length > SEGMENT
            or length != head.size + HEADER_SIZE + header.descriptor_length
        ):
            raise ProtocolError(f"lengths of a frame do not add up: {header}")
        self.descriptor = (
            bytes(view[head.size + HEADER_SIZE :]) if header.descriptor_length else b""
        )
        self.received += length + header.length
        place = ring.words[(start >> 3) + 2]
        self._lent = place > 0
        if self._lent:
            self._payload = self._borrow(place - 1, header.length)
        else:
            self._payload = ring.view[start + _HEAD : start + _HEAD + header.length]
        self._current = header
        return header

    def _borrow(self, offset: int, length: int) -> memoryview:
        """A piece of the sender's memory, whose descriptor came before the first mention of it."""
        if self._borrowed is None:
            try:
                name, descriptors, _, _ = socket.recv_fds(self._socket, NAME, 1)
            except OSError as error:
                raise ProtocolError(f"a peer lends memory that it did not share: {error}") from None
            if len(descriptors) != 1:
                raise ProtocolError("a peer lends memory that it did not share")
            self._borrowed = borrow(name, descriptors[0])
        if offset + length > self._borrowed.size:
            raise ProtocolError(
                f"a peer lends {length} bytes at {offset} of {self._borrowed.size} bytes"
            )
        return self._borrowed.view[offset : offset + length]

    def _gone(self) -> bool:
        """Whether the current payload is lent and was taken back."""
        return self._lent and self._ring.words[_TAKEN_BACK] > self._emptied

    def whole(self) -> memoryview | None:
        return None if self._gone() else self._payload

    def read_into(self, view: memoryview) -> bool:
        assert self._current is not None
        if self._current.length and not self._gone():
            np.frombuffer(view, dtype=np.uint8)[:] = np.frombuffer(self._payload, dtype=np.uint8)
        return self.drop()

    def drop(self) -> bool:
        if self._lent:
            # what was read is read before the look at the word: a system call orders them
            os.eventfd_write(self._peer_bell, 1)
            if self._gone():
                return False
        self._pass()
        return True

    def skip(self, header: Header) -> bool:
        self._pass()
        return True

    def _pass(self) -> None:
        self._current = None
        self._payload = memoryview(b"")
        self._emptied += 1
        self._ring.words[_EMPTIED] = self._emptied
        os.eventfd_write(self._peer_bell, 1)

    def close(self) -> None:
        super().close()
        self._payload = memoryview(b"")
        self._borrowed = None
        if self._peer_bell >= 0:
            self._ring.close()
            os.close(self._peer_bell)
            self._peer_bell = -1
