"""Centralized: everyone exchanges with one rank, the root.

For sums and copies of a whole tensor that is the tree in which all others are the root's children.
"""

from __future__ import annotations

from collective.schedule import Act, Move, Schedule, Span, then
from collective.strategies import tree


def all_reduce(ranks: int, root: int) -> Schedule:
    """Everyone sends to the root, which sums and sends the sum back."""
    return tree.all_reduce(ranks, root, _star(ranks))


def reduce(ranks: int, root: int) -> Schedule:
    """Everyone sends to the root, which sums."""
    return tree.reduce(ranks, root, _star(ranks))


def broadcast(ranks: int, root: int) -> Schedule:
    """The root sends to everyone."""
    return tree.broadcast(ranks, root, _star(ranks))


def barrier(ranks: int, root: int) -> Schedule:
    """Everyone tells the root that it has come; the root tells everyone."""
    return tree.barrier(ranks, root, _star(ranks))


def gather(ranks: int, root: int) -> Schedule:
    """Rank r's slot r goes to slot r of the root."""
    moves = tuple(
        Move(rank, root, Span(rank), Span(rank), Act.COPY, "gather")
        for rank in range(ranks)
        if rank != root
    )
    return _with_completion(ranks, root, moves, confirm=False)


def scatter(ranks: int, root: int) -> Schedule:
    """The root's slot r goes to slot r of rank r."""
    moves = tuple(
        Move(root, rank, Span(rank), Span(rank), Act.COPY, "scatter")
        for rank in range(ranks)
        if rank != root
    )
    return _with_completion(ranks, root, moves, confirm=True)


def _with_completion(ranks: int, root: int, moves: tuple[Move, ...], confirm: bool) -> Schedule:
    data = Schedule("centralized", ranks, ranks, 0, (moves,) if moves else ())
    return then(data, tree.completion(ranks, root, _star(ranks), chunks=ranks, confirm=confirm))


def _star(ranks: int) -> int:
    """The arity at which all others are children of the root."""
    return max(ranks - 1, 1)
