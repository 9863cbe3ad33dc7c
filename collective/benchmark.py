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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from collective.group import Group
from collective.schedule import Kind
from collective.strategies import available, parse, resolve
from collective.torch_backend import UnisonoProcessGroup

#: the setting that means every strategy in turn, auto first
ALL = "all"
#: times the fastest's time: whoever takes so long is no candidate
_HOPELESS = 4

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
    setting = os.environ.get("UNISONO_STRATEGY") or "auto"
    if setting == ALL:
        os.environ["UNISONO_STRATEGY"] = "auto"
    dist.init_process_group("unisono")
    peer = dist.new_group(backend=work["against"]) if work.get("against") else None
    if work["what"] == "ddp":
        from collective.benchmark_ddp import run

        report(run(work, peer) | place(work))
    elif work["what"] == "links":
        from collective.benchmark_links import run as measure

        report(asdict(measure(work["link"])))
    else:
        for nbytes in work["sizes"]:
            for operation in work["operations"]:
                settings = [setting]
                if setting == ALL:
                    settings = ["auto", *available(Kind(operation))]
                rows = time_case(
                    operation, nbytes, work["repeats"], settings, peer, work["against"]
                )
                for row in rows:
                    report(row | place(work))
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


@dataclass
class Side:
    """One of those that are timed in turn: our group under a setting, or the peer's."""

    setting: str
    group: Any
    times: list[float] = field(default_factory=list)
    #: too slow to be worth more than a look
    hopeless: bool = False


def time_case(
    operation: str,
    nbytes: int,
    repeats: int | None,
    settings: Sequence[str],
    peer: Any,
    against: str | None,
) -> list[dict[str, Any]]:
    """Medians of one operation and size, of our settings and the peer, whose calls take turns.

    Each repeat is the mean of a few calls for small sizes, and the slowest rank's time counts.
    Where several settings are compared, those that take far longer than the fastest are timed once.
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

    def run(side: Side, calls: int) -> float:
        dist.barrier(group=side.group)
        if side.group is None:
            set_strategy(side.setting)
        start = time.perf_counter()
        for _ in range(calls):
            call(side.group)
        return (time.perf_counter() - start) / calls

    ours = [Side(setting, None) for setting in settings]
    sides = [*ours, *([] if peer is None else [Side(against or "", peer)])]
    correct = []
    for side in sides:
        if side.group is None:
            set_strategy(side.setting)
        correct.append(check(operation, side.group, tensor, parts, whole, call))
    tensor.zero_()  # sums of zeros stay zeros: no overflow however often they are added
    parts.zero_()
    whole.zero_()
    first = slowest([[run(side, min(inner, 3))] for side in sides])
    if len(ours) > 1:
        fastest = min(first[: len(ours)])[0]
        for side, (seconds,) in zip(ours, first, strict=False):
            side.hopeless = seconds > _HOPELESS * fastest and side.setting != "auto"
    lively = [side for side in sides if not side.hopeless]
    for repeat in range(-1, repeats):
        # each is first now and then, and no two follow each other always
        start = repeat % len(lively)
        for side in (*lively[start:], *lively[:start]):
            elapsed = run(side, inner)
            if repeat >= 0:
                side.times.append(elapsed)
    set_strategy(settings[0])
    for side, taken in zip(lively, slowest([side.times for side in lively]), strict=True):
        side.times = taken
    for side, taken in zip(sides, first, strict=True):
        side.times = side.times or taken
    medians = [statistics.median(side.times) for side in sides]
    fixed = [
        seconds for side, seconds in zip(ours, medians, strict=False) if side.setting != "auto"
    ]
    rows = []
    for side, seconds, good in zip(ours, medians, correct, strict=False):
        rows.append(
            {
                "op": operation,
                "setting": side.setting,
                "strategy": strategy_of(side.setting, operation, nbytes),
                "ranks": size,
                "bytes": count * 4,
                "repeats": len(side.times),
                "seconds": seconds,
                "best": seconds / min(fixed) if side.setting == "auto" and fixed else None,
                "algbw": count * 4 / seconds,
                "busbw": count * 4 / seconds * BUS_FACTOR[operation](size),
                "peer": against,
                "peer_seconds": None if peer is None else medians[-1],
                "ratio": None if peer is None else seconds / medians[-1],
                "correct": good and (peer is None or correct[-1]),
            }
        )
    return rows


def slowest(times: list[list[float]]) -> list[list[float]]:
    """The slowest rank's time of each repeat."""
    table = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    found: list[list[float]] = table.tolist()
    return found


def world() -> Group:
    """The default group, below torch."""
    group = dist.group.WORLD
    assert isinstance(group, UnisonoProcessGroup)
    return group.group


def set_strategy(text: str) -> None:
    """Have our group follow another setting from its next call on; all ranks do so alike."""
    world().strategy = parse(text)


def strategy_of(setting: str, operation: str, nbytes: int) -> str:
    """What the group's setting means for this operation and size."""
    kind = Kind(operation)
    return str(resolve(parse(setting), kind) or world().chooser.choose(kind, nbytes))


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
