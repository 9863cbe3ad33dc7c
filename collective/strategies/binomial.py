"""Binomial trees: parts go to the root, or come from it, in ⌈log₂ n⌉ hops.

Ranks count from the root: place p is the rank (root + p) modulo n.  At distance 1, 2, 4 … every
place that is an odd multiple of the distance hands all that it has collected to the place so far
before it.  What a place collects belongs to the places behind it, so it travels as one message: for
small parts of many ranks, where the root would be busy with n - 1 messages.  All parts are of one
size, since who passes them on knows no other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from collective.schedule import Act, Move, Schedule, Span, Step, then
from collective.strategies import tree


def gather(ranks: int, root: int) -> Schedule:
    """Rank r's slot r goes to slot r of the root."""
    places = _Places(ranks, root)
    rounds = places.rounds("gather")
    if rounds:  # who passes parts on collects them in scratch, its own one first
        rounds[0] += tuple(
            Move(rank, rank, Span(rank), places.kept(0), Act.COPY, "gather")
            for rank in places.inner()
        )
    return places.schedule(rounds, confirm=False)


def scatter(ranks: int, root: int) -> Schedule:
    """The root's slot r goes to slot r of rank r: the gather backwards."""
    places = _Places(ranks, root)
    rounds = [
        tuple(replace(move, src=move.dst, dst=move.src, read=move.write, write=move.read)
              for move in step)
        for step in reversed(places.rounds("scatter"))
    ]  # fmt: skip
    own = tuple(
        Move(rank, rank, places.kept(0), Span(rank), Act.COPY, "scatter") for rank in places.inner()
    )
    return places.schedule([*rounds, own] if own else rounds, confirm=True)


class _Places:
    """The tree, and where each rank keeps what it passes on."""

    def __init__(self, ranks: int, root: int) -> None:
        self._ranks = ranks
        self._root = root

    def _rank(self, place: int) -> int:
        return (self._root + place) % self._ranks

    def _below(self, place: int) -> int:
        """How many parts `place` hands on: its own, and those of the places behind it."""
        return min(place & -place, self._ranks - place)

    def inner(self) -> list[int]:
        """The ranks, but for the root, that pass on parts of others."""
        return [self._rank(place) for place in range(1, self._ranks) if self._below(place) > 1]

    def kept(self, index: int, count: int = 1) -> Span:
        """Scratch of an inner rank: its own part, and then those of the places behind it."""
        return Span(self._ranks + index, count)

    def rounds(self, phase: str) -> list[Step]:
        """By distance, what goes towards the root."""
        rounds = []
        distance = 1
        while distance < self._ranks:
            handing = range(distance, self._ranks, 2 * distance)
            rounds.append(
                tuple(move for place in handing for move in self._hand(place, distance, phase))
            )
            distance *= 2
        return rounds

    def _hand(self, place: int, distance: int, phase: str) -> Iterator[Move]:
        src, dst = self._rank(place), self._rank(place - distance)
        count = self._below(place)
        first = Span(src) if count == 1 else self.kept(0, count)
        if place != distance:
            yield Move(src, dst, first, self.kept(distance, count), Act.COPY, phase)
            return
        # to the root, whose slots go on with slot 0 behind the last
        head = min(count, self._ranks - src)
        yield Move(src, dst, Span(first.start, head), Span(src, head), Act.COPY, phase)
        if count > head:
            rest = Span(first.start + head, count - head)
            yield Move(src, dst, rest, Span(0, count - head), Act.COPY, phase)

    def schedule(self, steps: list[Step], *, confirm: bool) -> Schedule:
        scratch = max((self._below(place) for place in range(1, self._ranks)), default=1)
        data = Schedule(
            "binomial", self._ranks, self._ranks, scratch if scratch > 1 else 0, tuple(steps)
        )
        tokens = tree.tokens(self._ranks, self._root, chunks=self._ranks, confirm=confirm)
        return replace(then(data, tokens), even=True)
