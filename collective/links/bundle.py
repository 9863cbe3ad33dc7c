"""A link of several connections: frame i travels on connection i mod n.

One connection cannot have more under way than its send buffer, so over a long way several of them
carry more.  The first connection is a whole link; control travels on it alone.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence

from collective.links.endpoint import Endpoint
from collective.links.link import Inlet, Outlet
from collective.links.wire import Header

#: connections that a link may have
MOST = 32
#: seconds of round trip from which on `auto` takes several connections, and how many: over 50 ms,
#: 4 carried 2.4 times as much as one, and 16 no more than 4 (docs/performance.md)
_FAR, _MANY = 0.01, 4
#: where the shortest round-trip time, in microseconds, stands in Linux' struct tcp_info; the
#: smoothed one holds acknowledgements that were late because the peer was busy
_RTT = 148


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


def wanted(sock: socket.socket) -> int:
    """How many connections a link over `sock` shall have, by `setting`.

    ``auto`` looks at the round-trip time that the kernel has measured.
    """
    number = setting()
    if number is not None:
        return number
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RTT + 4)
    (microseconds,) = struct.unpack_from("=I", info, _RTT)
    return _MANY if microseconds >= _FAR * 1e6 else 1


def channel(number: int) -> str:
    """The channel of connection `number` of a link of collectives."""
    return f"collective.{number}" if number else "collective"


class BundleOutlet(Outlet):
    """The sending end of several connections."""

    def __init__(self, first: Outlet, endpoints: Sequence[Endpoint]) -> None:
        """Take over a greeted outlet, and the endpoints of the other connections."""
        super().__init__(first.endpoint, client=first.client)
        self.take_over(first)
        self.others = [Outlet(endpoint, client=first.client) for endpoint in endpoints]
        self._turn = 0

    @property
    def idle(self) -> bool:
        """Whether the connection whose turn it is takes a frame."""
        return self.others[self._turn - 1].flush() if self._turn else super().flush()

    def begin(self, head: bytes, payload: memoryview | None) -> bool:
        """Start a frame; its bytes can be overwritten at once, whether it is gone or not."""
        turn = self._turn
        self._turn = (turn + 1) % (len(self.others) + 1)
        if turn:
            other = self.others[turn - 1]
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
        if not self._turn:
            return super().header()
        other = self.others[self._turn - 1]
        header = other.header()
        if header is not None:
            self.descriptor = other.descriptor
        return header

    def read_into(self, view: memoryview) -> bool:
        turn = self._turn
        done = self.others[turn - 1].read_into(view) if turn else super().read_into(view)
        if done:
            self._turn = (turn + 1) % (len(self.others) + 1)
        return done

    def close(self) -> None:
        super().close()
        for other in self.others:
            other.close()
