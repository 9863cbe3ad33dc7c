"""Times of what is too large to be simulated as it is: many segments, and rings of many ranks."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from collective.cost import Topology
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
