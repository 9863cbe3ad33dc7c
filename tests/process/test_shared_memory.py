"""The shared-memory link: its frames, its bounds, its end, and that nothing of it is left."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch_jobs
from ranks import RankPool
from resources import descriptors

from collective.errors import ProtocolError
from collective.links import arena, shared_handshake, shared_memory
from collective.links.link import EndOfLink, frame_head
from collective.links.shared_memory import SLOTS, SharedInlet, SharedOutlet
from collective.links.wire import FrameKind
from collective.program import SEGMENT
from collective.reaching import Peer, _neighbours


@dataclass
class Link:
    """Both ends of a link in one process, each with its bell."""

    outlet: SharedOutlet
    inlet: SharedInlet
    sender_bell: int
    receiver_bell: int

    def rung(self, bell: int) -> bool:
        try:
            return os.eventfd_read(bell) > 0
        except BlockingIOError:
            return False

    def send(self, payload: bytes, sequence: int = 1) -> bool:
        head = frame_head(FrameKind.DATA, 1, sequence, 0, len(payload), 7)
        return self.outlet.begin(head, memoryview(payload))


@pytest.fixture
def link() -> Iterator[Link]:
    arena.make_own()  # which stays, once made
    gc.collect()
    before = descriptors()
    one, two = socket.socketpair()
    bells = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(2)]
    deadline = time.monotonic() + 5
    memory = shared_handshake.offer(two, bells[1])
    theirs, receiver_bell = shared_handshake.take(one, bells[0], deadline)
    sender_bell = shared_handshake.take_bell(two, deadline)
    two.setblocking(False)
    outlet = SharedOutlet(one, theirs, receiver_bell)
    inlet = SharedInlet(two, memory, sender_bell)
    yield Link(outlet, inlet, bells[0], bells[1])
    for end in (outlet, inlet):
        end.close()
        end.close()
    for bell in bells:
        os.close(bell)
    gc.collect()
    assert descriptors() == before, "both ends closed twice leave no descriptor"


@pytest.mark.parametrize("size", [0, 1, 4096, SEGMENT])
def test_frames_arrive_whole_and_ring_the_bell(link: Link, size: int) -> None:
    """A frame of any size up to a segment is there at once, with its header, after one ring."""
    payload = os.urandom(size)
    assert link.inlet.header() is None
    assert link.send(payload, sequence=9)
    assert link.rung(link.receiver_bell)
    link.inlet.readable = True
    header = link.inlet.header()
    assert header is not None
    assert (header.sequence, header.length) == (9, size)
    room = bytearray(size)
    assert link.inlet.read_into(memoryview(room))
    assert bytes(room) == payload
    assert link.rung(link.sender_bell)
    assert link.inlet.header() is None


def test_a_full_ring_takes_no_more_until_a_slot_is_dropped(link: Link) -> None:
    """The sender stops at the number of slots and goes on where the receiver has made room."""
    for number in range(SLOTS):
        assert link.send(bytes([number]) * 100, sequence=number)
    assert not link.send(b"x", sequence=SLOTS)
    assert not link.outlet.writable
    link.inlet.readable = True
    for number in range(SLOTS + 1):
        header = link.inlet.header()
        assert header is not None
        assert header.sequence == number
        whole = link.inlet.whole()
        assert whole is not None
        assert bytes(whole) == (bytes([number]) * 100 if number < SLOTS else b"x")
        whole.release()
        link.inlet.drop()
        link.outlet.writable = True
        assert link.outlet.flush()
    assert link.outlet.idle


def test_what_was_sent_before_the_end_is_read_before_it(link: Link) -> None:
    """A sender that goes away takes nothing back; then the end is told."""
    link.send(b"last words")
    link.outlet.close()
    link.inlet.hung_up = link.inlet.readable = True
    assert link.inlet.header() is not None
    room = bytearray(10)
    link.inlet.read_into(memoryview(room))
    assert bytes(room) == b"last words"
    with pytest.raises(EndOfLink):
        link.inlet.header()


def test_what_is_lent_is_read_where_it_lies_and_comes_back(link: Link) -> None:
    """A lent payload takes no slot's room; its number is passed when the receiver dropped it."""
    memory = arena.make_own()
    room = memory.take(5000)
    room[:5000] = 7
    place = memory.find(room[1000:])
    assert place is not None
    assert link.outlet.lends(memory)
    number = link.outlet.lend(frame_head(FrameKind.DATA, 1, 9, 0, 4000, 7), place, 4000)
    assert link.outlet.flush()
    link.inlet.readable = True
    header = link.inlet.header()
    assert header is not None
    whole = link.inlet.whole()
    assert whole is not None
    assert bytes(whole) == b"\x07" * 4000
    room[1000] = 8
    assert whole[0] == 8, "no copy was made"
    assert link.outlet.returned <= number
    assert link.inlet.drop()
    assert link.outlet.returned > number
    assert link.outlet.sent < 1000


def test_what_was_taken_back_is_never_given_as_the_payload(link: Link) -> None:
    """Who lends may change the memory after taking it back: a reader is told, before and after."""
    memory = arena.make_own()
    room = memory.take(4096)
    place = memory.find(room)
    assert place is not None
    assert link.outlet.lends(memory)
    for sequence in (1, 2):
        head = frame_head(FrameKind.DATA, 1, sequence, 0, 4096, 7)
        link.outlet.lend(head, place, 4096)
        assert link.outlet.flush()
    link.inlet.readable = True
    header = link.inlet.header()
    assert header is not None
    whole = link.inlet.whole()
    assert whole is not None
    link.outlet.take_back()
    assert not link.inlet.drop(), "it may have been read too late"
    assert link.inlet.whole() is None
    assert not link.inlet.read_into(memoryview(bytearray(4096)))
    for sequence in (1, 2):
        header = link.inlet.header()
        assert header is not None
        assert header.sequence == sequence
        assert link.inlet.skip(header)
    assert link.send(b"later", sequence=3), "frames of later operations are good"
    header = link.inlet.header()
    assert header is not None
    room_for_it = bytearray(5)
    assert link.inlet.read_into(memoryview(room_for_it))
    assert bytes(room_for_it) == b"later"


@pytest.mark.parametrize("place", [1 << 60, 1])
def test_a_place_that_was_never_shared_is_an_error(link: Link, place: int) -> None:
    """A frame that speaks of memory beyond what was handed over, or of none, is refused."""
    if place > 1:
        assert link.outlet.lends(arena.make_own())
    link.outlet.lend(frame_head(FrameKind.DATA, 1, 1, 0, 4096, 7), place, 4096)
    assert link.outlet.flush()
    link.inlet.readable = True
    with pytest.raises(ProtocolError, match="lends"):
        link.inlet.header()


def test_nonsense_in_the_memory_is_an_error(link: Link) -> None:
    """Lengths that do not add up are refused, not followed."""
    link.send(b"12345678")
    ring = link.outlet._ring
    ring.words[ring.slot(0) // 8 + 1] = SEGMENT + 1
    link.inlet.readable = True
    with pytest.raises(ProtocolError, match="do not add up"):
        link.inlet.header()


def test_a_memory_cannot_be_cut_under_the_other_side() -> None:
    """The file is sealed: a rank that shrinks it would end its peer by a bus error."""
    memory = shared_memory.make_memory()
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(memory, 4096)
    finally:
        os.close(memory)


def kinds_of_links() -> list[str]:
    """In a rank: the kinds of the default group's outlets."""
    group = dist.group.WORLD.group  # type: ignore[union-attr]
    return sorted({type(outlet).__name__ for outlet in group._communicator.outlets.values()})


def reduce_until_rank_1_is_killed() -> None:
    tensor = torch.ones(1 << 20)
    for step in range(1000):
        if dist.get_rank() == 1 and step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(tensor)


def mapped() -> int:
    """How many times link memory is mapped in this process and its children."""
    with open(f"/proc/self/task/{threading.main_thread().native_id}/children") as file:
        children = file.read().split()
    count = 0
    for pid in [*children, "self"]:
        try:
            with open(f"/proc/{pid}/maps") as file:
                count += sum("memfd:unisono-link" in line for line in file)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return count


@pytest.mark.timeout(90)
def test_a_killed_rank_leaves_no_memory_behind() -> None:
    """Memory is nameless: a killed process's share is gone with it, and its peers hear of it."""
    before = mapped()
    with RankPool(3, {"UNISONO_LINKS": "auto"}) as pool:
        pool.run(torch_jobs.start)
        assert pool.run(kinds_of_links) == [["SharedOutlet"]] * 3
        assert mapped() > before
        outcomes = pool.outcomes(reduce_until_rank_1_is_killed)
        assert outcomes[1] is None
        for outcome in (outcomes[0], outcomes[2]):
            assert outcome is not None
            assert outcome.kind == "PeerLost"
            assert outcome.rank == 1
    assert mapped() == before


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    "environment",
    [{"UNISONO_NODE": "w{rank}"}, {"UNISONO_LINKS": "websocket"}],
    ids=["nodes apart", "as asked for"],
)
def test_shared_memory_is_for_ranks_of_one_node(environment: dict[str, str]) -> None:
    """Ranks that run as different nodes use WebSocket, and so do all where it is asked for."""
    with RankPool(2, environment) as pool:
        pool.run(torch_jobs.start)
        assert pool.run(kinds_of_links) == [["Outlet"]] * 2


def test_a_wrong_choice_of_links_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting that does not exist is refused with those that do."""
    monkeypatch.setenv("UNISONO_LINKS", "carrier-pigeon")
    with pytest.raises(ValueError, match=r"carrier-pigeon.*auto and websocket"):
        _neighbours(0, [Peer("w1", (), "here"), Peer("w1", (), "here")])
