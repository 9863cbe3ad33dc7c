"""The all-gather of two levels, which is the reduce-scatter backwards.

No place is written twice, so that `mirrored` makes the reduce-scatter of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from collective.schedule import Act, Move, Schedule, Span, Step, beside, embed, then
from collective.strategies import parts, tree
from collective.strategies.spelling import Flat, TwoLevel

Nodes = tuple[tuple[int, ...], ...]


def check(nodes: Nodes) -> None:
    """Refuse a node without ranks."""
    if not nodes or not all(nodes):
        raise ValueError(f"every node needs at least one rank: {nodes}")


def all_gather(strategy: TwoLevel, nodes: Nodes) -> Schedule:
    """Slot r of rank r comes to everyone, and between nodes once to each node."""
    if strategy.local.name in parts.SHARED:
        return then(*_by_columns(strategy, nodes))
    return then(*_by_leaders(strategy, nodes))


# --- columns: every rank of the smallest node exchanges with its likes -----------------------


def _by_columns(strategy: TwoLevel, nodes: Nodes) -> list[Schedule]:
    """First each node's slots within it, then each column between nodes, then within each node.

    A column holds some of the slots of each node.  There are as many as the smallest node has
    ranks, and on each node the first rank of a column exchanges it.
    """
    ranks = sum(map(len, nodes))
    columns = min(map(len, nodes))
    inside, between = strategy.local, strategy.between
    held = [_cut(node, columns) for node in nodes]

    def within(node: tuple[int, ...]) -> Schedule:
        own = [[rank] for rank in node]
        return embed(parts.all_gather(inside, len(node)), node, own, ranks=ranks, chunks=ranks)

    def across(column: int) -> Schedule:
        slots = [of_node[column] for of_node in held]
        owners = [of_node[0] for of_node in slots]
        gather = parts.all_gather(between, len(nodes))
        return embed(gather, owners, slots, ranks=ranks, chunks=ranks)

    def spread(number: int) -> Iterator[Schedule]:
        node = nodes[number]
        foreign = [
            [slot for other, of_node in enumerate(held) if other != number for slot in of_node[c]]
            for c in range(columns)
        ]
        if len(node) == columns:
            gather = parts.all_gather(inside, columns)
            yield embed(gather, node, foreign, ranks=ranks, chunks=ranks)
            return
        for column, slots in enumerate(foreign):
            owner = node.index(held[number][column][0])
            copy = tree.copy_down(len(node), owner, _spreading(inside, len(node)))
            yield embed(copy, node, [slots], ranks=ranks, chunks=ranks)

    schedules = [beside(*map(within, nodes))]
    if len(nodes) > 1:
        schedules.append(beside(*map(across, range(columns))))
        schedules.append(beside(*(part for number in range(len(nodes)) for part in spread(number))))
    return schedules


def _cut(node: tuple[int, ...], columns: int) -> list[tuple[int, ...]]:
    cuts = [column * len(node) // columns for column in range(columns + 1)]
    return [node[start:end] for start, end in pairwise(cuts)]


def _spreading(strategy: Flat, ranks: int) -> int:
    """The arity of the tree by which a column's owner spreads it on a node with more ranks."""
    if strategy.name == "ring":
        return 1
    return max(ranks - 1, 1) if strategy.name == "direct" else 2


# --- leaders ---------------------------------------------------------------------------------


def _by_leaders(strategy: TwoLevel, nodes: Nodes) -> list[Schedule]:
    """Up to the first rank of each node, between these, and down again."""
    ranks = sum(map(len, nodes))
    trees = [_Gathering(node, parts.arity(strategy.local, len(node)), ranks) for node in nodes]
    gather = parts.all_gather(strategy.between, len(nodes))
    leaders = [node[0] for node in nodes]
    return [
        beside(*(tree.up() for tree in trees)),
        embed(gather, leaders, nodes, ranks=ranks, chunks=ranks),
        beside(*(tree.down() for tree in trees)),
    ]


class _Gathering:
    """A tree of the ranks of one node; each edge carries what the other side lacks."""

    def __init__(self, node: tuple[int, ...], arity: int, ranks: int) -> None:
        self._node = node
        self._ranks = ranks
        self._parents = {place: (place - 1) // arity for place in range(1, len(node))}
        self._below: list[set[int]] = [{rank} for rank in node]
        for place in range(len(node) - 1, 0, -1):
            self._below[self._parents[place]] |= self._below[place]

    def up(self) -> Schedule:
        """A child hands its parent the slots of its whole subtree."""
        steps = []
        for level in reversed(self._levels()):
            steps.append(
                tuple(
                    move
                    for child in level
                    for move in self._moves(
                        child, self._parents[child], sorted(self._below[child]), "gather"
                    )
                )
            )
        return self._schedule(steps)

    def down(self) -> Schedule:
        """A parent hands its child all other slots."""
        steps = []
        for level in self._levels():
            steps.append(
                tuple(
                    move
                    for child in level
                    for move in self._moves(
                        self._parents[child],
                        child,
                        sorted(set(range(self._ranks)) - self._below[child]),
                        "spread",
                    )
                )
            )
        return self._schedule(steps)

    def _levels(self) -> list[list[int]]:
        """Places by their distance from the leader, which is none of them."""
        depth = {0: 0}
        levels: list[list[int]] = []
        for place, parent in self._parents.items():
            depth[place] = depth[parent] + 1
            if len(levels) < depth[place]:
                levels.append([])
            levels[depth[place] - 1].append(place)
        return levels

    def _moves(self, src: int, dst: int, slots: Sequence[int], phase: str) -> Iterator[Move]:
        for span in _spans(slots):
            yield Move(self._node[src], self._node[dst], span, span, Act.COPY, phase)

    def _schedule(self, steps: list[Step]) -> Schedule:
        filled = tuple(step for step in steps if step)
        return Schedule("tree", self._ranks, self._ranks, 0, filled)


def _spans(slots: Iterable[int]) -> list[Span]:
    """Ascending slots as runs."""
    spans: list[Span] = []
    for slot in slots:
        if spans and spans[-1].end == slot:
            spans[-1] = Span(spans[-1].start, spans[-1].count + 1)
        else:
            spans.append(Span(slot))
    return spans
