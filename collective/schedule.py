"""A collective written out as data: which rank sends which chunk to whom, in which step.

A strategy returns a `Schedule`; the engine runs it, `verify` proves it, the dashboard draws it.
Nothing here knows of sockets, tensors or time.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property


class Act(Enum):
    """What the receiver does with a chunk."""

    COPY = "copy"
    FOLD = "fold"


class Kind(Enum):
    """The operations for which schedules exist."""

    ALL_REDUCE = "all_reduce"
    REDUCE = "reduce"
    BROADCAST = "broadcast"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    GATHER = "gather"
    SCATTER = "scatter"
    ALL_TO_ALL = "all_to_all"
    BARRIER = "barrier"


@dataclass(frozen=True, slots=True)
class Span:
    """`count` consecutive slots from `start`; an empty span carries only the fact of its arrival."""

    start: int
    count: int = 1

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(range(self.start, self.start + self.count))


@dataclass(frozen=True, slots=True)
class Move:
    """`src` sends the slots `read`; `dst` copies or folds them into its slots `write`.

    With empty spans the move is a *token*: it leaves when all that `src` received in earlier
    steps has landed, and `dst` goes on past it when it has arrived.
    """

    src: int
    dst: int
    read: Span
    write: Span
    act: Act
    phase: str = ""


Step = tuple[Move, ...]


@dataclass(frozen=True)
class Collective:
    """What each rank holds at first and must hold at the end.

    Slots `0 … chunks-1` are the user's chunks.  For all-reduce, reduce and broadcast the tensor is
    cut into `chunks` parts.  For reduce-scatter, all-gather, gather, scatter and all-to-all there
    are `chunks == ranks` slots: slot r belongs to rank r (for all-to-all there are 2·ranks slots:
    slot d of the first half is what goes to rank d, slot ranks+s of the second half is what came
    from rank s).  For a barrier there are none.
    """

    kind: Kind
    ranks: int
    chunks: int
    root: int = 0


@dataclass(frozen=True)
class Schedule:
    """Steps of moves over a slot space per rank: the user's chunks first, then scratch."""

    name: str
    ranks: int
    chunks: int
    scratch: int
    steps: tuple[Step, ...]

    @cached_property
    def _programs(self) -> tuple[tuple[tuple[int, Move], ...], ...]:
        programs: list[list[tuple[int, Move]]] = [[] for _ in range(self.ranks)]
        for number, step in enumerate(self.steps):
            for move in step:
                programs[move.src].append((number, move))
                programs[move.dst].append((number, move))
        return tuple(tuple(program) for program in programs)

    def program(self, rank: int) -> tuple[tuple[int, Move], ...]:
        """The moves in which `rank` takes part, as (step, move), in order of steps."""
        return self._programs[rank]
