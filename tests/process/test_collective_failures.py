"""Ranks that die, stop, leave, fork or stand still: the others are told who, soon."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import native_jobs as jobs
import pytest
from forked_ranks import ForkedRanks
from ranks import Outcome, RankPool
from thread_ranks import addresses
from waiting import eventually

#: seconds within which a killed rank must be noticed
SOON = 5.0


@pytest.fixture(scope="module")
def forked() -> Iterator[ForkedRanks]:
    """Three rank processes, which are replaced for each test."""
    with ForkedRanks(3) as made:
        yield made


@pytest.fixture(scope="module")
def healthy() -> Iterator[RankPool]:
    """Three processes in one group, for tests that leave it usable."""
    with ForkedRanks(3) as made:
        made.run(jobs.join, addresses(3), 20.0)
        yield made
        assert made.run(jobs.leave) == [True] * 3


@pytest.fixture
def pool(forked: ForkedRanks) -> Iterator[RankPool]:
    """Three fresh processes in one group."""
    for rank, process in enumerate(forked.processes):
        if process.poll() is None:
            process.kill()
        forked.revive(rank)
    forked.run(jobs.join, addresses(3), 20.0)
    yield forked
    for process in forked.processes:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)


def alive(outcomes: list[Outcome | None]) -> list[Outcome]:
    assert all(outcome is not None for outcome in outcomes)
    return [outcome for outcome in outcomes if outcome is not None]


def in_its_loop(pool: RankPool, rank: int) -> None:
    """Wait until a rank has used some CPU time in what was just started."""

    def ticks() -> int:
        with open(f"/proc/{pool.processes[rank].pid}/stat") as file:
            return sum(map(int, file.read().rpartition(")")[2].split()[11:13]))

    before = ticks()
    eventually(lambda: ticks() > before + 20, 20, "the rank works")


def test_a_rank_killed_in_a_loop_is_named_by_all_others(pool: RankPool) -> None:
    """SIGKILL in the middle: both survivors raise PeerLost within seconds, with rank and node."""
    pool.start(jobs.loop)
    in_its_loop(pool, 2)
    pool.processes[2].kill()
    for outcome in alive(pool.collect([0, 1], timeout=SOON)):
        assert outcome.kind == "PeerLost"
        assert outcome.rank == 2
        assert "rank 2 on node 127." in outcome.message
        assert outcome.operation == "all_reduce"
        assert outcome.sequence is not None
    for outcome in alive(pool.outcomes(jobs.once, ranks=[0, 1], timeout=SOON)):
        assert outcome.kind == "PeerLost"


def test_a_rank_killed_before_the_first_collective(pool: RankPool) -> None:
    """Also of a subgroup that has no links yet: whoever waits for the dead rank raises soon."""
    pool.processes[1].kill()
    pool.processes[1].wait()
    late = alive(pool.outcomes(jobs.first_of_a_subgroup, [0, 1, 2], ranks=[0, 2], timeout=SOON))
    for outcome in late:
        assert outcome.kind == "PeerLost"
        assert "rank 1 on node 127." in outcome.message
    for outcome in alive(pool.outcomes(jobs.once, ranks=[0, 2], timeout=SOON)):
        assert outcome.kind == "PeerLost"
        assert outcome.rank == 1


def test_a_stopped_rank_is_named_at_the_deadline(pool: RankPool) -> None:
    """SIGSTOP cannot be told from slowness; the deadline says who is missing."""
    pool.run(jobs.once)
    pool.processes[2].send_signal(signal.SIGSTOP)
    outcomes = alive(pool.outcomes(jobs.once, 1.5, ranks=[0, 1], timeout=10))
    for outcome in outcomes:
        assert outcome.kind == "DeadlineExceeded"
        assert outcome.rank == 2
        assert "rank 2 on node 127." in outcome.message
        assert "operation 2" in outcome.message


def unread(host: str) -> int:
    """Bytes that connections of `host` have accepted for sending and not delivered."""
    number = int.from_bytes(socket.inet_aton(host), "little")
    total = 0
    with open("/proc/net/tcp") as file:
        for line in list(file)[1:]:
            fields = line.split()
            if int(fields[1].partition(":")[0], 16) == number:
                total += int(fields[4].partition(":")[0], 16)
    return total


def test_a_receiver_that_stands_still_costs_nothing(healthy: RankPool) -> None:
    """A pause in a stream of 100 MB, shorter than the deadline, is waited out in bounded memory."""
    healthy.run(jobs.once)
    healthy.start(jobs.stop_while_it_comes, 25_000_000, ranks=[1])
    healthy.start(jobs.stream, 25_000_000, ranks=[0])
    host = alive(healthy.outcomes(jobs.host, ranks=[2]))[0].value
    eventually(lambda: unread(host) > 100_000, 30, "the stream runs into the stopped receiver")
    healthy.processes[1].send_signal(signal.SIGCONT)
    sender, receiver = alive(healthy.collect([0, 1], timeout=30))
    assert sender.kinds == receiver.kinds == [], sender.traceback + receiver.traceback
    last, rise = sender.value
    assert last == 1.0
    assert rise < 32 << 20, "no copy of what waits to be sent"
    assert receiver.value == 25_000_000.0


def test_who_was_stopped_beyond_its_deadline_looks_at_what_has_come_first(
    healthy: RankPool,
) -> None:
    """What was there in time counts, though nobody could read it then."""
    healthy.run(jobs.once)
    start = time.monotonic()
    healthy.start(jobs.receive, 1000, 1.0, ranks=[1])
    waits_in = Path(f"/proc/{healthy.processes[1].pid}/wchan")
    eventually(lambda: "poll" in waits_in.read_text(), 5, "it waits for its links")
    healthy.processes[1].send_signal(signal.SIGSTOP)
    (sender,) = alive(healthy.outcomes(jobs.stream, 1000, ranks=[0]))
    assert sender.kinds == [], sender.traceback
    eventually(lambda: time.monotonic() > start + 1.5, 5, "the deadline passes")
    healthy.processes[1].send_signal(signal.SIGCONT)
    (receiver,) = alive(healthy.collect([1], timeout=30))
    assert receiver.kinds == [], receiver.traceback
    assert receiver.value == 1000.0


def test_an_interrupt_is_told_to_the_others(pool: RankPool) -> None:
    """Ctrl-C of one rank while it waits poisons the group on all of them."""
    pool.start(jobs.interrupted_in_the_middle, ranks=[0])
    first = alive(pool.collect([0], timeout=15))[0]
    assert "KeyboardInterrupt" in first.value
    for outcome in alive(pool.outcomes(jobs.once, ranks=[1, 2], timeout=SOON)):
        assert outcome.kind == "OperationAborted"
        assert outcome.rank == 0
        assert "KeyboardInterrupt" in outcome.message


def test_a_held_interpreter_is_no_loss(healthy: RankPool) -> None:
    """Seconds in a C call that keeps the interpreter, between two calls: nobody is given up."""
    assert healthy.run(jobs.once) == [3.0] * 3
    healthy.start(jobs.hold_the_interpreter, 6, ranks=[1])
    healthy.start(jobs.both, ranks=[0, 2])
    held, *others = alive(healthy.collect([1, 0, 2], timeout=30))
    assert held.kinds == [], held.traceback
    assert [outcome.value for outcome in others] == [[3.0, 3.0]] * 2


def test_a_forked_child_holds_no_socket(pool: RankPool) -> None:
    """A data loader's worker does not hide its parent's death, and cannot use its group."""
    pool.run(jobs.once)
    held, errors = alive(pool.outcomes(jobs.fork_a_child, ranks=[2], timeout=20))[0].value
    assert len(held) <= 1, f"more than the pool's own connection: {held}"
    assert len(errors) == 2
    assert all(error.startswith("GroupClosed") and "fork" in error for error in errors)
    child = alive(pool.outcomes(jobs.child_pid, ranks=[2]))[0].value
    try:
        assert pool.run(jobs.once) == [3.0] * 3, "the parent's group still works"
        pool.start(jobs.once, ranks=[0, 1])
        pool.processes[2].kill()
        for outcome in alive(pool.collect([0, 1], timeout=SOON)):
            assert outcome.kind == "PeerLost"
            assert outcome.rank == 2
        os.kill(child, 0)  # it lives
    finally:
        os.kill(child, signal.SIGKILL)
