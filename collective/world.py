"""A process among the ranks of one job and epoch: how its groups get their links."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from collective import calibration, diagnosis
from collective.communicator import Communicator
from collective.device_exchange import Lobby
from collective.engine import Engine
from collective.errors import ProtocolError, RendezvousFailed
from collective.links import shared_handshake
from collective.links.bundle import MOST, BundleInlet, BundleOutlet, channel, wanted
from collective.links.endpoint import SocketEndpoint, memory_pair
from collective.links.link import EndOfLink, Inlet, Outlet
from collective.links.listener import Admission, Doorman, Listener, dial
from collective.links.shared_memory import SharedInlet, SharedOutlet
from collective.links.wire import FrameKind
from collective.messages import LinkRequest
from collective.surroundings import Facts, Surroundings
from collective.tensor_server import TensorServer
from collective.watch import Watch


@dataclass(frozen=True)
class Peer:
    """A rank of the world: its node's name and where it, or its agent, listens.

    Ranks of the same `place`, unless that is empty, exchange through shared memory.
    """

    node: str
    addresses: tuple[tuple[str, int], ...]
    place: str = ""


#: seconds after which a machine that answers nothing is given up by the links that wait for its
#: data; a process that is stopped or busy does not count, since its machine's kernel answers
_SILENCE = float(os.environ.get("UNISONO_PEER_SILENCE", "20"))


#: seconds for which a downloader may stand still
_TENSORS_LOST = 600.0


class World:
    """WebSocket links between processes."""

    linger = 2.0
    lobby: Lobby | None = None

    def __init__(
        self,
        rank: int,
        peers: Sequence[Peer],
        admission: Admission,
        doorman: Doorman,
        listener: Listener | None,
        name: str,
        *,
        calibrates: bool = False,
    ) -> None:
        """Take over `doorman` and `listener`; without a listener, an agent accepts for the rank.

        Args:
            name: of the group of all ranks.
            calibrates: links between nodes are measured where all ranks say so.

        Raises:
            RendezvousFailed: cannot listen for the ranks of this node.
            ValueError: ``UNISONO_LINKS`` or ``UNISONO_CALIBRATION`` has no meaning.
        """
        self.rank = rank
        self.peers = tuple(peers)
        self.engine = Engine()
        self.secret = admission.secret
        self.tensors = TensorServer(admission.secret, admission.epoch)
        self._admission = admission
        self._doorman = doorman
        self._listener = listener
        self._ranks: dict[str, tuple[int, ...]] = {}
        self._dialled: set[tuple[str, int]] = set()
        self._dialling = threading.Lock()
        self._lost_after = 600.0
        self._name = name
        self._calibrates = calibration.wanted() and calibrates
        self._surroundings: Surroundings | None = None
        self._neighbours = _neighbours(rank, self.peers)
        self._shared_listener: Listener | None = None
        if self._neighbours:
            ((where, _),) = self._near(rank)
            listening = shared_handshake.listen(where)
            self._shared_listener = Listener(admission, doorman, [listening], rank)
        _worlds.add(self)

    @property
    def _nodes(self) -> list[str]:
        return [peer.node for peer in self.peers]

    @property
    def surroundings(self) -> Surroundings:
        """What the ranks know of each other, after the links of the group of all are made."""
        assert self._surroundings is not None
        return self._surroundings

    def _facts(self, inlets: Mapping[int, Inlet]) -> Facts:
        kind = "shm" if self._neighbours else "websocket"
        return calibration.own_facts(self.rank, self._nodes, inlets, kind, self._calibrates)

    def near(self, ranks: Sequence[int]) -> bool:
        return all(rank == self.rank or rank in self._neighbours for rank in ranks)

    def _request(self, name: str, ranks: Sequence[int], peer: int, channel: str) -> LinkRequest:
        return LinkRequest(
            job=self._admission.job,
            attempt=self._admission.attempt,
            group=name,
            epoch=self._admission.epoch,
            dialler=list(ranks).index(self.rank),
            target=peer,
            channel=channel,
        )

    def connect(
        self,
        name: str,
        ranks: Sequence[int],
        timeout: float,
        stall: float,
        known: Mapping[int, Outlet],
    ) -> Communicator:
        """Dial every member, and wait for every member to dial.

        Raises:
            RendezvousFailed: someone could not be reached, or did not come, within `timeout`.
            PeerLost: a member's link in `known` ended.
        """
        deadline = time.monotonic() + timeout
        ranks = tuple(ranks)
        me = ranks.index(self.rank)
        size = len(ranks)
        labels = [f"rank {i} on node {self.peers[rank].node}" for i, rank in enumerate(ranks)]
        self._ranks[name] = ranks
        self._lost_after = max(timeout, 60.0)
        others = [(me + step) % size for step in range(1, size)]
        inlets: dict[int, Inlet] = {}
        outlets: dict[int, Outlet] = {}
        opened: list[socket.socket] = []
        #: by peer: the socket and memory of links that are not made yet
        shared: dict[int, tuple[socket.socket, int]] = {}
        watched = [
            (known[peer], peer, self.peers[ranks[peer]].node) for peer in others if peer in known
        ]
        watch = Watch(watched, lambda error: self._doorman.give_up(name, error))
        try:
            for peer in others:
                near = ranks[peer] in self._neighbours
                sock = dial(
                    self._near(ranks[peer]) if near else self.peers[ranks[peer]].addresses,
                    self._request(name, ranks, peer, "collective"),
                    self._admission.secret,
                    deadline,
                    labels[peer],
                    watch.check,
                )
                opened.append(sock)
                if near:
                    shared[peer] = sock, shared_handshake.offer(sock, self.engine.bell)
                    continue
                more = self._dial_more(name, ranks, peer, sock, deadline, labels[peer], opened)
                endpoint = SocketEndpoint(sock, lost_after=_SILENCE)
                inlets[peer] = BundleInlet(endpoint, more) if more else Inlet(endpoint)
            claimed = self._doorman.claim(name, others, deadline, labels)
            opened += [sock for sock, _ in claimed.values()]
            for peer, (sock, unread) in claimed.items():
                if sock.family == socket.AF_UNIX:
                    memory, bell = shared_handshake.take(sock, self.engine.bell, deadline)
                    outlets[peer] = SharedOutlet(sock, memory, bell, unread)
                else:
                    endpoint = SocketEndpoint(sock, lost_after=self._lost_after)
                    outlets[peer] = Outlet(endpoint, unread)
            # only now: whoever hands its bell over has claimed, and so has dialled before
            while shared:
                peer = next(iter(shared))
                bell = shared_handshake.take_bell(shared[peer][0], deadline)
                inlets[peer] = SharedInlet(*shared.pop(peer), bell)
            own = self._facts(inlets) if name == self._name else None
            for inlet in inlets.values():
                connections = 1 + len(inlet.others) if inlet.others else 0
                said = b"" if own is None else own.encode()
                inlet.say(FrameKind.HELLO, self._admission.epoch, connections, said)
            self._await_greetings(outlets, deadline, labels)
            self._bundle(name, outlets, deadline, labels, opened)
            if own is not None:
                facts = [
                    own if peer == me else Facts.decode(outlets[peer].greeting, labels[peer])
                    for peer in range(size)
                ]
                self._surroundings = calibration.calibrate(
                    me, self._nodes, facts, inlets, outlets, self._admission.epoch, deadline
                )
        except BaseException as error:
            links: list[Inlet | Outlet] = [*inlets.values(), *outlets.values()]
            for link in links:
                link.close()
            for sock in opened:
                sock.close()
            for _, memory in shared.values():
                os.close(memory)
            self._doorman.forget(name)
            if isinstance(error, EndOfLink):
                watch.check()
                raise RendezvousFailed(f"group {name}: a link broke at once: {error}") from error
            raise
        finally:
            watch.close()
        communicator = Communicator(
            self.engine,
            name=name,
            rank=me,
            size=size,
            epoch=self._admission.epoch,
            nodes=[self.peers[rank].node for rank in ranks],
            outlets=outlets,
            inlets=inlets,
            stall=stall,
        )
        self.engine.add(communicator)

        def take_message_link(peer: int, sock: socket.socket, unread: bytes) -> None:
            endpoint = SocketEndpoint(sock, lost_after=self._lost_after)
            self.engine.add_message_link(communicator, peer, Outlet(endpoint, unread))

        self._doorman.forward(name, "p2p", take_message_link)
        return communicator

    def _dial_more(
        self,
        name: str,
        ranks: Sequence[int],
        peer: int,
        first: socket.socket,
        deadline: float,
        label: str,
        opened: list[socket.socket],
    ) -> list[SocketEndpoint]:
        """The further connections of a link whose first is made, where one is not enough."""
        endpoints = []
        for number in range(1, wanted(first)):
            sock = dial(
                [first.getpeername()[:2]],
                self._request(name, ranks, peer, channel(number)),
                self._admission.secret,
                deadline,
                label,
            )
            opened.append(sock)
            endpoints.append(SocketEndpoint(sock, lost_after=_SILENCE))
        return endpoints

    def _bundle(
        self,
        name: str,
        outlets: dict[int, Outlet],
        deadline: float,
        labels: Sequence[str],
        opened: list[socket.socket],
    ) -> None:
        """Add the further connections that peers say they have made."""
        for peer, outlet in outlets.items():
            if outlet.connections > MOST:
                raise ProtocolError(f"{labels[peer]} speaks of {outlet.connections} connections")
            endpoints = []
            for number in range(1, outlet.connections):
                claimed = self._doorman.claim(name, [peer], deadline, labels, channel(number))
                sock, _ = claimed[peer]
                opened.append(sock)
                endpoints.append(SocketEndpoint(sock, lost_after=self._lost_after))
            if endpoints:
                outlets[peer] = BundleOutlet(outlet, endpoints)

    def _near(self, rank: int) -> tuple[tuple[str, int], ...]:
        """Where a rank of this node takes shared-memory links."""
        own = self._admission
        world = f"{own.job} {own.attempt} {self._name}"
        return ((shared_handshake.address(own.secret, world, own.epoch, rank), 0),)

    def _await_greetings(
        self, outlets: dict[int, Outlet], deadline: float, labels: Sequence[str]
    ) -> None:
        poll = select.poll()
        by_descriptor = {outlet.endpoint.fileno(): peer for peer, outlet in outlets.items()}
        for descriptor in by_descriptor:
            poll.register(descriptor, select.POLLIN)
        waiting = set(outlets)
        while True:
            for peer in list(waiting):
                outlet = outlets[peer]
                if outlet.greet():
                    waiting.discard(peer)
                    poll.unregister(outlet.endpoint.fileno())
            if not waiting:
                return
            left = deadline - time.monotonic()
            if left <= 0:
                peer = min(waiting)
                raise RendezvousFailed(f"{labels[peer]} connected but said nothing", rank=peer)
            poll.poll(left * 1000)

    def dial_messages(self, communicator: Communicator, peer: int, timeout: float) -> None:
        name = communicator.name
        with self._dialling:
            if (name, peer) in self._dialled:
                return
            ranks = self._ranks[name]

            def check() -> None:
                if communicator.outlets[peer].ended():
                    # what it said before its end tells whether it left in order
                    self.engine.call(lambda: communicator.hear(peer))
                    raise diagnosis.absent(communicator, peer)

            sock = dial(
                self.peers[ranks[peer]].addresses,
                self._request(name, ranks, peer, "p2p"),
                self._admission.secret,
                time.monotonic() + timeout,
                communicator.label(peer),
                check,
            )
            inlet = Inlet(SocketEndpoint(sock, lost_after=_SILENCE))
            self.engine.add_message_link(communicator, peer, inlet)
            self._dialled.add((name, peer))

    def serve_tensors(self, name: str, ranks: Sequence[int]) -> None:
        me = tuple(ranks).index(self.rank)

        def take(dialler: int, sock: socket.socket, unread: bytes) -> None:
            endpoint = SocketEndpoint(sock, lost_after=_TENSORS_LOST)
            self.tensors.take(name, me, dialler, Outlet(endpoint, unread))

        self._doorman.forward(name, "tensor", take)

    def dial_tensors(
        self,
        name: str,
        ranks: Sequence[int],
        peer: int,
        deadline: float,
        label: str,
        check: Callable[[], None],
    ) -> Inlet:
        if ranks[peer] == self.rank:
            return _own_tensors(self.tensors, name, peer)
        request = self._request(name, ranks, peer, "tensor")
        addresses = self.peers[ranks[peer]].addresses
        sock = dial(addresses, request, self._admission.secret, deadline, label, check)
        return Inlet(SocketEndpoint(sock, lost_after=_SILENCE))

    def forget(self, name: str) -> None:
        self.tensors.forget(name)
        self._doorman.forget(name)
        self._ranks.pop(name, None)
        self._dialled = {entry for entry in self._dialled if entry[0] != name}

    def close(self) -> None:
        """Stop listening and driving; groups must have been closed."""
        for listener in (self._listener, self._shared_listener):
            if listener is not None:
                listener.close()
        self._doorman.close()
        self.tensors.close()
        self.engine.close()
        _worlds.discard(self)

    def _abandon(self) -> None:
        for listener in (self._listener, self._shared_listener):
            if listener is not None:
                listener.abandon()
        self._doorman.abandon()


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


def _own_tensors(tensors: TensorServer, name: str, rank: int) -> Inlet:
    """A connection from a rank to itself."""
    far, near = memory_pair()
    tensors.take(name, rank, rank, Outlet(far))
    return Inlet(near)


_worlds: weakref.WeakSet[World] = weakref.WeakSet()


def _after_fork() -> None:
    for world in list(_worlds):
        world._abandon()


os.register_at_fork(after_in_child=_after_fork)
