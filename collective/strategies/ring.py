"""Ring: every rank sends to the next one only, a chunk per step.

Each of n ranks sends 2·(n-1)/n of the tensor in an all-reduce, the least that is possible
(Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009).
"""

from __future__ import annotations

from collective.schedule import Act, Move, Schedule, Span, then


def reduce_scatter(ranks: int) -> Schedule:
    """After ranks - 1 steps rank r holds the sum of slot r; its other slots hold partial sums.

    The sum of slot r starts at rank r + 1 and goes once around.
    """
    return _around(ranks, Act.FOLD, 1, "reduce-scatter")


def all_gather(ranks: int) -> Schedule:
    """Slot r of rank r goes once around, to slot r of everyone."""
    return _around(ranks, Act.COPY, 0, "all-gather")


def all_reduce(ranks: int) -> Schedule:
    """A reduce-scatter over as many chunks as ranks, and an all-gather."""
    return then(reduce_scatter(ranks), all_gather(ranks))


def _around(ranks: int, act: Act, behind: int, phase: str) -> Schedule:
    """In step s, rank r sends slot r - s - behind to the next rank."""
    steps = []
    for step in range(ranks - 1):
        slots = [Span((rank - step - behind) % ranks) for rank in range(ranks)]
        steps.append(
            tuple(
                Move(rank, (rank + 1) % ranks, slots[rank], slots[rank], act, phase)
                for rank in range(ranks)
            )
        )
    return Schedule("ring", ranks, ranks, 0, tuple(steps))
