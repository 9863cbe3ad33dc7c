"""Every combination of strategies within and between nodes, run on nodes of 1, 4 and 2 ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from thread_ranks import Ranks

from collective.group import Group
from collective.schedule import Kind
from collective.strategies import SPELLINGS, TwoLevel
from collective.strategies.two_level import LEVELS

NODES = "abbbbcc"
N = len(NODES)
#: elements: a chunk of some schedules is empty, none divides evenly
COUNT = 13


def values(rank: int, part: int = 0) -> torch.Tensor:
    return torch.arange(COUNT, dtype=torch.float64) * (rank + 1) + 100 * part


def total(part: int = 0) -> torch.Tensor:
    return torch.stack([values(rank, part) for rank in range(N)]).sum(0)


def all_reduce(group: Group, root: int) -> bool:
    tensor = values(group.rank)
    group.all_reduce(tensor, "mean")
    return torch.equal(tensor, total() / N)


def reduce(group: Group, root: int) -> bool:
    tensor = values(group.rank)
    group.reduce(tensor, root)
    return torch.equal(tensor, total() if group.rank == root else values(group.rank))


def broadcast(group: Group, root: int) -> bool:
    tensor = values(group.rank)
    group.broadcast(tensor, root)
    return torch.equal(tensor, values(root))


def all_gather(group: Group, root: int) -> bool:
    outputs = [torch.zeros(COUNT, dtype=torch.float64) for _ in range(N)]
    group.all_gather(outputs, values(group.rank))
    return all(torch.equal(output, values(rank)) for rank, output in enumerate(outputs))


def reduce_scatter(group: Group, root: int) -> bool:
    output = torch.zeros(COUNT, dtype=torch.float64)
    group.reduce_scatter(output, [values(group.rank, part) for part in range(N)])
    return torch.equal(output, total(group.rank))


def barrier(group: Group, root: int) -> bool:
    return group.barrier().done()


RUN: dict[Kind, Callable[[Group, int], bool]] = {
    Kind.ALL_REDUCE: all_reduce, Kind.REDUCE: reduce, Kind.BROADCAST: broadcast,
    Kind.ALL_GATHER: all_gather, Kind.REDUCE_SCATTER: reduce_scatter, Kind.BARRIER: barrier,
}  # fmt: skip


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    kept = Ranks()
    yield kept
    kept.close()


@pytest.mark.parametrize("kind", list(LEVELS))
def test_every_combination_runs_rightly(ranks: Ranks, kind: Kind) -> None:
    """All local × all between, and in each the large node also with a strategy of its own."""
    inside, across = ([SPELLINGS[name] for name in level] for level in LEVELS[kind])
    combinations = []
    for index, (local, between) in enumerate(itertools.product(inside, across)):
        combinations.append(TwoLevel(local, between))
        combinations.append(TwoLevel(local, between, {"b": inside[(index + 1) % len(inside)]}))

    def work(group: Group) -> list[str]:
        wrong = []
        for number, strategy in enumerate(combinations):
            group.strategy = strategy
            if not RUN[kind](group, number % N):
                wrong.append(str(strategy))
        return wrong

    assert ranks.get(N, nodes=list(NODES)).run(work, timeout=60) == [[]] * N
