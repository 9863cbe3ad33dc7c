"""Strategies: how a collective runs on a group of ranks, as schedules.

`build("tree:2", Kind.BROADCAST, ranks=8, root=3)` is the schedule; `collective_of` says what it is
proved against.  A new strategy is one small file of functions and its line in `registry.BUILDERS`.
"""

from __future__ import annotations

from collections.abc import Sequence

from collective.schedule import Collective, Kind, Schedule
from collective.strategies import handed, two_level
from collective.strategies.choice import ORIGINALS, measured_choice
from collective.strategies.handed import Staged, engines, hand_over
from collective.strategies.registry import BUILDERS, available, build_flat
from collective.strategies.spelling import SPELLINGS, Auto, Flat, Strategy, TwoLevel, parse
from collective.strategies.two_level import LEVELS, check_names, nodes_of

__all__ = [
    "BUILDERS",
    "LEVELS",
    "ORIGINALS",
    "SPELLINGS",
    "Auto",
    "Flat",
    "Staged",
    "Strategy",
    "TwoLevel",
    "available",
    "build",
    "check_levels",
    "check_names",
    "collective_of",
    "engines",
    "hand_over",
    "measured_choice",
    "nodes_of",
    "parse",
    "resolve",
]


def build(
    strategy: Strategy | str,
    kind: Kind,
    ranks: int,
    root: int = 0,
    *,
    nodes: Sequence[Sequence[int]] | None = None,
    names: Sequence[str] | None = None,
) -> Schedule:
    """The schedule of `strategy` for `kind`; built once and kept.

    Of one rank it has no steps.  Where all ranks are alike (all-reduce, barrier), `root` is the
    rank in the middle, if there is one.

    Args:
        strategy: parsed or as text; not `auto`, which a `Chooser` turns into one.
        kind: the operation.
        ranks: ranks of the group.
        root: the rank that plays another part than the others.
        nodes: the ranks of each node (see `nodes_of`); needed for two levels only.
        names: of these nodes, where some have a local strategy of their own.

    Raises:
        ValueError: the strategy is unknown or does not exist for this operation (says what does),
            or an argument is out of range.
    """
    if isinstance(strategy, str):
        strategy = parse(strategy)
    if isinstance(strategy, Auto):
        raise ValueError("auto is no schedule by itself; a Chooser says what it is for a size")
    if engines(strategy):
        raise ValueError(
            f"{strategy} hands a level to {' and '.join(engines(strategy))}: there is no schedule "
            f"of what another library does"
        )
    if isinstance(strategy, Flat):
        return build_flat(strategy, kind, ranks, root)
    if nodes is None:
        raise ValueError(f"{strategy} needs to know which ranks share a node; use a flat strategy")
    if sorted(rank for node in nodes for rank in node) != list(range(ranks)):
        raise ValueError(
            f"every one of {ranks} ranks belongs to one node, but nodes is {list(nodes)}"
        )
    if not 0 <= root < ranks:
        raise ValueError(f"{kind.value} on {ranks} ranks with root {root}: there is no such rank")
    return two_level.build(strategy, kind, tuple(map(tuple, nodes)), root, names)


def collective_of(kind: Kind, ranks: int, schedule_chunks: int, root: int = 0) -> Collective:
    """What a schedule of `schedule_chunks` chunks has to compute, for `collective.proof.verify`."""
    return Collective(kind, ranks, schedule_chunks, root)


def resolve(
    strategy: Strategy, kind: Kind, names: Sequence[str] | None = None
) -> Flat | TwoLevel | None:
    """What a group's setting means for an operation; None where `auto` chooses.

    A group has one setting for all its operations.  It is a strategy of the all-reduce or `auto`;
    operations that it does not exist for run as under `auto`.

    Args:
        strategy: the setting.
        kind: the operation.
        names: of the nodes, where some have a local strategy of their own.
    """
    if not isinstance(strategy, Auto) and handed.carries(strategy, kind):
        return strategy
    if isinstance(strategy, TwoLevel) and two_level.exists(strategy, kind, names):
        return strategy
    if isinstance(strategy, Flat) and strategy.name in BUILDERS[kind]:
        return strategy
    return None


def check_levels(strategy: Strategy, names: Sequence[str] | None = None) -> None:
    """Refuse two levels that do not exist for any operation but a barrier, whose tokens go anyhow.

    Args:
        strategy: the setting.
        names: of the nodes that take part; without them, any node may.

    Raises:
        ValueError: such levels; says which an all-reduce has.
    """
    kinds = [kind for kind in LEVELS if kind is not Kind.BARRIER]
    if not isinstance(strategy, TwoLevel) or any(
        there(strategy, kind, names)
        for there in (two_level.exists, handed.exists)
        for kind in kinds
    ):
        return
    local, between = (", ".join(SPELLINGS[name] for name in level)
                      for level in LEVELS[Kind.ALL_REDUCE])  # fmt: skip
    raise ValueError(
        f"{strategy} exists for no operation: for all_reduce there is a local level by {local}, "
        f"and one between nodes by {between}"
    )
