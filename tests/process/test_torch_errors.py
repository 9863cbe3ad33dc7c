"""Errors of collectives as PyTorch programs see them: typed, on every rank, and survivable."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch_jobs as jobs
from ranks import Outcome, RankPool

import collective

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    """Two ranks whose groups are broken and made again."""
    with RankPool(2) as pool:
        pool.run(jobs.start)
        yield pool


@pytest.fixture
def pair(ranks: RankPool) -> Iterator[RankPool]:
    """Two ranks with a group that may be broken."""
    yield ranks
    assert ranks.run(jobs.restart) == [2.0, 2.0]


def both(outcomes: list[Outcome | None]) -> list[Outcome]:
    """The outcomes of two ranks that live."""
    found = [outcome for outcome in outcomes if outcome is not None]
    assert len(found) == 2
    return found


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("shape", ("[2, 3]", "[3, 2]")),
        ("dtype", ("int32", "float32")),
        ("operation", ("all_reduce", "broadcast")),
        ("skipped", ("all_reduce", "barrier")),
    ],
)
def test_ranks_that_disagree_all_learn_it(
    pair: RankPool, kind: str, words: tuple[str, ...]
) -> None:
    """Another shape, dtype or operation is an error on every rank that names both sides."""
    for outcome in both(pair.outcomes(jobs.mismatched, kind, timeout=30)):
        assert outcome.kind == "Mismatch", outcome
        assert all(word in outcome.message for word in words), outcome.message
        assert outcome.sequence is not None


def test_an_error_in_a_backward_is_raised_and_the_process_lives(pair: RankPool) -> None:
    """DDP's backward raises with our text, later calls raise the typed error, all go on."""
    one, two = both(pair.outcomes(jobs.error_in_backward, timeout=60))
    text, later, kept = one.value
    assert text.startswith("RuntimeError") and "Mismatch: ranks disagree" in text
    assert (later, kept) == ("Mismatch", "Mismatch")
    assert two.value[0].startswith("Mismatch: ranks disagree")


def test_a_rank_that_skips_its_backward_is_noticed(pair: RankPool) -> None:
    """Gradients of one step are never averaged with those of another."""
    for outcome in both(pair.outcomes(jobs.skipped_backward, timeout=60)):
        assert "disagree" in outcome.message and "barrier" in outcome.message


def test_a_rank_with_fewer_batches_is_noticed(pair: RankPool) -> None:
    """Without Join, the rank that goes on to its validation and the one that trains both learn."""
    for outcome in both(pair.outcomes(jobs.fewer_batches, timeout=60)):
        assert "disagree" in outcome.message and "float64 [3]" in outcome.message


def test_a_deadline_names_the_rank_that_did_not_come(pair: RankPool) -> None:
    """A group's timeout ends the call with an error that names the missing rank."""
    one, _ = pair.run(jobs.late_member)
    assert one.startswith("DeadlineExceeded 1:") and "rank 1" in one


def test_a_forked_worker_cannot_use_its_parents_group(pair: RankPool) -> None:
    """In a data-loader worker a collective raises, and the parent's group is not disturbed."""
    assert pair.run(jobs.forked_worker) == [["GroupClosed", "2.0"]] * 2


def test_a_killed_rank_is_named() -> None:
    """When a rank dies in a loop of collectives, the others raise PeerLost with its number."""
    pool = RankPool(3)
    try:
        pool.run(jobs.start)
        pool.run(jobs.loop, 2)
        pool.start(jobs.loop, 100_000, ranks=[0, 1])
        pool.start(jobs.loop, 20, ranks=[2])
        pool.collect([2])
        pool.processes[2].kill()
        for outcome in pool.collect([0, 1], timeout=30):
            assert outcome is not None
            assert outcome.kind == "PeerLost" and outcome.rank == 2, outcome
            assert "rank 2 on node" in outcome.message
    finally:
        pool.kill()


def test_the_strategy_can_be_named() -> None:
    """pg_options name the strategy; ranks that want different ones, or one that is none, fail."""
    with RankPool(2) as pool:
        assert pool.run(jobs.strategy, "ring") == ["ring"] * 2
        assert pool.run(jobs.strategy, {"strategy": "tree:2"}) == ["tree:2"] * 2
        assert pool.run(jobs.strategy, collective.Flat("tree", 2)) == ["tree:2"] * 2
        two = collective.TwoLevel(local="ring", between="tree:2")
        assert pool.run(jobs.strategy, two) == ["local=ring,between=tree:2"] * 2
        for text in ("circle", "local=ring,local@nowhere=chain,between=ring"):
            for outcome in both(pool.outcomes(jobs.strategy, text)):
                assert outcome.kind == "ValueError" and text in outcome.message
        for outcome in both(pool.outcomes(jobs.own_strategy)):
            assert outcome.kind == "RendezvousFailed" and "'centralized'" in outcome.message


def test_a_secret_that_differs_keeps_ranks_apart() -> None:
    """Ranks with different UNISONO_SECRET do not get a group."""
    pool = RankPool(2, {"UNISONO_SECRET": "{rank}ec7"})
    try:
        for outcome in both(pool.outcomes(jobs.start, "unisono", None, 5.0)):
            assert outcome.kind == "RendezvousFailed", outcome
    finally:
        pool.kill()
