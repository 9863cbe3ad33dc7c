"""What a cluster is made of, for the time that a schedule takes on it (`collective.simulation`).

A segment of b bytes occupies its sender's way out for b / bandwidth, and its receiver's way in for
as long, `latency` later: alone on its way it takes α + β·bytes.  What shares a way queues.  Within
a node each device has a way out and a way in of its own; between nodes all ranks of a node share
its network card.  On top of that a machine may ask for time on a core for each segment that is
sent or received.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from collective.program import split
from collective.schedule import Kind, Schedule

Nodes = tuple[tuple[int, ...], ...]

#: operations on one tensor, whose slots lie one behind the other
ON_ONE_TENSOR = frozenset({Kind.ALL_REDUCE, Kind.REDUCE, Kind.BROADCAST})
#: mean bytes of a slot up to which those of an all-gather are put one behind the other: beyond it
#: copying them costs more than the segments that it saves
SMALL_SLOT = 64 << 10


def lie_together(kind: Kind, ranks: int, nbytes: int) -> bool:
    """Whether slots lie one behind the other in memory, so that small ones share a segment.

    The same on all ranks: `nbytes` is the whole tensor's.
    """
    if kind is Kind.ALL_GATHER:
        return nbytes <= SMALL_SLOT * ranks
    return kind in ON_ONE_TENSOR or kind is Kind.REDUCE_SCATTER


@dataclass(frozen=True)
class Link:
    """`latency` in seconds, `bandwidth` in bytes per second in each direction.

    `held` are the segments that it takes while its receiver has no place for them.
    """

    latency: float
    bandwidth: float
    held: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.latency < float("inf") or not self.bandwidth > 0:
            raise ValueError(
                f"a link has a latency of 0 s or more and a bandwidth above 0 B/s, not {self}"
            )

    def seconds(self, nbytes: float) -> float:
        """How long `nbytes` occupy the link, latency apart."""
        return nbytes / self.bandwidth


@dataclass(frozen=True)
class Machine:
    """What each segment costs at either end, on the rank's own thread and one core of its node.

    Attributes:
        cores: cores that the ranks of a node share; None if there are enough for all.
        per_segment: seconds for each segment, whatever its size.
        per_byte: seconds for each byte that is copied or folded into its place.
        per_byte_sent: seconds for each byte that is handed to a link.
        per_call: seconds that each rank takes over the call itself, before its first segment.
    """

    cores: int | None = None
    per_segment: float = 0.0
    per_byte: float = 0.0
    per_byte_sent: float = 0.0
    per_call: float = 0.0

    def __post_init__(self) -> None:
        if self.cores is not None and self.cores < 1:
            raise ValueError(f"a machine has at least one core, not {self.cores}")
        if min(self.per_segment, self.per_byte, self.per_byte_sent, self.per_call) < 0:
            raise ValueError(f"a segment costs 0 s or more, not {self}")

    @property
    def free(self) -> bool:
        """Whether neither calls nor segments cost anything."""
        return not (self.per_segment or self.per_byte or self.per_byte_sent or self.per_call)


@dataclass(frozen=True)
class Topology:
    """The ranks of each node, the links within a node and between nodes, and the machines."""

    nodes: Nodes
    local: Link
    between: Link
    machine: Machine = field(default_factory=Machine)

    def __post_init__(self) -> None:
        if sorted(rank for node in self.nodes for rank in node) != list(range(self.ranks)):
            raise ValueError(f"every rank from 0 on belongs to one node: {self.nodes}")
        if not self.nodes or not all(self.nodes):
            raise ValueError(f"every node needs at least one rank: {self.nodes}")

    @property
    def ranks(self) -> int:
        """Ranks of all nodes."""
        return sum(map(len, self.nodes))

    @cached_property
    def node_of(self) -> tuple[int, ...]:
        """The number of each rank's node."""
        of = {rank: number for number, node in enumerate(self.nodes) for rank in node}
        return tuple(of[rank] for rank in range(self.ranks))

    @property
    def alike(self) -> bool:
        """Whether nodes have equally many ranks, in order."""
        devices = len(self.nodes[0])
        return self.nodes == _numbered(len(self.nodes), devices)


def uniform(
    nodes: int, devices: int, local: Link, between: Link, machine: Machine | None = None
) -> Topology:
    """`nodes` alike, with `devices` ranks each, in order."""
    return Topology(_numbered(nodes, devices), local, between, machine or Machine())


def _numbered(nodes: int, devices: int) -> Nodes:
    return tuple(tuple(range(n * devices, (n + 1) * devices)) for n in range(nodes))


@dataclass(frozen=True)
class Timing:
    """The outcome of a simulation.

    Attributes:
        seconds: until the last rank is done.
        done: seconds until each rank is done.
        sent: bytes that each rank sends to others.
        busy: for how long each shared resource was in use, by its name; of cores the mean.
    """

    seconds: float
    done: tuple[float, ...]
    sent: tuple[int, ...]
    busy: dict[str, float]


def slot_sizes(kind: Kind, schedule: Schedule, nbytes: int) -> tuple[int, ...]:
    """Bytes of each of the user's slots, of a tensor of `nbytes` that is cut into equal parts.

    `nbytes` is the whole tensor: of an all-gather the result, of a reduce-scatter, a scatter or an
    all-to-all what one rank puts in, of a gather what the root gets.
    """
    if not schedule.chunks:
        return ()
    if kind is Kind.ALL_TO_ALL:
        # what goes to rank d on one rank comes from that rank on d: all are equal
        return (nbytes // schedule.ranks,) * schedule.chunks
    return tuple(size for _, size in split(nbytes, schedule.chunks))
