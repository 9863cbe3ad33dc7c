"""Strategies as parts of larger schedules: without the tokens at the end, and without scratch."""

from __future__ import annotations

from collections.abc import Callable
from math import lcm

from collective.schedule import Schedule, mirrored
from collective.strategies import (
    bruck,
    chain,
    direct,
    double_tree,
    halving_doubling,
    ring,
    scatter_allgather,
    tree,
)
from collective.strategies.spelling import Flat

#: from ranks and root, how the root's tensor comes to everyone
_DOWN: dict[str, Callable[[int, int], Schedule]] = {
    "chain": chain.copy_down,
    "double_tree": double_tree.copy_down,
    "scatter_allgather": scatter_allgather.copy_down,
}
#: from ranks, how everyone's slot comes to everyone; backwards, how each is summed at its owner
_AROUND: dict[str, Callable[[int], Schedule]] = {
    "ring": ring.all_gather,
    "halving_doubling": halving_doubling.all_gather,
    "bruck": bruck.all_gather,
    "direct": direct.all_gather,
}

#: strategies that sum in one rank, and spread from one
ROOTED = ("centralized", "tree", "double_tree", "chain", "scatter_allgather")
#: those of them whose number of chunks does not depend on the number of ranks
FIXED_CHUNKS = ("centralized", "tree", "double_tree", "chain")
#: those of them that are one tree
TREES = ("centralized", "tree", "chain")
#: strategies in which everyone owns a share
SHARED = tuple(_AROUND)


def arity(strategy: Flat, ranks: int) -> int:
    """Children per rank of a strategy that is one tree."""
    if strategy.name == "chain":
        return 1
    return strategy.arity or max(ranks - 1, 1)


def copy_down(strategy: Flat, ranks: int, root: int) -> Schedule:
    """A broadcast by one of `ROOTED`, without tokens."""
    if strategy.name in _DOWN:
        return _DOWN[strategy.name](ranks, root)
    return tree.copy_down(ranks, root, arity(strategy, ranks))


def sum_up(strategy: Flat, ranks: int, root: int) -> Schedule:
    """A reduce by one of `ROOTED`, without tokens: the broadcast backwards."""
    return mirrored(copy_down(strategy, ranks, root))


def all_gather(strategy: Flat, ranks: int) -> Schedule:
    """An all-gather by one of `SHARED`."""
    return _AROUND[strategy.name](ranks)


def reduce_scatter(strategy: Flat, ranks: int) -> Schedule:
    """A reduce-scatter by one of `SHARED`: the all-gather backwards."""
    return mirrored(all_gather(strategy, ranks))


def common_chunks(*schedules: Schedule) -> int:
    """So many chunks that those of each schedule are whole numbers of them."""
    return lcm(*(schedule.chunks for schedule in schedules))
