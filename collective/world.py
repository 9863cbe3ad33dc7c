"""A process among the ranks of one job and epoch: how its groups get their links."""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from collective import calibration, diagnosis
from collective.attendance import Watch
from collective.communicator import Communicator
from collective.device_exchange import Lobby
from collective.engine import Engine
from collective.environment import LONGEST_WAIT, seconds
from collective.errors import CollectiveError, ProtocolError, RendezvousFailed
from collective.greetings import await_greetings, say_why, tell_late, why
from collective.links import shared_handshake
from collective.links.bundle import MOST, BundleInlet, BundleOutlet, channel, setting, wanted
from collective.links.doorman import Connection, Doorman
from collective.links.endpoint import SocketEndpoint, memory_pair
from collective.links.link import EndOfLink, Inlet, Outlet
from collective.links.listener import Admission, Listener
from collective.links.shared_memory import SharedInlet, SharedOutlet
from collective.links.wire import FrameKind
from collective.reaching import SILENCE, Peer, Reach
from collective.surroundings import Facts, Surroundings
from collective.tensor_server import TensorServer

#: seconds for which a rank that gave up before all had come stays to tell them why
_STAY = 1.5
#: seconds for which a downloader may stand still
_TENSORS_LOST = 600.0


class World:
    """WebSocket links between processes."""

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
            ValueError: a variable of the environment has no meaning.
        """
        # what is refused comes before what must be closed
        setting()
        self.linger = seconds("UNISONO_LINGER_SECONDS", 2)
        self._calibrates = calibration.wanted() and calibrates
        self._reach = Reach(rank, peers, admission, doorman, name)
        self._shared_listener: Listener | None = None
        if self._reach.neighbours:
            listening = shared_handshake.listen(self._reach.near(rank))
            self._shared_listener = Listener(admission, doorman, [listening], rank)
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
        #: by group: seconds for which one of its members may stand still
        self._lost_after: dict[str, float] = {}
        self._name = name
        self._surroundings: Surroundings | None = None
        self.unreachable = self._reach.unreachable
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
        kind = "shm" if self._reach.neighbours else "websocket"
        return calibration.own_facts(self.rank, self._nodes, inlets, kind, self._calibrates)

    def near(self, ranks: Sequence[int]) -> bool:
        return all(rank == self.rank or rank in self._reach.neighbours for rank in ranks)

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
            RendezvousFailed: someone could not be reached, or did not come, within `timeout`, or
                has another list of addresses.
            PeerLost: a member is lost: its link in `known` ended or, of the group of all ranks,
                any connection of it.
            OperationAborted: another exception ended this on another rank.
        """
        deadline = time.monotonic() + min(timeout, LONGEST_WAIT)
        ranks = tuple(ranks)
        me = ranks.index(self.rank)
        size = len(ranks)
        labels = {i: f"rank {i} on node {self.peers[rank].node}" for i, rank in enumerate(ranks)}
        self._ranks[name] = ranks
        self._lost_after[name] = max(timeout, 60.0)
        others = [(me + step) % size for step in range(1, size)]
        inlets: dict[int, Inlet] = {}
        outlets: dict[int, Outlet] = {}
        opened: list[socket.socket] = []
        #: by peer: the socket and memory of links that are not made yet
        shared: dict[int, tuple[socket.socket, int]] = {}
        everyone = name == self._name
        nodes = [self.peers[rank].node for rank in ranks]
        watch = Watch(nodes, known, lambda error: self._doorman.give_up(name, error))

        def came(peer: int, connection: Connection) -> None:
            if everyone:  # members of another group may give up its links, and try again
                watch.came(peer, connection)

        def ended() -> None:
            watch.end()
            self._reach.lines.wake()

        def check() -> None:
            self._doorman.check(name)

        #: by peer: the connections on which it sends
        connections: dict[int, Connection] = {}
        #: on which peers that cannot dial this rank say so until they have their links
        heard: list[Inlet] = []

        def made(peer: int, _: str, connection: Connection) -> None:
            opened.append(connection.sock)
            connections[peer] = connection
            if connection.dialled and ranks[peer] not in self._reach.neighbours:
                ear = Inlet(SocketEndpoint(connection.sock))
                heard.append(ear)
                told = partial(watch.told, peer) if everyone else lambda _: None
                self._reach.lines.listen(ranks[peer], ear, told)
            elif everyone:
                watch.add(peer, connection)

        try:
            self._doorman.attend(name, came, ended)
            first = [(peer, channel(0)) for peer in others]
            self._reach.all(name, ranks, first, deadline, labels, check, made)
            further = self._further(ranks, connections)
            more: dict[tuple[int, str], SocketEndpoint] = {}

            def made_more(peer: int, on: str, connection: Connection) -> None:
                opened.append(connection.sock)
                more[peer, on] = SocketEndpoint(connection.sock, lost_after=SILENCE)

            self._reach.all(name, ranks, further, deadline, labels, check, made_more)
            for peer, connection in connections.items():
                sock = connection.sock
                if ranks[peer] in self._reach.neighbours:
                    shared[peer] = sock, shared_handshake.offer(sock, self.engine.bell)
                    continue
                endpoint = SocketEndpoint(sock, lost_after=SILENCE)
                rest = [more[other] for other in further if other[0] == peer]
                inlets[peer] = (
                    BundleInlet(endpoint, rest, client=connection.dialled)
                    if rest
                    else Inlet(endpoint, client=connection.dialled)
                )
            claimed = self._doorman.claim(name, others, deadline, labels)
            opened += [connection.sock for connection in claimed.values()]
            for peer, connection in claimed.items():
                sock = connection.sock
                if sock.family == socket.AF_UNIX:
                    memory, bell = shared_handshake.take(
                        sock, self.engine.bell, deadline, watch.over
                    )
                    outlets[peer] = SharedOutlet(sock, memory, bell, connection.unread)
                else:
                    outlets[peer] = self._outlet(name, connection)
            # only now: whoever hands its bell over has claimed, and so has dialled before
            while shared:
                peer = next(iter(shared))
                bell = shared_handshake.take_bell(shared[peer][0], deadline, watch.over)
                inlets[peer] = SharedInlet(*shared.pop(peer), bell)
            for ear in heard:
                self._reach.lines.ignore(ear)
            if everyone:  # from here on the links themselves tell who is lost
                watch.close()
            check()
            own = self._facts(inlets) if everyone else None
            for inlet in inlets.values():
                count = 1 + len(inlet.others) if inlet.others else 0
                said = b"" if own is None else own.encode()
                inlet.say(FrameKind.HELLO, self._admission.epoch, count, said)
            await_greetings(outlets, deadline, labels)
            self._bundle(name, outlets, deadline, labels, opened)
            if own is not None:
                facts = [
                    own if peer == me else Facts.decode(outlets[peer].greeting, labels[peer])
                    for peer in range(size)
                ]
                self._surroundings = calibration.calibrate(
                    me, self._nodes, facts, inlets, outlets, self._admission.epoch, deadline
                )
            self._doorman.settled(name)
        except BaseException as error:
            cause = error
            if isinstance(error, EndOfLink):
                watch.wait()
                text = f"group {name}: a rank went away while the ranks met; its own error says why"
                told_why = self._doorman.gone(name) or (everyone and why(outlets, nodes))
                cause = told_why or RendezvousFailed(text)
            for ear in heard:
                self._reach.lines.ignore(ear)
            ways = self._doorman.came(name) | connections
            if everyone:
                say_why(cause, me, nodes, self._admission.epoch, inlets, ways)
            links: list[Inlet | Outlet] = [*inlets.values(), *outlets.values()]
            for link in links:
                link.close()
            for sock in opened:
                sock.close()
            for _, memory in shared.values():
                os.close(memory)
            if everyone and isinstance(cause, CollectiveError):
                late = set(others) - set(ways) - {cause.rank}
                stay = min(self.linger, _STAY, deadline - time.monotonic())
                epoch = self._admission.epoch
                tell_late(cause, me, nodes, epoch, self._doorman, name, late, stay)
            self._doorman.turn_away(name)
            if cause is not error:
                raise cause from error
            raise
        finally:
            watch.close()
        communicator = Communicator(
            self.engine,
            name=name,
            rank=me,
            size=size,
            epoch=self._admission.epoch,
            nodes=nodes,
            outlets=outlets,
            inlets=inlets,
            stall=stall,
        )
        self.engine.add(communicator)

        def take_message_link(peer: int, connection: Connection) -> None:
            self.engine.add_message_link(communicator, peer, self._outlet(name, connection))

        self._doorman.forward(name, "p2p", take_message_link)
        return communicator

    def _outlet(self, name: str, connection: Connection) -> Outlet:
        endpoint = SocketEndpoint(connection.sock, lost_after=self._lost_after[name])
        return Outlet(endpoint, connection.unread, client=connection.dialled)

    def _further(
        self, ranks: Sequence[int], connections: Mapping[int, Connection]
    ) -> list[tuple[int, str]]:
        """The peers and channels of further connections of links whose first is made."""
        far = {
            peer: connection.sock
            for peer, connection in connections.items()
            if ranks[peer] not in self._reach.neighbours
        }
        return [
            (peer, channel(number))
            for peer, sock in far.items()
            for number in range(1, wanted(sock, len(far)))
        ]

    def _bundle(
        self,
        name: str,
        outlets: dict[int, Outlet],
        deadline: float,
        labels: Mapping[int, str],
        opened: list[socket.socket],
    ) -> None:
        """Add the further connections that peers say they have made."""
        for peer, outlet in outlets.items():
            if outlet.connections > MOST:
                raise ProtocolError(f"{labels[peer]} speaks of {outlet.connections} connections")
            endpoints = []
            for number in range(1, outlet.connections):
                claimed = self._doorman.claim(name, [peer], deadline, labels, channel(number))
                opened.append(claimed[peer].sock)
                sock = claimed[peer].sock
                endpoints.append(SocketEndpoint(sock, lost_after=self._lost_after[name]))
            if endpoints:
                outlets[peer] = BundleOutlet(outlet, endpoints)

    def expect(self, name: str, linking: Callable[[], None]) -> None:
        self._doorman.expect(name, linking)

    def give_up(self, name: str, error: CollectiveError) -> None:
        self._doorman.give_up(name, error)

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

            deadline = time.monotonic() + timeout
            label = communicator.label(peer)
            inlet = self._inlet(self._reach.one(name, ranks, peer, "p2p", deadline, label, check))
            self.engine.add_message_link(communicator, peer, inlet)
            self._dialled.add((name, peer))

    def serve_tensors(self, name: str, ranks: Sequence[int]) -> None:
        me = tuple(ranks).index(self.rank)

        def take(dialler: int, connection: Connection) -> None:
            endpoint = SocketEndpoint(connection.sock, lost_after=_TENSORS_LOST)
            outlet = Outlet(endpoint, connection.unread, client=connection.dialled)
            self.tensors.take(name, me, dialler, outlet)

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
        return self._inlet(self._reach.one(name, ranks, peer, "tensor", deadline, label, check))

    def _inlet(self, connection: Connection) -> Inlet:
        endpoint = SocketEndpoint(connection.sock, lost_after=SILENCE)
        return Inlet(endpoint, client=connection.dialled)

    def forget(self, name: str) -> None:
        self.tensors.forget(name)
        self._doorman.forget(name)
        self._ranks.pop(name, None)
        self._lost_after.pop(name, None)
        self._dialled = {entry for entry in self._dialled if entry[0] != name}

    def close(self) -> None:
        """Stop listening and driving; groups must have been closed."""
        for listener in (self._listener, self._shared_listener):
            if listener is not None:
                listener.close()
        self._doorman.close()
        self._reach.lines.close()
        self.tensors.close()
        self.engine.close()
        _worlds.discard(self)

    def _abandon(self) -> None:
        for listener in (self._listener, self._shared_listener):
            if listener is not None:
                listener.abandon()
        self._doorman.abandon()
        self._reach.lines.abandon()


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
