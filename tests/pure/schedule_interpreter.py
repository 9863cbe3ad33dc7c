"""A second, simple reading of what a schedule means, with numbers in place of symbols.

It shares no code with the proof, so each checks the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from collective.schedule import Act, Kind, Schedule
from collective.strategies import build

Memory = list[list[int]]
Fold = Callable[[int, int], int]

_SUMMED_OR_SPREAD = ["centralized", "tree:1", "tree:2", "tree:3", "double_tree", "chain",
                     "scatter_allgather"]  # fmt: skip
#: every flat strategy of every operation
FLAT = {
    Kind.ALL_REDUCE: [
        *_SUMMED_OR_SPREAD,
        "ring",
        "halving_doubling",
        "recursive_doubling",
        "bruck",
        "direct",
    ],
    Kind.REDUCE: _SUMMED_OR_SPREAD,
    Kind.BROADCAST: _SUMMED_OR_SPREAD,
    Kind.BARRIER: ["centralized", "tree:1", "tree:2", "tree:3", "bruck"],
    Kind.REDUCE_SCATTER: ["ring", "halving_doubling", "bruck", "direct"],
    Kind.ALL_GATHER: ["ring", "halving_doubling", "bruck", "direct"],
    Kind.GATHER: ["centralized", "binomial"],
    Kind.SCATTER: ["centralized", "binomial"],
    Kind.ALL_TO_ALL: ["direct"],
}


def flat_cases(ranks: range) -> Iterator[tuple[Schedule, Kind, int]]:
    """(schedule, kind, root) of every operation, strategy, number of ranks and root."""
    for kind, strategies in FLAT.items():
        for strategy, size in itertools.product(strategies, ranks):
            for root in range(size):
                yield build(strategy, kind, size, root), kind, root


def run(schedule: Schedule, memory: Memory, fold: Fold, backwards: bool = False) -> Memory:
    """The memory of all ranks after the schedule; moves of a step in order, or the other way."""
    memory = [list(slots) for slots in memory]
    for step in schedule.steps:
        before = [list(slots) for slots in memory]
        for move in reversed(step) if backwards else step:
            for read, write in zip(move.read, move.write, strict=True):
                value = before[move.src][read]
                if move.act is Act.FOLD:
                    value = fold(memory[move.dst][write], value)
                memory[move.dst][write] = value
    return memory


def expected(kind: Kind, root: int, memory: Memory, chunks: int) -> dict[tuple[int, int], int]:
    """What must lie in (rank, slot) after the operation, for the sum of whole numbers."""
    ranks = range(len(memory))
    match kind:
        case Kind.ALL_REDUCE:
            return {(r, c): sum(memory[s][c] for s in ranks) for r in ranks for c in range(chunks)}
        case Kind.REDUCE:
            return {(root, c): sum(memory[s][c] for s in ranks) for c in range(chunks)}
        case Kind.BROADCAST:
            return {(r, c): memory[root][c] for r in ranks for c in range(chunks)}
        case Kind.REDUCE_SCATTER:
            return {(r, r): sum(memory[s][r] for s in ranks) for r in ranks}
        case Kind.ALL_GATHER:
            return {(r, s): memory[s][s] for r in ranks for s in ranks}
        case Kind.GATHER:
            return {(root, s): memory[s][s] for s in ranks}
        case Kind.SCATTER:
            return {(r, r): memory[root][r] for r in ranks}
        case Kind.ALL_TO_ALL:
            size = len(memory)
            return {(d, size + s): memory[s][d] for d in ranks for s in ranks if s != d}
        case Kind.BARRIER:
            return {}


def done_without(schedule: Schedule, silent: int) -> list[int]:
    """The other ranks that get through the schedule although `silent` never sends anything."""
    moves = [(number, move) for number, step in enumerate(schedule.steps) for move in step]
    happened: set[int] = set()

    def may_happen(index: int) -> bool:
        number, move = moves[index]
        needed = (
            i
            for i, (earlier, other) in enumerate(moves)
            if earlier < number
            and other.dst == move.src
            and (move.is_token or set(other.write) & set(move.read))
        )
        return move.src != silent and all(i in happened for i in needed)

    pending = set(range(len(moves)))
    while now := {index for index in pending if may_happen(index)}:
        happened |= now
        pending -= now
    stuck = {rank for index in pending for rank in (moves[index][1].src, moves[index][1].dst)}
    return [rank for rank in range(schedule.ranks) if rank not in stuck and rank != silent]
