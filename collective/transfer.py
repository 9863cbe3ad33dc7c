"""A collective in progress: a compiled program over this call's memory and the group's links."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from collective import diagnosis
from collective.descriptor import Descriptor, on_link
from collective.errors import ProtocolError
from collective.lanes import HomeLane, InLane, OutLane
from collective.links import arena
from collective.links.link import EndOfLink, frame_head
from collective.links.wire import FrameKind, Header
from collective.operation import LinkLost, Operation
from collective.program import Part, Program
from collective.reduction import Array, Fold, Narrow

if TYPE_CHECKING:
    from collective.communicator import Communicator

#: bytes of a payload from which on it is lent rather than copied: who lends waits for the reader
LENT_FROM = 64 << 10


class CollectiveOperation(Operation):
    """Runs a program as dataflow: a segment leaves when what it reads is final, and lands when
    nothing still reads its place."""

    def __init__(
        self,
        communicator: Communicator,
        descriptor: Descriptor,
        timeout: float,
        program: Program,
        buffers: Sequence[Array],
        fold: Fold | None,
        narrow: Narrow | None = None,
    ) -> None:
        super().__init__(communicator, descriptor, timeout)
        self._program = program
        if program.scratch is not None:
            kind = buffers[0].dtype if narrow is None else np.float32
            buffers = [*buffers, np.empty(program.scratch, dtype=kind)]
        self._arrays = buffers
        self._views = [array.data.cast("B") if array.size else memoryview(b"") for array in buffers]
        #: bytes of an element on the wire
        self._itemsizes = [2 if narrow is not None else array.itemsize for array in buffers]
        self._narrow = narrow
        self._memory = arena.own()
        #: by buffer: where it lies in the memory that this node's ranks share, if it does
        self._shared: list[int | None] = [None] * len(buffers)
        if self._memory is not None:
            self._shared = [self._memory.find(array) for array in buffers]
        self._fold = fold
        self._left = [0] * len(program.sends)
        self._landed = [0] * len(program.receives)
        sends, receives = program.sends, program.receives
        self._out = [
            OutLane(peer, communicator.outlets[peer], parts, self._on_link(parts))
            for peer, order in program.outgoing.items()
            if peer != communicator.rank and (parts := [sends[index] for index in order])
        ]
        self._in = [
            InLane(peer, communicator.inlets[peer], parts, self._on_link(parts))
            for peer, order in program.incoming.items()
            if peer != communicator.rank and (parts := [receives[index] for index in order])
        ]
        self._bundled = [lane for lane in self._out if lane.link.others]
        self._open = len(self._out) + len(self._in)
        self._unheard = len(self._in)
        self._home: HomeLane | None = None
        if communicator.rank in program.outgoing:
            self._open += 1
            self._home = HomeLane(
                [sends[index] for index in program.outgoing[communicator.rank]],
                [receives[index] for index in program.incoming[communicator.rank]],
            )

    def _on_link(self, parts: list[Part]) -> Descriptor:
        """What this rank and the one that these parts come from or go to must agree on."""
        if not self.descriptor.open:
            return self.descriptor
        elements = sum(stop - start for part in parts for start, stop in part.segments)
        return on_link(self.descriptor, elements)

    @property
    def complete(self) -> bool:
        return not self._open

    def missing(self) -> list[int]:
        waiting = [lane.peer for lane in self._in if lane.place < len(lane.parts)]
        return waiting or [lane.peer for lane in self._out if not lane.over]

    def phase(self) -> str:
        lanes: list[InLane | OutLane] = [*self._in, *self._out]
        for lane in lanes:
            if lane.place < len(lane.parts):
                part = lane.parts[lane.place]
                return f"{part.phase or 'data'}, step {part.step}"
        for out in self._out:
            if out.lent:
                return f"{out.lent[0][1].phase}, step {out.lent[0][1].step}"
        return "done"

    def advance(self) -> bool:
        moved = False
        # what came in first: it makes sends ready, and empties the peers' sockets
        for lane in self._in:
            if lane.place < len(lane.parts):
                try:
                    moved |= self._receive(lane)
                except EndOfLink as end:
                    raise LinkLost(lane.peer, str(end)) from None
                except ProtocolError as error:
                    raise diagnosis.nonsense(self.communicator, lane.peer, error) from None
        if self._home is not None:
            moved |= self._stay(self._home)
        for out in self._out:
            if out.lent:
                moved |= self._take_returned(out)
            if out.place < len(out.parts):
                try:
                    moved |= self._send(out)
                except EndOfLink as end:
                    raise LinkLost(out.peer, str(end)) from None
        if self._bundled:
            moved |= self._send_on()
        return moved

    # -- sending ----------------------------------------------------------------------------

    def _may_leave(self, part: Part, segment: int) -> bool:
        for index in part.after:
            if self._landed[index] <= segment:
                return False
        if part.after_all:
            receives, landed = self._program.receives, self._landed
            return all(landed[index] == len(receives[index].segments) for index in part.after_all)
        return True

    def _send(self, lane: OutLane) -> bool:
        link = lane.link
        moved = False
        while True:
            part = lane.parts[lane.place]
            if not lane.flying:
                if not self._may_leave(part, lane.segment):
                    return moved
                if not link.idle and not link.flush():
                    return moved  # the rest of a frame of an operation that was refused
                start, stop = part.segments[lane.segment]
                size = 0
                payload = place = None
                if stop > start:
                    width = self._itemsizes[part.buffer]
                    size = (stop - start) * width
                    if self._narrow is not None and part.after:
                        self._narrow.finish(start, stop)
                    place = self._lendable(lane, part, start * width, size)
                    if place is None:
                        payload = self._views[part.buffer][start * width : stop * width]
                first = lane.place == 0 and lane.segment == 0
                head = frame_head(
                    FrameKind.DATA,
                    self.communicator.epoch,
                    self.sequence,
                    lane.offset,
                    size,
                    lane.descriptor.checksum,
                    lane.descriptor.data if first else b"",
                )
                lane.offset += size
                self.sent += size + len(head)
                lane.flying = True
                if place is not None:
                    lane.number = link.lend(head, place, size)
                    gone = link.flush()
                else:
                    lane.number = -1
                    gone = link.begin(head, payload)
            else:
                gone = link.flush()
            if not gone:
                return moved
            moved = True
            lane.flying = False
            if lane.lent or lane.number >= 0:  # a part's segments are counted in order
                lane.lent.append((lane.number, part))
            else:
                self._left[part.index] += 1
            lane.segment += 1
            if lane.segment == len(part.segments):
                lane.segment = 0
                lane.place += 1
                if lane.place == len(lane.parts):
                    if not link.others and not lane.lent:  # else when all of it is gone
                        self._open -= 1
                    return True

    def _lendable(self, lane: OutLane, part: Part, start: int, size: int) -> int | None:
        """Where a segment lies in shared memory, if the peer can read it and that is worth it."""
        if size < LENT_FROM or self._memory is None:
            return None
        place = self._shared[part.buffer]
        if place is None or not lane.link.lends(self._memory):
            return None
        return place + start

    def _take_returned(self, lane: OutLane) -> bool:
        """Note what the peer has read; what was lent before it is back as well."""
        returned = lane.link.returned
        moved = False
        while lane.lent and lane.lent[0][0] < returned:
            _, part = lane.lent.popleft()
            self._left[part.index] += 1
            moved = True
        if moved and lane.over:
            self._open -= 1
        return moved

    def _send_on(self) -> bool:
        """Send what links of several connections hold, also while their next part must wait."""
        moved = False
        for lane in list(self._bundled):
            try:
                if lane.link.flush() and lane.place == len(lane.parts):
                    self._bundled.remove(lane)
                    self._open -= 1
                    moved = True
            except EndOfLink as end:
                raise LinkLost(lane.peer, str(end)) from None
        return moved

    # -- staying ----------------------------------------------------------------------------

    def _stay(self, lane: HomeLane) -> bool:
        """Carry out local moves whose source is final and whose place nothing reads any more."""
        moved = False
        while lane.place < len(lane.sends):
            source, target = lane.sends[lane.place], lane.receives[lane.place]
            segment = lane.segment
            if not (self._may_leave(source, segment) and self._may_land(target, segment)):
                return moved
            start, stop = source.segments[segment]
            values = self._arrays[source.buffer][start:stop]
            place = self._place(target, *target.segments[segment])
            if target.fold:
                assert self._fold is not None
                self._fold(place, values, place)
            else:
                place[:] = values
            self._left[source.index] += 1
            self._landed[target.index] += 1
            moved = True
            lane.segment += 1
            if lane.segment == len(source.segments):
                lane.segment = 0
                lane.place += 1
        self._home = None
        self._open -= 1
        return True

    # -- receiving --------------------------------------------------------------------------

    def _may_land(self, part: Part, segment: int) -> bool:
        for index in part.after:
            if self._landed[index] <= segment:
                return False
        left, sends = self._left, part.after_sends
        return not sends or all(left[index] > segment for index in sends)

    def _receive(self, lane: InLane) -> bool:
        link = lane.link
        moved = False
        while True:
            part = lane.parts[lane.place]
            start, stop = part.segments[lane.segment]
            if lane.view is None:
                header = link.header()
                if header is None:
                    return moved
                if header.sequence != self.sequence or header.checksum != lane.descriptor.checksum:
                    if self.communicator.strange_frame(self, lane, header):
                        moved = True
                        continue
                    return moved
                moved = True
                self._check(lane, header, start, stop)
                if stop == start:
                    lane.view = memoryview(b"")
                    lane.direct = True
                else:
                    width = self._itemsizes[part.buffer]
                    may_land = self._may_land(part, lane.segment)
                    lane.direct = may_land and not part.fold and not self._widens(part)
                    if may_land and part.fold and self._fold_in_place(lane, part, start, stop):
                        lane.direct = True
                        lane.view = memoryview(b"")
                        lane.read = True
                    elif lane.direct:
                        lane.view = self._views[part.buffer][start * width : stop * width]
                    else:
                        lane.room = self.communicator.engine.take_room()
                        lane.view = lane.room.data[: (stop - start) * width]
            if not lane.read:
                if not link.read_into(lane.view):
                    return moved
                lane.read = moved = True
            if not lane.direct:
                if not self._may_land(part, lane.segment):
                    return moved
                assert lane.room is not None
                target = self._place(part, start, stop)
                source = self._values(
                    part, lane.room[: (stop - start) * self._itemsizes[part.buffer]]
                )
                if part.fold:
                    assert self._fold is not None
                    self._fold(target, source, target)
                else:
                    target[:] = source
                self.communicator.engine.give_room(lane.room)
                lane.room = None
            lane.view = None
            lane.read = False
            lane.offset += (stop - start) * self._itemsizes[part.buffer] if stop > start else 0
            self._landed[part.index] += 1
            moved = True
            lane.segment += 1
            if lane.segment == len(part.segments):
                lane.segment = 0
                lane.place += 1
                if lane.place == len(lane.parts):
                    self._open -= 1
                    return True

    def _fold_in_place(self, lane: InLane, part: Part, start: int, stop: int) -> bool:
        """Fold from where the payload lies, if the link has it in memory."""
        payload = lane.link.whole()
        if payload is None:
            return False
        assert self._fold is not None
        target = self._place(part, start, stop)
        self._fold(target, self._values(part, np.frombuffer(payload, dtype=np.uint8)), target)
        return lane.link.drop()

    def _widens(self, part: Part) -> bool:
        """Whether sixteen-bit floats are summed here, or scratch for sums is filled."""
        return self._narrow is not None and (part.fold or part.buffer > 0)

    def _place(self, part: Part, start: int, stop: int) -> Array:
        """Where the elements [start, stop) of a receive land, or are folded into."""
        if self._narrow is not None and part.fold and not part.buffer:
            return self._narrow.sums(start, stop)
        return self._arrays[part.buffer][start:stop]

    def _values(self, part: Part, data: Array) -> Array:
        """Received bytes as what lands."""
        if self._narrow is not None and self._widens(part):
            return self._narrow.unpack(data)
        return data.view(self._arrays[part.buffer].dtype)

    def _check(self, lane: InLane, header: Header, start: int, stop: int) -> None:
        if not lane.heard:
            lane.heard = True
            self.communicator.saw(lane.peer, self.sequence)
            self._unheard -= 1
            if not self._unheard:
                self.heard = time.monotonic()
        part = lane.parts[lane.place]
        size = (stop - start) * self._itemsizes[part.buffer] if stop > start else 0
        if header.kind != FrameKind.DATA or header.length != size or header.offset != lane.offset:
            raise ProtocolError(
                f"rank {lane.peer} sent {header.length} bytes at {header.offset}, "
                f"expected were {size} at {lane.offset}",
                rank=lane.peer,
            )

    def release(self) -> None:
        """For an operation that ends early: give scratch memory back, take back what was lent."""
        for out in self._out:
            if out.lent or out.flying:
                out.link.take_back()
        for lane in self._in:
            if lane.room is not None:
                self.communicator.engine.give_room(lane.room)
                lane.room = None
