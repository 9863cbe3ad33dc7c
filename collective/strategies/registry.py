"""Which strategies exist for which operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from collective.schedule import Kind, Schedule
from collective.strategies import (
    binomial,
    bruck,
    centralized,
    chain,
    direct,
    double_tree,
    halving_doubling,
    ring,
    scatter_allgather,
    tree,
)
from collective.strategies.spelling import SPELLINGS, Flat

Builder = Callable[[int, int, int], Schedule]


def _ranks(function: Callable[[int], Schedule]) -> Builder:
    """A strategy in which all ranks are alike."""
    return lambda ranks, _root, _arity: function(ranks)


def _rooted(function: Callable[[int, int], Schedule]) -> Builder:
    """A strategy with one rank at its root."""
    return lambda ranks, root, _arity: function(ranks, root)


#: builders of schedules from ranks, root and a tree's arity (0 for all others)
BUILDERS: dict[Kind, dict[str, Builder]] = {
    Kind.ALL_REDUCE: {
        "centralized": _rooted(centralized.all_reduce),
        "tree": tree.all_reduce,
        "ring": _ranks(ring.all_reduce),
        "double_tree": _rooted(double_tree.all_reduce),
        "halving_doubling": _ranks(halving_doubling.all_reduce),
        "recursive_doubling": _ranks(halving_doubling.recursive_doubling),
        "bruck": _ranks(bruck.all_reduce),
        "direct": _ranks(direct.all_reduce),
        "chain": _rooted(chain.all_reduce),
        "scatter_allgather": _ranks(scatter_allgather.all_reduce),
    },
    Kind.REDUCE: {
        "centralized": _rooted(centralized.reduce),
        "tree": tree.reduce,
        "double_tree": _rooted(double_tree.reduce),
        "chain": _rooted(chain.reduce),
        "scatter_allgather": _rooted(scatter_allgather.reduce),
    },
    Kind.BROADCAST: {
        "centralized": _rooted(centralized.broadcast),
        "tree": tree.broadcast,
        "double_tree": _rooted(double_tree.broadcast),
        "chain": _rooted(chain.broadcast),
        "scatter_allgather": _rooted(scatter_allgather.broadcast),
    },
    Kind.REDUCE_SCATTER: {
        "ring": _ranks(ring.reduce_scatter),
        "halving_doubling": _ranks(halving_doubling.reduce_scatter),
        "bruck": _ranks(bruck.reduce_scatter),
        "direct": _ranks(direct.reduce_scatter),
    },
    Kind.ALL_GATHER: {
        "ring": _ranks(ring.all_gather),
        "halving_doubling": _ranks(halving_doubling.all_gather),
        "bruck": _ranks(bruck.all_gather),
        "direct": _ranks(direct.all_gather),
    },
    Kind.GATHER: {
        "centralized": _rooted(centralized.gather),
        "binomial": _rooted(binomial.gather),
    },
    Kind.SCATTER: {
        "centralized": _rooted(centralized.scatter),
        "binomial": _rooted(binomial.scatter),
    },
    Kind.ALL_TO_ALL: {"direct": _ranks(direct.all_to_all)},
    Kind.BARRIER: {
        "centralized": _rooted(centralized.barrier),
        "tree": tree.barrier,
        "bruck": _ranks(bruck.barrier),
    },
}


def available(kind: Kind) -> list[str]:
    """Spellings of the strategies that exist for `kind`, a tree's with an example arity."""
    return [SPELLINGS[name] for name in BUILDERS[kind]]


@lru_cache(maxsize=256)
def build_flat(strategy: Flat, kind: Kind, ranks: int, root: int) -> Schedule:
    """The schedule of `strategy` for `kind`; see `collective.strategies.build`."""
    if ranks < 1 or not 0 <= root < ranks:
        raise ValueError(f"{kind.value} on {ranks} ranks with root {root}: there is no such rank")
    builder = BUILDERS[kind].get(strategy.name)
    if builder is None:
        raise ValueError(
            f"there is no {kind.value} by {strategy} yet; there is {', '.join(available(kind))}"
        )
    schedule = builder(ranks, root, strategy.arity or 0)
    return replace(schedule, name=f"{kind.value} {strategy}")
