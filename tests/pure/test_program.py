"""What one rank does, as compiled from a schedule: segments, sizes, and what waits for what."""

from __future__ import annotations

import itertools

import pytest

from collective.links.wire import HEADER_SIZE, MAX_FRAME
from collective.program import SEGMENT, Part, Place, Program, compile_program, split
from collective.schedule import Kind, Schedule
from collective.strategies import build


def compiled(schedule: Schedule, rank: int, count: int, itemsize: int) -> Program:
    places = [Place(0, start, length) for start, length in split(count, schedule.chunks)]
    return compile_program(schedule, rank, places, max(1, SEGMENT // itemsize))


def parts_of(program: Program) -> list[Part]:
    return [*program.sends, *program.receives]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 72, 73, 74, 100_003, 2**31 + 5, 2**33])
@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_a_split_covers_everything_once(count: int, parts: int) -> None:
    """The runs follow one another without a gap, and their lengths differ by one at most."""
    runs = split(count, parts)
    assert len(runs) == parts
    assert sum(length for _, length in runs) == count
    assert [start for start, _ in runs] == [
        *itertools.accumulate((length for _, length in runs[:-1]), initial=0)
    ]
    assert max(length for _, length in runs) - min(length for _, length in runs) <= 1


@pytest.mark.parametrize("strategy", ["ring", "tree:2", "centralized"])
@pytest.mark.parametrize("itemsize", [1, 8])
def test_more_elements_than_32_bits_count(strategy: str, itemsize: int) -> None:
    """2^33 elements of 8 bytes over 3 ranks: no negative place, no gap, no frame over the limit."""
    count = 2**33
    schedule = build(strategy, Kind.ALL_REDUCE, 3)
    for rank in range(3):
        program = compiled(schedule, rank, count, itemsize)
        for part in parts_of(program):
            places = [place for segment in part.segments for place in segment]
            assert places == sorted(places)
            assert places[0] >= 0
            assert places[-1] <= count
            for (start, stop), (following, _) in itertools.pairwise(part.segments):
                assert stop == following
                assert stop - start > 0
            longest = max(stop - start for start, stop in part.segments)
            assert longest * itemsize + HEADER_SIZE + 4096 <= MAX_FRAME
        if strategy == "ring":
            sent = sum(stop - start for part in program.sends for start, stop in part.segments)
            share, rest = divmod(4 * count, 3)
            assert abs(sent - share) <= 4 + rest


@pytest.mark.parametrize("strategy", ["ring", "tree:2", "tree:3", "centralized"])
@pytest.mark.parametrize("ranks", range(2, 9))
def test_both_ends_of_a_link_agree(strategy: str, ranks: int) -> None:
    """What a rank sends to a peer is, segment by segment, what that peer receives from it."""
    schedule = build(strategy, Kind.ALL_REDUCE, ranks)
    for count in (0, 1, ranks - 1, 73, 300_001):
        programs = [compiled(schedule, rank, count, 4) for rank in range(ranks)]
        for rank, program in enumerate(programs):
            for peer, order in program.outgoing.items():
                there = programs[peer]
                sent = [program.sends[index].segments for index in order]
                received = [there.receives[index].segments for index in there.incoming[rank]]
                assert [[b - a for a, b in segments] for segments in sent] == [
                    [b - a for a, b in segments] for segments in received
                ]


def test_a_slot_without_a_place_is_an_error() -> None:
    """A schedule that touches a slot for which there is no memory does not compile."""
    schedule = build("ring", Kind.ALL_REDUCE, 2)
    with pytest.raises(ValueError, match="slot 1 has no place"):
        compile_program(schedule, 0, [Place(0, 0, 4), None], 10)
