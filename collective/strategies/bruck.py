"""Bruck: in ⌈log₂ n⌉ steps everyone doubles what it holds, for any number of ranks.

Bruck, Ho, Kipnis, Upfal, Weathersby, "Efficient algorithms for all-to-all communications in
multiport message-passing systems", 1997.  Since slots are addressed by their owner, nothing has to
be rotated at the end.  Each rank sends (n-1)/n of the tensor, the least that is possible.
"""

from __future__ import annotations

from collections.abc import Iterator

from collective.schedule import Act, Move, Schedule, Span, mirrored, then, token


def all_gather(ranks: int) -> Schedule:
    """Before step k rank r holds the 2ᵏ slots from r on, and sends them to rank r - 2ᵏ."""
    steps = []
    for distance in _distances(ranks):
        count = min(distance, ranks - distance)
        steps.append(
            tuple(
                Move(rank, (rank - distance) % ranks, span, span, Act.COPY, "all-gather")
                for rank in range(ranks)
                for span in _around(rank, count, ranks)
            )
        )
    return Schedule("bruck", ranks, ranks, 0, tuple(steps))


def reduce_scatter(ranks: int) -> Schedule:
    """The all-gather backwards: everyone halves what it still sums up."""
    return mirrored(all_gather(ranks))


def all_reduce(ranks: int) -> Schedule:
    """A reduce-scatter over as many chunks as ranks, and an all-gather; 2·⌈log₂ n⌉ steps."""
    return then(reduce_scatter(ranks), all_gather(ranks))


def barrier(ranks: int) -> Schedule:
    """In step k everyone tells rank r + 2ᵏ that it has come, and all whom it has heard of.

    Known as the dissemination barrier (Hensgen, Finkel, Manber, "Two algorithms for barrier
    synchronization", 1988).
    """
    steps = tuple(
        tuple(token(rank, (rank + distance) % ranks, "confirm") for rank in range(ranks))
        for distance in _distances(ranks)
    )
    return Schedule("bruck", ranks, 0, 0, steps)


def _distances(ranks: int) -> Iterator[int]:
    distance = 1
    while distance < ranks:
        yield distance
        distance *= 2


def _around(start: int, count: int, ranks: int) -> Iterator[Span]:
    """`count` slots from `start` on, which go on with slot 0 behind the last."""
    head = min(count, ranks - start)
    yield Span(start, head)
    if count > head:
        yield Span(0, count - head)
