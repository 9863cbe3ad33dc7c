"""Direct: every rank sends each other rank what is meant for it, in one hop.

Sums are taken in the order of the ranks, wherever they are taken.  Rank r adds up what comes from
the ranks before it in scratch, adds that to its own, and then adds what comes from the others: so
the originals travel, all ranks get the same bits, and no element's sum depends on its position.
"""

from __future__ import annotations

from collections.abc import Iterator

from collective.schedule import Act, Move, Schedule, Span, Step


def all_reduce(ranks: int) -> Schedule:
    """Everyone sends its tensor to everyone and sums what it gets; for small messages."""
    if ranks == 2:  # the order does not matter: swap, and fold what came into one's own
        swap = tuple(
            Move(rank, 1 - rank, Span(0), Span(0), Act.FOLD, "exchange") for rank in (0, 1)
        )
        return Schedule("direct", 2, 1, 0, (swap,))
    return Schedule("direct", ranks, 1, int(ranks > 1), tuple(_in_order(ranks, 1, shared=True)))


def reduce_scatter(ranks: int) -> Schedule:
    """Everyone sends slot r to rank r, which sums."""
    steps = tuple(_in_order(ranks, ranks, shared=False))
    return Schedule("direct", ranks, ranks, int(ranks > 2), steps)


def all_gather(ranks: int) -> Schedule:
    """Everyone sends its slot to everyone."""
    return Schedule("direct", ranks, ranks, 0, tuple(
        tuple(
            Move(rank, (rank + step) % ranks, Span(rank), Span(rank), Act.COPY, "all-gather")
            for rank in range(ranks)
        )
        for step in range(1, ranks)
    ))  # fmt: skip


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


def _in_order(ranks: int, chunks: int, *, shared: bool) -> Iterator[Step]:
    """In step s everyone takes in what rank s contributes to its slot.

    Args:
        ranks: how many there are.
        chunks: the user's chunks; one scratch slot follows them.
        shared: all ranks sum slot 0; otherwise rank r sums slot r, and sends it to nobody, so that
            rank 1, whose own comes second in any case, can do without scratch.
    """
    scratch = Span(chunks)
    at_once = 0 if shared else 1
    for source in range(ranks if ranks > 1 else 0):
        moves = []
        for rank in ((source + turn) % ranks for turn in range(1, ranks)):
            slot = Span(0 if shared else rank)
            if rank < source or rank == at_once:
                moves.append(Move(source, rank, slot, slot, Act.FOLD, "exchange"))
            else:
                act = Act.FOLD if source else Act.COPY
                moves.append(Move(source, rank, slot, scratch, act, "exchange"))
        if source > at_once:
            own = Span(0 if shared else source)
            moves.append(Move(source, source, scratch, own, Act.FOLD, "exchange"))
        yield tuple(moves)
