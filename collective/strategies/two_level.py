"""Two levels: what ranks of a node can do among themselves does not go between nodes.

Either every rank of a node owns a share and exchanges it with the owners of that share on the
other nodes, or the first rank of the node, its leader, speaks for all.  Which of the two it is
follows from the node's local strategy: those of `parts.SHARED` share, those of `parts.ROOTED` lead.
A leader meets nodes whose ranks share as the owner of every share.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import lcm

from collective.schedule import Kind, Schedule, Span, beside, embed, mirrored, then
from collective.strategies import parts, tree
from collective.strategies.gather_levels import Nodes, all_gather, check
from collective.strategies.registry import BUILDERS, build_flat
from collective.strategies.spelling import SPELLINGS, Flat, Strategy, TwoLevel

#: names of local strategies, and of those between nodes, by operation
LEVELS: dict[Kind, tuple[tuple[str, ...], tuple[str, ...]]] = {
    Kind.ALL_REDUCE: (
        (*parts.SHARED, *parts.FIXED_CHUNKS),
        tuple(BUILDERS[Kind.ALL_REDUCE]),
    ),
    Kind.REDUCE: (parts.FIXED_CHUNKS, parts.ROOTED),
    Kind.BROADCAST: (parts.FIXED_CHUNKS, parts.ROOTED),
    Kind.ALL_GATHER: ((*parts.SHARED, *parts.TREES), parts.SHARED),
    Kind.REDUCE_SCATTER: ((*parts.SHARED, *parts.TREES), parts.SHARED),
    Kind.BARRIER: (tuple(SPELLINGS), tuple(BUILDERS[Kind.BARRIER])),
}


def nodes_of(names: Sequence[str]) -> Nodes:
    """The ranks of each node, from the name of each rank's node; nodes in order of first rank."""
    nodes: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        nodes.setdefault(name, []).append(rank)
    return tuple(tuple(ranks) for ranks in nodes.values())


def check_names(strategy: Strategy, names: Sequence[str]) -> None:
    """Refuse a strategy that names a node which is none of `names`, the nodes of all ranks."""
    own = dict(strategy.on) if isinstance(strategy, TwoLevel) else {}
    for name in own:
        if name not in names:
            listed = ", ".join(map(repr, dict.fromkeys(names)))
            raise ValueError(f"{strategy} names the node {name!r}; the ranks are on {listed}")


def exists(strategy: TwoLevel, kind: Kind, names: Sequence[str] | None = None) -> bool:
    """Whether there is a schedule of both levels for the operation.

    Args:
        strategy: the strategies of both.
        kind: the operation.
        names: the nodes that take part; without them, any node may.
    """
    local, between = LEVELS.get(kind, ((), ()))
    inside = [strategy.local, *dict(strategy.on).values()] if names is None else (
        strategy.within(names)
    )  # fmt: skip
    return all(flat.name in local for flat in inside) and strategy.between.name in between


def within_node(local: Flat, kind: Kind, nodes: int, nbytes: int) -> list[tuple[Kind, float]]:
    """What the ranks of a node do among themselves for an operation of `nbytes` on alike `nodes`.

    Operations and their bytes, for those who ask what each level takes.  A reduce is to the leader
    and a broadcast from it, both without tokens; a barrier is the leader's tokens, up and down.
    """
    shared = local.name in parts.SHARED
    match kind:
        case Kind.ALL_REDUCE if shared:
            return [(Kind.REDUCE_SCATTER, nbytes), (Kind.ALL_GATHER, nbytes)]
        case Kind.ALL_REDUCE:
            return [(Kind.REDUCE, nbytes), (Kind.BROADCAST, nbytes)]
        case Kind.REDUCE | Kind.BROADCAST:
            return [(kind, nbytes)]
        case Kind.ALL_GATHER | Kind.REDUCE_SCATTER if shared:
            return [(kind, nbytes / nodes), (kind, nbytes * (nodes - 1) / nodes)]
        case Kind.ALL_GATHER | Kind.REDUCE_SCATTER:
            return [(Kind.REDUCE, nbytes / nodes), (Kind.BROADCAST, nbytes)]
        case _:
            return [(Kind.BARRIER, 0)]


def build(
    strategy: TwoLevel, kind: Kind, nodes: Nodes, root: int, names: Sequence[str] | None = None
) -> Schedule:
    """The schedule for the ranks of all `nodes`, each of which has at least one.

    Args:
        strategy: the strategies of both levels.
        kind: the operation.
        nodes: the ranks of each node.
        root: the rank that plays another part than the others.
        names: of the nodes; needed where some have a strategy of their own.

    Raises:
        ValueError: one of the levels has no such strategy for the operation; says which it has.
    """
    check(nodes)
    if kind not in LEVELS:
        kinds = ", ".join(other.value for other in LEVELS)
        raise ValueError(f"there are no two levels for {kind.value}, only for {kinds}")
    if names is None and strategy.on:
        raise ValueError(f"{strategy} needs to know the names of the nodes")
    if names is not None and len(names) != len(nodes):
        raise ValueError(f"there are {len(nodes)} nodes, but names for {len(names)}: {names}")
    inside = (strategy.local,) * len(nodes) if names is None else strategy.within(names)
    levels = [("local", flat) for flat in inside] + [("between", strategy.between)]
    for level, flat in levels:
        there = LEVELS[kind][level == "between"]
        if flat.name not in there:
            listed = ", ".join(SPELLINGS[name] for name in there)
            raise ValueError(
                f"there is no {level} level by {flat} for {kind.value}; there is {listed}"
            )
    return _built(str(strategy), inside, strategy.between, kind, nodes, root)


@lru_cache(maxsize=128)
def _built(
    name: str, inside: tuple[Flat, ...], between: Flat, kind: Kind, nodes: Nodes, root: int
) -> Schedule:
    match kind:
        case Kind.ALL_REDUCE:
            pieces = _shared_out(inside, between, nodes)
        case Kind.REDUCE | Kind.BROADCAST:
            pieces = _through_leaders(inside, between, kind, nodes, root)
        case Kind.ALL_GATHER:
            pieces = [all_gather(inside, between, nodes)]
        case Kind.REDUCE_SCATTER:
            pieces = [mirrored(all_gather(inside, between, nodes))]
        case _:
            pieces = _meeting(inside, between, nodes, root)
    return then(*pieces, name=f"{kind.value} {name}")


# --- everyone owns a share -------------------------------------------------------------------


def _shared_out(inside: Sequence[Flat], between: Flat, nodes: Nodes) -> list[Schedule]:
    """An all-reduce: the owners of each share exchange it between nodes.

    There is one share per rank of the largest node whose ranks share; on a node with fewer ranks,
    one rank owns several, and where one rank leads, it owns all.
    """
    sharing = [flat.name in parts.SHARED for flat in inside]
    sizes = [len(node) for node, shares in zip(nodes, sharing, strict=True) if shares]
    shares = max(sizes, default=1)
    homes = list(zip(inside, nodes, sharing, strict=True))
    up = [
        parts.reduce_scatter(flat, len(node)) if own else parts.sum_up(flat, len(node), 0)
        for flat, node, own in homes
    ]
    down = [
        parts.all_gather(flat, len(node)) if own else parts.copy_down(flat, len(node), 0)
        for flat, node, own in homes
    ]
    across = build_flat(between, Kind.ALL_REDUCE, len(nodes), 0)
    led = [part.chunks for part, own in zip(up, sharing, strict=True) if not own]
    ranks, chunks = sum(map(len, nodes)), lcm(shares * across.chunks, *led)
    width = chunks // (shares * across.chunks)

    def local(schedule: Schedule, node: tuple[int, ...], own: bool) -> Schedule:
        wide = chunks // shares if own else chunks // schedule.chunks
        runs = _runs(shares, len(node)) if own else [range(at, at + 1) for at in
                                                     range(schedule.chunks)]  # fmt: skip
        slots = [Span(run.start * wide, len(run) * wide) for run in runs]
        return embed(schedule, node, slots, ranks=ranks, chunks=chunks)

    def global_(share: int) -> Schedule:
        owners = [
            _owner(share, shares, node) if own else node[0]
            for node, own in zip(nodes, sharing, strict=True)
        ]
        # the owner of several shares needs scratch for each
        firsts = [share * across.chunks + at for at in range(across.chunks)]
        firsts += [(shares * across.chunks) + share * across.scratch + at
                   for at in range(across.scratch)]  # fmt: skip
        slots = [Span(first * width, width) for first in firsts]
        scratch = shares * across.scratch * width
        return embed(across, owners, slots, ranks=ranks, chunks=chunks, scratch=scratch)

    def within(schedules: Sequence[Schedule]) -> Schedule:
        return beside(*map(local, schedules, nodes, sharing))

    return [within(up), beside(*map(global_, range(shares))), within(down)]


def _runs(shares: int, ranks: int) -> list[range]:
    """`shares` in as many runs as there are ranks, of nearly equal length."""
    cuts = [rank * shares // ranks for rank in range(ranks + 1)]
    return [range(start, end) for start, end in pairwise(cuts)]


def _owner(share: int, shares: int, node: tuple[int, ...]) -> int:
    runs = zip(node, _runs(shares, len(node)), strict=True)
    return next(rank for rank, run in runs if share in run)


# --- leaders ---------------------------------------------------------------------------------


def _through_leaders(
    inside: Sequence[Flat], between: Flat, kind: Kind, nodes: Nodes, root: int
) -> list[Schedule]:
    """One rank of each node sums for it, or spreads on it, and alone speaks to other nodes."""
    ranks = sum(map(len, nodes))
    leaders = _leaders(nodes, root)
    home = leaders.index(root)
    part = parts.sum_up if kind is Kind.REDUCE else parts.copy_down
    local = [
        part(flat, len(node), node.index(leader))
        for flat, node, leader in zip(inside, nodes, leaders, strict=True)
    ]
    across = part(between, len(nodes), home)
    chunks = parts.common_chunks(across, *local)

    def placed(schedule: Schedule, members: Sequence[int]) -> Schedule:
        width = chunks // schedule.chunks
        slots = [Span(slot * width, width) for slot in range(schedule.slots)]
        scratch = schedule.scratch * width
        return embed(schedule, members, slots, ranks=ranks, chunks=chunks, scratch=scratch)

    on_nodes = beside(*map(placed, local, nodes))
    tokens = _Tokens(inside, between, nodes, leaders, home, chunks)
    if kind is Kind.REDUCE:
        return [on_nodes, placed(across, leaders), *tokens.release()]
    return [placed(across, leaders), on_nodes, *tokens.confirm(), *tokens.release()]


def _meeting(inside: Sequence[Flat], between: Flat, nodes: Nodes, root: int) -> list[Schedule]:
    """A barrier: leaders meet when all of their nodes have come."""
    leaders = _leaders(nodes, root)
    tokens = _Tokens(inside, between, nodes, leaders, leaders.index(root), 0)
    across = build_flat(between, Kind.BARRIER, len(nodes), tokens.home)
    ranks = sum(map(len, nodes))
    meet = embed(across, leaders, [], ranks=ranks, chunks=0)
    return [tokens.confirm()[0], meet, tokens.release()[1]]


def _leaders(nodes: Nodes, root: int) -> list[int]:
    """The first rank of each node; of the root's node the root."""
    return [root if root in node else node[0] for node in nodes]


class _Tokens:
    """The tokens of the leaders' level and of each node."""

    def __init__(
        self,
        inside: Sequence[Flat],
        between: Flat,
        nodes: Nodes,
        leaders: list[int],
        home: int,
        chunks: int,
    ) -> None:
        self.home = home
        self._inside = list(zip(inside, nodes, leaders, strict=True))
        self._across = between
        self._leaders = leaders
        self._ranks = sum(map(len, nodes))
        self._chunks = chunks

    def confirm(self) -> list[Schedule]:
        """Up to each leader, then up to the leader at home."""
        return [self._within(tree.confirm), self._between(tree.confirm)]

    def release(self) -> list[Schedule]:
        """Down from the leader at home, then down from each leader."""
        return [self._between(tree.release), self._within(tree.release)]

    def _within(self, part: tree.TokenPart) -> Schedule:
        return beside(
            *(
                self._placed(part(len(node), node.index(leader), _arity(flat, len(node))), node)
                for flat, node, leader in self._inside
            )
        )

    def _between(self, part: tree.TokenPart) -> Schedule:
        count = len(self._leaders)
        return self._placed(part(count, self.home, _arity(self._across, count)), self._leaders)

    def _placed(self, schedule: Schedule, members: Sequence[int]) -> Schedule:
        return embed(schedule, members, [], ranks=self._ranks, chunks=self._chunks)


def _arity(strategy: Flat, ranks: int) -> int:
    """Of the tree that tokens take; a chain would be long."""
    if strategy.name in ("centralized", "tree"):
        return parts.arity(strategy, ranks)
    return tree.TOKENS
