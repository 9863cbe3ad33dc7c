"""Ranks that are threads of one process: how their groups get their links, through memory."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from collective.communicator import Communicator
from collective.device_exchange import Lobby
from collective.engine import Engine
from collective.errors import CollectiveError
from collective.links.endpoint import MemoryEndpoint, memory_pair
from collective.links.link import Inlet, Outlet
from collective.surroundings import Facts, Surroundings
from collective.tensor_server import TensorServer

#: the name of the one node that all threads are on
NODE = "here"


class MemoryHall:
    """Where the threads of one process find the ends of the links between them."""

    def __init__(self) -> None:
        self.secret = secrets.token_hex(16)
        self.worlds: dict[int, MemoryWorld] = {}
        self.lobby = Lobby()
        self._lock = threading.Lock()
        self._ends: dict[tuple[str, str, int, int, int], deque[MemoryEndpoint]] = {}

    def end(self, group: str, channel: str, source: int, target: int, mine: int) -> MemoryEndpoint:
        """The end of the link `source` → `target` that rank `mine` holds."""
        with self._lock:
            waiting = self._ends.get((group, channel, source, target, mine))
            if waiting:
                return waiting.popleft()
            outlet, inlet = memory_pair()
            own, others = (outlet, inlet) if mine == source else (inlet, outlet)
            other = source if mine == target else target
            self._ends.setdefault((group, channel, source, target, other), deque()).append(others)
            return own


class MemoryWorld:
    """Memory links between threads of one process."""

    #: what was sent stays readable when its sender is gone
    linger = 0.0

    def __init__(self, rank: int, hall: MemoryHall) -> None:
        self.rank = rank
        self.engine = Engine()
        self.secret = hall.secret
        self.lobby: Lobby | None = hall.lobby
        self.tensors = TensorServer(hall.secret, 1)
        self.unreachable: dict[int, str] = {}
        self._hall = hall
        hall.worlds[rank] = self
        self._members: dict[str, tuple[int, ...]] = {}

    @property
    def surroundings(self) -> Surroundings:
        """All ranks are threads of one interpreter, which runs one of them at a time."""
        return Surroundings((Facts(1, NODE),) * len(self._hall.worlds))

    def near(self, ranks: Sequence[int]) -> bool:
        """No: they are threads of this process."""
        return False

    def connect(
        self,
        name: str,
        ranks: Sequence[int],
        timeout: float,
        stall: float,
        known: Mapping[int, Outlet],
    ) -> Communicator:
        ranks = tuple(ranks)
        me = ranks.index(self.rank)
        others = [peer for peer in range(len(ranks)) if peer != me]
        outlets, inlets = self._links(name, "collective", me, others)
        communicator = Communicator(
            self.engine,
            name=name,
            rank=me,
            size=len(ranks),
            epoch=1,
            nodes=[NODE] * len(ranks),
            outlets=outlets,
            inlets=inlets,
            stall=stall,
        )
        self.engine.add(communicator)
        out, into = self._links(name, "p2p", me, others)
        for peer in others:
            self.engine.add_message_link(communicator, peer, out[peer])
            self.engine.add_message_link(communicator, peer, into[peer])
        return communicator

    def _links(
        self, name: str, channel: str, me: int, others: Sequence[int]
    ) -> tuple[dict[int, Outlet], dict[int, Inlet]]:
        end = self._hall.end
        outlets = {peer: Outlet(end(name, channel, me, peer, me)) for peer in others}
        inlets = {peer: Inlet(end(name, channel, peer, me, me)) for peer in others}
        return outlets, inlets

    def expect(self, name: str, linking: Callable[[], None]) -> None:
        """Nothing to do: memory links wait for nobody."""

    def give_up(self, name: str, error: CollectiveError) -> None:
        """Nothing to do, for the same reason."""

    def dial_messages(self, communicator: Communicator, peer: int, timeout: float) -> None:
        """Nothing to do: memory links for messages are made with the group."""

    def serve_tensors(self, name: str, ranks: Sequence[int]) -> None:
        """Nothing to do: who downloads finds this rank in the hall."""

    def dial_tensors(
        self,
        name: str,
        ranks: Sequence[int],
        peer: int,
        deadline: float,
        label: str,
        check: Callable[[], None],
    ) -> Inlet:
        far, near = memory_pair()
        me = tuple(ranks).index(self.rank)
        self._hall.worlds[ranks[peer]].tensors.take(name, peer, me, Outlet(far))
        return Inlet(near)

    def forget(self, name: str) -> None:
        self.tensors.forget(name)

    def close(self) -> None:
        self.tensors.close()
        self.engine.close()
