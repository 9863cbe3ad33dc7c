"""Collectives through stages, as CUDA tensors of one node take them, here in host memory.

Everything but streams, events and the kernel is what runs on a device: turns, pieces, shares,
descriptors, and how an operation ends when something goes wrong.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from thread_ranks import ThreadRanks

from collective import device_calls, device_exchange, device_ipc, device_kernel
from collective.device_exchange import Exchange, Lobby, Meeting, Stage
from collective.device_issuing import DeviceIssuing
from collective.errors import GroupClosed, Mismatch, Refused
from collective.group import Group
from collective.reduction import ReduceOp
from collective.strategies import parse

pytestmark = pytest.mark.timeout(60)

N = 4


def _exchange(group: Any, tensors: Sequence[torch.Tensor], nbytes: int) -> Exchange | None:
    """As `DeviceIssuing._exchange`, but for tensors on the CPU, of any size but none."""
    if not nbytes or str(group.strategy) != "auto":
        return None
    if group._meeting is None:
        group._meeting = group._meet(tensors[0].device)
    assert isinstance(group._meeting, Meeting)
    return group._meeting.exchange


@pytest.fixture(scope="module")
def ranks() -> Iterator[ThreadRanks]:
    with ThreadRanks(N) as made:
        yield made


@pytest.fixture(autouse=True)
def small_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots of 4 KiB, so that small tensors have many pieces."""
    for module in (device_exchange, device_calls):
        monkeypatch.setattr(module, "SLOT", 4096)
    monkeypatch.setattr(DeviceIssuing, "_exchange", _exchange)


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(count) * 7 + rank) % 13 - 3 * (not dtype.is_signed)).abs().to(dtype)


@pytest.mark.parametrize("count", [1, 3, 1023, 1024, 1025, 10_007])
def test_every_piece_and_share_is_summed(ranks: ThreadRanks, count: int) -> None:
    """Sizes around a slot's, and smaller than the group, are exact, as often as one likes."""

    def call(group: Group) -> None:
        for _ in range(3):
            tensor = values(group.rank, count, torch.float32)
            group.all_reduce(tensor)
            assert torch.equal(tensor, sum(values(r, count, torch.float32) for r in range(N)))

    ranks.run(call)


OPS = {
    torch.float32: ["sum", "mean", "product", "min", "max"],
    torch.float64: ["sum", "mean"],
    torch.bfloat16: ["sum", "mean", "product", "min", "max"],
    torch.float16: ["sum", "mean"],
    torch.complex64: ["sum"],
    torch.int8: ["sum", "product", "min", "max", "band", "bor", "bxor"],
    torch.int64: ["sum", "max", "bxor"],
    torch.uint8: ["sum", "min"],
    torch.bool: ["sum", "product", "band", "bor", "bxor", "min", "max"],
}


@pytest.mark.parametrize("dtype", OPS, ids=str)
def test_the_bits_are_those_of_the_fold_in_the_order_of_ranks(
    ranks: ThreadRanks, dtype: torch.dtype
) -> None:
    """Every reduction gives what the host's direct reduce-scatter gives, with NaN and factors."""

    def call(group: Group) -> None:
        generator = torch.Generator().manual_seed(group.rank)
        if dtype.is_floating_point or dtype.is_complex:
            tensor = torch.randn(3001, generator=generator, dtype=dtype)
            tensor[5 * group.rank] = float("nan")
        else:
            tensor = torch.randint(0, 2, (3001,), generator=generator).to(dtype)
        for op in OPS[dtype]:
            factors = [None, 0.3] if dtype in (torch.float32, torch.float64) else [None]
            for factor in factors:
                mine, theirs = tensor.clone(), tensor.clone()
                group.all_reduce(mine, op, factor)
                group.strategy = parse("scatter_allgather")
                group.all_reduce(theirs, op, factor)
                group.strategy = parse("auto")
                # a NaN is a NaN: which of its bits are set is up to the order of operands
                same = torch.isnan(mine) == torch.isnan(theirs)
                same &= torch.isnan(mine) | (mine == theirs)
                assert same.all(), (op, factor, mine[~same], theirs[~same])

    ranks.run(call)


def test_other_operations_and_layouts(ranks: ThreadRanks) -> None:
    """Broadcast, all-gather, reduce-scatter: even, uneven and strided; neighbours untouched."""

    def call(group: Group) -> None:
        each = [values(rank, 3001, torch.float64) for rank in range(N)]
        total = sum(each[1:], start=each[0])
        for root in range(N):
            tensor = each[group.rank].clone()
            group.broadcast(tensor, root)
            assert torch.equal(tensor, each[root])
        flat = torch.zeros(N * 3001, dtype=torch.float64)
        group.all_gather(flat, each[group.rank])
        assert torch.equal(flat, torch.cat(each))
        outputs = [torch.zeros(3001 + 600 * rank, dtype=torch.float64) for rank in range(N)]
        group.all_gather(outputs, values(group.rank, 3001 + 600 * group.rank, torch.float64))
        for rank, output in enumerate(outputs):
            assert torch.equal(output, values(rank, 3001 + 600 * rank, torch.float64))
        sizes = [100, 3000, 1, 777]
        inputs = [values(group.rank + part, size, torch.int32) for part, size in enumerate(sizes)]
        output = torch.zeros(sizes[group.rank], dtype=torch.int32)
        group.reduce_scatter(output, inputs)
        own = [values(rank + group.rank, sizes[group.rank], torch.int32) for rank in range(N)]
        assert torch.equal(output, sum(own[1:], start=own[0]))
        wide = torch.full((60, 100), -1.0, dtype=torch.float64)
        strided = wide[::2, 1:51].t()
        strided.copy_(each[group.rank][:1500].view(50, 30))
        group.all_reduce(strided)
        assert torch.equal(strided, total[:1500].view(50, 30))
        assert (wide[1::2] == -1).all()
        assert (wide[:, 51:] == -1).all()

    ranks.run(call)


def test_results_may_lie_on_the_input(ranks: ThreadRanks) -> None:
    """In its own part, as programs do, or shifted, where a piece is written before it is read."""

    def call(group: Group) -> None:
        count = 5000
        for shift in (0, 700, count + 1500):
            whole = values(group.rank, N * count, torch.float64)
            want = sum(values(rank, N * count, torch.float64) for rank in range(N))
            start = (group.rank * count + shift) % ((N - 1) * count + 1)
            output = whole[start : start + count]
            group.reduce_scatter(output, whole)
            assert torch.equal(output, want[group.rank * count :][:count])
            outputs = torch.zeros(N * count, dtype=torch.float64)
            own = outputs[start : start + count]
            own.copy_(values(group.rank, count, torch.float64))
            group.all_gather(outputs, own)
            each = [values(rank, count, torch.float64) for rank in range(N)]
            assert torch.equal(outputs, torch.cat(each))

    ranks.run(call)


def test_operations_in_a_row_and_in_subgroups(ranks: ThreadRanks) -> None:
    """Many asynchronous ones follow each other through the same slots, beside a subgroup's."""

    def call(group: Group) -> None:
        members = range(2 * (group.rank // 2), 2 * (group.rank // 2) + 2)
        with group.subgroup(members, f"pair{group.rank // 2}") as pair:
            tensors = [torch.full((5000,), float(group.rank + index)) for index in range(20)]
            works = [
                (pair if index % 3 == 0 else group).all_reduce(tensor, async_op=True)
                for index, tensor in enumerate(tensors)
            ]
            for work in works:
                work.wait(20)
            for index, tensor in enumerate(tensors):
                who = members if index % 3 == 0 else range(N)
                assert tensor.eq(sum(rank + index for rank in who)).all()

    ranks.run(call)


def test_a_rank_that_closes_its_group_between_turns_is_named() -> None:
    """Whoever looks for its stage a moment before it hears of that says who it was."""
    lobby = Lobby()
    here, other = (lobby.meet("g", rank, 2, torch.device("cpu")) for rank in range(2))
    other.close(healthy=False)
    told = "rank 1 closed group g during operations"
    with pytest.raises(GroupClosed, match=told) as caught, here.exchange.turn(1, []):
        pass
    assert caught.value.rank == 1


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """What opens devices to other processes, without a device."""
    made = MagicMock()
    made.cuda.runtime.malloc.return_value = 7
    made.cuda.runtime.ipcGetMemHandle.return_value = b"m"
    monkeypatch.setattr(device_kernel, "cupy", lambda: made)
    torch_cuda = MagicMock()
    torch_cuda.Event.return_value.ipc_handle.return_value = b"e"
    monkeypatch.setattr(torch, "cuda", torch_cuda)
    monkeypatch.setattr(device_ipc, "_as_tensor", lambda *_: torch.zeros(1))
    monkeypatch.setattr(device_ipc, "_made", [])
    return made


def test_memory_that_cannot_be_opened_to_others_is_given_back(cupy: MagicMock) -> None:
    """Where a machine has no CUDA IPC, each group tries, is told why, and holds nothing."""
    cupy.cuda.runtime.ipcGetMemHandle.side_effect = RuntimeError("not supported")
    with pytest.raises(RuntimeError, match="not supported"):
        device_ipc._own_stage(torch.device("cuda", 1))
    cupy.cuda.runtime.free.assert_called_once_with(7)


def test_what_others_may_have_open_lives_as_long_as_the_process(cupy: MagicMock) -> None:
    """Also that of a group which failed: a peer that has not heard of it may wait for its event."""
    own = weakref.ref(device_ipc._own_stage(torch.device("cuda", 1)))
    gc.collect()
    found = own()
    assert found is not None and (found.memory, found.event) == (b"m".hex(), b"e".hex())
    cupy.cuda.runtime.free.assert_not_called()


def test_a_tensor_on_another_device_comes_and_goes() -> None:
    """Kernels and events are of the stage's device alone; here that is one without memory."""
    device = torch.device("meta")
    stage = Stage(torch.empty(1), None)
    exchange = Exchange(device, 0, 2, stage, lambda _: stage)
    tensor = torch.ones(5000)
    for line in (
        device_calls.all_reduce(exchange, tensor, ReduceOp.SUM, None),
        device_calls.broadcast(exchange, tensor, 1),
        device_calls.all_gather(exchange, [tensor], torch.ones(5000)),
        device_calls.reduce_scatter(exchange, tensor, [torch.ones(5000)] * 2, ReduceOp.SUM, None),
    ):
        ((flat, back),) = line._results
        assert flat.device == device and back.data_ptr() == tensor.data_ptr()


def test_a_refused_call_leaves_the_others_and_their_tensors(ranks: ThreadRanks) -> None:
    """What one rank refuses ends on all before a value is changed; the group goes on."""

    def call(group: Group) -> None:
        tensor = torch.ones(3000)
        with pytest.raises(Refused):
            group.all_reduce(tensor.to_sparse() if group.rank == 1 else tensor)
        assert tensor.eq(1).all()
        group.all_reduce(tensor)
        assert tensor.eq(N).all()

    ranks.run(call)


def test_a_rank_with_a_tensor_on_the_cpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the others' are on devices: an error on all, and no tensor is changed."""

    def none_on_rank_1(group: Any, tensors: Sequence[torch.Tensor], nbytes: int) -> Exchange | None:
        return None if group.rank == 1 else _exchange(group, tensors, nbytes)

    monkeypatch.setattr(DeviceIssuing, "_exchange", none_on_rank_1)

    def call(group: Group) -> None:
        tensor = torch.ones(3000)
        with pytest.raises(Mismatch, match=r"device"):
            group.all_reduce(tensor)
        assert tensor.eq(1).all()

    with ThreadRanks(3) as made:
        made.run(call)


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter"])
def test_ranks_that_know_other_sizes_of_parts_are_named(name: str) -> None:
    """No frame holds a part here: all sizes are compared before a value is changed."""

    def call(group: Group) -> None:
        sizes = [700, 100, 300 + (group.rank == 1)]
        parts, own = [torch.zeros(size) for size in sizes], torch.zeros(sizes[group.rank])
        arguments = (parts, own + 1) if name == "all_gather" else (own, [p + 1 for p in parts])
        with pytest.raises(Mismatch, match=r"300\].*301\]|301\].*300\]"):
            getattr(group, name)(*arguments)
        assert not any(tensor.count_nonzero() for tensor in (*parts, own))

    with ThreadRanks(3) as made:
        made.run(call)


def test_ranks_that_call_something_else_are_named() -> None:
    """A difference is found in the first turn, before a value is changed."""

    def call(group: Group) -> None:
        tensor = torch.ones(2000 if group.rank else 3000)
        with pytest.raises(Mismatch, match=r"device"):
            group.all_reduce(tensor)
        assert tensor.eq(1).all()

    with ThreadRanks(3) as made:
        made.run(call)
