"""Direct: every rank sends each other rank what is meant for it."""

from __future__ import annotations

from collective.schedule import Act, Move, Schedule, Span


def all_reduce(ranks: int) -> Schedule:
    """Two ranks swap their tensors and fold what came into their own: one hop, for small messages.

    More ranks would have to fold in one order to agree bit for bit, which needs scratch slots.
    """
    if ranks > 2:
        raise ValueError(
            f"there is no all_reduce by direct on {ranks} ranks yet, only on 2; use centralized"
        )
    swap = tuple(
        Move(rank, 1 - rank, Span(0), Span(0), Act.FOLD, "exchange")
        for rank in range(ranks)
        if ranks == 2
    )
    return Schedule("direct", ranks, 1, 0, (swap,) if swap else ())


def all_to_all(ranks: int) -> Schedule:
    """In step s, rank r sends to rank r + s, so that nobody is everyone's first receiver.

    Slot d of rank s goes to slot ranks + s of rank d; a rank's own part is the caller's to copy.
    """
    steps = tuple(
        tuple(
            Move(
                rank,
                (rank + step) % ranks,
                Span((rank + step) % ranks),
                Span(ranks + rank),
                Act.COPY,
                "all-to-all",
            )
            for rank in range(ranks)
        )
        for step in range(1, ranks)
    )
    return Schedule("direct", ranks, 2 * ranks, 0, steps)
