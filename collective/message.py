"""One send or one receive: its bytes, segment by segment."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from collective.descriptor import Descriptor
from collective.links.link import Inlet, Outlet, frame_head
from collective.links.wire import FrameKind
from collective.operation import Operation
from collective.program import SEGMENT
from collective.reduction import Array

if TYPE_CHECKING:
    from collective.communicator import Communicator


class Message(Operation):
    """One send or one receive."""

    def __init__(
        self,
        communicator: Communicator,
        descriptor: Descriptor,
        timeout: float,
        array: Array,
        kind: str,
        peer: int | None,
        tag: int,
        dtype: str,
    ) -> None:
        super().__init__(communicator, descriptor, timeout)
        self.kind = kind
        self.peer = peer
        self.tag = tag
        self.dtype = dtype
        self.array = array
        self.view = array.data.cast("B") if array.size else memoryview(b"")
        self.place = 0
        self.flying = False
        self.first = True
        self.identifier = 0
        #: of a receive: which of its stream it is
        self.number = 0
        self._complete = False

    @property
    def complete(self) -> bool:
        return self._complete

    def missing(self) -> list[int]:
        return [] if self.peer is None else [self.peer]

    def phase(self) -> str:
        peer = "any rank" if self.peer is None else self.communicator.label(self.peer)
        return f"{'to' if self.kind == 'send' else 'from'} {peer}, tag {self.tag}"

    def content(self) -> dict[str, Any]:
        """What the other side compares."""
        return {"tag": self.tag, "count": int(self.array.size), "dtype": self.dtype}

    @property
    def next_length(self) -> int:
        """Bytes of the next segment."""
        return min(SEGMENT, len(self.view) - self.place)

    def _segment(self) -> memoryview:
        return self.view[self.place : self.place + SEGMENT]

    def send(self, outlet: Outlet) -> bool:
        """Send on; whether anything moved."""
        moved = False
        while True:
            if not self.flying:
                if not outlet.idle and not outlet.flush():
                    return moved
                payload = self._segment()
                head = frame_head(
                    FrameKind.MESSAGE,
                    self.communicator.epoch,
                    self.identifier,
                    self.place,
                    len(payload),
                    self.descriptor.checksum,
                )
                self.flying = True
                self.sent += len(head) + len(payload)
                gone = outlet.begin(head, payload)
            else:
                gone = outlet.flush()
            if not gone:
                return moved
            moved = True
            self.flying = False
            self.place += len(self._segment())
            if self.place >= len(self.view):
                self._complete = True
                return True

    def receive(self, inlet: Inlet) -> bool:
        """Read on; whether a whole segment arrived.  The frame's header was checked."""
        segment = self._segment()
        if not inlet.read_into(segment):
            return False
        if self.first:
            self.first = False
            self.heard = time.monotonic()
        self.place += len(segment)
        if self.place >= len(self.view):
            self._complete = True
        return True
