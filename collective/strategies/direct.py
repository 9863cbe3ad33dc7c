"""Direct: every rank sends each other rank what is meant for it."""

from __future__ import annotations

from collective.schedule import Act, Move, Schedule, Span


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
