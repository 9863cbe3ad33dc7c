"""How ranks of one node meet, and hand each other the memory and the bells of a link.

The receiver dials, here on a Unix socket at an abstract address; after the handshake of all data
links it makes the memory.  See `collective.links.shared_memory` for what goes through it.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time

from collective.errors import RendezvousFailed
from collective.links.link import EndOfLink
from collective.links.shared_memory import make_memory


def address(secret: str, world: str, epoch: int, rank: int) -> str:
    """The abstract Unix address at which `rank` (of the world) takes shared-memory links.

    It can only be known with the secret, and differs between the worlds of one machine.
    """
    digest = hashlib.sha256(f"{secret} {world} {epoch} {rank}".encode()).hexdigest()
    return f"\0unisono-{digest[:40]}"


def listen(where: str) -> socket.socket:
    """A listening Unix socket at an abstract address."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(where)
        sock.listen(256)
    except OSError as error:
        sock.close()
        raise RendezvousFailed(f"cannot listen for ranks of this node: {error}") from error
    return sock


def offer(sock: socket.socket, bell: int) -> int:
    """At the dialler, the receiver: make the memory, hand it and the own bell over.

    Returns:
        The memory's descriptor.
    """
    memory = make_memory()
    _hand_over(sock, b"m", [memory, bell], made=[memory])
    return memory


def take(sock: socket.socket, bell: int, deadline: float) -> tuple[int, int]:
    """At the dialled side, the sender: the memory and the peer's bell; the own bell goes back."""
    memory, peer_bell = _receive(sock, 2, deadline)
    _hand_over(sock, b"b", [bell], made=[memory, peer_bell])
    return memory, peer_bell


def _hand_over(sock: socket.socket, tag: bytes, descriptors: list[int], made: list[int]) -> None:
    """Send descriptors; where the peer is gone, close those that were made for it."""
    try:
        socket.send_fds(sock, [tag], descriptors)
    except OSError as error:
        for descriptor in made:
            os.close(descriptor)
        raise EndOfLink(str(error)) from error


def take_bell(sock: socket.socket, deadline: float) -> int:
    """At the dialler: the bell of the sender."""
    (bell,) = _receive(sock, 1, deadline)
    return bell


def _receive(sock: socket.socket, count: int, deadline: float) -> list[int]:
    sock.settimeout(max(0.001, deadline - time.monotonic()))
    try:
        data, descriptors, _, _ = socket.recv_fds(sock, 1, count)
    except TimeoutError:
        raise RendezvousFailed("a rank of this node connected but said nothing") from None
    except OSError as error:
        raise EndOfLink(str(error)) from error
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    if not data or len(descriptors) != count:
        for descriptor in descriptors:
            os.close(descriptor)
        raise EndOfLink("a rank of this node ended while it connected")
    return list(descriptors)
