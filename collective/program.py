"""A schedule as one rank runs it: its sends and receives in segments, and what each waits for.

Compiling looks at slots only; it is cached per schedule, rank and sizes, and bound to memory for
each call by `collective.engine`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from collective.schedule import Act, Schedule

#: bytes of a segment: large enough to hide 20 µs of work per segment, small enough for the cache
SEGMENT = 512 << 10


@dataclass(frozen=True, slots=True)
class Place:
    """Where a slot lies: `count` elements from `start` in one of the operation's buffers."""

    buffer: int
    start: int
    count: int


@dataclass(slots=True)
class Part:
    """One slot of one move, at this rank: a run of segments that are sent or received in order."""

    index: int
    step: int
    peer: int
    buffer: int
    #: elements [start, stop) of the buffer, per segment
    segments: tuple[tuple[int, int], ...]
    phase: str
    #: a receive is folded into its place; otherwise copied
    fold: bool = False
    #: segment k may go when segment k of this receive has landed (−1: nothing to wait for)
    after: int = -1
    #: receives that must have landed as a whole (tokens)
    after_all: tuple[int, ...] = ()
    #: segment k may land when segment k of these sends has left
    after_sends: tuple[int, ...] = ()


@dataclass(slots=True)
class Program:
    """All parts of one rank, and per peer the order in which they travel on the link."""

    sends: list[Part] = field(default_factory=list)
    receives: list[Part] = field(default_factory=list)
    outgoing: dict[int, list[int]] = field(default_factory=dict)
    incoming: dict[int, list[int]] = field(default_factory=dict)
    #: elements of one more buffer, for slots that are not the caller's; None: no such slots
    scratch: int | None = None


def compile_program(
    schedule: Schedule,
    rank: int,
    places: Sequence[Place | None],
    segment_elements: int,
) -> Program:
    """The program of `rank`.

    Args:
        schedule: what to run.
        rank: whose part.
        places: where each slot lies at this rank; None for a slot that this rank never touches.
        segment_elements: elements per segment, at least 1.
    """
    program = Program()
    last_write: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    moves = schedule.program(rank)
    position = 0
    while position < len(moves):
        number = moves[position][0]
        end = position
        while end < len(moves) and moves[end][0] == number:
            end += 1
        step = [move for _, move in moves[position:end]]
        position = end
        landed_before = tuple(range(len(program.receives)))
        writes: list[tuple[int, int]] = []
        for move in step:
            if move.src != rank:
                continue
            if not move.read.count:
                part = Part(len(program.sends), number, move.dst, -1, ((0, 0),), move.phase)
                part.after_all = landed_before
                _add(program.sends, program.outgoing, part)
            for slot in move.read:
                part = _part(
                    len(program.sends), number, move.dst, places, slot, move.phase, segment_elements
                )
                part.after = last_write.get(slot, -1)
                readers.setdefault(slot, []).append(part.index)
                _add(program.sends, program.outgoing, part)
        for move in step:
            if move.dst != rank:
                continue
            if not move.write.count:
                part = Part(len(program.receives), number, move.src, -1, ((0, 0),), move.phase)
                _add(program.receives, program.incoming, part)
            for slot in move.write:
                part = _part(
                    len(program.receives),
                    number,
                    move.src,
                    places,
                    slot,
                    move.phase,
                    segment_elements,
                )
                part.fold = move.act is Act.FOLD
                part.after = last_write.get(slot, -1)
                part.after_sends = tuple(readers.get(slot, ()))
                writes.append((slot, part.index))
                _add(program.receives, program.incoming, part)
        for slot, index in writes:
            last_write[slot] = index
            readers.pop(slot, None)
    return program


def _add(parts: list[Part], order: dict[int, list[int]], part: Part) -> None:
    parts.append(part)
    order.setdefault(part.peer, []).append(part.index)


def _part(
    index: int,
    step: int,
    peer: int,
    places: Sequence[Place | None],
    slot: int,
    phase: str,
    segment_elements: int,
) -> Part:
    place = places[slot]
    if place is None:
        raise ValueError(f"slot {slot} has no place, but step {step} uses it")
    stop = place.start + place.count
    cuts = range(place.start, stop, segment_elements)
    segments = tuple((cut, min(cut + segment_elements, stop)) for cut in cuts)
    return Part(index, step, peer, place.buffer, segments or ((place.start, place.start),), phase)


def split(count: int, parts: int) -> list[tuple[int, int]]:
    """`count` elements in `parts` runs whose lengths differ by at most one, as (start, length)."""
    length, extra = divmod(count, parts)
    runs = []
    start = 0
    for index in range(parts):
        size = length + (index < extra)
        runs.append((start, size))
        start += size
    return runs
