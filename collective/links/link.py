"""The two ends of a link: an `Outlet` sends segments, an `Inlet` receives them.

A link is one direction of one pair of ranks.  Data flows from outlet to inlet; a little control
flows back (`docs/protocols.md`).  Both ends work without blocking on any `Endpoint`.
"""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from collective.errors import ProtocolError
from collective.links.endpoint import Buffer, Endpoint, SocketEndpoint
from collective.links.masking import Mask, Masker
from collective.links.wire import (
    HEADER,
    HEADER_SIZE,
    MAX_FRAME,
    FrameKind,
    Header,
    masked,
    parse_head,
    plain,
    unmask,
    unmasked,
)

if TYPE_CHECKING:
    from collective.links.arena import Arena

#: what is read ahead of a payload's own place, in bytes
STAGING = 16 << 10
_CLOSE = 8
_PING = 9
_PONG = 10
#: what epoll is asked for of a link's endpoint
EDGE = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET
_GONE = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


class EndOfLink(ConnectionError):
    """The peer's side of the link is closed or broken."""


class Outlet:
    """The sending end; also reads what the peer sends back."""

    #: whether the engine's bell tells of this link, beside its endpoint
    belled = False
    #: further connections of the same link
    others: Sequence[Outlet] = ()

    def __init__(self, endpoint: Endpoint, unread: bytes = b"", *, client: bool = False) -> None:
        """An outlet over `endpoint`, of which `unread` was read; a `client` masks what it sends."""
        self.endpoint = endpoint
        self.client = client
        self._masker = Masker() if client else None
        self.readable = True
        self.writable = True
        self.hung_up = False
        self.greeted = False
        #: what the peer said in its HELLO
        self.greeting = b""
        #: how many connections the peer has made of this link
        self.connections = 1
        #: bytes given to the endpoint so far, headers included
        self.sent = 0
        self._flight: list[Buffer] = []
        self._urgent: deque[bytes] = deque()
        self._control = bytearray(unread)
        self._early: list[tuple[Header, bytes]] = []
        #: how the stream ended, as far as `control` knows
        self._ended: str | None = None
        self._room = memoryview(bytearray(4096))

    @property
    def idle(self) -> bool:
        """Whether no frame is on its way."""
        return not self._flight

    def begin(self, head: bytes, payload: memoryview | None) -> bool:
        """Start a frame, whose header (with the WebSocket's) is `head`; whether it is gone."""
        if self._masker is not None:
            head, payload = self._masker.frame(head, payload)
        self._flight = [head] if payload is None or not len(payload) else [head, payload]
        return self.flush()

    def lends(self, memory: Arena) -> bool:
        """Whether the peer can read `memory` where it is, so that `lend` may be called."""
        return False

    def lend(self, head: bytes, offset: int, size: int) -> int:
        """Make a frame whose payload the peer reads where it lies, for `flush`; its number.

        Only where `lends` said so.  What lies there must stay until `returned` is greater than
        the number, or until `take_back`.
        """
        raise NotImplementedError

    @property
    def returned(self) -> int:
        """How many of all frames the peer has read."""
        raise NotImplementedError

    def take_back(self) -> None:
        """What was lent and not returned will change: its operation is over."""

    def flush(self) -> bool:
        """Send on; True when nothing is on its way any more.

        Raises:
            EndOfLink: the peer does not take any more.
        """
        flight = self._flight
        while True:
            if not flight:
                if not self._urgent:
                    return True
                flight.append(self._urgent.popleft())
            if not self.writable:
                return False
            try:
                count = self.endpoint.send(flight)
            except BlockingIOError:
                self.writable = False
                return False
            except OSError as error:
                raise EndOfLink(str(error)) from error
            self.sent += count
            while flight and count >= len(flight[0]):
                count -= len(flight[0])
                del flight[0]
            if count:
                flight[0] = memoryview(flight[0])[count:]

    def append(self, frame: bytes) -> None:
        """Send a frame without a payload behind what is on its way."""
        if self._masker is not None:
            frame, _ = self._masker.frame(frame, None)
        self._urgent.append(frame)

    def keep(self) -> None:
        """Copy what is still on its way: the memory that it was sent from may change."""
        if self._masker is None:  # else it is a copy
            self._flight = [bytes(buffer) for buffer in self._flight]

    def take_over(self, other: Outlet) -> None:
        """Go on as another outlet over the same endpoint, which nothing was sent on yet."""
        self.greeted = other.greeted
        self.greeting = other.greeting
        self.connections = other.connections
        self._control = other._control
        self._early = other._early

    def control(self) -> list[tuple[Header, bytes]]:
        """Control frames that have arrived.

        Raises:
            EndOfLink: the peer closed or broke its side, and everything before was returned.
            ProtocolError: bytes that are no frame.
        """
        ended: str | None = None
        while self.readable:
            try:
                count = self.endpoint.recv_into(self._room)
            except BlockingIOError:
                self.readable = False
                break
            except OSError as error:
                ended = str(error)
                break
            if not count:
                ended = "end of file"
                break
            self._control += self._room[:count]
        frames, self._early = self._early, []
        while self._control:
            with memoryview(self._control) as view:
                try:
                    head = parse_head(view)
                except ValueError as error:
                    raise ProtocolError(str(error)) from None
                if head is None or len(view) < head.size + head.length:
                    break
                body = bytes(view[head.size : head.size + head.length])
            del self._control[: head.size + head.length]
            if head.key is not None:
                body = unmask(body, head.key)
            if head.opcode >= _CLOSE and len(body) > 125:
                raise ProtocolError(f"a frame of {len(body)} bytes with opcode {head.opcode}")
            if head.opcode == _PING:
                # a stock library's keep-alive; answered between two frames
                self._urgent.append(self._whole(body, 0x8A))
                if not self._flight:
                    self.flush()
            elif head.opcode in (_PONG, _CLOSE):
                continue
            elif len(body) < HEADER_SIZE:
                raise ProtocolError(f"a control frame of {len(body)} bytes")
            else:
                header = Header._make(HEADER.unpack_from(body))
                if header.kind == FrameKind.HELLO:
                    self.greeted = True
                    self.greeting = body[HEADER_SIZE:]
                    self.connections = header.sequence or 1
                else:
                    frames.append((header, body[HEADER_SIZE:]))
        self._ended = ended
        if ended is not None and not frames:
            raise EndOfLink(ended)
        return frames

    def _whole(self, body: bytes, opcode: int) -> bytes:
        return masked(body, opcode) if self.client else plain(body, opcode)

    def greet(self) -> bool:
        """Whether the peer's HELLO has come; what it said after that is kept for `control`.

        Raises:
            EndOfLink, ProtocolError: as `control`.
        """
        self.readable = True
        self._early = self.control()
        if self._ended is not None and not self.greeted:
            raise EndOfLink(self._ended)
        return self.greeted

    def hear(self, *kinds: FrameKind) -> tuple[Header, bytes] | None:
        """The first control frame of these kinds, if one has come; others stay for `control`.

        Raises:
            EndOfLink, ProtocolError: as `control`.
        """
        self.readable = True
        self._early = self.control()
        for place, frame in enumerate(self._early):
            if frame[0].kind in kinds:
                return self._early.pop(place)
        if self._ended is not None:
            raise EndOfLink(self._ended)
        return None

    def says(self, kind: FrameKind) -> bool:
        """Whether a control frame of a kind has come and is kept for `control`."""
        return any(header.kind == kind for header, _ in self._early)

    def ended(self) -> bool:
        """Whether the peer has closed its end, also where nobody has read that far."""
        return self.endpoint.ended()

    def end(self) -> None:
        """Say that no data follows: a close frame, then the end of the stream."""
        if not self._flight and self.writable:
            try:
                self.endpoint.send([self._whole(b"\x03\xe8", 0x88)])
            except OSError:
                pass  # the peer is gone or does not read: the half-close below still tells it
        self.endpoint.end()

    def close(self) -> None:
        """Release everything."""
        self.endpoint.close()


class Inlet:
    """The receiving end; also sends control back."""

    #: whether the engine's bell tells of this link, beside its endpoint
    belled = False
    #: further connections of the same link
    others: Sequence[Inlet] = ()
    #: how many of its connections data have come on
    used = 1

    def __init__(self, endpoint: Endpoint, *, client: bool = True) -> None:
        """An inlet over `endpoint`; to one that is no `client`, the data come masked."""
        self.endpoint = endpoint
        self.client = client
        #: of the current frame
        self._mask: Mask | None = None
        self.readable = True
        self.writable = True
        self.received = 0
        self._staging = memoryview(bytearray(STAGING))
        self._start = 0
        self._stop = 0
        self._header: Header | None = None
        self._missing = 0
        self.descriptor = b""
        self._back: deque[Buffer] = deque()
        self._short_read_empties = isinstance(endpoint, SocketEndpoint)
        #: set by the poller when the peer's end is closed: no further edge will come
        self.hung_up = False

    def header(self) -> Header | None:
        """The header of the current frame, or None when it is not all there yet.

        The same header is returned until the frame's payload has been read.

        Raises:
            EndOfLink: the stream ended between two frames, or in one.
            ProtocolError: bytes that are no frame.
        """
        if self._header is not None:
            return self._header
        while True:
            have = self._stop - self._start
            if have >= 2:
                header = self._parse()
                if header is not None:
                    return header
            if not self._fill():
                return None

    def _fill(self) -> bool:
        if not self.readable:
            return False
        if self._start:
            have = self._stop - self._start
            if have:
                self._staging[:have] = bytes(self._staging[self._start : self._stop])
            self._start, self._stop = 0, have
        room = self._staging[self._stop :]
        try:
            count = self.endpoint.recv_into(room)
        except BlockingIOError:
            self.readable = False
            return False
        except OSError as error:
            raise EndOfLink(str(error)) from error
        if not count:
            raise EndOfLink("end of file")
        if count < len(room) and self._short_read_empties and not self.hung_up:
            # the next bytes make a new edge; one system call saved per small frame
            self.readable = False
        self._stop += count
        self.received += count
        return True

    def _parse(self) -> Header | None:
        view = self._staging[self._start : self._stop]
        try:
            head = parse_head(view)
        except ValueError as error:
            raise ProtocolError(str(error)) from None
        if head is None:
            return None
        if head.opcode != 2:
            if head.length > 125:
                raise ProtocolError(f"a frame of {head.length} bytes with opcode {head.opcode}")
            if len(view) < head.size + head.length:
                return None
            if head.opcode == _PING:
                body = bytes(view[head.size : head.size + head.length])
                self._send(body if head.key is None else unmask(body, head.key), 0x8A)
            self._start += head.size + head.length
            return self._parse() if self._stop - self._start >= 2 else None
        if (head.key is None) is not self.client or head.length < HEADER_SIZE:
            raise ProtocolError(
                f"a data frame of {head.length} bytes, masked: {head.key is not None}"
            )
        if len(view) < head.size + HEADER_SIZE:
            return None
        if head.key is None:
            header = Header._make(HEADER.unpack_from(view, head.size))
        else:
            packed = view[head.size : head.size + HEADER_SIZE]
            header = Header._make(HEADER.unpack(unmask(packed, head.key)))
        if header.length + header.descriptor_length + HEADER_SIZE != head.length:
            raise ProtocolError(f"lengths of a frame do not add up: {header}")
        size = head.size + HEADER_SIZE
        if header.descriptor_length:
            if header.descriptor_length > STAGING - size:
                raise ProtocolError(f"a descriptor of {header.descriptor_length} bytes")
            if len(view) < size + header.descriptor_length:
                return None
            self.descriptor = bytes(view[size : size + header.descriptor_length])
            if head.key is not None:  # the header before it has a multiple of the key's bytes
                self.descriptor = unmask(self.descriptor, head.key)
            size += header.descriptor_length
        else:
            self.descriptor = b""
        self._start += size
        self._header = header
        self._missing = header.length
        self._mask = None if head.key is None else Mask(head.key, header.descriptor_length)
        return header

    def read_into(self, view: memoryview) -> bool:
        """Read the current frame's payload into `view`, of its length; whether all is there."""
        while self._missing:
            place = len(view) - self._missing
            have = self._stop - self._start
            if have:
                count = min(have, self._missing)
                view[place : place + count] = self._staging[self._start : self._start + count]
                self._start += count
                self._missing -= count
                if self._mask is not None:
                    part = view[place : place + count]
                    self._mask.apply(part, part, place)
                continue
            if not self.readable:
                return False
            try:
                count = self.endpoint.recv_into(view[place:])
            except BlockingIOError:
                self.readable = False
                return False
            except OSError as error:
                raise EndOfLink(str(error)) from error
            if not count:
                raise EndOfLink("end of file in a frame")
            self.received += count
            self._missing -= count
            if self._mask is not None:
                part = view[place : place + count]
                self._mask.apply(part, part, place)
        self._header = None
        return True

    def whole(self) -> memoryview | None:
        """The current frame's payload where it lies, if the link has it as a whole; then `drop` it.

        None for a link whose payloads must be read.
        """
        return None

    def drop(self) -> bool:
        """Done with what `whole` gave; False if its owner took it back meanwhile.

        Then it may have been something else that was read, and the frame's operation is over at
        its owner, whose word of that is under way.
        """
        raise NotImplementedError

    def skip(self, header: Header) -> bool:
        """Pass over the current frame; whether that is done."""
        return self.read_into(memoryview(bytearray(header.length)))

    def say(self, kind: FrameKind, epoch: int, sequence: int = 0, body: bytes = b"") -> None:
        """Send a control frame back, now or as soon as the socket takes it.

        Raises:
            EndOfLink: the peer does not take any more.
        """
        header = HEADER.pack(kind, 0, 0, epoch, sequence, 0, len(body), 0)
        self._send(header + body, 0x82)

    def _send(self, message: bytes, opcode: int) -> None:
        whole = masked if self.client else plain
        self._back.append(whole(message, opcode))
        self.flush()

    def flush(self) -> bool:
        """Send queued control frames on; True when all are gone."""
        while self._back:
            if not self.writable:
                return False
            try:
                count = self.endpoint.send([self._back[0]])
            except BlockingIOError:
                self.writable = False
                return False
            except OSError as error:
                raise EndOfLink(str(error)) from error
            if count < len(self._back[0]):
                self._back[0] = memoryview(self._back[0])[count:]
            else:
                self._back.popleft()
        return True

    def end(self) -> None:
        """Say that no control follows."""
        self.endpoint.end()

    def close(self) -> None:
        """Release everything."""
        self.endpoint.close()


def note(link: Outlet | Inlet, mask: int) -> None:
    """Take what epoll told of a link's endpoint."""
    if mask & _GONE:
        link.hung_up = True
        link.readable = link.writable = True
    if mask & select.EPOLLIN:
        link.readable = True
    if mask & select.EPOLLOUT:
        link.writable = True


def frame_head(
    kind: FrameKind,
    epoch: int,
    sequence: int,
    offset: int,
    length: int,
    checksum: int,
    descriptor: bytes = b"",
) -> bytes:
    """The bytes before a frame's payload: WebSocket header, header, and the descriptor if given."""
    size = HEADER_SIZE + len(descriptor) + length
    assert size <= MAX_FRAME
    flags = 1 if descriptor else 0
    packed = HEADER.pack(kind, flags, len(descriptor), epoch, sequence, offset, length, checksum)
    return unmasked(size) + packed + descriptor if descriptor else unmasked(size) + packed
