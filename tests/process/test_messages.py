"""Point to point: sends and receives that cross, any source, tags, sizes, peers that go away."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from resources import descriptors, threads
from thread_ranks import ThreadRanks, socket_groups

from collective.errors import (
    CollectiveError,
    DeadlineExceeded,
    GroupClosed,
    Mismatch,
    PeerLost,
    Refused,
)
from collective.group import Group


@pytest.fixture(scope="module", params=["memory", "socket"])
def ranks(request: pytest.FixtureRequest) -> Iterator[ThreadRanks]:
    """Three ranks on threads, over each kind of link."""
    before = descriptors(), threads()
    groups = socket_groups(3) if request.param == "socket" else None
    with ThreadRanks(3, groups=groups) as ranks:
        yield ranks
    assert (descriptors(), threads()) == before


@pytest.fixture(params=["memory", "socket"])
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadRanks]:
    """Two fresh ranks, for tests that spoil their group; whoever leaves does not linger."""
    monkeypatch.setenv("UNISONO_LINGER_SECONDS", "0.5")
    groups = socket_groups(2, timeout=10) if request.param == "socket" else None
    with ThreadRanks(2, groups=groups, timeout=10) as ranks:
        ranks.run(lambda group: group.barrier())
        yield ranks


def test_every_size_arrives_unchanged(ranks: ThreadRanks) -> None:
    """Empty, 0-dim, strided, odd and large tensors of several dtypes go from 0 to 1."""
    generator = torch.Generator().manual_seed(3)
    values = [
        torch.zeros(0), torch.tensor(4.0), torch.arange(7).to(torch.bfloat16),
        torch.tensor([True, False]), torch.randn(1_000_003, generator=generator),
        torch.randn(6, 5, generator=generator).t(), torch.arange(9).to(torch.uint16),
    ]  # fmt: skip

    def work(group: Group) -> None:
        for tag, value in enumerate(values):
            if group.rank == 0:
                group.send(value, 1, tag)
            elif group.rank == 1:
                got = torch.empty_like(value)
                assert group.recv(got, 0, tag).source_rank == 0
                assert torch.equal(got, value)

    ranks.run(work)


def test_receives_and_sends_that_cross(ranks: ThreadRanks) -> None:
    """All post receives, then send, with large messages both ways at once: no deadlock."""

    def work(group: Group) -> None:
        others = [peer for peer in range(3) if peer != group.rank]
        rooms = {peer: torch.empty(2_000_000) for peer in others}
        works = [group.recv(rooms[peer], peer, async_op=True) for peer in others]
        works += [
            group.send(torch.full((2_000_000,), float(10 * group.rank + peer)), peer, async_op=True)
            for peer in others
        ]
        for issued in works:
            issued.wait()
        for peer in others:
            assert torch.equal(rooms[peer], torch.full((2_000_000,), 10.0 * peer + group.rank))

    ranks.run(work)


def test_sends_before_their_receives_are_posted(ranks: ThreadRanks) -> None:
    """isend long before the irecv, and the other way round; collectives go on in between."""

    def work(group: Group) -> None:
        nxt, before = (group.rank + 1) % 3, (group.rank - 1) % 3
        early = group.send(torch.full((300_000,), float(group.rank)), nxt, 1, async_op=True)
        room = torch.empty(3)
        late = group.recv(room, before, 2, async_op=True)
        for _ in range(3):
            tensor = torch.ones(100)
            group.all_reduce(tensor)
            assert tensor[0] == 3.0
        assert not early.done()
        assert not late.done()
        group.barrier()
        got = torch.empty(300_000)
        group.recv(got, before, 1)
        assert torch.equal(got, torch.full((300_000,), float(before)))
        early.wait()
        group.send(torch.full((3,), float(group.rank)), nxt, 2, async_op=True)
        late.wait()
        assert room.tolist() == [float(before)] * 3

    ranks.run(work)


def test_tags_are_matched_out_of_order_and_each_in_its_own_order(ranks: ThreadRanks) -> None:
    """Receives by tag in any order; under one tag the n-th send meets the n-th receive."""

    def work(group: Group) -> None:
        if group.rank == 0:
            works = [
                group.send(torch.tensor([tag * 10 + n]), 1, tag, async_op=True)
                for n in range(3)
                for tag in range(4)
            ]
            for issued in works:
                issued.wait()
        elif group.rank == 1:
            for tag in (3, 1, 0, 2):
                for n in range(3):
                    room = torch.zeros(1, dtype=torch.int64)
                    group.recv(room, 0, tag)
                    assert room.item() == tag * 10 + n

    ranks.run(work)


def test_a_tag_that_is_no_number_is_refused(ranks: ThreadRanks) -> None:
    """It is named where it was given, no other rank hears of it, and the group goes on."""

    def work(group: Group) -> None:
        for call in (group.send, group.recv):
            with pytest.raises(Refused, match="tag is a whole number, not 'grads'"):
                call(torch.ones(2), (group.rank + 1) % group.size, tag="grads")  # type: ignore[arg-type]
        group.barrier()

    ranks.run(work)


def test_nothing_is_kept_of_what_was_received(ranks: ThreadRanks) -> None:
    """An offer of a message is forgotten with the receive that meets it, also a refused one."""

    def work(group: Group) -> None:
        if group.rank == 0:
            works = [group.send(torch.ones(2), 1, 21, async_op=True) for _ in range(3)]
            group.barrier()
            works[0].wait()
            with pytest.raises(Refused, match="rank 1"):
                works[1].wait()
            works[2].wait()
        elif group.rank == 1:
            group.barrier()
            communicator = group._communicator
            assert communicator is not None
            group._wiring.engine.call(lambda: communicator.hear(0))
            messaging = communicator.messaging
            assert len(messaging._offers[21]) == 3
            group.recv(torch.zeros(2), 0, 21)
            with pytest.raises(Refused):
                group.recv(BAD, 0, 21)
            group.recv(torch.zeros(2), 0, 21)
            assert not messaging._offers[21]
        else:
            group.barrier()
        group.barrier()

    ranks.run(work)


def test_any_source(ranks: ThreadRanks) -> None:
    """A receive from anyone takes what comes, says from whom, and mixes with named receives."""

    def work(group: Group) -> None:
        for round_ in range(10):
            if group.rank == 0:
                seen = []
                for _ in range(2):
                    room = torch.zeros(1000, dtype=torch.int64)
                    source = group.recv(room, None, 5).source_rank
                    assert torch.equal(room, torch.full((1000,), source * 100 + round_))
                    seen.append(source)
                assert sorted(seen) == [1, 2]
                named = torch.zeros(1, dtype=torch.int64)
                anyone = torch.zeros(1, dtype=torch.int64)
                first = group.recv(named, 2, 6, async_op=True)
                second = group.recv(anyone, None, 6, async_op=True)
                second.wait()
                first.wait()
                assert (named.item(), first.source_rank) == (2, 2)
                assert (anyone.item(), second.source_rank) == (1, 1)
            else:
                group.send(torch.full((1000,), group.rank * 100 + round_), 0, 5)
                group.send(torch.tensor([group.rank]), 0, 6)

    ranks.run(work)


def test_a_receive_from_any_rank_is_served_before_those_behind_it(ranks: ThreadRanks) -> None:
    """Who waits for anyone gets what comes first; a later receive from that rank what comes next,
    and those behind it, which no receive from anyone precedes any more, come in any order."""

    def work(group: Group) -> None:
        if group.rank == 0:
            rooms = [torch.zeros(1, dtype=torch.int64) for _ in range(5)]
            works = [
                group.recv(room, source, 16, async_op=True)
                for room, source in zip(rooms, (None, 1, None, 2, 1), strict=True)
            ]
            group.barrier()  # nobody has sent yet
            for issued in works:
                issued.wait()
            assert [issued.source_rank for issued in works] == [1, 1, 1, 2, 1]
            assert [room.item() for room in rooms] == [10, 11, 12, 20, 13]
        else:
            group.barrier()
            for number in range(4 if group.rank == 1 else 1):
                if group.rank == 2:
                    group.recv(torch.zeros(1), 1, 17)  # rank 1 has been served thrice
                group.send(torch.tensor([group.rank * 10 + number]), 0, 16)
                if (group.rank, number) == (1, 2):
                    group.send(torch.zeros(1), 2, 17)

    ranks.run(work)


def test_a_message_of_another_size_or_dtype_is_an_error_on_both_sides(pair: ThreadRanks) -> None:
    """Sender and receiver are told what each of them called; nothing is cut or filled."""

    def work(group: Group) -> None:
        if group.rank == 0:
            group.send(torch.ones(4), 1)
        else:
            room = torch.zeros(5)
            try:
                group.recv(room, 0)
            finally:
                assert room.tolist() == [0.0] * 5

    for outcome in pair.outcomes(work):
        assert isinstance(outcome.error, Mismatch), outcome.error
        assert "4 × float32" in str(outcome.error)
        assert "5 × float32" in str(outcome.error)
        assert outcome.seconds < 3


@pytest.mark.parametrize("pending", ["send", "recv", "recv of another tag"])
def test_a_peer_that_leaves_in_order_ends_what_waits_for_it(
    pair: ThreadRanks, pending: str
) -> None:
    """A send or receive whose other side has left is an error that names it, soon."""

    def work(group: Group) -> None:
        if group.rank == 1:
            if pending == "recv of another tag":
                group.send(torch.ones(1), 0, 1)
            group.close()
        elif pending == "send":
            group.send(torch.ones(1_000_000), 1)
        else:
            if pending == "recv of another tag":
                group.recv(torch.ones(1), 1, 1)
            group.recv(torch.ones(1), 1, 2)

    outcomes = pair.outcomes(work)
    assert outcomes[1].error is None
    error = outcomes[0].error
    assert isinstance(error, PeerLost)
    assert error.rank == 1
    assert "left the group in order" in str(error)
    assert outcomes[0].seconds < 5


def test_who_closes_a_group_during_an_operation_is_named_once(pair: ThreadRanks) -> None:
    """The other rank learns who closed the group while something was under way."""

    def work(group: Group) -> None:
        if group.rank == 0:
            group.all_reduce(torch.ones(1), async_op=True)
            group.close()
        else:
            group.recv(torch.ones(1), 0)

    error = pair.outcomes(work)[1].error
    assert isinstance(error, GroupClosed)
    assert error.rank == 0
    assert str(error) == "rank 0 closed group default during operations"


def test_asynchronous_messages_survive_nobody_leaving(pair: ThreadRanks) -> None:
    """An asynchronous send whose peer leaves ends with an error and leaves the engine alive."""

    def work(group: Group) -> None:
        if group.rank == 1:
            group.close()
            return
        sub = group.subgroup([0], "alone")
        issued = group.send(torch.ones(10), 1, async_op=True)
        with pytest.raises(PeerLost):
            issued.wait()
        again = sub.all_reduce(torch.ones(5), async_op=True)
        assert again.wait(5)

    for outcome in pair.outcomes(work):
        assert outcome.error is None, outcome.error


def test_a_receive_without_a_send_meets_its_deadline(pair: ThreadRanks) -> None:
    """The deadline's error says what was waited for, and the group is poisoned for both."""

    def work(group: Group) -> None:
        if group.rank == 0:
            group.recv(torch.ones(1), 1, 9, timeout=0.3)
        else:
            group.barrier()

    first, second = pair.outcomes(work)
    assert isinstance(first.error, DeadlineExceeded)
    assert "rank 1" in str(first.error)
    assert "tag 9" in str(first.error)
    assert isinstance(second.error, CollectiveError)


BAD = torch.ones(3).to_sparse()


@pytest.mark.parametrize("refused", ["send", "recv"])
@pytest.mark.parametrize("first", [0, 1])
def test_a_refusal_ends_the_call_of_the_other_side(
    ranks: ThreadRanks, refused: str, first: int
) -> None:
    """What one side refuses ends the matching call of the other one, whichever came first, with
    the reason; the calls around it meet each other as always, and the group goes on."""

    def work(group: Group) -> None:
        tag, mine = 11, ["send", "recv"][group.rank : group.rank + 1]
        if not mine:
            group.barrier()
            group.barrier()
            return
        call = group.send if mine == ["send"] else group.recv
        rooms = [torch.full((3,), value if mine == ["send"] else 0.0) for value in (1.0, 2.0, 3.0)]
        early = [call(rooms[0], 1 - group.rank, tag, async_op=True)] if first == group.rank else []
        if first == group.rank and mine != [refused]:
            early.append(call(rooms[1], 1 - group.rank, tag, async_op=True))
        group.barrier()
        if first != group.rank:
            early = [call(rooms[0], 1 - group.rank, tag, async_op=True)]
        if mine == [refused]:
            with pytest.raises(Refused, match="sparse"):
                call(BAD, 1 - group.rank, tag)
        elif len(early) == 1:
            early.append(call(rooms[1], 1 - group.rank, tag, async_op=True))
        last = call(rooms[2], 1 - group.rank, tag, async_op=True)
        early[0].wait(10)
        if mine != [refused]:
            with pytest.raises(Refused, match=f"rank {1 - group.rank} on node .*{refused}") as told:
                early[1].wait(10)
            assert told.value.rank == 1 - group.rank
        last.wait(10)
        assert rooms[0].tolist() == [1.0] * 3 and rooms[2].tolist() == [3.0] * 3
        group.barrier()

    ranks.run(work)


def test_a_refused_send_ends_a_receive_from_any_rank(ranks: ThreadRanks) -> None:
    """Whoever waits for anyone gets the refusal as what came from that rank."""

    def work(group: Group) -> None:
        if group.rank == 1:
            with pytest.raises(Refused, match=r"rank 2 on node .* refused send to rank 1, tag 12"):
                group.recv(torch.zeros(3), None, 12, timeout=10)
        elif group.rank == 2:
            with pytest.raises(Refused):
                group.send(BAD, 1, 12)
        group.barrier()

    ranks.run(work)


@pytest.mark.parametrize("link", ["memory", "socket"])
def test_a_receive_from_any_rank_ends_when_nobody_is_left(
    link: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That one rank has left is no reason to end it; that all have is, at once."""
    monkeypatch.setenv("UNISONO_LINGER_SECONDS", "0.5")

    def work(group: Group) -> None:
        if group.rank == 2:
            group.close()
        elif group.rank == 1:
            group.send(torch.tensor([5.0]), 0)
            group.close()
        else:
            got = torch.zeros(1)
            assert group.recv(got, None).source_rank == 1
            assert got.item() == 5.0
            group.recv(got, None)

    groups = socket_groups(3, timeout=20) if link == "socket" else None
    with ThreadRanks(3, groups=groups, timeout=20) as ranks:
        ranks.run(lambda group: group.barrier())
        outcome = ranks.outcomes(work)[0]
    assert isinstance(outcome.error, PeerLost), outcome.error
    assert "all other ranks of group default left" in str(outcome.error)
    assert outcome.seconds < 10
