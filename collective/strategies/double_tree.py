"""Double tree: two complementary binary trees, each of which carries half of the tensor.

In one tree half of the ranks only listen; they are the inner ranks of the other tree.  So every
rank sends and receives about as much, at full rate in both directions, in about log₂ n hops
(Sanders, Speck, Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan",
2009).  The root stands above both trees.
"""

from __future__ import annotations

from collections.abc import Iterator

from collective.schedule import Act, Move, Schedule, Span, Step, beside, mirrored, then
from collective.strategies import tree

CHUNKS = 2


def copy_down(ranks: int, root: int) -> Schedule:
    """The root's tensor comes down to everyone. Part of larger schedules."""
    first = [(root + place) % ranks for place in range(ranks)]
    # the ranks at odd places are leaves: turn the order around, or shift it, so that they are
    # at even places; the root keeps place 0, where it has one child
    others = first[:0:-1] if ranks % 2 else [*first[-1:], *first[1:-1]][: ranks - 1]
    orders = (first, [root, *others])
    return beside(
        *(
            Schedule("double_tree", ranks, CHUNKS, 0, tuple(_down(order, Span(chunk))))
            for chunk, order in enumerate(orders)
        ),
        name="double_tree",
    )


def sum_up(ranks: int, root: int) -> Schedule:
    """The sum goes up to the root; the others sum in their own slots. Part of larger schedules."""
    return mirrored(copy_down(ranks, root))


def all_reduce(ranks: int, root: int) -> Schedule:
    """The sums go up to the root and come down to everyone."""
    return then(sum_up(ranks, root), copy_down(ranks, root))


def reduce(ranks: int, root: int) -> Schedule:
    """The sums go up to the root; the others sum in their own slots."""
    return then(sum_up(ranks, root), tree.tokens(ranks, root, chunks=CHUNKS, confirm=False))


def broadcast(ranks: int, root: int) -> Schedule:
    """The root's tensor comes down to everyone."""
    return then(copy_down(ranks, root), tree.tokens(ranks, root, chunks=CHUNKS, confirm=True))


def _down(order: list[int], span: Span) -> Iterator[Step]:
    """Level by level, `order[0]` first."""
    above = [0]
    children = _children(len(order))
    while step := tuple(
        Move(order[parent], order[child], span, span, Act.COPY, "broadcast")
        for parent in above
        for child in children[parent]
    ):
        yield step
        above = [child for parent in above for child in children[parent]]


def _children(places: int) -> list[list[int]]:
    """A binary tree in order of places: the odd ones are leaves, place 0 is the root."""
    children: list[list[int]] = [[] for _ in range(places)]
    for place in range(1, places):
        bit = place & -place
        parent = (place ^ bit) | (bit << 1)
        children[parent if parent < places else place ^ bit].append(place)
    return children
