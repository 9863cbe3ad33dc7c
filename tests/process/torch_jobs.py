"""Functions that ranks run in the tests of the torch backend; each asserts in its own rank."""

from __future__ import annotations

import copy
import hashlib
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

Example = tuple[torch.Tensor, torch.Tensor]


def start(backend: str = "unisono", options: Any = None, timeout: float = 30.0) -> str:
    """Make the default group."""
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout), pg_options=options)
    return str(dist.get_backend())


def stop() -> None:
    """Destroy all groups."""
    dist.destroy_process_group()


def fingerprint(module: nn.Module) -> str:
    """SHA-256 over the bytes of all parameters."""
    digest = hashlib.sha256()
    for parameter in module.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def model(dtype: torch.dtype) -> nn.Module:
    """A small network with several buckets' worth of layers, the same on every rank."""
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3)
    ).to(dtype)


def data(count: int, dtype: torch.dtype) -> Example:
    """Inputs and targets, the same on every rank."""
    generator = torch.Generator().manual_seed(11)
    return (
        torch.randn(count, 12, generator=generator, dtype=dtype),
        torch.randn(count, 3, generator=generator, dtype=dtype),
    )


# --- gradients --------------------------------------------------------------------------------


def full_batch_gradient(dtype: torch.dtype) -> float:
    """Relative norm of the difference between DDP's gradient and the full batch's."""
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs, targets = data(8 * size, dtype)
    alone = model(dtype)
    nn.functional.mse_loss(alone(inputs), targets).backward()
    wrapped = DDP(model(dtype), bucket_cap_mb=0.002)
    share = slice(rank * 8, rank * 8 + 8)
    nn.functional.mse_loss(wrapped(inputs[share]), targets[share]).backward()
    want = torch.cat([p.grad.flatten() for p in alone.parameters() if p.grad is not None])
    have = torch.cat([p.grad.flatten() for p in wrapped.parameters() if p.grad is not None])
    return float(((have - want).norm() / want.norm()).item())


def epochs(count: int) -> list[str]:
    """Fingerprints of the parameters after each epoch over a distributed sampler."""
    inputs, targets = data(50, torch.float32)
    dataset = torch.utils.data.TensorDataset(inputs, targets)
    sampler = torch.utils.data.DistributedSampler(dataset, seed=3)
    loader = torch.utils.data.DataLoader(dataset, batch_size=4, sampler=sampler)
    wrapped = DDP(model(torch.float32), bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.05, momentum=0.9)
    found = []
    for epoch in range(count):
        sampler.set_epoch(epoch)
        for batch, target in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(wrapped(batch), target).backward()
            optimizer.step()
        found.append(fingerprint(wrapped))
    return found


def sampled() -> list[int]:
    """The indexes that a distributed sampler gives this rank."""
    return list(torch.utils.data.DistributedSampler(range(20), shuffle=False))  # type: ignore[arg-type]


def small_example() -> dict[str, float]:
    """w = 5, loss = w·x, inputs 2 and 4: gradients 2 and 4, sum 6, mean 3, one update."""
    own = [2.0, 4.0][dist.get_rank()]
    scalar = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        scalar.weight.fill_(5.0)
    local = copy.deepcopy(scalar)
    local(torch.tensor([[own]])).sum().backward()
    assert local.weight.grad is not None
    gradient = local.weight.grad.clone()
    total = gradient.clone()
    dist.all_reduce(total)
    wrapped = DDP(scalar)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    wrapped(torch.tensor([[own]])).sum().backward()
    assert scalar.weight.grad is not None
    mean = scalar.weight.grad.item()
    optimizer.step()
    return {
        "gradient": gradient.item(),
        "sum": total.item(),
        "mean": mean,
        "weight": scalar.weight.item(),
    }


def accumulated(order: str) -> float:
    """The gradient after two microbatches, of which one is in `no_sync`."""
    batches = [(1.0, 3.0), (2.0, 5.0)][dist.get_rank()]
    scalar = nn.Linear(1, 1, bias=False)
    wrapped = DDP(scalar)
    for index, value in enumerate(batches):
        quiet = (index == 0) if order == "first-quiet" else (index == 1)
        with wrapped.no_sync() if quiet else nullcontext():
            wrapped(torch.tensor([[value]])).sum().backward()
    assert scalar.weight.grad is not None
    return float(scalar.weight.grad.item())


class ABC(nn.Module):
    """Parameters of which some are used on some ranks only."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(()))
        self.b = nn.Parameter(torch.ones(()))
        self.c = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.a * x
        return result + 6 * self.b if dist.get_rank() == 0 else result


def unused_parameters() -> list[list[float | None]]:
    """Gradients of a, b and c over three iterations with unused-parameter detection."""
    wrapped = DDP(ABC(), find_unused_parameters=True)
    found = []
    for _ in range(3):
        wrapped.zero_grad()
        wrapped(torch.tensor(2.0)).backward()
        found.append(
            [None if p.grad is None else p.grad.item() for p in wrapped.module.parameters()]
        )
    return found


def half_precision() -> float:
    """The DDP gradient of fp16 gradients of 40000 on both ranks."""
    scalar = nn.Linear(1, 1, bias=False, dtype=torch.float16)
    wrapped = DDP(scalar)
    wrapped(torch.tensor([[40000.0]], dtype=torch.float16)).sum().backward()
    assert scalar.weight.grad is not None
    return float(scalar.weight.grad.item())


def frozen_and_buffers() -> tuple[str, float]:
    """A frozen layer keeps its value, and batch-norm buffers follow rank 0."""
    torch.manual_seed(dist.get_rank())
    network = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    network[0].requires_grad_(False)
    wrapped = DDP(network)
    for _ in range(3):
        wrapped(torch.randn(6, 4)).sum().backward()
    # the forward sends rank 0's buffers before it computes with them
    wrapped.eval()
    wrapped.train()
    with torch.no_grad():
        wrapped(torch.randn(6, 4))
    frozen = network[0].weight.grad
    assert frozen is None
    dist.broadcast(network[1].running_mean, 0)
    return fingerprint(network), float(network[1].num_batches_tracked)


def uneven_join() -> tuple[str, float]:
    """Different numbers of batches under `Join`, and the validation call behind it."""
    wrapped = DDP(model(torch.float32))
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.05)
    inputs, targets = data(8, torch.float32)
    with wrapped.join():
        for _ in range(5 if dist.get_rank() == 0 else 3):
            optimizer.zero_grad()
            nn.functional.mse_loss(wrapped(inputs), targets).backward()
            optimizer.step()
    value = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(value)
    dist.barrier()
    return fingerprint(wrapped), value.item()


def sharded_optimizer() -> tuple[str, str]:
    """Parameters under ZeroRedundancyOptimizer, and under the plain optimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    inputs, targets = data(8, torch.float32)
    prints = []
    for sharded in (True, False):
        wrapped = DDP(model(torch.float32))
        if sharded:
            optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(
                wrapped.parameters(), torch.optim.Adam, lr=0.01
            )
        else:
            optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.mse_loss(wrapped(inputs), targets).backward()
            optimizer.step()
        prints.append(fingerprint(wrapped))
    return prints[0], prints[1]


def powersgd() -> tuple[str, bool]:
    """Training under a communication hook whose callbacks wait for further collectives."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    torch.manual_seed(5)
    network = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 1))
    wrapped = DDP(network, bucket_cap_mb=0.01)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
    )
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(5):
        optimizer.zero_grad()
        wrapped(torch.randn(4, 64, generator=generator)).square().mean().backward()
        optimizer.step()
    finite = all(bool(p.isfinite().all()) for p in wrapped.parameters())
    return fingerprint(wrapped), finite


def fp16_hook() -> str:
    """Training under torch's fp16 compression hook."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    wrapped = DDP(model(torch.float32))
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    inputs, targets = data(8, torch.float32)
    nn.functional.mse_loss(wrapped(inputs), targets).backward()
    gradients = [p.grad for p in wrapped.parameters() if p.grad is not None]
    return hashlib.sha256(b"".join(g.numpy().tobytes() for g in gradients)).hexdigest()


# --- the surface ------------------------------------------------------------------------------


def objects() -> dict[str, Any]:
    """The object collectives."""
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, {"rank": rank, "text": "ä" * rank})
    told: list[Any] = [("from", 1), 2] if rank == 1 else [None, None]
    dist.broadcast_object_list(told, src=1)
    collected: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(rank * 10, collected, dst=0)
    received: list[Any] = [None]
    dist.scatter_object_list(received, [f"part {r}" for r in range(size)] if rank == 0 else None)
    return {
        "everyone": everyone, "told": told, "collected": collected, "received": received[0],
    }  # fmt: skip


def every_collective() -> None:
    """Each call of torch.distributed, against values that are computed here."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ranks = torch.arange(size, dtype=torch.float64)

    value = torch.full((3,), float(rank + 1), dtype=torch.float64)
    for op, want in (
        (dist.ReduceOp.SUM, (ranks + 1).sum()),
        (dist.ReduceOp.AVG, (ranks + 1).mean()),
        (dist.ReduceOp.PRODUCT, (ranks + 1).prod()),
        (dist.ReduceOp.MIN, torch.tensor(1.0)),
        (dist.ReduceOp.MAX, torch.tensor(float(size))),
    ):
        have = value.clone()
        dist.all_reduce(have, op)
        assert torch.equal(have, torch.full((3,), float(want), dtype=torch.float64)), op
    bits = torch.tensor([1 << rank, 0b1111], dtype=torch.int32)
    for op, want_bits in (
        (dist.ReduceOp.BAND, [0, 15]),
        (dist.ReduceOp.BOR, [(1 << size) - 1, 15]),
        (dist.ReduceOp.BXOR, [(1 << size) - 1, 15 if size % 2 else 0]),
    ):
        have_bits = bits.clone()
        dist.all_reduce(have_bits, op)
        assert have_bits.tolist() == want_bits, op

    have = value.clone()
    dist.reduce(have, dst=1)
    assert have[0] == (size * (size + 1) / 2 if rank == 1 else rank + 1)
    have = value.clone()
    dist.broadcast(have, src=size - 1)
    assert torch.equal(have, torch.full((3,), float(size), dtype=torch.float64))

    parts = [torch.zeros(3, dtype=torch.float64) for _ in range(size)]
    dist.all_gather(parts, value)
    assert [part[0].item() for part in parts] == [r + 1 for r in range(size)]
    whole = torch.zeros(3 * size, dtype=torch.float64)
    dist.all_gather_into_tensor(whole, value)
    assert torch.equal(whole, (ranks + 1).repeat_interleave(3))
    stacked = torch.zeros(size, 3, dtype=torch.float64)
    dist.all_gather_into_tensor(stacked, value)
    assert torch.equal(stacked.flatten(), whole)

    gathered = [torch.zeros(3, dtype=torch.float64) for _ in range(size)] if rank == 1 else None
    dist.gather(value, gathered, dst=1)
    if gathered is not None:
        assert [part[0].item() for part in gathered] == [r + 1 for r in range(size)]
    piece = torch.zeros(2)
    dist.scatter(piece, [torch.full((2,), float(r)) for r in range(size)] if rank == 0 else None)
    assert piece.tolist() == [rank, rank]

    output = torch.zeros(2, dtype=torch.float64)
    dist.reduce_scatter(
        output, [torch.full((2,), float(r), dtype=torch.float64) for r in range(size)]
    )
    assert output.tolist() == [rank * size] * 2
    output = torch.zeros(2, dtype=torch.float64)
    dist.reduce_scatter_tensor(output, ranks.repeat_interleave(2) + rank, op=dist.ReduceOp.AVG)
    assert output.tolist() == [rank + (size - 1) / 2] * 2

    out = [torch.zeros(1) for _ in range(size)]
    dist.all_to_all(out, [torch.tensor([float(10 * rank + r)]) for r in range(size)])
    assert [one.item() for one in out] == [10 * r + rank for r in range(size)]
    mixed = torch.zeros(size)
    dist.all_to_all_single(mixed, torch.arange(size) + 10.0 * rank)
    assert mixed.tolist() == [10 * r + rank for r in range(size)]
    # rank r sends r' + 1 values to rank r'
    total = size * (rank + 1)
    uneven = torch.zeros(total)
    dist.all_to_all_single(
        uneven,
        torch.full((size * (size + 1) // 2,), float(rank)),
        output_split_sizes=[rank + 1] * size,
        input_split_sizes=[r + 1 for r in range(size)],
    )
    assert uneven.tolist() == [float(r) for r in range(size) for _ in range(rank + 1)]

    many = [torch.full((2,), float(rank)), torch.full((3,), float(rank))]
    with dist._coalescing_manager(async_ops=True) as together:
        for one in many:
            dist.all_reduce(one)
    together.wait()
    assert [one[0].item() for one in many] == [size * (size - 1) / 2] * 2
    number = torch.tensor(rank + 1j * rank)
    dist.all_reduce(number)
    assert number.item() == complex(size * (size - 1) / 2, size * (size - 1) / 2)
    dist.barrier()


def asynchronous() -> None:
    """Handles and futures of asynchronous calls."""
    rank, size = dist.get_rank(), dist.get_world_size()
    value = torch.full((1000,), float(rank))
    work = dist.all_reduce(value, async_op=True)
    assert work is not None
    work.wait()
    assert work.is_completed() and work.is_success() and work.exception() is None
    assert value[0].item() == size * (size - 1) / 2
    assert work.result()[0] is value
    value = torch.full((1000,), float(rank))
    work = dist.all_reduce(value, async_op=True)
    assert work is not None

    def further(future: torch.futures.Future[list[torch.Tensor]]) -> float:
        (reduced,) = future.value()
        dist.all_reduce(reduced)  # a callback may wait for another collective
        return float(reduced[0].item())

    assert work.get_future().then(further).wait() == size * size * (size - 1) / 2
    works = [dist.all_reduce(torch.full((5,), float(i)), async_op=True) for i in range(100)]
    for one in works:
        assert one is not None
        one.wait()


def point_to_point() -> None:
    """send, recv, any source, batches, and both directions at once."""
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    got = torch.zeros(3)
    receive = dist.irecv(got, left)
    send = dist.isend(torch.full((3,), float(rank)), right)
    assert receive is not None and send is not None
    receive.wait()
    send.wait()
    assert got.tolist() == [left] * 3
    if rank == 0:
        seen = set()
        for _ in range(size - 1):
            source = dist.recv(got)
            assert got[0].item() == source
            seen.add(source)
        assert seen == set(range(1, size))
    else:
        dist.send(torch.full((3,), float(rank)), 0)
    if rank < 2:
        # tags keep two messages apart, whatever the order in which they are asked for
        if rank == 0:
            dist.send(torch.tensor([1.0]), 1, tag=1)
            dist.send(torch.tensor([2.0]), 1, tag=2)
        else:
            first, second = torch.zeros(1), torch.zeros(1)
            late = dist.irecv(second, 0, tag=2)
            early = dist.irecv(first, 0, tag=1)
            assert late is not None and early is not None
            late.wait()
            early.wait()
            assert (first.item(), second.item()) == (1, 2)
    got = torch.zeros(2, 2)
    for work in dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.full((2, 2), float(rank)), right),
            dist.P2POp(dist.irecv, got, left),
        ]
    ):
        work.wait()
    assert got.flatten().tolist() == [left] * 4
    sent: list[Any] = [{"from": rank}]
    if rank == 0:
        dist.send_object_list(sent, dst=1)
    elif rank == 1:
        dist.recv_object_list(sent, src=0)
        assert sent == [{"from": 0}]


def subgroups() -> dict[str, Any]:
    """New groups: pairs, one of a single rank, a mesh; means divide by the subgroup's size."""
    rank, size = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group([first, first + 1]) for first in range(0, size, 2)]
    mine = pairs[rank // 2]
    mean = torch.tensor(float(rank + 1))
    dist.all_reduce(mean, dist.ReduceOp.AVG, group=mine)
    alone = dist.new_group([0])
    single = torch.tensor(0.5)
    if rank == 0:
        dist.all_reduce(single, dist.ReduceOp.AVG, group=alone)
    turned = dist.new_group(list(reversed(range(size))), sort_ranks=False)
    seat = dist.get_rank(turned)
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("between", "within"))
    column = torch.tensor(float(rank))
    dist.all_reduce(column, group=mesh["between"].get_group())
    dist.barrier()
    return {
        "mean": mean.item(), "single": single.item(), "seat": seat, "column": column.item(),
    }  # fmt: skip


def functional() -> list[float]:
    """Functional collectives and DTensor, which find the group by its name."""
    from torch.distributed import _functional_collectives as functional_calls
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    size = dist.get_world_size()
    summed = functional_calls.all_reduce(
        torch.tensor([float(dist.get_rank())]), "sum", dist.group.WORLD
    )
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(float(size * 2))
    spread = distribute_tensor(whole, mesh, [Shard(0)])
    return [float(summed.sum()), float(spread.full_tensor().sum())]


def fully_sharded() -> tuple[float, float]:
    """FSDP2's loss after some steps, and the loss of the same model on the whole batch alone."""
    from torch.distributed.fsdp import fully_shard

    rank, size = dist.get_rank(), dist.get_world_size()
    inputs, targets = data(4 * size, torch.float32)
    share = slice(rank * 4, rank * 4 + 4)
    network, alone = model(torch.float32), model(torch.float32)
    for layer in (network[0], network[2]):
        fully_shard(layer)
    fully_shard(network)
    losses = []
    for one, batch, target in (
        (network, inputs[share], targets[share]),
        (alone, inputs, targets),
    ):
        optimizer = torch.optim.SGD(one.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(one(batch), target)
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            losses.append(nn.functional.mse_loss(one(inputs), targets).item())
    return losses[0], losses[1]


def checkpoint(folder: str) -> bool:
    """Save with torch.distributed.checkpoint, change everything, load, compare."""
    import torch.distributed.checkpoint as dcp

    network = model(torch.float32)
    wanted = copy.deepcopy(network.state_dict())
    dcp.save({"model": network.state_dict()}, checkpoint_id=Path(folder) / "step-1")
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    state = {"model": network.state_dict()}
    dcp.load(state, checkpoint_id=Path(folder) / "step-1")
    network.load_state_dict(state["model"])
    return all(torch.equal(wanted[name], value) for name, value in network.state_dict().items())


def odd_tensors() -> None:
    """Strided, 0-dim and empty tensors; neighbours of a view stay as they were."""
    rank, size = dist.get_rank(), dist.get_world_size()
    scale = size * (size + 1) // 2
    base = torch.arange(12).reshape(3, 4).float() * (rank + 1)
    column = base[:, 1]
    dist.all_reduce(column)
    want = torch.arange(12).reshape(3, 4).float() * (rank + 1)
    want[:, 1] = torch.tensor([1.0, 5.0, 9.0]) * scale
    assert torch.equal(base, want)
    base = torch.arange(12).reshape(3, 4).float() * (rank + 1)
    dist.broadcast(base[:, 1], src=0)
    assert base[:, 1].tolist() == [1, 5, 9] and base[1, 0] == 4 * (rank + 1)
    base = torch.arange(12).reshape(3, 4).float() * (rank + 1)
    dist.all_reduce(base.t())
    assert torch.equal(base, torch.arange(12).reshape(3, 4).float() * scale)
    zero = torch.tensor(rank + 1)
    dist.all_reduce(zero)
    assert zero.item() == scale
    dist.all_reduce(torch.empty(0, 3))
    truth = torch.tensor([True, rank == 0, False])
    dist.all_reduce(truth)
    assert truth.tolist() == [True, True, False] and truth.dtype == torch.bool


# --- errors -----------------------------------------------------------------------------------


def refused_calls() -> list[str]:
    """What is refused, with the tensor unchanged and the group usable after each."""
    from collective.errors import Refused

    kinds = []
    sparse = torch.eye(2).to_sparse()
    shared = torch.ones(1).expand(4)
    whole = torch.tensor([1, 2])
    premul = dist._make_nccl_premul_sum(2.0)
    for call in (
        lambda: dist.all_reduce(sparse),
        lambda: dist.all_reduce(shared),
        lambda: dist.all_reduce(whole, dist.ReduceOp.AVG),
        lambda: dist.all_reduce(whole, premul),
        lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND),
        lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3)),
        lambda: dist.broadcast(torch.ones(2, device="meta"), 0),
    ):
        try:
            call()
        except Refused as error:
            kinds.append(str(error))
        else:
            kinds.append("")
        after = torch.ones(1)
        dist.all_reduce(after)
        assert after.item() == dist.get_world_size()
    assert whole.tolist() == [1, 2] and shared.tolist() == [1] * 4
    return kinds


def mismatched(kind: str) -> None:
    """Ranks that disagree; raises on every rank."""
    rank = dist.get_rank()
    if kind == "shape":
        dist.all_reduce(torch.ones(2, 3) if rank == 0 else torch.ones(3, 2))
    elif kind == "dtype":
        dist.all_reduce(torch.tensor([1, 2], dtype=torch.int32) if rank else torch.ones(2))
    elif kind == "operation":
        if rank == 0:
            dist.all_reduce(torch.ones(4))
        else:
            dist.broadcast(torch.ones(4), 0)
    elif kind == "skipped":
        if rank == 0:
            dist.all_reduce(torch.ones(4))
        dist.barrier()


def error_in_backward() -> tuple[str, str, str]:
    """A DDP backward whose group is poisoned: text of the error, later error, and what remains."""
    wrapped = DDP(model(torch.float32), bucket_cap_mb=0.002)
    inputs, targets = data(8, torch.float32)
    nn.functional.mse_loss(wrapped(inputs), targets).backward()
    loss = nn.functional.mse_loss(wrapped(inputs), targets)
    try:
        if dist.get_rank() == 1:
            dist.all_reduce(torch.ones(4))  # in place of the first bucket
            return "", "", ""
        loss.backward()
    except RuntimeError as error:
        text = f"{type(error).__name__}: {error}"
    group = dist.group.WORLD
    later = ""
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        later = type(error).__name__
    return text, later, type(group.error).__name__  # type: ignore[union-attr]


def leave_early() -> None:
    """End this rank without a word to the others."""
    import os

    os._exit(9)


def loop(steps: int) -> int:
    """Many all-reduces in a row; how many were right."""
    rank, size = dist.get_rank(), dist.get_world_size()
    right = 0
    for index in range(steps):
        value = torch.full((1 << 16,), float(rank + index))
        dist.all_reduce(value)
        right += bool((value == size * (size - 1) / 2 + size * index).all())
    return right


def refused_on_one_rank() -> tuple[str, float]:
    """Rank 1 passes a sparse tensor; the error, and the value of the next sum."""
    from collective.errors import Refused

    value = torch.ones(2, 2)
    text = ""
    try:
        dist.all_reduce(value.to_sparse() if dist.get_rank() == 1 else value)
    except Refused as error:
        text = str(error)
    after = torch.ones(())
    dist.all_reduce(after)
    return text, after.item()


def late_member() -> str:
    """Rank 1 does not come to a collective with a short timeout; the error on rank 0."""
    from collective.errors import CollectiveError

    group = dist.new_group(timeout=timedelta(seconds=1.5))
    dist.all_reduce(torch.ones(1), group=group)
    if dist.get_rank() == 0:
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except CollectiveError as error:
            dist.barrier()
            return f"{type(error).__name__} {error.rank}: {error}"
        return ""
    dist.barrier()
    return ""


def skipped_backward() -> None:
    """Rank 1 skips one backward and goes on with the next step."""
    wrapped = DDP(model(torch.float32))
    inputs, targets = data(8, torch.float32)
    for step in range(4):
        loss = nn.functional.mse_loss(wrapped(inputs), targets)
        if step == 2 and dist.get_rank() == 1:
            dist.barrier()
            continue
        loss.backward()


def fewer_batches() -> None:
    """Rank 1 has fewer batches and goes on to the validation."""
    wrapped = DDP(model(torch.float32))
    inputs, targets = data(8, torch.float32)
    for _ in range(5 if dist.get_rank() == 0 else 3):
        nn.functional.mse_loss(wrapped(inputs), targets).backward()
    dist.all_reduce(torch.ones(3, dtype=torch.float64))
    dist.barrier()


def restart() -> float:
    """Destroy all groups, make the default group again, and use it."""
    dist.destroy_process_group()
    start()
    value = torch.ones(())
    dist.all_reduce(value)
    return value.item()


def strategy(options: Any) -> str:
    """The default group's strategy when `options` are given as pg_options."""
    start(options=options)
    name = str(dist.group.WORLD.group.strategy)  # type: ignore[union-attr]
    dist.all_reduce(torch.ones(5))
    stop()
    return name


def own_strategy() -> None:
    """Each rank asks for another strategy."""
    start(options=["ring", "centralized"][rank()])


def rank() -> int:
    """This process's rank before there is a group."""
    import os

    return int(os.environ["RANK"])


def forked_worker() -> list[str]:
    """What a data-loader worker gets from a collective of its parent's group."""
    found = []
    for batch in torch.utils.data.DataLoader(_Reducing(), batch_size=None, num_workers=1):
        found.append(str(batch))
    value = torch.ones(())
    dist.all_reduce(value)
    return [*found, str(value.item())]


class _Reducing(torch.utils.data.Dataset[str]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> str:
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            return type(error).__name__
        return "reduced in a worker"
