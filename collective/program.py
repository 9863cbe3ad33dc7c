"""A schedule as one rank runs it: its sends and receives in segments, and what each waits for.

Compiling looks at slots only; it is cached per schedule, rank and sizes, and bound to memory for
each call by `collective.engine`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from collective.schedule import Act, Move, Schedule, Span

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
    """What one move does to a slot, or to several small ones, at this rank.

    A run of segments that are sent or received in order; one segment if there are several slots.
    Parts that share a slot have equally many segments: a slot that lies with others in one segment
    is one segment by itself.
    """

    index: int
    step: int
    peer: int
    buffer: int
    #: elements [start, stop) of the buffer, per segment
    segments: tuple[tuple[int, int], ...]
    phase: str
    #: a receive is folded into its place; otherwise copied
    fold: bool = False
    #: segment k may go when segment k of these receives has landed
    after: tuple[int, ...] = ()
    #: receives, the first so many, that must have landed as a whole (tokens)
    after_all: range = range(0)
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
    #: places of the user's slots whose final value this rank computes, and does not receive
    own: tuple[Place, ...] = ()


def compile_program(
    schedule: Schedule,
    rank: int,
    places: Sequence[Place | None],
    segment_elements: int,
    joined: bool = False,
) -> Program:
    """The program of `rank`.

    Args:
        schedule: what to run.
        rank: whose part.
        places: where each slot lies at this rank; None for a slot that this rank never touches.
        segment_elements: elements per segment, at least 1.
        joined: the user's slots lie one behind the other, and all ranks know the sizes of all of
            them; so small ones of one move can travel in one segment.
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
        landed_before = range(len(program.receives))
        writes: list[tuple[int, int]] = []
        for move in step:
            if move.src != rank:
                continue
            if not move.read.count:
                part = Part(len(program.sends), number, move.dst, -1, ((0, 0),), move.phase)
                part.after_all = landed_before
                _add(program.sends, program.outgoing, part)
            joins = _joins(schedule, move, joined)
            for slots in _together(joins, places, segment_elements, move.read):
                part = _part(
                    len(program.sends), number, move.dst, places, slots, move.phase,
                    segment_elements,
                )  # fmt: skip
                part.after = _written(last_write, slots)
                for slot in slots:
                    readers.setdefault(slot, []).append(part.index)
                _add(program.sends, program.outgoing, part)
        for move in step:
            if move.dst != rank:
                continue
            if not move.write.count:
                part = Part(len(program.receives), number, move.src, -1, ((0, 0),), move.phase)
                _add(program.receives, program.incoming, part)
            joins = _joins(schedule, move, joined)
            for slots in _together(joins, places, segment_elements, move.write):
                part = _part(
                    len(program.receives), number, move.src, places, slots, move.phase,
                    segment_elements,
                )  # fmt: skip
                part.fold = move.act is Act.FOLD
                part.after = _written(last_write, slots)
                sends = (index for slot in slots for index in readers.get(slot, ()))
                part.after_sends = tuple(dict.fromkeys(sends))
                writes += [(slot, part.index) for slot in slots]
                _add(program.receives, program.incoming, part)
        for slot, index in writes:
            last_write[slot] = index
            readers.pop(slot, None)
    program.own = tuple(
        place
        for slot, place in enumerate(places[: schedule.chunks])
        if place is not None
        and (slot not in last_write or _is_own(program.receives[last_write[slot]], rank))
    )
    return program


def _is_own(last: Part, rank: int) -> bool:
    return last.fold or last.peer == rank


def _joins(schedule: Schedule, move: Move, joined: bool) -> bool:
    """Whether slots of the move may lie in one segment: sender and receiver must come to the same.

    So only slots of the caller's are joined, which have the same sizes at both ends; of an even
    schedule scratch slots too.  The caller's and scratch do not lie together.
    """
    user = schedule.chunks
    if schedule.even:
        return all(span.end <= user or span.start >= user for span in (move.read, move.write))
    return joined and move.read == move.write and move.read.end <= user


def _together(
    joins: bool, places: Sequence[Place | None], segment: int, span: Span
) -> Iterator[range]:
    """The slots of `span`, the move's end at this rank, in runs that make one part each."""
    start, size = span.start, 0
    for slot in span:
        place = places[slot]
        count = place.count if place is not None else 0
        if slot > start and (not joins or size + count > segment):
            yield range(start, slot)
            start, size = slot, 0
        size += count
    if span.count:
        yield range(start, span.end)


def _written(last_write: Mapping[int, int], slots: Iterable[int]) -> tuple[int, ...]:
    """The receives that wrote the slots last."""
    return tuple(dict.fromkeys(last_write[slot] for slot in slots if slot in last_write))


def _add(parts: list[Part], order: dict[int, list[int]], part: Part) -> None:
    parts.append(part)
    order.setdefault(part.peer, []).append(part.index)


def _part(
    index: int,
    step: int,
    peer: int,
    places: Sequence[Place | None],
    slots: range,
    phase: str,
    segment_elements: int,
) -> Part:
    first, last = places[slots[0]], places[slots[-1]]
    if first is None or last is None:
        slot = slots[0] if first is None else slots[-1]
        raise ValueError(f"slot {slot} has no place, but step {step} uses it")
    stop = last.start + last.count
    cuts = range(first.start, stop, segment_elements)
    segments = tuple((cut, min(cut + segment_elements, stop)) for cut in cuts)
    return Part(index, step, peer, first.buffer, segments or ((first.start, first.start),), phase)


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
