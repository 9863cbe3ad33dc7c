"""torch.distributed on the backend "unisono": the surface that programs and torch itself use."""

from __future__ import annotations

from pathlib import Path

import pytest
import timed_jobs
import torch
import torch_jobs as jobs
from ranks import RankPool

pytestmark = pytest.mark.timeout(120)


def same(values: list[object]) -> object:
    """The value that all ranks have."""
    assert all(value == values[0] for value in values), values
    return values[0]


# --- data-parallel training -------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_the_gradient_of_four_ranks_is_the_full_batchs(
    four_ranks: RankPool, dtype: torch.dtype, limit: float
) -> None:
    """DDP over four shares of a batch has the gradient of one process with the whole batch."""
    assert max(four_ranks.run(jobs.full_batch_gradient, dtype)) <= limit


def test_replicas_are_bitwise_equal_after_every_epoch(four_ranks: RankPool) -> None:
    """Parameters have the same bytes on all ranks after each epoch, and change in between."""
    first, second, third = same(four_ranks.run(jobs.epochs, 3))  # type: ignore[misc]
    assert len({first, second, third}) == 3


def test_the_small_example_holds(two_ranks: RankPool) -> None:
    """w = 5 and inputs 2 and 4 give gradients 2 and 4, sum 6, mean 3, and one update."""
    one, two = two_ranks.run(jobs.small_example)
    assert (one["gradient"], two["gradient"]) == (2, 4)
    assert one["sum"] == two["sum"] == 6
    assert one["mean"] == two["mean"] == 3
    assert one["weight"] == two["weight"] == pytest.approx(4.7)


def test_accumulated_gradients_are_synchronised_with_the_last_microbatch(
    two_ranks: RankPool,
) -> None:
    """First microbatch in no_sync, second not: 5.5 on both; the other way round they differ."""
    assert two_ranks.run(jobs.accumulated, "first-quiet") == [5.5, 5.5]
    assert two_ranks.run(jobs.accumulated, "last-quiet") == [4.5, 6.5]


def test_a_parameter_that_one_rank_uses_is_averaged(two_ranks: RankPool) -> None:
    """With unused-parameter detection: 2 and 3 on both ranks, None for what nobody used."""
    assert same(two_ranks.run(jobs.unused_parameters)) == [[2.0, 3.0, None]] * 3


def test_half_precision_gradients_do_not_overflow(two_ranks: RankPool) -> None:
    """The mean of two fp16 gradients of 40000 is 40000."""
    assert two_ranks.run(jobs.half_precision) == [40000.0, 40000.0]


def test_frozen_layers_and_buffers(two_ranks: RankPool) -> None:
    """Frozen parameters have no gradient, and buffers and parameters agree on all ranks."""
    same(two_ranks.run(jobs.frozen_and_buffers))


def test_join_ends_uneven_training_in_step(two_ranks: RankPool) -> None:
    """Ranks with five and three batches end equal under Join, and the next call pairs properly."""
    _, value = same(two_ranks.run(jobs.uneven_join))  # type: ignore[misc]
    assert value == 3.0


def test_a_sharded_optimizer_does_what_the_plain_one_does(two_ranks: RankPool) -> None:
    """ZeroRedundancyOptimizer ends with the same bytes as Adam on every rank."""
    sharded, plain = same(two_ranks.run(jobs.sharded_optimizer))  # type: ignore[misc]
    assert sharded == plain


def test_hooks_whose_callbacks_issue_further_collectives(four_ranks: RankPool) -> None:
    """PowerSGD over several buckets keeps its collectives in the same order on all ranks."""
    for _ in range(3):
        _, finite = same(four_ranks.run(jobs.powersgd))  # type: ignore[misc]
        assert finite


def test_the_fp16_hook(two_ranks: RankPool) -> None:
    """Compressed gradients are equal on all ranks."""
    same(two_ranks.run(jobs.fp16_hook))


def test_fully_sharded_training_has_the_full_batchs_loss(two_ranks: RankPool) -> None:
    """FSDP2 over two shares of a batch follows the loss of one process with the whole batch."""
    sharded, alone = same(two_ranks.run(jobs.fully_sharded))  # type: ignore[misc]
    assert sharded == pytest.approx(alone, rel=1e-5)


def test_a_distributed_sampler_deals_out_every_index(four_ranks: RankPool) -> None:
    """Every index belongs to exactly one rank."""
    dealt = four_ranks.run(jobs.sampled)
    assert sorted(index for indexes in dealt for index in indexes) == list(range(20))


def test_a_backward_goes_on_while_its_first_bucket_waits(two_ranks: RankPool) -> None:
    """DDP's own reduction does not hold the backward up: the other rank is still away by then."""
    early, _ = two_ranks.run(timed_jobs.overlap)
    assert early < 0.4


# --- the surface ------------------------------------------------------------------------------


def test_every_collective_against_values_computed_here(four_ranks: RankPool) -> None:
    """Each call of torch.distributed gives exactly the values that its definition says."""
    four_ranks.run(jobs.every_collective)


def test_strided_scalar_empty_and_bool_tensors(two_ranks: RankPool) -> None:
    """Views are reduced in place and their neighbours stay; 0-dim, empty and bool tensors work."""
    two_ranks.run(jobs.odd_tensors)


def test_object_collectives(four_ranks: RankPool) -> None:
    """Python objects travel by all_gather, broadcast, gather and scatter."""
    found = four_ranks.run(jobs.objects)
    everyone = [{"rank": rank, "text": "ä" * rank} for rank in range(4)]
    for rank, value in enumerate(found):
        assert value["everyone"] == everyone
        assert value["told"] == [("from", 1), 2]
        assert value["collected"] == ([0, 10, 20, 30] if rank == 0 else None)
        assert value["received"] == f"part {rank}"


def test_asynchronous_handles_and_futures(four_ranks: RankPool) -> None:
    """Handles tell when they are done, and a future's callback may wait for another collective."""
    four_ranks.run(jobs.asynchronous)


def test_messages_between_ranks(four_ranks: RankPool) -> None:
    """Messages pair by peer and tag, from any source too, and both directions at once."""
    four_ranks.run(jobs.point_to_point)


def test_subgroups_and_meshes(four_ranks: RankPool) -> None:
    """A subgroup's mean divides by its own size; ranks may be reordered; meshes make groups."""
    found = four_ranks.run(jobs.subgroups)
    assert [value["mean"] for value in found] == [1.5, 1.5, 3.5, 3.5]
    assert [value["single"] for value in found] == [0.5] * 4
    assert [value["seat"] for value in found] == [3, 2, 1, 0]
    assert [value["column"] for value in found] == [2, 4, 2, 4]


def test_functional_collectives_and_sharded_tensors(two_ranks: RankPool) -> None:
    """What finds the group by its name (functional collectives, DTensor) finds it."""
    assert two_ranks.run(jobs.functional) == [[1.0, 6.0]] * 2


def test_a_distributed_checkpoint_comes_back(two_ranks: RankPool, tmp_path: Path) -> None:
    """torch.distributed.checkpoint saves and loads the same bytes."""
    assert two_ranks.run(jobs.checkpoint, str(tmp_path)) == [True, True]


def test_a_hundred_reductions_in_a_row(four_ranks: RankPool) -> None:
    """All of a hundred all-reduces have the right values on all ranks."""
    assert four_ranks.run(jobs.loop, 100) == [100] * 4


def test_a_refused_call_changes_nothing(two_ranks: RankPool) -> None:
    """What has no right answer is refused with a reason, and the next call works."""
    reasons = same(two_ranks.run(jobs.refused_calls))
    words = ["sparse", "share memory", "mean of int64", "prescale", "band", "divisible", "meta"]
    assert isinstance(reasons, list) and len(reasons) == len(words)
    for reason, word in zip(reasons, words, strict=True):
        assert word in reason


def test_what_one_rank_refuses_fails_on_all(two_ranks: RankPool) -> None:
    """A tensor that only one rank may not send ends that call everywhere, and no other."""
    found = two_ranks.run(jobs.refused_on_one_rank)
    assert all("refused" in text or "sparse" in text for text, _ in found)
    assert "rank 1" in found[0][0]
    assert [value for _, value in found] == [2.0, 2.0]
