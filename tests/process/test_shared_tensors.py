"""`collective.empty`: ranks of a node read its tensors in place, with the result of any others."""

from __future__ import annotations

import pytest
import shared_tensor_jobs as jobs
import torch
from ranks import RankPool

pytestmark = pytest.mark.timeout(90)

STRATEGIES = [
    "auto", "ring", "direct", "scatter_allgather", "halving_doubling", "tree:2", "centralized",
]  # fmt: skip
#: bytes of headers, descriptors and small things: far less than a chunk
LITTLE = 64 << 10


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_byte_of_a_shared_tensor_is_copied_for_its_readers(
    four_ranks: RankPool, strategy: str
) -> None:
    """Each strategy's all-reduce is right, and its frames say where the values lie."""
    for places in ("ssss", "vvvv"):
        copied = four_ranks.run(jobs.all_reduces, strategy, places, torch.float64, "sum")
        if strategy not in ("direct", "scatter_allgather"):  # which sum in scratch of their own
            assert max(copied) < LITTLE


@pytest.mark.parametrize("places", ["soso", "ovsv", "ooos"])
def test_ordinary_tensors_mix_with_shared_ones(four_ranks: RankPool, places: str) -> None:
    """Each rank chooses for itself; all get the same."""
    for strategy in ("ring", "scatter_allgather"):
        copied = four_ranks.run(jobs.all_reduces, strategy, places, torch.int32, "sum")
        assert [many > LITTLE for many in copied] == [place == "o" for place in places]


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        (torch.float32, "mean"), (torch.bfloat16, "mean"), (torch.float16, "sum"),
        (torch.uint8, "max"), (torch.complex64, "sum"),
    ],
    ids=str,
)  # fmt: skip
def test_every_kind_of_element(four_ranks: RankPool, dtype: torch.dtype, op: str) -> None:
    """Sums, means and maxima of each dtype are those of float64, cast once."""
    *copied, ordinary = four_ranks.run(jobs.all_reduces, "auto", "svso", dtype, op)
    assert ordinary > LITTLE
    if dtype.itemsize > 1:  # else a chunk is smaller than what is lent
        assert max(copied) < LITTLE


@pytest.mark.parametrize("places", ["ssss", "vovs"])
def test_every_operation(four_ranks: RankPool, places: str) -> None:
    """Broadcast, reduce, gather, scatter, all-gather, reduce-scatter, all-to-all are right."""
    four_ranks.run(jobs.other_operations, places)


def test_nothing_grows(four_ranks: RankPool) -> None:
    """Tensors and groups that come and go leave no descriptor, mapping or memory."""
    before = four_ranks.run(jobs.use_much, 3)
    after = four_ranks.run(jobs.use_much, 6)
    for (held, maps, memory), (still, again, now) in zip(before, after, strict=True):
        assert (still, again) == (held, maps)
        assert maps == 1 + 3, "its own, and one of each peer, in whatever groups"
        assert now < memory + (16 << 20), "six rounds make 46 MiB each, and read 140 MiB"


def test_a_forked_child_has_memory_of_its_own(four_ranks: RankPool) -> None:
    """What a child drops or makes is not its parent's."""
    assert four_ranks.run(jobs.tensors_of_a_forked_child) == [(True, 5.0 * 2**18, 7.0 * 2**18)] * 4


def test_what_cannot_be_is_named(four_ranks: RankPool) -> None:
    """A wrong shape or dtype, and more than the machine has, are errors that say so."""
    for shape, dtype, size in four_ranks.run(jobs.wrong_calls):
        assert "negative" in shape
        assert dtype.startswith("TypeError: dtype must be a torch.dtype")
        assert size.startswith("MemoryError: no room for 4503599627370496 bytes")


def test_a_rank_that_dies_while_others_read_its_tensors() -> None:
    """The others raise with its name; nobody hangs, and nobody is ended by the memory's loss."""
    with RankPool(3) as pool:
        pool.run(jobs.torch_start)
        outcomes = pool.outcomes(jobs.kill_while_they_read, 1, timeout=20)
        assert outcomes[1] is None
        for outcome in (outcomes[0], outcomes[2]):
            assert outcome is not None
            assert (outcome.kind, outcome.rank) == ("PeerLost", 1)
