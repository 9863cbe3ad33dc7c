"""One rank of ``unisono bench``: times calls of several libraries in the same processes, in turn.

Started by `unisono.bench_run` like a rank of torchrun; reads its work as JSON from the environment,
rank 0 prints one JSON object per row.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from collective.benchmark_case import BUS_FACTOR, Case
from collective.benchmark_peers import Peer, TorchPeer, connect
from collective.group import Group
from collective.schedule import Kind
from collective.strategies import available, parse, resolve
from collective.strategies.spelling import SPELLINGS
from collective.strategies.two_level import LEVELS
from collective.torch_backend import UnisonoProcessGroup

#: the setting that means every strategy in turn, auto first
ALL = "all"
#: times the fastest's time: whoever takes so long is no candidate
_HOPELESS = 4
#: strategies that go on after each look at them: two levels have dozens of combinations
_KEPT = (36, 24, 12)
#: seconds that the calls of one repeat may take, unless a single one takes longer
_PER_REPEAT = 0.1


def main() -> None:
    work = json.loads(os.environ["UNISONO_BENCH"])
    torch.set_num_threads(1)
    setting = os.environ.get("UNISONO_STRATEGY") or "auto"
    if setting == ALL:
        os.environ["UNISONO_STRATEGY"] = "auto"
    dist.init_process_group("unisono")
    peers = connect(work.get("against", ()))
    if work["what"] == "ddp":
        from collective.benchmark_ddp import run

        report(run(work, peers))
    elif work["what"] == "links":
        from collective.benchmark_links import run as measure

        report(asdict(measure(work["link"])))
    else:
        for nbytes, operation in product(work["sizes"], work["operations"]):
            settings = every(Kind(operation)) if setting == ALL else [setting]
            for row in time_case(operation, nbytes, settings, peers, work):
                report(row)
    dist.destroy_process_group()


def report(row: dict[str, Any]) -> None:
    """Print a result, at rank 0."""
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()


def every(kind: Kind) -> list[str]:
    """auto, and each strategy of an operation; of two levels too where a node has several ranks."""
    found = ["auto", *available(kind)]
    if 1 < len(set(world().nodes)) < dist.get_world_size() and kind in LEVELS:
        local, between = ([SPELLINGS[name] for name in names] for names in LEVELS[kind])
        found += [f"local={near},between={far}" for near, far in product(local, between)]
    return found


@dataclass
class Side:
    """One of those that are timed in turn: our group under a setting, or another library."""

    peer: Peer
    setting: str | None = None
    times: list[float] = field(default_factory=list)
    #: of one call, at the slowest rank, before the timing proper
    look: float = math.inf
    right: bool = False
    #: whether its times are those of the final: the fastest of many is the luckiest of them, too
    final: bool = False

    def ready(self) -> None:
        """All ranks are about to call this side."""
        if self.setting is not None:
            set_strategy(self.setting)
        self.peer.barrier()


def time_case(
    operation: str,
    nbytes: int,
    settings: Sequence[str],
    peers: Sequence[Peer],
    work: dict[str, Any],
) -> list[dict[str, Any]]:
    """Medians of one operation and size, of our settings and all peers, whose calls take turns.

    Each repeat is the mean of a few calls for small sizes, and the slowest rank's time counts.
    Where several settings are compared, only the fastest of a first look go on, and in the end the
    fastest of these is timed anew, in turn with auto.
    """
    size = dist.get_world_size()
    device = work["device"]
    if device == "cuda":
        device = f"cuda:{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}"
    case = Case(operation, nbytes, dist.get_rank(), size, shared=work["empty"], device=device)
    most = 50 if nbytes <= 64 << 10 else 10 if nbytes <= 1 << 20 else 1
    repeats = work["repeats"] or (20 if nbytes < 25 << 20 else 5)
    us = TorchPeer("unisono")
    ours = [Side(us, setting) for setting in settings]
    others = [Side(peer) for peer in peers]
    sides = [*ours, *others]
    calls = {peer.name: peer.call(case) for peer in (us, *peers)}

    def run(side: Side, times: int) -> float:
        call = calls[side.peer.name]
        side.ready()
        start = time.perf_counter()
        for _ in range(times):
            call()
        case.finish()
        elapsed = (time.perf_counter() - start) / times
        # whoever polls for its turn would take the cores of those who still call
        dist.barrier()
        return elapsed

    for side in sides:
        case.fill()
        run(side, 1)
        side.right = everywhere(case.right())
    case.clear()
    # auto's own choice goes on too, fixed: what the two differ by is the machine's noise
    staying = {"auto", strategy_of("auto", operation, nbytes)}
    lively = ours
    for kept in _KEPT if len(ours) > 1 else (1,):
        looked = [*lively, *others]
        found = slowest([[run(side, min(most, 3))] for side in looked])
        for side, (seconds,) in zip(looked, found, strict=True):
            side.look = min(side.look, seconds)
        lively = _fastest(lively, kept, staying)
    fastest = min(side.look for side in lively)
    lively = [
        side for side in lively if side.look <= _HOPELESS * fastest or side.setting in staying
    ] + others

    def race(sides: Sequence[Side]) -> None:
        inner = [max(1, min(most, round(_PER_REPEAT / side.look))) for side in sides]
        for side in sides:
            side.times = []
        for repeat in range(-1, repeats):
            # each is first now and then, and no two follow each other always
            for turn in range(len(sides)):
                number = (repeat + turn) % len(sides)
                elapsed = run(sides[number], inner[number])
                if repeat >= 0:
                    sides[number].times.append(elapsed)
        for side, taken in zip(sides, slowest([side.times for side in sides]), strict=True):
            side.times = taken

    race(lively)
    fixed = [side for side in lively if side.setting not in (None, "auto")]
    if len(ours) > 1 and fixed:
        best = min(fixed, key=lambda side: statistics.median(side.times))
        finalists = [side for side in lively if side is best or side.setting in staying]
        race(finalists)
        for side in finalists:
            side.final = True
    set_strategy(settings[0])
    return _rows(case, ours, others)


def _fastest(ours: Sequence[Side], number: int, staying: Container[str | None]) -> list[Side]:
    """So many of the fastest at a look, and those who stay whatever they take."""
    ranking = sorted(ours, key=lambda side: (side.setting not in staying, side.look))
    stay = sum(side.setting in staying for side in ours)
    return ranking[: number + stay]


def _rows(case: Case, ours: Sequence[Side], others: Sequence[Side]) -> list[dict[str, Any]]:
    size = dist.get_world_size()
    medians = [statistics.median(side.times or [side.look]) for side in ours]
    fixed = [
        seconds
        for side, seconds in zip(ours, medians, strict=True)
        if side.setting != "auto" and side.final
    ]
    peers = [(side.peer.name, statistics.median(side.times), side.right) for side in others]
    rows = []
    for side, seconds in zip(ours, medians, strict=True):
        assert side.setting is not None
        rows.append(
            {
                "op": case.operation,
                "setting": side.setting,
                "strategy": strategy_of(side.setting, case.operation, case.nbytes),
                "ranks": size,
                "bytes": case.nbytes,
                "repeats": len(side.times),
                "final": side.final,
                "seconds": seconds,
                "best": seconds / min(fixed) if side.setting == "auto" and fixed else None,
                "algbw": case.nbytes / seconds,
                "busbw": case.nbytes / seconds * BUS_FACTOR[case.operation](size),
                "correct": side.right,
                "peers": {
                    name: {"seconds": theirs, "ratio": seconds / theirs, "correct": right}
                    for name, theirs, right in peers
                },
            }
        )
    return rows


def slowest(times: list[list[float]]) -> list[list[float]]:
    """The slowest rank's time of each repeat."""
    table = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    found: list[list[float]] = table.tolist()
    return found


def everywhere(good: bool) -> bool:
    """Whether it is so on all ranks."""
    verdict = torch.tensor([int(good)])
    dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
    return bool(verdict.item())


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
    if setting == "auto" and world().on_devices:
        return "device"
    kind, nodes = Kind(operation), tuple(dict.fromkeys(world().nodes))
    return str(resolve(parse(setting), kind, nodes) or world().chooser.choose(kind, nbytes))


if __name__ == "__main__":
    main()
