"""Proves that a schedule computes its collective, by running it on symbols.

Each slot holds a symbolic value: which contributions it is the sum of, in which tree they were
summed, and which ranks are known to have taken part when it is there.  `verify` shows that

- within a step reads see the state before it, and no place has two writers;
- nothing is read that does not exist or holds nothing yet;
- what is folded into a slot is disjoint from what it holds (nothing is counted twice);
- at the end each slot is the sum of exactly the contributions that the collective asks for;
- ranks that end up with the same sum have summed it in the same tree, up to swapping the two
  operands of an addition, so their results are equal bit by bit;
- what a move reads is as large as what it writes, also where chunks differ in size;
- no rank is done before every rank took part (`verify_everyone_took_part`).

That spans are in range and of equal length is already certain: `Schedule` and `Move` refuse others.

The time grows with moves × ranks; prove in tests, not at each start.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from collective.schedule import Act, Collective, Kind, Move, Schedule

__all__ = ["ProofError", "verify", "verify_everyone_took_part"]


class ProofError(ValueError):
    """A schedule does not compute its collective.

    Attributes:
        reason: what is wrong, without the place.
        step: number of the step, from 0; None where only the end is wrong.
        move: the move at fault; None where only the end is wrong.
        rank: the rank at which it goes wrong.
        slot: the slot of that rank; None where it is about no slot.
    """

    def __init__(
        self,
        schedule: Schedule,
        reason: str,
        *,
        step: int | None = None,
        move: Move | None = None,
        rank: int | None = None,
        slot: int | None = None,
    ) -> None:
        place = [f"schedule {schedule.name!r}"]
        place.append("at the end" if step is None else f"step {step}")
        if move is not None:
            place.append(f"move {move}")
        if slot is not None:
            place.append(f"slot {slot} of rank {rank}")
        elif rank is not None:
            place.append(f"rank {rank}")
        super().__init__(f"{', '.join(place)}: {reason}")
        self.reason = reason
        self.step = step
        self.move = move
        self.rank = rank
        self.slot = slot


@dataclass(frozen=True, slots=True)
class _Value:
    """A sum: `parts` has a bit per contribution, `tree` numbers the way in which it was summed."""

    parts: int
    tree: int


@dataclass
class _Sums:
    """Numbers every tree of additions; the two operands of an addition may change places."""

    numbers: dict[tuple[int, int], int] = field(default_factory=dict)

    def leaf(self, rank: int, slot: int) -> int:
        return self.numbers.setdefault((-1 - rank, slot), len(self.numbers))

    def of(self, one: int, other: int) -> int:
        key = (one, other) if one <= other else (other, one)
        return self.numbers.setdefault(key, len(self.numbers))


def verify(schedule: Schedule, collective: Collective) -> None:
    """Prove that `schedule` computes `collective`.

    Raises:
        ProofError: it does not; names step, move, rank, slot and the reason.
    """
    if (schedule.ranks, schedule.chunks) != (collective.ranks, collective.chunks):
        raise ProofError(
            schedule,
            f"it is for {schedule.ranks} ranks and {schedule.chunks} chunks, the collective "
            f"{collective.kind.value} for {collective.ranks} and {collective.chunks}",
        )
    _verify_values(schedule, collective)
    _verify_sizes(schedule, collective)
    verify_everyone_took_part(schedule)


def _verify_values(schedule: Schedule, collective: Collective) -> None:
    sums = _Sums()
    state: list[dict[int, _Value]] = [
        {
            slot: _Value(1 << _bit(collective, rank, slot), sums.leaf(rank, slot))
            for slot in collective.given(rank)
        }
        for rank in range(schedule.ranks)
    ]
    for number, step in enumerate(schedule.steps):
        writes: dict[tuple[int, int], _Value] = {}
        tokens: set[tuple[int, int]] = set()
        for move in step:
            if move.is_token:
                if (move.src, move.dst) in tokens:
                    raise ProofError(
                        schedule,
                        "the same token is sent twice in one step",
                        step=number,
                        move=move,
                        rank=move.dst,
                    )
                tokens.add((move.src, move.dst))
            for read, write in zip(move.read, move.write, strict=True):
                value = _arrived(schedule, collective, state, sums, number, move, read, write)
                if (move.dst, write) in writes:
                    raise ProofError(
                        schedule,
                        "two moves of one step write this place",
                        step=number,
                        move=move,
                        rank=move.dst,
                        slot=write,
                    )
                writes[move.dst, write] = value
        for (rank, slot), value in writes.items():
            state[rank][slot] = value
    _verify_end(schedule, collective, state)


def _arrived(
    schedule: Schedule,
    collective: Collective,
    state: list[dict[int, _Value]],
    sums: _Sums,
    number: int,
    move: Move,
    read: int,
    write: int,
) -> _Value:
    """What `write` holds after the move, given the state before its step."""

    def refused(reason: str, rank: int, slot: int) -> ProofError:
        return ProofError(schedule, reason, step=number, move=move, rank=rank, slot=slot)

    for rank, slot in ((move.src, read), (move.dst, write)):
        if slot < collective.chunks and slot not in collective.exists(rank):
            raise refused(f"{collective.kind.value} gives this rank no such slot", rank, slot)
    coming = state[move.src].get(read)
    if coming is None:
        raise refused("it is read before anything has come into it", move.src, read)
    if move.act is Act.COPY:
        return coming
    there = state[move.dst].get(write)
    if there is None:
        raise refused("it is folded into before anything has come into it", move.dst, write)
    if twice := there.parts & coming.parts:
        raise refused(f"{_named(collective, twice)} would be counted twice", move.dst, write)
    return _Value(there.parts | coming.parts, sums.of(there.tree, coming.tree))


def _verify_end(schedule: Schedule, collective: Collective, state: list[dict[int, _Value]]) -> None:
    first: dict[int, tuple[int, int]] = {}
    for rank in range(schedule.ranks):
        for slot in collective.wanted(rank):
            sources = collective.sources(rank, slot)
            if sources is None:
                continue
            value = state[rank].get(slot)
            if value is None:
                raise ProofError(schedule, "nothing has come into it", rank=rank, slot=slot)
            due = sum(1 << _bit(collective, *source) for source in sources)
            if missing := due & ~value.parts:
                raise ProofError(
                    schedule, f"it lacks {_named(collective, missing)}", rank=rank, slot=slot
                )
            if strange := value.parts & ~due:
                raise ProofError(
                    schedule,
                    f"it holds {_named(collective, strange)}, which is not due there",
                    rank=rank,
                    slot=slot,
                )
            tree, other = first.setdefault(due, (value.tree, rank))
            if tree != value.tree:
                raise ProofError(
                    schedule,
                    f"it was summed in another order than on rank {other}, so the two may differ "
                    f"in their last bits",
                    rank=rank,
                    slot=slot,
                )


def _verify_sizes(schedule: Schedule, collective: Collective) -> None:
    """Chunks of different number may differ in size, and scratch is as large as what it takes."""

    def size(rank: int, slot: int) -> tuple[int, int] | None:
        if slot >= collective.chunks:
            like = schedule.scratch_like(rank)[slot - collective.chunks]
            return None if like is None else size(rank, like)
        if collective.kind is not Kind.ALL_TO_ALL:
            return slot, slot
        return (rank, slot) if slot < collective.ranks else (slot - collective.ranks, rank)

    for number, step in enumerate(schedule.steps):
        for move in step:
            for read, write in zip(move.read, move.write, strict=True):
                if size(move.src, read) != size(move.dst, write):
                    raise ProofError(
                        schedule,
                        f"it need not be as large as slot {read} of rank {move.src}, which comes "
                        f"into it",
                        step=number,
                        move=move,
                        rank=move.dst,
                        slot=write,
                    )


def _bit(collective: Collective, rank: int, slot: int) -> int:
    return rank * collective.chunks + slot


def _named(collective: Collective, parts: int) -> str:
    """The contributions of a set in words; of many, the first four."""
    places = [
        divmod(bit, collective.chunks) for bit in range(parts.bit_length()) if parts >> bit & 1
    ]
    listed = ", ".join(f"slot {slot} of rank {rank}" for rank, slot in places[:4])
    more = f" and {len(places) - 4} more" if len(places) > 4 else ""
    return f"the input from {listed}{more}"


def verify_everyone_took_part(schedule: Schedule) -> None:
    """Prove that no rank is done before every rank has sent something.

    So a rank that issued another operation, or none, is noticed by all.  A data move follows
    whatever brought the content of the slots that it reads, and nothing else; a token follows
    all that its sender received in earlier steps; a rank is done after all that it received.

    Raises:
        ProofError: names a rank and whom it does not wait for.
    """
    everyone = (1 << schedule.ranks) - 1
    # for each slot of each rank, and for all that a rank received: the ranks known to take part
    behind: list[dict[int, int]] = [{} for _ in range(schedule.ranks)]
    received = [0] * schedule.ranks
    for step in schedule.steps:
        known: list[int] = []
        for move in step:
            follows = received[move.src] if move.is_token else 0
            for slot in move.read:
                follows |= behind[move.src].get(slot, 0)
            known.append(follows | 1 << move.src)
        for move, knows in zip(step, known, strict=True):
            received[move.dst] |= knows
            for slot in move.write:
                kept = behind[move.dst].get(slot, 0) if move.act is Act.FOLD else 0
                behind[move.dst][slot] = kept | knows
    for rank, knows in enumerate(received):
        if missing := everyone & ~knows & ~(1 << rank):
            absent = [other for other in range(schedule.ranks) if missing >> other & 1]
            listed = ", ".join(map(str, absent[:4])) + (" …" if len(absent) > 4 else "")
            raise ProofError(schedule, f"it may be done before rank {listed} took part", rank=rank)
