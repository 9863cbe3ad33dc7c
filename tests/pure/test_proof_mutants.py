"""Schedules with a mistake: the proof refuses them, or they are right all the same."""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from schedule_interpreter import FLAT, done_without, expected, run

from collective.proof import ProofError, verify
from collective.schedule import Act, Kind, Move, Schedule, Span
from collective.strategies import TwoLevel, build, collective_of
from collective.strategies.spelling import SPELLINGS
from collective.strategies.two_level import LEVELS

#: contributions are powers of this, so that a sum shows how often each was counted
BASE = 1 << 64
#: for an addition that is commutative but not associative
PRIME = (1 << 61) - 1
Steps = list[list[Move]]
PER_CASE = 80


def at(steps: Steps, rng: random.Random) -> tuple[list[Move], int]:
    step = rng.choice([step for step in steps if step])
    return step, rng.randrange(len(step))


def change_src(steps: Steps, schedule: Schedule, rng: random.Random) -> None:
    step, index = at(steps, rng)
    step[index] = replace(step[index], src=rng.randrange(schedule.ranks))


def change_dst(steps: Steps, schedule: Schedule, rng: random.Random) -> None:
    step, index = at(steps, rng)
    step[index] = replace(step[index], dst=rng.randrange(schedule.ranks))


def turn_around(steps: Steps, schedule: Schedule, rng: random.Random) -> None:
    step, index = at(steps, rng)
    step[index] = replace(step[index], src=step[index].dst, dst=step[index].src)


def change_span(steps: Steps, schedule: Schedule, rng: random.Random) -> None:
    step, index = at(steps, rng)
    span = Span(rng.randrange(schedule.slots + 1), rng.randrange(3))
    which = rng.choice([("read",), ("write",), ("read", "write")])
    step[index] = replace(step[index], **dict.fromkeys(which, span))


def change_act(steps: Steps, schedule: Schedule, rng: random.Random) -> None:
    step, index = at(steps, rng)
    act = Act.COPY if step[index].act is Act.FOLD else Act.FOLD
    step[index] = replace(step[index], act=act)


def drop(steps: Steps, schedule: Schedule, rng: random.Random) -> None:
    step, index = at(steps, rng)
    del step[index]


def duplicate(steps: Steps, schedule: Schedule, rng: random.Random) -> None:
    step, index = at(steps, rng)
    rng.choice(steps).append(step[index])


def swap_steps(steps: Steps, schedule: Schedule, rng: random.Random) -> None:
    one, other = rng.randrange(len(steps)), rng.randrange(len(steps))
    steps[one], steps[other] = steps[other], steps[one]


def merge_steps(steps: Steps, schedule: Schedule, rng: random.Random) -> None:
    number = rng.randrange(len(steps))
    merged = steps.pop(number)
    (steps[number - 1] if steps else steps).extend(merged if steps else [merged])


def insert(steps: Steps, schedule: Schedule, rng: random.Random) -> None:
    read, write = (Span(rng.randrange(max(schedule.slots, 1))) for _ in range(2))
    src, dst = rng.randrange(schedule.ranks), rng.randrange(schedule.ranks)
    move = Move(src, dst, read, rng.choice([read, write]), rng.choice(list(Act)))
    steps.insert(rng.randrange(len(steps) + 1), [move])


MUTATIONS: list[Callable[[Steps, Schedule, random.Random], None]] = [
    change_src,
    change_dst,
    turn_around,
    change_span,
    change_act,
    drop,
    duplicate,
    swap_steps,
    merge_steps,
    insert,
]


def accepted(schedule: Schedule, kind: Kind, root: int) -> bool:
    try:
        verify(schedule, collective_of(kind, schedule.ranks, schedule.chunks, root))
    except ProofError:
        return False
    return True


def fault(schedule: Schedule, kind: Kind, root: int) -> str:
    """What `schedule`, run, does not do of all that the proof promises; empty if it does all."""
    slots = schedule.slots
    powers = [[BASE ** (rank * slots + s) for s in range(slots)] for rank in range(schedule.ranks)]
    for backwards in (False, True):
        after = run(schedule, powers, int.__add__, backwards)
        for (rank, slot), value in expected(kind, root, powers, schedule.chunks).items():
            if after[rank][slot] != value:
                return f"slot {slot} of rank {rank} is wrong"
    if kind is Kind.ALL_REDUCE:
        rng = random.Random(2)
        memory = [[rng.randrange(PRIME) for _ in range(slots)] for _ in range(schedule.ranks)]
        after = run(schedule, memory, lambda a, b: (a * a + b * b + 7 * a * b) % PRIME)
        for slot in range(schedule.chunks):
            if len({after[rank][slot] for rank in range(schedule.ranks)}) != 1:
                return f"slot {slot} is not the same on all ranks"
    for silent in range(schedule.ranks):
        if done := done_without(schedule, silent):
            return f"ranks {done} are done without rank {silent}"
    return ""


class Judged:
    """How many mutants were refused, let through, and refused although they are right."""

    def __init__(self) -> None:
        self.refused = self.let_through = self.wrongly = 0

    def judge(self, original: Schedule, kind: Kind, root: int, rng: random.Random) -> None:
        """Make one mutant; one that is let through must be right."""
        steps = [list(step) for step in original.steps]
        try:
            for mutate in rng.choices(MUTATIONS, k=rng.choice([1, 1, 2])):
                if any(steps):
                    mutate(steps, original, rng)
            mutant = replace(original, steps=tuple(map(tuple, steps)))
        except ValueError:  # refused by a constructor already
            self.refused += 1
            return
        if mutant.steps == original.steps:
            return
        wrong = fault(mutant, kind, root)
        if accepted(mutant, kind, root):
            self.let_through += 1
            assert not wrong, (wrong, mutant)
        else:
            self.refused += 1
            self.wrongly += not wrong

    def done(self) -> None:
        """Neither judge is asleep: most mutants are wrong, and the proof is seldom too strict."""
        said = f"{self.refused} refused ({self.wrongly} right), {self.let_through} let through"
        assert self.refused > self.let_through, said
        assert self.refused > 3 * self.wrongly, said


@pytest.mark.parametrize("kind", list(Kind))
def test_mutants_are_refused_or_right(kind: Kind) -> None:
    """What the proof lets through computes the operation, bit by bit alike, with everyone."""
    judged = Judged()
    for strategy in FLAT[kind]:
        for ranks in range(2, 6):
            rng = random.Random(f"{kind.value} {strategy} {ranks}")
            for _ in range(PER_CASE):
                root = rng.randrange(ranks)
                judged.judge(build(strategy, kind, ranks, root), kind, root, rng)
    judged.done()


@pytest.mark.parametrize("kind", list(LEVELS))
def test_mutants_of_two_levels_are_refused_or_right(kind: Kind) -> None:
    """The same for schedules that are composed of several, half of them with two on nodes."""
    judged = Judged()
    nodes = [[0, 1, 2], [3, 4]]
    inside, across = ([SPELLINGS[name] for name in level] for level in LEVELS[kind])
    for number, (local, between) in enumerate(itertools.product(inside, across)):
        own = {"b": inside[(number // 2) % len(inside)]} if number % 2 else {}
        strategy = TwoLevel(local, between, own)
        rng = random.Random(f"{kind.value} {strategy}")
        for _ in range(12):
            root = rng.randrange(5)
            schedule = build(strategy, kind, 5, root, nodes=nodes, names="ab")
            judged.judge(schedule, kind, root, rng)
    judged.done()
