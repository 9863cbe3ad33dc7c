"""What a strategy takes, estimated in microseconds by formulas, for the choice of `auto`.

The simulation (`collective.simulation`) is exact for the cost model, and takes up to seconds.  Here
the path through the strategy is added up from the shapes of `collective.paths`, and beside it the
work of all threads, which the cores of a node share.  Tests hold both against the simulation.
"""

from __future__ import annotations

from collections.abc import Callable

from collective import paths
from collective.cost import Link, Topology, lie_together
from collective.schedule import Kind
from collective.strategies import Flat, TwoLevel, parts, tree
from collective.strategies.two_level import within_node


def _flat(
    strategy: Flat, kind: Kind, ranks: int, message: paths.Maker, nbytes: float
) -> paths.Cost:
    """One level of `ranks` that are alike."""
    if ranks < 2:
        return paths.Cost()
    joined = lie_together(kind, ranks, round(nbytes))
    rounds = 2 if kind is Kind.ALL_REDUCE else 1
    share = nbytes / ranks
    match strategy.name:
        case "ring":
            return paths.ring(message, ranks, nbytes, rounds)
        case "halving_doubling":
            return paths.halving(message, ranks, nbytes, rounds, joined)
        case "recursive_doubling":
            return paths.doubling(message, ranks, nbytes)
        case "bruck" if kind is not Kind.BARRIER:
            return paths.bruck(message, ranks, nbytes, rounds, joined)
        case "bruck":
            return paths.swaps(message, ranks, [(0, 1)] * (ranks - 1).bit_length())
        case "direct" if kind is Kind.ALL_REDUCE and ranks == 2:
            return paths.doubling(message, ranks, nbytes)
        case "direct" if kind is Kind.ALL_REDUCE:
            return paths.everyone(message(nbytes), ranks, own=1)
        case "direct":
            return paths.everyone(
                message(share), ranks, own=int(kind is Kind.REDUCE_SCATTER and ranks > 2)
            )
        case "scatter_allgather" if kind is Kind.ALL_REDUCE:
            summed = paths.everyone(message(share), ranks, own=int(ranks > 2))
            return summed + paths.everyone(message(share), ranks)
        case "scatter_allgather":
            return paths.in_shares(kind, ranks, message, nbytes)
    if kind is Kind.BARRIER:
        return paths.tokens(message, ranks, parts.arity(strategy, ranks), confirm=True)
    ways = {Kind.REDUCE: "up", Kind.GATHER: "up", Kind.BROADCAST: "down", Kind.SCATTER: "down"}
    size = share if kind in (Kind.GATHER, Kind.SCATTER) else nbytes
    if strategy.name == "binomial":
        cost = paths.binomial(message, ranks, share, ways[kind])
    else:
        cost = _rooted(strategy, ranks, message, size, ways.get(kind, "up down"))
    if kind is Kind.ALL_REDUCE:
        return cost
    flat = strategy.name in ("chain", "double_tree", "binomial")
    arity = tree.TOKENS if flat else parts.arity(strategy, ranks)
    return cost + paths.tokens(message, ranks, arity, confirm=ways[kind] == "down")


def _rooted(
    strategy: Flat, ranks: int, message: paths.Maker, nbytes: float, ways: str
) -> paths.Cost:
    if ranks < 2:
        return paths.Cost()
    if strategy.name == "double_tree":
        return paths.two_trees(message, ranks, nbytes, ways)
    return paths.one_tree(message, ranks, parts.arity(strategy, ranks), nbytes, ways)


def estimate(
    strategy: Flat | TwoLevel, kind: Kind, topology: Topology, nbytes: int, together: int = 1
) -> float:
    """Seconds of an operation of `nbytes` (see `cost.slot_sizes`) on nodes that are alike.

    Of nodes on one machine, `together` share its cores, which are those of the topology.

    Flat strategies over several nodes of several ranks are only estimated well where the ranks of
    a node follow each other and few of them speak to other nodes at a time, as in a ring.
    """
    machine = topology.machine
    nodes, devices = len(topology.nodes), max(map(len, topology.nodes))

    def on(link: Link) -> paths.Maker:
        return lambda size, slots=1: paths.Message(link, machine, size, slots)

    if isinstance(strategy, Flat):
        link = topology.local if nodes == 1 else topology.between
        cost = _flat(strategy, kind, topology.ranks, on(link), nbytes)
        machines = nodes
    else:
        cost = _two_level(strategy, kind, nodes, devices, topology, on, nbytes)
        machines = 1  # work is of one node already
    work = together * (cost.work / machines + devices * machine.per_call)
    cores = min(machine.cores or together * devices, together * devices)
    return max(machine.per_call + cost.path, work / cores)


def _two_level(
    strategy: TwoLevel,
    kind: Kind,
    nodes: int,
    devices: int,
    topology: Topology,
    on: Callable[[Link], paths.Maker],
    nbytes: int,
) -> paths.Cost:
    """The path through both levels, and the work of one node."""
    inside, near = strategy.local, on(topology.local)
    cost = paths.Cost()
    for of, size in within_node(inside, kind, nodes, nbytes):
        match of:
            case Kind.REDUCE:
                cost += _rooted(inside, devices, near, size, "up")
            case Kind.BROADCAST:
                cost += _rooted(inside, devices, near, size, "down")
            case Kind.BARRIER:
                cost += paths.tokens(near, devices, inside.arity or tree.TOKENS, confirm=True)
            case _:
                cost += _flat(inside, of, devices, near, size)
    shared = inside.name in parts.SHARED and kind is not Kind.BARRIER
    shares = devices if shared else 1
    # all that share the traffic between nodes share the card, too
    link = Link(topology.between.latency, topology.between.bandwidth / shares)
    across = _flat(strategy.between, kind, nodes, on(link), nbytes / shares)
    return cost + paths.Cost(across.path, across.work * shares / nodes)
