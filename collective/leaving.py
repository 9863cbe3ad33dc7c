"""How a rank leaves a group in order."""

from __future__ import annotations

import select
import time
from collections.abc import Sequence

from collective.communicator import Communicator
from collective.environment import LONGEST_WAIT
from collective.links.link import EndOfLink, Inlet, Outlet
from collective.links.wire import FrameKind


def part(communicator: Communicator, links: Sequence[Outlet | Inlet], linger: float) -> None:
    """Leave in order: say so, end every link, and read on until the peers have ended theirs.

    A socket that is closed with unread input resets its connection, and the peer would lose what
    it has not read yet; hence the reading, for at most `linger` seconds.
    """
    for inlet in communicator.inlets.values():
        try:
            inlet.say(FrameKind.LEFT, communicator.epoch, communicator.completed)
        except EndOfLink:
            continue  # that peer is gone already
    for link in links:
        link.end()
    room = memoryview(bytearray(64 << 10))
    open_links = {link.endpoint.fileno(): link for link in links}
    deadline = time.monotonic() + linger
    with select.epoll() as poll:
        for descriptor in open_links:
            poll.register(descriptor, select.EPOLLIN | select.EPOLLET)
        while open_links:
            for descriptor, link in list(open_links.items()):
                try:
                    while link.endpoint.recv_into(room):
                        pass
                except BlockingIOError:
                    continue
                except OSError:
                    pass  # reset: the peer is gone, nothing of ours can be lost any more
                poll.unregister(descriptor)
                del open_links[descriptor]
            left = deadline - time.monotonic()
            if not open_links or left <= 0:
                break
            poll.poll(min(left, LONGEST_WAIT))
    for link in links:
        link.close()
