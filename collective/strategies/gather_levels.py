"""The all-gather of two levels, which is the reduce-scatter backwards.

No place is written twice, so that `mirrored` makes the reduce-scatter of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from collective.schedule import Act, Move, Schedule, Span, Step, beside, embed, then
from collective.strategies import parts, tree
from collective.strategies.spelling import Flat

Nodes = tuple[tuple[int, ...], ...]


def check(nodes: Nodes) -> None:
    """Refuse a node without ranks."""
    if not nodes or not all(nodes):
        raise ValueError(f"every node needs at least one rank: {nodes}")


def all_gather(inside: Sequence[Flat], between: Flat, nodes: Nodes) -> Schedule:
    """Slot r of rank r comes to everyone, and between nodes once to each node.

    First each node's slots come together within it, then each column between nodes, then all
    columns to the ranks of each node.  A column holds some of the slots of each node.  There are as
    many as the smallest node has ranks, and on each node one rank exchanges it: its first one of
    the column, or the node's leader, whose tree brings it all slots.  Where all nodes have leaders,
    one column is enough.
    """
    ranks = sum(map(len, nodes))
    shared = any(local.name in parts.SHARED for local in inside)
    columns = min(map(len, nodes)) if shared else 1
    homes = [
        (_Sharing if local.name in parts.SHARED else _Led)(local, node, columns, ranks)
        for local, node in zip(inside, nodes, strict=True)
    ]

    def across(column: int) -> Schedule:
        slots = [home.columns[column] for home in homes]
        owners = [home.owner(column) for home in homes]
        gather = parts.all_gather(between, len(nodes))
        return embed(gather, owners, slots, ranks=ranks, chunks=ranks)

    spread = [
        part
        for home in homes
        for part in home.spread([other.columns for other in homes if other is not home])
    ]
    return then(
        beside(*(home.together() for home in homes)),
        beside(*map(across, range(columns))),
        *([beside(*spread)] if spread else []),
    )


class _Home:
    """A node's part: how its slots come together, and how those of others are spread."""

    def __init__(self, local: Flat, node: tuple[int, ...], columns: int, ranks: int) -> None:
        self.local = local
        self.node = node
        self.ranks = ranks
        cuts = [column * len(node) // columns for column in range(columns + 1)]
        #: the slots of this node in each column
        self.columns = [node[start:end] for start, end in pairwise(cuts)]

    def owner(self, column: int) -> int:
        """The rank that exchanges a column with other nodes."""
        raise NotImplementedError

    def together(self) -> Schedule:
        """This node's slots come to its owners."""
        raise NotImplementedError

    def spread(self, others: Sequence[Sequence[tuple[int, ...]]]) -> Iterator[Schedule]:
        """The columns of the other nodes come to all of this one."""
        raise NotImplementedError


class _Sharing(_Home):
    """Every rank of the node has all its slots, and as many as there are columns exchange."""

    def owner(self, column: int) -> int:
        return self.columns[column][0]

    def together(self) -> Schedule:
        own = [[rank] for rank in self.node]
        return self._embed(parts.all_gather(self.local, len(self.node)), own)

    def spread(self, others: Sequence[Sequence[tuple[int, ...]]]) -> Iterator[Schedule]:
        if not others:
            return
        foreign = [
            [slot for slots in column for slot in slots] for column in zip(*others, strict=True)
        ]
        if len(self.node) == len(self.columns):
            yield self._embed(parts.all_gather(self.local, len(self.node)), foreign)
            return
        for column, slots in enumerate(foreign):
            owner = self.node.index(self.owner(column))
            copy = tree.copy_down(len(self.node), owner, self._spreading())
            yield self._embed(copy, [slots])

    def _embed(self, schedule: Schedule, slots: Sequence[Sequence[int]]) -> Schedule:
        return embed(schedule, self.node, slots, ranks=self.ranks, chunks=self.ranks)

    def _spreading(self) -> int:
        """The arity of the tree by which a column's owner spreads it on a node with more ranks."""
        if self.local.name == "ring":
            return 1
        return max(len(self.node) - 1, 1) if self.local.name == "direct" else 2


class _Led(_Home):
    """A tree of the node's ranks; each edge carries what the other side lacks."""

    def __init__(self, local: Flat, node: tuple[int, ...], columns: int, ranks: int) -> None:
        super().__init__(local, node, columns, ranks)
        arity = parts.arity(local, len(node))
        self._parents = {place: (place - 1) // arity for place in range(1, len(node))}
        self._below: list[set[int]] = [{rank} for rank in node]
        for place in range(len(node) - 1, 0, -1):
            self._below[self._parents[place]] |= self._below[place]

    def owner(self, column: int) -> int:
        return self.node[0]

    def together(self) -> Schedule:
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

    def spread(self, others: Sequence[Sequence[tuple[int, ...]]]) -> Iterator[Schedule]:
        """A parent hands its child all slots that the child's subtree did not have."""
        steps = []
        for level in self._levels():
            steps.append(
                tuple(
                    move
                    for child in level
                    for move in self._moves(
                        self._parents[child],
                        child,
                        sorted(set(range(self.ranks)) - self._below[child]),
                        "spread",
                    )
                )
            )
        yield self._schedule(steps)

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
            yield Move(self.node[src], self.node[dst], span, span, Act.COPY, phase)

    def _schedule(self, steps: list[Step]) -> Schedule:
        filled = tuple(step for step in steps if step)
        return Schedule("tree", self.ranks, self.ranks, 0, filled)


def _spans(slots: Iterable[int]) -> list[Span]:
    """Ascending slots as runs."""
    spans: list[Span] = []
    for slot in slots:
        if spans and spans[-1].end == slot:
            spans[-1] = Span(spans[-1].start, spans[-1].count + 1)
        else:
            spans.append(Span(slot))
    return spans
