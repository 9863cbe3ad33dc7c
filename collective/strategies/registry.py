"""Which strategies exist for which operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from collective.schedule import Kind, Schedule
from collective.strategies import centralized, direct, ring, tree
from collective.strategies.spelling import SPELLINGS, Flat

#: builders of schedules from ranks, root and a tree's arity (0 for all others)
BUILDERS: dict[Kind, dict[str, Callable[[int, int, int], Schedule]]] = {
    Kind.ALL_REDUCE: {
        "centralized": lambda ranks, root, _: centralized.all_reduce(ranks, root),
        "tree": tree.all_reduce,
        "ring": lambda ranks, *_: ring.all_reduce(ranks),
        "direct": lambda ranks, *_: direct.all_reduce(ranks),
    },
    Kind.REDUCE: {
        "centralized": lambda ranks, root, _: centralized.reduce(ranks, root),
        "tree": tree.reduce,
    },
    Kind.BROADCAST: {
        "centralized": lambda ranks, root, _: centralized.broadcast(ranks, root),
        "tree": tree.broadcast,
    },
    Kind.REDUCE_SCATTER: {"ring": lambda ranks, *_: ring.reduce_scatter(ranks)},
    Kind.ALL_GATHER: {"ring": lambda ranks, *_: ring.all_gather(ranks)},
    Kind.GATHER: {"centralized": lambda ranks, root, _: centralized.gather(ranks, root)},
    Kind.SCATTER: {"centralized": lambda ranks, root, _: centralized.scatter(ranks, root)},
    Kind.ALL_TO_ALL: {"direct": lambda ranks, *_: direct.all_to_all(ranks)},
    Kind.BARRIER: {
        "centralized": lambda ranks, root, _: centralized.barrier(ranks, root),
        "tree": tree.barrier,
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
