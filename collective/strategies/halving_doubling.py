"""Halving and doubling: pairs at distance 1, 2, 4 … exchange, twice as much at each distance.

Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005.
Where the number of ranks is no power of two, the first ranks stand in pairs: of each pair the even
rank hands its contribution to the odd one, which speaks for both, and gets the result from it.
"""

from __future__ import annotations

from collective.schedule import Act, Move, Schedule, Span, embed, mirrored, then


def all_gather(ranks: int) -> Schedule:
    """Blocks double: before distance d everyone holds the slots of d speakers."""
    speakers = _speakers(ranks)
    blocks = [
        Span(rank - 1, 2) if pair else Span(rank) for rank, pair in zip(*speakers, strict=True)
    ]
    joined, handed = [], []
    for rank, pair in zip(*speakers, strict=True):
        if not pair:
            continue
        own, others = Span(rank - 1), [Span(0, rank - 1), Span(rank, ranks - rank)]
        joined.append(Move(rank - 1, rank, own, own, Act.COPY, "fold in"))
        handed += [
            Move(rank, rank - 1, span, span, Act.COPY, "fold out") for span in others if span.count
        ]
    middle = embed(_doubling(len(blocks)), speakers[0], blocks, ranks=ranks, chunks=ranks)
    return then(_step(ranks, ranks, joined), middle, _step(ranks, ranks, handed))


def reduce_scatter(ranks: int) -> Schedule:
    """The all-gather backwards: blocks halve, and each half is summed by one of two."""
    return mirrored(all_gather(ranks))


def all_reduce(ranks: int) -> Schedule:
    """Rabenseifner's: halving reduce-scatter, then doubling all-gather, among the speakers."""
    members, pairs = _speakers(ranks)
    chunks = len(members)
    whole = Span(0, chunks)
    listeners = [rank for rank, pair in zip(members, pairs, strict=True) if pair]
    joined = [Move(rank - 1, rank, whole, whole, Act.FOLD, "fold in") for rank in listeners]
    handed = [Move(rank, rank - 1, whole, whole, Act.COPY, "fold out") for rank in listeners]
    gather = _doubling(chunks)
    slots = [Span(chunk) for chunk in range(chunks)]
    middle = embed(then(mirrored(gather), gather), members, slots, ranks=ranks, chunks=chunks)
    return then(_step(ranks, chunks, joined), middle, _step(ranks, chunks, handed))


def recursive_doubling(ranks: int) -> Schedule:
    """The speakers swap their whole tensors at distance 1, 2, 4 … and sum; for small messages.

    Half as many steps as halving and doubling, and one message each.  The two of a pair add the
    same operands, in different order, so all end up with the same bits.
    """
    members, pairs = _speakers(ranks)
    whole = Span(0)
    listeners = [rank for rank, pair in zip(members, pairs, strict=True) if pair]
    joined = [Move(rank - 1, rank, whole, whole, Act.FOLD, "fold in") for rank in listeners]
    handed = [Move(rank, rank - 1, whole, whole, Act.COPY, "fold out") for rank in listeners]
    steps = []
    distance = 1
    while distance < len(members):
        steps.append(
            tuple(
                Move(rank, members[place ^ distance], whole, whole, Act.FOLD, "exchange")
                for place, rank in enumerate(members)
            )
        )
        distance *= 2
    middle = Schedule("recursive_doubling", ranks, 1, 0, tuple(steps))
    return then(_step(ranks, 1, joined), middle, _step(ranks, 1, handed))


def _speakers(ranks: int) -> tuple[list[int], list[bool]]:
    """The ranks that exchange, a power of two; and whether each speaks for the one before it."""
    power = 1 << (ranks.bit_length() - 1)
    pairs = ranks - power
    return [*range(1, 2 * pairs, 2), *range(2 * pairs, ranks)], [
        speaker < pairs for speaker in range(power)
    ]


def _doubling(ranks: int) -> Schedule:
    """All-gather among a power of two of ranks."""
    steps = []
    distance = 1
    while distance < ranks:
        steps.append(
            tuple(
                Move(rank, rank ^ distance, block, block, Act.COPY, "all-gather")
                for rank in range(ranks)
                for block in [Span(rank & -distance, distance)]
            )
        )
        distance *= 2
    return Schedule("halving_doubling", ranks, ranks, 0, tuple(steps))


def _step(ranks: int, chunks: int, moves: list[Move]) -> Schedule:
    return Schedule("halving_doubling", ranks, chunks, 0, (tuple(moves),) if moves else ())
