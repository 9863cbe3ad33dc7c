"""Measures the links between the nodes of a group once, when its links are new.

The first rank of each node speaks for it.  Nodes measure in pairs of which no two share a node at a
time; what was measured before is on disk (`collective.figures`).  All ranks come to know the same:
what is on disk from the greetings, and what was measured from the ranks that did.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
from collections.abc import Iterator, Mapping, Sequence

from collective import figures
from collective.errors import ProtocolError
from collective.figures import Sample
from collective.links.endpoint import SocketEndpoint
from collective.links.link import Inlet, Outlet
from collective.links.probe import measure, serve, until
from collective.links.wire import FrameKind
from collective.machine import core_set, cores
from collective.strategies import nodes_of
from collective.surroundings import Facts, Surroundings, decoded, encoded

_log = logging.getLogger("unisono.collective")
#: seconds that all measurements of a group should take together
_BUDGET = 0.8
#: how many others each node measures at most: of many nodes they stand for all
_ROUNDS = 7


def wanted() -> bool:
    """Whether links may be measured, by ``UNISONO_CALIBRATION``.

    Raises:
        ValueError: the variable is neither ``auto`` nor ``off``.
    """
    setting = os.environ.get("UNISONO_CALIBRATION") or "auto"
    if setting not in ("auto", "off"):
        raise ValueError(f"UNISONO_CALIBRATION is {setting!r}; there are auto and off")
    return setting == "auto"


def rounds(nodes: int) -> Iterator[list[tuple[int, int]]]:
    """Pairs of numbers of nodes, such that each node is in one pair of a round at most.

    The circle method of tournaments: one node stays, the others walk around it.
    """
    places = nodes + nodes % 2
    for turn in range(min(places - 1, _ROUNDS)):
        walk = places - 1
        found = [(turn, walk)]
        found += [((turn + step) % walk, (turn - step) % walk) for step in range(1, places // 2)]
        yield [(min(pair), max(pair)) for pair in found if max(pair) < nodes]


def _leaders(nodes: Sequence[str]) -> list[int]:
    return [ranks[0] for ranks in nodes_of(nodes)]


def _ends(inlet: Inlet) -> tuple[str, str]:
    """The addresses of this machine and of the other one."""
    assert isinstance(inlet.endpoint, SocketEndpoint)
    return inlet.endpoint.hosts()


def own_facts(
    me: int, nodes: Sequence[str], inlets: Mapping[int, Inlet], kind: str, calibrates: bool
) -> Facts:
    """What this rank says of itself.

    Args:
        me: its rank.
        nodes: the name of each rank's node.
        inlets: its links, by peer.
        kind: of the links within its node.
        calibrates: whether it wants links to be measured.
    """
    leaders = _leaders(nodes)
    samples: dict[int, Sample] = {}
    measured = None
    if me in leaders:
        try:
            measured = figures.load(kind)
            known = figures.load_samples()
            ends = {peer: _ends(inlets[peer]) for peer in leaders if peer != me}
            ends[me] = (socket.gethostname(),) * 2  # of shared memory
            samples = {peer: known[pair] for peer, pair in ends.items() if pair in known}
        except (OSError, ValueError) as error:
            _log.warning("measured figures cannot be used: %s", error)
    return Facts(cores(), core_set(), calibrates, measured, samples, kind)


def calibrate(
    me: int,
    nodes: Sequence[str],
    facts: Sequence[Facts],
    inlets: Mapping[int, Inlet],
    outlets: Mapping[int, Outlet],
    epoch: int,
    deadline: float,
) -> Surroundings:
    """What the ranks of a group know alike, after links that nobody knows have been measured.

    Args:
        me: this rank.
        nodes, facts: of each rank.
        inlets, outlets: the group's links, by peer, on which no operation has begun.
        epoch: of the group.
        deadline: monotonic time at which to give up.

    Raises:
        RendezvousFailed: a peer did not measure, or did not answer, until then.
        EndOfLink: a peer closed its link.
        ProtocolError: a peer says what makes no sense.
    """
    leaders = _leaders(nodes)
    found: dict[tuple[int, int], Sample] = {}
    missing: list[tuple[int, int]] = []
    turns = list(rounds(len(leaders)))
    for one, other in (pair for turn in turns for pair in turn):
        pair = leaders[one], leaders[other]
        known = facts[pair[0]].samples.get(pair[1]) or facts[pair[1]].samples.get(pair[0])
        if known is not None:
            found[pair] = known
        else:
            missing.append(pair)
    if missing and all(one.calibrates for one in facts):
        labels = [f"rank {rank} on node {node}" for rank, node in enumerate(nodes)]
        limit = _BUDGET / len(turns)
        mine: dict[int, Sample] = {}
        for low, high in missing:
            if me == low:
                mine[high] = measure(inlets[high], epoch, limit, deadline, labels[high])
            elif me == high:
                serve(outlets[low], epoch, deadline, labels[low])
        measuring = sorted({low for low, _ in missing})
        if me in measuring:
            body = json.dumps(encoded(mine)).encode()
            for inlet in inlets.values():
                inlet.say(FrameKind.FIGURES, epoch, 0, body)
        for rank in measuring:
            theirs = mine if rank == me else _told(outlets[rank], deadline, labels[rank])
            found |= {(rank, peer): sample for peer, sample in theirs.items()}
        if not set(missing) <= set(found):
            raise ProtocolError(f"nobody measured the links {set(missing) - set(found)}")
        _keep(me, missing, found, inlets)
    return Surroundings(
        tuple(facts),
        {(nodes[low], nodes[high]): sample for (low, high), sample in found.items()},
    )


def _told(outlet: Outlet, deadline: float, label: str) -> dict[int, Sample]:
    """What a rank has measured."""
    _, body = until(lambda: outlet.hear(FrameKind.FIGURES), outlet, select.POLLIN, deadline, label)
    try:
        return decoded(json.loads(body))
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise ProtocolError(f"{label} tells of measurements that are none: {error}") from None


def _keep(
    me: int,
    missing: Sequence[tuple[int, int]],
    found: Mapping[tuple[int, int], Sample],
    inlets: Mapping[int, Inlet],
) -> None:
    """Keep what concerns this rank's node for later groups."""
    fresh = {}
    for pair in missing:
        if me in pair:
            peer = pair[1] if pair[0] == me else pair[0]
            fresh[_ends(inlets[peer])] = found[pair]
    if fresh:
        try:
            figures.store_samples(fresh)
        except (OSError, ValueError) as error:
            _log.warning("what was measured between nodes is not kept: %s", error)
