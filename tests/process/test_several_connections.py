"""Links of several connections: which of them a frame takes, and how it arrives."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_links import socket_pair
from thread_ranks import ThreadRanks

from collective.errors import ProtocolError
from collective.group import Group
from collective.links import bundle
from collective.links.bundle import BundleInlet, BundleOutlet, wanted
from collective.links.link import Outlet, frame_head
from collective.links.wire import FrameKind


class Link:
    """A link of three connections between two sockets each, and what was read of it."""

    def __init__(self, *, masked: bool) -> None:
        pairs = [socket_pair() for _ in range(3)]
        sending, receiving = ([pair[end] for pair in pairs] for end in (0, 1))
        self.inlet = BundleInlet(receiving[0], receiving[1:], client=not masked)
        self.outlet = BundleOutlet(Outlet(sending[0], client=masked), sending[1:])
        self.got: list[bytes] = []
        self._room: bytearray | None = None

    def send(self, number: int, size: int) -> bool:
        """Begin frame `number`, if there is room for it."""
        if not self.outlet.idle:
            return False
        head = frame_head(FrameKind.DATA, 1, number, 0, size, 0)
        assert self.outlet.begin(head, memoryview(payload(number, size)))
        return True

    def receive(self) -> bool:
        """Read on; whether a frame came to its end."""
        self.outlet.flush()
        for end in (self.outlet, *self.outlet.others, self.inlet, *self.inlet.others):
            end.readable = end.writable = True
        header = self.inlet.header()
        if header is None:
            return False
        assert header.sequence == len(self.got)
        if self._room is None:
            self._room = bytearray(header.length)
        if not self.inlet.read_into(memoryview(self._room)):
            return False
        self.got.append(bytes(self._room))
        self._room = None
        return True

    def close(self) -> None:
        self.outlet.close()
        self.inlet.close()


def payload(number: int, size: int) -> bytes:
    return bytes((number + place) % 251 for place in range(size))


@pytest.fixture
def link() -> Iterator[Link]:
    made = Link(masked=False)
    yield made
    made.close()


def test_the_first_connection_is_enough_while_it_has_room(link: Link) -> None:
    """Small operations leave the other connections alone, however many there are."""
    for number in range(10):
        assert link.send(number, 5000)
        while not link.receive():
            pass
    assert link.got == [payload(number, 5000) for number in range(10)]
    assert [other.sent for other in link.outlet.others] == [0, 0]
    assert link.inlet.used == 1


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 700, 200_000, 500_000]), min_size=1, max_size=20),
    paces=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    masked=st.booleans(),
)
def test_frames_arrive_in_order_whichever_connections_are_full(
    sizes: list[int], paces: list[int], masked: bool
) -> None:
    """A reader that is slow now and then, and frames of any size, small ones behind large ones."""
    link = Link(masked=masked)
    begun = turn = 0
    while len(link.got) < len(sizes):
        while begun < len(sizes) and link.send(begun, sizes[begun]):
            begun += 1
        for _ in range(paces[turn % len(paces)] if begun < len(sizes) else 1):
            link.receive()
        turn += 1
        if not any(paces):
            link.receive()
    assert link.got == [payload(number, size) for number, size in enumerate(sizes)]
    assert link.outlet.flush()
    link.close()


def test_all_connections_are_used_when_nobody_reads(link: Link) -> None:
    """As much is under way as all of them take, and then no more."""
    begun = 0
    while link.send(begun, 400_000):
        begun += 1
    assert all(other.sent for other in link.outlet.others)
    while len(link.got) < begun:
        link.receive()
    assert link.inlet.used == 3
    assert link.got == [payload(number, 400_000) for number in range(begun)]


def test_a_turn_to_a_connection_that_is_not_there_is_an_error(link: Link) -> None:
    """The error says what came, and of how many connections the link is."""
    link.outlet.begin(frame_head(FrameKind.TURN, 1, 3, 0, 0, 0), None)
    with pytest.raises(ProtocolError, match=r"sequence=3.* of a link of 3 connections"):
        link.receive()


def test_ranks_use_all_connections_that_are_soon_full() -> None:
    """The contract that all kinds of links are held to sees every connection of a link."""

    def work(group: Group) -> None:
        tensor = torch.full((3_000_000,), float(group.rank + 1))
        group.all_reduce(tensor)
        assert tensor.unique().tolist() == [3.0]
        assert group._communicator is not None
        assert [inlet.used for inlet in group._communicator.inlets.values()] == [3]

    with ThreadRanks(2, kind="three connections") as made:
        made.run(work)


class Measured:
    """A socket whose round trip the kernel has measured."""

    def __init__(self, seconds: float) -> None:
        self._info = bytes(148) + struct.pack("=I", round(seconds * 1e6))

    def getsockopt(self, _level: int, _option: int, size: int) -> bytes:
        return self._info[:size]


@pytest.mark.parametrize(
    ("seconds", "links", "number"),
    [(50e-6, 1, 1), (1.6e-3, 1, 1), (10e-3, 1, 6), (50e-3, 1, 16), (0.3, 1, 16), (0.3, 63, 4)],
)
def test_the_way_and_the_links_of_a_rank_say_how_many_connections(
    seconds: float, links: int, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1.25e9 bytes a second times the round trip, at 2 MiB per connection: 10 ms are 12.5e6."""
    buffers = tmp_path / "tcp_rmem", tmp_path / "tcp_wmem"
    buffers[0].write_text("4096\t131072\t6291456\n")
    buffers[1].write_text("4096\t16384\t4194304\n")
    monkeypatch.setattr(bundle, "_BUFFERS", buffers)
    monkeypatch.delenv("UNISONO_CONNECTIONS", raising=False)
    sock: Any = Measured(seconds)
    assert wanted(sock, links) == number
    monkeypatch.setenv("UNISONO_CONNECTIONS", "7")
    assert wanted(sock, links) == 7
