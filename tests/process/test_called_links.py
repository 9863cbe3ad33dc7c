"""Links that are dialled by the sender, since the receiver cannot reach it, and are masked."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import native_jobs as jobs
import pytest
import torch
from forked_ranks import ForkedRanks
from ranks import Outcome
from resources import descriptors, threads
from test_collective_failures import in_its_loop
from thread_ranks import addresses
from websockets.utils import apply_mask

import collective
from collective.group import Group
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


def test_it_is_said_once_with_ranks_nodes_and_addresses(caplog: pytest.LogCaptureFixture) -> None:
    """One warning names both ranks and the address that leads nowhere; the group shows it too."""
    before = descriptors(), threads()
    mine = lists(addresses(2), {0: 1})
    with ThreadPoolExecutor(2) as pool:
        groups = list(
            pool.map(
                lambda rank: collective.init(rank, addresses=mine[rank], secret="s", timeout=20),
                range(2),
            )
        )
        sub = list(pool.map(lambda group: group.subgroup([1, 0], "again"), groups))
        assert list(pool.map(total, sub)) == [2.0, 2.0]
        assert (groups[1].unreachable, sub[1].unreachable) == ({}, {})
        assert list(groups[0].unreachable) == [1] and list(sub[0].unreachable) == [0]
        (record,) = [one for one in caplog.records if one.levelno == logging.WARNING]
        host, _, port = mine[0][1].partition(":")
        for part in (f"rank 0 on node {host}", f"rank 1 on node {host}", f"{host}:{port}"):
            assert part in record.getMessage()
        list(pool.map(Group.close, groups))
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
            collective.init(rank, addresses=mine[rank], secret="s", timeout=1)
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
