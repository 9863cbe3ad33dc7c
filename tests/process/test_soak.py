"""Random operations with random kills, epoch after epoch, for as long as one wants.

Not part of a plain run: `make soak`, which CI runs, takes a minute.  `UNISONO_SOAK_SECONDS` makes
it longer, `UNISONO_SOAK_SEED` repeats what failed.
"""

from __future__ import annotations

import itertools
import os
import random
import time

import fault_jobs as jobs
import pytest
from faults_cluster import Cluster, check_survivors

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]

STRATEGIES = ["auto", "ring", "tree:2", "centralized", "double_tree", "halving_doubling", "direct",
              "local=ring,between=ring", "local=tree:2,between=direct"]  # fmt: skip
ROUNDS = 12
#: epochs after which what a rank holds has settled
SETTLED = 4
#: bytes that a rank's memory may rise after that, however long it goes on
ROOM = 32 << 20


def epoch(cluster: Cluster, own: random.Random) -> None:
    """Form a group, run random operations in which a rank may die, and leave it."""
    strategy = own.choice(STRATEGIES)
    shared, lent = own.random() < 0.7, own.random() < 0.5
    way = own.choice(["", "", "three connections", "masked"])
    cluster.join(strategy, shared=shared, lent=lent, way=way)
    victim = own.choice([None, 1, 2, 3, 1, 2, 3])
    found = cluster.ranks.outcomes(
        jobs.random_operations, own.randrange(1 << 30), ROUNDS, victim, timeout=40
    )
    dead = victim if victim is not None and found[victim] is None else None
    if dead is None:
        told = f"{strategy}, victim {victim}: {found}"
        assert all(each and each.value == jobs.Seen(right=ROUNDS) for each in found), told
    else:
        check_survivors(list(found), dead, ROUNDS)
    cluster.leave(dead)


def test_random_operations_with_random_kills_leave_nothing_behind(cluster: Cluster) -> None:
    """Killed ranks are named and replaced, the group forms again under a new epoch, and in the end
    no descriptor, thread or shared memory is left, nor has memory grown."""
    end = time.monotonic() + float(os.environ.get("UNISONO_SOAK_SECONDS", "60"))
    seed = int(os.environ.get("UNISONO_SOAK_SEED") or time.time_ns() % 1_000_000)
    own = random.Random(seed)
    #: what rank 0, which is never killed, holds after some epochs; the others are compared to that
    baseline: jobs.Held | None = None
    for number in itertools.count(1):
        print(f"UNISONO_SOAK_SEED={seed}, epoch {number}")
        epoch(cluster, own)
        if number < SETTLED:
            continue
        holds = cluster.ranks.run(jobs.held)
        baseline = baseline or holds[0]
        for rank, hold in enumerate(holds):
            assert hold.maps == 0
            assert hold.descriptors == baseline.descriptors, f"rank {rank}"
            assert [name for name in hold.threads if name != "MainThread"] == [], f"rank {rank}"
        assert holds[0].memory < baseline.memory + ROOM
        if time.monotonic() >= end:
            print(f"{number} epochs; memory rose by {holds[0].memory - baseline.memory} bytes")
            return
