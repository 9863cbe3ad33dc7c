"""Compiled programs: in whatever order ranks get on, the dataflow computes what the steps say."""

from __future__ import annotations

import itertools
import random
import tracemalloc
from dataclasses import dataclass, field

import pytest
from schedule_interpreter import FLAT, Memory, expected

from collective.cost import ON_ONE_TENSOR, slot_sizes
from collective.program import Part, Place, Program, compile_program
from collective.schedule import Kind, Schedule, token
from collective.strategies import build

NODES = ((0, 1, 2), (3, 4))
LEVELS = [
    (kind, text)
    for kind, texts in {
        Kind.ALL_REDUCE: [
            "local=ring,between=direct",
            "local=bruck,between=halving_doubling",
            "local=double_tree,between=scatter_allgather",
            "local=tree:2,between=ring",
        ],
        Kind.REDUCE: [
            "local=double_tree,between=chain",
            "local=chain,between=scatter_allgather",
        ],
        Kind.BROADCAST: [
            "local=double_tree,between=chain",
            "local=chain,between=scatter_allgather",
        ],
        Kind.ALL_GATHER: ["local=ring,between=bruck", "local=tree:2,between=direct"],
        Kind.REDUCE_SCATTER: ["local=ring,between=bruck", "local=tree:2,between=direct"],
        Kind.BARRIER: ["local=tree:2,between=bruck"],
    }.items()
    for text in texts
]
#: operations on slots of sizes that all ranks know, and those whose slots may lie together
IN_A_ROW = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER)
TOGETHER = (*ON_ONE_TENSOR, *IN_A_ROW)
CASES = [*((kind, text) for kind, texts in FLAT.items() for text in texts), *LEVELS]


@dataclass
class Lane:
    """One direction of a pair: at most one segment is under way, as if nothing had buffers."""

    src: int
    dst: int
    sends: list[Part]
    receives: list[Part]
    sent: tuple[int, int] = (0, 0)
    landed: tuple[int, int] = (0, 0)
    under_way: list[int] | None = None

    def part(self, parts: list[Part], at: tuple[int, int]) -> Part | None:
        return parts[at[0]] if at[0] < len(parts) else None


def following(part: Part, at: tuple[int, int]) -> tuple[int, int]:
    return (at[0], at[1] + 1) if at[1] + 1 < len(part.segments) else (at[0] + 1, 0)


@dataclass
class Ranks:
    """All ranks of a schedule with their memory, run segment by segment in a random order."""

    schedule: Schedule
    sizes: tuple[int, ...]
    memory: Memory
    segment: int
    joined: bool
    rng: random.Random
    programs: list[Program] = field(init=False)
    lanes: list[Lane] = field(init=False)

    def __post_init__(self) -> None:
        self.offsets: list[list[int]] = []
        self.programs = []
        self.values: Memory = []
        for rank in range(self.schedule.ranks):
            places, start = [], 0
            like = self.schedule.scratch_like(rank)
            sizes = [*self.sizes, *(0 if slot is None else self.sizes[slot] for slot in like)]
            for size in sizes:
                places.append(Place(0, start, size))
                start += size
            self.offsets.append([place.start for place in places])
            self.programs.append(
                compile_program(self.schedule, rank, places, self.segment, self.joined)
            )
            self.values.append(
                [self.memory[rank][slot] for slot, size in enumerate(sizes) for _ in range(size)]
            )
        self.left = [[0] * len(program.sends) for program in self.programs]
        self.landed = [[0] * len(program.receives) for program in self.programs]
        self.lanes = [
            Lane(
                rank, peer, [program.sends[index] for index in order],
                [self.programs[peer].receives[i] for i in self.programs[peer].incoming[rank]],
            )
            for rank, program in enumerate(self.programs)
            for peer, order in program.outgoing.items()
        ]  # fmt: skip

    def run(self) -> None:
        moved = True
        while moved:
            self.rng.shuffle(self.lanes)
            moved = False
            for lane in self.lanes:
                moved |= self.land(lane) or self.send(lane)

    def send(self, lane: Lane) -> bool:
        part = lane.part(lane.sends, lane.sent)
        if part is None or lane.under_way is not None:
            return False
        segment, landed = lane.sent[1], self.landed[lane.src]
        receives = self.programs[lane.src].receives
        if any(landed[index] <= segment for index in part.after):
            return False
        if any(landed[index] < len(receives[index].segments) for index in part.after_all):
            return False
        start, stop = part.segments[segment]
        lane.under_way = self.values[lane.src][start:stop] if part.buffer >= 0 else []
        self.left[lane.src][part.index] += 1
        lane.sent = following(part, lane.sent)
        return True

    def land(self, lane: Lane) -> bool:
        part = lane.part(lane.receives, lane.landed)
        if part is None or lane.under_way is None:
            return False
        segment = lane.landed[1]
        if any(self.landed[lane.dst][index] <= segment for index in part.after):
            return False
        if any(self.left[lane.dst][index] <= segment for index in part.after_sends):
            return False
        start, stop = part.segments[segment]
        assert len(lane.under_way) == (stop - start if part.buffer >= 0 else 0)
        for place, value in zip(range(start, stop), lane.under_way, strict=False):
            there = self.values[lane.dst][place]
            self.values[lane.dst][place] = there + value if part.fold else value
        lane.under_way = None
        self.landed[lane.dst][part.index] += 1
        lane.landed = following(part, lane.landed)
        return True

    def check(self, kind: Kind, root: int) -> None:
        for lane in self.lanes:
            assert lane.landed[0] == len(lane.receives), f"stuck: {lane.src} → {lane.dst}"
        for (rank, slot), value in expected(kind, root, self.memory, self.schedule.chunks).items():
            start = self.offsets[rank][slot]
            found = self.values[rank][start : start + self.sizes[slot]]
            assert found == [value] * self.sizes[slot], (rank, slot)


@pytest.mark.parametrize(("kind", "strategy"), CASES)
def test_any_order_of_segments_gives_the_right_result(kind: Kind, strategy: str) -> None:
    """Nothing gets stuck without buffers, and no segment is overtaken, whoever is fast or slow."""
    rng = random.Random(f"{kind} {strategy}")
    two = strategy.startswith("local")
    for ranks in (5,) if two else range(1, 7):
        for root in {0, ranks - 1}:
            schedule = build(strategy, kind, ranks, root, nodes=NODES if two else None)
            memory = [[rng.randrange(-99, 99) for _ in range(schedule.slots)] for _ in range(ranks)]
            for nbytes, segment in ((0, 4), (7, 1), (7, 5), (29, 2), (40, 15), (40, 100)):
                sizes = slot_sizes(kind, schedule, nbytes)
                uneven = tuple(rng.randrange(9) for _ in sizes) if kind in IN_A_ROW else sizes
                for joined, slots in ((False, sizes), (kind in TOGETHER, sizes), (True, uneven)):
                    if joined and kind not in TOGETHER:
                        continue
                    together = Ranks(schedule, slots, memory, segment, joined, rng)
                    together.run()
                    together.check(kind, root)


@pytest.mark.parametrize(
    ("strategy", "ranks", "frames"),
    [("halving_doubling", 8, 6), ("halving_doubling", 16, 8), ("bruck", 4, 5), ("ring", 8, 14)],
)
def test_small_slots_of_a_move_travel_together(strategy: str, ranks: int, frames: int) -> None:
    """A rank sends no more frames for a small tensor than the strategy has moves."""
    schedule = build(strategy, Kind.ALL_REDUCE, ranks)
    places = [Place(0, slot, 1) for slot in range(ranks)]
    most = 0
    for rank in range(ranks):
        program = compile_program(schedule, rank, places, 1000, joined=True)
        moves = [move for _, move in schedule.program(rank)]
        assert len(program.sends) == sum(move.src == rank for move in moves)
        assert len(program.receives) == sum(move.dst == rank for move in moves)
        most = max(most, len(program.sends))
    assert most == frames


def test_slots_fill_at_most_one_segment() -> None:
    """Both ends cut a move's slots into the same runs, none of them larger than a segment."""
    schedule = build("bruck", Kind.ALL_REDUCE, 8)
    places = [Place(0, 3 * slot, 3) for slot in range(8)]
    programs = [compile_program(schedule, rank, places, 7, joined=True) for rank in range(8)]
    for rank, program in enumerate(programs):
        for peer, order in program.outgoing.items():
            other = programs[peer]
            sent = [program.sends[index].segments for index in order]
            assert sent == [other.receives[index].segments for index in other.incoming[rank]]
            assert all(len(segments) == 1 for segments in sent)
            assert all(stop - start in (3, 6) for ((start, stop),) in sent)
    assert (6, 12) in {segments[0] for part in programs[0].sends for segments in [part.segments]}


def test_a_program_of_many_tokens_is_small() -> None:
    """A gigabyte on devices is exchanged in 130 turns, ten in 1,282, each behind all before it."""
    step = tuple(token(one, other, "turn") for one, other in itertools.permutations(range(8), 2))
    schedule = Schedule("turns", 8, 0, 0, (step,) * 1282)
    tracemalloc.start()
    program = compile_program(schedule, 0, (), 1)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert list(program.sends[-1].after_all) == list(range(7 * 1281))
    assert size < 32 << 20
