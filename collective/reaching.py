"""How a rank comes to a connection with each of its peers, whichever of the two can dial."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from collective.environment import seconds
from collective.errors import PeerLost, ProtocolError
from collective.lines import Call, Lines
from collective.links import shared_handshake
from collective.links.dialling import Unreachable, dial
from collective.links.doorman import Connection, Doorman
from collective.links.endpoint import SocketEndpoint
from collective.links.handshake import CHANNELS, valid_name
from collective.links.link import Inlet
from collective.links.listener import Admission
from collective.messages import LinkRequest

_log = logging.getLogger("unisono.collective")
#: seconds after which a machine that answers nothing is given up by the links that wait for its
#: data; a process that is stopped or busy does not count, since its machine's kernel answers
SILENCE = seconds("UNISONO_PEER_SILENCE", 20)
#: seconds within which a rank that asked to be dialled must answer
_ANSWER = 10.0
#: seconds within which dialling ends that is not needed any more, but for what the kernel does
_STUCK = 1.0
#: by channel: the operation that waits for a connection
_OPERATIONS = {"p2p": "recv", "tensor": "download"}


@dataclass(frozen=True)
class Peer:
    """A rank of the world: its node's name and where it, or its agent, listens.

    Ranks of the same `place`, unless that is empty, exchange through shared memory.
    """

    node: str
    addresses: tuple[tuple[str, int], ...]
    place: str = ""


class _Stopped(Exception):
    """Another peer could not be reached."""


class Reach:
    """Makes the connections on which the peers of one rank send it data."""

    def __init__(
        self, rank: int, peers: Sequence[Peer], admission: Admission, doorman: Doorman, name: str
    ) -> None:
        """`name` is that of the group of all ranks."""
        self.rank = rank
        self.peers = tuple(peers)
        self.neighbours = _neighbours(rank, self.peers)
        self._admission = admission
        self._doorman = doorman
        self._name = name
        #: by rank: the address at which it was reached before
        self._ways: dict[int, tuple[str, int]] = {}
        #: by rank that cannot be dialled, and dials this one instead: what each address said
        self.unreachable: dict[int, str] = {}
        self.lines = Lines(admission.epoch, self._answer)
        self.lines.on_end = doorman.wake
        doorman.forward(name, "line", self.lines.take, sends=True)

    def near(self, rank: int) -> str:
        """The Unix address at which a rank of this node takes connections."""
        own = self._admission
        world = f"{own.job} {own.attempt} {self._name}"
        return shared_handshake.address(own.secret, world, own.epoch, rank)

    def label(self, rank: int) -> str:
        """A rank of the world with its node, for messages."""
        return f"rank {rank} on node {self.peers[rank].node}"

    def _request(
        self, group: str, dialler: int, target: int, channel: str, *, sends: bool = False
    ) -> LinkRequest:
        return LinkRequest(
            job=self._admission.job,
            attempt=self._admission.attempt,
            group=group,
            epoch=self._admission.epoch,
            dialler=dialler,
            target=target,
            channel=channel,
            sends=sends,
            addresses=self._admission.addresses if group == self._name else "",
        )

    def one(
        self,
        name: str,
        ranks: Sequence[int],
        peer: int,
        channel: str,
        deadline: float,
        label: str,
        check: Callable[[], None] = lambda: None,
    ) -> Connection:
        """A new connection on which rank `peer` of a group sends this rank data.

        Args:
            ranks: of the group, as ranks of the world.
            deadline: monotonic time at which to give up.
            label: who the peer is, for messages.
            check: called from time to time; may raise to end the tries.

        Raises:
            RendezvousFailed: there is no way to the peer, and none from it, in time.
            PeerLost: it ended after it was asked to dial.
        """
        target, me = ranks[peer], list(ranks).index(self.rank)
        request = self._request(name, me, peer, channel)
        secret = self._admission.secret
        if target in self.neighbours:
            near = [(self.near(target), 0)]
            return Connection(dial(near, request, secret, deadline, label, check), dialled=True)
        if not self.lines.has(target):
            addresses = self._addresses(target)

            def is_there() -> bool:
                return self._doorman.waiting(name, peer) is not None

            try:
                sock = dial(addresses, request, secret, deadline, label, check, is_there)
                self._ways[target] = sock.getpeername()[:2]
                return Connection(sock, dialled=True)
            except Unreachable as error:
                self._have_line(name, target, peer, deadline, label, check)
                self._say(target, str(error))
        self.lines.call(target, Call(name, channel, me, peer))
        # while the group of all is made, it is known who was lost before a peer gave its line up
        watched = name == self._name and channel not in _OPERATIONS

        def look() -> None:
            check()
            # of a rank that ends, this may be the first to go
            if not watched and not self.lines.has(target):
                raise PeerLost(
                    f"lost {label}: the connection on which it was asked to dial ended",
                    rank=peer,
                    node=self.peers[target].node,
                    operation=_OPERATIONS.get(channel),
                )

        claimed = self._doorman.claim(
            name, [peer], deadline, {peer: label}, channel, sends=True, check=look
        )
        if claimed[peer].unread:
            raise ProtocolError(f"{label} sent data before it was greeted")
        return claimed[peer]

    def _addresses(self, target: int) -> list[tuple[str, int]]:
        """Of a rank; first the one that has worked: one that leads nowhere costs seconds."""
        addresses = list(self.peers[target].addresses)
        return [self._ways[target], *addresses] if target in self._ways else addresses

    def _say(self, target: int, reason: str) -> None:
        if target not in self.unreachable:
            _log.warning(
                "%s cannot reach %s (%s), which dials instead, and masks what it sends: that "
                "costs speed; let connections in to that address, or name one that can be "
                "reached (--advertise, UNISONO_ADVERTISE)",
                self.label(self.rank), self.label(target), reason,
            )  # fmt: skip
        self.unreachable[target] = reason

    def _have_line(
        self,
        name: str,
        target: int,
        peer: int,
        deadline: float,
        label: str,
        check: Callable[[], None],
    ) -> None:
        """Have a rank make a line, by a word on its own connection for a group's collectives."""
        head, payload = Call(self._name, "line", self.rank, target).frame(self._admission.epoch)
        sock = self._doorman.waiting(name, peer)
        if sock is not None:
            try:
                sock.send(head + payload)  # the first bytes on it behind its handshake
            except OSError as error:
                _log.info("%s could not be asked to dial: %s", label, error)
        self.lines.wait(target, deadline, label, check)

    def all(
        self,
        name: str,
        ranks: Sequence[int],
        others: Sequence[tuple[int, str]],
        deadline: float,
        labels: Mapping[int, str],
        check: Callable[[], None],
        made: Callable[[int, str, Connection], None],
    ) -> None:
        """A connection from each peer on each channel of `others`, given to `made` as it comes.

        They are made at the same time: a peer that cannot be dialled must be able to dial this
        rank, and to be dialled by others, meanwhile.

        Raises:
            RendezvousFailed: about the first peer that cannot be reached.
        """
        errors: dict[tuple[int, str], BaseException] = {}
        stop = threading.Event()
        giving = threading.Lock()
        done = threading.Semaphore(0)

        def look() -> None:
            check()
            if stop.is_set():
                raise _Stopped

        def reach(peer: int, channel: str) -> None:
            try:
                connection = self.one(name, ranks, peer, channel, deadline, labels[peer], look)
                with giving:
                    if stop.is_set():
                        connection.sock.close()
                    else:
                        made(peer, channel, connection)
            except BaseException as error:  # noqa: BLE001 — raised below
                errors[peer, channel] = error
                if time.monotonic() < deadline:
                    halt()
            finally:
                done.release()

        def halt() -> None:
            with giving:
                stop.set()
            self.wake()

        threads = [threading.Thread(target=reach, args=other, daemon=True) for other in others]
        try:
            for thread in threads:
                thread.start()
            for _ in threads:
                done.acquire()
                if stop.is_set():
                    break
        except BaseException:
            halt()
            raise
        finally:
            # one that waits for an address which does not answer ends by itself, with nothing
            until = time.monotonic() + _STUCK
            for thread in threads:
                if thread.ident is not None:
                    thread.join(max(0.0, until - time.monotonic()))
        for other in others:
            if other in errors and not isinstance(errors[other], _Stopped):
                raise errors[other]

    def wake(self) -> None:
        """Have who waits here look at its `check`."""
        self.lines.wake()
        self._doorman.wake()

    def _answer(self, peer: int, call: Call) -> None:
        """Make the connection that `peer`, a rank of the world, asks for."""
        if call.channel not in CHANNELS or not valid_name(call.group):
            raise ProtocolError(f"rank {peer} asked for {call.channel[:40]!r}")
        request = self._request(call.group, call.callee, call.caller, call.channel, sends=True)
        sock = dial(
            self._addresses(peer),
            request,
            self._admission.secret,
            time.monotonic() + _ANSWER,
            self.label(peer),
            # who asks does listen, unless it is gone by now: others wait for this thread, too
            is_there=lambda: True,
        )
        if call.channel == "line":
            self.lines.listen(peer, Inlet(SocketEndpoint(sock, lost_after=SILENCE)), line=True)
        else:
            self._doorman.bring(call.group, call.channel, call.caller, sock)


def _neighbours(rank: int, peers: Sequence[Peer]) -> frozenset[int]:
    """The other ranks of this rank's place; none where only WebSocket links are wanted.

    ``UNISONO_LINKS=websocket`` on all ranks keeps shared memory out.

    Raises:
        ValueError: ``UNISONO_LINKS`` is neither ``auto`` nor ``websocket``.
    """
    setting = os.environ.get("UNISONO_LINKS") or "auto"
    if setting not in ("auto", "websocket"):
        raise ValueError(f"UNISONO_LINKS is {setting!r}; there are auto and websocket")
    place = peers[rank].place
    if not place or setting == "websocket":
        return frozenset()
    return frozenset(
        other for other, peer in enumerate(peers) if other != rank and peer.place == place
    )
