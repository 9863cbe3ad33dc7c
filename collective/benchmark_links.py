"""Measures the kind of link between two ranks, in well under a second, for `collective.figures`.

Small all-reduces of two ranks differ in one thing each: `direct` is one hop, `centralized` two hops
of as many messages, `ring` twice as many messages.  So differences of their times and of the time
that cores spent on them tell a hop, a segment and a call apart.  Large reductions, one way, tell
what a byte costs at either end.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist

from collective.benchmark import set_strategy, slowest
from collective.figures import Figures
from collective.machine import cores
from collective.program import SEGMENT

_SMALL = 8
_ROUNDS = 5
#: calls of one round, by size
_CALLS = {_SMALL: 40, SEGMENT: 6, 2 * SEGMENT: 3, 4 * SEGMENT: 2, 8 * SEGMENT: 1, 16 * SEGMENT: 1}
_LARGE = tuple(size for size in _CALLS if size > _SMALL)
#: a link that takes less time than this share of a stream's is taken to cost nothing of its own
_LEAST_SHARE = 0.05


@dataclass(frozen=True)
class _Cost:
    """Of one call: seconds at the slower rank, and seconds of a core at each rank."""

    seconds: float
    cores: tuple[float, float]


def run(kind: str) -> Figures:
    """The figures of the links of the default group, which has two ranks."""
    for _ in range(2):  # the first round warms up
        direct, star, ring = (
            _measure("all_reduce", strategy, _SMALL)
            for strategy in ("direct", "centralized", "ring")
        )
        large = [_measure("reduce", "centralized", size) for size in _LARGE]
    set_strategy("auto")
    # a ring sends and receives one segment more per rank than a swap
    per_segment = max(0.0, (sum(ring.cores) - sum(direct.cores)) / 4)
    per_call = max(0.0, sum(direct.cores) / 2 - 2 * per_segment)
    hop = max(0.0, ((star.seconds - per_call) / 2 + direct.seconds - per_call) / 2)
    latency = max(0.0, hop - 2 * per_segment)
    per_second = slope(_LARGE, [cost.seconds for cost in large])
    rate = 1 / per_second if per_second > 0 else _LARGE[-1] / large[-1].seconds
    received, sent = (
        per_byte(slope(_LARGE, [cost.cores[rank] for cost in large]), per_segment, rate)
        for rank in (0, 1)
    )
    # alone on its way, a segment takes what both ends and the link between them take
    alone = (large[0].seconds - per_call - 2 * hop) / SEGMENT
    of_link = max(alone - received - sent, _LEAST_SHARE / rate)
    return Figures(
        kind=kind,
        latency=latency,
        bandwidth=1 / of_link,
        per_call=per_call,
        per_segment=per_segment,
        per_byte=received,
        per_byte_sent=sent,
        cores=cores(),
        round_trip=2 * hop,
        rate=rate,
    )


def slope(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Seconds per byte, however far off some measurements are: the median over all pairs.

    Theil, "A rank-invariant method of linear and polynomial regression analysis", 1950.
    """
    points = zip(sizes, seconds, strict=True)
    return statistics.median(
        (later - earlier) / (more - fewer)
        for (fewer, earlier), (more, later) in combinations(points, 2)
    )


def per_byte(slope: float, per_segment: float, rate: float) -> float:
    """What of a core's seconds per byte is not spent on segments as such; always above 0.

    A segment of a small message costs more than one of many, since its process has to be woken for
    it; so its cost may come out as more than all that a large tensor's bytes cost.
    """
    slope = max(slope, _LEAST_SHARE / rate)
    return max(slope - per_segment / SEGMENT, slope / 4)


def _measure(operation: str, strategy: str, nbytes: int) -> _Cost:
    tensor = torch.zeros(nbytes // 4)
    set_strategy(strategy)
    calls = _CALLS[nbytes]
    rounds: list[tuple[float, float]] = []
    for _ in range(_ROUNDS):
        dist.barrier()
        used, start = time.process_time(), time.perf_counter()
        for _ in range(calls):
            _call(operation, tensor)
        elapsed = time.perf_counter() - start
        rounds.append((elapsed / calls, (time.process_time() - used) / calls))
    (seconds,) = slowest([[elapsed for elapsed, _ in rounds]])
    mine = torch.zeros(2, dtype=torch.float64)
    mine[dist.get_rank()] = statistics.median(used for _, used in rounds)
    dist.all_reduce(mine)
    first, second = mine.tolist()
    # what is slower waited for a core, which is no property of the link
    return _Cost(min(seconds), (first, second))


def _call(operation: str, tensor: Any) -> None:
    if operation == "reduce":
        dist.reduce(tensor, 0)
    else:
        dist.all_reduce(tensor)
