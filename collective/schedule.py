"""A collective written out as data: which rank sends which chunk to whom, in which step.

A strategy returns a `Schedule`; the engine runs it, `collective.proof.verify` proves it, the
dashboard draws it.  Nothing here knows of sockets, tensors or time.

Constructors refuse (`ValueError`) what no reading could make sense of: spans of different length,
ranks or slots that do not exist.  Whether a schedule computes the right thing is the proof's
business.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import zip_longest


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


#: operations whose number of chunks is free: the tensor is cut as the schedule likes
CUT_FREELY = frozenset({Kind.ALL_REDUCE, Kind.REDUCE, Kind.BROADCAST})
#: operations in which one rank, the root, plays another part than the others
ROOTED = frozenset({Kind.REDUCE, Kind.BROADCAST, Kind.GATHER, Kind.SCATTER})


@dataclass(frozen=True, slots=True)
class Span:
    """`count` consecutive slots from `start`; an empty span carries only its arrival."""

    start: int
    count: int = 1

    def __post_init__(self) -> None:
        if self.start < 0 or self.count < 0:
            raise ValueError(f"a span starts at 0 or later and counts 0 or more slots, not {self}")

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end))

    @property
    def end(self) -> int:
        """The first slot behind the span."""
        return self.start + self.count


#: what both spans of a token are
NOTHING = Span(0, 0)


@dataclass(frozen=True, slots=True)
class Move:
    """`src` sends the slots `read`; `dst` copies or folds them into its slots `write`.

    With `src == dst` the move is *local*: nothing travels, the rank copies or folds between its
    own slots.  With empty spans the move is a *token*: it leaves when all that `src` received in
    earlier steps has landed, and `dst` goes on past it when it has arrived.
    """

    src: int
    dst: int
    read: Span
    write: Span
    act: Act
    phase: str = ""

    def __post_init__(self) -> None:
        if self.src < 0 or self.dst < 0:
            raise ValueError(f"ranks count from 0: {self}")
        if self.read.count != self.write.count:
            raise ValueError(
                f"what is read and what is written differ in length, "
                f"{self.read.count} and {self.write.count} slots: {self}"
            )
        if self.is_token and not (self.read == self.write == NOTHING and self.act is Act.COPY):
            raise ValueError(f"a token reads and writes Span(0, 0) and copies: {self}")
        if self.is_local and self.is_token:
            raise ValueError(f"a token from rank {self.src} to itself tells nobody anything")
        if self.is_local and self.read.start < self.write.end and self.write.start < self.read.end:
            raise ValueError(f"a local move reads and writes different slots: {self}")

    @property
    def is_local(self) -> bool:
        """Whether the move stays on its rank."""
        return self.src == self.dst

    @property
    def is_token(self) -> bool:
        """Whether the move carries no data, only the fact of its arrival."""
        return self.read.count == 0

    def __str__(self) -> str:
        if self.is_token:
            return f"rank {self.src} → rank {self.dst}, token" + self._in_phase()
        read, write = (f"{span.start}…{span.end - 1}" for span in (self.read, self.write))
        slots = f"slots {read}" if read == write else f"slots {read} into {write}"
        return f"rank {self.src} → rank {self.dst}, {self.act.value} {slots}" + self._in_phase()

    def _in_phase(self) -> str:
        return f" ({self.phase})" if self.phase else ""


def token(src: int, dst: int, phase: str) -> Move:
    """A move without data, which tells `dst` that `src` has come this far."""
    return Move(src, dst, NOTHING, NOTHING, Act.COPY, phase)


Step = tuple[Move, ...]


@dataclass(frozen=True)
class Collective:
    """What each rank holds at first and must hold at the end.

    Slots `0 … chunks-1` are the user's chunks.  For all-reduce, reduce and broadcast the tensor is
    cut into `chunks` parts.  For reduce-scatter, all-gather, gather and scatter there are
    `chunks == ranks` slots: slot r belongs to rank r.  For all-to-all there are 2·ranks slots:
    slot d of the first half is what goes to rank d, slot ranks+s of the second half is what came
    from rank s; the caller copies its own part itself.  For a barrier there are none.
    """

    kind: Kind
    ranks: int
    chunks: int
    root: int = 0

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"{self.kind.value} needs at least 1 rank, not {self.ranks}")
        if not 0 <= self.root < self.ranks:
            raise ValueError(
                f"root {self.root} of {self.kind.value} is none of the ranks 0…{self.ranks - 1}"
            )
        if self.kind in CUT_FREELY:
            if self.chunks < 1:
                raise ValueError(f"{self.kind.value} needs at least 1 chunk, not {self.chunks}")
        elif self.chunks != (due := self._chunks_due()):
            raise ValueError(
                f"{self.kind.value} of {self.ranks} ranks has {due} chunk slots, not {self.chunks}"
            )

    def _chunks_due(self) -> int:
        if self.kind is Kind.BARRIER:
            return 0
        return 2 * self.ranks if self.kind is Kind.ALL_TO_ALL else self.ranks

    def exists(self, rank: int) -> range:
        """The user's slots that `rank` has memory for."""
        if self.kind in (Kind.GATHER, Kind.SCATTER) and rank != self.root:
            return range(rank, rank + 1)
        return range(self.chunks)

    def given(self, rank: int) -> range:
        """The user's slots that hold `rank`'s contribution at first; all others hold rubbish."""
        match self.kind:
            case Kind.ALL_REDUCE | Kind.REDUCE | Kind.REDUCE_SCATTER:
                return range(self.chunks)
            case Kind.BROADCAST | Kind.SCATTER:
                return range(self.chunks if rank == self.root else 0)
            case Kind.ALL_GATHER | Kind.GATHER:
                return range(rank, rank + 1)
            case Kind.ALL_TO_ALL:
                return range(self.ranks)
            case Kind.BARRIER:
                return range(0)

    def wanted(self, rank: int) -> range:
        """The user's slots of `rank` whose content at the end is laid down.

        Where input and result lie in different slots, the input has to stand at the end as it was.
        """
        match self.kind:
            case Kind.ALL_REDUCE | Kind.BROADCAST | Kind.ALL_GATHER | Kind.ALL_TO_ALL:
                return range(self.chunks)
            case Kind.REDUCE:
                return range(self.chunks if rank == self.root else 0)
            case Kind.REDUCE_SCATTER:
                return range(rank, rank + 1)
            case Kind.GATHER | Kind.SCATTER:
                return self.exists(rank)
            case Kind.BARRIER:
                return range(0)

    def sources(self, rank: int, slot: int) -> frozenset[tuple[int, int]] | None:
        """The contributions, as (rank, slot), of which a wanted slot must be the sum.

        None for the one slot that the caller fills itself: its own part of an all-to-all.
        """
        match self.kind:
            case Kind.ALL_REDUCE | Kind.REDUCE | Kind.REDUCE_SCATTER:
                return frozenset((source, slot) for source in range(self.ranks))
            case Kind.BROADCAST | Kind.SCATTER:
                return frozenset({(self.root, slot)})
            case Kind.ALL_GATHER | Kind.GATHER:
                return frozenset({(slot, slot)})
            case Kind.ALL_TO_ALL:
                if slot < self.ranks:
                    return frozenset({(rank, slot)})
                source = slot - self.ranks
                return None if source == rank else frozenset({(source, rank)})
            case Kind.BARRIER:
                return frozenset()


@dataclass(frozen=True)
class Schedule:
    """Steps of moves over a slot space per rank: the user's chunks first, then scratch.

    Within a step every read sees the state before the step.  An `even` schedule is for slots of one
    size only, so that any that lie one behind the other can travel together.
    """

    name: str
    ranks: int
    chunks: int
    scratch: int
    steps: tuple[Step, ...]
    even: bool = False

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.chunks < 0 or self.scratch < 0:
            raise ValueError(
                f"schedule {self.name!r} has {self.ranks} ranks, {self.chunks} chunks and "
                f"{self.scratch} scratch slots; it needs at least 1, 0 and 0"
            )
        for number, step in enumerate(self.steps):
            for move in step:
                self._check(number, move)

    def _check(self, number: int, move: Move) -> None:
        where = f"schedule {self.name!r}, step {number}, {move}"
        if (rank := max(move.src, move.dst)) >= self.ranks:
            raise ValueError(f"{where}: there is no rank {rank}, only 0…{self.ranks - 1}")
        if (end := max(move.read.end, move.write.end)) > self.slots:
            raise ValueError(f"{where}: there is no slot {end - 1}, only {self.slots} from 0 on")

    @property
    def slots(self) -> int:
        """Slots per rank: the user's chunks and scratch."""
        return self.chunks + self.scratch

    @cached_property
    def joins(self) -> bool:
        """Whether a move takes several slots, which may travel together."""
        return any(move.read.count > 1 for step in self.steps for move in step)

    @cached_property
    def _programs(self) -> tuple[tuple[tuple[int, Move], ...], ...]:
        programs: list[list[tuple[int, Move]]] = [[] for _ in range(self.ranks)]
        for number, step in enumerate(self.steps):
            for move in step:
                programs[move.src].append((number, move))
                if not move.is_local:
                    programs[move.dst].append((number, move))
        return tuple(tuple(program) for program in programs)

    def program(self, rank: int) -> tuple[tuple[int, Move], ...]:
        """The moves in which `rank` takes part, as (step, move), in order of steps."""
        return self._programs[rank]

    @cached_property
    def _likenesses(self) -> tuple[tuple[int | None, ...], ...]:
        like: list[list[int | None]] = [[None] * self.scratch for _ in range(self.ranks)]
        for step in self.steps if self.scratch else ():
            for move in step:
                for read, write in zip(move.read, move.write, strict=True):
                    if write < self.chunks or like[move.dst][write - self.chunks] is not None:
                        continue
                    like[move.dst][write - self.chunks] = (
                        read if read < self.chunks else like[move.src][read - self.chunks]
                    )
        return tuple(map(tuple, like))

    def scratch_like(self, rank: int) -> tuple[int | None, ...]:
        """For each scratch slot of `rank`, the user's slot of `rank` that is as large.

        None for a scratch slot that this rank does not use.  A scratch slot has one size from
        beginning to end (the proof sees to it).
        """
        return self._likenesses[rank]


# --- composition ----------------------------------------------------------------------------

#: slots of a whole that one slot of a part becomes
Slots = Span | Sequence[int]


def embed(
    schedule: Schedule,
    members: Sequence[int],
    slots: Sequence[Slots],
    *,
    ranks: int,
    chunks: int,
    scratch: int = 0,
) -> Schedule:
    """`schedule` as a part of a larger one.

    Args:
        schedule: the part.
        members: for each of its ranks, the rank that plays it in the whole.
        slots: for each of its slots (chunks, then scratch), the slots of the whole that it becomes;
            so one chunk of the part may be several of the whole.
        ranks: ranks of the whole.
        chunks: the user's chunks of the whole.
        scratch: scratch slots of the whole.
    """
    if len(members) != schedule.ranks or len(set(members)) != len(members):
        raise ValueError(
            f"{schedule.name!r} needs {schedule.ranks} different members, not {list(members)}"
        )
    if len(slots) != schedule.slots:
        raise ValueError(
            f"{schedule.name!r} has {schedule.slots} slots, but {len(slots)} are mapped"
        )
    taken = [slot for span in slots for slot in span]
    if len(set(taken)) != len(taken):
        raise ValueError(f"two slots of {schedule.name!r} would share a place: {list(slots)}")
    places = [tuple(span) for span in slots]
    if not all(places):
        raise ValueError(f"a slot of {schedule.name!r} would have no place: {list(slots)}")
    steps = tuple(
        tuple(part for move in step for part in _placed(move, members, places))
        for step in schedule.steps
    )
    return Schedule(schedule.name, ranks, chunks, scratch, steps)


def _placed(move: Move, members: Sequence[int], slots: Sequence[tuple[int, ...]]) -> Iterator[Move]:
    src, dst = members[move.src], members[move.dst]
    if move.is_token:
        yield token(src, dst, move.phase)
        return
    pairs: list[tuple[int, int]] = []
    for one, other in zip(move.read, move.write, strict=True):
        if len(slots[one]) != len(slots[other]):
            raise ValueError(
                f"slots {one} and {other} of a move become {len(slots[one])} and "
                f"{len(slots[other])} slots: {move}"
            )
        pairs += zip(slots[one], slots[other], strict=True)
    start = 0
    for index in range(1, len(pairs) + 1):
        if index < len(pairs) and pairs[index] == (
            pairs[index - 1][0] + 1,
            pairs[index - 1][1] + 1,
        ):
            continue
        read, write = pairs[start]
        count = index - start
        yield Move(src, dst, Span(read, count), Span(write, count), move.act, move.phase)
        start = index


def beside(*parts: Schedule, name: str | None = None) -> Schedule:
    """Schedules that run at the same time: step i of the whole is step i of every part."""
    ranks, chunks, scratch = _common(parts)
    steps = tuple(
        tuple(move for step in together for move in step)
        for together in zip_longest(*(part.steps for part in parts), fillvalue=())
    )
    return Schedule(name or " | ".join(part.name for part in parts), ranks, chunks, scratch, steps)


def then(*parts: Schedule, name: str | None = None) -> Schedule:
    """Schedules that run one after the other."""
    ranks, chunks, scratch = _common(parts)
    steps = tuple(step for part in parts for step in part.steps)
    return Schedule(name or ", ".join(part.name for part in parts), ranks, chunks, scratch, steps)


def mirrored(schedule: Schedule) -> Schedule:
    """Backwards and folding: an all-gather becomes a reduce-scatter, a broadcast a reduce.

    In which way every copy of a slot came from its source, in that way all contributions go back
    to it; where several would fold into one place in one step, they take turns.  The schedule may
    write no place twice, nor one that holds a contribution.
    """
    steps: list[Step] = []
    for step in reversed(schedule.steps):
        turns: list[list[Move]] = []
        taken: list[set[tuple[int, int]]] = []
        for move in step:
            places = {(move.src, slot) for slot in move.read}
            back = Move(move.dst, move.src, move.write, move.read, Act.FOLD, "reduce")
            turn = next((i for i, others in enumerate(taken) if not places & others), len(turns))
            if turn == len(turns):
                turns.append([])
                taken.append(set())
            turns[turn].append(back)
            taken[turn] |= places
        steps += map(tuple, turns)
    return Schedule(schedule.name, schedule.ranks, schedule.chunks, schedule.scratch, tuple(steps))


def _common(parts: Sequence[Schedule]) -> tuple[int, int, int]:
    """Ranks, chunks and scratch of a whole, whose parts must agree on the first two."""
    if not parts:
        raise ValueError("nothing to compose: give at least one schedule")
    shapes = {(part.ranks, part.chunks) for part in parts}
    if len(shapes) != 1:
        listed = ", ".join(f"{p.name!r} has {p.ranks} ranks and {p.chunks} chunks" for p in parts)
        raise ValueError(f"only schedules of one shape compose: {listed}; embed them first")
    return parts[0].ranks, parts[0].chunks, max(part.scratch for part in parts)
