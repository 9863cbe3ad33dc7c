"""How ranks of one node meet, and hand each other the memory and the bells of a link.

The receiver dials, here on a Unix socket at an abstract address; after the handshake of all data
links it makes the memory.  See `collective.links.shared_memory` for what goes through it.
"""

from __future__ import annotations

import hashlib
import os
import select
import socket
import time

from collective.errors import RendezvousFailed
from collective.links.link import EndOfLink
from collective.links.shared_memory import make_memory

#: what is handed over with one of these: the memory and a bell, or a bell alone
_MEMORY, _BELL = b"m", b"b"


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
    _hand_over(sock, _MEMORY, [memory, bell], made=[memory])
    return memory


def take(
    sock: socket.socket, bell: int, deadline: float, over: int | None = None
) -> tuple[int, int]:
    """At the dialled side, the sender: the memory and the peer's bell; the own bell goes back.

    Raises:
        EndOfLink: the peer is gone, or `over` has become readable.
    """
    memory, peer_bell = _receive(sock, _MEMORY, 2, deadline, over)
    _hand_over(sock, _BELL, [bell], made=[memory, peer_bell])
    return memory, peer_bell


def _hand_over(sock: socket.socket, tag: bytes, descriptors: list[int], made: list[int]) -> None:
    """Send descriptors; where the peer is gone, close those that were made for it."""
    try:
        socket.send_fds(sock, [tag], descriptors)
    except OSError as error:
        for descriptor in made:
            os.close(descriptor)
        raise EndOfLink(str(error)) from error


def take_bell(sock: socket.socket, deadline: float, over: int | None = None) -> int:
    """At the dialler: the bell of the sender.

    Raises:
        EndOfLink: as `take`.
    """
    (bell,) = _receive(sock, _BELL, 1, deadline, over)
    return bell


def skip(sock: socket.socket) -> None:
    """Pass over what a peer handed over and nobody will take."""
    if sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) in (_MEMORY, _BELL):
        _, descriptors, _, _ = socket.recv_fds(sock, 1, 2)
        for descriptor in descriptors:
            os.close(descriptor)


def _receive(
    sock: socket.socket, tag: bytes, count: int, deadline: float, over: int | None = None
) -> list[int]:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    if over is not None:
        poll.register(over, select.POLLIN)
    ready = [descriptor for descriptor, _ in poll.poll(_left(deadline))]
    if not ready:
        raise RendezvousFailed("a rank of this node connected but said nothing")
    if over in ready:
        raise EndOfLink("the ranks do not meet any more")
    sock.setblocking(False)
    try:
        if sock.recv(1, socket.MSG_PEEK) != tag:  # it may say why it gives up
            raise EndOfLink("a rank of this node ended while it connected")
        data, descriptors, _, _ = socket.recv_fds(sock, 1, count)
    except EndOfLink:
        raise
    except OSError as error:
        raise EndOfLink(str(error)) from error
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    if not data or len(descriptors) != count:
        for descriptor in descriptors:
            os.close(descriptor)
        raise EndOfLink("a rank of this node ended while it connected")
    return list(descriptors)


def _left(deadline: float) -> float:
    """Milliseconds until a monotonic time."""
    return max(0.0, deadline - time.monotonic()) * 1000
