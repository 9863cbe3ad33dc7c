"""A peer that is killed at every single step, and random operations with random kills."""

from __future__ import annotations

import os
import random
import time

import fault_jobs as jobs
import pytest
from faults_cluster import Cluster

pytestmark = pytest.mark.timeout(100)

#: seconds within which survivors must know
SOON = 5.0


def check_survivors(found: list[object], victim: int, done: int | None = None) -> int:
    """Each survivor's error names the victim, soon, and nothing was wrong before it.

    With `done`, a survivor may have had so many right operations and no more to do.
    """
    told = 0
    for rank, outcome in enumerate(found):
        if rank == victim:
            assert outcome is None, "it was to die"
            continue
        seen = outcome.value  # type: ignore[attr-defined]
        assert isinstance(seen, jobs.Seen), outcome
        if seen == jobs.Seen(right=done or -1):
            continue
        assert not seen.wrong, f"rank {rank}: {seen}"
        assert (seen.kind, seen.culprit) == ("PeerLost", victim), f"rank {rank}: {seen}"
        assert f"rank {victim} on node n{victim // 2}" in seen.text
        assert seen.seconds < SOON
        told += 1
    return told


@pytest.mark.parametrize("link", ["sockets", "shared memory", "shared tensors"])
@pytest.mark.parametrize(
    ("strategy", "victims"),
    [
        ("ring", [2]),
        ("tree:2", [0, 1, 3]),
        ("double_tree", [1]),
        ("halving_doubling", [3]),
        ("local=ring,between=gloo", [0]),
    ],
    ids=["ring", "tree", "double_tree", "halving_doubling", "gloo"],
)
def test_a_peer_is_killed_at_every_single_step(
    cluster: Cluster, strategy: str, victims: list[int], link: str
) -> None:
    """Whichever frame a rank dies in, all others raise with its name, or had the right sum."""
    elements = 64  # of 8 bytes: a ring has two segments per chunk, a tree two in all
    segment = 64 if strategy == "ring" else 256
    shared, lent = link != "sockets", link == "shared tensors"
    cases = 0
    for victim in victims:
        for event in ("sent", "received"):
            cluster.join(strategy, shared=shared, segment=segment, lent=lent)
            counted = cluster.ranks.run(jobs.reduce_and_meet, victim, event, None, elements)
            assert all(seen.right == 2 and not seen.wrong for seen in counted), counted
            frames = counted[victim].frames
            assert frames >= 2
            cluster.leave()
            for at in range(1, frames + 1):
                cluster.join(strategy, shared=shared, segment=segment, lent=lent)
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


def soak(cluster: Cluster, seconds: float, seed: int) -> int:
    """Epochs of random operations, most with a kill, until the time is over; how many."""
    shared = random.Random(seed)
    epochs = 0
    #: what rank 0, which is never killed, holds after some epochs; the others are compared to that
    baseline: jobs.Held | None = None
    end = time.monotonic() + seconds
    while time.monotonic() < end or epochs < 8:
        epochs += 1
        strategy = shared.choice(
            ["auto", "ring", "tree:2", "centralized", "local=ring,between=ring"]
        )
        cluster.join(strategy, shared=shared.random() < 0.7, lent=shared.random() < 0.5)
        victim = shared.choice([None, 1, 2, 3, 1, 2, 3])
        found = cluster.ranks.outcomes(
            jobs.random_operations, shared.randrange(1 << 30), 12, victim, timeout=40
        )
        dead = victim if victim is not None and found[victim] is None else None
        if dead is None:
            told = f"epoch {epochs}, {strategy}, victim {victim}: {found}"
            assert all(each and each.value == jobs.Seen(right=12) for each in found), told
        else:
            check_survivors(list(found), dead, 12)
        cluster.leave(dead)
        holds = cluster.ranks.run(jobs.held)
        if epochs == 4:
            baseline = holds[0]
        if baseline is not None:
            for rank, hold in enumerate(holds):
                assert hold.maps == 0
                assert hold.descriptors == baseline.descriptors, f"rank {rank}"
                assert [name for name in hold.threads if name != "MainThread"] == [], f"rank {rank}"
            assert holds[0].memory < baseline.memory + (48 << 20)
    return epochs


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_random_operations_with_random_kills_leave_nothing_behind(cluster: Cluster) -> None:
    """Epoch after epoch with a rank killed in most: named, replaced, and nothing is left.

    `UNISONO_SOAK_SECONDS` makes it longer.
    """
    seconds = float(os.environ.get("UNISONO_SOAK_SECONDS", "8"))
    assert soak(cluster, seconds, seed=7) >= 8
