"""The tensor service: what is exposed comes over as it is, to whom it may, also through cuts."""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import native_jobs
import pytest
import tensor_jobs as jobs
import torch
import websockets.sync.client
from forked_ranks import ForkedRanks
from job_lab import JobLab
from ranks import Outcome, RankPool
from resources import descriptors, threads
from test_collective_failures import unread
from thread_ranks import addresses, socket_groups
from waiting import eventually
from websockets.typing import Subprotocol

import collective
from collective import tensor_server
from collective.errors import (
    CollectiveError,
    DeadlineExceeded,
    GroupClosed,
    Mismatch,
    PeerLost,
    ProtocolError,
    Refused,
    RendezvousFailed,
)
from collective.group import Group
from collective.links.endpoint import SocketEndpoint
from collective.links.link import Outlet
from collective.links.wire import HEADER, HEADER_SIZE, FrameKind
from collective.program import SEGMENT
from collective.tensor_format import Capability, Description, bytes_of
from collective.tensor_server import TensorServer

pytestmark = pytest.mark.timeout(60)

SECRET = "of-this-test-0123456789"


def close_all(groups: list[Group]) -> None:
    # all at once: who leaves waits for the others to have read what it sent
    with ThreadPoolExecutor(len(groups)) as pool:
        list(pool.map(Group.close, groups))


@pytest.fixture(params=["memory", "socket"])
def groups(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[Group]]:
    """Three ranks in this process; nothing of them is left afterwards."""
    monkeypatch.setenv("UNISONO_LINGER_SECONDS", "0.3")
    before = descriptors(), threads()
    if request.param == "memory":
        made = collective.local_group(3, timeout=20)
    else:
        made = socket_groups(3, timeout=20, secret=SECRET)
    yield made
    close_all(made)
    assert (descriptors(), threads()) == before


@pytest.fixture
def sockets() -> Iterator[list[Group]]:
    """Two ranks in this process, linked through sockets."""
    before = descriptors(), threads()
    made = socket_groups(2, timeout=20, secret=SECRET)
    yield made
    close_all(made)
    assert (descriptors(), threads()) == before


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors have one type, one shape and the same bytes."""
    if one.dtype != two.dtype or one.shape != two.shape:
        return False
    return bytes_of(one.contiguous()) == bytes_of(two.contiguous())


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64,
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16,
    torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def test_every_type_shape_and_layout_comes_over_bit_by_bit(groups: list[Group]) -> None:
    """All dtypes; 0-dim, empty and large shapes; transposes, columns and expanded views."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.randint(0, 256, (16 * 12,), generator=generator, dtype=torch.uint8)
    exposed: dict[str, torch.Tensor] = {}
    for dtype in DTYPES:
        base = noise % 2 == 0 if dtype is torch.bool else noise.view(dtype)[:12]
        base = base[:12].reshape(3, 4)
        for name, view in {
            "plain": base, "transposed": base.t(), "column": base[:, 1], "rows": base[::2],
            "expanded": base[:1].expand(5, 4), "number": base[1, 1], "empty": base[:0],
        }.items():  # fmt: skip
            exposed[f"{dtype} {name}"] = view
    exposed["conjugate"] = torch.complex(torch.ones(3), torch.arange(3.0)).conj()
    exposed["negative"] = torch.complex(torch.ones(3), torch.arange(3.0)).conj().imag
    exposed["large"] = torch.arange(SEGMENT // 2 + 3)
    exposed["needs gradients"] = torch.ones(3, requires_grad=True)
    exposed["λ / \n ' "] = torch.ones(2)
    for id, tensor in exposed.items():
        groups[0].expose(tensor, id)
    for id, tensor in exposed.items():
        found = groups[1].download(0, id)
        assert found.is_contiguous() and not found.requires_grad
        wanted = tensor.detach().resolve_conj().resolve_neg()
        assert same(found, wanted), id
    assert same(groups[0].download(0, "large"), exposed["large"]), "a rank downloads its own"


def test_many_download_at_once(groups: list[Group]) -> None:
    """Two tensors of two owners, three downloads of each by every rank, all at the same time."""
    tensors = [torch.randn(700_001), torch.randn(300_001)]
    for owner, tensor in enumerate(tensors):
        groups[owner].expose(tensor, "weights")
    with ThreadPoolExecutor(18) as pool:
        found = [
            (owner, pool.submit(group.download, owner, "weights"))
            for owner, group, _ in itertools.product(range(2), groups, range(3))
        ]
        assert all(same(each.result(), tensors[owner]) for owner, each in found)


def test_a_download_waits_for_what_is_not_there_yet(groups: list[Group]) -> None:
    """Downloads that begin before their tensors are exposed get them, in whatever order."""
    with ThreadPoolExecutor(6) as pool:
        found = {
            (rank, id): pool.submit(groups[rank].download, 0, id)
            for rank in (1, 2)
            for id in ("a", "b", "c")
        }
        eventually(lambda: waiting(groups[0]) == 6, what="six downloads wait")
        for id in ("c", "a", "b"):
            groups[0].expose(torch.full((5,), float(ord(id))), id)
        for (_, id), each in found.items():
            assert each.result().tolist() == [float(ord(id))] * 5


def waiting(group: Group) -> int:
    """How many downloaders have asked a rank for something that is not there."""
    connections = list(group._wiring.tensors._connections.values())
    return sum(1 for c in connections if c.identifier and c.entry is None)


def test_a_deadline_names_peer_and_id(groups: list[Group]) -> None:
    """What is never exposed ends the wait with an error; the group goes on."""
    with pytest.raises(DeadlineExceeded, match=r"rank 2 on node .* has not exposed 'w9'") as caught:
        groups[0].download(2, "w9", timeout=0.3)
    assert (caught.value.rank, caught.value.operation) == (2, "download")
    assert groups[0].error is None
    groups[2].expose(torch.ones(1), "w9")
    assert groups[0].download(2, "w9").item() == 1.0


def test_downloads_are_counted(groups: list[Group]) -> None:
    """After n downloads the id has ended; who waits for the last one's place is told who had it."""
    owner, one, two = groups
    owner.expose(torch.ones(3), "twice", downloads=2)
    assert one.download(0, "twice").tolist() == [1.0] * 3
    assert two.download(0, "twice").tolist() == [1.0] * 3
    with pytest.raises(Refused, match="its 2 downloads are over, the last by rank 2"):
        one.download(0, "twice")
    owner.expose(torch.zeros(1), "twice", downloads=1)
    assert one.download(0, "twice").item() == 0.0, "an id that has ended can be used again"


def test_more_downloads_than_allowed_at_once(groups: list[Group]) -> None:
    """Of twelve that begin together, five get the tensor, and seven hear that it is over."""
    groups[0].expose(torch.randn(200_000), "five", downloads=5)

    def attempt(group: Group) -> str:
        try:
            return str(group.download(0, "five").numel())
        except Refused as error:
            return str(error)

    with ThreadPoolExecutor(12) as pool:
        results = list(pool.map(attempt, [groups[1 + index % 2] for index in range(12)]))
    assert results.count("200000") == 5
    assert sum("its 5 downloads are over" in result for result in results) == 7


def test_a_tensor_expires(groups: list[Group]) -> None:
    """After its time nobody gets it any more; an id that expired can be used again."""
    groups[0].expose(torch.ones(3), "brief", ttl=0.2)
    assert groups[1].download(0, "brief").numel() == 3
    server = groups[0]._wiring.tensors
    eventually(lambda: not server._entries, what="the tensor's memory is let go of")
    with pytest.raises(Refused, match=r"rank 0 on node .* 'brief': it expired 0.2 s after"):
        groups[1].download(0, "brief")
    groups[0].expose(torch.ones(4), "brief", ttl=60)
    assert groups[1].download(0, "brief").numel() == 4


def test_what_is_withdrawn_is_gone(groups: list[Group]) -> None:
    """`unexpose` says whether there was anything, and later downloads are refused."""
    groups[0].expose(torch.ones(3), "w")
    assert groups[0].unexpose("w") is True
    assert groups[0].unexpose("w") is False
    with pytest.raises(Refused, match="withdrawn"):
        groups[1].download(0, "w")


def test_impossible_arguments_are_refused(
    groups: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with its reason; nothing is exposed, and the group goes on."""
    owner = groups[0]
    owner.expose(torch.ones(1), "there")
    for call, words in (
        (lambda: owner.expose(torch.ones(1), "there"), "exposed already"),
        (lambda: owner.expose(torch.ones(1), ""), "1 to 200 characters"),
        (lambda: owner.expose(torch.ones(1), "x" * 201), "1 to 200 characters"),
        (lambda: owner.expose(torch.ones(1), "w", downloads=0), "downloads is 0"),
        (lambda: owner.expose(torch.ones(1), "w", downloads=1.5), "downloads is 1.5"),  # type: ignore[arg-type]
        (lambda: owner.expose(torch.ones(1), "w", ttl=0), "ttl is 0"),
        (lambda: owner.expose(torch.ones(1), "w", ttl="1"), "ttl is '1'"),  # type: ignore[arg-type]
        (lambda: owner.expose(torch.ones(1), "w", ttl=float("inf")), "ttl is inf"),
        (lambda: owner.expose(torch.ones(1), "w", peers=1), "peers is a list of ranks"),  # type: ignore[arg-type]
        (lambda: owner.expose(torch.ones(1), "w", ttl=float("nan")), "ttl is nan"),
        (lambda: owner.expose(torch.ones(1), "w", peers=[3]), "ranks 0 to 2"),
        (lambda: owner.expose(torch.eye(2).to_sparse(), "w"), "to_dense"),
        (lambda: owner.expose(torch.ones(2, device="meta"), "w"), "meta"),
        (lambda: owner.expose([1.0], "w"), "torch.Tensor"),  # type: ignore[arg-type]
        (lambda: owner.download(7, "w"), "ranks 0 to 2"),
        (lambda: owner.download(1, ""), "1 to 200 characters"),
        (lambda: owner.download(1, "w", limit="1Ki"), "limit is '1Ki'"),  # type: ignore[arg-type]
        (lambda: groups[1].download(0, "there", limit=3), "4 bytes, more than the limit of 3"),
    ):
        with pytest.raises(Refused, match=words):
            call()
    assert groups[1].download(0, "there", limit=4).item() == 1.0
    monkeypatch.setenv("UNISONO_DOWNLOAD_LIMIT", "lots")
    with pytest.raises(Refused, match="UNISONO_DOWNLOAD_LIMIT: 'lots' is no size"):
        groups[1].download(0, "there")


def test_a_tensor_is_for_those_it_is_for(
    groups: list[Group], caplog: pytest.LogCaptureFixture
) -> None:
    """With `peers` the others are refused, and the owner's log names them."""
    groups[0].expose(torch.ones(3), "private", peers=[2])
    with pytest.raises(Refused, match=r"for ranks \[2\] only"):
        groups[1].download(0, "private")
    assert groups[2].download(0, "private").numel() == 3
    assert "refused rank 1 the tensor 'private'" in caplog.text


def test_subgroups_have_ids_of_their_own(groups: list[Group]) -> None:
    """A subgroup's ranks and ids are its own, also before its members link, and end with it."""
    pair = {rank: groups[rank].subgroup([2, 0], "pair") for rank in (0, 2)}
    groups[2].expose(torch.ones(1), "w")
    pair[2].expose(torch.zeros(1), "w")
    assert groups[0].download(2, "w").item() == 1.0
    assert pair[0].download(0, "w").item() == 0.0
    name = pair[2].name
    for group in pair.values():
        group.close()
    assert name not in {exposed for exposed, _ in groups[2]._wiring.tensors._entries}


def test_a_group_that_could_not_be_linked_still_serves_tensors(sockets: list[Group]) -> None:
    """That a member did not come for its links in time does not keep it from downloading."""
    first = sockets[0].subgroup([0, 1], "late", timeout=0.3)
    with pytest.raises(RendezvousFailed, match="rank 1"):
        first.barrier()
    pair = [first, sockets[1].subgroup([0, 1], "late", timeout=5)]
    pair[0].expose(torch.ones(3), "w")
    assert pair[1].download(0, "w").tolist() == [1.0] * 3
    for group in pair:
        group.close()


def test_a_group_is_forgotten_while_its_downloads_end() -> None:
    """A connection that ends at that moment is taken out under the lock of who goes through them,
    so that it is no error for who closes the group."""
    locked: list[bool] = []

    class Connections(dict[int, Any]):
        def __delitem__(self, descriptor: int) -> None:
            locked.append(server._lock.locked())
            super().__delitem__(descriptor)

    server = TensorServer("secret", 1)
    server._connections = Connections()
    ours, theirs = socket.socketpair()
    server.take("g", 0, 1, Outlet(SocketEndpoint(ours)))
    theirs.close()
    eventually(lambda: locked, what="the end is noticed")
    server.close()
    assert locked == [True]


def test_a_closed_group_lets_go_of_who_has_just_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection at which the thread has not looked yet ends with its group, as the others do."""
    server = TensorServer("secret", 1)
    ours, theirs = socket.socketpair()
    theirs.settimeout(5)
    with theirs, monkeypatch.context() as late:
        late.setattr(TensorServer, "_start", lambda _: None)
        server.take("g", 0, 1, Outlet(SocketEndpoint(ours)))
        server.forget("g")
        late.undo()
        with server._lock:
            server._start()
        assert theirs.recv(1) == b""
    server.close()


def test_a_change_while_exposed_is_noticed(groups: list[Group]) -> None:
    """The checksum is of the bytes that were exposed."""
    tensor = torch.ones(10)
    groups[0].expose(tensor, "w")
    tensor[3] = 7
    with pytest.raises(ProtocolError, match="changed while it was exposed"):
        groups[1].download(0, "w")


def test_a_wait_ends_with_its_group(groups: list[Group]) -> None:
    """A group that is poisoned, here or elsewhere, ends a download for which nothing has come."""
    with ThreadPoolExecutor(2) as pool:
        late = [pool.submit(group.download, 1, "never") for group in (groups[0], groups[2])]
        eventually(lambda: waiting(groups[1]) == 2, what="two downloads wait")
        with pytest.raises(DeadlineExceeded):
            groups[0].all_reduce(torch.ones(1), timeout=0.2, async_op=False)
        for each in late:
            with pytest.raises(DeadlineExceeded, match="all_reduce"):
                each.result(timeout=5)


def test_a_wait_ends_when_its_group_is_closed(groups: list[Group]) -> None:
    """Closing a group of which another thread waits for a tensor ends that wait, and only that."""
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(groups[0].download, 1, "never")
        eventually(lambda: waiting(groups[1]) == 1, what="a download waits")
        groups[0].close()
        with pytest.raises(GroupClosed):
            late.result(timeout=5)
    assert groups[1].error is None


def test_a_wait_ends_with_a_group_that_was_not_linked_when_it_began(groups: list[Group]) -> None:
    """Also where no member has made its links yet: when the group is closed, or is linked and
    poisoned."""
    pair = [groups[rank].subgroup([0, 1], "pair") for rank in (0, 1)]
    with ThreadPoolExecutor(3) as pool:
        late = pool.submit(pair[0].download, 1, "never")
        eventually(lambda: waiting(groups[1]) == 1, what="a download waits")
        failing = [
            pool.submit(group.all_reduce, torch.ones(count), async_op=False)
            for count, group in enumerate(pair)
        ]
        for each in (*failing, late):
            with pytest.raises(Mismatch):
                each.result(timeout=5)
        for group in pair:
            group.close()
        pair = [groups[rank].subgroup([0, 1], "pair") for rank in (0, 1)]
        late = pool.submit(pair[0].download, 1, "never")
        eventually(lambda: waiting(groups[1]) == 1, what="a download waits")
        pair[0].close()
        with pytest.raises(GroupClosed):
            late.result(timeout=5)


def test_an_owner_that_leaves_is_named(
    groups: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for a rank that closes its group hears so at once."""
    monkeypatch.setattr(groups[0]._wiring, "linger", 0.5)
    with ThreadPoolExecutor(2) as pool:
        late = [pool.submit(group.download, 0, "never") for group in groups[1:]]
        eventually(lambda: waiting(groups[0]) == 2, what="two downloads wait")
        groups[0].close()
        for each in late:
            with pytest.raises(PeerLost, match="lost rank 0 on node") as caught:
                each.result(timeout=10)
            assert caught.value.rank == 0
    with pytest.raises(GroupClosed):
        groups[0].expose(torch.ones(1), "w")


# -- cuts and lies --------------------------------------------------------------------------------


class Cutter:
    """Ends the connection after every so many frames that a server sends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, every: int) -> None:
        self.frames: list[int] = []
        original = TensorServer._frame

        def frame(server: TensorServer, connection: Any, kind: Any, offset: int, data: Any) -> None:
            original(server, connection, kind, offset, data)
            if kind == FrameKind.DATA:
                self.frames.append(offset)
                if len(self.frames) % every == 0:
                    connection.link.endpoint._socket.shutdown(socket.SHUT_RDWR)

        monkeypatch.setattr(TensorServer, "_frame", frame)


def test_a_cut_download_goes_on_where_it_was(
    sockets: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the connection cut after every fourth frame, all bytes come, few of them twice."""
    tensor = torch.randn(20 * SEGMENT // 4 + 5)
    sockets[0].expose(tensor, "w", downloads=1)
    cutter = Cutter(monkeypatch, 4)
    assert same(sockets[1].download(0, "w"), tensor)
    assert len(cutter.frames) < 2 * 21
    assert len(set(cutter.frames)) == 21
    with pytest.raises(Refused, match="its 1 downloads are over"):
        sockets[1].download(0, "w")


def test_a_place_lapses_when_its_downloader_does_not_come_back(
    sockets: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A download that is given up counts for a while, then another one may have its place."""
    monkeypatch.setattr(tensor_server, "_RESUME", 0.3)
    sockets[0].expose(torch.randn(10 * SEGMENT), "w", downloads=1)
    with monkeypatch.context() as patch:
        patch.setattr("collective.tensor_service._Download._chunk", _give_up)
        with pytest.raises(KeyboardInterrupt):
            sockets[1].download(0, "w")
    assert sockets[1].download(0, "w", timeout=15).numel() == 10 * SEGMENT


def _give_up(*_: object) -> None:
    raise KeyboardInterrupt


GOOD = {"dtype": "float32", "shape": [2, 3], "bytes": 24, "crc": 1}
LIES: dict[str, dict[str, Any]] = {
    "more bytes": {"bytes": 1 << 50},
    "fewer bytes": {"bytes": 20},
    "a huge shape": {"shape": [1 << 40, 1 << 40]},
    "a shape beyond 64 bits": {"shape": [1 << 70], "bytes": 1 << 72},
    "a negative size": {"shape": [-2, -3]},
    "no number": {"shape": [True, 6]},
    "too many dimensions": {"shape": [1] * 100, "bytes": 4},
    "no shape": {"shape": "23"},
    "no bytes": {"bytes": None},
    "fractions": {"bytes": 24.0},
    "an unknown type": {"dtype": "float31"},
    "a quantized type": {"dtype": "qint8"},
    "what torch has too": {"dtype": "__version__"},
    "no type": {"dtype": ["float32"]},
    "no checksum": {"crc": "1"},
    "a long checksum": {"crc": 1 << 32},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_description_is_refused(lie: str) -> None:
    """What contradicts itself is an error before anything is made of it."""
    assert Description.decode(json.dumps(GOOD).encode()).shape == (2, 3)
    with pytest.raises(ProtocolError):
        Description.decode(json.dumps({**GOOD, **LIES[lie]}).encode())


@pytest.mark.parametrize("junk", [b"", b"\xff\xfe", b"[1]", b"{", b"[" * 9000, b"null"], ids=repr)
def test_what_is_no_description_is_refused(junk: bytes) -> None:
    """Bytes that are no JSON object are an error, also those that nest deeply."""
    with pytest.raises(ProtocolError):
        Description.decode(junk)


Change = Callable[[FrameKind, int, bytes], tuple[FrameKind, int, bytes]]
WRONG: dict[str, tuple[Change, str]] = {
    "a description of 9 PB": (
        lambda kind, offset, data: (
            (kind, offset, json.dumps({**GOOD, "bytes": 9 << 50, "shape": [9 << 48]}).encode())
            if kind == FrameKind.TENSOR else (kind, offset, data)
        ), "more than the limit",
    ),
    "a long description": (
        lambda kind, offset, data: (
            (kind, offset, b" " * 100_000) if kind == FrameKind.TENSOR else (kind, offset, data)
        ), "a message of 100000 bytes",
    ),
    "data at another place": (
        lambda kind, offset, data: (
            (kind, offset + 4, data) if kind == FrameKind.DATA else (kind, offset, data)
        ), "bytes at 4 in",
    ),
    "more data than there are": (
        lambda kind, offset, data: (
            (kind, offset, data + data) if kind == FrameKind.DATA else (kind, offset, data)
        ), "it sent 2400 bytes",
    ),
    "data before the description": (
        lambda kind, offset, data: (FrameKind.DATA, offset, data), "a frame of kind 1",
    ),
    "another kind of frame": (
        lambda kind, offset, data: (
            (FrameKind.MESSAGE, offset, data) if kind == FrameKind.DATA else (kind, offset, data)
        ), "kind 2",
    ),
    "other data": (
        lambda kind, offset, data: (
            (kind, offset, data[:-1] + b"?") if kind == FrameKind.DATA else (kind, offset, data)
        ), "its checksum is wrong",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_frames_that_do_not_fit_end_the_download(
    sockets: list[Group], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is an error that names the peer, and nothing beyond the limit is allocated."""
    change, words = WRONG[case]
    original = TensorServer._frame

    def frame(server: TensorServer, connection: Any, kind: Any, offset: int, data: Any) -> None:
        kind, offset, data = change(kind, offset, bytes(data))
        original(server, connection, kind, offset, memoryview(data))

    sockets[0].expose(torch.arange(300.0), "w")
    with monkeypatch.context() as patch:
        patch.setattr(TensorServer, "_frame", frame)
        with pytest.raises((ProtocolError, Refused), match=words) as caught:
            sockets[1].download(0, "w", limit=1 << 20)
    assert isinstance(caught.value, CollectiveError) and caught.value.rank == 0
    assert "rank 0 on node" in str(caught.value)
    assert sockets[1].download(0, "w").tolist() == list(range(300))


# -- on the wire ----------------------------------------------------------------------------------


def connect(group: Group, **changes: str) -> websockets.sync.client.ClientConnection:
    """A stock client that dials rank 0 as rank 1 does."""
    host, port = group._wiring.peers[0].addresses[0]  # type: ignore[attr-defined]
    values = {
        "Job": "-", "Attempt": "-", "Group": "default", "Epoch": "1", "Rank": "1", "Peer": "0",
        "Channel": "tensor", "Secret": SECRET, **changes,
    }  # fmt: skip
    return websockets.sync.client.connect(
        f"ws://{host}:{port}/unisono", subprotocols=[Subprotocol("unisono.1")], proxy=None,
        additional_headers={f"Unisono-{name}": value for name, value in values.items()},
    )  # fmt: skip


def fetch(token: object, **changes: object) -> bytes:
    body = {"id": "w", "download": "1", "offset": 0, "token": token, **changes}
    data = json.dumps(body).encode()
    return HEADER.pack(FrameKind.FETCH, 0, 0, 1, 0, 0, len(data), 0) + data


TOKEN = Capability("default", 1, 0, 1, "w").token(SECRET)


def test_a_stock_client_reads_a_download(sockets: list[Group]) -> None:
    """Frames are valid RFC 6455: a description, then the bytes; DONE makes the download count."""
    tensor = torch.arange(200_000.0)
    sockets[0].expose(tensor, "w", downloads=1)
    with connect(sockets[0]) as client:
        client.send(fetch(TOKEN))
        first = client.recv(timeout=5)
        assert isinstance(first, bytes)
        assert json.loads(first[HEADER_SIZE:])["shape"] == [200_000]
        received = b""
        while len(received) < 800_000:
            frame = client.recv(timeout=5)
            assert isinstance(frame, bytes)
            received += frame[HEADER_SIZE:]
        assert received == bytes_of(tensor)
        client.send(HEADER.pack(FrameKind.DONE, 0, 0, 1, 0, 0, 0, 0))
    eventually(lambda: not sockets[0]._wiring.tensors._entries, what="the download counts")


@pytest.mark.parametrize(
    ("token", "dialler"),
    [
        ("wrong", "1"), (None, "1"), (17, "1"), ("", "1"), ("é", "1"),
        (Capability("default", 1, 0, 1, "v").token(SECRET), "1"),
        (Capability("default", 2, 0, 1, "w").token(SECRET), "1"),
        (Capability("default", 1, 0, 1, "w").token("another secret"), "1"),
        (TOKEN, "0"),
    ],
    ids=["wrong", "none", "number", "empty", "letters", "another tensor's", "another epoch's",
         "another group's", "another rank's"],
)  # fmt: skip
def test_a_wrong_token_is_refused_and_logged(
    sockets: list[Group], token: object, dialler: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The token is good for one tensor, group, epoch and rank; neither log nor answer tell it."""
    caplog.set_level(logging.INFO)
    sockets[0].expose(torch.arange(3.0), "w")
    with connect(sockets[0], Rank=dialler) as client:
        client.send(fetch(token))
        answer = client.recv(timeout=5)
        assert isinstance(answer, bytes)
        assert answer[0] == FrameKind.REFUSAL
        reason = json.loads(answer[HEADER_SIZE:])["reason"]
        with pytest.raises(websockets.exceptions.ConnectionClosed):
            client.recv(timeout=5)
    assert "token is wrong" in reason
    assert f"refused rank {dialler} the tensor 'w' of group default: wrong token" in caplog.text
    for text in (SECRET, TOKEN):
        assert text not in caplog.text + reason
    assert sockets[1].download(0, "w").numel() == 3


@pytest.mark.parametrize(
    "message",
    [b"", b"x", b"\0" * HEADER_SIZE, fetch(TOKEN, id=3), fetch(TOKEN, offset=-1),
     fetch(TOKEN, offset="0"), fetch(TOKEN, download="x" * 99), fetch(TOKEN, id="x" * 60_000),
     HEADER.pack(FrameKind.DONE, 0, 0, 1, 0, 0, 0, 0),
     HEADER.pack(FrameKind.FETCH, 0, 0, 9, 0, 0, 2, 0) + b"{}",
     HEADER.pack(FrameKind.FETCH, 0, 0, 1, 0, 0, 3, 0) + b"[1]"],
    ids=range(11),
)  # fmt: skip
def test_junk_ends_its_own_connection_only(sockets: list[Group], message: bytes) -> None:
    """Whatever a dialler with the secret sends, it is cut off, and others are served."""
    sockets[0].expose(torch.arange(3.0), "w")
    with connect(sockets[0]) as client:
        client.send(message)
        with pytest.raises(websockets.exceptions.ConnectionClosed):
            client.recv(timeout=5)
    assert sockets[1].download(0, "w").numel() == 3
    eventually(lambda: not sockets[0]._wiring.tensors._connections)


def test_an_offset_beyond_the_end_is_refused(sockets: list[Group]) -> None:
    """A resumed download that asks for more than there is hears so."""
    sockets[0].expose(torch.arange(3.0), "w")
    with connect(sockets[0]) as client:
        client.send(fetch(TOKEN, offset=13))
        answer = client.recv(timeout=5)
        assert isinstance(answer, bytes)
        assert "no byte 13" in json.loads(answer[HEADER_SIZE:])["reason"]


# -- processes ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Three processes in one group, for tests that leave it usable."""
    with ForkedRanks(3) as pool:
        pool.run(native_jobs.join, addresses(3), 20.0)
        yield pool
        assert pool.run(native_jobs.leave) == [True] * 3


def only(outcomes: list[Outcome | None]) -> Outcome:
    assert len(outcomes) == 1 and outcomes[0] is not None
    return outcomes[0]


def test_the_owner_serves_while_it_does_something_else(pool: RankPool) -> None:
    """Its main thread reduces with another rank; all sums and all downloads are right."""
    pool.start(jobs.download, 0, "w", ranks=[1])
    only(pool.outcomes(jobs.expose, "w", 5_000_000, ranks=[0]))
    assert only(pool.collect([1])).value is True
    pool.start(jobs.download_twenty, 0, "w", ranks=[1])
    pool.start(jobs.hundred_with, [0, 2], ranks=[0, 2])
    assert [only([outcome]).value for outcome in pool.collect()] == [True] * 3
    assert only(pool.outcomes(jobs.unexpose, "w", ranks=[0])).value is True


def test_a_slow_reader_costs_the_owner_no_memory(pool: RankPool) -> None:
    """While a reader of 200 MB stands still, and all the time, the owner holds the tensor alone."""
    only(pool.outcomes(jobs.expose, "big", 50_000_000, ranks=[0]))
    before, _ = only(pool.outcomes(jobs.memory, ranks=[0])).value
    pool.start(jobs.download, 0, "big", ranks=[1, 2])
    pool.processes[1].send_signal(signal.SIGSTOP)
    try:
        only(pool.collect([2]))
        during, _ = only(pool.outcomes(jobs.memory, ranks=[0])).value
        assert during - before < 16 << 20
        host = only(pool.outcomes(native_jobs.host, ranks=[0])).value
        assert unread(host) < 16 << 20
    finally:
        pool.processes[1].send_signal(signal.SIGCONT)
    assert only(pool.collect([1])).value is True
    after, _ = only(pool.outcomes(jobs.memory, ranks=[0])).value
    assert after - before < 16 << 20
    assert only(pool.outcomes(jobs.unexpose, "big", ranks=[0])).value is True


def test_a_killed_owner_is_named_at_once() -> None:
    """SIGKILL of the owner: who waits, and who is in the middle, raise PeerLost with its rank."""
    with ForkedRanks(3) as pool:
        pool.run(native_jobs.join, addresses(3), 20.0)
        only(pool.outcomes(jobs.expose, "w", 100_000_000, ranks=[0]))
        host = only(pool.outcomes(native_jobs.host, ranks=[0])).value
        pool.start(jobs.download, 0, "never", 60.0, ranks=[1])
        pool.start(jobs.download, 0, "w", 60.0, ranks=[2])
        eventually(lambda: unread(host) > 100_000, 20, "the transfer is under way")
        pool.processes[0].kill()
        for outcome in pool.collect([1, 2], timeout=5.0):
            assert outcome is not None
            assert outcome.kind == "PeerLost", outcome.traceback
            assert outcome.rank == 0
            assert "rank 0 on node 127." in outcome.message


IN_A_JOB = """
import collective, torch
group = collective.init(timeout=30)
if group.rank == 0:
    group.expose(torch.arange(300_000), "weights", downloads=1)
else:
    assert torch.equal(group.download(0, "weights"), torch.arange(300_000))
    try:
        group.download(0, "weights")
    except collective.Refused as error:
        print(error)
group.barrier()
group.close()
"""


def test_ranks_of_a_job_download_through_the_agents_port(tmp_path: Path) -> None:
    """The node's agent accepts the connection, checks it, and hands it to the owner."""
    lab = JobLab(tmp_path, 2)
    (tmp_path / "train.py").write_text(IN_A_JOB)
    ranks = [
        subprocess.Popen(
            [sys.executable, "train.py"], cwd=tmp_path, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, **lab.environment, "RANK": str(rank), "WORLD_SIZE": "2",
                 "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        texts = [rank.communicate(timeout=50) for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], texts
        assert "its 1 downloads are over" in texts[1][0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        lab.close()


def test_a_forked_child_serves_nobody(sockets: list[Group]) -> None:
    """After a fork the parent goes on to serve, and the child holds none of the connections."""
    sockets[0].expose(torch.ones(3), "w")
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(sockets[1].download, 0, "late")
        eventually(lambda: waiting(sockets[0]) == 1, what="a download waits")
        pid = os.fork()
        if not pid:
            os._exit(len(sockets[0]._wiring.tensors._connections))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert sockets[1].download(0, "w").numel() == 3
        sockets[0].expose(torch.ones(4), "late")
        assert late.result().numel() == 4
