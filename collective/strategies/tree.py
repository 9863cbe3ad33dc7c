"""Trees: every rank sums what its children send and passes it on to its parent, or the way back.

The ranks stand in the tree in their order, counted from the root: place p is the rank (root + p)
modulo the number of ranks, and its children are the places k·p + 1 … k·p + k.
The tensor is one chunk; the engine pipelines its segments through the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from collective.schedule import Act, Move, Schedule, Span, Step, then, token

_WHOLE = Span(0, 1)
#: makes tokens that go along a tree, from ranks, root and arity; without chunks
TokenPart = Callable[[int, int, int], Schedule]
#: children per rank of a tree that carries tokens only: they are small, so hops count
TOKENS = 4


def sum_up(ranks: int, root: int, arity: int) -> Schedule:
    """The sum goes up to the root; the others sum in their own slot. Part of larger schedules."""
    tree = _Tree(ranks, root, arity)
    return tree.schedule(tree.summed_up())


def copy_down(ranks: int, root: int, arity: int) -> Schedule:
    """The root's tensor comes down to everyone. Part of larger schedules."""
    tree = _Tree(ranks, root, arity)
    return tree.schedule(tree.copied_down())


def all_reduce(ranks: int, root: int, arity: int) -> Schedule:
    """The sum goes up to the root and comes down to everyone; 2·(ranks - 1) moves."""
    return then(sum_up(ranks, root, arity), copy_down(ranks, root, arity))


def reduce(ranks: int, root: int, arity: int) -> Schedule:
    """The sum goes up to the root; the others sum in their own slot."""
    return then(
        sum_up(ranks, root, arity),
        completion(ranks, root, arity, chunks=1, confirm=False),
    )


def broadcast(ranks: int, root: int, arity: int) -> Schedule:
    """The root's tensor comes down to everyone."""
    return then(
        copy_down(ranks, root, arity),
        completion(ranks, root, arity, chunks=1, confirm=True),
    )


def barrier(ranks: int, root: int, arity: int) -> Schedule:
    """Tokens go up to the root when all have come, and come down again."""
    return completion(ranks, root, arity, chunks=0, confirm=True)


def completion(ranks: int, root: int, arity: int, *, chunks: int, confirm: bool) -> Schedule:
    """Tokens after which everyone knows that everyone took part.

    Args:
        ranks: how many there are.
        root: where the tokens meet.
        arity: of the tree along which they go.
        chunks: chunks of the schedule that they follow.
        confirm: whether they have to go up first; not so where data went up to the root.
    """
    tree = _Tree(ranks, root, arity)
    release = tree.schedule(tree.released(), chunks=chunks)
    return then(tree.schedule(tree.confirmed(), chunks=chunks), release) if confirm else release


def tokens(ranks: int, root: int, *, chunks: int, confirm: bool) -> Schedule:
    """`completion` along a flat tree, for strategies whose own way would be longer."""
    return completion(ranks, root, TOKENS, chunks=chunks, confirm=confirm)


def confirm(ranks: int, root: int, arity: int) -> Schedule:
    """Tokens go up to the root when all below have come. Part of larger schedules."""
    tree = _Tree(ranks, root, arity)
    return tree.schedule(tree.confirmed(), chunks=0)


def release(ranks: int, root: int, arity: int) -> Schedule:
    """Tokens come down from the root to everyone. Part of larger schedules."""
    tree = _Tree(ranks, root, arity)
    return tree.schedule(tree.released(), chunks=0)


class _Tree:
    """The shape of a tree, and the steps that go along it."""

    def __init__(self, ranks: int, root: int, arity: int) -> None:
        self.ranks = ranks
        self.root = root
        self.arity = min(arity, max(ranks - 1, 1))

    def schedule(self, steps: Iterator[Step], chunks: int = 1) -> Schedule:
        return Schedule("tree", self.ranks, chunks, 0, tuple(steps))

    def summed_up(self) -> Iterator[Step]:
        """Children fold into their parent one after the other: a place has one writer per step."""
        for edges in reversed(self._levels()):
            turns: dict[int, list[Move]] = {}
            for parent, child, number in edges:
                move = Move(child, parent, _WHOLE, _WHOLE, Act.FOLD, "reduce")
                turns.setdefault(number, []).append(move)
            for _, moves in sorted(turns.items()):
                yield tuple(moves)

    def copied_down(self) -> Iterator[Step]:
        for edges in self._levels():
            yield tuple(
                Move(parent, child, _WHOLE, _WHOLE, Act.COPY, "broadcast")
                for parent, child, _ in edges
            )

    def confirmed(self) -> Iterator[Step]:
        for edges in reversed(self._levels()):
            yield tuple(token(child, parent, "confirm") for parent, child, _ in edges)

    def released(self) -> Iterator[Step]:
        for edges in self._levels():
            yield tuple(token(parent, child, "release") for parent, child, _ in edges)

    def _levels(self) -> list[list[tuple[int, int, int]]]:
        """Per depth, from the root on: (parent, child, number of the child among its siblings)."""
        levels: list[list[tuple[int, int, int]]] = []
        first = 1
        while first < self.ranks:
            # the children of the places up to `first` - 1 end at place arity · first
            end = min(self.arity * first + 1, self.ranks)
            levels.append([self._edge(place) for place in range(first, end)])
            first = end
        return levels

    def _edge(self, place: int) -> tuple[int, int, int]:
        parent, number = divmod(place - 1, self.arity)
        return self._rank(parent), self._rank(place), number

    def _rank(self, place: int) -> int:
        return (self.root + place) % self.ranks
