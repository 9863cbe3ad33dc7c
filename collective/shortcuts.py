"""Times of schedules that are too large to be simulated as they are.

A ring of nodes that are alike is simulated on one node.  Strategies of equal ranks have formulas:
α + β·bytes, added up along the steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, log2

from collective.cost import Link, Topology
from collective.program import SEGMENT
from collective.schedule import Kind

#: steps × ranks × segments of a ring on one node
_RING_EVENTS = 300_000


@dataclass(frozen=True)
class Found:
    """A time, the bytes that the busiest rank sends if they are known, and how both were found."""

    seconds: float
    sent: int | None
    method: str


def at_many(few: float, pieces: int, more: float, twice: int, segments: int) -> float:
    """The time of so many segments, A + B/segments, from the times of two numbers of pieces."""
    slope = (few - more) / (1 / pieces - 1 / twice)
    return more + slope * (1 / segments - 1 / twice)


def ring(kind: Kind, topology: Topology, nbytes: int, segment: int = SEGMENT) -> Found:
    """A ring of nodes that are alike: what one node does, all do at the same time.

    So one node is simulated, whose first rank receives what its own last rank sends.
    """
    devices = len(topology.nodes[0])
    links = [topology.local] * devices
    if len(topology.nodes) > 1:
        links[-1] = topology.between
    steps = (topology.ranks - 1) * (2 if kind is Kind.ALL_REDUCE else 1)
    chunk = nbytes / topology.ranks
    segments = max(1, ceil(chunk / segment))

    def run(pieces: int) -> float:
        taken = [link.seconds(chunk / pieces) for link in links]
        free = [0.0] * devices
        there = [[0.0] * pieces for _ in range(devices)]
        for _ in range(steps):
            coming: list[list[float]] = []
            for device, link in enumerate(links):
                arrivals = []
                at, busy = free[device], taken[device]
                for ready in there[device]:
                    at = (ready if ready > at else at) + busy
                    arrivals.append(at + link.latency)
                free[device] = at
                coming.append(arrivals)
            there = [coming[-1], *coming[:-1]]
        return max(max(arrivals) for arrivals in there)

    sent = round(steps * chunk)
    most = max(2, _RING_EVENTS // max(steps * devices, 1))
    if segments <= most:
        return Found(run(segments), sent, "simulated")
    least = max(steps * link.seconds(chunk) for link in links)
    seconds = at_many(run(most // 2), most // 2, run(most), most, segments)
    return Found(max(seconds, least), sent, "extrapolated")


# --- formulas: α + β·bytes, added up along the steps of ranks that are alike -------------------


def _doubling(ways: int) -> Callable[[int, Link, int], Found]:
    """Halving and doubling: log₂ steps each way, after the ranks that are too many fold in."""

    def formula(ranks: int, link: Link, nbytes: int) -> Found:
        power = 1 << (ranks.bit_length() - 1)
        share = ways * nbytes * (power - 1) / power
        seconds = ways * log2(power) * link.latency + link.seconds(share)
        if ranks > power:
            seconds += 2 * link.latency + link.seconds(2 * nbytes)
        return Found(seconds, None, "formula")

    return formula


def _least(ways: int, steps: Callable[[int], float]) -> Callable[[int, Link, int], Found]:
    """Each way everyone sends (n-1)/n of the tensor, in so many steps."""

    def formula(ranks: int, link: Link, nbytes: int) -> Found:
        sent = ways * nbytes * (ranks - 1) / ranks
        seconds = ways * steps(ranks) * link.latency + link.seconds(sent)
        return Found(seconds, round(sent), "formula")

    return formula


def _to_everyone(ranks: int, link: Link, nbytes: int) -> Found:
    sent = nbytes * (ranks - 1)
    return Found(link.latency + link.seconds(sent), sent, "formula")


def _one(_: int) -> float:
    return 1


def _log(ranks: int) -> float:
    return (ranks - 1).bit_length()


def _to_all_but_root(kind: Kind) -> Callable[[int, Link, int], Found]:
    """Scatter and all-gather, or reduce-scatter and gather; tokens cost one more latency."""

    def formula(ranks: int, link: Link, nbytes: int) -> Found:
        hops = 3 if kind is Kind.BROADCAST else 2
        seconds = hops * link.latency + link.seconds(2 * nbytes * (ranks - 1) / ranks)
        return Found(seconds, None, "formula")

    return formula


FORMULAS: dict[tuple[Kind, str], Callable[[int, Link, int], Found]] = {
    (Kind.ALL_REDUCE, "halving_doubling"): _doubling(2),
    (Kind.REDUCE_SCATTER, "halving_doubling"): _doubling(1),
    (Kind.ALL_GATHER, "halving_doubling"): _doubling(1),
    (Kind.ALL_REDUCE, "bruck"): _least(2, _log),
    (Kind.REDUCE_SCATTER, "bruck"): _least(1, _log),
    (Kind.ALL_GATHER, "bruck"): _least(1, _log),
    (Kind.ALL_REDUCE, "scatter_allgather"): _least(2, _one),
    (Kind.ALL_REDUCE, "direct"): _to_everyone,
    (Kind.REDUCE_SCATTER, "direct"): _least(1, _one),
    (Kind.ALL_GATHER, "direct"): _least(1, _one),
    (Kind.ALL_TO_ALL, "direct"): _least(1, _one),
    (Kind.REDUCE, "scatter_allgather"): _to_all_but_root(Kind.REDUCE),
    (Kind.BROADCAST, "scatter_allgather"): _to_all_but_root(Kind.BROADCAST),
}
