"""A peer that is killed at every single step."""

from __future__ import annotations

import itertools
import signal

import fault_jobs as jobs
import pytest
from faults_cluster import SOON, Cluster, check_survivors

from collective.links.wire import FrameKind

pytestmark = pytest.mark.timeout(100)


STRATEGIES = {
    "ring": ("ring", [2]),
    "tree": ("tree:2", [0, 1, 3]),
    "double_tree": ("double_tree", [1]),
    "halving_doubling": ("halving_doubling", [3]),
    "two levels": ("local=ring,between=tree:2", [0, 3]),
    "gloo": ("local=ring,between=gloo", [0]),
}


@pytest.mark.parametrize(
    ("link", "name"),
    [
        *itertools.product(["sockets", "shared memory", "shared tensors"], STRATEGIES),
        ("three connections", "ring"),
        ("masked", "ring"),
    ],
)
def test_a_peer_is_killed_at_every_single_step(cluster: Cluster, name: str, link: str) -> None:
    """Whichever frame a rank dies in, all others raise with its name, or had the right sum."""
    strategy, victims = STRATEGIES[name]
    elements = 64  # of 8 bytes: a ring has two segments per chunk, a tree two in all
    segment = 64 if strategy == "ring" else 256
    how = {"shared": link.startswith("shared"), "lent": link == "shared tensors", "way": link}
    cases = 0
    for victim in victims:
        for event in ("sent", "received"):
            cluster.join(strategy, segment=segment, **how)
            counted = cluster.ranks.run(jobs.reduce_and_meet, victim, event, None, elements)
            assert all(seen.right == 2 and not seen.wrong for seen in counted), counted
            frames = counted[victim].frames
            assert frames >= 2
            cluster.leave()
            for at in range(1, frames + 1):
                cluster.join(strategy, segment=segment, **how)
                found = cluster.ranks.outcomes(
                    jobs.reduce_and_meet, victim, event, at, elements, timeout=2 * SOON
                )
                assert check_survivors(list(found), victim) == 3
                cluster.leave(victim)
                cases += 1
    assert cases >= 8


@pytest.mark.parametrize("shared", [False, True], ids=["sockets", "shared memory"])
def test_a_loss_is_the_cause_of_what_ranks_disagree_on_after_it(
    cluster: Cluster, shared: bool
) -> None:
    """Who comes with another call after a rank has died is told of the loss, as the others are."""
    cluster.join("centralized", shared=shared)
    cluster.ranks.processes[3].kill()
    cluster.ranks.processes[3].wait()
    others = cluster.ranks.outcomes(jobs.disagree, ranks=[1, 2], timeout=2 * SOON)
    late = cluster.ranks.outcomes(jobs.disagree, ranks=[0], timeout=2 * SOON)
    assert check_survivors([*late, *others, None], 3) == 3
    cluster.leave(3)


@pytest.mark.parametrize("shared", [False, True], ids=["sockets", "shared memory"])
def test_who_waits_for_a_tensor_hears_of_a_loss(cluster: Cluster, shared: bool) -> None:
    """A rank that only waits for a download is told at once that the group has lost a third one."""
    cluster.join(shared=shared)
    cluster.ranks.start(jobs.wait_for_a_tensor, ranks=[0, 1, 3])
    cluster.ranks.processes[2].kill()
    found = cluster.ranks.collect([0, 1, 3], timeout=2 * SOON)
    assert check_survivors([found[0], found[1], None, found[2]], 2) == 3
    cluster.leave(2)


@pytest.mark.parametrize("stopped", [1, 2])
def test_a_stopped_neighbour_is_named_at_the_deadline(cluster: Cluster, stopped: int) -> None:
    """SIGSTOP of a rank that others reach through shared memory, or through sockets: on two levels
    too all of them raise at the deadline, and say who does not answer."""
    cluster.join("local=ring,between=tree:2")
    process, others = cluster.ranks.processes[stopped], [r for r in range(4) if r != stopped]
    process.send_signal(signal.SIGSTOP)
    try:
        found = cluster.ranks.outcomes(jobs.reduce_within, 1.5, ranks=others, timeout=2 * SOON)
    finally:
        process.send_signal(signal.SIGCONT)
    for outcome in found:
        assert outcome is not None and not outcome.value.wrong, outcome
        assert (outcome.value.kind, outcome.value.culprit) == ("DeadlineExceeded", stopped), found
        assert f"rank {stopped} on node n{stopped // 2}" in outcome.value.text
        assert "does not answer" in outcome.value.text
        assert outcome.value.seconds < 1.5 + SOON
    cluster.leave()


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (None, b"\x82\x05hello"),
        (FrameKind.STATUS, b"[1]"),
        (FrameKind.ABORT, b"{"),
        (FrameKind.OFFER, b'{"tag": 1}'),
        (FrameKind.WANT, b'{"tag": "x", "number": 0}'),
        (FrameKind.FETCH, b""),
    ],
)
def test_who_sends_rubbish_is_named(cluster: Cluster, kind: FrameKind | None, body: bytes) -> None:
    """Bytes that are no frame, and control that says nothing, end the group on all ranks, with the
    name of who sent them."""
    cluster.join("centralized", shared=False)
    for seen in cluster.ranks.run(jobs.send_rubbish, 2, kind, body, timeout=2 * SOON):
        assert (seen.kind, seen.culprit, seen.wrong) == ("ProtocolError", 2, [])
        assert "rank 2 on node n1 sent what" in seen.text
    cluster.leave()
