"""The links of one group at one rank, the operations that use them, and how they end together.

Everything here runs on the thread that drives the engine at that moment, except `__init__`.
"""

from __future__ import annotations

import json
import logging
import select
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from collective import diagnosis
from collective.diagnosis import Heard
from collective.environment import LONGEST_WAIT
from collective.errors import CollectiveError, Mismatch, ProtocolError, Refused
from collective.lanes import InLane
from collective.links.link import EndOfLink, Inlet, Outlet
from collective.links.wire import FrameKind, Header
from collective.messaging import Messaging
from collective.operation import LinkLost, Operation
from collective.tensor_format import parse_json
from collective.transfer import CollectiveOperation
from collective.watch import Bells

if TYPE_CHECKING:
    from collective.engine import Engine

_log = logging.getLogger("unisono.collective")
#: seconds within which the end of a process has reached all its peers, also on a busy machine
_LOSS_IS_SEEN = 0.1


class Communicator:
    """One rank's end of a group.

    Attributes:
        outlets, inlets: the links of collectives, by peer.
        error: what poisoned the group, or None.
        nodes: the name of each rank's node.
        bells: of those who wait for a tensor.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        name: str,
        rank: int,
        size: int,
        epoch: int,
        nodes: Sequence[str],
        outlets: dict[int, Outlet],
        inlets: dict[int, Inlet],
        stall: float,
    ) -> None:
        self.engine = engine
        self.name = name
        self.rank = rank
        self.size = size
        self.epoch = epoch
        self.nodes = tuple(nodes)
        self.outlets = outlets
        self.inlets = inlets
        self.error: BaseException | None = None
        self.closed = False
        self.messaging = Messaging(self)
        #: seconds without progress after which ranks tell each other where they are
        self.stall = stall
        self.issued = 0
        self.completed = 0
        self.queue: deque[Operation] = deque()
        self.left: dict[int, int] = {}
        self.control_ready: set[int] = set(outlets)
        self.moved_at = time.monotonic()
        self._refused: dict[int, CollectiveError] = {}
        #: the last operation that this rank issued or refused
        self._taken = 0
        #: (active operation, peer, its operation, its descriptor): a peer that is further
        self._ahead: tuple[int, int, int, bytes] | None = None
        self._heard = {peer: Heard() for peer in outlets}
        self._asked_at = 0.0
        self.bells = Bells()

    def label(self, rank: int) -> str:
        """A rank with its node's name, for messages."""
        return f"rank {rank} on node {self.nodes[rank]}"

    @property
    def busy(self) -> bool:
        """Whether there is an operation that is not finished."""
        return bool(self.queue) or self.messaging.busy

    @property
    def attended(self) -> bool:
        """Whether somebody must read what peers say."""
        return self.busy or bool(self.bells)

    def _active(self) -> Operation | None:
        return self.queue[0] if self.queue else None

    # -- taking operations --------------------------------------------------------------------

    def take(self, operation: Operation) -> None:
        """Queue a collective under its sequence number, which the caller has given it."""
        if self.error is not None:
            operation.finish(self.error)
            return
        self._taken = operation.sequence
        refusal = self._refused.pop(operation.sequence, None)
        if refusal is not None:
            self.completed = max(self.completed, operation.sequence)
            operation.finish(refusal)
            return
        self.queue.append(operation)
        if len(self.queue) == 1:
            self.moved_at = time.monotonic()

    def _start(self, operation: Operation) -> None:
        operation.start()
        for peer, last in self.left.items():
            if operation.sequence > last:
                self.fail(diagnosis.left_early(self, peer, last, operation))
                return

    # -- driving ------------------------------------------------------------------------------

    def progress(self) -> bool:
        """Move what can be moved; whether anything moved."""
        moved = False
        try:
            if self.control_ready:
                self._read_control()
            while self.queue:
                operation = self.queue[0]
                if operation.finished:
                    self.queue.popleft()
                    continue
                if not operation.started:
                    self._start(operation)
                    continue
                if operation.advance():
                    moved = True
                if not operation.complete:
                    break
                self.completed = operation.sequence
                operation.finish()
                moved = True
                if operation.error is not None:
                    raise operation.error  # in its last step here, where others cannot see it
                self.queue.popleft()
            if self.messaging.busy and self.messaging.advance():
                moved = True
        except LinkLost as lost:
            self._lose(lost.peer, lost.reason)
        except CollectiveError as error:
            self.fail(error)
        except Exception as error:  # noqa: BLE001 — ends the group, on every rank
            _log.exception("operation failed in group %s", self.name)
            self.fail(diagnosis.gave_up(self, error, self._active()))
        except BaseException as error:
            # what was interrupted may be another group's call than that of the thread that drives
            self.interrupt(error)
            raise
        return moved

    def give_up(self, reason: BaseException) -> None:
        """This rank's program ends with an exception: the others are told which."""
        self.fail(diagnosis.ended(self, reason))

    def interrupt(self, error: BaseException) -> None:
        """The thread that drives was interrupted in an operation: nobody can go on."""
        self.fail(diagnosis.gave_up(self, error, self._active()))

    # -- links lost ---------------------------------------------------------------------------

    def _lose(self, peer: int, reason: str) -> None:
        """A link to `peer` ended; decide whether that was in order, a consequence, or a loss."""
        for other in self.outlets:
            # someone may have said already why, though nobody polled yet: a cause beats its
            # consequences
            self.outlets[other].readable = True
            try:
                self._control_of(other)
            except LinkLost:
                continue
            except CollectiveError as error:
                self.fail(error)
            if self.error is not None:
                return
        if peer in self.left:
            active = self._active()
            if active is None:
                gone = self.messaging.left_behind_by(peer)
                if gone is not None:
                    self.fail(gone)
                return
            if active.sequence > self.left[peer]:
                self.fail(diagnosis.left_early(self, peer, self.left[peer], active))
                return
        self.fail(diagnosis.lost(self, peer, reason, self._active()))

    # -- control ------------------------------------------------------------------------------

    def say(self, peer: int, kind: FrameKind, sequence: int, body: dict[str, object]) -> None:
        """Send a control frame to `peer`."""
        try:
            self.inlets[peer].say(
                kind, self.epoch, sequence, json.dumps(body, separators=(",", ":")).encode()
            )
        except EndOfLink as end:
            raise LinkLost(peer, str(end)) from None

    def say_all(self, kind: FrameKind, sequence: int, body: dict[str, object]) -> None:
        """Send a control frame to every peer that still listens."""
        for peer in self.inlets:
            try:
                self.say(peer, kind, sequence, body)
            except LinkLost:
                continue  # its own end of the link is noticed where it is read

    def _read_control(self) -> None:
        ready, self.control_ready = self.control_ready, set()
        for peer in ready:
            self._control_of(peer)

    def _control_of(self, peer: int) -> None:
        while True:
            try:
                frames = self.outlets[peer].control()
                for header, body in frames:
                    self._handle(peer, header, body)
            except EndOfLink as end:
                if peer in self.left:
                    return
                raise LinkLost(peer, str(end)) from None
            except ProtocolError as error:
                raise diagnosis.nonsense(self, peer, error) from None
            if not frames:
                return

    def hear(self, peer: int) -> None:
        """Take what `peer` has said by now; its end is no surprise to who asks."""
        self.outlets[peer].readable = True
        try:
            self._control_of(peer)
        except LinkLost:
            return
        except CollectiveError as error:
            self.fail(error)

    def _handle(self, peer: int, header: Header, body: bytes) -> None:
        if header.epoch != self.epoch:
            raise ProtocolError(f"epoch {header.epoch}, while the group is at {self.epoch}")
        kind = header.kind
        if kind == FrameKind.LEFT:
            self._handle_left(peer, header.sequence)
            return
        content = parse_json(body) if body else {}
        if kind == FrameKind.ABORT:
            self._handle_abort(peer, header.sequence, content)
        elif kind == FrameKind.STATUS:
            self._handle_status(peer, header.sequence, content)
        elif kind in (FrameKind.OFFER, FrameKind.WANT):
            self.messaging.handle(peer, FrameKind(kind), header.sequence, content)
        else:
            raise ProtocolError(f"a control frame of kind {kind}")

    def _handle_left(self, peer: int, last: int) -> None:
        self.left[peer] = last
        self._heard[peer].sequence = max(self._heard[peer].sequence, last)
        active = self._active()
        if active is not None and active.sequence > last:
            self.fail(diagnosis.left_early(self, peer, last, active))
        self.messaging.peer_left(peer)

    def _handle_abort(self, peer: int, sequence: int, content: dict[str, object]) -> None:
        error = diagnosis.from_content(self.nodes, peer, sequence, content)
        if isinstance(error, Refused):
            self._end_refused(sequence, error)
        else:
            self.fail(error, reporter=content.get("reporter", peer))

    def _handle_status(self, peer: int, sequence: int, content: dict[str, object]) -> None:
        self.saw(peer, sequence)
        active = self._active()
        if content.get("ask"):
            body: dict[str, object] = {}
            if active is not None:
                body["descriptor"] = active.descriptor.data.decode()
            self.say(peer, FrameKind.STATUS, active.sequence if active else self.completed, body)
        theirs = content.get("descriptor")
        if active is None or not isinstance(theirs, str):
            return
        if sequence == active.sequence and theirs.encode() != active.descriptor.data:
            raise diagnosis.mismatch(self, active, peer, sequence, theirs.encode())

    def strange_frame(self, operation: CollectiveOperation, lane: InLane, header: Header) -> bool:
        """A frame is not the active operation's: drop what belongs to a refused one.

        A frame of a later operation stays where it is: its sender may have heard that the active
        one was refused before this rank does.  If nobody says so, `tick` ends the waiting.

        Returns:
            Whether the frame was dropped as a whole, so that the next one can be read.

        Raises:
            Mismatch: the peer runs another operation.
        """
        peer, link = lane.peer, lane.link
        heard = self._heard[peer]
        heard.sequence = max(heard.sequence, header.sequence)
        if header.sequence < operation.sequence:
            return link.skip(header)
        descriptor = link.descriptor or b"{}"
        if header.sequence > operation.sequence:
            self._ahead = (operation.sequence, peer, header.sequence, descriptor)
            return False
        raise diagnosis.mismatch(
            self, operation, peer, header.sequence, descriptor, lane.descriptor
        )

    # -- the end ------------------------------------------------------------------------------

    def refuse(self, sequence: int, error: CollectiveError) -> None:
        """This rank refused an operation: it ends on all ranks, the group stays usable."""
        self._taken = sequence
        self._refused.pop(sequence, None)
        self.say_all(FrameKind.ABORT, sequence, diagnosis.to_content(error, self.rank))
        self.completed = max(self.completed, sequence)

    def _end_refused(self, sequence: int, error: CollectiveError) -> None:
        if sequence > self._taken:
            self._refused[sequence] = error
            return
        for operation in self.queue:
            if operation.sequence == sequence:
                operation.release()
                operation.finish(error)
                self.completed = max(self.completed, sequence)
                return

    def fail(self, error: BaseException, reporter: object = None) -> None:
        """Poison the group: end everything with `error`, and tell the other ranks once."""
        if self.error is None and isinstance(error, Mismatch) and reporter is None:
            error = self._behind(error)
        if self.error is not None:
            return
        self.error = error
        operations = list(self.queue)
        self.queue.clear()
        sequence = operations[0].sequence if operations else self.completed
        if isinstance(error, CollectiveError) and error.sequence:
            sequence = error.sequence
        who = self.rank if reporter is None else reporter
        self.say_all(FrameKind.ABORT, sequence, diagnosis.to_content(error, who))
        for operation in operations:
            operation.release()
            operation.finish(error)
        self.messaging.fail(error)
        self.bells.ring()

    def _behind(self, error: Mismatch) -> CollectiveError:
        """What explains that ranks disagree: what a peer has said by now, or one that is gone.

        A loss is not seen by all at the same moment: who has seen it may call something else, and
        those who have not would blame that rank.
        """
        poll = select.poll()
        for peer, outlet in self.outlets.items():
            self.hear(peer)
            if peer not in self.left:
                poll.register(outlet.endpoint.fileno(), select.POLLRDHUP)
        if self.error is None:
            poll.poll(_LOSS_IS_SEEN * 1000)
        for peer, outlet in self.outlets.items():
            if self.error is None and peer not in self.left and outlet.ended():
                self.hear(peer)
                if self.error is None and peer not in self.left:
                    return diagnosis.lost(self, peer, "while ranks disagreed", self._active())
        return error

    # -- waiting ------------------------------------------------------------------------------

    def next_tick(self, now: float) -> float | None:
        """Seconds until `tick` has something to do, or None while nothing is under way."""
        operation = self._active()
        deadline = operation.deadline if operation is not None else None
        other = self.messaging.deadline()
        if other is not None and (deadline is None or other < deadline):
            deadline = other
        if deadline is None:
            return None
        due = min(deadline - now, LONGEST_WAIT)
        if operation is not None:
            due = min(due, max(self.moved_at, self._asked_at) + self.stall - now)
        return max(0.0, due)

    def tick(self, now: float) -> None:
        """Look after deadlines and stalls."""
        try:
            self.messaging.expire(now)
            operation = self._active()
            if operation is None:
                return
            if now >= operation.deadline:
                if operation.failure is not None:
                    raise operation.failure
                raise diagnosis.overdue(self, operation, self._heard, self._asked_at)
            if now - max(self.moved_at, self._asked_at) >= self.stall:
                if self._ahead is not None and self._ahead[0] == operation.sequence:
                    raise diagnosis.mismatch(self, operation, *self._ahead[1:])
                self._asked_at = now
                body: dict[str, object] = {
                    "ask": True,
                    "descriptor": operation.descriptor.data.decode(),
                }
                self.say_all(FrameKind.STATUS, operation.sequence, body)
        except LinkLost as lost:
            self._lose(lost.peer, lost.reason)
        except CollectiveError as error:
            self.fail(error)

    def saw(self, peer: int, sequence: int) -> None:
        """Something of operation `sequence` came from `peer`."""
        heard = self._heard[peer]
        heard.sequence = max(heard.sequence, sequence)
        heard.at = time.monotonic()
