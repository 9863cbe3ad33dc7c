"""What ranks run in the tests of tensors in shared memory."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from resources import descriptors, resident
from torch_jobs import start as torch_start  # noqa: F401 - run by name

import collective
from collective.group import Group
from collective.strategies import parse

Place = Callable[[torch.Tensor], torch.Tensor]


def group() -> Group:
    return dist.group.WORLD.group  # type: ignore[union-attr]


def _shared(values: torch.Tensor) -> torch.Tensor:
    return collective.empty(values.shape, values.dtype).copy_(values)


def _slice(values: torch.Tensor) -> torch.Tensor:
    """In the middle of a larger shared tensor, at an odd element."""
    room = collective.empty(values.numel() + 100, values.dtype).zero_()
    return room[7 : 7 + values.numel()].view(values.shape).copy_(values)


def _ordinary(values: torch.Tensor) -> torch.Tensor:
    return values.clone()


def _copied() -> int:
    """Bytes that this rank has copied to its peers."""
    communicator = group()._communicator
    assert communicator is not None
    return sum(outlet.sent for outlet in communicator.outlets.values())


def _values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(count) % 50) + 3 * rank - 2).to(dtype)


def all_reduces(strategy: str, places: str, dtype: torch.dtype, op: str) -> int:
    """An all-reduce with this rank's letter of `places`: s(hared), v(iew), o(rdinary).

    Returns:
        Bytes that this rank copied.
    """
    here = group()
    before, here.strategy = here.strategy, parse(strategy)
    place = {"s": _shared, "v": _slice, "o": _ordinary}[places[here.rank]]
    count = 300_001
    copied = _copied()
    try:
        tensor = place(_values(here.rank, count, dtype))
        here.all_reduce(tensor, op)
        copied = _copied() - copied
        again = place(_values(here.rank, count, dtype))
        here.all_reduce(again, op, async_op=True).wait(30)
    finally:
        here.strategy = before
    wide = torch.complex128 if dtype.is_complex else torch.float64
    each = torch.stack([_values(rank, count, dtype).to(wide) for rank in range(here.size)])
    want = {
        "sum": lambda: each.sum(0), "mean": lambda: each.mean(0), "max": lambda: each.amax(0),
    }[op]().to(dtype)  # fmt: skip
    assert torch.equal(tensor, want), (strategy, places, dtype, op)
    assert torch.equal(again, want), (strategy, places, dtype, op)
    return copied


def other_operations(places: str) -> int:
    """Broadcast, all-gather, reduce-scatter, reduce, gather, scatter, all-to-all."""
    here = group()
    place = {"s": _shared, "v": _slice, "o": _ordinary}[places[here.rank]]
    n, count, copied = here.size, 100_003, _copied()
    each = [_values(rank, count, torch.float64) for rank in range(n)]
    total = sum(each[1:], start=each[0])
    for root in range(n):
        tensor = place(each[here.rank])
        here.broadcast(tensor, root)
        assert torch.equal(tensor, each[root])
        tensor = place(each[here.rank])
        here.reduce(tensor, root)
        assert torch.equal(tensor, total if here.rank == root else each[here.rank])
        outputs = [place(torch.zeros(count, dtype=torch.float64)) for _ in range(n)]
        here.gather(place(each[here.rank]), outputs if here.rank == root else None, root)
        assert here.rank != root or all(map(torch.equal, outputs, each))
        mine = place(torch.zeros(count, dtype=torch.float64))
        inputs = [place(one * (root + 1)) for one in each]
        here.scatter(mine, inputs if here.rank == root else None, root)
        assert torch.equal(mine, each[here.rank] * (root + 1))
    flat = place(torch.zeros(n * count, dtype=torch.float64))
    here.all_gather(flat, place(each[here.rank]))
    assert torch.equal(flat, torch.cat(each))
    mine = place(torch.zeros(count, dtype=torch.float64))
    here.reduce_scatter(mine, [place(each[here.rank] * (to + 1)) for to in range(n)])
    assert torch.equal(mine, total * (here.rank + 1))
    outputs = [place(torch.zeros(count, dtype=torch.float64)) for _ in range(n)]
    here.all_to_all(outputs, [place(each[here.rank] + to) for to in range(n)])
    assert all(torch.equal(one, each[rank] + here.rank) for rank, one in enumerate(outputs))
    return _copied() - copied


def what_is_left() -> tuple[int, int, int]:
    """Descriptors, mappings of tensors' memory, and bytes in memory, after much use."""
    gc.collect()
    with open("/proc/self/maps") as file:
        maps = sum("unisono-tensors" in line for line in file)
    return len(descriptors()), maps, resident()


def use_much(rounds: int) -> tuple[int, int, int]:
    """Make, reduce and drop tensors of many sizes, in groups that come and go."""
    here = group()
    for index in range(rounds):
        with here.subgroup(range(here.size), f"m{index}") as sub:
            tensors = [collective.empty(1 << (16 + step)).fill_(1.0) for step in range(5)]
            for tensor in tensors[::-1]:
                sub.all_reduce(tensor)
                assert tensor.eq(here.size).all()
    return what_is_left()


def tensors_of_a_forked_child() -> tuple[bool, float, float]:
    """A child frees what it inherited and makes its own; neither is the parent's loss."""
    tensor = collective.empty(1 << 18).fill_(5.0)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def child() -> None:
        nonlocal tensor
        inherited = float(tensor.sum())
        del tensor
        own = collective.empty(1 << 18).fill_(7.0)
        theirs.send((inherited, float(own.sum())))

    process = context.Process(target=child)
    process.start()
    inherited, own = ours.recv()
    process.join(20)
    return bool(tensor.eq(5.0).all()), inherited, own


def wrong_calls() -> list[str]:
    """What is said of calls that cannot be."""
    calls: list[tuple[Any, ...]] = [(-1,), (3, "float32"), (1 << 50,)]
    said = []
    for arguments in calls:
        try:
            collective.empty(*arguments)
        except (RuntimeError, TypeError, MemoryError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def kill_while_they_read(victim: int) -> None:
    """Reduce until the victim is gone, in the middle of one."""
    tensor = collective.empty(1 << 22).fill_(0.0)
    work = [dist.all_reduce(tensor, async_op=True) for _ in range(20)]
    if dist.get_rank() == victim:
        work[3].wait()
        os._exit(9)
    for one in work:
        one.wait()
