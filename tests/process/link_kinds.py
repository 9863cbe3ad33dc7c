"""Every kind of link between ranks, for one contract: groups of threads that are linked by it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest import mock

import soon_full

from collective.group import Group
from collective.links.doorman import Doorman
from collective.links.endpoint import SocketEndpoint
from collective.links.listener import Admission, Listener, listen
from collective.memory_world import MemoryHall, MemoryWorld
from collective.reaching import Peer
from collective.rendezvous import assemble

KINDS = ["memory", "shared memory", "websocket", "three connections", "masked"]
#: an address at which nobody listens
NOWHERE = (("127.0.0.1", 1),)


def linked_groups(
    kind: str,
    size: int,
    nodes: Sequence[str] | None = None,
    *,
    timeout: float,
    strategy: str = "auto",
    epoch: int = 1,
) -> list[Group]:
    """Groups of `size` ranks in this process whose links are all of one kind."""
    names = list(nodes or ["here"] * size)
    if kind == "memory":
        hall = MemoryHall()
        return [
            Group(
                MemoryWorld(rank, hall), "default", range(size), rank, names,
                timeout=timeout, strategy=strategy,
            )
            for rank in range(size)
        ]  # fmt: skip
    sockets = [listen("127.0.0.1", 0) for _ in range(size)]
    place = "here" if kind == "shared memory" else ""
    peers = [
        Peer(name, (("127.0.0.1", own[0].getsockname()[1]),), place)
        for name, own in zip(names, sockets, strict=True)
    ]
    admission = Admission("contract", "-", epoch, secrets.token_hex(8))

    def make(rank: int) -> Group:
        doorman = Doorman()
        listener = Listener(admission, doorman, sockets[rank], rank)
        seen = peers
        if kind == "masked":  # a rank cannot reach those behind it, which mask what they send it
            seen = [
                replace(peer, addresses=NOWHERE) if number > rank else peer
                for number, peer in enumerate(peers)
            ]
        return assemble(
            rank, seen, admission, doorman, listener, timeout=timeout, strategy=strategy
        )

    connections = "3" if kind == "three connections" else "1"
    with (
        mock.patch.dict(os.environ, {"UNISONO_CONNECTIONS": connections, "UNISONO_LINKS": "auto"}),
        mock.patch.object(SocketEndpoint, "fills_up_at", soon_full.fills_up),
        ThreadPoolExecutor(size) as pool,
    ):
        return list(pool.map(make, range(size)))


def group_by_list(rank: int, where: Sequence[str], *, epoch: int = 1, timeout: float) -> Group:
    """Like `collective.init`, but a rank may have an address of another that leads nowhere."""
    parsed = [text.rpartition(":") for text in where]
    peers = [Peer(host, ((host, int(port)),)) for host, _, port in parsed]
    admission = Admission("by-list", "-", epoch, "s")
    doorman = Doorman()
    listener = Listener(admission, doorman, listen(*peers[rank].addresses[0]), rank)
    return assemble(rank, peers, admission, doorman, listener, timeout=timeout, strategy="auto")
