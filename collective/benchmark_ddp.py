"""A step of DistributedDataParallel with several buckets, on two backends in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from collective import group as groups
from collective.benchmark_peers import Peer, TorchPeer
from collective.work import Work


def model(width: int, layers: int) -> torch.nn.Module:
    """Equal layers, so that gradients become ready at an even pace."""
    torch.manual_seed(0)
    parts: list[torch.nn.Module] = []
    for _ in range(layers):
        parts += [torch.nn.Linear(width, width), torch.nn.ReLU()]
    return torch.nn.Sequential(*parts)


def run(work: dict[str, Any], peers: Sequence[Peer]) -> dict[str, Any]:
    """Median step times, and of ours the communication in all and what of it nothing hides."""
    width, layers, repeats = work["width"], work["layers"], work["repeats"]
    sides = {"unisono": None} | {
        peer.name: peer.group for peer in peers if isinstance(peer, TorchPeer)
    }
    models = {
        name: DistributedDataParallel(
            model(width, layers), process_group=group, bucket_cap_mb=work["bucket_mib"]
        )
        for name, group in sides.items()
    }
    inputs = torch.randn(work["batch"], width)
    finished: list[Work] = []
    groups.observers.append(finished.append)
    times: dict[str, list[float]] = {name: [] for name in sides}
    totals: list[float] = []
    exposed: list[float] = []
    buckets = 0
    for repeat in range(-3, repeats):
        for name, module in models.items():
            dist.barrier(group=sides[name])
            finished.clear()
            start = time.perf_counter()
            loss = module(inputs).square().mean()
            loss.backward()
            elapsed = time.perf_counter() - start
            module.zero_grad()
            if repeat < 0:
                continue
            times[name].append(elapsed)
            if name == "unisono":
                mine = [item.timing for item in finished if item.name == "all_reduce"]
                buckets = len(mine)
                totals.append(sum(item.done - item.issued for item in mine))
                exposed.append(max(t.done for t in mine) - max(t.issued for t in mine))
    groups.observers.remove(finished.append)
    slowest = torch.tensor([times[name] for name in sides], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    seconds, *others = (statistics.median(row) for row in slowest.tolist())
    parameters = sum(p.numel() for p in models["unisono"].parameters())
    return {
        "op": "ddp_step",
        "ranks": dist.get_world_size(),
        "bytes": parameters * 4,
        "buckets": buckets,
        "repeats": repeats,
        "seconds": seconds,
        "communication_seconds": statistics.median(totals),
        "exposed_seconds": statistics.median(exposed),
        "correct": replicas_identical(models["unisono"]),
        "peers": {
            peer.name: {
                "seconds": theirs,
                "ratio": seconds / theirs,
                "correct": replicas_identical(models[peer.name]),
            }
            for peer, theirs in zip(peers, others, strict=True)
        },
    }


def replicas_identical(module: torch.nn.Module) -> bool:
    """Whether all ranks hold the same gradients' sums after one more step, bit for bit."""
    module(
        torch.ones(1, next(module.parameters()).shape[1]) * (dist.get_rank() + 1)
    ).sum().backward()
    flat = torch.cat([p.grad.reshape(-1) for p in module.parameters() if p.grad is not None])
    largest, smallest = flat.clone(), flat.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    module.zero_grad()
    return torch.equal(largest, smallest)
