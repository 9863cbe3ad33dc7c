"""Numbers that must be right on every strategy, through torch.distributed; ranks run these."""

from __future__ import annotations

import math
from datetime import timedelta

import torch
import torch.distributed as dist

SIZES = (2, 3, 4)


def check(strategy: str) -> None:
    """Every rule, on groups of two to four of the ranks."""
    for size in SIZES:
        group = dist.new_group(
            list(range(size)), timeout=timedelta(seconds=30), pg_options={"strategy": strategy}
        )
        if dist.get_rank() >= size:
            continue
        assert isinstance(group, dist.ProcessGroup)
        sums(group)
        means(group)
        scaled(group)
        half_precision(group)
        not_a_number(group)
        truth(group)
        views(group)
        others(group)


def sums(group: dist.ProcessGroup) -> None:
    """Counts that do not divide by the ranks, or are smaller, with exact values."""
    rank, size = dist.get_rank(group), group.size()
    for count in sorted({0, 1, 2, size - 1, size, size + 1, 73, 100_003}):
        for dtype in (torch.int64, torch.float64):
            value = torch.arange(count, dtype=dtype) * (rank + 1)
            dist.all_reduce(value, group=group)
            want = torch.arange(count, dtype=dtype) * (size * (size + 1) // 2)
            assert torch.equal(value, want), (count, dtype)


def means(group: dist.ProcessGroup) -> None:
    """The mean divides by the ranks of the group, whatever the count."""
    rank, size = dist.get_rank(group), group.size()
    for count in (1, 5, 64):
        value = torch.full((count,), float(rank + 1))
        dist.all_reduce(value, dist.ReduceOp.AVG, group=group)
        assert torch.equal(value, torch.full((count,), (size + 1) / 2)), count


def scaled(group: dist.ProcessGroup) -> None:
    """PREMUL_SUM multiplies each contribution first, by a number or a tensor of one."""
    rank, size = dist.get_rank(group), group.size()
    for factor in (0.5, torch.tensor([0.5])):
        op = dist._make_nccl_premul_sum(factor)
        want = size * (size + 1) / 4
        value = torch.full((5,), rank + 1.0)
        dist.all_reduce(value, op, group=group)
        assert value.tolist() == [want] * 5
        value = torch.full((5,), rank + 1.0)
        dist.reduce(value, dst=0, op=op, group=group)
        assert value.tolist() == [rank + 1.0 if rank else want] * 5
        output = torch.zeros(2, dtype=torch.complex64)
        inputs = torch.full((2 * size,), rank + 1j, dtype=torch.complex64)
        dist.reduce_scatter_tensor(output, inputs, op, group=group)
        assert output.tolist() == [size * (size - 1) / 4 + size / 2 * 1j] * 2


def half_precision(group: dist.ProcessGroup) -> None:
    """fp16: sums may overflow, means must not, and the smallest number survives."""
    value = torch.tensor([40000.0], dtype=torch.float16)
    dist.all_reduce(value, group=group)
    assert math.isinf(value.item())
    smallest = torch.tensor(2.0**-24, dtype=torch.float16)
    for one in (40000.0, smallest.item()):
        value = torch.tensor([one], dtype=torch.float16)
        dist.all_reduce(value, dist.ReduceOp.AVG, group=group)
        assert value.item() == one
    # the same values at every place have the same sum at every place
    generator = torch.Generator().manual_seed(dist.get_rank(group))
    one = torch.randn((), generator=generator).to(torch.bfloat16)
    value = one.expand(10_001).contiguous()
    dist.all_reduce(value, group=group)
    assert bool((value == value[0]).all())


def not_a_number(group: dist.ProcessGroup) -> None:
    """NaN goes through MIN, MAX and SUM from whatever rank it is on."""
    rank, size = dist.get_rank(group), group.size()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for place in range(size):
            for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.SUM):
                value = torch.tensor([math.nan if rank == place else rank + 1.0], dtype=dtype)
                dist.all_reduce(value, op, group=group)
                assert math.isnan(value.item()), (dtype, place, op)
    value = torch.tensor([math.inf if rank == 0 else -math.inf])
    dist.all_reduce(value, group=group)
    assert math.isnan(value.item())


def truth(group: dist.ProcessGroup) -> None:
    """bool: a sum is "any", a product "all", and the dtype stays."""
    rank = dist.get_rank(group)
    mine = [True, True, False] if rank == 0 else [False, True, False]
    for op, want in (
        (dist.ReduceOp.SUM, [True, True, False]),
        (dist.ReduceOp.MAX, [True, True, False]),
        (dist.ReduceOp.PRODUCT, [False, True, False]),
        (dist.ReduceOp.MIN, [False, True, False]),
    ):
        value = torch.tensor(mine)
        dist.all_reduce(value, op, group=group)
        assert value.tolist() == want and value.dtype is torch.bool


def views(group: dist.ProcessGroup) -> None:
    """Columns, transposes and every second element are reduced in place, their neighbours stay."""
    rank, size = dist.get_rank(group), group.size()
    scale = size * (size + 1) // 2
    counting = torch.arange(12).reshape(3, 4).float()
    base = counting * (rank + 1)
    dist.all_reduce(base[:, 1], group=group)
    want = counting * (rank + 1)
    want[:, 1] = counting[:, 1] * scale
    assert torch.equal(base, want)
    base = counting * (rank + 1)
    dist.all_reduce(base.t(), group=group)
    assert torch.equal(base, counting * scale)
    line = torch.arange(10.0) * (rank + 1)
    dist.all_reduce(line[::2], group=group)
    assert line[4].item() == 4 * scale and line[5].item() == 5 * (rank + 1)
    base = counting * (rank + 1)
    dist.broadcast(base[:, 1], src=0, group=group)
    assert base[:, 1].tolist() == [1, 5, 9] and base[1, 0].item() == 4 * (rank + 1)


def others(group: dist.ProcessGroup) -> None:
    """Reduce, gather, scatter, reduce-scatter, all-gather, all-to-all and barrier, once each."""
    rank, size = dist.get_rank(group), group.size()
    value = torch.full((7,), rank + 1, dtype=torch.int64)
    dist.reduce(value, dst=size - 1, group=group)
    assert value[0].item() == (size * (size + 1) // 2 if rank == size - 1 else rank + 1)
    parts = [torch.zeros(5) for _ in range(size)]
    dist.all_gather(parts, torch.full((5,), float(rank)), group=group)
    assert [part[4].item() for part in parts] == list(range(size))
    output = torch.zeros(3)
    dist.reduce_scatter_tensor(output, torch.arange(3.0 * size) + rank, group=group)
    want = torch.arange(3.0 * rank, 3.0 * rank + 3) * size + size * (size - 1) / 2
    assert torch.equal(output, want)
    gathered = parts if rank == 0 else None
    dist.gather(torch.full((5,), 10.0 * rank), gathered, dst=0, group=group)
    assert rank != 0 or [part[0].item() for part in parts] == [10.0 * r for r in range(size)]
    piece = torch.zeros(2)
    pieces = [torch.full((2,), float(r)) for r in range(size)] if rank == 0 else None
    dist.scatter(piece, pieces, src=0, group=group)
    assert piece.tolist() == [rank, rank]
    mixed = torch.zeros(size)
    dist.all_to_all_single(mixed, torch.arange(size) + 10.0 * rank, group=group)
    assert mixed.tolist() == [10.0 * r + rank for r in range(size)]
    dist.barrier(group=group)


def dead_member() -> str:
    """Rank 2 is gone before a subgroup's first collective; the error on the others."""
    group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=60))
    if dist.get_rank() == 2:
        import os

        os._exit(9)
    try:
        dist.all_reduce(torch.ones(4), group=group)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""
