"""Levels that are handed to gloo: values, agreement before it is called, and how it fails."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from unittest.mock import Mock

import fault_jobs
import handed_jobs as jobs
import pytest
from faults_cluster import Cluster
from ranks import Outcome
from thread_ranks import Ranks
from waiting import eventually

from collective.libraries import Libraries
from collective.staged import Assignment

pytestmark = pytest.mark.timeout(60)

STRATEGIES = [
    "local=ring,between=gloo",
    "local=centralized,between=gloo",
    "local=gloo,between=ring",
    "local=gloo,between=gloo",
    "gloo",
]


@pytest.fixture(scope="module")
def threads() -> Iterator[Ranks]:
    kept = Ranks()
    yield kept
    kept.close()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_operation_on_two_nodes(cluster: Cluster, strategy: str) -> None:
    """All roots, uneven parts, empty and odd sizes are exact, and nothing is left behind."""
    before = cluster.ranks.run(fault_jobs.held)
    cluster.join(strategy)
    cluster.ranks.run(jobs.operations, [0, 1, 5, 70_001])
    assert min(cluster.ranks.run(jobs.carried)) >= 1
    cluster.leave()
    after = cluster.ranks.run(fault_jobs.held)
    assert [(held.threads, held.maps) for held in after] == [(["MainThread"], 0)] * 4
    if strategy != STRATEGIES[0]:  # the first group leaves what later ones use again
        assert [held.descriptors for held in after] == [held.descriptors for held in before]


@pytest.mark.parametrize("strategy", ["local=ring,between=gloo", "local=gloo,between=tree:2"])
def test_what_the_library_gets_wrong_is_right(cluster: Cluster, strategy: str) -> None:
    """NaN in minima, means of fp16, strided tensors, bool, all integers: as without a library."""
    cluster.join(strategy)
    assert min(cluster.ranks.run(jobs.dtypes)) >= 1
    results = cluster.ranks.run(jobs.bytes_of_a_sum) + cluster.ranks.run(jobs.bytes_of_a_sum)
    assert len(set(results)) == 1
    cluster.ranks.run(jobs.in_any_interleaving)
    assert cluster.ranks.run(jobs.refusal) == [4.0] * 4
    cluster.leave()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("nodes", ["abbbbcc", "a"], ids=["1, 4 and 2", "one rank"])
def test_nodes_of_different_sizes(threads: Ranks, strategy: str, nodes: str) -> None:
    """Nodes with 1, 4 and 2 ranks; a group of one rank needs nobody."""
    threads.get(len(nodes), strategy, list(nodes)).run(jobs.operations_of, [0, 3, 1000])


@pytest.mark.parametrize("what", ["shape", "dtype", "operation", "sizes"])
def test_a_disagreement_is_known_before_the_library_is_called(cluster: Cluster, what: str) -> None:
    """Every rank raises a Mismatch that names both sides, and the library was never asked."""
    cluster.join("local=gloo,between=gloo")
    for kind, text, carried in cluster.ranks.run(jobs.disagreement, what):
        assert kind == "Mismatch" and "rank 3 on node n1 called" in text
        assert carried == 0
    cluster.leave()


def seen(outcome: Outcome | None) -> tuple[str, int | None, str, float]:
    assert outcome is not None and not outcome.kinds, outcome
    value: tuple[str, int | None, str, float] = outcome.value
    return value


def test_a_rank_that_is_killed_inside_the_library_is_named(cluster: Cluster) -> None:
    """Survivors raise a PeerLost within seconds, and the library's threads end by themselves."""
    cluster.join("local=ring,between=gloo")
    found = cluster.ranks.outcomes(jobs.trouble, 3, "killed", 20.0, timeout=20)
    for rank in range(3):
        kind, culprit, text, seconds = seen(found[rank])
        assert (kind, culprit) == ("PeerLost", 3) and "rank 3 on node n1" in text
        assert seconds < 5
    cluster.leave(3)
    assert [held.threads for held in cluster.ranks.run(fault_jobs.held)] == [["MainThread"]] * 4


def test_a_rank_that_is_stopped_inside_the_library_is_named_at_the_deadline(
    cluster: Cluster,
) -> None:
    """The others raise at the operation's deadline and say in which level; then all goes on."""
    cluster.join("gloo")
    others = [0, 1, 3]
    cluster.ranks.start(jobs.trouble, 2, "stopped", 1.5)
    try:
        found = cluster.ranks.collect(others, timeout=20)
        eventually(lambda: _state(cluster.ranks.processes[2].pid) == "T", 10)
    finally:
        cluster.ranks.processes[2].send_signal(signal.SIGCONT)
    for outcome in found:
        kind, culprit, text, seconds = seen(outcome)
        assert (kind, culprit) == ("DeadlineExceeded", 2)
        assert "rank 2 on node n1" in text and "between level by gloo" in text
        assert 1.0 < seconds < 6
    (outcome,) = cluster.ranks.collect([2], timeout=20)
    assert seen(outcome)[0] in ("DeadlineExceeded", "PeerLost")
    cluster.leave()
    assert [held.threads for held in cluster.ranks.run(fault_jobs.held)] == [["MainThread"]] * 4


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def test_an_error_of_the_library_names_level_node_operation_and_cause(cluster: Cluster) -> None:
    """What fails on one rank is the error of all ranks."""
    cluster.join("local=gloo,between=ring")
    for kind, culprit, text, seconds in cluster.ranks.run(jobs.trouble, 2, "broken", 20.0):
        assert (kind, culprit) == ("LibraryFailed", 2)
        for part in ("gloo failed in the local level of all_reduce (operation 2)",
                     "rank 2 on node n1", "no such device"):  # fmt: skip
            assert part in text
        assert seconds < 5
    cluster.leave()


@pytest.mark.parametrize("failed", ["", "in the library", "elsewhere"])
def test_a_process_group_of_nccl_ends_in_order_or_at_once(
    failed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order it sends what members still receive; after a failure nobody waits for it."""
    told: list[str] = []
    group = Mock(shutdown=lambda: told.append("shutdown"), abort=lambda: told.append("abort"))
    libraries = Libraries(Mock(), ())
    libraries._groups["nccl", (0, 1)] = group
    monkeypatch.setattr(libraries, "_carry_out", lambda _: None)
    libraries.submit(Assignment((), (), None, 0.0, "", lambda _: None))
    if failed == "in the library":
        libraries.abandon()
    libraries.close(healthy=not failed)
    eventually(lambda: len(told) == 1 and not libraries._groups, 5)
    assert told == ["abort" if failed else "shutdown"]
