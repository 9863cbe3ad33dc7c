"""What ranks, as threads or processes, do in the tests of CUDA tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from collective.device_exchange import Meeting
from collective.group import Group
from collective.strategies import parse

#: reductions by dtype; a product of complex numbers may differ in its last bit
OPS: dict[torch.dtype, list[str]] = {
    torch.float64: ["sum", "mean", "product", "min", "max"],
    torch.float32: ["sum", "mean", "product", "min", "max"],
    torch.float16: ["sum", "mean", "product", "min", "max"],
    torch.bfloat16: ["sum", "mean", "product", "min", "max"],
    torch.complex64: ["sum", "mean"],
    torch.int8: ["sum", "product", "min", "max", "band", "bor", "bxor"],
    torch.int16: ["sum", "max"],
    torch.int32: ["sum", "product", "min", "max", "band", "bor", "bxor"],
    torch.int64: ["sum", "product", "min", "max", "band", "bor", "bxor"],
    torch.uint8: ["sum", "product", "min", "max", "band", "bor", "bxor"],
    torch.bool: ["sum", "product", "min", "max", "band", "bor", "bxor"],
}
#: several pieces of a slot, and shares of odd lengths
COUNT = (9 << 20) + 5


def default_group() -> Group:
    """The group below torch's default one."""
    return dist.group.WORLD.group  # type: ignore[union-attr]


def _values(dtype: torch.dtype, rank: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point or dtype.is_complex:
        values = torch.randn(count, generator=generator, dtype=dtype)
        values[7 * rank] = float("nan")
        return values
    return torch.randint(0, 2 if dtype is torch.bool else 100, (count,), generator=generator).to(
        dtype
    )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the values are bit for bit the same; a NaN is a NaN."""
    return bool(((one == other) | ((one != one) & (other != other))).all())


def reductions(group: Group, device: str, name: str, count: int = COUNT // 8) -> None:
    """Each reduction of a dtype on the device, bit for bit as on the CPU in the order of ranks."""
    dtype = getattr(torch, name)
    values = _values(dtype, group.rank, count)
    for op in OPS[dtype]:
        for factor in (None, 0.3) if dtype.is_floating_point and dtype.itemsize > 2 else (None,):
            here, there = values.clone(), values.to(device, copy=True)
            group.strategy = parse("scatter_allgather")
            group.all_reduce(here, op, factor, async_op=False)
            group.strategy = parse("auto")
            group.all_reduce(there, op, factor, async_op=False)
            assert _same(there.cpu(), here), (dtype, op, factor)


def stays_on_device(group: Group) -> bool:
    """Whether the group's ranks have opened their devices to each other."""
    return isinstance(group._meeting, Meeting)


def other_operations(group: Group, device: str, strategy: str) -> None:
    """Broadcast, all-gather, reduce-scatter, reduce and strided tensors: every value is right."""
    group.strategy = parse(strategy)
    n, count = group.size, COUNT // 4
    each = [
        (torch.arange(count) % 1000 * (rank + 1)).to(torch.float32, copy=True) for rank in range(n)
    ]
    total = sum(each[1:], start=each[0])
    for root in range(n):
        tensor = each[group.rank].to(device, copy=True)
        group.broadcast(tensor, root, async_op=False)
        assert torch.equal(tensor.cpu(), each[root])
    flat = torch.zeros(n * count, device=device)
    group.all_gather(flat, each[group.rank].to(device, copy=True), async_op=False)
    assert torch.equal(flat.cpu(), torch.cat(each))
    output = torch.zeros(count, device=device)
    group.reduce_scatter(output, [each[group.rank].to(device, copy=True)] * n, async_op=False)
    assert torch.equal(output.cpu(), total)
    tensor = each[group.rank].to(device, copy=True)
    group.reduce(tensor, n - 1, async_op=False)
    assert torch.equal(tensor.cpu(), total if group.rank == n - 1 else each[group.rank])
    wide = torch.full((1200, 2000), -1.0, device=device)
    strided = wide[::2, 1:1001].t()
    strided.copy_(each[group.rank][:600_000].view(1000, 600))
    group.all_reduce(strided, async_op=False)
    assert torch.equal(strided.cpu(), total[:600_000].view(1000, 600))
    assert bool((wide[1::2] == -1).all())
    assert bool((wide[:, 1001:] == -1).all())
    group.strategy = parse("auto")


def streams(group: Group, device: str, strategy: str) -> None:
    """A tensor that is still being written, and whose result is used at once, on a stream."""
    group.strategy = parse(strategy)
    stream = torch.cuda.Stream(device) if device.startswith("cuda") else None
    with torch.cuda.stream(stream):
        for index in range(5):
            tensor = torch.zeros(COUNT // 4, device=device)
            if stream is not None:
                torch.cuda._sleep(20_000_000)  # about 10 ms in which the values are not there yet
            tensor += group.rank + index
            work = group.all_reduce(tensor, async_op=True)
            other = torch.ones(COUNT // 4, device=device)  # the device goes on meanwhile
            work.wait(60)
            doubled = tensor * 2 + other
            tensor.zero_()
            want = 2 * sum(rank + index for rank in range(group.size)) + 1
            assert bool(doubled.eq(want).all())
    group.strategy = parse("auto")


def ddp_gradients(device: str) -> float:
    """The relative difference between DDP's gradient on the device and the full batch's."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def model() -> nn.Module:
        torch.manual_seed(1)
        layers = [nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 512), nn.Linear(512, 8)]
        return nn.Sequential(*layers).double().to(device)

    inputs = torch.randn(8 * size, 256, dtype=torch.float64, generator=torch.manual_seed(2))
    inputs = inputs.to(device)
    alone, wrapped = model(), DDP(model(), bucket_cap_mb=1)
    alone(inputs).square().mean().backward()
    wrapped(inputs[8 * rank : 8 * rank + 8]).square().mean().backward()
    want, have = (
        torch.cat([p.grad.flatten() for p in one.parameters() if p.grad is not None])
        for one in (alone, wrapped)
    )
    return float((have - want).norm() / want.norm())


def on_default_group(name: str, *arguments: Any) -> Any:
    """Run a function of this module on the default group of this process."""
    return globals()[name](default_group(), *arguments)


def is_open() -> bool:
    """Of the default group."""
    return stays_on_device(default_group())
