"""One rank of ``unisono bench``: times torch.distributed calls on two backends, in turn.

Started by `unisono.bench` like a rank of torchrun; reads its work as JSON from the environment,
rank 0 prints one JSON object per case.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

#: bus over algorithm bandwidth, by operation and ranks (NVIDIA/nccl-tests, PERFORMANCE.md)
BUS_FACTOR: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
}


def main() -> None:
    work = json.loads(os.environ["UNISONO_BENCH"])
    torch.set_num_threads(1)
    dist.init_process_group("unisono")
    peer = dist.new_group(backend=work["against"]) if work["against"] else None
    if work["what"] == "ddp":
        from collective.benchmark_ddp import run

        report(run(work, peer) | place(work))
    else:
        for nbytes in work["sizes"]:
            for operation in work["operations"]:
                row = time_case(operation, nbytes, work["repeats"], peer, work["against"])
                row |= place(work)
                report(row)
    dist.destroy_process_group()


def place(work: dict[str, Any]) -> dict[str, Any]:
    """Over which links, and so as ranks of how many nodes."""
    near = work["link"] == "shm"
    return {"link": work["link"], "nodes": 1 if near else dist.get_world_size()}


def report(row: dict[str, Any]) -> None:
    """Print a result, at rank 0."""
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()


def time_case(
    operation: str, nbytes: int, repeats: int | None, peer: Any, against: str | None
) -> dict[str, Any]:
    """Medians of one operation and size, ours and the peer's calls in turn.

    Each repeat is the mean of a few calls for small sizes, and the slowest rank's time counts.
    """
    size = dist.get_world_size()
    count = max(1, nbytes // 4)
    inner = 50 if nbytes <= 64 << 10 else 10 if nbytes <= 1 << 20 else 1
    repeats = repeats or (20 if nbytes < 25 << 20 else 5)
    tensor = torch.empty(count, dtype=torch.float32)
    parts = torch.empty((count + size - 1) // size, dtype=torch.float32)
    whole = torch.empty(parts.numel() * size, dtype=torch.float32)

    def call(group: Any) -> None:
        match operation:
            case "all_reduce":
                dist.all_reduce(tensor, group=group)
            case "broadcast":
                dist.broadcast(tensor, 0, group=group)
            case "reduce":
                dist.reduce(tensor, 0, group=group)
            case "all_gather":
                dist.all_gather_into_tensor(whole, parts, group=group)
            case "reduce_scatter":
                dist.reduce_scatter_tensor(parts, whole, group=group)

    groups = [None] if peer is None else [None, peer]
    correct = all(check(operation, group, tensor, parts, whole, call) for group in groups)
    times: dict[int, list[float]] = {index: [] for index in range(len(groups))}
    tensor.zero_()  # sums of zeros stay zeros: no overflow however often they are added
    parts.zero_()
    whole.zero_()
    for repeat in range(-2, repeats):
        for index, group in enumerate(groups):
            dist.barrier(group=group)
            start = time.perf_counter()
            for _ in range(inner):
                call(group)
            elapsed = (time.perf_counter() - start) / inner
            if repeat >= 0:
                times[index].append(elapsed)
    slowest = torch.tensor([times[index] for index in range(len(groups))], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    seconds = statistics.median(slowest[0].tolist())
    row: dict[str, Any] = {
        "op": operation,
        "strategy": strategy_of(operation, nbytes),
        "ranks": size,
        "bytes": count * 4,
        "repeats": repeats,
        "seconds": seconds,
        "algbw": count * 4 / seconds,
        "busbw": count * 4 / seconds * BUS_FACTOR[operation](size),
        "peer": against,
        "peer_seconds": None,
        "ratio": None,
        "correct": correct,
    }
    if peer is not None:
        row["peer_seconds"] = statistics.median(slowest[1].tolist())
        row["ratio"] = seconds / row["peer_seconds"]
    return row


def strategy_of(operation: str, nbytes: int) -> str:
    """What the group's setting means for this operation and size."""
    from collective.schedule import Kind
    from collective.strategies import resolve

    setting = os.environ.get("UNISONO_STRATEGY") or "auto"
    return str(resolve(setting, Kind(operation), dist.get_world_size(), nbytes))


def check(
    operation: str,
    group: Any,
    tensor: torch.Tensor,
    parts: torch.Tensor,
    whole: torch.Tensor,
    call: Callable[[Any], None],
) -> bool:
    """Whether every rank got what the operation means, on values that float32 adds exactly."""
    rank, size = dist.get_rank(), dist.get_world_size()
    total = size * (size + 1) // 2
    ramp = (torch.arange(tensor.numel()) % 1000).float()
    tensor.copy_(ramp * (rank + 1))
    parts.fill_(rank + 1)
    whole.copy_((torch.arange(whole.numel()) % 1000).float() * (rank + 1))
    call(group)
    match operation:
        case "all_reduce":
            good = torch.equal(tensor, ramp * total)
        case "broadcast":
            good = torch.equal(tensor, ramp)
        case "reduce":
            good = rank != 0 or torch.equal(tensor, ramp * total)
        case "all_gather":
            blocks = torch.arange(1, size + 1).repeat_interleave(parts.numel()).float()
            good = torch.equal(whole, blocks)
        case _:
            start = rank * parts.numel()
            own = (torch.arange(start, start + parts.numel()) % 1000).float()
            good = torch.equal(parts, own * total)
    verdict = torch.tensor([int(good)])
    dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
    return bool(verdict.item())


if __name__ == "__main__":
    main()
