"""Lines: how a rank that cannot be dialled is asked to dial by itself.

The receiver of a link dials.  Where it cannot reach the sender, though the sender has reached it,
it says so on the connection that the sender made (CALL), and the sender makes a *line*: one more
connection, on which it is asked for every link from then on.  It dials those, and masks what it
sends.  Both sides of the lines of a rank are here, with one thread that listens to them.
"""

from __future__ import annotations

import json
import logging
import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from collective.errors import ProtocolError, RendezvousFailed
from collective.links.doorman import Connection
from collective.links.endpoint import SocketEndpoint
from collective.links.link import EndOfLink, Inlet, Outlet, frame_head
from collective.links.wire import FrameKind
from collective.tensor_format import parse_json

_log = logging.getLogger("unisono.collective")
#: bytes of what comes on a line
_MOST = 64 << 10
#: takes what an ABORT says, or None at the end of a connection
Told = Callable[[dict[str, object] | None], object]


@dataclass(frozen=True)
class Call:
    """Which connection a rank is asked to make.

    Attributes:
        group, channel: as in the handshake.
        caller, callee: ranks in the group: who receives the data and cannot dial, and who sends
            them and shall dial.
    """

    group: str
    channel: str
    caller: int
    callee: int

    def frame(self, epoch: int) -> tuple[bytes, memoryview]:
        """Head and payload of the frame that asks."""
        body = json.dumps(
            {
                "group": self.group,
                "channel": self.channel,
                "caller": self.caller,
                "callee": self.callee,
            }
        ).encode()
        return frame_head(FrameKind.CALL, epoch, 0, 0, len(body), 0), memoryview(body)

    @classmethod
    def decode(cls, data: bytes) -> Call:
        """The call that a frame's payload holds.

        Raises:
            ProtocolError: it holds none.
        """
        content = parse_json(data)
        try:
            return cls(
                str(content["group"]),
                str(content["channel"]),
                int(str(content["caller"])),
                int(str(content["callee"])),
            )
        except (KeyError, ValueError) as error:
            raise ProtocolError(f"a call without {error}") from None


@dataclass(eq=False)
class _Ear:
    """A connection that this rank made and on which it may be called."""

    peer: int
    inlet: Inlet
    #: whether it is for nothing else, and belongs to the ear
    line: bool
    #: is told what an ABORT says, or None at the end
    told: Told
    room: bytearray = field(default_factory=bytearray)


class Lines:
    """The lines of one rank; ranks are those of the world."""

    def __init__(self, epoch: int, answer: Callable[[int, Call], None]) -> None:
        """`answer(peer, call)` makes the connection that `peer` asks for, on the thread here.

        It raises RendezvousFailed if it cannot.
        """
        self._epoch = epoch
        self._answer = answer
        self._changed = threading.Condition()
        #: by peer that cannot be dialled: where to ask it
        self._lines: dict[int, Outlet] = {}
        self._ears: dict[int, _Ear] = {}
        self._thread: threading.Thread | None = None
        self._closing = False
        self._poll = select.poll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._bell, select.POLLIN)
        #: called when a line has ended
        self.on_end: Callable[[], None] = lambda: None

    # -- asking -------------------------------------------------------------------------------

    def has(self, peer: int) -> bool:
        """Whether there is a line to ask `peer` on."""
        with self._changed:
            return peer in self._lines

    def take(self, peer: int, connection: Connection) -> None:
        """A line that `peer` made."""
        outlet = Outlet(SocketEndpoint(connection.sock), connection.unread)
        with self._changed:
            old = self._lines.pop(peer, None)
            if old is not None:
                self._drop(old)
            if self._closing:
                outlet.close()
                return
            self._lines[peer] = outlet
            self._poll.register(outlet.endpoint.fileno(), select.POLLIN)
            self._start()
            self._changed.notify_all()

    def wait(self, peer: int, deadline: float, label: str, check: Callable[[], None]) -> None:
        """Return when the line that `peer` was asked to make is there.

        Raises:
            RendezvousFailed: it did not come by `deadline` (monotonic).
        """
        with self._changed:
            while peer not in self._lines:
                check()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise RendezvousFailed(f"{label} was asked to dial, and did not", rank=peer)
                self._changed.wait(left)

    def wake(self) -> None:
        """Have who waits look at its `check`."""
        with self._changed:
            self._changed.notify_all()

    def call(self, peer: int, call: Call) -> None:
        """Ask `peer` for a connection, unless the line has ended; `has` and `on_end` tell of that.

        Raises:
            RendezvousFailed: it is full of calls that the peer does not read.
        """
        with self._changed:
            line = self._lines.get(peer)
            if line is None:
                return
            try:
                if not line.flush():
                    raise RendezvousFailed(f"rank {peer} does not hear that it is asked to dial")
                if not line.begin(*call.frame(self._epoch)):
                    line.keep()
                    self._poll.modify(line.endpoint.fileno(), select.POLLIN | select.POLLOUT)
                    self._ring()
            except EndOfLink:
                return  # the thread here notices it as well

    # -- being asked --------------------------------------------------------------------------

    def listen(
        self, peer: int, inlet: Inlet, told: Told = lambda _: None, *, line: bool = False
    ) -> None:
        """Listen for calls on a connection that this rank made to `peer`; take over a `line`.

        Args:
            told: is called with what an ABORT says, or with None when the connection ended.
        """
        with self._changed:
            if self._closing:
                if line:
                    inlet.close()
                return
            self._ears[inlet.endpoint.fileno()] = _Ear(peer, inlet, line, told)
            self._poll.register(inlet.endpoint.fileno(), select.POLLIN)
            self._start()

    def ignore(self, inlet: Inlet) -> None:
        """Listen to a connection no more; it can be read elsewhere from then on."""
        with self._changed:
            if self._ears.pop(inlet.endpoint.fileno(), None) is not None:
                self._poll.unregister(inlet.endpoint.fileno())

    # -- the thread ---------------------------------------------------------------------------

    def _ring(self) -> None:
        os.eventfd_write(self._bell, 1)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="unisono-lines", daemon=True)
            self._thread.start()
        self._ring()

    def _run(self) -> None:
        while True:
            ready = self._poll.poll()
            heard: list[Callable[[], object]] = []
            ended = False
            with self._changed:
                if self._closing:
                    return
                for descriptor, mask in ready:
                    if descriptor == self._bell:
                        os.eventfd_read(self._bell)
                    elif descriptor in self._ears:
                        heard += self._hear(descriptor)
                    else:
                        ended |= self._look(descriptor, mask)
            if ended:
                self.on_end()
            for react in heard:
                react()

    def _call(self, peer: int, call: Call) -> None:
        try:
            self._answer(peer, call)
        except (RendezvousFailed, ProtocolError) as error:
            _log.warning(
                "rank %d asked for a connection of group %s, channel %s: %s",
                peer, call.group, call.channel, error,
            )  # fmt: skip

    def _hear(self, descriptor: int) -> list[Callable[[], object]]:
        """What to do of what came on one connection, without the lock, which is held here."""
        ear = self._ears[descriptor]
        inlet = ear.inlet
        inlet.readable = True
        heard: list[Callable[[], object]] = []
        try:
            while (header := inlet.header()) is not None:
                if header.kind not in (FrameKind.CALL, FrameKind.ABORT) or header.length > _MOST:
                    raise ProtocolError(f"a frame of kind {header.kind}")
                if len(ear.room) != header.length:
                    ear.room = bytearray(header.length)
                if not inlet.read_into(memoryview(ear.room)):
                    break
                body = bytes(ear.room)
                if header.kind == FrameKind.CALL:
                    heard.append(partial(self._call, ear.peer, Call.decode(body)))
                else:
                    heard.append(partial(ear.told, parse_json(body)))
        except (EndOfLink, ProtocolError) as error:
            if isinstance(error, ProtocolError):
                _log.warning("calls of rank %d are not heard any more: %s", ear.peer, error)
            heard.append(partial(ear.told, None))
            self._poll.unregister(descriptor)
            del self._ears[descriptor]
            if ear.line:
                inlet.close()
        return heard

    def _look(self, descriptor: int, mask: int) -> bool:
        """Something happened on a line of a peer that is asked; whether it ended."""
        for peer, line in list(self._lines.items()):
            if line.endpoint.fileno() != descriptor:
                continue
            try:
                if mask & select.POLLOUT:
                    line.writable = True
                    if line.flush():
                        self._poll.modify(descriptor, select.POLLIN)
                line.readable = True
                line.control()
            except (EndOfLink, ProtocolError):
                self._drop(self._lines.pop(peer))
                return True
        return False

    def _drop(self, line: Outlet) -> None:
        self._poll.unregister(line.endpoint.fileno())
        line.close()

    # -- the end ------------------------------------------------------------------------------

    def close(self) -> None:
        """Close all lines and end the thread."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._ring()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)
        self.abandon()

    def abandon(self) -> None:
        """Release this process's copies only; for a forked child, where the thread is not."""
        self._changed = threading.Condition()
        self._closing = True
        for line in self._lines.values():
            line.endpoint.abandon()
        for ear in self._ears.values():
            if ear.line:
                ear.inlet.endpoint.abandon()
        self._lines.clear()
        self._ears.clear()
        if self._bell >= 0:
            os.close(self._bell)
            self._bell = -1
