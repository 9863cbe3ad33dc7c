"""Collectives between real processes over WebSocket: values, sizes, strategies, memory."""

from __future__ import annotations

from collections.abc import Iterator

import native_jobs as jobs
import pytest
import torch
from forked_ranks import ForkedRanks
from ranks import RankPool
from thread_ranks import addresses

STRATEGIES = ["auto", "ring", "tree:2", "tree:3", "centralized"]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Four processes in one group; afterwards nothing of it is left in any of them."""
    with ForkedRanks(4) as pool:
        pool.run(jobs.join, addresses(4))
        yield pool
        assert pool.run(jobs.leave) == [True] * 4


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sums_of_every_size(pool: RankPool, size: int, strategy: str) -> None:
    """Sizes that do not divide, are smaller than the group, empty: exact, integers and floats."""
    sizes = [0, 1, 2, size - 1, size, size + 1, 73, 1_000_003]
    pool.run(jobs.all_reduces, size, strategy, sizes, [torch.int64, torch.float64])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_other_operations(pool: RankPool, strategy: str) -> None:
    """Every operation with every root moves the right parts."""
    pool.run(jobs.other_operations, strategy)


@pytest.mark.parametrize(
    "strategy",
    ["local=ring,between=tree:2", "local=tree:2,between=ring",
     "local=ring,local@b=tree:2,between=ring"],
)  # fmt: skip
def test_two_nodes(pool: RankPool, strategy: str) -> None:
    """Two levels are exact over sockets too."""
    pool.run(jobs.two_nodes, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_same_bytes_everywhere_and_every_time(pool: RankPool, strategy: str) -> None:
    """A hundred sums in a row are exact; random floats give the same on all ranks, twice."""
    pool.run(jobs.hundred, strategy)
    results = pool.run(jobs.random_bytes, strategy) + pool.run(jobs.random_bytes, strategy)
    assert len(set(results)) == 1


def test_memory_stays_bounded(pool: RankPool) -> None:
    """An all-reduce of 256 MiB takes a few segments of memory, not another tensor."""
    for rise in pool.run(jobs.memory_of_an_all_reduce, 64 << 20, timeout=60):
        assert rise < 64 << 20
