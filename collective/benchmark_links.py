"""Measures the kind of link between two ranks, in well under a second, for `collective.figures`.

Small all-reduces of two ranks differ in one thing each: `direct` is one hop, `centralized` two hops
of as many messages, `ring` twice as many messages.  So differences of their times and of the time
that cores spent on them tell a hop, a segment and a call apart.  Large reductions, one way, tell
what a byte costs at either end.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from collective.benchmark import set_strategy, slowest
from collective.figures import Figures
from collective.program import SEGMENT

_SMALL = 8
_LARGE = 16 * SEGMENT
_ROUNDS = 5
#: calls of one round
_CALLS = {_SMALL: 40, SEGMENT: 6, _LARGE: 1}
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
        one, many = (_measure("reduce", "centralized", size) for size in (SEGMENT, _LARGE))
    set_strategy("auto")
    # a ring sends and receives one segment more per rank than a swap
    per_segment = max(0.0, (sum(ring.cores) - sum(direct.cores)) / 4)
    per_call = max(0.0, sum(direct.cores) / 2 - 2 * per_segment)
    hop = ((star.seconds - per_call) / 2 + direct.seconds - per_call) / 2
    latency = max(0.0, hop - 2 * per_segment)
    span, segments = _LARGE - SEGMENT, (_LARGE - SEGMENT) / SEGMENT
    received, sent = (
        max(0.0, (large - small - segments * per_segment) / span)
        for large, small in zip(many.cores, one.cores, strict=True)
    )
    rate = span / max(many.seconds - one.seconds, 1e-9)
    # alone on its way, a segment takes what both ends and the link between them take
    alone = (one.seconds - per_call - 2 * hop) / SEGMENT
    of_link = max(alone - received - sent, _LEAST_SHARE / rate)
    return Figures(
        kind=kind,
        latency=latency,
        bandwidth=1 / of_link,
        per_call=per_call,
        per_segment=per_segment,
        per_byte=received,
        per_byte_sent=sent,
        cores=len(os.sched_getaffinity(0)),
        round_trip=2 * hop,
        rate=rate,
    )


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
    return _Cost(statistics.median(seconds), (first, second))


def _call(operation: str, tensor: Any) -> None:
    if operation == "reduce":
        dist.reduce(tensor, 0)
    else:
        dist.all_reduce(tensor)
