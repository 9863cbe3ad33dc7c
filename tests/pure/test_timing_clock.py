"""The step clock, on a time that the test sets."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collective.timing_clock import MAX_DETAIL, StepClock
from collective.timing_intervals import intersection, length, union
from collective.timing_report import columns
from collective.timing_rows import RUNNING, Row


@dataclass
class Timing:
    issued: float
    started: float | None = None
    done: float | None = None
    waited: float = 0.0
    sent: int = 0


class Loop:
    """A training loop whose time passes only by `spend`."""

    def __init__(self, warmup: int = 0) -> None:
        self.time = 100.0
        self.rows: list[Row] = []
        self.clock = StepClock(
            self.rows.append, warmup=warmup, now=lambda: self.time, wall=lambda: 5000.0
        )

    def spend(self, seconds: float) -> None:
        self.time += seconds

    def optimizer(self, seconds: float, key: int = 1) -> None:
        self.clock.optimizer_begins(key)
        self.spend(seconds)
        self.clock.optimizer_ends(key)

    def blocking(self, seconds: float, waited: float = 0.0, sent: int = 0) -> None:
        timing = Timing(self.time, self.time, None, waited, sent)
        self.clock.issued(timing)
        start = self.time
        self.spend(seconds)
        timing.done = self.time
        self.clock.blocked(start, self.time)

    def step(self, data: float, compute: float, optimizer: float) -> None:
        self.spend(data)
        self.clock.forward()
        self.spend(compute)
        self.optimizer(optimizer)


def parts(row: Row) -> tuple[float, ...]:
    return tuple(
        pytest.approx(getattr(row, name), abs=1e-9)
        for name in ("total", "data", "compute", "exposed", "optimizer")
    )


def test_the_four_parts_of_a_step_add_up_to_it() -> None:
    """Data, compute, exposed communication and optimizer are told apart and sum to the total."""
    loop = Loop()
    loop.step(1, 1, 1)
    loop.spend(3)
    loop.clock.forward()
    loop.spend(5)
    loop.blocking(7, waited=2, sent=64)
    loop.optimizer(11)
    loop.clock.forward()
    first, second = loop.rows
    # the first step begins with its first forward
    assert parts(first) == (2, 0, 1, 0, 1)
    assert parts(second) == (26, 3, 5, 7, 11)
    assert (second.waited, second.communication, second.sent) == (2, 7, 64)
    assert (first.step, second.step) == (1, 2)
    assert second.at == pytest.approx(5000 + loop.time - 100)


def test_first_steps_are_marked_as_warmup() -> None:
    """Only the steps behind the warm-up carry the label of ordinary steps."""
    loop = Loop(warmup=2)
    for _ in range(4):
        loop.step(1, 1, 1)
    loop.clock.idle(0.0)
    assert [row.label for row in loop.rows] == ["warmup", "warmup", "step", "step"]


def test_a_hidden_collective_is_communication_but_not_exposed() -> None:
    """Of a backward's collectives only what outlasts the backward is exposed."""
    loop = Loop()
    loop.step(0, 1, 1)
    loop.clock.forward()
    loop.spend(2)
    tail = loop.clock.tail()
    tail.backward_end = RUNNING
    hidden = Timing(loop.time, loop.time)
    loop.clock.issued(hidden)
    tail.timings.append(hidden)
    tail.last_issue = loop.time
    loop.spend(4)
    hidden.done = loop.time
    last = Timing(loop.time, loop.time, None, 1.5)
    loop.clock.issued(last)
    tail.timings.append(last)
    tail.last_issue = loop.time
    loop.spend(1)
    tail.backward_end = loop.time
    loop.spend(3)
    last.done = loop.time
    loop.optimizer(1)
    loop.clock.forward()
    row = loop.rows[-1]
    assert parts(row) == (11, 0, 7, 3, 1)
    assert row.communication == 8
    # it waited 1.5 s from its start, of which the backward hid the first second
    assert row.waited == pytest.approx(0.5)


def test_communication_in_the_gap_and_in_the_optimizer_is_taken_out_of_them() -> None:
    """A collective between two steps is exposed, not data; one in the optimizer likewise."""
    loop = Loop()
    loop.step(0, 1, 1)
    loop.blocking(2)
    loop.spend(1)
    loop.clock.forward()
    loop.spend(1)
    loop.clock.optimizer_begins(1)
    loop.spend(1)
    loop.blocking(4)
    loop.clock.optimizer_ends(1)
    loop.clock.forward()
    assert parts(loop.rows[-1]) == (9, 1, 1, 6, 1)


def test_optimizers_that_follow_each_other_make_one_step() -> None:
    """Two optimizers without a forward between them end one step, at the end of the second."""
    loop = Loop()
    loop.clock.forward()
    loop.spend(1)
    loop.optimizer(2, key=1)
    loop.spend(1)
    loop.optimizer(3, key=2)
    loop.spend(5)
    loop.clock.forward()
    assert len(loop.rows) == 1
    assert parts(loop.rows[0]) == (7, 0, 2, 0, 5)


def test_nested_optimizers_count_once() -> None:
    """An optimizer that calls another one (ZeroRedundancyOptimizer) is one optimizer step."""
    loop = Loop()
    loop.clock.forward()
    loop.clock.optimizer_begins(1)
    loop.spend(1)
    loop.optimizer(2, key=2)
    loop.spend(1)
    loop.clock.optimizer_ends(1)
    loop.clock.idle(0.0)
    assert [parts(row) for row in loop.rows] == [(4, 0, 0, 0, 4)]


def test_an_optimizer_step_that_raised_does_not_end_a_step() -> None:
    """After an exception inside an optimizer the next complete step is counted once."""
    loop = Loop()
    loop.clock.forward()
    loop.clock.optimizer_begins(1)
    loop.spend(1)
    loop.optimizer(1, key=1)
    loop.clock.idle(0.0)
    assert len(loop.rows) == 1


def test_explicit_steps_replace_the_optimizer() -> None:
    """Once a program ends its steps itself, optimizers do not."""
    loop = Loop()
    loop.step(0, 1, 1)
    loop.clock.step()
    for _ in range(2):
        loop.spend(1)
        loop.clock.forward()
        loop.spend(1)
        loop.optimizer(1, key=1)
        loop.clock.forward()
        loop.spend(1)
        loop.optimizer(1, key=2)
        loop.clock.step()
    assert [parts(row) for row in loop.rows] == [
        (2, 0, 1, 0, 1),
        (5, 1, 2, 0, 2),
        (5, 1, 2, 0, 2),
    ]


def test_a_phase_is_cut_out_and_shown_once() -> None:
    """An evaluation between two steps is a row of its own and in neither step."""
    loop = Loop()
    loop.step(0, 1, 1)
    loop.spend(1)
    before = loop.clock.enter("eval")
    loop.spend(20)
    loop.blocking(10)
    assert loop.clock.forward() is False
    loop.clock.leave(before)
    assert [(row.label, row.step) for row in loop.rows] == [("step", 1), ("eval", 1)]
    assert parts(loop.rows[1]) == (30, 0, 20, 10, 0)
    loop.spend(1)
    loop.clock.forward()
    loop.spend(1)
    loop.optimizer(1)
    loop.clock.idle(0.0)
    assert parts(loop.rows[2]) == (4, 2, 1, 0, 1)


def test_an_evaluation_is_seen_without_being_told() -> None:
    """Forwards without gradients of the trained module are a phase until training goes on."""
    loop = Loop()
    loop.step(0, 1, 1)
    loop.spend(1)
    for _ in range(3):
        loop.clock.evaluation()
        loop.spend(2)
    loop.clock.forward()
    loop.spend(1)
    loop.optimizer(1)
    loop.clock.idle(0.0)
    assert [row.label for row in loop.rows] == ["step", "eval", "step"]
    assert parts(loop.rows[1]) == (6, 0, 6, 0, 0)
    assert parts(loop.rows[2]) == (3, 1, 1, 0, 1)


def test_optimizer_steps_inside_a_phase_are_part_of_it() -> None:
    """A phase in which something is trained counts no steps."""
    loop = Loop()
    loop.step(0, 1, 1)
    before = loop.clock.enter("tune")
    loop.step(1, 1, 1)
    loop.clock.leave(before)
    loop.step(0, 1, 1)
    loop.clock.idle(0.0)
    assert [row.label for row in loop.rows] == ["step", "tune", "step"]


def test_the_last_step_is_closed_when_nothing_follows() -> None:
    """A step is reported although no forward comes after it, but not before it is old enough."""
    loop = Loop()
    loop.step(0, 1, 1)
    assert loop.clock.idle(1.0) is True and loop.rows == []
    loop.spend(1)
    assert loop.clock.idle(1.0) is False
    assert parts(loop.rows[0]) == (2, 0, 1, 0, 1)


def test_detail_is_bounded_and_sums_stay_right() -> None:
    """A step with very many collectives keeps a bounded list and the same sums."""
    loop = Loop()
    loop.clock.forward()
    count = 3 * MAX_DETAIL
    for _ in range(count):
        loop.spend(0.5)
        loop.blocking(0.25, sent=1)
        assert len(loop.clock._timings) <= MAX_DETAIL + 1
        assert len(loop.clock._blocked) <= MAX_DETAIL + 1
    loop.optimizer(1)
    loop.clock.idle(0.0)
    row = loop.rows[0]
    assert parts(row) == (count * 0.75 + 1, 0, count * 0.5, count * 0.25, 1)
    assert row.sent == count


def test_the_current_step_is_the_one_that_goes_on() -> None:
    """What is logged before and right behind an optimizer step belongs to that step."""
    loop = Loop()
    assert loop.clock.current == 0
    loop.clock.forward()
    assert loop.clock.current == 1
    loop.optimizer(1)
    assert loop.clock.current == 1
    loop.clock.forward()
    assert loop.clock.current == 2


def test_columns_have_one_entry_per_row() -> None:
    """A batch carries every figure of every row, in order."""
    loop = Loop()
    loop.step(0, 1, 1)
    loop.step(1, 2, 3)
    loop.clock.idle(0.0)
    steps = columns("a-1", 3, loop.rows)
    assert (steps.rank, steps.step, steps.total) == (3, [1, 2], [2.0, 6.0])
    assert (steps.data, steps.compute, steps.optimizer) == ([0.0, 1.0], [1.0, 2.0], [1.0, 3.0])


moments = st.integers(0, 40)
intervals = st.lists(st.tuples(moments, moments), max_size=8)


@given(intervals, intervals)
def test_interval_arithmetic_agrees_with_sets_of_seconds(
    one: list[tuple[int, int]], two: list[tuple[int, int]]
) -> None:
    """Union, intersection and length are what they are on sets of whole seconds."""

    def seconds(parts: list[tuple[float, float]]) -> set[int]:
        return {second for start, stop in parts for second in range(int(start), int(stop))}

    first, second = union(one), union(two)
    assert seconds(first) == seconds(one)
    assert length(first) == len(seconds(one))
    both = intersection(first, second)
    assert seconds(both) == seconds(one) & seconds(two)
    assert length(both) == len(seconds(one) & seconds(two))
