"""One contract for both kinds of endpoint, and for the two ends of a link over each of them."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Iterator

import pytest
from resources import descriptors
from websockets.utils import apply_mask

from collective.errors import ProtocolError
from collective.links.endpoint import Endpoint, MemoryEndpoint, SocketEndpoint, memory_pair
from collective.links.link import EDGE, EndOfLink, Inlet, Outlet, frame_head
from collective.links.masking import Masker
from collective.links.wire import HEADER, HEADER_SIZE, MAX_FRAME, FrameKind, masked, plain

Ends = tuple[Endpoint, Endpoint]
#: seconds after which something that must happen has not
SOON = 5.0


def socket_pair() -> tuple[SocketEndpoint, SocketEndpoint]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    for sock in (one, other):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    return SocketEndpoint(one), SocketEndpoint(other)


@pytest.fixture(params=["memory", "socket"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    before = descriptors()
    pair: Ends = memory_pair(1 << 16) if request.param == "memory" else socket_pair()
    yield pair
    for end in pair:
        end.close()
        end.close()
    assert descriptors() == before, "both ends closed twice leave no descriptor"


class Edge:
    """Waits for the edges of one endpoint, as the engine does."""

    def __init__(self, end: Endpoint) -> None:
        self._epoll = select.epoll()
        self._epoll.register(end.fileno(), EDGE)

    def wait(self) -> None:
        assert self._epoll.poll(SOON), "no edge came"

    def __enter__(self) -> Edge:
        return self

    def __exit__(self, *_: object) -> None:
        self._epoll.close()


def receive(end: Endpoint, count: int) -> bytes:
    room = bytearray(count)
    got = 0
    with Edge(end) as edge:
        while got < count:
            try:
                step = end.recv_into(memoryview(room)[got:])
            except BlockingIOError:
                edge.wait()
                continue
            assert step, f"end of the stream after {got} of {count} bytes"
            got += step
    return bytes(room)


def send(end: Endpoint, data: bytes) -> None:
    left = memoryview(data)
    with Edge(end) as edge:
        while left:
            try:
                left = left[end.send([left]) :]
            except BlockingIOError:
                edge.wait()


# -- endpoints ------------------------------------------------------------------------------------


def test_nothing_to_read_is_not_the_end(ends: Ends) -> None:
    """Reading an empty stream blocks nobody and ends nothing."""
    with pytest.raises(BlockingIOError):
        ends[0].recv_into(memoryview(bytearray(10)))


def test_bytes_arrive_in_order_and_both_ways(ends: Ends) -> None:
    """More than the buffers hold goes through piece by piece, at once in both directions."""
    one, two = (os.urandom(3_000_001) for _ in range(2))
    got: dict[str, bytes] = {}
    threads = [
        threading.Thread(target=send, args=(ends[0], one)),
        threading.Thread(target=send, args=(ends[1], two)),
        threading.Thread(target=lambda: got.__setitem__("at 1", receive(ends[1], len(one)))),
        threading.Thread(target=lambda: got.__setitem__("at 0", receive(ends[0], len(two)))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert got == {"at 1": one, "at 0": two}


def test_a_full_stream_takes_a_part_and_then_nothing(ends: Ends) -> None:
    """Without a reader a large send is taken in part, then refused until somebody reads."""
    sender, receiver = ends
    block = bytes(range(256)) * 4096 * 16
    with Edge(sender) as edge:
        edge.wait()
        taken = 0
        with pytest.raises(BlockingIOError):  # noqa: PT012
            while True:
                count = sender.send([memoryview(block)[taken:], b"more"])
                assert count > 0
                taken += count
        assert 0 < taken < len(block)
        assert receive(receiver, taken) == block[:taken]
        edge.wait()  # reading made room, and the sender hears of it
    assert sender.send([b"again"]) == 5
    assert receive(receiver, 5) == b"again"


def test_several_buffers_go_as_one_stream(ends: Ends) -> None:
    """A header and a payload are taken with one call."""
    assert ends[0].send([b"head", memoryview(b"payload"), b""]) == 11
    assert receive(ends[1], 11) == b"headpayload"


def test_half_close_leaves_the_other_direction_open(ends: Ends) -> None:
    """After `end` the peer reads what was sent, then the end; it can still answer."""
    ends[0].send([b"last"])
    ends[0].end()
    assert receive(ends[1], 4) == b"last"
    with Edge(ends[1]) as edge:
        edge.wait()
    assert ends[1].recv_into(memoryview(bytearray(4))) == 0
    assert ends[1].send([b"answer"]) == 6
    assert receive(ends[0], 6) == b"answer"


def test_a_closed_peer_is_noticed_by_an_edge(ends: Ends) -> None:
    """Closing wakes a waiting peer; what was sent before is still read, then comes the end."""
    with Edge(ends[1]) as edge:
        edge.wait()
        ends[0].send([b"bye"])
        ends[0].close()
        edge.wait()
    assert receive(ends[1], 3) == b"bye"
    assert ends[1].recv_into(memoryview(bytearray(4))) == 0


def test_a_closed_peer_takes_nothing(ends: Ends) -> None:
    """Sending to a peer that is gone raises ConnectionError, at the latest with the next edge."""
    ends[0].close()
    with pytest.raises(ConnectionError), Edge(ends[1]) as edge:  # noqa: PT012
        while True:
            ends[1].send([b"x"])
            edge.wait()


def test_a_forked_copy_is_dropped_without_a_word() -> None:
    """`abandon` of a memory end neither takes a lock nor ends the stream for its peer."""
    one, two = memory_pair()
    assert isinstance(one, MemoryEndpoint)
    with one._out.lock, one._in.lock:
        one.abandon()
    with pytest.raises(BlockingIOError):
        two.recv_into(memoryview(bytearray(1)))
    two.close()


# -- the two ends of a link -----------------------------------------------------------------------


@pytest.fixture(params=["plain", "masked"])
def link(request: pytest.FixtureRequest, ends: Ends) -> tuple[Outlet, Inlet]:
    """A link that its inlet dialled, or its outlet, which then masks."""
    masks = request.param == "masked"
    return Outlet(ends[0], client=masks), Inlet(ends[1], client=not masks)


def data_frame(sequence: int, payload: bytes, descriptor: bytes = b"") -> bytes:
    return frame_head(
        FrameKind.DATA, 1, sequence, 0, len(payload), 0, descriptor
    )  # the payload follows


def pump(outlet: Outlet, inlet: Inlet, room: memoryview) -> bytes:
    """Move one frame whose sending has begun; its payload."""
    with Edge(inlet.endpoint) as into:
        gone = outlet.flush()
        while True:
            inlet.readable = True
            header = inlet.header()
            if header is not None and inlet.read_into(room[: header.length]):
                assert gone or outlet.flush()
                return bytes(room[: header.length])
            if gone:
                into.wait()
            else:
                outlet.writable = True
                gone = outlet.flush()


LARGEST = MAX_FRAME - HEADER_SIZE


@pytest.mark.parametrize("size", [0, 1, 93, 94, 65_503, 65_504, 1 << 19, LARGEST - 60, LARGEST])
def test_frames_of_every_size(link: tuple[Outlet, Inlet], size: int) -> None:
    """Frames around each length encoding, up to the largest, arrive whole, several in a row."""
    outlet, inlet = link
    room = memoryview(bytearray(MAX_FRAME))
    for sequence in range(1, 4):
        payload = os.urandom(size)
        descriptor = b'{"op":"x"}' if size <= LARGEST - 60 and sequence == 1 else b""
        outlet.begin(data_frame(sequence, payload, descriptor), memoryview(payload))
        assert pump(outlet, inlet, room) == payload
    assert outlet.idle
    assert outlet.sent == inlet.received


def test_a_header_stands_until_its_payload_was_read(link: tuple[Outlet, Inlet]) -> None:
    """Many small frames in one read come out one by one, in order, with their descriptors."""
    outlet, inlet = link
    for sequence in range(100):
        payload = bytes([sequence]) * sequence
        descriptor = b"{%d}" % sequence
        assert outlet.begin(data_frame(sequence, payload, descriptor), memoryview(payload))
    with Edge(inlet.endpoint) as edge:
        for sequence in range(100):
            while (header := inlet.header()) is None:
                edge.wait()
                inlet.readable = True
            assert inlet.header() is header
            assert (header.sequence, header.length) == (sequence, sequence)
            assert inlet.descriptor == b"{%d}" % sequence
            room = memoryview(bytearray(sequence))
            while not inlet.read_into(room):
                edge.wait()
                inlet.readable = True
            assert bytes(room) == bytes([sequence]) * sequence


def test_control_flows_back(link: tuple[Outlet, Inlet]) -> None:
    """What the inlet says arrives at the outlet in order, also while a frame is on its way."""
    outlet, inlet = link
    payload = bytes(LARGEST)
    outlet.begin(data_frame(1, payload), memoryview(payload))
    for number in range(50):
        inlet.say(FrameKind.STATUS, 7, number, b"%d" % number * 20)
    seen: list[tuple[int, bytes]] = []
    with Edge(outlet.endpoint) as edge:
        while len(seen) < 50:
            edge.wait()
            outlet.readable = True
            seen += [(header.sequence, body) for header, body in outlet.control()]
    assert seen == [(number, b"%d" % number * 20) for number in range(50)]
    assert pump(outlet, inlet, memoryview(bytearray(MAX_FRAME))) == payload


def test_what_follows_a_greeting_is_kept(link: tuple[Outlet, Inlet]) -> None:
    """Control that arrives together with HELLO is not lost by waiting for HELLO."""
    outlet, inlet = link
    inlet.say(FrameKind.HELLO, 1)
    inlet.say(FrameKind.WANT, 1, 5, b"{}")
    with Edge(outlet.endpoint) as edge:
        while not outlet.greet():
            edge.wait()
        while not (frames := outlet.control()):
            edge.wait()
            outlet.readable = True
    assert [(header.kind, header.sequence) for header, _ in frames] == [(FrameKind.WANT, 5)]


def test_a_ping_is_answered_between_frames(link: tuple[Outlet, Inlet]) -> None:
    """A stock client's ping gets its pong, never in the middle of a frame."""
    outlet, inlet = link
    payload = os.urandom(LARGEST)
    outlet.begin(data_frame(1, payload), memoryview(payload))
    whole = masked if inlet.client else plain
    send(inlet.endpoint, whole(b"are you there", 0x89))
    with Edge(outlet.endpoint) as edge:
        edge.wait()
    outlet.readable = True
    assert outlet.control() == []
    assert pump(outlet, inlet, memoryview(bytearray(MAX_FRAME))) == payload
    outlet.begin(data_frame(2, b"next"), memoryview(b"next"))
    assert pump(outlet, inlet, memoryview(bytearray(10))) == b"next"
    assert outlet.sent == inlet.received
    send(inlet.endpoint, whole(b"x", 0x89))
    with Edge(outlet.endpoint) as edge:
        edge.wait()
    outlet.readable = True
    outlet.control()
    assert pong(inlet.endpoint, outlet.client) == b"x"


def pong(end: Endpoint, from_client: bool) -> bytes:
    """The one byte of a pong that has come."""
    if not from_client:
        assert receive(end, 2) == b"\x8a\x01"
        return receive(end, 1)
    assert receive(end, 2) == b"\x8a\x81"
    key = receive(end, 4)
    return apply_mask(receive(end, 1), key)


def test_the_receiver_answers_pings_too(link: tuple[Outlet, Inlet]) -> None:
    """A ping between two frames gets its pong when the receiver reads that far."""
    outlet, inlet = link
    whole = masked if outlet.client else plain
    send(outlet.endpoint, whole(b"?", 0x89))
    outlet.begin(data_frame(1, b"next"), memoryview(b"next"))
    assert pump(outlet, inlet, memoryview(bytearray(10))) == b"next"
    assert pong(outlet.endpoint, inlet.client) == b"?"


def test_the_end_between_frames_and_in_one(link: tuple[Outlet, Inlet]) -> None:
    """A stream that ends raises EndOfLink, after everything before was delivered."""
    outlet, inlet = link
    outlet.begin(data_frame(1, b"whole"), memoryview(b"whole"))
    assert pump(outlet, inlet, memoryview(bytearray(10))) == b"whole"
    head = data_frame(2, b"half a payload")
    if outlet.client:
        head, _ = Masker().frame(head, None)
    assert outlet.endpoint.send([head, b"half"])
    outlet.endpoint.end()
    with Edge(inlet.endpoint) as edge, pytest.raises(EndOfLink, match="in a frame"):  # noqa: PT012
        room = memoryview(bytearray(14))
        while True:
            inlet.readable = True
            if inlet.header() is None or not inlet.read_into(room):
                edge.wait()


def test_an_orderly_end_is_a_close_frame_and_the_end(link: tuple[Outlet, Inlet]) -> None:
    """`end` of both ends is met between frames on the other side."""
    outlet, inlet = link
    outlet.end()
    with Edge(inlet.endpoint) as edge, pytest.raises(EndOfLink, match="end of file"):  # noqa: PT012
        while True:
            inlet.readable = True
            inlet.header()
            edge.wait()
    inlet.say(FrameKind.LEFT, 1, 9)
    inlet.end()
    seen = []
    with Edge(outlet.endpoint) as edge, pytest.raises(EndOfLink):  # noqa: PT012
        while True:
            outlet.readable = True
            seen += outlet.control()
            edge.wait()
    assert [(header.kind, header.sequence) for header, _ in seen] == [(FrameKind.LEFT, 9)]


def test_control_that_ends_in_the_middle_is_an_end(link: tuple[Outlet, Inlet]) -> None:
    """Half a control frame before the end of the stream does not hide the end."""
    outlet, inlet = link
    header = HEADER.pack(FrameKind.STATUS, 0, 0, 1, 1, 0, 4, 0)
    whole = masked if inlet.client else plain
    send(inlet.endpoint, whole(header + b"body")[:20])
    inlet.endpoint.end()
    with Edge(outlet.endpoint) as edge, pytest.raises(EndOfLink):  # noqa: PT012
        while True:
            outlet.readable = True
            assert outlet.control() == []
            edge.wait()


@pytest.mark.parametrize(
    "rubbish",
    [
        b"\x02\x05hello",  # not the last fragment of a message
        b"\xc2\x05hello",  # an extension's bit
        b"\x82\x7f\x00\x00\x00\x00\x00\x20\x00\x00",  # larger than any frame
        b"\x82\x05short",  # no room for a header
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_rubbish_is_a_protocol_error(link: tuple[Outlet, Inlet], rubbish: bytes) -> None:
    """Bytes that are no frame raise ProtocolError at both ends and are not waited out."""
    outlet, inlet = link
    send(outlet.endpoint, rubbish)
    send(inlet.endpoint, rubbish)
    with Edge(inlet.endpoint) as edge, pytest.raises(ProtocolError):  # noqa: PT012
        while True:
            inlet.readable = True
            inlet.header()
            edge.wait()
    with Edge(outlet.endpoint) as edge, pytest.raises(ProtocolError):  # noqa: PT012
        while True:
            outlet.readable = True
            outlet.control()
            edge.wait()
