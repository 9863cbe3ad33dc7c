"""Strategies: how a collective runs on a group of ranks, as schedules.

`build("tree:2", Kind.BROADCAST, ranks=8, root=3)` is the schedule; `collective_of` says what it is
proved against.  A new strategy is one small file of functions and its line in `_BUILDERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from collective.schedule import Collective, Kind, Schedule
from collective.strategies import centralized, direct, ring, tree
from collective.strategies.choice import choose
from collective.strategies.spelling import (
    SPELLINGS,
    Auto,
    Flat,
    Strategy,
    TwoLevel,
    parse,
)

__all__ = [
    "Auto",
    "Flat",
    "Strategy",
    "TwoLevel",
    "available",
    "build",
    "choose",
    "collective_of",
    "parse",
    "resolve",
]

_BUILDERS: dict[Kind, dict[str, Callable[[int, int, int], Schedule]]] = {
    Kind.ALL_REDUCE: {
        "centralized": lambda ranks, root, _: centralized.all_reduce(ranks, root),
        "tree": tree.all_reduce,
        "ring": lambda ranks, *_: ring.all_reduce(ranks),
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
    return [SPELLINGS[name] for name in _BUILDERS[kind]]


def build(strategy: Strategy | str, kind: Kind, ranks: int, root: int = 0) -> Schedule:
    """The schedule of `strategy` for `kind`; built once and kept.

    Of one rank it has no steps.  Where all ranks are alike (all-reduce, barrier), `root` is the
    rank in the middle; a ring and a direct exchange have none.

    Raises:
        ValueError: the strategy is unknown, does not exist for this operation, or is `auto`
            (which `choose` or `resolve` turns into one); says what exists.
    """
    if isinstance(strategy, str):
        strategy = parse(strategy)
    if isinstance(strategy, Auto):
        raise ValueError("auto is no schedule by itself; choose() says what it is for a size")
    if isinstance(strategy, TwoLevel):
        raise ValueError(f"two levels are not available yet, not {strategy}; use a flat strategy")
    return _built(strategy, kind, ranks, root)


@lru_cache(maxsize=256)
def _built(strategy: Flat, kind: Kind, ranks: int, root: int) -> Schedule:
    if ranks < 1 or not 0 <= root < ranks:
        raise ValueError(f"{kind.value} on {ranks} ranks with root {root}: there is no such rank")
    builder = _BUILDERS[kind].get(strategy.name)
    if builder is None:
        raise ValueError(
            f"there is no {kind.value} by {strategy} yet; there is {' and '.join(available(kind))}"
        )
    schedule = builder(ranks, root, strategy.arity or 0)
    return replace(schedule, name=f"{kind.value} {strategy}")


def collective_of(kind: Kind, ranks: int, schedule_chunks: int, root: int = 0) -> Collective:
    """What a schedule of `schedule_chunks` chunks has to compute, for `collective.proof.verify`."""
    return Collective(kind, ranks, schedule_chunks, root)


def resolve(strategy: Strategy | str, kind: Kind, ranks: int, nbytes: int) -> Flat:
    """The strategy for one call of a group whose setting is `strategy`.

    A group has one setting for all its operations.  It is a strategy of the all-reduce or `auto`;
    operations that it does not exist for run as under `auto`.

    Raises:
        ValueError: the setting names no strategy that exists for an all-reduce or for `kind`.
    """
    if isinstance(strategy, str):
        strategy = parse(strategy)
    if isinstance(strategy, Auto):
        return choose(kind, ranks, nbytes)
    if isinstance(strategy, TwoLevel):
        raise ValueError(f"two levels are not available yet, not {strategy}; use a flat strategy")
    if strategy.name in _BUILDERS[kind]:
        return strategy
    if strategy.name in _BUILDERS[Kind.ALL_REDUCE]:
        return choose(kind, ranks, nbytes)
    raise ValueError(
        f"there is no all_reduce by {strategy} yet; "
        f"there is {' and '.join(available(Kind.ALL_REDUCE))}"
    )
