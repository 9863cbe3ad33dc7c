"""Point to point: sends and receives that find each other, each (peer, tag) in its own order.

A receive tells its sender that it is there (WANT), a send without a receive tells so (OFFER);
only then data flows, on links of their own, so that no message stands in another's way.  The
n-th send to a rank under a tag meets the n-th receive that was assigned to that sender; receives
from any rank and from a given one are assigned in the order in which they were called.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING, Any

from collective import diagnosis
from collective.errors import (
    CollectiveError,
    DeadlineExceeded,
    Mismatch,
    PeerLost,
    ProtocolError,
    Refused,
)
from collective.links.link import EndOfLink, Inlet, Outlet
from collective.links.wire import FrameKind
from collective.message import Message
from collective.operation import LinkLost

if TYPE_CHECKING:
    from collective.communicator import Communicator

Stream = tuple[int, int]  # (peer, tag)


class Messaging:
    """All sends and receives of a group at one rank."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self.outlets: dict[int, Outlet] = {}
        self.inlets: dict[int, Inlet] = {}
        self._identifiers = itertools.count(1)
        # at the sender
        self._sends: dict[Stream, deque[Message]] = {}
        self._wants: dict[Stream, deque[dict[str, Any]]] = {}
        self._offered: dict[Stream, int] = {}
        self._leaving: dict[int, deque[Message]] = {}
        #: numbers of sends that this rank refused, whose receives may ask for them yet
        self._withheld: dict[Stream, set[int]] = {}
        # at the receiver
        self._receives: dict[int, Message] = {}
        #: by tag: receives from any rank, and what was called behind the first of them
        self._any: dict[int, deque[Message]] = {}
        self._offers: dict[int, deque[tuple[int, int]]] = {}
        self._assigned: dict[Stream, int] = {}
        #: by number: sends that their rank refused, and for which no receive has been called yet
        self._refused: dict[Stream, dict[int, CollectiveError]] = {}

    @property
    def busy(self) -> bool:
        """Whether a send or receive is not finished."""
        return bool(
            self._receives
            or self._leaving
            or (self._sends and any(self._sends.values()))
            or (self._any and any(self._any.values()))
        )

    # -- taking -------------------------------------------------------------------------------

    def take(self, message: Message) -> None:
        """A call of this rank."""
        if self._communicator.error is not None:
            message.finish(self._communicator.error)
            return
        message.start()
        if message.peer is not None and message.peer in self._communicator.left:
            raise self._peer_gone(message)
        if message.kind == "send":
            self._take_send(message)
        elif message.peer is not None:
            behind = self._any.get(message.tag)
            if behind:  # its peer's next send is for who waits for anyone
                behind.append(message)
            else:
                self._assign(message, message.peer)
        else:
            offers = self._offers.get(message.tag)
            if offers:
                peer, _ = offers.popleft()
                self._assign(message, peer)
                return
            if len(self._communicator.left) == self._communicator.size - 1:
                raise self._all_gone(message)
            self._any.setdefault(message.tag, deque()).append(message)

    def _take_send(self, message: Message) -> None:
        assert message.peer is not None
        stream = (message.peer, message.tag)
        number = self._offered.get(stream, 0)
        self._offered[stream] = number + 1
        wants = self._wants.get(stream)
        if wants:
            self._match(message, wants.popleft())
            return
        self._sends.setdefault(stream, deque()).append(message)
        self._communicator.say(
            message.peer, FrameKind.OFFER, 0, {"tag": message.tag, "number": number}
        )

    def _assign(self, message: Message, peer: int) -> None:
        message.peer = peer
        stream = (peer, message.tag)
        message.number = self._next_receive(stream)
        refusal = self._refused.get(stream, {}).pop(message.number, None)
        if refusal is not None:
            message.finish(refusal)
            return
        message.identifier = next(self._identifiers)
        self._receives[message.identifier] = message
        content = {**message.content(), "number": message.number}
        self._communicator.say(peer, FrameKind.WANT, message.identifier, content)

    def _next_receive(self, stream: Stream) -> int:
        """The number of the next receive of a stream, whose send is not on offer any more."""
        peer, tag = stream
        number = self._assigned.get(stream, 0)
        self._assigned[stream] = number + 1
        offers = self._offers.get(tag)
        if offers and (peer, number) in offers:
            offers.remove((peer, number))
        return number

    def refuse(self, kind: str, peer: int, tag: int, error: Refused) -> None:
        """This rank refused a call, which takes its place in its stream all the same."""
        stream = (peer, tag)
        if self._communicator.error is not None or peer in self._communicator.left:
            return
        if kind == "send":
            frame = FrameKind.OFFER
            number = self._offered.get(stream, 0)
            self._offered[stream] = number + 1
            # those who ask ask in order
            wants = self._wants.get(stream)
            if wants:
                wants.popleft()
            else:
                self._withheld.setdefault(stream, set()).add(number)
        else:
            frame = FrameKind.WANT
            number = self._next_receive(stream)
            if self._refused.get(stream, {}).pop(number, None) is not None:
                return  # so did the other side
        told = diagnosis.to_content(error, self._communicator.rank)
        try:
            self._communicator.say(peer, frame, 0, {"tag": tag, "number": number, "refused": told})
        except LinkLost:
            return  # its own end of the link is noticed where it is read

    # -- what peers say -----------------------------------------------------------------------

    def handle(self, peer: int, kind: FrameKind, sequence: int, content: dict[str, Any]) -> None:
        """An OFFER or WANT of `peer`."""
        try:
            tag, number = int(content["tag"]), int(content["number"])
        except (KeyError, TypeError, ValueError) as wrong:
            raise ProtocolError(f"{kind.name} without a number: {wrong}") from None
        refused = content.get("refused")
        if kind is FrameKind.WANT:
            withheld = self._withheld.get((peer, tag))
            if withheld and number in withheld:
                withheld.discard(number)
                return
            want = {**content, "identifier": sequence}
            sends = self._sends.get((peer, tag))
            if sends:
                self._match(sends.popleft(), want)
            else:
                self._wants.setdefault((peer, tag), deque()).append(want)
            return
        if isinstance(refused, dict):
            error = diagnosis.from_content(self._communicator.nodes, peer, 0, refused)
            self._end_receive(peer, tag, number, error)
        if number < self._assigned.get((peer, tag), 0):
            return  # a receive from that very rank is there already
        waiting = self._any.get(tag)
        if waiting:
            first = next(message for message in waiting if message.peer in (None, peer))
            waiting.remove(first)
            self._assign(first, peer)
            while waiting and (named := waiting[0].peer) is not None:
                self._assign(waiting.popleft(), named)
        else:
            self._offers.setdefault(tag, deque()).append((peer, number))

    def _end_receive(self, peer: int, tag: int, number: int, error: CollectiveError) -> None:
        """The send that a receive waits for, or will, was refused."""
        if number >= self._assigned.get((peer, tag), 0):
            self._refused.setdefault((peer, tag), {})[number] = error
            return
        for message in list(self._receives.values()):
            if (message.peer, message.tag, message.number) == (peer, tag, number):
                del self._receives[message.identifier]
                message.finish(error)

    def _match(self, message: Message, want: dict[str, Any]) -> None:
        assert message.peer is not None
        if isinstance(want.get("refused"), dict):
            message.finish(
                diagnosis.from_content(self._communicator.nodes, message.peer, 0, want["refused"])
            )
            return
        own = message.content()
        if want.get("count") != own["count"] or want.get("dtype") != own["dtype"]:
            communicator = self._communicator
            self._leaving.setdefault(message.peer, deque()).append(message)
            raise Mismatch(
                f"{communicator.label(communicator.rank)} sends {own['count']} × {own['dtype']}, "
                f"but {communicator.label(message.peer)} receives {want.get('count')} × "
                f"{want.get('dtype')} (tag {message.tag}); {diagnosis.POISONED}",
                rank=message.peer,
                node=communicator.nodes[message.peer],
                operation="send",
            )
        message.identifier = want["identifier"]
        self._leaving.setdefault(message.peer, deque()).append(message)

    # -- driving ------------------------------------------------------------------------------

    def advance(self) -> bool:
        """Move what can be moved; whether anything moved."""
        moved = False
        for peer in list(self._leaving):
            outlet = self.outlets.get(peer)
            if outlet is not None:
                try:
                    moved |= self._send_to(peer, outlet)
                except EndOfLink as end:
                    raise LinkLost(peer, str(end)) from None
        if self._receives:
            for peer, inlet in self.inlets.items():
                try:
                    moved |= self._receive_from(peer, inlet)
                except EndOfLink as end:
                    if any(message.peer == peer for message in self._receives.values()):
                        raise LinkLost(peer, str(end)) from None
                except ProtocolError as error:
                    raise diagnosis.nonsense(self._communicator, peer, error) from None
        return moved

    def _send_to(self, peer: int, outlet: Outlet) -> bool:
        moved = False
        messages = self._leaving[peer]
        while messages:
            moved |= messages[0].send(outlet)
            if not messages[0].complete:
                return moved
            messages.popleft().finish()
        del self._leaving[peer]
        return moved

    def _receive_from(self, peer: int, inlet: Inlet) -> bool:
        moved = False
        while self._receives:
            header = inlet.header()
            if header is None:
                return moved
            message = self._receives.get(header.sequence)
            if (
                message is None
                or message.peer != peer
                or header.offset != message.place
                or header.length != message.next_length
                or header.kind != FrameKind.MESSAGE
            ):
                raise ProtocolError(
                    f"{self._communicator.label(peer)} sent {header.length} bytes at "
                    f"{header.offset} of message {header.sequence}, which nobody waits for",
                    rank=peer,
                )
            if not message.receive(inlet):
                return moved
            moved = True
            if message.complete:
                del self._receives[header.sequence]
                message.finish()
                if message.error is not None:
                    raise message.error
        return moved

    # -- the end ------------------------------------------------------------------------------

    def _pending(self) -> list[Message]:
        pending = list(self._receives.values())
        for queues in (self._sends.values(), self._any.values(), self._leaving.values()):
            for messages in queues:
                pending.extend(messages)
        return pending

    def deadline(self) -> float | None:
        """The earliest deadline of a send or receive that is not finished."""
        return min((message.deadline for message in self._pending()), default=None)

    def expire(self, now: float) -> None:
        """Raise for the first send or receive that is overdue."""
        for message in self._pending():
            if now >= message.deadline:
                peer = message.peer
                raise DeadlineExceeded(
                    f"{message.kind} ({message.phase()}) did not finish within "
                    f"{message.timeout:g} s: the other side has not called its "
                    f"{'recv' if message.kind == 'send' else 'send'}, or does not answer",
                    rank=peer,
                    node=self._communicator.nodes[peer] if peer is not None else None,
                    operation=message.kind,
                )

    def _peer_gone(self, message: Message) -> PeerLost:
        assert message.peer is not None
        return PeerLost(
            f"{self._communicator.label(message.peer)} left the group in order, but "
            f"{message.kind} ({message.phase()}) needs it",
            rank=message.peer,
            node=self._communicator.nodes[message.peer],
            operation=message.kind,
        )

    def peer_left(self, peer: int) -> None:
        """`peer` left in order: nothing that is not matched yet will be."""
        for (other, _), messages in self._sends.items():
            if other == peer and messages:
                raise self._peer_gone(messages[0])
        # what a receive waits for may still be in the socket; its end is seen there
        if len(self._communicator.left) == self._communicator.size - 1:
            for waiting in self._any.values():
                if waiting:
                    raise self._all_gone(waiting[0])

    def _all_gone(self, message: Message) -> PeerLost:
        """The error of a receive from any rank when none is left."""
        last = max(self._communicator.left)
        return PeerLost(
            f"all other ranks of group {self._communicator.name} left in order, but recv "
            f"({message.phase()}) needs one of them",
            rank=last,
            node=self._communicator.nodes[last],
            operation="recv",
        )

    def left_behind_by(self, peer: int) -> PeerLost | None:
        """The error of a message that `peer`, which left in order and closed, cannot serve."""
        for message in self._pending():
            if message.peer == peer:
                return self._peer_gone(message)
        return None

    def fail(self, error: BaseException) -> None:
        """End everything with `error`."""
        pending = self._pending()
        self._receives.clear()
        self._leaving.clear()
        self._sends.clear()
        self._any.clear()
        for message in pending:
            message.finish(error)
