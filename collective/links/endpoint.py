"""Endpoints: a duplex stream of bytes to one peer that never blocks, and a descriptor to poll.

Two kinds serve one contract (`tests/process/test_links.py` runs it over both): a connected TCP
socket, and a pair of rings in memory for threads of one process.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import threading
from collections.abc import Sequence
from typing import Protocol

Buffer = bytes | bytearray | memoryview


class Endpoint(Protocol):
    """One end of a duplex byte stream."""

    def fileno(self) -> int:
        """A descriptor that becomes ready (edge-triggered) when reading or writing may go on."""

    def send(self, buffers: Sequence[Buffer]) -> int:
        """Take bytes from the front of `buffers`; how many.

        Raises:
            BlockingIOError: nothing can be taken now.
            ConnectionError: the peer is gone.
        """

    def recv_into(self, view: memoryview) -> int:
        """Fill `view` from the front; how many bytes, 0 at the end of the stream.

        Raises:
            BlockingIOError: nothing is there now.
            ConnectionError: the peer is gone.
        """

    def ended(self) -> bool:
        """Whether the peer has closed its end, also where nobody has read that far."""

    def end(self) -> None:
        """Half-close: the peer reads the end of the stream after what was sent."""

    def close(self) -> None:
        """Release everything; harmless when repeated."""

    def abandon(self) -> None:
        """Release this process's copies only; for a forked child, where nobody holds a lock."""


class SocketEndpoint:
    """A connected TCP socket."""

    def __init__(self, sock: socket.socket, *, lost_after: float = 600.0) -> None:
        """Take over `sock`; data that nobody takes for `lost_after` seconds mean a lost peer.

        The kernel counts a peer that is alive but does not read towards that time as well: where
        data go out, it must not be shorter than the longest pause that is allowed.  Where they
        only come in, it is how soon a machine that is gone is noticed, also in the middle of an
        operation and on an idle link.
        """
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            # TCP_USER_TIMEOUT replaces the number of probes: the last of them ends the connection
            third = max(1, int(lost_after / 3))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, min(5, third))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, min(3, third))
            sock.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, min(int(lost_after * 1000), 2**31 - 1)
            )
        self._socket = sock
        self.fileno = sock.fileno
        self.send = sock.sendmsg
        self.recv_into = sock.recv_into

    def fills_up_at(self, nbytes: int) -> None:
        """Take no more when so many bytes wait that the peer's window has no room for."""
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, nbytes)

    def local_address(self) -> str | None:
        """The address of this end, if it is one of a network."""
        inet = self._socket.family in (socket.AF_INET, socket.AF_INET6)
        return str(self._socket.getsockname()[0]) if inet else None

    def hosts(self) -> tuple[str, str]:
        """The addresses of this machine and of the peer's; its name where both are one."""
        if self._socket.family not in (socket.AF_INET, socket.AF_INET6):
            return socket.gethostname(), socket.gethostname()
        ends = self._socket.getsockname(), self._socket.getpeername()
        here, there = (str(end[0]).removeprefix("::ffff:").partition("%")[0] for end in ends)
        return here, there

    def ended(self) -> bool:
        poll = select.poll()
        poll.register(self._socket.fileno(), select.POLLRDHUP)
        return bool(poll.poll(0))

    def end(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            return  # the peer closed first: there is nobody to tell

    def close(self) -> None:
        self._socket.close()

    def abandon(self) -> None:
        self._socket.close()


class _Ring:
    """Bytes in flight in one direction between two threads."""

    def __init__(self, capacity: int) -> None:
        self.lock = threading.Lock()
        self.capacity = capacity
        #: made at first use: many links carry nothing, or control in one direction only
        self.data = memoryview(b"")
        self.start = 0
        self.used = 0
        self.ended = False

    def write(self, buffers: Sequence[Buffer]) -> int:
        capacity = self.capacity
        if not self.data:
            # not from the heap, which keeps for itself what links of a closed group had
            self.data = memoryview(mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE))
        taken = 0
        for buffer in buffers:
            view = memoryview(buffer)
            while view and self.used < capacity:
                place = (self.start + self.used) % capacity
                count = min(len(view), capacity - self.used, capacity - place)
                self.data[place : place + count] = view[:count]
                self.used += count
                taken += count
                view = view[count:]
            if view:
                break
        return taken

    def read(self, view: memoryview) -> int:
        capacity = self.capacity
        given = 0
        while given < len(view) and self.used:
            count = min(len(view) - given, self.used, capacity - self.start)
            view[given : given + count] = self.data[self.start : self.start + count]
            self.start = (self.start + count) % capacity
            self.used -= count
            given += count
        return given

    def drop(self) -> None:
        """End, and free the memory: nobody reads any more what is in it."""
        self.ended = True
        self.data = memoryview(b"")
        self.used = 0


class MemoryEndpoint:
    """One end of a pair of rings; `memory_pair` makes both."""

    def __init__(self, outgoing: _Ring, incoming: _Ring, bell: int, peer_bell: int) -> None:
        self._out = outgoing
        self._in = incoming
        self._bell = bell
        self._peer_bell = peer_bell
        self._closed = False

    def fileno(self) -> int:
        return self._bell

    def _ring(self) -> None:
        os.eventfd_write(self._peer_bell, 1)

    def send(self, buffers: Sequence[Buffer]) -> int:
        with self._out.lock:
            if self._out.ended:
                raise BrokenPipeError("the other end of the memory link is closed")
            taken = self._out.write(buffers)
        if not taken and any(buffers):
            raise BlockingIOError
        self._ring()
        return taken

    def recv_into(self, view: memoryview) -> int:
        with self._in.lock:
            was_full = self._in.used == self._in.capacity
            given = self._in.read(view)
            ended = self._in.ended
        if given:
            if was_full:
                self._ring()
            return given
        if ended:
            return 0
        raise BlockingIOError

    def ended(self) -> bool:
        with self._in.lock:
            return self._in.ended

    def end(self) -> None:
        with self._out.lock:
            self._out.ended = True
        self._ring()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with self._out.lock:
            self._out.ended = True
        with self._in.lock:
            self._in.drop()
        self._ring()
        os.close(self._bell)
        os.close(self._peer_bell)

    def abandon(self) -> None:
        if not self._closed:
            self._closed = True
            os.close(self._bell)
            os.close(self._peer_bell)


def memory_pair(
    capacity: int = 1 << 20, back: int = 64 << 10
) -> tuple[MemoryEndpoint, MemoryEndpoint]:
    """Two connected ends, the first for an outlet.

    Args:
        capacity: bytes that may be under way from the first to the second, which is for data.
        back: bytes that may be under way from the second to the first, which is for control.
    """
    forth, reverse = _Ring(capacity), _Ring(back)
    bells = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(2)]
    one = MemoryEndpoint(forth, reverse, bells[0], os.dup(bells[1]))
    two = MemoryEndpoint(reverse, forth, bells[1], os.dup(bells[0]))
    return one, two
