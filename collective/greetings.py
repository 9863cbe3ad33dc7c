"""What ranks say to each other while the links of their group are made, and when they are not.

A rank that is lost may be the one that a peer waits for, which this rank waits for in turn: each
that gives up says why to all that it is connected to, in an ABORT.
"""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from collections.abc import Mapping, Sequence

from collective import diagnosis
from collective.errors import (
    CollectiveError,
    OperationAborted,
    PeerLost,
    ProtocolError,
    RendezvousFailed,
)
from collective.links import shared_handshake
from collective.links.doorman import Connection, Doorman
from collective.links.link import EndOfLink, Inlet, Outlet
from collective.links.wire import HEADER, HEADER_SIZE, FrameKind, masked, parse_head, plain, unmask
from collective.tensor_format import parse_json

#: bytes that are looked through for an ABORT; a control frame has at most 64 KiB
_MOST = 256 << 10


def await_greetings(
    outlets: Mapping[int, Outlet], deadline: float, labels: Mapping[int, str]
) -> None:
    """Wait until all peers have their links.

    Raises:
        RendezvousFailed: a peer said nothing until `deadline` (monotonic).
        EndOfLink: a peer is gone, also one that has greeted; `why` tells more.
    """
    poll = select.poll()
    by_descriptor = {outlet.endpoint.fileno(): peer for peer, outlet in outlets.items()}
    for descriptor in by_descriptor:
        poll.register(descriptor, select.POLLIN)
    waiting = set(outlets)
    ready = list(outlets)
    while True:
        for peer in ready:
            outlet = outlets[peer]
            ended = outlet.ended()
            if outlet.greet():
                waiting.discard(peer)
            if ended:
                if not outlet.says(FrameKind.LEFT):
                    raise EndOfLink("it said no farewell")
                poll.unregister(outlet.endpoint.fileno())
        if not waiting:
            return
        left = deadline - time.monotonic()
        if left <= 0:
            peer = min(waiting)
            raise RendezvousFailed(f"{labels[peer]} connected but said nothing", rank=peer)
        ready = [by_descriptor[descriptor] for descriptor, _ in poll.poll(left * 1000)]


def why(outlets: Mapping[int, Outlet], nodes: Sequence[str]) -> CollectiveError | None:
    """What ended one of the links, which are all made, as far as they tell within a second."""
    poll = select.poll()
    by_descriptor = {outlet.endpoint.fileno(): peer for peer, outlet in outlets.items()}
    for descriptor in by_descriptor:
        poll.register(descriptor, select.POLLRDHUP)
    while by_descriptor and (ready := poll.poll(1000)):
        silent = []
        for descriptor, _ in ready:
            poll.unregister(descriptor)
            peer = by_descriptor.pop(descriptor)
            try:
                found = outlets[peer].hear(FrameKind.ABORT)
                if found is not None:
                    return diagnosis.from_content(nodes, peer, 0, parse_json(found[1]))
            except (EndOfLink, ProtocolError):
                if not outlets[peer].says(FrameKind.LEFT):
                    silent.append(peer)
        if silent:
            return lost(silent[0], nodes)
    return None


def lost(peer: int, nodes: Sequence[str]) -> PeerLost:
    """A connection of `peer` ended before the links of its group were there."""
    return PeerLost(
        f"lost rank {peer} on node {nodes[peer]} while the ranks met: its connection ended",
        rank=peer,
        node=nodes[peer],
    )


def say_why(
    error: BaseException,
    me: int,
    nodes: Sequence[str],
    epoch: int,
    inlets: Mapping[int, Inlet],
    connections: Mapping[int, Connection],
) -> None:
    """Tell peers why this rank gives up.

    Args:
        me, nodes: this rank, and the node of each.
        epoch: of the group.
        inlets: links that are made, by peer.
        connections: by peer; where there is no link, no frame has begun on it.
    """
    body = _in_words(error, me, nodes)
    for peer, connection in connections.items():
        if peer in inlets:
            try:
                inlets[peer].say(FrameKind.ABORT, epoch, 0, body)
            except EndOfLink:
                continue  # it is gone itself
        else:
            _say(connection, epoch, body)


def tell_late(
    error: BaseException,
    me: int,
    nodes: Sequence[str],
    epoch: int,
    doorman: Doorman,
    group: str,
    missing: set[int],
    seconds: float,
) -> None:
    """Tell peers that have not come yet why this rank gave up, as they come.

    Args:
        missing: who has not come.
        seconds: how long to stay for them.
    """
    body = _in_words(error, me, nodes)
    all_came = threading.Event()

    def came(peer: int, connection: Connection) -> None:
        _say(connection, epoch, body)
        missing.discard(peer)
        if not missing:
            all_came.set()

    if missing and seconds > 0:
        doorman.attend(group, came, lambda: None)
        all_came.wait(seconds)


def _in_words(error: BaseException, me: int, nodes: Sequence[str]) -> bytes:
    """The body of an ABORT that tells of an error."""
    if not isinstance(error, CollectiveError):
        label = f"rank {me} on node {nodes[me]}"
        text = f"{label} gave up while the ranks met: {diagnosis.in_words(error)}"
        error = OperationAborted(text, rank=me, node=nodes[me])
    return json.dumps(diagnosis.to_content(error, me)).encode()


def _say(connection: Connection, epoch: int, body: bytes) -> None:
    """An ABORT on a connection on which no frame has begun; to nobody if the peer is gone."""
    whole = masked if connection.dialled else plain
    frame = HEADER.pack(FrameKind.ABORT, 0, 0, epoch, 0, 0, len(body), 0) + body
    try:
        connection.sock.send(whole(frame), socket.MSG_DONTWAIT)
    except OSError:
        return


def last_words(connection: Connection) -> dict[str, object] | None:
    """What an ABORT says on a connection that has ended."""
    try:
        if connection.sock.family == socket.AF_UNIX:
            shared_handshake.skip(connection.sock)
        data = connection.sock.recv(_MOST, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except OSError:
        data = b""
    data = connection.unread + data
    try:
        while (head := parse_head(memoryview(data))) is not None:
            body, data = data[head.size : head.size + head.length], data[head.size + head.length :]
            if head.key is not None:
                body = unmask(body, head.key)
            if head.opcode == 2 and body[:1] == bytes((FrameKind.ABORT,)):
                return parse_json(body[HEADER_SIZE:])
    except (ValueError, ProtocolError):
        pass  # what a peer that is gone sent need not make sense
    return None
