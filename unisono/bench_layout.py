"""Where ``unisono bench`` puts its ranks: how many nodes there are, and how many ranks on each."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import accumulate, pairwise

from collective.figures import KINDS

__all__ = ["Layout", "layouts"]

#: all of them run on this machine
MAX_RANKS = 64
_FORMS = (
    "write flat (one rank per node, see --ranks), 2x2 (nodes × ranks of each), "
    "or the ranks of each node such as 1,4,2"
)


@dataclass(frozen=True)
class Layout:
    """Nodes on this machine, real as network namespaces or told apart by their names only.

    Attributes:
        text: as it was asked for, such as `flat` or `2x2`.
        nodes: the ranks of each node, which are numbered node by node.
        link: `websocket` for all pairs, `shm` for all pairs, or `shm+websocket`: shared memory
            between ranks of a node, WebSocket between nodes.
    """

    text: str
    nodes: tuple[int, ...]
    link: str

    @property
    def ranks(self) -> int:
        """Ranks of all nodes."""
        return sum(self.nodes)

    @property
    def equal(self) -> bool:
        """Whether all nodes have equally many ranks."""
        return len(set(self.nodes)) == 1

    @property
    def fields(self) -> dict[str, object]:
        """What a row of results says about it."""
        return {"topology": self.text, "nodes": len(self.nodes), "link": self.link}

    @property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node, by number."""
        ends = list(accumulate(self.nodes, initial=0))
        return tuple(tuple(range(start, end)) for start, end in pairwise(ends))

    @property
    def levels(self) -> bool:
        """Whether there are two: several nodes, and ranks that share one."""
        return 1 < len(self.nodes) < self.ranks

    def node_of(self, rank: int) -> int:
        """The number of a rank's node."""
        return next(node for node, ranks in enumerate(self.members) if rank in ranks)

    def environment(self, rank: int, *, hosts: bool) -> dict[str, str]:
        """What a rank's environment says about its place.

        Args:
            rank: the rank.
            hosts: whether each node is a host of its own.
        """
        node = self.node_of(rank)
        found = {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_RANK": str(self.members[node].index(rank)),
            "LOCAL_WORLD_SIZE": str(self.nodes[node]),
            "UNISONO_LINKS": "websocket" if self.link == "websocket" else "auto",
        }
        # without a host or a node to share, ranks have this machine's cores in common, and `auto`
        # chooses for ranks of one machine
        if hosts or self.levels:
            found["UNISONO_NODE"] = f"node{node}"
        return found


def layouts(topology: str, ranks: str | None, link: str | None) -> list[Layout]:
    """The layouts that the options of a command ask for.

    Args:
        topology: `flat`, `2x2` or `1,4,2`.
        ranks: numbers of ranks of `flat`, separated by commas; 2,4 if None.
        link: one of `figures.KINDS` for all pairs, or None for what the topology implies.

    Raises:
        ValueError: names the option and what it takes.
    """
    if link is not None and link not in KINDS:
        raise ValueError(
            f"--link {link!r}: it takes one of {', '.join(KINDS)} for all pairs; leave it out for "
            "shared memory within nodes and WebSocket between them"
        )
    if topology != "flat":
        if ranks is not None:
            raise ValueError(
                f"--ranks {ranks} beside --topology {topology}, which says how many there are: "
                "leave one of them out"
            )
        return [_of(topology, _nodes(topology), link)]
    if link == "shm":
        return [_of("flat", (number,), link) for number in _numbers("--ranks", ranks or "2,4")]
    return [_of("flat", (1,) * number, link) for number in _numbers("--ranks", ranks or "2,4")]


def _of(text: str, nodes: tuple[int, ...], link: str | None) -> Layout:
    if sum(nodes) > MAX_RANKS:
        raise ValueError(
            f"{sum(nodes)} ranks are too many for one machine, at most {MAX_RANKS} are started: "
            f"give --ranks or --topology fewer"
        )
    if link == "shm" and len(nodes) > 1:
        raise ValueError(
            f"--link shm beside --topology {text}: nodes share no memory; leave --link out, or "
            f"take one node, such as 1x{sum(nodes)}"
        )
    if link is None:
        if len(nodes) == 1 and text != "flat":
            link = "shm"
        else:
            link = "websocket" if max(nodes) == 1 else "shm+websocket"
    return Layout(text, nodes, link)


def _nodes(text: str) -> tuple[int, ...]:
    """The ranks of each node."""
    match = re.fullmatch(r"([0-9]{1,4})[x×]([0-9]{1,4})", text, re.ASCII)
    if match is not None:
        nodes, each = int(match[1]), int(match[2])
        if not nodes or not each:
            raise ValueError(f"--topology {text!r}: at least one node, of at least one rank")
        return (each,) * nodes
    if re.fullmatch(r"[0-9]{1,4}(,[0-9]{1,4})+", text, re.ASCII) is None:
        raise ValueError(f"--topology {text!r}: {_FORMS}")
    return tuple(_numbers("--topology", text))


def _numbers(flag: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,4}", part, re.ASCII) and int(part) for part in parts):
        raise ValueError(
            f"{flag} {text!r}: expected numbers from 1 on, separated by commas, such as 2,4"
        )
    return [int(part) for part in parts]
