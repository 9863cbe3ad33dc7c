"""The numbers that are easy to get wrong: layouts, means, bools, half floats, NaN; refusals."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from thread_ranks import Ranks, ThreadRanks

from collective.arguments import check_apart
from collective.errors import CollectiveError, Refused
from collective.group import Group
from collective.reduction import ReduceOp, fold_of

STRATEGIES = ["ring", "tree:2", "centralized", "auto"]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    kept = Ranks()
    yield kept
    kept.close()


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def summed(ranks: ThreadRanks, values: list[torch.Tensor], op: str = "sum") -> list[torch.Tensor]:
    def work(group: Group) -> torch.Tensor:
        tensor = values[group.rank].clone()
        group.all_reduce(tensor, op)
        return tensor

    return ranks.run(work)


def test_a_column_is_reduced_and_its_neighbours_are_left_alone(ranks: Ranks, strategy: str) -> None:
    """A strided view gets the right values, stays a view, and nothing beside it changes."""

    def work(group: Group) -> None:
        base = torch.arange(12).reshape(3, 4).float() * (group.rank + 1)
        before = base.clone()
        column = base[:, 1]
        group.all_reduce(column)
        assert column.tolist() == [3.0, 15.0, 27.0]
        assert column.data_ptr() == base[:, 1].data_ptr()
        before[:, 1] = torch.tensor([3.0, 15.0, 27.0])
        assert torch.equal(base, before)

        base = torch.arange(12).reshape(3, 4).float() * (group.rank + 1)
        group.all_reduce(base.t())
        assert torch.equal(base, torch.arange(12).reshape(3, 4).float() * 3)

        base = torch.arange(7).to(torch.bfloat16) * (group.rank + 1)
        group.all_reduce(base[::2])
        right = [i * (3.0 if i % 2 == 0 else group.rank + 1) for i in range(7)]
        assert base.tolist() == right

        base = torch.arange(12).reshape(3, 4).float() * (group.rank + 1)
        group.broadcast(base[:, 1], 0)
        assert base[:, 1].tolist() == [1.0, 5.0, 9.0]
        assert base[:, 2].tolist() == [i * (group.rank + 1.0) for i in (2, 6, 10)]

        complex_ = torch.complex(torch.ones(3), torch.arange(3.0)).conj()
        group.all_reduce(complex_)
        assert complex_.tolist() == [2 - 0j, 2 - 2j, 2 - 4j]

    ranks.get(2, strategy).run(work)


def test_an_expanded_output_is_refused_on_all_ranks_and_the_group_goes_on(
    ranks: Ranks, strategy: str
) -> None:
    """Stride 0 cannot hold a result: every rank that issued the call hears so, the next works."""

    def work(group: Group, bad: set[int], size: int) -> None:
        for round_ in range(5):
            if group.rank in bad:
                tensor = torch.tensor([7.0]).expand(size)
            else:
                tensor = torch.full((size,), 7.0)
            with pytest.raises(Refused, match="share memory") as caught:
                group.all_reduce(tensor)
            assert caught.value.rank in bad
            assert caught.value.operation == "all_reduce"
            if group.rank in bad or size <= 16384:
                assert bool((tensor == 7.0).all()), "unchanged, as up to 64 KiB elsewhere"
            good = torch.full((1000,), float(group.rank + round_))
            group.all_reduce(good)
            n = group.size
            assert torch.equal(good, torch.full((1000,), n * (n - 1) / 2 + n * round_))
            assert group.error is None

    for n in (2, 3, 4):
        for bad in ({0}, {n - 1}, set(range(n))):
            ranks.get(n, strategy).run(work, bad, 4)
    ranks.get(3, strategy).run(work, {1}, 300_000)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_is_refused_says_why(ranks: Ranks) -> None:
    """Each impossible call is refused with the reason, leaves the tensor, and the group works."""

    def refused(group: Group, call: object, match: str) -> None:
        with pytest.raises(Refused, match=match):
            call()  # type: ignore[operator]
        tensor = torch.ones(1)
        group.all_reduce(tensor)
        assert tensor.item() == group.size

    def work(group: Group) -> None:
        ints, flags = torch.arange(4), torch.tensor([True])
        refused(group, lambda: group.all_reduce(ints, "mean"), "mean of int64")
        assert ints.tolist() == [0, 1, 2, 3]
        refused(group, lambda: group.all_reduce(flags, "avg"), "mean of bool")
        refused(group, lambda: group.all_reduce(torch.ones(2), "bxor"), "not for float32")
        refused(group, lambda: group.all_reduce(torch.ones(2), "median"), "unknown reduction")
        refused(group, lambda: group.all_reduce(torch.ones(2) * 1j, "max"), "no order")
        refused(group, lambda: group.all_reduce([1.0]), "must be a torch.Tensor")  # type: ignore
        refused(group, lambda: group.all_reduce(torch.ones(2).to_sparse()), "to_dense")
        pair = torch.ones(2)
        for call in (
            lambda: group.all_gather((torch.empty(2) for _ in range(2)), pair),  # type: ignore[arg-type]
            lambda: group.reduce_scatter(pair, None),  # type: ignore[arg-type]
            lambda: group.all_to_all(None, pair),  # type: ignore[arg-type]
            lambda: group.gather(pair, 2, 0),  # type: ignore[arg-type]
        ):
            refused(group, call, "must be a list with a tensor for each rank, or one tensor")
        parts = [torch.ones(2 + (part == group.rank)) for part in range(2)]
        for call in (
            lambda: group.all_gather(parts, pair),
            lambda: group.reduce_scatter(pair, parts),
            lambda: group.gather(pair, parts, group.rank, uneven=True),
            lambda: group.scatter(pair, parts, group.rank, uneven=True),
        ):
            refused(group, call, rf"puts\[{group.rank}\] has 3 elements, the other tensor 2")
        refused(group, lambda: group.broadcast(torch.ones(2), 9), "ranks 0 to 1")
        refused(group, lambda: group.broadcast(torch.ones(2), -1), "ranks 0 to 1")
        refused(group, lambda: group.broadcast(torch.ones(2), "1"), "whole number")  # type: ignore
        group.broadcast(torch.ones(2), np.int64(1))  # type: ignore[arg-type]
        for timeout in (-1, math.nan, "5", True, math.inf, 10**400):
            refused(group, lambda t=timeout: group.barrier(timeout=t), "number of seconds")
        refused(
            group,
            lambda: group.all_gather([torch.ones(2)], torch.ones(2)),
            "1 tensors, the group 2",
        )
        refused(
            group, lambda: group.all_gather(torch.ones(5), torch.ones(2)), "has 5 elements; 2 ranks"
        )
        refused(
            group,
            lambda: group.all_gather([torch.ones(2), torch.ones(2, dtype=torch.int32)],
                                     torch.ones(2)),
            "int32",
        )  # fmt: skip
        refused(group, lambda: group.scatter(torch.ones(2), None, group.rank), "needs them")
        refused(
            group, lambda: group.gather(torch.ones(2), [torch.ones(2)] * 2, 1 - group.rank), "None"
        )
        refused(group, lambda: group.reduce_scatter(torch.ones(2), torch.ones(3)), "3 elements")
        for inputs in ([torch.ones(2)] * 2, [torch.ones(2 + group.rank)] * 2):
            refused(group, lambda i=inputs: group.reduce_scatter(torch.ones(4), i), "tensor 4")
        quantized = torch._make_per_tensor_quantized_tensor(flags.to(torch.uint8), 1.0, 0)
        refused(group, lambda: group.broadcast(quantized, 0), "quantized; send .dequantize")
        with pytest.raises(Refused, match="this very rank"):
            group.send(torch.ones(1), group.rank)

    ranks.get(2).run(work)


def test_one_rank_refuses_an_asynchronous_call_while_others_run_on(ranks: Ranks) -> None:
    """A refusal in the middle of asynchronous calls ends that call only, on every rank."""

    def work(group: Group) -> None:
        for culprit in range(group.size):
            works, tensors = [], []
            for index in range(6):
                tensor = torch.full((50_000,), float(index))
                tensors.append(tensor)
                if index == 3 and group.rank == culprit:
                    with pytest.raises(Refused):
                        group.all_reduce(torch.ones(1).expand(50_000), async_op=True)
                    works.append(None)
                else:
                    works.append(group.all_reduce(tensor, async_op=True))
            for index, issued in enumerate(works):
                if index != 3:
                    assert issued is not None
                    issued.wait()
                    assert torch.equal(tensors[index], torch.full((50_000,), 3.0 * index))
                elif issued is not None:
                    with pytest.raises(Refused, match=f"rank {culprit} on node"):
                        issued.wait()
        group.barrier()

    for strategy_ in STRATEGIES:
        ranks.get(3, strategy_).run(work)


def test_outputs_that_lie_in_one_another_are_refused() -> None:
    """Also where one with gaps begins between them."""
    room = torch.zeros(100)
    with pytest.raises(Refused, match=r"outputs\[0\] and outputs\[2\] share memory"):
        check_apart([room[50:60], room[10:40:2], room], "outputs")
    check_apart([room[50:60], room[::2][:25], room[1::2][:25]], "outputs")


@pytest.mark.parametrize("n", range(1, 9))
def test_the_mean_divides_by_the_number_of_ranks(ranks: Ranks, n: int, strategy: str) -> None:
    """full(numel, r + 1) has the mean (N + 1) / 2 exactly, whatever numel and N are."""
    for numel in (1, 5, 64):
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            values = [torch.full((numel,), r + 1.0, dtype=dtype) for r in range(n)]
            for result in summed(ranks.get(n, strategy), values, "avg"):
                assert result.tolist() == [(n + 1) / 2] * numel


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64],
                         ids=str)  # fmt: skip
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_a_factor_is_applied_before_anything_is_combined(
    ranks: Ranks, n: int, dtype: torch.dtype, strategy: str
) -> None:
    """A prescaled reduction is the reduction of scaled values; the neighbours and inputs stay."""
    ops = ["sum", "mean", "product"] + ([] if dtype.is_complex else ["min", "max"])
    wide = torch.complex128 if dtype.is_complex else torch.float64

    def right(op: str, factor: float) -> torch.Tensor:
        stack = torch.stack([value(rank).to(wide) * factor for rank in range(n)])
        table = {"sum": lambda: stack.sum(0), "mean": lambda: stack.mean(0),
                 "product": lambda: stack.prod(0), "min": lambda: stack.amin(0),
                 "max": lambda: stack.amax(0)}  # fmt: skip
        return table[op]().to(dtype)

    def value(rank: int) -> torch.Tensor:
        return (torch.arange(7) - 3 + rank).to(dtype)

    def work(group: Group, op: str, factor: float) -> None:
        me, want = group.rank, right(op, factor)
        room = torch.zeros(14, dtype=dtype)
        room[::2] = value(me)
        for tensor in (room[::2], value(me)):
            group.all_reduce(tensor, op, prescale=factor)
            torch.testing.assert_close(tensor, want)
        assert room[1::2].count_nonzero() == 0
        for dst in {0, n - 1}:
            tensor = value(me)
            group.reduce(tensor, dst, op, prescale=factor)
            torch.testing.assert_close(tensor, want if me == dst else value(me))
        inputs, output = [value(me) for _ in range(n)], torch.zeros(7, dtype=dtype)
        group.reduce_scatter(output, inputs, op, prescale=factor)
        torch.testing.assert_close(output, want)
        assert all(torch.equal(part, value(me)) for part in inputs)

    for op in ops:
        for factor in (0.5, -2, 1 / 3):
            ranks.get(n, strategy).run(work, op, factor)


def test_a_sum_of_shares_is_the_mean(ranks: Ranks, strategy: str) -> None:
    """A factor of 1/n gives the mean up to rounding, and keeps half floats from overflowing."""
    for n in (2, 3, 7):
        generator = torch.Generator().manual_seed(n)
        parts = [torch.randn(1001, generator=generator) for _ in range(n)]

        def work(group: Group, parts: list[torch.Tensor]) -> None:
            mine = parts[group.rank]
            one, two = mine.clone(), mine.clone()
            group.all_reduce(one, prescale=1 / group.size)
            group.all_reduce(two, "mean")
            torch.testing.assert_close(one, two)
            half = torch.full((3,), 40000.0, dtype=torch.float16)
            group.all_reduce(half, prescale=1 / group.size)
            torch.testing.assert_close(half, torch.full_like(half, 40000.0))

        ranks.get(n, strategy).run(work, parts)


def test_a_factor_without_a_meaning_is_refused(ranks: Ranks) -> None:
    """Integers and bools take no factor, nothing takes NaN; tensors stay, the group goes on."""

    def work(group: Group) -> None:
        for tensor, factor, words in (
            (torch.arange(4), 0.5, "int64"),
            (torch.arange(4), 1, "int64"),
            (torch.tensor([True]), 0.5, "bool"),
            (torch.ones(2), math.nan, "nan"),
            (torch.ones(2), 10**400, "finite"),
            (torch.ones(2), "half", "'half'"),
            (torch.ones(2), True, "True"),
        ):
            before = tensor.clone()
            with pytest.raises(Refused, match=words):
                group.all_reduce(tensor, prescale=factor)  # type: ignore[arg-type]
            with pytest.raises(Refused, match=words):
                group.reduce(tensor, 0, prescale=factor)  # type: ignore[arg-type]
            with pytest.raises(Refused, match=words):
                group.reduce_scatter(tensor, [tensor] * group.size, prescale=factor)  # type: ignore[arg-type]
            assert torch.equal(tensor, before)
        tensor = torch.ones(1)
        group.all_reduce(tensor)
        assert tensor.item() == group.size

    for n in (1, 2):
        ranks.get(n).run(work)


def test_a_subgroup_divides_by_its_own_size(ranks: Ranks) -> None:
    """Two of four ranks have a mean of two."""

    def work(group: Group) -> None:
        if group.rank in (1, 3):
            sub = group.subgroup([3, 1], "pair")
            tensor = torch.full((5,), group.rank + 1.0)
            sub.all_reduce(tensor, "mean")
            assert tensor.tolist() == [3.0] * 5
            assert sub.rank == (0 if group.rank == 3 else 1)
            sub.close()

    ranks.get(4).run(work)


def test_bool_stays_bool(ranks: Ranks, strategy: str) -> None:
    """Sum and max are or, product and min are and; gather, broadcast and scatter carry bools."""
    values = [torch.tensor([True, True, False]), torch.tensor([False, True, False])]
    either, both = [True, True, False], [False, True, False]
    for op, right in (("sum", either), ("max", either), ("product", both), ("min", both)):
        for result in summed(ranks.get(2, strategy), values, op):
            assert result.dtype is torch.bool
            assert result.tolist() == right

    def work(group: Group) -> None:
        outputs = [torch.zeros(3, dtype=torch.bool) for _ in range(2)]
        group.all_gather(outputs, values[group.rank])
        assert [output.tolist() for output in outputs] == [value.tolist() for value in values]
        tensor = values[group.rank].clone()
        group.broadcast(tensor, 1)
        assert tensor.tolist() == values[1].tolist()
        output = torch.zeros(3, dtype=torch.bool)
        group.scatter(output, values if group.rank == 0 else None, 0)
        assert output.tolist() == values[group.rank].tolist()

    ranks.get(2, strategy).run(work)


def test_256_trues_stay_true() -> None:
    """The kernel that combines bools does not wrap as bytes do."""
    fold = fold_of(ReduceOp.SUM, torch.bool)
    total = np.ones(4, dtype=np.uint8)
    for _ in range(255):
        fold(total, np.ones(4, dtype=np.uint8), total)
    assert torch.from_numpy(total).view(torch.bool).tolist() == [True] * 4
    assert total.tolist() == [1] * 4


def test_half_floats_are_summed_wide(ranks: Ranks, strategy: str) -> None:
    """fp16: the sum of 40000s is inf, their mean is 40000, the smallest subnormal survives."""
    big = [torch.full((3,), 40000.0, dtype=torch.float16)] * 2
    tiny = [torch.full((3,), 2.0**-24, dtype=torch.float16)] * 2
    set_ = ranks.get(2, strategy)
    assert all(result.tolist() == [math.inf] * 3 for result in summed(set_, big))
    assert all(result.tolist() == [40000.0] * 3 for result in summed(set_, big, "mean"))
    assert all(result.tolist() == [2.0**-24] * 3 for result in summed(set_, tiny, "mean"))
    # 256 + 1 + 1 is 258 in float32, but 256 when bfloat16 is rounded after each addition
    parts = [torch.full((9,), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    assert all(r.tolist() == [258.0] * 9 for r in summed(ranks.get(3, strategy), parts))

    def scattered(group: Group) -> list[float]:
        output = torch.zeros(2, dtype=torch.bfloat16)
        group.reduce_scatter(output, [parts[group.rank][:2]] * 3)
        return list(output.tolist())

    assert ranks.get(3, strategy).run(scattered) == [[258.0] * 2] * 3

    def reduced(group: Group) -> list[float]:
        tensor = parts[group.rank].clone()
        group.reduce(tensor, 1)
        return list(tensor.tolist())

    results = ranks.get(3, strategy).run(reduced)
    assert results == [[256.0] * 9, [258.0] * 9, [1.0] * 9]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_nan_propagates_from_every_place(ranks: Ranks, strategy: str, dtype: torch.dtype) -> None:
    """One NaN makes min, max, sum and product NaN on all ranks, whichever rank holds it."""
    set_ = ranks.get(4, strategy)
    for place in range(4):
        values = [1.0, 2.0, 3.0, 4.0]
        values[place] = math.nan
        parts = [torch.tensor([value, 1.0], dtype=dtype) for value in values]
        for op in ("min", "max", "sum", "product", "mean"):
            for result in summed(set_, parts, op):
                assert math.isnan(result[0])
                assert not math.isnan(result[1])
    infinite = [torch.tensor([v], dtype=dtype) for v in (math.inf, -math.inf, 1.0, 2.0)]
    assert all(math.isnan(result) for result in summed(set_, infinite))


@pytest.mark.parametrize("strategy", ["auto", "direct", "recursive_doubling", "ring"])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_ranks_that_swap_operands_get_the_same_bits(ranks: Ranks, n: int, strategy: str) -> None:
    """Also of 0 and -0, of NaNs with different signs, and of products of complex numbers."""
    odd = torch.tensor([0.0, -0.0, math.nan, -math.nan])
    set_ = ranks.get(n, strategy)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        parts = [odd.roll(rank).repeat(25).to(dtype) for rank in range(n)]
        for op in ("min", "max"):
            results = summed(set_, parts, op)
            assert len({result.view(torch.uint8).numpy().tobytes() for result in results}) == 1, op
    for result in summed(set_, [torch.tensor([0.0, -0.0]).roll(r % 2) for r in range(n)], "min"):
        assert result.signbit().all()
    for result in summed(set_, [torch.tensor([0.0, -0.0]).roll(r % 2) for r in range(n)], "max"):
        assert not result.signbit().any()
    for dtype in (torch.complex64, torch.complex128):
        generator = torch.Generator().manual_seed(n)
        parts = [torch.randn(1001, generator=generator, dtype=dtype) for _ in range(n)]
        results = summed(set_, parts, "product")
        assert len({result.numpy().tobytes() for result in results}) == 1
        right = torch.stack([part.to(torch.complex128) for part in parts]).prod(0)
        torch.testing.assert_close(results[0], right.to(dtype))


def test_the_tensor_of_a_failed_group_says_so(ranks: Ranks) -> None:
    """After an error every further call raises the same error, which `group.error` keeps."""

    def work(group: Group) -> None:
        with pytest.raises(CollectiveError):
            group.all_reduce(torch.ones(2 + group.rank))
        error = group.error
        assert error is not None
        with pytest.raises(type(error), match="disagree"):
            group.barrier()

    ranks.get(2).run(work)


HALVES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("n", [2, 3, 4, 7])
@pytest.mark.parametrize("count", [1, 5, 100_003])
def test_half_floats_are_folded_in_the_order_of_ranks(
    ranks: Ranks, n: int, count: int, dtype: torch.dtype
) -> None:
    """By default the result is, bit for bit, the float32 sum by rank order, divided, cast once."""
    generator = torch.Generator().manual_seed(count)
    values = [torch.randn(count, generator=generator).to(dtype) for _ in range(n)]
    total = values[0].float()
    for value in values[1:]:
        total = total + value.float()
    for result in summed(ranks.get(n, "auto"), values):
        assert torch.equal(result, total.to(dtype))
    for result in summed(ranks.get(n, "auto"), values, "mean"):
        assert torch.equal(result, (total / n).to(dtype))

    def scattered(group: Group) -> torch.Tensor:
        output = torch.zeros(count, dtype=dtype)
        group.reduce_scatter(output, [values[group.rank]] * n, "mean")
        return output

    for result in ranks.get(n, "auto").run(scattered):
        assert torch.equal(result, (total / n).to(dtype))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_half_floats_travel_as_half_floats(ranks: Ranks, n: int, dtype: torch.dtype) -> None:
    """By default an all-reduce sends 2(n−1)/n of the tensor's own bytes per rank, and no more."""
    count = 600_000

    def work(group: Group) -> int:
        return group.all_reduce(torch.ones(count, dtype=dtype)).timing.sent

    for sent in ranks.get(n, "auto").run(work):
        assert sent == pytest.approx(2 * (n - 1) / n * 2 * count, rel=0.01)
