"""Two levels: what ranks of a node can do among themselves does not go between nodes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from collective.schedule import Kind, Schedule, Span, beside, embed, then
from collective.strategies import ring, tree
from collective.strategies.registry import build_flat
from collective.strategies.spelling import Flat, TwoLevel

Nodes = tuple[tuple[int, ...], ...]


def nodes_of(names: Sequence[str]) -> Nodes:
    """The ranks of each node, from the name of each rank's node; nodes in order of first rank."""
    nodes: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        nodes.setdefault(name, []).append(rank)
    return tuple(tuple(ranks) for ranks in nodes.values())


@lru_cache(maxsize=64)
def all_reduce(strategy: TwoLevel, nodes: Nodes) -> Schedule:
    """An all-reduce of the ranks of all `nodes`, each of which has at least one."""
    if not nodes or not all(nodes):
        raise ValueError(f"every node needs at least one rank: {nodes}")
    between = build_flat(strategy.between, Kind.ALL_REDUCE, len(nodes), 0)
    match strategy.local.name:
        case "ring":
            parts = _shared_out(between, nodes)
        case "centralized" | "tree":
            parts = _through_leaders(strategy.local, between, nodes)
        case _:
            raise ValueError(
                f"there is no local level by {strategy.local} yet; "
                f"there is ring, centralized, tree:2"
            )
    return then(*parts, name=f"all_reduce {strategy}")


def _shared_out(between: Schedule, nodes: Nodes) -> list[Schedule]:
    """Each local rank carries its share of the tensor between nodes.

    There is one share per rank of the largest node; on a node with fewer ranks, one rank owns
    several.
    """
    shares = max(len(node) for node in nodes)
    ranks, chunks = sum(map(len, nodes)), shares * between.chunks

    def local(schedule: Schedule, node: tuple[int, ...]) -> Schedule:
        runs = _runs(shares, len(node))
        slots = [Span(run.start * between.chunks, len(run) * between.chunks) for run in runs]
        return embed(schedule, node, slots, ranks=ranks, chunks=chunks)

    def global_(share: int) -> Schedule:
        owners = [_owner(share, shares, node) for node in nodes]
        slots = [Span(share * between.chunks + chunk) for chunk in range(between.chunks)]
        return embed(between, owners, slots, ranks=ranks, chunks=chunks)

    return [
        beside(*(local(ring.reduce_scatter(len(node)), node) for node in nodes)),
        beside(*(global_(share) for share in range(shares))),
        beside(*(local(ring.all_gather(len(node)), node) for node in nodes)),
    ]


def _runs(shares: int, ranks: int) -> list[range]:
    """`shares` in as many runs as there are ranks, of nearly equal length."""
    cuts = [rank * shares // ranks for rank in range(ranks + 1)]
    return [range(start, end) for start, end in pairwise(cuts)]


def _owner(share: int, shares: int, node: tuple[int, ...]) -> int:
    runs = zip(node, _runs(shares, len(node)), strict=True)
    return next(rank for rank, run in runs if share in run)


def _through_leaders(local: Flat, between: Schedule, nodes: Nodes) -> list[Schedule]:
    """The first rank of each node sums for it, and alone speaks to other nodes."""
    ranks = sum(map(len, nodes))
    whole = [Span(0, between.chunks)]

    def arity(node: tuple[int, ...]) -> int:
        return local.arity or max(len(node) - 1, 1)

    def on_node(schedule: Schedule, node: tuple[int, ...]) -> Schedule:
        return embed(schedule, node, whole, ranks=ranks, chunks=between.chunks)

    slots = [Span(chunk) for chunk in range(between.chunks)]
    leaders = [node[0] for node in nodes]
    return [
        beside(*(on_node(tree.sum_up(len(node), 0, arity(node)), node) for node in nodes)),
        embed(between, leaders, slots, ranks=ranks, chunks=between.chunks),
        beside(*(on_node(tree.copy_down(len(node), 0, arity(node)), node) for node in nodes)),
    ]
