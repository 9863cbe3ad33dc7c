"""Two levels: what ranks of a node can do among themselves does not go between nodes.

Either every rank of a node owns a share and exchanges it with the owners of that share on the
other nodes, or the first rank of each node, its leader, speaks for all.  Which of the two it is
follows from the local strategy: those of `parts.SHARED` share, those of `parts.ROOTED` lead.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from collective.schedule import Kind, Schedule, Span, beside, embed, mirrored, then
from collective.strategies import parts, tree
from collective.strategies.gather_levels import Nodes, all_gather, check
from collective.strategies.registry import BUILDERS, build_flat
from collective.strategies.spelling import SPELLINGS, Flat, TwoLevel

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


def exists(strategy: TwoLevel, kind: Kind) -> bool:
    """Whether there is a schedule of both levels for the operation."""
    local, between = LEVELS.get(kind, ((), ()))
    return strategy.local.name in local and strategy.between.name in between


@lru_cache(maxsize=128)
def build(strategy: TwoLevel, kind: Kind, nodes: Nodes, root: int) -> Schedule:
    """The schedule for the ranks of all `nodes`, each of which has at least one.

    Raises:
        ValueError: one of the levels has no such strategy for the operation; says which it has.
    """
    check(nodes)
    if kind not in LEVELS:
        kinds = ", ".join(other.value for other in LEVELS)
        raise ValueError(f"there are no two levels for {kind.value}, only for {kinds}")
    levels = {"local": strategy.local, "between": strategy.between}
    for (level, flat), names in zip(levels.items(), LEVELS[kind], strict=True):
        if flat.name not in names:
            listed = ", ".join(SPELLINGS[name] for name in names)
            raise ValueError(
                f"there is no {level} level by {flat} for {kind.value}; there is {listed}"
            )
    match kind:
        case Kind.ALL_REDUCE if strategy.local.name in parts.SHARED:
            pieces = _shared_out(strategy, nodes)
        case Kind.ALL_REDUCE | Kind.REDUCE | Kind.BROADCAST:
            pieces = _through_leaders(strategy, kind, nodes, root)
        case Kind.ALL_GATHER:
            pieces = [all_gather(strategy, nodes)]
        case Kind.REDUCE_SCATTER:
            pieces = [mirrored(all_gather(strategy, nodes))]
        case _:
            pieces = _meeting(strategy, nodes, root)
    return then(*pieces, name=f"{kind.value} {strategy}")


# --- everyone owns a share -------------------------------------------------------------------


def _shared_out(strategy: TwoLevel, nodes: Nodes) -> list[Schedule]:
    """Each local rank carries its share of the tensor between nodes.

    There is one share per rank of the largest node; on a node with fewer ranks, one rank owns
    several.
    """
    between = build_flat(strategy.between, Kind.ALL_REDUCE, len(nodes), 0)
    shares = max(len(node) for node in nodes)
    ranks, chunks = sum(map(len, nodes)), shares * between.chunks

    def local(schedule: Schedule, node: tuple[int, ...]) -> Schedule:
        runs = _runs(shares, len(node))
        slots = [Span(run.start * between.chunks, len(run) * between.chunks) for run in runs]
        return embed(schedule, node, slots, ranks=ranks, chunks=chunks)

    def global_(share: int) -> Schedule:
        owners = [_owner(share, shares, node) for node in nodes]
        slots = [Span(share * between.chunks + chunk) for chunk in range(between.chunks)]
        # the owner of several shares needs scratch for each
        first = chunks + share * between.scratch
        slots += [Span(first + slot) for slot in range(between.scratch)]
        scratch = shares * between.scratch
        return embed(between, owners, slots, ranks=ranks, chunks=chunks, scratch=scratch)

    inside = strategy.local
    return [
        beside(*(local(parts.reduce_scatter(inside, len(node)), node) for node in nodes)),
        beside(*(global_(share) for share in range(shares))),
        beside(*(local(parts.all_gather(inside, len(node)), node) for node in nodes)),
    ]


def _runs(shares: int, ranks: int) -> list[range]:
    """`shares` in as many runs as there are ranks, of nearly equal length."""
    cuts = [rank * shares // ranks for rank in range(ranks + 1)]
    return [range(start, end) for start, end in pairwise(cuts)]


def _owner(share: int, shares: int, node: tuple[int, ...]) -> int:
    runs = zip(node, _runs(shares, len(node)), strict=True)
    return next(rank for rank, run in runs if share in run)


# --- leaders ---------------------------------------------------------------------------------


def _through_leaders(strategy: TwoLevel, kind: Kind, nodes: Nodes, root: int) -> list[Schedule]:
    """One rank of each node sums for it, and alone speaks to other nodes."""
    ranks = sum(map(len, nodes))
    if kind is Kind.ALL_REDUCE:
        root = nodes[0][0]
    leaders = _leaders(nodes, root)
    home = leaders.index(root)
    inside = strategy.local
    up = [parts.sum_up(inside, len(node), node.index(leader)) for node, leader in
          zip(nodes, leaders, strict=True)]  # fmt: skip
    down = [parts.copy_down(inside, len(node), node.index(leader)) for node, leader in
            zip(nodes, leaders, strict=True)]  # fmt: skip
    match kind:
        case Kind.ALL_REDUCE:
            between = build_flat(strategy.between, kind, len(nodes), home)
        case Kind.REDUCE:
            between = parts.sum_up(strategy.between, len(nodes), home)
        case _:
            between = parts.copy_down(strategy.between, len(nodes), home)
    chunks = parts.common_chunks(between, *down)

    def placed(schedule: Schedule, members: Sequence[int]) -> Schedule:
        width = chunks // schedule.chunks
        slots = [Span(slot * width, width) for slot in range(schedule.slots)]
        scratch = schedule.scratch * width
        return embed(schedule, members, slots, ranks=ranks, chunks=chunks, scratch=scratch)

    rise = beside(*(placed(part, node) for part, node in zip(up, nodes, strict=True)))
    across = placed(between, leaders)
    fall = beside(*(placed(part, node) for part, node in zip(down, nodes, strict=True)))
    tokens = _Tokens(strategy, nodes, leaders, home, chunks)
    match kind:
        case Kind.ALL_REDUCE:
            return [rise, across, fall]
        case Kind.REDUCE:
            return [rise, across, *tokens.release()]
        case _:
            return [across, fall, *tokens.confirm(), *tokens.release()]


def _meeting(strategy: TwoLevel, nodes: Nodes, root: int) -> list[Schedule]:
    """A barrier: leaders meet when all of their nodes have come."""
    leaders = _leaders(nodes, root)
    tokens = _Tokens(strategy, nodes, leaders, leaders.index(root), 0)
    between = build_flat(strategy.between, Kind.BARRIER, len(nodes), tokens.home)
    ranks = sum(map(len, nodes))
    meet = embed(between, leaders, [], ranks=ranks, chunks=0)
    return [tokens.confirm()[0], meet, tokens.release()[1]]


def _leaders(nodes: Nodes, root: int) -> list[int]:
    """The first rank of each node; of the root's node the root."""
    return [root if root in node else node[0] for node in nodes]


class _Tokens:
    """The tokens of the leaders' level and of each node."""

    def __init__(
        self, strategy: TwoLevel, nodes: Nodes, leaders: list[int], home: int, chunks: int
    ) -> None:
        self.nodes = nodes
        self.leaders = leaders
        self.home = home
        self._strategy = strategy
        self._ranks = sum(map(len, nodes))
        self._chunks = chunks

    def confirm(self) -> list[Schedule]:
        """Up to each leader, then up to the leader at home."""
        return [self._inside(tree.confirm), self._between(tree.confirm)]

    def release(self) -> list[Schedule]:
        """Down from the leader at home, then down from each leader."""
        return [self._between(tree.release), self._inside(tree.release)]

    def _inside(self, part: tree.TokenPart) -> Schedule:
        return beside(
            *(
                self._placed(
                    part(len(node), node.index(leader), _arity(self._strategy.local, len(node))),
                    node,
                )
                for node, leader in zip(self.nodes, self.leaders, strict=True)
            )
        )

    def _between(self, part: tree.TokenPart) -> Schedule:
        arity = _arity(self._strategy.between, len(self.nodes))
        return self._placed(part(len(self.nodes), self.home, arity), self.leaders)

    def _placed(self, schedule: Schedule, members: Sequence[int]) -> Schedule:
        return embed(schedule, members, [], ranks=self._ranks, chunks=self._chunks)


def _arity(strategy: Flat, ranks: int) -> int:
    """Of the tree that tokens take; a chain would be long."""
    if strategy.name in ("centralized", "tree"):
        return parts.arity(strategy, ranks)
    return tree.TOKENS
