"""How long a strategy takes on a cluster, and which one takes the least.

A schedule of moderate size is simulated as it is (`collective.simulation`).  Where a tensor has
very many segments, two runs with fewer and larger ones tell how the time falls with their number:
a pipeline of k segments takes A + B/k.  Where a schedule itself would be too large, a ring is
simulated on one node that stands for all, other strategies of equal ranks are estimated
(`collective.estimate`), and two levels are added up.  Tests hold all of these against the
simulation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import ceil

from collective.cost import Topology, lie_together, slot_sizes, uniform
from collective.estimate import estimate
from collective.program import SEGMENT
from collective.schedule import Kind, Schedule, then
from collective.shortcuts import Found, at_many, ring
from collective.simulation import simulate
from collective.strategies import Flat, TwoLevel, available, build, parse, parts, tree
from collective.strategies.spelling import SPELLINGS
from collective.strategies.two_level import LEVELS, exists, within_node

#: segments of a simulation, of all moves together: a quarter of a second
_EVENTS = 10_000
#: strategies in which the number of moves, or of their slots, grows with the square of the ranks
_QUADRATIC = frozenset({"ring", "direct", "halving_doubling", "bruck", "scatter_allgather"})
#: combinations of two levels that `ranked` simulates as a whole and reports
_BEST = 8


class TooLarge(ValueError):
    """Neither a simulation nor a formula can say what the strategy takes there."""


@dataclass(frozen=True)
class Prediction:
    """What a strategy takes.

    Attributes:
        strategy: its spelling.
        seconds: until the last rank is done.
        levels: seconds of each level by itself (`local`, `between`), or of the whole (`flat`)
            where one level spans nodes and devices.
        sent: bytes that the busiest rank sends; None where the schedule was not written out.
        method: how it was found: `simulated`, `extrapolated`, `formula` or `by level`.
    """

    strategy: str
    seconds: float
    levels: dict[str, float]
    sent: int | None
    method: str


def predict(
    strategy: Flat | TwoLevel | str,
    kind: Kind,
    topology: Topology,
    nbytes: int,
    segment: int = SEGMENT,
) -> Prediction:
    """What `strategy` takes for an operation of `nbytes` (see `cost.slot_sizes`), root 0.

    Raises:
        ValueError: the strategy does not exist for the operation, or is auto.
        TooLarge: there are too many ranks for this strategy on this topology.
    """
    if isinstance(strategy, str):
        parsed = parse(strategy)
        if not isinstance(parsed, Flat | TwoLevel):
            raise ValueError("auto is no strategy by itself: leave it out to see all in order")
        strategy = parsed
    if isinstance(strategy, TwoLevel):
        if strategy.on:
            raise ValueError(f"nodes of a plan have no names: leave local@… out of {strategy}")
        return _two_level(strategy, kind, topology, nbytes, segment)
    build(strategy, kind, 1)  # refuses what does not exist
    found = _flat(strategy, kind, topology, nbytes, segment)
    if len(topology.nodes) == 1:
        level = "local"
    else:
        level = "between" if len(topology.nodes) == topology.ranks else "flat"
    return Prediction(
        str(strategy), found.seconds, {level: found.seconds}, found.sent, found.method
    )


def ranked(
    kind: Kind, topology: Topology, nbytes: int, segment: int = SEGMENT
) -> tuple[list[Prediction], list[str]]:
    """All flat strategies and the best of two levels, fastest first; and what is too large."""
    found: list[Prediction] = []
    skipped: list[str] = []
    for text in available(kind):
        try:
            found.append(predict(text, kind, topology, nbytes, segment))
        except TooLarge:
            skipped.append(text)
    if len(topology.nodes) > 1 and topology.ranks > len(topology.nodes) and kind in LEVELS:
        names = [[parse(SPELLINGS[name]) for name in level] for level in LEVELS[kind]]
        sums: list[tuple[float, TwoLevel]] = []
        for local, between in product(*names):
            assert isinstance(local, Flat) and isinstance(between, Flat)
            both = TwoLevel(local, between)
            try:
                levels = _levels(both, kind, topology, nbytes, segment)
            except TooLarge:
                skipped.append(str(both))
                continue
            sums.append((sum(levels.values()), both))
        best = sorted(sums, key=lambda pair: pair[0])[:_BEST]
        found += [predict(both, kind, topology, nbytes, segment) for _, both in best]
    return sorted(found, key=lambda prediction: prediction.seconds), skipped


# --- one level -------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _flat(strategy: Flat, kind: Kind, topology: Topology, nbytes: int, segment: int) -> Found:
    ranks = topology.ranks
    if strategy.name == "ring" and topology.alike and topology.machine.free:
        return ring(kind, topology, nbytes, segment)
    quadratic = strategy.name in _QUADRATIC and kind is not Kind.BARRIER
    if not quadratic or 2 * ranks * ranks <= _EVENTS:
        schedule = build(strategy, kind, ranks)
        return _simulated(schedule, kind, topology, nbytes, segment)
    if not _one_kind(topology) or not topology.machine.free:
        raise TooLarge(
            f"{kind.value} by {strategy} on {ranks} ranks has too many moves to be simulated; "
            f"take two levels, or fewer ranks"
        )
    return Found(estimate(strategy, kind, topology, nbytes), None, "formula")


def _one_kind(topology: Topology) -> bool:
    """Whether there is but one kind of link between any two ranks, which no two ranks share."""
    return len(topology.nodes) in (1, topology.ranks)


def _simulated(
    schedule: Schedule, kind: Kind, topology: Topology, nbytes: int, segment: int
) -> Found:
    sizes = slot_sizes(kind, schedule, nbytes)
    moves = sum(max(move.read.count, 1) for step in schedule.steps for move in step)
    largest = max(sizes, default=0)
    segments = max(1, ceil(largest / segment))
    if moves * segments <= _EVENTS:
        joined = lie_together(kind, schedule.ranks, nbytes)
        timing = simulate(schedule, topology, sizes, segment, joined=joined)
        return Found(timing.seconds, max(timing.sent), "simulated")

    def coarse(pieces: int) -> tuple[float, float, int]:
        large = ceil(largest / pieces)
        # a large segment stands for many, each of which has its cost
        machine = replace(
            topology.machine, per_segment=topology.machine.per_segment * large / segment
        )
        timing = simulate(schedule, replace(topology, machine=machine), sizes, large)
        return timing.seconds, max(timing.busy.values()), max(timing.sent)

    fine = max(2, _EVENTS // max(moves, 1))
    seconds, busy, sent = coarse(fine)
    return Found(
        max(at_many(coarse(fine // 2)[0], fine // 2, seconds, fine, segments), busy),
        sent,
        "extrapolated",
    )


# --- two levels ------------------------------------------------------------------------------


def _two_level(
    strategy: TwoLevel, kind: Kind, topology: Topology, nbytes: int, segment: int
) -> Prediction:
    if not exists(strategy, kind):
        build(strategy, kind, 1, nodes=[[0]])  # says what does
    levels = _levels(strategy, kind, topology, nbytes, segment)
    if _moves(strategy, kind, topology) > _EVENTS:
        return Prediction(str(strategy), sum(levels.values()), levels, None, "by level")
    schedule = build(strategy, kind, topology.ranks, nodes=topology.nodes)
    found = _simulated(schedule, kind, topology, nbytes, segment)
    return Prediction(str(strategy), found.seconds, levels, found.sent, found.method)


def _moves(strategy: TwoLevel, kind: Kind, topology: Topology) -> float:
    """About as many as the schedule would have, times the slots of each."""
    nodes, devices = len(topology.nodes), max(map(len, topology.nodes))
    inside, across = (
        2.0 * number * (number if level.name in _QUADRATIC else 1)
        for number, level in ((devices, strategy.local), (nodes, strategy.between))
    )
    if kind is Kind.BARRIER:
        return nodes * devices * 4
    if kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER):
        return float(topology.ranks) ** 2
    cut = nodes if strategy.between.name in _QUADRATIC else 2
    shares = devices if strategy.local.name in parts.SHARED else 1
    return nodes * inside * cut + shares * across


def _levels(
    strategy: TwoLevel, kind: Kind, topology: Topology, nbytes: int, segment: int
) -> dict[str, float]:
    """Each level by itself: of a node with most ranks, and between nodes of one rank each.

    All ranks of a node that share the traffic between nodes share its card too, so together they
    take as long as one rank would that carried it all.
    """
    nodes, devices = len(topology.nodes), max(map(len, topology.nodes))
    one = uniform(1, devices, topology.local, topology.between, topology.machine)
    across = uniform(nodes, 1, topology.local, topology.between, topology.machine)

    inside = strategy.local
    local = 0.0
    for of, size in within_node(inside, kind, nodes, nbytes):
        match of:
            case Kind.REDUCE | Kind.BROADCAST:
                local += _rooted(inside, of is Kind.REDUCE, one, round(size), segment)
            case Kind.BARRIER:
                arity = inside.arity or tree.TOKENS
                tokens = then(tree.confirm(devices, 0, arity), tree.release(devices, 0, arity))
                local += _simulated(tokens, kind, one, 0, segment).seconds
            case _:
                local += _flat(inside, of, one, round(size), segment).seconds
    far = _flat(strategy.between, kind, across, nbytes, segment)
    return {"local": local, "between": far.seconds}


@lru_cache(maxsize=1024)
def _rooted(strategy: Flat, up: bool, topology: Topology, nbytes: int, segment: int) -> float:
    """To the leader of a node, or from it, without tokens."""
    schedule = (parts.sum_up if up else parts.copy_down)(strategy, topology.ranks, 0)
    return _simulated(schedule, Kind.BROADCAST, topology, nbytes, segment).seconds
