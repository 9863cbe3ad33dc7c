"""Programs compiled from schedules, kept per schedule and sizes."""

from __future__ import annotations

from functools import lru_cache

from collective.program import SEGMENT, Place, Program, compile_program, split
from collective.schedule import Schedule


class _ByIdentity:
    """A schedule as a cache key: `build` returns the same object for the same arguments, and
    hashing one walks all its moves."""

    __slots__ = ("schedule",)

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule

    def __hash__(self) -> int:
        return id(self.schedule)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and other.schedule is self.schedule


def chunked(schedule: Schedule, rank: int, count: int, itemsize: int) -> Program:
    """The program of `rank` over one buffer of `count` elements, cut into the schedule's chunks."""
    return _chunked_cached(_ByIdentity(schedule), rank, count, itemsize)


@lru_cache(maxsize=512)
def _chunked_cached(key: _ByIdentity, rank: int, count: int, itemsize: int) -> Program:
    schedule = key.schedule
    runs = split(count, schedule.chunks) if schedule.chunks else []
    places = [Place(0, start, length) for start, length in runs]
    return _compile(schedule, rank, places, 1, itemsize, joined=True)


def listed(schedule: Schedule, rank: int, sizes: tuple[int, ...], itemsize: int) -> Program:
    """The program of `rank` over one buffer per slot, of these sizes in elements."""
    return _listed_cached(_ByIdentity(schedule), rank, sizes, itemsize)


@lru_cache(maxsize=512)
def _listed_cached(key: _ByIdentity, rank: int, sizes: tuple[int, ...], itemsize: int) -> Program:
    places = [Place(slot, 0, size) for slot, size in enumerate(sizes)]
    return _compile(key.schedule, rank, places, len(sizes), itemsize, joined=False)


def owned(program: Program) -> list[tuple[int, int]]:
    """The runs [start, stop) of the first buffer whose final values this rank computes."""
    return [(place.start, place.start + place.count) for place in program.own]


def _compile(
    schedule: Schedule,
    rank: int,
    places: list[Place],
    buffers: int,
    itemsize: int,
    *,
    joined: bool,
) -> Program:
    """Compile with the user's slots at `places`, and scratch slots in one more buffer."""
    used = 0
    everywhere: list[Place | None] = list(places)
    for like in schedule.scratch_like(rank):
        if like is None:
            everywhere.append(None)
            continue
        count = places[like].count
        everywhere.append(Place(buffers, used, count))
        used += count
    program = compile_program(schedule, rank, everywhere, max(1, SEGMENT // itemsize), joined)
    program.scratch = used if schedule.scratch else None
    return program
