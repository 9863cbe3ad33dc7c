"""What the ranks of a group know of each other's machines and of the ways between them.

Each rank says its `Facts` in the greeting of its links, so all ranks know the same, and choose
strategies alike (`collective.choosing`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from collective import figures
from collective.choosing import Chooser
from collective.cost import Link, Machine, Nodes, Topology
from collective.errors import ProtocolError
from collective.figures import Figures, Sample
from collective.strategies import nodes_of
from collective.units import format_rate

#: a link is slow if the best one is so many times as fast
_FAR_BELOW = 4


@dataclass(frozen=True)
class Facts:
    """What a rank says of itself.

    Attributes:
        cores: that it may use.
        core_set: the same for ranks that share these cores.
        calibrates: whether links may be measured for it.
        figures: of links within its node, if it has measured them (`collective.figures`).
        samples: of links to the leaders of other nodes, by rank, as it has measured them before;
            by its own rank of shared memory.
        kind: of the links within its node.
    """

    cores: int
    core_set: str = ""
    calibrates: bool = False
    figures: Figures | None = None
    samples: Mapping[int, Sample] = field(default_factory=dict)
    kind: str = "websocket"

    def encode(self) -> bytes:
        """As the body of a greeting."""
        return json.dumps(
            {
                "cores": self.cores,
                "core_set": self.core_set,
                "calibrates": self.calibrates,
                "figures": None if self.figures is None else asdict(self.figures),
                "samples": encoded(self.samples),
                "kind": self.kind,
            }
        ).encode()

    @classmethod
    def decode(cls, body: bytes, label: str) -> Facts:
        """What a peer said; one that says nothing has a core to itself.

        Raises:
            ProtocolError: it makes no sense; names the peer.
        """
        if not body:
            return cls(1, label)
        try:
            found = json.loads(body)
            measured = found["figures"]
            facts = cls(
                int(found["cores"]),
                str(found["core_set"]),
                bool(found["calibrates"]),
                None if measured is None else Figures(**measured),
                decoded(found["samples"]),
                str(found["kind"]),
            )
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise ProtocolError(
                f"{label} says nothing of use about itself ({error!r}); "
                "do all ranks run the same version?"
            ) from None
        if facts.cores < 1:
            raise ProtocolError(f"{label} says that it has {facts.cores} cores")
        return facts


def encoded(samples: Mapping[int, Sample]) -> dict[str, list[float]]:
    """Samples as JSON has them."""
    return {str(rank): [one.round_trip, one.rate] for rank, one in samples.items()}


def decoded(found: Mapping[str, Sequence[float]]) -> dict[int, Sample]:
    """The samples of `encoded`.

    Raises:
        ValueError: a figure is none.
    """
    return {
        int(rank): Sample(float(round_trip), float(rate))
        for rank, (round_trip, rate) in found.items()
    }


@dataclass(frozen=True)
class Surroundings:
    """What all ranks of a world know alike.

    Attributes:
        facts: of each rank.
        samples: of links between nodes, by the names of both.
    """

    facts: tuple[Facts, ...]
    samples: Mapping[tuple[str, str], Sample] = field(default_factory=dict)

    def slow_links(self) -> str:
        """Links between nodes that carry far less than the best of them, in words; or nothing.

        What was measured of a pair is the way from the node that was named later.
        """
        best = max((sample.rate for sample in self.samples.values()), default=0.0)
        slow = [
            f"{source} → {target} {format_rate(sample.rate)}"
            for (target, source), sample in sorted(self.samples.items())
            if sample.rate * _FAR_BELOW < best
        ]
        if not slow:
            return ""
        return f"{', '.join(slow)}; the best link between two nodes {format_rate(best)}"

    def chooser(self, ranks: Sequence[int], names: Sequence[str]) -> Chooser:
        """What chooses for a group of these ranks, on nodes of these names."""
        facts = [self.facts[rank] for rank in ranks]
        nodes = nodes_of(names)
        # which cores each node has, and how many nodes have these
        cores = [{facts[rank].core_set: facts[rank].cores for rank in node} for node in nodes]
        together = max(Counter(core_set for node in cores for core_set in node).values())
        within = [
            one.samples[rank] for rank, one in zip(ranks, facts, strict=True) if rank in one.samples
        ]
        least = min(sum(node.values()) for node in cores)
        return Chooser(self._topology(nodes, set(names), facts, within, least), together)

    def _topology(
        self,
        nodes: Nodes,
        names: set[str],
        facts: Sequence[Facts],
        within: Sequence[Sample],
        cores: int,
    ) -> Topology:
        measured = [one.figures for one in facts if one.figures is not None]
        machine = replace(_slowest(measured) or figures.MACHINE, cores=cores)
        local = figures.typical(within) or figures.LOCAL
        if measured:
            local = Link(
                max(one.latency for one in measured), min(one.bandwidth for one in measured)
            )
        held = figures.HELD if all(one.kind == "shm" for one in facts) else 0
        local = replace(local, held=held)
        found = [one for pair, one in self.samples.items() if names.issuperset(pair)]
        return Topology(nodes, local, figures.typical(found) or figures.BETWEEN, machine)


def _slowest(measured: Sequence[Figures]) -> Machine | None:
    if not measured:
        return None
    machines = [one.machine for one in measured]
    return Machine(
        None,
        max(one.per_segment for one in machines),
        max(one.per_byte for one in machines),
        max(one.per_byte_sent for one in machines),
        max(one.per_call for one in machines),
    )
