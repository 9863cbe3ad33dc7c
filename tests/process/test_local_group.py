"""Peers of one process: a device each, called from one thread in a loop or from a thread each."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from resources import descriptors, threads

import collective
from collective.errors import CollectiveError, GroupClosed, Refused

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def peers() -> Iterator[collective.Peers]:
    """Four peers; nothing of them is left afterwards."""
    before = descriptors(), threads()
    with collective.local_group(["cpu", torch.device("cpu"), "cpu:0", "cpu"], timeout=20) as peers:
        yield peers
    assert (descriptors(), threads()) == before


def test_peers_know_their_devices(peers: collective.Peers) -> None:
    """Ranks follow the list, and so do those of a subgroup; a number means so many CPUs."""
    assert [(peer.rank, peer.size, peer.device) for peer in peers] == [
        (rank, 4, torch.device("cpu")) for rank in range(4)
    ]
    assert peers[2].subgroup([2, 1]).device == torch.device("cpu")
    with collective.local_group(2) as two:
        assert [peer.device for peer in two] == [torch.device("cpu")] * 2


@pytest.mark.parametrize("strategy", ["auto", "tree:2", "ring", "direct"])
def test_one_thread_calls_all_peers_in_a_loop(strategy: str) -> None:
    """Calls return at once; every handle resolves to the tensor that was given, with the result."""
    with collective.local_group(["cpu"] * 3, timeout=20, strategy=strategy) as peers:
        for count in (1, 5, 300_001):
            tensors = [torch.full((count,), rank + 1.0) for rank in range(3)]
            handles = [peer.all_reduce(tensors[peer.rank], "mean") for peer in peers]
            for handle, tensor in zip(handles, tensors, strict=True):
                assert handle.resolve() is tensor
                assert torch.equal(tensor, torch.full((count,), 2.0))


def test_every_call_can_be_made_in_a_loop(peers: collective.Peers) -> None:
    """No call of a peer waits for another peer's call, so one thread never stands still."""
    spread = [peer.broadcast(torch.full((9,), float(peer.rank)), 2) for peer in peers]
    sums = [peer.reduce(torch.full((9,), float(peer.rank)), 1) for peer in peers]
    everything = [
        peer.all_gather(torch.zeros(4), torch.tensor([1.0 * peer.rank])) for peer in peers
    ]
    shares = [peer.reduce_scatter(torch.zeros(1), torch.arange(4.0)) for peer in peers]
    there = [
        peer.gather(torch.tensor([peer.rank]), torch.zeros(4, dtype=torch.int64) if not peer.rank
                    else None, 0)
        for peer in peers
    ]  # fmt: skip
    given = [
        peer.scatter(torch.zeros(1), torch.arange(4.0) if peer.rank == 3 else None, 3)
        for peer in peers
    ]
    swapped = [peer.all_to_all(torch.zeros(4), torch.full((4,), 1.0 * peer.rank)) for peer in peers]
    met = [peer.barrier() for peer in peers]
    got = peers[0].recv(torch.zeros(2), 3)
    sent = peers[3].send(torch.ones(2), 0)
    halves = [peers[rank].subgroup([3, 1], "odd") for rank in (3, 1)]
    odd = [half.all_reduce(torch.full((2,), 1.0 + half.rank)) for half in halves]
    assert [work.resolve().tolist() for work in spread] == [[2.0] * 9] * 4
    assert sums[1].resolve().tolist() == [6.0] * 9
    assert [work.resolve().tolist() for work in everything] == [[0.0, 1.0, 2.0, 3.0]] * 4
    assert [work.resolve().tolist() for work in shares] == [[0.0], [4.0], [8.0], [12.0]]
    assert there[0].resolve().tolist() == [0, 1, 2, 3]
    assert [work.resolve().tolist() for work in given] == [[0.0], [1.0], [2.0], [3.0]]
    assert [work.resolve().tolist() for work in swapped] == [[0.0, 1.0, 2.0, 3.0]] * 4
    assert all(work.wait() for work in met)
    assert sent.wait() and got.resolve().tolist() == [1.0, 1.0]
    assert got.source_rank == 3
    assert [work.resolve().tolist() for work in odd] == [[3.0] * 2] * 2


def test_handles_may_be_resolved_much_later(peers: collective.Peers) -> None:
    """Two hundred rounds are under way before the first is looked at; tensors stay alive."""
    handles = [
        [peer.all_reduce(torch.full((997,), float(peer.rank + index))) for peer in peers]
        for index in range(200)
    ]
    for index, round_ in reversed(list(enumerate(handles))):
        for handle in round_:
            assert torch.equal(handle.resolve(), torch.full((997,), 6.0 + 4 * index))


def test_a_thread_for_each_peer_may_wait_in_its_calls(peers: collective.Peers) -> None:
    """With async_op=False a call is over when it returns."""
    seen: list[bool] = []

    def work(peer: collective.Group) -> None:
        for index in range(50):
            tensor = torch.full((100,), float(index))
            peer.all_reduce(tensor, async_op=False)
            seen.append(torch.equal(tensor, torch.full((100,), 4.0 * index)))

    running = [threading.Thread(target=work, args=(peer,)) for peer in peers]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(20)
    assert seen == [True] * 200


def test_a_refused_call_in_a_loop_leaves_the_peers_usable(peers: collective.Peers) -> None:
    """The peer that refuses raises in the call, the others' handles tell who and why."""
    handles = [peer.all_reduce(torch.ones(3)) for peer in peers[:3]]
    with pytest.raises(Refused, match="mean of int64"):
        peers[3].all_reduce(torch.arange(3), "mean")
    for handle in handles:
        with pytest.raises(Refused, match="rank 3"):
            handle.resolve()
    again = [peer.all_reduce(torch.ones(1)) for peer in peers]
    assert [work.resolve().item() for work in again] == [4.0] * 4


def test_results_may_lie_where_the_values_came_from(peers: collective.Peers) -> None:
    """An all-to-all or scatter onto its own input is right; one memory for two results is not."""
    rows = [torch.arange(4.0)[:, None].repeat(1, 30_001) + 10 * rank for rank in range(4)]
    for work in [peer.all_to_all(list(rows[peer.rank]), list(rows[peer.rank])) for peer in peers]:
        work.wait()
    for rank, row in enumerate(rows):
        right = torch.tensor([rank, 10.0 + rank, 20 + rank, 30 + rank])[:, None].repeat(1, 30_001)
        assert torch.equal(row, right)
    given = list(torch.arange(4.0))
    outputs = [given[1] if rank == 0 else torch.zeros(()) for rank in range(4)]
    works = [peer.scatter(outputs[peer.rank], None if peer.rank else given, 0) for peer in peers]
    assert [work.resolve().item() for work in works] == [0.0, 1.0, 2.0, 3.0]
    one = torch.zeros(2)
    for peer in peers:
        with pytest.raises(Refused, match=r"outputs\[0\] and outputs\[1\] share memory"):
            peer.all_gather([one] * 4, torch.ones(2))
        with pytest.raises(Refused, match="share memory"):
            peer.all_to_all([one] * 4, [torch.ones(2)] * 4)
    matrix = torch.zeros(3, 4)  # columns lie between each other, but apart
    works = [
        peer.all_gather(list(matrix.t()) if peer.rank == 2 else torch.zeros(12),
                        torch.full((3,), float(peer.rank)))
        for peer in peers
    ]  # fmt: skip
    for work in works:
        work.wait()
    assert torch.equal(matrix, torch.arange(4.0).repeat(3, 1))


def test_a_mismatch_in_a_loop_is_told_by_every_handle() -> None:
    """Different shapes end the group for all peers, without a hang."""
    with collective.local_group(["cpu"] * 3, timeout=20) as peers:
        handles = [peer.all_reduce(torch.ones(3 + peer.rank % 2)) for peer in peers]
        for handle in handles:
            with pytest.raises(CollectiveError, match=r"\[3\].*\[4\]|\[4\].*\[3\]"):
                handle.resolve()


def test_leaving_the_block_closes_all_peers() -> None:
    """Also by an exception, in the middle of operations: handles end, nothing is left."""
    before = descriptors(), threads()
    peers = collective.local_group(["cpu"] * 3)

    def begin_and_fail() -> None:
        with peers:
            handles.append(peers[0].all_reduce(torch.ones(5)))
            raise ZeroDivisionError

    handles: list[collective.Work] = []
    with pytest.raises(ZeroDivisionError):
        begin_and_fail()
    with pytest.raises(CollectiveError):
        handles[0].resolve()
    with pytest.raises(GroupClosed):
        peers[1].barrier()
    peers.close()
    assert (descriptors(), threads()) == before


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        (0, "at least one rank"),
        ([], "at least one rank"),
        (-1, "at least one rank"),
        ("cpu", r"a list of devices or a number, such as \['cpu', 'cpu'\], not 'cpu'"),
        (1.5, r"a list of devices or a number, such as \['cpu', 'cpu'\], not 1.5"),
        (["cpu", "nonsense"], "'nonsense' is no device"),
        (["cpu", "meta"], "tensors on meta cannot"),
        (["cuda:99"], "no device cuda:99: this process sees"),
    ],
)
def test_devices_that_make_no_group_are_refused(devices: object, words: str) -> None:
    """Each refusal names the device and what there is."""
    with pytest.raises(ValueError, match=words):
        collective.local_group(devices)  # type: ignore[arg-type]


def test_a_strategy_of_a_local_group_names_no_other_node() -> None:
    """Unknown strategies and nodes are refused before anything is made."""
    before = descriptors()
    for strategy in ("wring", "local=ring,local@w2=chain,between=ring"):
        with pytest.raises(ValueError, match=r"no strategy 'wring'|names the node 'w2'"):
            collective.local_group(2, strategy=strategy)
    with pytest.raises(ValueError, match="timeout is 0;"):
        collective.local_group(2, timeout=0)
    assert descriptors() == before
