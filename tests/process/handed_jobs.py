"""What ranks run in the tests of levels that are handed to another library."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from fault_jobs import group

from collective import libraries
from collective.errors import CollectiveError, Refused
from collective.group import Group

_REDUCED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda all_: all_.sum(0),
    "mean": lambda all_: all_.mean(0),
    "product": lambda all_: all_.prod(0),
    "min": lambda all_: all_.min(0).values,
    "max": lambda all_: all_.max(0).values,
}


def carried() -> int:
    """How many process groups another library has made for this rank."""
    made = group()._libraries
    return 0 if made is None else len(made._groups)


def own(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """A rank's values: whole numbers from -4 to 4, which every dtype holds, and products too."""
    values = (torch.arange(count, dtype=torch.int64) * 7 + rank * 5) % 9 - 4
    return values.abs().to(dtype) if dtype is torch.uint8 else values.to(dtype)


def everyones(here: Group, count: int, dtype: torch.dtype) -> torch.Tensor:
    """The values of all ranks, one row each, in float64."""
    return torch.stack([own(rank, count, dtype).to(torch.float64) for rank in range(here.size)])


def operations(counts: list[int]) -> None:
    """Every operation of two levels, every root, against values computed in float64."""
    operations_of(group(), counts)


def operations_of(here: Group, counts: list[int]) -> None:
    n, me = here.size, here.rank
    for count in counts:
        everyone = everyones(here, count, torch.float64)
        tensor = own(me, count, torch.float64)
        here.all_reduce(tensor)
        assert torch.equal(tensor, everyone.sum(0))
        for root in range(n):
            tensor = own(me, count, torch.float64)
            here.reduce(tensor, root, "mean")
            assert torch.equal(tensor, everyone.mean(0) if me == root else everyone[me])
            tensor = own(me, count, torch.float64)
            here.broadcast(tensor, root)
            assert torch.equal(tensor, everyone[root])
        sizes = [count + 2 * rank for rank in range(n)]
        outputs = [torch.zeros(size, dtype=torch.float64) for size in sizes]
        here.all_gather(outputs, own(me, sizes[me], torch.float64))
        for rank, output in enumerate(outputs):
            assert torch.equal(output, own(rank, sizes[rank], torch.float64))
        output = torch.zeros(sizes[me])
        here.reduce_scatter(output, [own(me, size, torch.float32) for size in sizes])
        assert torch.equal(output.double(), everyones(here, sizes[me], torch.float32).sum(0))
        flat = torch.zeros(n * count)
        here.all_gather(flat, own(me, count, torch.float32))
        assert torch.equal(flat.double(), everyone.flatten())
    here.barrier()


def dtypes() -> int:
    """Reductions of all dtypes, also those that the library gets wrong or does not have."""
    here = group()
    signed = (torch.int8, torch.int16, torch.int32, torch.int64)
    for dtype in (*signed, torch.uint8, torch.float16, torch.bfloat16, torch.float32):
        everyone = everyones(here, 77, dtype)
        for op, reduce in _REDUCED.items():
            if op == "mean" and not dtype.is_floating_point:
                continue
            tensor = own(here.rank, 77, dtype)
            here.all_reduce(tensor, op)
            right = reduce(everyone)
            want = right.to(dtype) if dtype.is_floating_point else right.long().to(dtype)
            assert torch.equal(tensor, want), (dtype, op)
    bits = torch.tensor([here.rank == 2, True, False])
    for op, right in (("sum", [True, True, False]), ("product", [False, True, False])):
        tensor = bits.clone()
        here.all_reduce(tensor, op)
        assert tensor.tolist() == right
    for place in range(here.size):
        for op in ("min", "max", "sum"):
            tensor = torch.tensor([float("nan") if here.rank == place else 1.0, 2.0])
            here.all_reduce(tensor, op)
            assert tensor[0].isnan() and tensor[1] == (2.0 if op != "sum" else 2.0 * here.size)
    large = torch.full((3,), 40000.0, dtype=torch.float16)
    here.all_reduce(large, "mean")
    assert large.tolist() == [40000.0] * 3
    base = torch.arange(12.0).reshape(3, 4) * (here.rank + 1)
    column = base[:, 1]
    here.all_reduce(column)
    total = here.size * (here.size + 1) / 2
    assert column.tolist() == [1 * total, 5 * total, 9 * total]
    assert base[0].tolist() == [0.0, total, 2.0 * (here.rank + 1), 3.0 * (here.rank + 1)]
    complex_ = torch.full((2,), complex(here.rank, 1))
    here.all_reduce(complex_)
    assert complex_.tolist() == [complex(sum(range(here.size)), here.size)] * 2
    scaled = torch.ones(3)
    here.all_reduce(scaled, prescale=0.5)
    assert scaled.tolist() == [here.size / 2] * 3
    return carried()


def bytes_of_a_sum() -> bytes:
    here = group()
    tensor = torch.randn(30_011, generator=torch.Generator().manual_seed(here.rank))
    here.all_reduce(tensor, "mean")
    return tensor.numpy().tobytes()


def in_any_interleaving() -> None:
    """Asynchronous calls in two groups, waited for backwards; what is not two-level goes on too."""
    here = group()
    with here.subgroup(list(reversed(range(here.size))), "back") as back:
        tensors = [torch.full((1000 + index,), float(here.rank)) for index in range(12)]
        works = [
            (here if index % 3 else back).all_reduce(tensor, async_op=True)
            for index, tensor in enumerate(tensors)
        ]
        outputs = torch.zeros(here.size)
        here.all_to_all(outputs, torch.full((here.size,), float(here.rank)))
        for work in reversed(works):
            work.wait()
        assert outputs.tolist() == list(range(here.size))
        assert all(bool((tensor == sum(range(here.size))).all()) for tensor in tensors)


def disagreement(name: str) -> tuple[str, str, int]:
    """Rank 3 calls something else: what is raised, and how often the library was asked."""
    here = group()
    odd = here.rank == 3
    try:
        if name == "shape":
            here.all_reduce(torch.ones(5 if odd else 4))
        elif name == "dtype":
            here.all_reduce(torch.ones(4, dtype=torch.int32 if odd else torch.float32))
        elif name == "operation":
            here.broadcast(torch.ones(4), 0) if odd else here.all_reduce(torch.ones(4))
        else:
            sizes = [1, 2, 3, 5 if odd else 4]
            here.all_gather([torch.zeros(size) for size in sizes], torch.zeros(sizes[here.rank]))
    except CollectiveError as error:
        return type(error).__name__, str(error), carried()
    raise AssertionError("nothing was raised")


def refusal() -> float:
    """Rank 1 refuses an operation behind one that is under way; those around it work."""
    here = group()
    before, after = torch.ones(300_000), torch.ones(4)
    works = [here.all_reduce(before, async_op=True)]
    try:
        odd = torch.ones(1).expand(4) if here.rank == 1 else torch.ones(4)
        work = here.all_reduce(odd, async_op=True)
        works.append(here.all_reduce(after, async_op=True))
        work.wait()
        raise AssertionError("nothing was raised")
    except Refused:
        if here.rank == 1:
            works.append(here.all_reduce(after, async_op=True))
    for work in works:
        work.wait()
    assert bool((before == here.size).all())
    return float(after[0])


def trouble(victim: int, how: str, timeout: float) -> tuple[str, int | None, str, float]:
    """The victim gets into trouble when it is to call the library; what this rank sees."""
    here = group()
    tensor = torch.ones(1000)
    here.all_reduce(tensor)
    original = libraries.Libraries._begin

    def begin(*arguments: Any) -> Any:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stopped":
            # goes on when the test says so; the others must not need that
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "broken":
            raise RuntimeError("no such device")
        return original(*arguments)

    if here.rank == victim:
        libraries.Libraries._begin = begin  # type: ignore[method-assign]
    start = time.monotonic()
    try:
        here.all_reduce(tensor, timeout=timeout)
        here.barrier()  # a rank that was stopped may have had its result before it hears
        raise AssertionError("nothing was raised")
    except CollectiveError as error:
        return type(error).__name__, error.rank, str(error), time.monotonic() - start
    finally:
        libraries.Libraries._begin = original  # type: ignore[method-assign]
