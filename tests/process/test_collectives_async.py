"""Operations under way at once: asynchronous calls, several groups, threads, callbacks."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from queue import SimpleQueue

import pytest
import torch
from resources import descriptors, threads
from thread_ranks import HANG, ThreadRanks, socket_groups

import collective
from collective.errors import CollectiveError, GroupClosed, OperationAborted, Refused
from collective.group import Group
from collective.operation import Operation
from collective.work import Work


@pytest.fixture(scope="module", params=["memory", "socket"])
def ranks(request: pytest.FixtureRequest) -> Iterator[ThreadRanks]:
    """Three ranks on threads, over each kind of link."""
    before = descriptors(), threads()
    groups = socket_groups(3) if request.param == "socket" else None
    with ThreadRanks(3, groups=groups) as ranks:
        yield ranks
    assert (descriptors(), threads()) == before


def test_asynchronous_calls_are_waited_for_in_any_order(ranks: ThreadRanks) -> None:
    """Many calls of different kind and size, waited for in another order on each rank."""

    def work(group: Group) -> None:
        works: list[tuple[Work, torch.Tensor, torch.Tensor]] = []
        for index in range(40):
            count = [0, 1, 1000, 200_001][index % 4]
            tensor = torch.full((count,), float(group.rank + index))
            if index % 5 == 3:
                issued = group.broadcast(tensor, index % 3, async_op=True)
                right = torch.full((count,), float(index % 3 + index))
            else:
                issued = group.all_reduce(tensor, async_op=True)
                right = torch.full((count,), 3.0 + 3 * index)
            works.append((issued, tensor, right))
        random.Random(group.rank).shuffle(works)
        for issued, tensor, right in works:
            assert issued.wait()
            assert issued.done()
            assert issued.exception() is None
            assert torch.equal(tensor, right)
            assert issued.resolve() is tensor

    ranks.run(work)


def test_a_synchronous_call_among_asynchronous_ones(ranks: ThreadRanks) -> None:
    """A synchronous call waits its turn behind asynchronous ones and comes out right."""

    def work(group: Group) -> None:
        big = torch.ones(2_000_000)
        issued = group.all_reduce(big, async_op=True)
        small = torch.ones(1)
        group.all_reduce(small)
        assert small.item() == 3.0
        assert issued.done(), "the group's calls run in order"
        assert torch.equal(big, torch.full((2_000_000,), 3.0))

    ranks.run(work)


def test_groups_go_on_independently_of_who_comes_first(ranks: ThreadRanks) -> None:
    """Rank 0 calls group A and then B, rank 1 B and then A, each from one thread per group."""

    def work(group: Group) -> None:
        pairs = [group.subgroup([0, 1, 2], name) for name in ("a", "b")]
        if group.rank == 1:
            pairs.reverse()
        ready = threading.Barrier(2)
        values: SimpleQueue[tuple[str, float]] = SimpleQueue()

        def rounds(sub: Group, late: bool) -> None:
            ready.wait(HANG)
            for index in range(20):
                tensor = torch.full((5000,), float(index))
                sub.all_reduce(tensor)
                assert torch.equal(tensor, torch.full((5000,), 3.0 * index))
            values.put((sub.name, 1.0))

        running = [
            threading.Thread(target=rounds, args=(sub, index == 1))
            for index, sub in enumerate(pairs)
        ]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(HANG)
        assert values.qsize() == 2
        for sub in pairs:
            sub.close()

    ranks.run(work)


def test_interleaved_asynchronous_calls_of_two_groups(ranks: ThreadRanks) -> None:
    """From one thread: A then B on some ranks, B then A on others, all asynchronous."""

    def work(group: Group) -> None:
        a, b = (group.subgroup([0, 1, 2], name) for name in ("c", "d"))
        for sub in (a, b):
            sub.barrier()
        for index in range(10):
            tensors = {id(a): torch.full((70_000,), 1.0), id(b): torch.full((3,), 2.0)}
            order = (a, b) if (group.rank + index) % 2 else (b, a)
            works = [sub.all_reduce(tensors[id(sub)], async_op=True) for sub in order]
            for issued in reversed(works):
                issued.wait()
            assert tensors[id(a)][-1] == 3.0
            assert tensors[id(b)][-1] == 6.0
        for sub in (a, b):
            sub.close()

    ranks.run(work)


def test_callbacks_may_run_further_collectives(ranks: ThreadRanks) -> None:
    """Callbacks that wait for collectives, whose callbacks wait for more, come through."""

    def work(group: Group) -> None:
        subs = [group.subgroup([0, 1, 2], f"cb{index}") for index in range(4)]
        over: SimpleQueue[float] = SimpleQueue()

        def after(work: Work, depth: int, sub: Group) -> None:
            tensor = torch.ones(100)
            issued = sub.all_reduce(tensor, async_op=True)
            issued.wait()
            if depth:
                issued.add_done_callback(lambda done: after(done, depth - 1, sub))
            else:
                over.put(float(tensor[0]))

        for sub in subs:
            sub.all_reduce(torch.ones(1), async_op=True).add_done_callback(
                lambda done, sub=sub: after(done, 3, sub)  # type: ignore[misc]
            )
        assert [over.get(timeout=HANG) for _ in subs] == [3.0] * 4
        for sub in subs:
            sub.close()

    ranks.run(work)


def test_timings_of_a_finished_operation(ranks: ThreadRanks) -> None:
    """Issued, started and done are in order; a finished work's callback runs at once."""

    def work(group: Group) -> None:
        issued = group.all_reduce(torch.ones(1000), async_op=True)
        issued.wait()
        timing = issued.timing
        assert 0 < timing.issued <= timing.started <= timing.done
        assert timing.waited >= 0
        called = threading.Event()
        issued.add_done_callback(lambda _: called.set())
        assert called.wait(HANG)

    ranks.run(work)


@pytest.mark.parametrize(("n", "values"), [(2, 1200), (4, 1800), (8, 2100)])
def test_a_ring_sends_its_share(n: int, values: int) -> None:
    """A ring of N ranks sends 2(N−1)/N·S values per rank; headers stay below 1 % at 1 MiB."""

    def work(group: Group, count: int, dtype: torch.dtype) -> tuple[int, int]:
        links = group._communicator.outlets.values()  # type: ignore[union-attr]
        before = sum(link.sent for link in links)
        issued = group.all_reduce(torch.ones(count, dtype=dtype))
        after = sum(link.sent for link in links)
        return issued.timing.sent, after - before

    with ThreadRanks(n, strategy="ring") as ranks:
        frames = 2 * (n - 1)
        for sent, counted in ranks.run(work, 1200, torch.float64):
            assert sent == counted
            assert values * 8 <= sent < values * 8 + frames * 50 + 200
        share = 2 * (n - 1) * (1 << 20) // n
        for sent, counted in ranks.run(work, 1 << 18, torch.float32):
            assert sent == counted
            assert share <= sent < share * 1.01


def test_an_exception_at_the_end_of_an_operation_poisons_the_group() -> None:
    """What fails only here, after the exchange, is told to all: no half result is used."""
    with ThreadRanks(2, groups=socket_groups(2)) as ranks:
        ranks.run(lambda group: group.barrier())
        smaller = threading.Event()

        def work(group: Group) -> None:
            tensor = torch.ones(4, 2)[:, 0]  # reduced in a copy, which is written back
            if group.rank == 1:
                assert smaller.wait(10)
            issued = group.all_reduce(tensor, async_op=True)
            if group.rank == 0:
                tensor.resize_(3)  # where the result has no room any more
                smaller.set()
            issued.wait()
            group.barrier()

        first, second = ranks.outcomes(work)
        assert first.error is not None
        assert isinstance(second.error, CollectiveError)
        assert "rank 0" in str(second.error)
        for group in ranks.groups:
            with pytest.raises(CollectiveError):
                group.all_reduce(torch.ones(1))


@pytest.mark.parametrize("call", ["all_reduce", "send"])
def test_an_operation_that_cannot_begin_ends_its_group_alone(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that is missing at the start of an asynchronous call is told to all ranks, and the
    thread that serves goes on with the other groups."""
    with ThreadRanks(2) as ranks:
        ranks.run(lambda group: group.barrier())
        start = Operation.start

        def begin(operation: Operation) -> None:
            if operation.communicator is ranks.groups[0]._communicator:
                raise MemoryError("no room")
            start(operation)

        monkeypatch.setattr(Operation, "start", begin)

        def work(group: Group) -> None:
            other = group.subgroup([0, 1], "other")
            if call == "all_reduce":
                issued = group.all_reduce(torch.ones(4), async_op=True)
            elif group.rank == 0:
                issued = group.send(torch.ones(4), 1, async_op=True)
            else:
                issued = group.recv(torch.ones(4), 0, async_op=True)
            with pytest.raises(OperationAborted, match=r"rank 0 .*MemoryError: no room") as caught:
                issued.wait(5)
            assert caught.value.rank == 0
            assert other.all_reduce(torch.ones(1), async_op=True).wait(5)

        ranks.run(work)


def test_an_interrupted_call_poisons_the_group_everywhere() -> None:
    """Ctrl-C inside a call ends it, later calls raise, and the other ranks are told who gave up."""
    with ThreadRanks(2, groups=socket_groups(2)) as ranks:
        ranks.run(lambda group: group.barrier())

        def work(group: Group) -> None:
            if group.rank == 0:
                group._communicator.progress = interrupt  # type: ignore
                try:
                    group.all_reduce(torch.ones(4))
                finally:
                    del group._communicator.progress  # type: ignore[union-attr]
            else:
                group.all_reduce(torch.ones(4))

        def interrupt() -> bool:
            raise KeyboardInterrupt

        first, second = ranks.outcomes(work)
        assert isinstance(first.error, KeyboardInterrupt)
        assert isinstance(second.error, OperationAborted)
        assert "KeyboardInterrupt" in str(second.error)
        assert second.error.rank == 0
        for group in ranks.groups:
            with pytest.raises(OperationAborted):
                group.barrier()


def test_an_observer_that_fails_hurts_nobody(
    ranks: ThreadRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for a result gets it, whatever an observer does."""

    def observer(work: Work) -> None:
        raise ValueError("out of ink")

    monkeypatch.setattr("collective.group.observers", [observer])

    def work(group: Group) -> float:
        tensor = torch.ones(10)
        group.all_reduce(tensor, async_op=True).wait()
        return float(tensor[0])

    assert ranks.run(work) == [3.0] * 3


def test_two_jobs_on_one_machine_do_not_meet() -> None:
    """Two groups of two ranks at once, one summing ones and one sevens, 500 times each."""
    with (
        ThreadRanks(2, groups=socket_groups(2, secret="a")) as ones,
        ThreadRanks(2, groups=socket_groups(2, secret="b")) as sevens,
    ):

        def work(group: Group, value: float) -> None:
            for _ in range(500):
                tensor = torch.full((50,), value)
                group.all_reduce(tensor)
                assert torch.equal(tensor, torch.full((50,), 2 * value))

        other = threading.Thread(target=sevens.run, args=(work, 7.0))
        other.start()
        ones.run(work, 1.0)
        other.join(HANG)
        assert not other.is_alive()


def test_a_closed_group_says_so() -> None:
    """Calls on a closed group raise GroupClosed; closing again does nothing."""
    group = collective.local_group(1)[0]
    group.all_reduce(torch.ones(1)).wait()
    group.close()
    group.close()
    with pytest.raises(GroupClosed, match="closed"):
        group.all_reduce(torch.ones(1))


def test_closing_during_an_operation_ends_it_everywhere() -> None:
    """Waiting calls of the closed group, and of its peers, raise instead of waiting on."""
    with ThreadRanks(2, groups=socket_groups(2)) as ranks:

        def work(group: Group) -> None:
            group.barrier()
            if group.rank == 0:
                issued = group.all_reduce(torch.ones(5), async_op=True)
                group.close()
                issued.wait()
            else:
                group.recv(torch.ones(1), 0)

        for outcome in ranks.outcomes(work):
            assert isinstance(outcome.error, CollectiveError), outcome.error
            assert "rank 0" in str(outcome.error)
            assert outcome.error.operation is None, "it is about none"


@pytest.mark.parametrize("timeout", [60 * 60 * 24 * 30, 1e9])
def test_a_group_may_wait_for_weeks_and_for_years(timeout: float) -> None:
    """No time that can be given is too long for what waits: collectives, messages, downloads."""
    with ThreadRanks(2, groups=socket_groups(2, timeout=timeout)) as ranks:

        def work(group: Group) -> None:
            if group.rank == 0:
                group.expose(torch.ones(3), "w", ttl=timeout)
            else:
                room = torch.zeros(1)
                issued = group.recv(room, 0, async_op=True)
            sub = group.subgroup([0, 1])
            sub.barrier()
            assert group.download(0, "w").tolist() == [1.0] * 3
            if group.rank == 0:
                group.send(torch.ones(1), 1)
            else:
                assert issued.wait(timeout=HANG)
                assert room.item() == 1.0

        ranks.run(work)


def test_subgroups_that_make_no_sense_are_refused(ranks: ThreadRanks) -> None:
    """Members that do not exist, twice the same, without this rank, a taken or odd name."""

    def work(group: Group) -> None:
        for members in ([0, 0, 1, 2], [0, 1, 9], [-1, 0, 1, 2], [(group.rank + 1) % 3]):
            with pytest.raises(ValueError, match=r"ranks|member"):
                group.subgroup(members)
        for one, words in ((1, "list of ranks, not 1"), ("01", "list of ranks, not '01'")):
            with pytest.raises(ValueError, match=words):
                group.subgroup(one)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="letters"):
            group.subgroup([0, 1, 2], "a b")
        with pytest.raises(ValueError, match="timeout is -1"):
            group.subgroup([0, 1, 2], timeout=-1)
        with group.subgroup([0, 1, 2], "same") as one:
            with pytest.raises(ValueError, match="another name"):
                group.subgroup([0, 1, 2], "same")
            one.barrier()
        with group.subgroup([0, 1, 2], "same") as again:
            tensor = torch.ones(1)
            again.all_reduce(tensor)
            assert tensor.item() == 3.0

    ranks.run(work)


def test_a_refused_asynchronous_call_raises_at_once(ranks: ThreadRanks) -> None:
    """A refusal needs no wait: the call itself raises, on the rank whose tensor is at fault."""

    def work(group: Group) -> None:
        with pytest.raises(Refused):
            group.all_reduce(torch.arange(3), "mean", async_op=True)
        group.barrier()

    ranks.run(work)
