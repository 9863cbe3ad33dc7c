"""The shared-memory link between ranks of one node: a ring of slots, bells, and a Unix socket.

The sender makes a nameless memory file (`memfd_create`) and hands its descriptor over the Unix
socket on which both shook hands; the memory is gone with the last of the two processes, whatever
ends them.  A frame fills one slot: its head, then the payload at an aligned place, so that the
receiver can fold straight from the sender's slot.  Each side rings the other's bell, an eventfd
that the engine polls beside its sockets, after every slot filled or emptied.  Control and the end
of a peer come over the Unix socket.

One writer and one reader share two counters, each written by one side as a single aligned word;
the system call that rings a bell orders the memory before it (x86 and arm64 Linux).
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import socket
import time

import numpy as np

from collective.errors import ProtocolError, RendezvousFailed
from collective.links.endpoint import SocketEndpoint
from collective.links.link import EndOfLink, Inlet, Outlet
from collective.links.wire import HEADER, HEADER_SIZE, Header, parse_head
from collective.program import SEGMENT
from collective.reduction import Array

#: slots per link: one in the making, one in use, and some for small messages in a row
SLOTS = 4
_PAGE = 4096
#: a slot's head: two lengths (8 bytes each), then the frame's bytes before its payload
_HEAD = _PAGE
_SLOT = _HEAD + SEGMENT
SIZE = _PAGE + SLOTS * _SLOT
#: indexes of the counters, in words of eight bytes; each in a cache line of its own
_FILLED, _EMPTIED = 0, 8


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


def address(secret: str, world: str, epoch: int, rank: int) -> str:
    """The abstract Unix address at which `rank` (of the world) takes shared-memory links.

    It can only be known with the secret, and differs between the worlds of one machine.
    """
    digest = hashlib.sha256(f"{secret} {world} {epoch} {rank}".encode()).hexdigest()
    return f"\0unisono-{digest[:40]}"


def listen(where: str) -> socket.socket:
    """A listening Unix socket at an abstract address."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(where)
        sock.listen(256)
    except OSError as error:
        sock.close()
        raise RendezvousFailed(f"cannot listen for ranks of this node: {error}") from error
    return sock


def offer(sock: socket.socket, bell: int) -> int:
    """At the dialler, the receiver: make the memory, hand it and the own bell over.

    Returns:
        The memory's descriptor.
    """
    memory = make_memory()
    _hand_over(sock, b"m", [memory, bell], made=[memory])
    return memory


def take(sock: socket.socket, bell: int, deadline: float) -> tuple[int, int]:
    """At the dialled side, the sender: the memory and the peer's bell; the own bell goes back."""
    memory, peer_bell = _receive(sock, 2, deadline)
    _hand_over(sock, b"b", [bell], made=[memory, peer_bell])
    return memory, peer_bell


def _hand_over(sock: socket.socket, tag: bytes, descriptors: list[int], made: list[int]) -> None:
    """Send descriptors; where the peer is gone, close those that were made for it."""
    try:
        socket.send_fds(sock, [tag], descriptors)
    except OSError as error:
        for descriptor in made:
            os.close(descriptor)
        raise EndOfLink(str(error)) from error


def take_bell(sock: socket.socket, deadline: float) -> int:
    """At the dialler: the bell of the sender."""
    (bell,) = _receive(sock, 1, deadline)
    return bell


def _receive(sock: socket.socket, count: int, deadline: float) -> list[int]:
    sock.settimeout(max(0.001, deadline - time.monotonic()))
    try:
        data, descriptors, _, _ = socket.recv_fds(sock, 1, count)
    except TimeoutError:
        raise RendezvousFailed("a rank of this node connected but said nothing") from None
    except OSError as error:
        raise EndOfLink(str(error)) from error
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    if not data or len(descriptors) != count:
        for descriptor in descriptors:
            os.close(descriptor)
        raise EndOfLink("a rank of this node ended while it connected")
    return list(descriptors)


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
        self._peer_bell = peer_bell
        self._filled = 0
        self._frame: tuple[bytes, memoryview | None] | None = None

    @property
    def idle(self) -> bool:
        return self._frame is None

    def begin(self, head: bytes, payload: memoryview | None) -> bool:
        self._frame = (head, payload)
        return self.flush()

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
        head, payload = self._frame
        start = ring.slot(self._filled)
        size = 0 if payload is None else len(payload)
        ring.words[start >> 3] = len(head)
        ring.words[(start >> 3) + 1] = size
        ring.view[start + 16 : start + 16 + len(head)] = head
        if payload is not None:
            place = start + _HEAD
            ring.bytes[place : place + size] = np.frombuffer(payload, dtype=np.uint8)
        self._filled += 1
        ring.words[_FILLED] = self._filled
        self._frame = None
        self.sent += len(head) + size
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
        self._peer_bell = peer_bell
        self._emptied = 0
        self._current: Header | None = None

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
        if not HEADER_SIZE < length <= _HEAD - 16:
            raise ProtocolError(f"a frame with a head of {length} bytes in shared memory")
        view = ring.view[start + 16 : start + 16 + length]
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
        self._current = header
        return header

    def whole(self) -> memoryview | None:
        assert self._current is not None
        start = self._ring.slot(self._emptied) + _HEAD
        return self._ring.view[start : start + self._current.length]

    def read_into(self, view: memoryview) -> bool:
        assert self._current is not None
        length = self._current.length
        if length:
            start = self._ring.slot(self._emptied) + _HEAD
            np.frombuffer(view, dtype=np.uint8)[:] = self._ring.bytes[start : start + length]
        self.drop()
        return True

    def drop(self) -> None:
        self._current = None
        self._emptied += 1
        self._ring.words[_EMPTIED] = self._emptied
        os.eventfd_write(self._peer_bell, 1)

    def close(self) -> None:
        super().close()
        if self._peer_bell >= 0:
            self._ring.close()
            os.close(self._peer_bell)
            self._peer_bell = -1
