"""Where a collective in progress stands on each of its links."""

from __future__ import annotations

from collections import deque

from collective.descriptor import Descriptor
from collective.links.link import Inlet, Outlet
from collective.program import Part
from collective.reduction import Array


class OutLane:
    """What this rank sends to one peer, in order."""

    __slots__ = (
        "descriptor", "flying", "lent", "link", "number", "offset", "parts", "peer", "place",
        "segment",
    )  # fmt: skip

    def __init__(self, peer: int, link: Outlet, parts: list[Part], descriptor: Descriptor) -> None:
        self.peer = peer
        self.descriptor = descriptor
        self.link = link
        self.parts = parts
        self.place = 0
        self.segment = 0
        self.offset = 0
        self.flying = False
        #: the current frame's number if it is lent, else -1
        self.number = -1
        #: (number, part) of what the peer has not read yet where it lies, and of what came after it
        self.lent: deque[tuple[int, Part]] = deque()

    @property
    def over(self) -> bool:
        """Whether all has been sent, and what was lent is back."""
        return self.place == len(self.parts) and not self.lent


class InLane:
    """What this rank receives from one peer, in order."""

    __slots__ = ("descriptor", "direct", "heard", "link", "offset", "parts", "peer", "place",
                 "read", "room", "segment", "view")  # fmt: skip

    def __init__(self, peer: int, link: Inlet, parts: list[Part], descriptor: Descriptor) -> None:
        self.peer = peer
        self.descriptor = descriptor
        self.link = link
        self.parts = parts
        self.place = 0
        self.segment = 0
        self.offset = 0
        self.heard = False
        #: where the current segment's bytes go; None before its header was read
        self.view: memoryview | None = None
        self.room: Array | None = None
        self.direct = False
        self.read = False


class HomeLane:
    """What stays on this rank: a part that leaves and the one that lands, in order."""

    __slots__ = ("place", "receives", "segment", "sends")

    def __init__(self, sends: list[Part], receives: list[Part]) -> None:
        self.sends = sends
        self.receives = receives
        self.place = 0
        self.segment = 0
