"""Scatter and all-gather: one share of the tensor per rank, for large tensors.

Van de Geijn's broadcast (Barnett et al., "Interprocessor collective communication library", 1994),
and its likes: whatever is to be summed is summed share by share, each by its owner and in the
order of the ranks, from the originals.
"""

from __future__ import annotations

from collective.schedule import Act, Move, Schedule, Span, embed, then, token
from collective.strategies import direct


def all_reduce(ranks: int) -> Schedule:
    """Everyone sums its share and sends it to everyone."""
    return then(direct.reduce_scatter(ranks), direct.all_gather(ranks))


def reduce(ranks: int, root: int) -> Schedule:
    """Everyone sums its share and sends it to the root."""
    moves = [
        Move(rank, root, Span(rank), Span(rank), Act.COPY, "gather")
        for rank in range(ranks)
        if rank != root
    ]
    return then(direct.reduce_scatter(ranks), _of_steps(ranks, ranks, moves))


def copy_down(ranks: int, root: int) -> Schedule:
    """The root hands out one share to each other rank, and they give theirs to each other."""
    others = [(root + turn) % ranks for turn in range(1, ranks)] or [root]
    shares = len(others)
    scatter = [
        Move(root, rank, Span(share), Span(share), Act.COPY, "scatter")
        for share, rank in enumerate(others)
        if rank != root
    ]
    slots = [Span(share) for share in range(shares)]
    gather = embed(direct.all_gather(shares), others, slots, ranks=ranks, chunks=shares)
    return then(_of_steps(ranks, shares, scatter), gather)


def broadcast(ranks: int, root: int) -> Schedule:
    """The root hands out one share to each other rank, and they give theirs to each other."""
    tokens = [token(rank, root, "confirm") for rank in range(ranks) if rank != root]
    return then(copy_down(ranks, root), _of_steps(ranks, max(ranks - 1, 1), tokens))


def _of_steps(ranks: int, chunks: int, moves: list[Move]) -> Schedule:
    return Schedule("scatter_allgather", ranks, chunks, 0, (tuple(moves),) if moves else ())
