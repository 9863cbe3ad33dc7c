"""Programs compiled from schedules, kept per schedule and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from collective.program import SEGMENT, Place, Program, compile_program, split
from collective.schedule import Schedule
from collective.staged import StagedProgram, local_calls
from collective.strategies.handed import Staged


class _ByIdentity:
    """A schedule as a cache key: `build` returns the same object for the same arguments, and
    hashing one walks all its moves."""

    __slots__ = ("schedule",)

    def __init__(self, schedule: Schedule | Staged) -> None:
        self.schedule = schedule

    def __hash__(self) -> int:
        return id(self.schedule)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and other.schedule is self.schedule


def chunked(
    schedule: Schedule | Staged, rank: int, count: int, itemsize: int
) -> Program | StagedProgram:
    """The program of `rank` over one buffer of `count` elements, cut into the schedule's chunks."""
    return _chunked_cached(_ByIdentity(schedule), rank, count, itemsize)


@lru_cache(maxsize=512)
def _chunked_cached(
    key: _ByIdentity, rank: int, count: int, itemsize: int
) -> Program | StagedProgram:
    schedule = key.schedule
    chunks = (schedule.stand_in if isinstance(schedule, Staged) else schedule).chunks
    runs = split(count, chunks) if chunks else []
    places = [Place(0, start, length) for start, length in runs]
    return _compile(schedule, rank, places, 1, itemsize, joined=True)


def in_a_row(
    schedule: Schedule | Staged, rank: int, sizes: tuple[int, ...], itemsize: int
) -> Program | StagedProgram:
    """The program of `rank` over one buffer in which slots of these sizes follow each other.

    All ranks know all sizes.
    """
    return _row_cached(_ByIdentity(schedule), rank, sizes, itemsize)


@lru_cache(maxsize=512)
def _row_cached(
    key: _ByIdentity, rank: int, sizes: tuple[int, ...], itemsize: int
) -> Program | StagedProgram:
    places = [Place(0, run.start, len(run)) for run in runs_of(sizes)]
    return _compile(key.schedule, rank, places, 1, itemsize, joined=True)


def runs_of(sizes: Sequence[int]) -> list[range]:
    """Where slots of these sizes lie that follow each other, in elements."""
    ends = [*accumulate(sizes, initial=0)]
    return [range(start, end) for start, end in pairwise(ends)]


def listed(
    schedule: Schedule | Staged, rank: int, sizes: tuple[int, ...], itemsize: int
) -> Program | StagedProgram:
    """The program of `rank` over one buffer per slot, of these sizes in elements."""
    return _listed_cached(_ByIdentity(schedule), rank, sizes, itemsize)


@lru_cache(maxsize=512)
def _listed_cached(
    key: _ByIdentity, rank: int, sizes: tuple[int, ...], itemsize: int
) -> Program | StagedProgram:
    places = [Place(slot, 0, size) for slot, size in enumerate(sizes)]
    return _compile(key.schedule, rank, places, len(sizes), itemsize, joined=False)


def alone(schedule: Schedule, rank: int, size: int, itemsize: int) -> Program:
    """The program of a `rank` that has its own slot only, of this size in elements."""
    return _alone_cached(_ByIdentity(schedule), rank, size, itemsize)


@lru_cache(maxsize=512)
def _alone_cached(key: _ByIdentity, rank: int, size: int, itemsize: int) -> Program:
    schedule = key.schedule
    assert isinstance(schedule, Schedule)
    places = [Place(0, 0, size) if slot == rank else None for slot in range(schedule.chunks)]
    return _compile_schedule(schedule, rank, places, 1, itemsize, joined=False)


def owned(program: Program) -> list[tuple[int, int]]:
    """The runs [start, stop) of the first buffer whose final values this rank computes."""
    return [(place.start, place.start + place.count) for place in program.own]


def _compile(
    schedule: Schedule | Staged,
    rank: int,
    places: list[Place],
    buffers: int,
    itemsize: int,
    *,
    joined: bool,
) -> Program | StagedProgram:
    """Compile with the user's slots at `places`, and scratch slots in one more buffer."""
    if isinstance(schedule, Staged):
        stages = tuple(
            _compile_schedule(stage, rank, places, buffers, itemsize, joined=joined)
            if isinstance(stage, Schedule)
            else local_calls(stage, rank, places)
            for stage in schedule.stages
        )
        return StagedProgram(stages)
    return _compile_schedule(schedule, rank, places, buffers, itemsize, joined=joined)


def _compile_schedule(
    schedule: Schedule,
    rank: int,
    places: Sequence[Place | None],
    buffers: int,
    itemsize: int,
    *,
    joined: bool,
) -> Program:
    used = 0
    everywhere = list(places)
    for like in schedule.scratch_like(rank):
        if like is None:
            everywhere.append(None)
            continue
        # without a place for that slot, the rank knows the one size of all by its own
        place = places[like] or places[rank]
        assert place is not None
        count = place.count
        everywhere.append(Place(buffers, used, count))
        used += count
    program = compile_program(schedule, rank, everywhere, max(1, SEGMENT // itemsize), joined)
    program.scratch = used if schedule.scratch else None
    return program
