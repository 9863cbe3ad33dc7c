"""A link of several connections: a frame takes the first that has room.

One connection cannot have more under way than its buffers, so over a long way several of them
carry more.  The further ones stay idle until those before them are full: each keeps what it has
learned of the way only while it is used.  The first is a whole link; control travels on it alone.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from math import ceil
from pathlib import Path

from collective.errors import ProtocolError
from collective.links.endpoint import Endpoint, SocketEndpoint
from collective.links.link import Inlet, Outlet, frame_head
from collective.links.wire import FrameKind, Header

#: connections that a link may have, and that `auto` takes at most
MOST, _MANY = 32, 16
#: links of a rank times their connections, where `auto` chooses: each is a descriptor
_TOGETHER = 256
#: bytes per second (10 Gbit/s) for which `auto` makes connections; how many are used is seen then
_FAST = 1.25e9
#: bytes that a connection takes beyond what the network does: more would wait, not travel
_AHEAD = 128 << 10
#: where the shortest round-trip time, in microseconds, stands in Linux' struct tcp_info; the
#: smoothed one holds acknowledgements that were late because the peer was busy
_RTT = 148
#: the least, usual and most bytes of a buffer at each end; both ends are taken to be alike
_BUFFERS = Path("/proc/sys/net/ipv4/tcp_rmem"), Path("/proc/sys/net/ipv4/tcp_wmem")


def setting() -> int | None:
    """The number of connections that ``UNISONO_CONNECTIONS`` says, or None for ``auto``.

    Raises:
        ValueError: the variable is neither ``auto`` nor a number from 1 to `MOST`.
    """
    text = os.environ.get("UNISONO_CONNECTIONS") or "auto"
    if text == "auto":
        return None
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MOST):
        raise ValueError(
            f"UNISONO_CONNECTIONS is {text!r}; it is auto, or a number from 1 to {MOST}"
        )
    return int(text)


def wanted(sock: socket.socket, links: int) -> int:
    """How many connections a link over `sock`, one of `links` of a rank, shall have.

    ``auto`` makes as many as 10 Gbit/s would fill in the round-trip time that the kernel has
    measured: the way's own rate shows when data flow, by how many of them are full.
    """
    number = setting()
    if number is not None:
        return number
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RTT + 4)
    microseconds: int = struct.unpack_from("=I", info, _RTT)[0]
    # the kernel's own records take the other half of a buffer
    carried = min(int(path.read_text().split()[2]) for path in _BUFFERS) / 2
    filled = ceil(_FAST * microseconds / 1e6 / carried)
    return max(1, min(filled, _MANY, _TOGETHER // links))


def channel(number: int) -> str:
    """The channel of connection `number` of a link of collectives."""
    return f"collective.{number}" if number else "collective"


class BundleOutlet(Outlet):
    """The sending end of several connections."""

    def __init__(self, first: Outlet, endpoints: Sequence[SocketEndpoint]) -> None:
        """Take over a greeted outlet, and the endpoints of the other connections."""
        for endpoint in (first.endpoint, *endpoints):
            if isinstance(endpoint, SocketEndpoint):
                endpoint.fills_up_at(_AHEAD)
        super().__init__(first.endpoint, client=first.client)
        self.take_over(first)
        self.others = [Outlet(endpoint, client=first.client) for endpoint in endpoints]
        self._turn = 0

    @property
    def idle(self) -> bool:
        """Whether a connection takes a frame, which then has the turn."""
        if self._send_on(self._turn):
            return True
        for number in range(len(self.others) + 1):
            if number != self._turn and self._send_on(number):
                turn = frame_head(FrameKind.TURN, 0, number, 0, 0, 0)
                if self._turn:
                    self.others[self._turn - 1].append(turn)
                else:
                    self.append(turn)
                self._turn = number
                return True
        return False

    def _send_on(self, number: int) -> bool:
        return self.others[number - 1].flush() if number else super().flush()

    def begin(self, head: bytes, payload: memoryview | None) -> bool:
        """Start a frame; its bytes can be overwritten at once, whether it is gone or not."""
        if self._turn:
            other = self.others[self._turn - 1]
            if not other.begin(head, payload):
                other.keep()
        elif not super().begin(head, payload):
            self.keep()
        return True

    def flush(self) -> bool:
        """Send on, on every connection; True when nothing is on its way on any."""
        gone = super().flush()
        for other in self.others:
            gone &= other.flush()
        return gone

    def close(self) -> None:
        super().close()
        for other in self.others:
            other.close()


class BundleInlet(Inlet):
    """The receiving end of several connections."""

    def __init__(
        self, endpoint: Endpoint, others: Sequence[Endpoint], *, client: bool = True
    ) -> None:
        super().__init__(endpoint, client=client)
        self.others = [Inlet(other, client=client) for other in others]
        self._turn = 0

    def header(self) -> Header | None:
        while True:
            if self._turn:
                other = self.others[self._turn - 1]
                header = other.header()
                self.descriptor = other.descriptor
            else:
                header = super().header()
            if header is None or header.kind != FrameKind.TURN:
                return header
            if header.length or header.sequence > len(self.others):
                raise ProtocolError(f"{header} of a link of {1 + len(self.others)} connections")
            self.read_into(memoryview(b""))
            self._turn = header.sequence
            self.used = max(self.used, 1 + self._turn)

    def read_into(self, view: memoryview) -> bool:
        return (
            self.others[self._turn - 1].read_into(view) if self._turn else super().read_into(view)
        )

    def close(self) -> None:
        super().close()
        for other in self.others:
            other.close()
