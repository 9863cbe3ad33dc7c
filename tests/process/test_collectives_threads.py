"""Every operation on every strategy, on ranks that are threads: values, sizes, dtypes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from thread_ranks import Ranks

from collective.group import Group

FLAT = ["auto", "centralized", "ring", "tree:2", "tree:3", "double_tree", "halving_doubling",
        "recursive_doubling", "bruck", "chain", "direct", "scatter_allgather"]  # fmt: skip
#: (strategy, nodes of the ranks)
LEVELS = [
    ("local=ring,between=tree:2", "aabb"),
    ("local=ring,between=ring", "aaabbcc"),
    ("local=tree:2,between=ring", "aaabcc"),
    ("local=centralized,between=centralized", "abababab"),
    ("local=ring,between=centralized", "aaa"),
    ("local=ring,between=tree:3", "abcde"),
    ("local=bruck,between=halving_doubling", "aabbc"),
    ("local=halving_doubling,between=bruck", "aaabbb"),
    ("local=direct,between=double_tree", "aaaabbcc"),
    ("local=double_tree,between=chain", "aaabb"),
    ("local=chain,between=bruck", "aabcc"),
    ("local=tree:2,between=double_tree", "abbbcc"),
    ("local=ring,between=direct", "aabbcc"),
    ("local=ring,between=scatter_allgather", "aaabcc"),
    ("local=ring,local@b=tree:2,between=ring", "abbbbcc"),
    ("local=centralized,local@a=direct,local@c=double_tree,between=tree:2", "abbbbcc"),
    ("local=chain,local@b=tree:2,between=double_tree", "acbbcbc"),
    ("local=bruck,local@b=centralized,between=scatter_allgather", "aaabbb"),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    kept = Ranks()
    yield kept
    kept.close()


def sizes_for(n: int) -> list[tuple[int, ...]]:
    return [(), (0,), (1,), (n - 1,), (n,), (n + 1,), (73,), (3, 5)]


def contribution(shape: tuple[int, ...], dtype: torch.dtype, rank: int, seed: int = 0) -> Any:
    """Whole numbers from −8 to 8 that differ by rank, exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    values = torch.randint(-8, 9, shape, generator=generator)
    if dtype is torch.bool:
        return values > 0
    if not dtype.is_signed:
        values = values.abs()
    return values.to(dtype)


def combined(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    """The right result, computed here in 64 bits."""
    dtype = parts[0].dtype
    wide = torch.complex128 if dtype.is_complex else (
        torch.float64 if dtype.is_floating_point else torch.int64
    )  # fmt: skip
    stack = torch.stack([part.to(wide) for part in parts])
    if dtype is torch.bool:
        table = {"sum": stack.amax, "max": stack.amax, "product": stack.amin, "min": stack.amin}
        return table[op](0).to(torch.bool)
    table = {
        "sum": lambda: stack.sum(0), "mean": lambda: stack.sum(0) / len(parts),
        "product": lambda: stack.prod(0), "min": lambda: stack.amin(0),
        "max": lambda: stack.amax(0),
    }  # fmt: skip
    return table[op]().to(dtype)


def all_equal_bytes(tensors: list[torch.Tensor]) -> bool:
    first = tensors[0].contiguous().reshape(-1).view(torch.uint8)
    return all(
        torch.equal(first, other.contiguous().reshape(-1).view(torch.uint8)) for other in tensors
    )


def reduce_all(group: Group, tensors: list[torch.Tensor], op: str) -> torch.Tensor:
    tensor = tensors[group.rank].clone()
    group.all_reduce(tensor, op)
    return tensor


@pytest.mark.parametrize("strategy", FLAT)
@pytest.mark.parametrize("n", range(1, 9))
def test_all_reduce_sums_every_size_exactly(ranks: Ranks, n: int, strategy: str) -> None:
    """Whatever the size, also empty, 0-dim and smaller than the group, the sum is exact."""
    set_ = ranks.get(n, strategy)
    for shape in sizes_for(n):
        if min(shape, default=1) < 0:
            continue
        for dtype in (torch.float32, torch.int64):
            parts = [contribution(shape, dtype, rank, n) for rank in range(n)]
            results = set_.run(reduce_all, parts, "sum")
            for result in results:
                assert torch.equal(result, combined(parts, "sum")), (shape, dtype)
    for dtype in (torch.int64, torch.float64):
        parts = [torch.arange(100003, dtype=dtype) * (rank + 1) for rank in range(n)]
        results = set_.run(reduce_all, parts, "sum")
        right = torch.arange(100003, dtype=dtype) * (n * (n + 1) // 2)
        assert all(torch.equal(result, right) for result in results)


@pytest.mark.parametrize(("strategy", "nodes"), LEVELS)
def test_two_levels_sum_exactly(ranks: Ranks, strategy: str, nodes: str) -> None:
    """Strategies of two levels are right on nodes with equal and unequal numbers of ranks."""
    n = len(nodes)
    set_ = ranks.get(n, strategy, nodes=list(nodes))
    for shape in [*sizes_for(n), (1 << 18,)]:
        parts = [contribution(shape, torch.float32, rank, n) for rank in range(n)]
        results = set_.run(reduce_all, parts, "sum")
        assert all(torch.equal(result, combined(parts, "sum")) for result in results), shape


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64,
    torch.complex128, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip


@pytest.mark.parametrize("strategy", ["ring", "tree:2", "centralized"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_keeps_its_type_and_value(
    ranks: Ranks, dtype: torch.dtype, strategy: str
) -> None:
    """Sum, product, min and max are right in every dtype, and the dtype stays."""
    n = 3
    set_ = ranks.get(n, strategy)
    parts = [contribution((29,), dtype, rank, 5) for rank in range(n)]
    if dtype is torch.int8 or dtype is torch.uint8:
        parts = [part.clamp(max=4) for part in parts]
    ops = ["sum", "product"] if dtype.is_complex else ["sum", "product", "min", "max"]
    if dtype.is_floating_point or dtype.is_complex:
        ops.append("mean")
    for op in ops:
        for result in set_.run(reduce_all, parts, op):
            assert result.dtype is dtype
            right = combined(parts, op)
            if op == "mean":
                torch.testing.assert_close(result, right)
            else:
                assert torch.equal(result, right), op


@pytest.mark.parametrize("n", [2, 4])
def test_bit_operations(ranks: Ranks, n: int) -> None:
    """band, bor and bxor combine integers and bools bit by bit."""
    set_ = ranks.get(n)
    for dtype in (torch.int32, torch.uint8, torch.bool):
        parts = [contribution((40,), dtype, rank, 9) for rank in range(n)]
        for op, function in (
            ("band", torch.bitwise_and), ("bor", torch.bitwise_or), ("bxor", torch.bitwise_xor),
        ):  # fmt: skip
            right = parts[0]
            for part in parts[1:]:
                right = function(right, part)
            assert all(torch.equal(r, right) for r in set_.run(reduce_all, parts, op))


@pytest.mark.parametrize(
    ("strategy", "nodes"),
    [*((s, "a" * n) for s in (*FLAT, "binomial") for n in (1, 2, 3, 5, 8)), *LEVELS],
)
def test_all_operations_move_the_right_parts(ranks: Ranks, strategy: str, nodes: str) -> None:
    """Broadcast, reduce, scatter, gather, all-gather, reduce-scatter and all-to-all, all roots."""
    n = len(nodes)
    set_ = ranks.get(n, strategy, nodes=list(nodes) if len(set(nodes)) > 1 else None)

    def work(group: Group, root: int, count: int, dtype: torch.dtype) -> None:
        def part(rank: int, index: int = 0) -> torch.Tensor:
            return contribution((count,), dtype, 100 * rank + index, root)

        tensor = part(group.rank)
        group.broadcast(tensor, root)
        assert torch.equal(tensor, part(root))

        tensor = part(group.rank)
        group.reduce(tensor, root)
        right = combined([part(r) for r in range(n)], "sum")
        assert torch.equal(tensor, right if group.rank == root else part(group.rank))

        outputs = [torch.zeros(count, dtype=dtype) for _ in range(n)]
        group.gather(part(group.rank), outputs if group.rank == root else None, root)
        if group.rank == root:
            assert all(torch.equal(outputs[r], part(r)) for r in range(n))

        output = torch.zeros(count, dtype=dtype)
        inputs = [part(root, r) for r in range(n)] if group.rank == root else None
        group.scatter(output, inputs, root)
        assert torch.equal(output, part(root, group.rank))

        outputs = [torch.zeros(count, dtype=dtype) for _ in range(n)]
        group.all_gather(outputs, part(group.rank))
        assert all(torch.equal(outputs[r], part(r)) for r in range(n))
        flat = torch.zeros(n * count, dtype=dtype)
        group.all_gather(flat, part(group.rank))
        assert torch.equal(flat, torch.cat(outputs))

        inputs = [part(group.rank, r) for r in range(n)]
        output = torch.zeros(count, dtype=dtype)
        group.reduce_scatter(output, inputs)
        right = combined([part(r, group.rank) for r in range(n)], "sum")
        assert torch.equal(output, right)
        output.zero_()
        group.reduce_scatter(output, torch.cat(inputs))
        assert torch.equal(output, right)
        assert torch.equal(inputs[0], part(group.rank, 0)), "the input is left alone"

        outputs = [torch.zeros(count, dtype=dtype) for _ in range(n)]
        group.all_to_all(outputs, inputs)
        assert all(torch.equal(outputs[r], part(r, group.rank)) for r in range(n))
        flat = torch.zeros(n * count, dtype=dtype)
        group.all_to_all(flat, torch.cat(inputs))
        assert torch.equal(flat, torch.cat(outputs))
        group.barrier()

    for root, (count, dtype) in itertools.product(
        sorted({0, n // 2, n - 1}), [(0, torch.float32), (5, torch.bfloat16), (1, torch.int64)]
    ):
        set_.run(work, root, count, dtype)
    set_.run(work, n - 1, 70001, torch.float32)


@pytest.mark.parametrize(
    ("strategy", "nodes"),
    [("ring", "aaaa"), ("halving_doubling", "aaaa"), ("bruck", "aaaa"), ("auto", "aaaa"),
     ("binomial", "aaaa"), ("local=ring,between=bruck", "aabb"),
     ("local=tree:2,between=ring", "abbb")],
)  # fmt: skip
def test_uneven_parts(ranks: Ranks, strategy: str, nodes: str) -> None:
    """Operations on lists take parts of different sizes, empty ones too."""
    n = 4
    set_ = ranks.get(n, strategy, nodes=list(nodes) if len(set(nodes)) > 1 else None)

    def work(group: Group) -> None:
        me = group.rank
        outputs = [torch.zeros(r, dtype=torch.int32) for r in range(n)]
        group.all_gather(outputs, torch.full((me,), me, dtype=torch.int32))
        assert [output.tolist() for output in outputs] == [[r] * r for r in range(n)]

        for root in range(n):
            outputs = [torch.zeros(2 * r) for r in range(n)]
            group.gather(
                torch.full((2 * me,), float(me)), outputs if me == root else None, root, uneven=True
            )
            if me == root:
                assert [output.tolist() for output in outputs] == [[float(r)] * 2 * r
                                                                   for r in range(n)]  # fmt: skip
            output = torch.zeros(3 - me)
            inputs = [torch.full((3 - r,), float(r)) for r in range(n)]
            group.scatter(output, inputs if me == root else None, root, uneven=True)
            assert output.tolist() == [float(me)] * (3 - me)

        output = torch.zeros(me)
        group.reduce_scatter(output, [torch.full((r,), float(me)) for r in range(n)])
        assert output.tolist() == [6.0] * me

        outputs = [torch.zeros(r + 2 * me) for r in range(n)]
        group.all_to_all(outputs, [torch.full((me + 2 * r,), float(me)) for r in range(n)])
        assert [output.tolist() for output in outputs] == [[float(r)] * (r + 2 * me)
                                                           for r in range(n)]  # fmt: skip

    set_.run(work)


def test_small_tensors_of_a_list_travel_in_few_frames(ranks: Ranks) -> None:
    """Halving and doubling on 8 ranks takes 3 messages for a small list, also of uneven parts."""

    def work(group: Group) -> tuple[int, int, int]:
        outputs = [torch.zeros(r % 3) for r in range(8)]
        spread = group.all_gather(outputs, torch.full((group.rank % 3,), float(group.rank)))
        assert [part.tolist() for part in outputs] == [[float(r)] * (r % 3) for r in range(8)]
        flat = torch.zeros(8, dtype=torch.bfloat16)
        whole = group.all_gather(flat, torch.ones(1, dtype=torch.bfloat16) * group.rank)
        assert flat.tolist() == [float(r) for r in range(8)]
        output = torch.zeros(group.rank % 3)
        share = group.reduce_scatter(output, [torch.full((r % 3,), float(r)) for r in range(8)])
        assert output.tolist() == [8.0 * group.rank] * (group.rank % 3)
        first, second, third = (
            len(issued.operation._program.sends)  # type: ignore[union-attr]
            for issued in (spread, whole, share)
        )
        return first, second, third

    assert ranks.get(8, "halving_doubling").run(work) == [(3, 3, 3)] * 8


@pytest.mark.parametrize("strategy", FLAT)
def test_results_are_bitwise_equal_on_ranks_and_in_repeats(ranks: Ranks, strategy: str) -> None:
    """Random floats give the same bytes on every rank and in every run, in all float types."""
    for n, dtype in itertools.product((3, 4, 7), (torch.float32, torch.bfloat16, torch.float16)):
        set_ = ranks.get(n, strategy)
        generator = torch.Generator().manual_seed(n)
        parts = [torch.randn(10007, generator=generator).to(dtype) for _ in range(n)]
        runs = [set_.run(reduce_all, parts, op) for op in ("sum", "sum", "mean")]
        assert all_equal_bytes([*runs[0], *runs[1]])
        assert all_equal_bytes(runs[2])
        exact = torch.stack([part.double() for part in parts]).sum(0)
        tolerance = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
        torch.testing.assert_close(runs[0][0].double(), exact, rtol=tolerance, atol=tolerance)


def test_a_hundred_all_reduces_in_a_row(ranks: Ranks) -> None:
    """A hundred sums, each of the result of the one before, come out exact on every strategy."""
    for strategy in FLAT:
        set_ = ranks.get(3, strategy)

        def work(group: Group) -> None:
            for index in range(100):
                tensor = torch.full((index,), float(group.rank + index))
                group.all_reduce(tensor)
                assert torch.equal(tensor, torch.full((index,), 3.0 + 3 * index))

        set_.run(work)


@pytest.mark.parametrize("n", range(1, 8))
def test_large_broadcasts_and_direct_gathers(ranks: Ranks, n: int) -> None:
    """A broadcast in shares and an all-gather in one hop give everyone the same bytes."""

    def spread(group: Group, root: int, count: int) -> None:
        right = torch.arange(count, dtype=torch.float64) + root
        tensor = right.clone() if group.rank == root else torch.zeros_like(right)
        group.broadcast(tensor, root)
        assert torch.equal(tensor, right)

    def gather(group: Group, count: int) -> None:
        outputs = [torch.zeros(count) for _ in range(n)]
        group.all_gather(outputs, torch.full((count,), float(group.rank)))
        assert all(torch.equal(part, torch.full((count,), float(r)))
                   for r, part in enumerate(outputs))  # fmt: skip

    for root, count in itertools.product(range(n), (0, 1, n - 1, 200_001)):
        ranks.get(n, "scatter_allgather").run(spread, root, count)
    for count in (0, 3, 200_001):
        ranks.get(n, "direct").run(gather, count)
