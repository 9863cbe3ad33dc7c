"""What a rank's groups ask of whatever gives them their links."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from collective.communicator import Communicator
from collective.device_exchange import Lobby
from collective.engine import Engine
from collective.errors import CollectiveError
from collective.links.link import Inlet, Outlet
from collective.surroundings import Surroundings
from collective.tensor_server import TensorServer


class Wiring(Protocol):
    """How the groups of a rank get their links; one for sockets and one for memory."""

    engine: Engine
    #: what this rank exposes to others
    tensors: TensorServer
    #: what all ranks know and nobody else
    secret: str
    #: seconds that a rank which leaves waits for its peers to read what it sent
    linger: float
    #: by rank of the world that this rank cannot dial, and that dials it instead: why not
    unreachable: dict[int, str]
    #: where ranks that are threads of this process find each other's devices; else None
    lobby: Lobby | None

    def near(self, ranks: Sequence[int]) -> bool:
        """Whether all these ranks of the world are processes of this node, or this one."""

    @property
    def surroundings(self) -> Surroundings:
        """What the ranks know of each other, after the links of the group of all are made."""

    def connect(
        self,
        name: str,
        ranks: Sequence[int],
        timeout: float,
        stall: float,
        known: Mapping[int, Outlet],
    ) -> Communicator:
        """Make a group's links.

        Args:
            name: tells the group from all others.
            ranks: ranks of the world, this one among them.
            timeout: seconds within which all must have come.
            stall: seconds without progress after which ranks compare what they do.
            known: links to some of the members, whose end means that they will not come.
        """

    def expect(self, name: str, linking: Callable[[], None]) -> None:
        """Call `linking`, which must not block, when a member of an unlinked group links it."""

    def give_up(self, name: str, error: CollectiveError) -> None:
        """Have `connect` raise `error`, if it is making the links of this group."""

    def dial_messages(self, communicator: Communicator, peer: int, timeout: float) -> None:
        """Make the link on which `peer` sends this rank point-to-point messages."""

    def serve_tensors(self, name: str, ranks: Sequence[int]) -> None:
        """Take connections of members that download from this rank."""

    def dial_tensors(
        self,
        name: str,
        ranks: Sequence[int],
        peer: int,
        deadline: float,
        label: str,
        check: Callable[[], None],
    ) -> Inlet:
        """A new connection on which rank `peer` of a group sends this rank a tensor.

        Args:
            deadline: monotonic time at which to give up.
            label: who the peer is, for messages.
            check: called from time to time; may raise to end the tries.
        """

    def forget(self, name: str) -> None:
        """The group of that name is closed."""

    def close(self) -> None:
        """Release everything."""
