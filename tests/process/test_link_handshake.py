"""Who may dial a rank: stock WebSocket clients with the right headers, and nobody else."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
import torch
import websockets.asyncio.client
import websockets.asyncio.server
import websockets.sync.client
import websockets.sync.server
from resources import descriptors, threads
from thread_ranks import ThreadRanks, addresses, socket_groups
from waiting import eventually
from websockets.exceptions import InvalidStatus
from websockets.typing import Subprotocol

import collective
from collective.descriptor import describe
from collective.group import Group
from collective.links.shared_memory import SharedOutlet
from collective.links.wire import HEADER, HEADER_SIZE, FrameKind, Header
from collective.program import SEGMENT

SECRET = "open-sesame-0123456789"


def headers(**changes: str | None) -> dict[str, str]:
    values: dict[str, str | None] = {
        "Unisono-Job": "-", "Unisono-Attempt": "-", "Unisono-Group": "default",
        "Unisono-Epoch": "1", "Unisono-Rank": "1", "Unisono-Peer": "0",
        "Unisono-Channel": "collective", "Unisono-Secret": SECRET,
    }  # fmt: skip
    values.update({f"Unisono-{name}": value for name, value in changes.items()})
    return {name: value for name, value in values.items() if value is not None}


@pytest.fixture
def group() -> Iterator[Group]:
    """A rank alone, whose listener still answers."""
    before = descriptors(), threads()
    with collective.init(0, addresses=addresses(1), secret=SECRET) as group:
        yield group
    assert (descriptors(), threads()) == before


def port_of(group: Group) -> tuple[str, int]:
    name: tuple[str, int] = group._wiring._listener._sockets[0].getsockname()  # type: ignore
    return name


def url_of(group: Group, path: str = "/unisono") -> str:
    host, port = port_of(group)
    return f"ws://{host}:{port}{path}"


def still_works(group: Group) -> None:
    """The rank takes a good link and runs operations after whatever happened."""
    with socket.create_connection(port_of(group), timeout=5) as dialler:
        dialler.sendall(raw_request())
        assert dialler.recv(4096).startswith(b"HTTP/1.1 101 ")
    tensor = torch.ones(3)
    group.all_reduce(tensor)
    assert tensor.tolist() == [1.0] * 3


REFUSALS: list[tuple[str, dict[str, Any], int, str]] = [
    ("wrong secret", {"Secret": "wrong-guess-999"}, 401, "wrong secret"),
    ("other case", {"Secret": SECRET.upper()}, 401, "wrong secret"),
    ("empty secret", {"Secret": ""}, 401, "wrong secret"),
    ("no secret", {"Secret": None}, 400, "Unisono-Secret"),
    ("another job", {"Job": "j-7"}, 404, "not attempt - of job j-7"),
    ("another attempt", {"Attempt": "a-2"}, 404, "not attempt a-2"),
    ("an older epoch", {"Epoch": "0"}, 409, "at epoch 1, the dialler at 0"),
    ("a later epoch", {"Epoch": "2"}, 425, "at epoch 1, the dialler at 2"),
    ("another rank", {"Peer": "3"}, 404, "this is rank 0, not rank 3"),
    ("a subgroup without it", {"Group": "default:x/1,2", "Peer": "1"}, 404, "not rank 2"),
    ("no such member", {"Group": "default:x/0,1", "Peer": "2"}, 404, "has no rank 2"),
    ("members that are none", {"Group": "default:x/0,a", "Peer": "0"}, 404, ""),
    ("an epoch that is none", {"Epoch": "-1"}, 400, "Unisono-Epoch"),
    ("a rank that is none", {"Rank": "1e3"}, 400, "Unisono-Rank"),
    ("no rank", {"Rank": None}, 400, "Unisono-Rank"),
    ("no group", {"Group": None}, 400, "Unisono-Group"),
    ("a group with markup", {"Group": "<b>"}, 400, "Unisono-Group"),
    ("another channel", {"Channel": "gossip"}, 400, "Unisono-Channel"),
    (
        "other addresses",
        {"Addresses": "2 a:1,b:2"},
        409,
        "rank 1 lists 2 addresses, rank 0 lists 1",
    ),
    ("addresses that are none", {"Addresses": "a:1"}, 400, "Unisono-Addresses"),
    ("this very rank", {"Addresses": "1 a:1", "Rank": "0"}, 409, "two programs with rank 0"),
]


@pytest.mark.parametrize(
    ("changes", "status", "words"), [case[1:] for case in REFUSALS], ids=[c[0] for c in REFUSALS]
)
def test_what_is_not_right_is_refused_and_logged(
    group: Group,
    changes: dict[str, Any],
    status: int,
    words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The status and a sentence say what is wrong; the log does too, and holds no secret."""
    with pytest.raises(InvalidStatus) as refusal:
        websockets.sync.client.connect(
            url_of(group), subprotocols=OFFERED, additional_headers=headers(**changes),
            proxy=None,
        )  # fmt: skip
    response = refusal.value.response
    body = bytes(response.body or b"").decode()
    assert response.status_code == status
    assert words.lower() in body.lower()
    logged = "\n".join(record.getMessage() for record in caplog.records)
    assert str(status) in logged
    for text in (logged, body):
        assert SECRET not in text
        assert "wrong-guess" not in text
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    still_works(group)


@pytest.mark.parametrize("offered", [["unisono.2"], ["chat", "mqtt"], None])
def test_another_version_is_refused_naming_both(group: Group, offered: list[str] | None) -> None:
    """Whoever speaks another subprotocol hears which one is spoken here, and which it offered."""
    with pytest.raises(InvalidStatus) as refusal:
        websockets.sync.client.connect(
            url_of(group), subprotocols=offered, additional_headers=headers(), proxy=None
        )  # type: ignore[arg-type]
    body = bytes(refusal.value.response.body or b"").decode()
    assert refusal.value.response.status_code == 426
    assert "unisono.1" in body
    assert ", ".join(offered or ["nothing"]) in body
    still_works(group)


def test_another_path_is_refused(group: Group) -> None:
    """Only one path has data links."""
    with pytest.raises(InvalidStatus) as refusal:
        websockets.sync.client.connect(
            url_of(group, "/metrics"), subprotocols=OFFERED, additional_headers=headers(),
            proxy=None,
        )  # fmt: skip
    assert refusal.value.response.status_code == 404
    still_works(group)


def raw_request(**changes: str) -> bytes:
    lines = {
        "Host": "x", "Upgrade": "websocket", "Connection": "Upgrade",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Protocol": "unisono.1", **headers(), **changes,
    }  # fmt: skip
    text = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value)
    return f"GET /unisono HTTP/1.1\r\n{text}\r\n".encode()


RUBBISH = {
    "nothing": b"",
    "a newline": b"\r\n",
    "zeros": bytes(4096),
    "noise": bytes(range(256)) * 40,
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "plain HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a post": b"POST /unisono HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc",
    "SSH": b"SSH-2.0-OpenSSH_9.6\r\n",
    "endless headers": b"GET /unisono HTTP/1.1\r\n" + b"X-A: y\r\n" * 5000,
    "one long line": b"GET /" + b"u" * 40_000,
    "no key, but the secret": raw_request(**{"Sec-WebSocket-Key": ""}),
    "an old version, but the secret": raw_request(**{"Sec-WebSocket-Version": "8"}),
    "no upgrade, but the secret": raw_request(Upgrade=""),
    "two secrets": raw_request().replace(b"\r\n\r\n", b"\r\nUnisono-Secret: x\r\n\r\n"),
    "half a request": raw_request()[:60],
}


@pytest.mark.parametrize("what", RUBBISH)
@pytest.mark.parametrize("reset", [False, True], ids=["waits", "resets"])
def test_strangers_do_no_harm(group: Group, what: str, reset: bool) -> None:
    """Port scanners and other programs get an answer or none; the rank goes on."""
    with socket.create_connection(port_of(group), timeout=5) as stranger:
        try:
            stranger.sendall(RUBBISH[what])
            if reset:
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            else:
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(4096):
                    pass
        except OSError:
            pass  # it was shown the door before it had finished
    still_works(group)


def test_connections_that_say_nothing_do_not_pile_up(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unfinished handshakes are bounded in number and in time, and keep nobody out."""
    monkeypatch.setattr("collective.links.listener._HANDSHAKE", 1.0)
    monkeypatch.setattr("collective.links.listener._OPEN", 8)
    still_works(group)
    before = len(descriptors())
    with ExitStack() as stack:
        slow = [
            stack.enter_context(socket.create_connection(port_of(group), timeout=5))
            for _ in range(40)
        ]
        slow[-1].sendall(raw_request()[:50])
        still_works(group)
        eventually(lambda: len(descriptors()) <= before + 40 + 8, what="bounded")
        for one in slow:
            try:
                assert one.recv(100) == b""
            except ConnectionResetError:
                pass
    still_works(group)
    eventually(lambda: len(descriptors()) == before, what="nothing is left of them")


def test_a_request_that_comes_byte_by_byte(group: Group) -> None:
    """TCP may cut a handshake anywhere."""
    with socket.create_connection(port_of(group), timeout=5) as dialler:
        dialler.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in raw_request():
            dialler.send(bytes([byte]))
        answer = b""
        while b"\r\n\r\n" not in answer:
            answer += dialler.recv(4096)
        assert answer.startswith(b"HTTP/1.1 101 ")
        assert b"unisono.1" in answer


def test_a_rank_is_told_why_it_was_refused() -> None:
    """Ranks with different secrets, or different lists of addresses, fail at once and say why."""
    where = addresses(2)
    with closing(collective.init(0, addresses=where[:1], secret="right")):
        with pytest.raises(collective.RendezvousFailed, match="401 wrong secret") as caught:
            collective.init(1, addresses=where, secret="wrong", timeout=5)
        assert "right" not in str(caught.value)
        with pytest.raises(collective.RendezvousFailed, match="same list of addresses") as caught:
            # address 1 of this list is that of rank 0
            collective.init(0, addresses=[where[1], where[0]], secret="right", timeout=5)
        assert caught.value.rank == 1


def test_who_does_not_come_is_named() -> None:
    """A rendezvous that times out names the ranks that did not come, and leaves nothing."""
    before = descriptors(), threads()
    where = addresses(3)
    start = time.monotonic()
    with pytest.raises(collective.RendezvousFailed, match="rank 1 on node") as caught:
        collective.init(0, addresses=where, secret="s", timeout=0.5)
    assert caught.value.rank == 1
    assert time.monotonic() - start < 5
    assert (descriptors(), threads()) == before


def test_ranks_that_meet_by_addresses_share_no_memory() -> None:
    """The same host in two addresses does not show that ranks see the same memory."""
    with ThreadRanks(2, groups=socket_groups(2)) as ranks:
        for group in ranks.groups:
            (outlet,) = group._communicator.outlets.values()  # type: ignore[union-attr]
            assert not isinstance(outlet, SharedOutlet)


def test_how_long_a_rank_may_stand_still_is_its_groups_to_say() -> None:
    """A subgroup of less patience leaves links for messages that are made after it as they were."""

    def work(group: Group) -> int:
        with group.subgroup([0, 1], "hasty", timeout=5) as hasty:
            hasty.barrier()
            if group.rank:
                group.recv(torch.zeros(1), 0)
                return 0
            group.send(torch.ones(1), 1)
        (outlet,) = group._communicator.messaging.outlets.values()  # type: ignore[union-attr]
        sock: socket.socket = outlet.endpoint._socket  # type: ignore[attr-defined]
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)

    with ThreadRanks(2, groups=socket_groups(2, timeout=200)) as ranks:
        assert ranks.run(work)[0] == 200_000


# -- a rank made of a stock library ---------------------------------------------------------------

COUNT = 300_000
OFFERED = [Subprotocol("unisono.1")]
STEP = SEGMENT // 4
DESCRIPTOR = describe("all_reduce", "float32", (COUNT,), "sum", None, "centralized")


def hello() -> bytes:
    return HEADER.pack(FrameKind.HELLO, 0, 0, 1, 0, 0, 0, 0)


def greets(message: bytes) -> bool:
    """Whether a message is a HELLO, in which a rank says of itself what others choose by."""
    header = Header._make(HEADER.unpack_from(message))
    said = json.loads(message[HEADER_SIZE:])
    return (header.kind, header.epoch, header.sequence) == (FrameKind.HELLO, 1, 0) and (
        said["cores"] == len(os.sched_getaffinity(0))
    )


def frames_of(values: np.ndarray[Any, Any]) -> Iterator[bytes]:
    """The messages in which rank 1 sends its contribution."""
    for start in range(0, COUNT, STEP):
        payload = values[start : start + STEP].tobytes()
        head = b"" if start else DESCRIPTOR.data
        yield (
            HEADER.pack(
                FrameKind.DATA, bool(head), len(head), 1, 1, start * 4, len(payload),
                DESCRIPTOR.checksum,
            ) + head + payload
        )  # fmt: skip


def read_frames(receive: Callable[[], bytes]) -> np.ndarray[Any, Any]:
    result = np.zeros(COUNT, dtype=np.float32)
    place = 0
    while place < COUNT * 4:
        message = receive()
        assert len(message) <= 1 << 20
        kind, _, described, epoch, sequence, offset, length, checksum = HEADER.unpack_from(message)
        assert (kind, epoch, sequence, offset) == (FrameKind.DATA, 1, 1, place)
        assert checksum == DESCRIPTOR.checksum
        if not place:
            assert message[HEADER_SIZE : HEADER_SIZE + described] == DESCRIPTOR.data
        payload = message[HEADER_SIZE + described :]
        assert len(payload) == length
        result[place // 4 : (place + length) // 4] = np.frombuffer(payload, dtype=np.float32)
        place += length
    return result


@contextmanager
def stock_server(address: str) -> Iterator[SimpleQueue[Any]]:
    """A server of `websockets.sync` at its defaults; the connections that come, as they come."""
    accepted: SimpleQueue[Any] = SimpleQueue()
    over = Event()

    def serve(link: Any) -> None:
        accepted.put(link)
        over.wait()

    host, _, port = address.partition(":")
    with websockets.sync.server.serve(serve, host, int(port), subprotocols=OFFERED) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield accepted
        finally:
            over.set()
            server.shutdown()
            thread.join()


def dial(address: str, **more: str) -> Any:
    """A client of `websockets.sync` at its defaults, connected as rank 1."""
    return websockets.sync.client.connect(
        f"ws://{address}/unisono", subprotocols=OFFERED, additional_headers=headers(**more)
    )


def sync_rank(where: list[str], values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Rank 1 of two, with `websockets.sync`."""
    with stock_server(where[1]) as accepted, dial(where[0]) as inward:
        inward.send(hello())
        outward = accepted.get(timeout=10)
        assert greets(outward.recv())
        assert inward.ping().wait(10), "the rank answers pings while it waits"
        for message in frames_of(values):
            outward.send(message)
        return read_frames(inward.recv)


def listens(address: str) -> bool:
    host, _, port = address.partition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


def asyncio_rank(where: list[str], values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Rank 1 of two, with `websockets.asyncio` at its defaults."""

    async def run() -> np.ndarray[Any, Any]:
        dialled: asyncio.Queue[Any] = asyncio.Queue()
        over = asyncio.Event()

        async def serve(link: Any) -> None:
            await dialled.put(link)
            await over.wait()

        host, _, port = where[1].partition(":")
        async with (
            websockets.asyncio.server.serve(serve, host, int(port), subprotocols=OFFERED),
            websockets.asyncio.client.connect(
                f"ws://{where[0]}/unisono", subprotocols=OFFERED, additional_headers=headers()
            ) as inward,
        ):
            await inward.send(hello())
            outward = await dialled.get()
            assert greets(await outward.recv())
            pong = await inward.ping()
            await asyncio.wait_for(pong, 10)
            for message in frames_of(values):
                await outward.send(message)
            messages = [await inward.recv() for _ in range(-(-COUNT // STEP))]
            over.set()
            return read_frames(iter(messages).__next__)  # type: ignore[arg-type]

    return asyncio.run(run())


def call(**content: Any) -> bytes:
    """The message that asks rank 0 to dial."""
    body = json.dumps({"group": "default", "caller": 1, "callee": 0, **content}).encode()
    return HEADER.pack(FrameKind.CALL, 0, 0, 1, 0, 0, len(body), 0) + body


def called(message: str | bytes, channel: str) -> None:
    """Check that a message of rank 0 asks rank 1 to dial for a channel."""
    assert isinstance(message, bytes)
    assert HEADER.unpack_from(message)[0] == FrameKind.CALL
    asked = {"group": "default", "channel": channel, "caller": 0, "callee": 1}
    assert json.loads(message[HEADER_SIZE:]) == asked


def calling_rank(where: list[str], values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Rank 1 of two, which never dials: it has rank 0 dial, and gets its data masked."""
    with stock_server(where[1]) as accepted:
        outward = accepted.get(timeout=10)
        outward.send(call(channel="line"))
        line = accepted.get(timeout=10)
        line.send(call(channel="collective"))
        inward = accepted.get(timeout=10)
        for link, channel in ((line, "line"), (inward, "collective")):
            assert link.request.headers["Unisono-Data"] == "sends"
            assert link.request.headers["Unisono-Channel"] == channel
        inward.send(hello())
        assert greets(outward.recv())
        assert inward.ping().wait(10)
        for message in frames_of(values):
            outward.send(message)
        return read_frames(inward.recv)


def called_rank(where: list[str], values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Rank 1 of two, which cannot be reached: it dials when rank 0 asks, and masks its data."""
    with dial(where[0]) as inward:
        called(inward.recv(10), "line")
        with dial(where[0], Channel="line", Data="sends") as line:
            called(line.recv(10), "collective")
            with dial(where[0], Data="sends") as outward:
                inward.send(hello())
                assert greets(outward.recv(10))
                assert outward.ping().wait(10)
                for message in frames_of(values):
                    outward.send(message)
                return read_frames(inward.recv)


@pytest.mark.parametrize("stock", [sync_rank, asyncio_rank, calling_rank, called_rank])
def test_a_stock_library_takes_part_in_an_all_reduce(stock: Any) -> None:
    """Everything on the wire is plain WebSocket: a rank made of a stock client and server works."""
    where = addresses(2)
    results: SimpleQueue[Any] = SimpleQueue()

    def rank() -> None:
        try:
            with collective.init(
                0, addresses=where, secret=SECRET, strategy="centralized", timeout=20
            ) as group:
                tensor = torch.arange(COUNT, dtype=torch.float32)
                work = group.all_reduce(tensor)
                results.put((tensor, work.timing.sent))
        except BaseException as error:  # noqa: BLE001 - handed to the test
            results.put((error, 0))

    thread = Thread(target=rank)
    thread.start()
    values = np.random.default_rng(1).standard_normal(COUNT).astype(np.float32)
    eventually(lambda: listens(where[0]), what="the rank listens")
    got = stock(where, values)
    tensor, sent = results.get(timeout=10)
    thread.join()
    right = np.arange(COUNT, dtype=np.float32) + values
    assert np.array_equal(got, right)
    assert torch.equal(tensor, torch.from_numpy(right))
    assert COUNT * 4 < sent < COUNT * 4 + 1000
