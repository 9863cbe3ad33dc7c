"""Links that are dialled by the sender, since the receiver cannot reach it, and are masked."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import native_jobs as jobs
import pytest
import torch
from forked_ranks import ForkedRanks
from link_kinds import group_by_list
from ranks import Outcome
from resources import descriptors, threads
from test_collective_failures import in_its_loop
from thread_ranks import addresses
from waiting import eventually
from websockets.utils import apply_mask

import collective
from collective.errors import PeerLost, RendezvousFailed
from collective.group import Group
from collective.lines import Call, Lines
from collective.links.doorman import Connection
from collective.links.masking import Mask

pytestmark = pytest.mark.timeout(60)

#: each rank cannot reach the next one: at the address that it has of it, nobody listens
NEXT = {0: 1, 1: 2, 2: 0}


def lists(where: list[str], unreachable: dict[int, int]) -> list[list[str]]:
    """The addresses as each rank has them."""
    dead = [f"{text.rpartition(':')[0]}:{21_000 + rank}" for rank, text in enumerate(where)]
    return [
        [dead[peer] if unreachable.get(rank) == peer else text for peer, text in enumerate(where)]
        for rank in range(len(where))
    ]


class Ranks:
    """Three processes that meet again under a new epoch."""

    def __init__(self) -> None:
        self.ranks = ForkedRanks(3)
        self.where = addresses(3)
        self.epoch = 0

    def join(self, connections: str = "1") -> None:
        self.epoch += 1
        found = self.ranks.run(
            jobs.join_from, lists(self.where, NEXT), self.epoch, connections, timeout=30
        )
        for rank, unreachable in enumerate(found):
            assert list(unreachable) == [NEXT[rank]]
            assert f":{21_000 + NEXT[rank]}: " in unreachable[NEXT[rank]]


@pytest.fixture(scope="module")
def made() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.ranks.kill()


@pytest.mark.parametrize("connections", ["1", "3"])
def test_everything_runs_where_each_rank_cannot_reach_the_next(
    made: Ranks, connections: str
) -> None:
    """Collectives of the group and of subgroups, messages and downloads in all directions, with
    one connection per link and with several; nothing is left of them after the group."""
    made.join(connections)
    for strategy in ("ring", "tree:2", "direct"):
        made.ranks.run(jobs.all_reduces, 3, strategy, [1, 1_300_001], [torch.float32])
    made.ranks.run(jobs.all_reduces, 3, "ring", [1, 2, 7, 41], [torch.uint8, torch.float16])
    made.ranks.run(jobs.all_reduces, 2, "ring", [70_001], [torch.float64])
    made.ranks.run(jobs.other_operations, "auto")
    for count in (1, 300_001):
        made.ranks.run(jobs.every_pair, count)
    assert made.ranks.run(jobs.leave) == [True] * 3


def test_a_disagreement_is_told_over_masked_links(made: Ranks) -> None:
    """Ranks that call something else are named on every rank, as over any link."""
    made.join()
    outcomes = started(made, [10, 10, 11])
    for outcome in outcomes:
        assert outcome is not None and outcome.kind == "Mismatch", outcome
        assert "[10]" in outcome.message and "[11]" in outcome.message
        assert outcome.seconds < 3


def started(made: Ranks, sizes: list[int]) -> list[Outcome | None]:
    for rank, size in enumerate(sizes):
        made.ranks.start(jobs.sum_of, size, ranks=[rank])
    return made.ranks.collect(timeout=30)


@pytest.mark.parametrize("victim", [1, 2])
def test_a_rank_killed_on_masked_links_is_named(made: Ranks, victim: int) -> None:
    """SIGKILL in the middle of masked data: both survivors say who is lost, within seconds."""
    made.join()
    made.ranks.start(jobs.loop)
    in_its_loop(made.ranks, victim)
    survivors = [rank for rank in range(3) if rank != victim]
    made.ranks.processes[victim].kill()
    start = time.monotonic()
    for outcome in made.ranks.collect(survivors, timeout=20):
        assert outcome is not None and outcome.kind == "PeerLost", outcome
        assert outcome.rank == victim
    assert time.monotonic() - start < 5
    made.ranks.revive(victim)


@pytest.mark.parametrize("operation", ["download", "recv"])
def test_a_rank_that_dies_when_it_is_asked_to_dial_is_named(made: Ranks, operation: str) -> None:
    """SIGKILL between the call and the dialling: who waits for the connection hears at once."""
    made.join()
    made.ranks.outcomes(jobs.die_when_called, ranks=[1])
    (outcome,) = made.ranks.outcomes(jobs.get_from, 1, operation, ranks=[0], timeout=30)
    assert outcome is not None
    assert (outcome.kind, outcome.rank, outcome.operation) == ("PeerLost", 1, operation), outcome
    assert outcome.seconds < 5
    made.ranks.revive(1)


def test_who_is_asked_to_dial_by_one_that_is_gone_soon_dials_others() -> None:
    """A call of a rank where nobody listens any more keeps nobody waiting who calls after it."""
    groups = linked(lists(addresses(3), {0: 2, 1: 2}))
    try:
        lines = [group._wiring._reach.lines for group in groups]  # type: ignore[attr-defined]
        heard: list[int] = []
        answer = lines[2]._answer

        def note(peer: int, call: Call) -> None:
            heard.append(peer)
            answer(peer, call)

        lines[2]._answer = note
        groups[0]._wiring._listener.close()  # type: ignore[attr-defined]
        lines[0].call(2, Call("default", "tensor", 0, 2))
        eventually(lambda: heard == [0], what="the call is heard")
        groups[2].expose(torch.ones(3), "w")
        assert groups[1].download(2, "w", timeout=5).tolist() == [1.0] * 3
        assert heard == [0, 1]
    finally:
        leave(groups)


@pytest.mark.parametrize("when", ["before the call", "after it"])
def test_the_end_of_a_line_is_a_loss(when: str) -> None:
    """Of a rank that ends its line may be the first connection to go, before the call or after it:
    who waits for the connection is told the same at once."""
    groups = linked(lists(addresses(2), {0: 1}))
    try:
        asked, other = (group._wiring._reach.lines for group in groups)  # type: ignore[attr-defined]
        call = asked.call

        def late(peer: int, content: Call) -> None:
            other.close()
            eventually(lambda: not asked.has(1), what="the end is noticed")
            call(peer, content)

        if when == "after it":
            other._answer = lambda *_: other.close()
        else:
            asked.call = late
        start = time.monotonic()
        with pytest.raises(PeerLost, match="asked to dial ended") as caught:
            groups[0].download(1, "never", timeout=15)
        assert time.monotonic() - start < 5
        assert (caught.value.rank, caught.value.operation) == (1, "download")
    finally:
        leave(groups)


def test_a_line_takes_whole_calls_only() -> None:
    """Where the peer reads none, it takes as many as there is room for; then who asks is told."""
    ours, theirs = socket.socketpair()
    lines = Lines(1, lambda *_: None)
    call = Call("default", "tensor", 0, 3)
    frame = b"".join(call.frame(1))
    with theirs:
        lines.take(3, Connection(ours))
        taken = 0
        with pytest.raises(RendezvousFailed, match="rank 3 does not hear"):  # noqa: PT012
            while taken < 50_000:
                lines.call(3, call)
                taken += 1
        theirs.settimeout(5)
        got = bytearray()
        while len(got) < taken * len(frame):
            got += theirs.recv(1 << 20)
        assert got == frame * taken
        lines.close()


def linked(mine: list[list[str]]) -> list[Group]:
    """Groups of ranks that are threads here, each with its own list of addresses."""
    with ThreadPoolExecutor(len(mine)) as pool:
        return list(
            pool.map(
                lambda rank: group_by_list(rank, mine[rank], timeout=20),
                range(len(mine)),
            )
        )


def leave(groups: list[Group]) -> None:
    with ThreadPoolExecutor(len(groups)) as pool:
        list(pool.map(Group.close, groups))


def test_it_is_said_once_with_ranks_nodes_and_addresses(caplog: pytest.LogCaptureFixture) -> None:
    """One warning names both ranks and the address that leads nowhere; the group shows it too."""
    before = descriptors(), threads()
    mine = lists(addresses(2), {0: 1})
    groups = linked(mine)
    with ThreadPoolExecutor(2) as pool:
        sub = list(pool.map(lambda group: group.subgroup([1, 0], "again"), groups))
        assert list(pool.map(total, sub)) == [2.0, 2.0]
        assert (groups[1].unreachable, sub[1].unreachable) == ({}, {})
        assert list(groups[0].unreachable) == [1] and list(sub[0].unreachable) == [0]
        (record,) = [one for one in caplog.records if one.levelno == logging.WARNING]
        host, _, port = mine[0][1].partition(":")
        for part in (f"rank 0 on node {host}", f"rank 1 on node {host}", f"{host}:{port}"):
            assert part in record.getMessage()
    leave(groups)
    assert (descriptors(), threads()) == before


def total(group: Group) -> float:
    tensor = torch.ones(1)
    group.all_reduce(tensor)
    return float(tensor)


def test_who_cannot_be_reached_either_way_is_named() -> None:
    """Where neither of two ranks can dial the other, both say so with the addresses they tried."""
    mine = lists(addresses(2), {0: 1, 1: 0})

    def fail(rank: int) -> str:
        with pytest.raises(collective.RendezvousFailed) as caught:
            group_by_list(rank, mine[rank], timeout=1)
        assert caught.value.rank == 1 - rank
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        for rank, text in enumerate(pool.map(fail, range(2))):
            assert f"cannot reach rank {1 - rank} on node" in text
            assert mine[rank][1 - rank] in text


@pytest.mark.parametrize("size", [1, 3, 4, 1000, (64 << 10) + 5, 200_003])
def test_masking_is_that_of_the_standard(size: int) -> None:
    """The bytes of a whole frame and of one that comes in pieces are those of another library."""
    data, key = os.urandom(size), os.urandom(4)
    right = apply_mask(data, key)
    room = bytearray(size)
    Mask(key).apply(memoryview(data), memoryview(room))
    assert room == right
    pieces = memoryview(bytearray(right))
    mask = Mask(key)
    cuts = sorted({0, 1, min(size, 6), size // 2, size})
    for start, stop in itertools.pairwise(cuts):
        mask.apply(pieces[start:stop], pieces[start:stop], start)
    assert pieces == data
    later = bytearray(size)
    Mask(key, 3).apply(memoryview(data), memoryview(later))
    assert later == apply_mask(b"abc" + data, key)[3:]
