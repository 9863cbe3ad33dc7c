"""Keeps the connections that come in until the group that they are meant for asks for them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from collective.errors import CollectiveError, RendezvousFailed
from collective.messages import LinkRequest

#: connections for tensors that one rank may have waiting
_EARLY = 256


class Connection(NamedTuple):
    """A connection whose handshake is over."""

    sock: socket.socket
    #: what has been read of it already
    unread: bytes = b""
    #: whether this rank dialled it: then it is the client, which masks what it sends
    dialled: bool = False


#: takes a connection of a rank
Taker = Callable[[int, Connection], None]
#: group, channel, whether the dialler sends the data, and the other rank in the group
_Key = tuple[str, str, bool, int]


class Doorman:
    """Where connections and the groups that want them meet.

    Takers and checks are called under its lock.  They take those of `Lines` and of the tensor
    server, and wait for who drives the engine: none of these may come here meanwhile.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._waiting: dict[_Key, list[Connection]] = {}
        self._closed = False
        #: groups whose links are there
        self._settled: set[str] = set()
        #: by group whose links will not be made: why
        self._gone: dict[str, CollectiveError] = {}
        #: by group whose links are being made: who is told of connections, and of the end
        self._attending: dict[str, tuple[Taker, Callable[[], None]]] = {}
        #: by group that is not linked yet: who is told that a member links it
        self._expecting: dict[str, Callable[[], None]] = {}
        #: by group, channel and whether the dialler sends: who takes connections at once
        self._takers: dict[tuple[str, str, bool], Taker] = {}

    def deposit(self, request: LinkRequest, sock: socket.socket, unread: bytes) -> None:
        """A connection from `request.dialler` for a group of this rank."""
        key = (request.group, request.channel, request.sends, request.dialler)
        self._put(key, Connection(sock, unread))

    def bring(self, group: str, channel: str, peer: int, sock: socket.socket) -> None:
        """A connection to `peer`, which cannot dial this rank, and would have by itself."""
        self._put((group, channel, False, peer), Connection(sock, dialled=True))

    def _put(self, key: _Key, connection: Connection) -> None:
        with self._condition:
            if self._closed:
                connection.sock.close()
                return
            taker = self._takers.get(key[:3])
            if taker is not None:
                taker(key[3], connection)
                return
            waiting = self._waiting.setdefault(key, [])
            # a rank downloads many tensors at once; of anything else it makes one connection,
            # and another when it has given the first up
            while len(waiting) >= (_EARLY if key[1] == "tensor" else 1):
                waiting.pop(0).sock.close()
            waiting.append(connection)
            if key[1] == "collective":
                if key[0] in self._attending:
                    self._attending[key[0]][0](key[3], connection)
                self._expecting.pop(key[0], lambda: None)()
            self._condition.notify_all()

    def claim(
        self,
        group: str,
        peers: Sequence[int],
        deadline: float,
        labels: Mapping[int, str],
        channel: str = "collective",
        *,
        sends: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> dict[int, Connection]:
        """A connection of each of `peers`, waiting for those that have not come yet.

        Args:
            sends: the connections on which the dialler sends the data.
            check: called whenever something changed; may raise to end the waiting.

        Raises:
            RendezvousFailed: `deadline` (monotonic) passed; names who did not come.
            CollectiveError: `give_up` was called for the group.
        """
        keys = {rank: (group, channel, sends, rank) for rank in peers}
        with self._condition:
            while True:
                check()
                self.check(group)
                missing = [rank for rank, key in keys.items() if key not in self._waiting]
                if not missing:
                    return {rank: self._pop(key) for rank, key in keys.items()}
                left = deadline - time.monotonic()
                if left <= 0 or self._closed:
                    names = ", ".join(labels[rank] for rank in missing)
                    raise RendezvousFailed(
                        f"group {group}: {names} did not connect in time; it may not have "
                        "started, or cannot reach this machine",
                        rank=missing[0],
                    )
                self._condition.wait(left)

    def _pop(self, key: _Key) -> Connection:
        waiting = self._waiting[key]
        connection = waiting.pop(0)
        if not waiting:
            del self._waiting[key]
        return connection

    def waiting(self, group: str, peer: int) -> socket.socket | None:
        """The connection on which `peer` wants data of a group's collectives, if it has come."""
        with self._condition:
            found = self._waiting.get((group, "collective", False, peer))
            return found[0].sock if found else None

    def came(self, group: str) -> dict[int, Connection]:
        """By rank: a connection for a group's collectives that nobody has claimed."""
        with self._condition:
            return {
                key[3]: waiting[-1]
                for key, waiting in self._waiting.items()
                if key[:2] == (group, "collective")
            }

    def wake(self) -> None:
        """Something changed that `check` of a waiting `claim` looks at."""
        with self._condition:
            self._condition.notify_all()

    def expect(self, group: str, linking: Callable[[], None]) -> None:
        """Call `linking` when a member of `group` wants its links, unless `attend` is first."""
        with self._condition:
            if any(key[:2] == (group, "collective") for key in self._waiting):
                linking()
            else:
                self._expecting[group] = linking

    def attend(self, group: str, came: Taker, ended: Callable[[], None]) -> None:
        """The links of `group` are being made, until `settled` or `turn_away`.

        Args:
            came: is told of each connection for collectives, also of those that are here.
            ended: is called when `give_up` was.
        """
        with self._condition:
            self._expecting.pop(group, None)
            self._attending[group] = came, ended
            for key, waiting in self._waiting.items():
                if key[:2] == (group, "collective"):
                    for connection in waiting:
                        came(key[3], connection)
            if group in self._gone:
                ended()

    def give_up(self, group: str, error: CollectiveError) -> None:
        """The links of `group` will not be made: `claim` and `check` raise `error`.

        The first error counts, and none when the links are there.
        """
        with self._condition:
            if group in self._settled or group in self._gone:
                return
            self._gone[group] = error
            if group in self._attending:
                self._attending[group][1]()
            self._condition.notify_all()

    def check(self, group: str) -> None:
        """Raise the error with which the links of `group` were given up; takes no lock."""
        error = self.gone(group)
        if error is not None:
            raise error

    def gone(self, group: str) -> CollectiveError | None:
        """With what the links of `group` were given up, if they were; takes no lock."""
        return self._gone.get(group)

    def settled(self, group: str) -> None:
        """The links of `group` are there."""
        with self._condition:
            self._settled.add(group)
            self._gone.pop(group, None)
            self._attending.pop(group, None)

    def forward(self, group: str, channel: str, taker: Taker, *, sends: bool = False) -> None:
        """Give connections of `group` on a channel to `taker(rank, connection)` as they come."""
        with self._condition:
            self._takers[group, channel, sends] = taker
            mine = [key for key in self._waiting if key[:3] == (group, channel, sends)]
            for key in mine:
                for connection in self._waiting.pop(key):
                    taker(key[3], connection)

    def forget(self, group: str) -> None:
        """The group is closed: nobody takes its connections any more."""
        with self._condition:
            self._expecting.pop(group, None)
            for taken in [taken for taken in self._takers if taken[0] == group]:
                del self._takers[taken]
            self.turn_away(group)

    def turn_away(self, group: str) -> None:
        """The group's links could not be made: close what has come for them; they may be again."""
        with self._condition:
            self._settled.discard(group)
            self._gone.pop(group, None)
            self._attending.pop(group, None)
            for key in [key for key in self._waiting if key[0] == group]:
                for connection in self._waiting.pop(key):
                    connection.sock.close()

    def abandon(self) -> None:
        """Release this process's copies only; for a forked child."""
        self._condition = threading.Condition()
        self.close()

    def close(self) -> None:
        """Close what nobody claimed."""
        with self._condition:
            self._closed = True
            for waiting in self._waiting.values():
                for connection in waiting:
                    connection.sock.close()
            self._waiting.clear()
            self._condition.notify_all()
