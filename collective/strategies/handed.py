"""Levels that are handed to another library: `local=ring,between=gloo`, `local=nccl,between=ring`.

Such a level has no schedule of ours.  What it has to do is read off a schedule in which a star or a
direct exchange stands in for it: all moves to one rank are one reduce of the library, all from one
rank one broadcast, and both together an all-reduce.  What comes before and after runs as ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from collective.schedule import Act, Kind, Move, Schedule, Step, embed
from collective.strategies import two_level
from collective.strategies.gather_levels import Nodes
from collective.strategies.registry import build_flat
from collective.strategies.spelling import ENGINES, Flat, Strategy, TwoLevel

_STAR, _DIRECT = Flat("centralized"), Flat("direct")
#: by operation, what stands in for a library within nodes, and between them
_STAND_INS = {
    Kind.ALL_REDUCE: (_DIRECT, _STAR),
    Kind.REDUCE: (_STAR, _STAR),
    Kind.BROADCAST: (_STAR, _STAR),
    Kind.ALL_GATHER: (_DIRECT, _DIRECT),
    Kind.REDUCE_SCATTER: (_DIRECT, _DIRECT),
    Kind.BARRIER: (_STAR, _STAR),
}


@dataclass(frozen=True)
class Call:
    """One call of another library, the same on all its members.

    Attributes:
        engine: the library.
        level: of which it is a part: `local` or `between`.
        kind: all-reduce, reduce, broadcast or barrier.
        members: the ranks that take part, in order.
        root: the one of them to which a reduce, or from which a broadcast, goes.
        slots: what is reduced or sent.
    """

    engine: str
    level: str
    kind: Kind
    members: tuple[int, ...]
    root: int
    slots: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Staged:
    """An operation in stages: schedules of ours, and calls of other libraries in one order.

    No rank enters the second stage before all ranks have entered the first with the same
    descriptor, since other libraries do not notice it when ranks disagree.

    Attributes:
        stand_in: a schedule that does the same.
        stages: each a schedule, or calls, of which every rank makes those that it is a member of.
    """

    stand_in: Schedule
    stages: tuple[Schedule | tuple[Call, ...], ...]

    def program(self, rank: int) -> Sequence[tuple[int, Move]]:
        """What `rank` would do under the stand-in."""
        return self.stand_in.program(rank)


def engines(strategy: Strategy) -> tuple[str, ...]:
    """The libraries that a strategy hands a level to."""
    if isinstance(strategy, TwoLevel):
        levels = [strategy.local, strategy.between]
    else:
        levels = [strategy] if isinstance(strategy, Flat) else []
    return tuple(flat.name for flat in levels if flat.name in ENGINES)


def carries(strategy: Strategy, kind: Kind) -> bool:
    """Whether the strategy hands a level to a library that can do the operation."""
    return bool(engines(strategy)) and kind in _STAND_INS


def exists(strategy: TwoLevel, kind: Kind, names: Sequence[str] | None = None) -> bool:
    """Whether the other level, beside that of a library, has such a strategy for the operation.

    Args:
        strategy: of two levels.
        kind: the operation.
        names: the nodes that take part; without them, any node may.
    """
    if not carries(strategy, kind):
        return False
    within, across = _STAND_INS[kind]
    both = TwoLevel(
        within if strategy.local.name in ENGINES else strategy.local,
        across if strategy.between.name in ENGINES else strategy.between,
        dict(strategy.on),
    )
    return two_level.exists(both, kind, names)


def stand_in(strategy: Flat | TwoLevel, kind: Kind) -> TwoLevel:
    """`strategy` with schedules of ours in place of other libraries.

    They also take the place of a strategy of ours that does not exist for the operation: the
    library keeps its level.

    Raises:
        ValueError: no other library does this operation.
    """
    if kind not in _STAND_INS:
        kinds = ", ".join(other.value for other in _STAND_INS)
        raise ValueError(f"{strategy} does not do {kind.value}, only {kinds}")
    within, across = _STAND_INS[kind]
    if isinstance(strategy, Flat):
        return TwoLevel(_STAR, across)  # on nodes of one rank each
    inside, between = two_level.LEVELS[kind]

    def local(flat: Flat) -> Flat:
        return flat if flat.name in inside else within

    return TwoLevel(
        local(strategy.local),
        strategy.between if strategy.between.name in between else across,
        {name: local(flat) for name, flat in strategy.on},
    )


@lru_cache(maxsize=128)
def hand_over(
    strategy: Flat | TwoLevel,
    kind: Kind,
    nodes: Nodes,
    root: int,
    names: tuple[str, ...] | None = None,
) -> Staged:
    """The stages of an operation, one of whose levels at least is handed to a library.

    Raises:
        ValueError: no other library does this operation.
    """
    if isinstance(strategy, Flat):
        handed, names = {"between": strategy.name}, None
        nodes = tuple((rank,) for rank in range(sum(map(len, nodes))))
    else:
        levels = {"local": strategy.local.name, "between": strategy.between.name}
        handed = {level: name for level, name in levels.items() if name in ENGINES}
    schedule = two_level.build(stand_in(strategy, kind), kind, nodes, root, names)
    home = {rank: number for number, node in enumerate(nodes) for rank in node}

    def level_of(step: Step) -> str:
        """The level that the step belongs to if a library runs it, else nothing."""
        move = step[0]
        level = "local" if home[move.src] == home[move.dst] else "between"
        ours = kind is not Kind.BARRIER and not move.read.count
        return level if level in handed and not ours else ""

    barrier = build_flat(Flat("bruck"), Kind.BARRIER, schedule.ranks, 0)
    everyone = range(schedule.ranks)
    meet = embed(barrier, everyone, [], ranks=schedule.ranks, chunks=schedule.chunks)
    runs: list[tuple[str, list[Step]]] = [("", list(meet.steps))]
    for step in filter(None, schedule.steps):
        level = level_of(step)
        if level != runs[-1][0]:
            runs.append((level, []))
        runs[-1][1].append(step)
    stages: list[Schedule | tuple[Call, ...]] = []
    for level, steps in runs:
        if level:
            stages.append(tuple(_calls(handed[level], level, steps)))
        else:
            stages.append(replace(schedule, steps=tuple(steps)))
    return Staged(schedule, tuple(stages))


def _calls(engine: str, level: str, steps: Sequence[Step]) -> Iterator[Call]:
    """What a library has to do to the same effect, in an order that all ranks share."""
    hubs: dict[tuple[bool, int, tuple[int, ...]], set[int]] = {}
    meetings: list[set[int]] = []
    for move in (move for step in steps for move in step):
        if not move.read.count:
            meetings.append({move.src, move.dst})
            continue
        folds = move.act is Act.FOLD
        hub, other = (move.dst, move.src) if folds else (move.src, move.dst)
        hubs.setdefault((folds, hub, tuple(move.read)), {hub}).add(other)
    for members in _joined(meetings):
        yield Call(engine, level, Kind.BARRIER, members, members[0])
    joined: dict[tuple[Kind, tuple[int, ...], int], tuple[int, ...]] = {}
    for (folds, hub, slots), ranks in hubs.items():
        back = hubs.get((not folds, hub, slots)) == ranks
        if back and not folds:
            continue
        kind = Kind.ALL_REDUCE if back else Kind.REDUCE if folds else Kind.BROADCAST
        key = kind, tuple(sorted(ranks)), hub
        joined[key] = joined.get(key, ()) + slots
    for (kind, members, hub), slots in joined.items():
        yield Call(engine, level, kind, members, hub, slots)


def _joined(pairs: Sequence[set[int]]) -> list[tuple[int, ...]]:
    """The sets of ranks that pairs connect."""
    sets: list[set[int]] = []
    for pair in pairs:
        apart = [one for one in sets if not one & pair]
        sets = [*apart, pair.union(*(one for one in sets if one & pair))]
    return [tuple(sorted(one)) for one in sorted(sets, key=min)]
