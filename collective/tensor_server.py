"""The owner's side of the tensor service: what is exposed, and the thread that serves it.

The thread needs nobody else of the process: the listener, or the agent's channel, hands it the
connections, and it sends straight from the tensors' memory, one frame at a time per connection.
"""

from __future__ import annotations

import json
import logging
import os
import select
import threading
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field

from collective.environment import LONGEST_TIMEOUT, LONGEST_WAIT, is_time
from collective.errors import GroupClosed, ProtocolError, Refused
from collective.links.link import EDGE, EndOfLink, Outlet, frame_head, note
from collective.links.wire import FrameKind, Header
from collective.program import SEGMENT
from collective.tensor_format import MAX_JSON, Capability, Description, check_id, parse_json
from collective.units import format_size

_log = logging.getLogger("unisono.collective")
#: a connection that has asked for nothing after so many seconds is closed
_HANDSHAKE = 10.0
#: seconds that a download which was cut keeps its place among the allowed ones
_RESUME = 30.0
#: how many ids of tensors that are not exposed any more are remembered, with the reason
_REMEMBERED = 1024

_servers: weakref.WeakSet[TensorServer] = weakref.WeakSet()


@dataclass(eq=False)
class _Entry:
    """A tensor that is exposed."""

    description: Description
    data: memoryview
    #: downloads that are still allowed to end; None for any number
    left: int | None
    #: monotonic time after which no download may begin
    until: float | None
    ttl: float | None
    peers: frozenset[int] | None
    allowed: int | None
    #: why no further download may begin, if so
    ended: str | None = None
    #: downloads under way by (rank, number): their connection, or when their place lapses
    under_way: dict[tuple[int, str], _Connection | float] = field(default_factory=dict)


@dataclass(eq=False)
class _Connection:
    """A downloader's connection."""

    link: Outlet
    group: str
    owner: int
    dialler: int
    since: float
    identifier: str = ""
    download: str = ""
    offset: int = 0
    entry: _Entry | None = None
    described: bool = False
    #: what to say before the connection ends
    farewell: bytes | None = None


class TensorServer:
    """Everything that one rank exposes, in all its groups.

    Args:
        secret: what downloaders must know.
        epoch: the membership that they must be of.
    """

    def __init__(self, secret: str, epoch: int) -> None:
        self._secret = secret
        self._epoch = epoch
        self._lock = threading.Lock()
        self._entries: dict[tuple[str, str], _Entry] = {}
        self._ended: dict[tuple[str, str], str] = {}
        self._arrived: list[_Connection] = []
        self._connections: dict[int, _Connection] = {}
        self._cut: list[_Connection] = []
        self._thread: threading.Thread | None = None
        self._epoll: select.epoll | None = None
        self._bell = -1
        self._closing = False
        _servers.add(self)

    # -- for the owner ------------------------------------------------------------------------

    def expose(
        self,
        group: str,
        identifier: str,
        description: Description,
        data: memoryview,
        downloads: int | None,
        ttl: float | None,
        peers: Iterable[int] | None,
    ) -> None:
        """Offer a tensor; see `collective.tensor_service.TensorService.expose`.

        Raises:
            Refused: arguments without a meaning, or an id that is in use.
        """
        check_id(identifier)
        if downloads is not None and (type(downloads) is not int or downloads < 1):
            raise Refused(
                f"downloads is {downloads!r}; a whole number from 1, or None for any number"
            )
        if ttl is not None and (not is_time(ttl) or ttl == 0):
            raise Refused(
                f"ttl is {ttl!r}; a number of seconds above 0, at most {LONGEST_TIMEOUT:g}, or "
                "None for no end"
            )
        description.encode()
        until = None if ttl is None else time.monotonic() + ttl
        allowed = None if peers is None else frozenset(peers)
        entry = _Entry(description, data, downloads, until, ttl, allowed, downloads)
        key = (group, identifier)
        with self._lock:
            if self._closing:
                raise GroupClosed("the group is closed")
            old = self._entries.get(key)
            if old is not None:
                self._expire(key, old, time.monotonic())
            if key in self._entries:
                raise Refused(
                    f"{identifier!r} is exposed already"
                    + (" and still being downloaded" if self._entries[key].ended else "")
                    + ": unexpose it first, or take another id"
                )
            self._ended.pop(key, None)
            self._entries[key] = entry
            self._start()
            self._ring()

    def unexpose(self, group: str, identifier: str) -> bool:
        """Offer a tensor no more, cut its downloads, and let go of its memory; whether it was."""
        with self._lock:
            entry = self._entries.pop((group, identifier), None)
            if entry is None:
                return False
            self._remember((group, identifier), "it was withdrawn")
            if entry.ended is not None:
                self._ended[group, identifier] = entry.ended
            self._cut += [place for place in entry.under_way.values()
                          if isinstance(place, _Connection)]  # fmt: skip
            self._ring()
        return True

    def take(self, group: str, owner: int, dialler: int, link: Outlet) -> None:
        """Serve a connection of rank `dialler`; never blocks."""
        with self._lock:
            if self._closing:
                link.close()
                return
            self._arrived.append(_Connection(link, group, owner, dialler, time.monotonic()))
            self._start()
            self._ring()

    def forget(self, group: str) -> None:
        """Offer nothing in a group any more: it is closed."""
        with self._lock:
            for key in [key for key in self._entries if key[0] == group]:
                del self._entries[key]
            for key in [key for key in self._ended if key[0] == group]:
                del self._ended[key]
            here = (*self._connections.values(), *self._arrived)
            self._cut += [connection for connection in here if connection.group == group]
            self._ring()

    def close(self) -> None:
        """Offer nothing any more; end the thread and all connections."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._ring()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
        for connection in (*self._arrived, *self._connections.values()):
            connection.link.close()
        self.abandon()

    def abandon(self) -> None:
        """Release this process's copies only; for a forked child, where the thread is not."""
        self._lock = threading.Lock()
        self._closing = True
        for connection in (*self._arrived, *self._connections.values()):
            connection.link.endpoint.abandon()
        self._arrived.clear()
        self._connections.clear()
        self._entries.clear()
        if self._epoll is not None:
            self._epoll.close()
            os.close(self._bell)
            self._epoll = None
        _servers.discard(self)

    # -- the thread ---------------------------------------------------------------------------

    def _start(self) -> None:
        """Begin to serve, at the first need; under the lock."""
        if self._thread is None:
            self._epoll = select.epoll()
            self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._epoll.register(self._bell, select.EPOLLIN)
            self._thread = threading.Thread(target=self._run, name="unisono-tensors", daemon=True)
            self._thread.start()

    def _ring(self) -> None:
        """Wake the thread; under the lock."""
        if self._epoll is not None:
            os.eventfd_write(self._bell, 1)

    def _run(self) -> None:
        assert self._epoll is not None
        while True:
            with self._lock:
                if self._closing:
                    return
                arrived, self._arrived = self._arrived, []
                cut, self._cut = self._cut, []
                for connection in arrived:
                    descriptor = connection.link.endpoint.fileno()
                    self._connections[descriptor] = connection
                    self._epoll.register(descriptor, EDGE)
                now = time.monotonic()
                for key, entry in list(self._entries.items()):
                    self._expire(key, entry, now)
            for connection in cut:
                self._drop(connection)
            moved = [
                self._serve(connection, now) for connection in list(self._connections.values())
            ]
            if not any(moved):
                self._wait()

    def _wait(self) -> None:
        assert self._epoll is not None
        for descriptor, mask in self._epoll.poll(self._next_look()):
            if descriptor == self._bell:
                os.eventfd_read(self._bell)
                continue
            connection = self._connections.get(descriptor)
            if connection is not None:
                note(connection.link, mask)

    def _next_look(self) -> float | None:
        """Seconds until something ends by itself."""
        times = [
            connection.since + _HANDSHAKE
            for connection in self._connections.values()
            if not connection.identifier
        ]
        with self._lock:
            for entry in self._entries.values():
                if entry.until is not None and entry.ended is None:
                    times.append(entry.until)
                times += [p for p in entry.under_way.values() if isinstance(p, float)]
        return min(max(0.0, min(times) - time.monotonic()), LONGEST_WAIT) if times else None

    def _serve(self, connection: _Connection, now: float) -> bool:
        """Do what can be done for a connection without blocking; whether that was anything."""
        link = connection.link
        moved = False
        try:
            if link.readable:
                for header, body in link.control():
                    moved = True
                    if not self._hear(connection, header, body):
                        return True
            if not connection.identifier:
                if now - connection.since >= _HANDSHAKE:
                    raise ProtocolError(f"asked for nothing within {_HANDSHAKE:g} s")
                return moved
            if connection.entry is None and connection.farewell is None:
                self._admit(connection)
            return self._send(connection) or moved
        except EndOfLink:
            self._drop(connection)
        except ProtocolError as error:
            _log.warning(
                "closed a tensor connection of rank %d in group %s: %s",
                connection.dialler, connection.group, error,
            )  # fmt: skip
            self._drop(connection)
        except Exception:  # noqa: BLE001 — one downloader must not keep out all others
            _log.exception("serving a tensor to rank %d failed", connection.dialler)
            self._drop(connection)
        return True

    def _hear(self, connection: _Connection, header: Header, body: bytes) -> bool:
        """A frame of the downloader; whether the connection goes on."""
        if header.epoch != self._epoch:
            raise ProtocolError(f"epoch {header.epoch}, but this is {self._epoch}")
        if header.kind == FrameKind.DONE and connection.entry is not None:
            self._done(connection)
            self._drop(connection)
            return False
        if header.kind != FrameKind.FETCH or connection.identifier or len(body) > MAX_JSON:
            raise ProtocolError(f"a frame of kind {header.kind} and {len(body)} bytes")
        request = parse_json(body)
        identifier, download = request.get("id"), request.get("download")
        offset = request.get("offset")
        if (
            not isinstance(identifier, str) or not identifier
            or not isinstance(download, str) or len(download) > 64
            or not isinstance(offset, int) or offset < 0
        ):  # fmt: skip
            raise ProtocolError("a request without id, download or offset")
        connection.identifier, connection.download = identifier, download
        connection.offset = offset
        capability = Capability(
            connection.group, self._epoch, connection.owner, connection.dialler, identifier
        )
        if not capability.proves(request.get("token"), self._secret):
            _log.warning(
                "refused rank %d the tensor %.80r of group %s: wrong token",
                connection.dialler, identifier, connection.group,
            )  # fmt: skip
            self._refuse(connection, "the token is wrong for this rank and tensor")
        return True

    # -- who may, and what they get ----------------------------------------------------------

    def _admit(self, connection: _Connection) -> None:
        """Give a connection its tensor, refuse it, or let it wait."""
        key = (connection.group, connection.identifier)
        place = (connection.dialler, connection.download)
        with self._lock:
            entry = self._entries.get(key)
            reason = self._ended.get(key) if entry is None else None
            if entry is not None:
                if entry.peers is not None and connection.dialler not in entry.peers:
                    reason = f"it is for ranks {sorted(entry.peers)} only"
                elif place in entry.under_way:
                    before = entry.under_way[place]
                    if isinstance(before, _Connection):
                        self._cut.append(before)
                        before.entry = None
                elif entry.ended is not None:
                    reason = entry.ended
                elif entry.left is not None and len(entry.under_way) >= entry.left:
                    return  # all its downloads are under way; one of them may fail
                if reason is None and connection.offset > entry.description.nbytes:
                    reason = f"it has no byte {connection.offset}"
            if reason is None:
                if entry is None:
                    return  # not there yet
                entry.under_way[place] = connection
                connection.entry = entry
        if reason is not None:
            if "only" in reason:
                _log.warning(
                    "refused rank %d the tensor %.80r of group %s: %s",
                    connection.dialler, connection.identifier, connection.group, reason,
                )  # fmt: skip
            self._refuse(connection, reason)

    def _refuse(self, connection: _Connection, reason: str) -> None:
        connection.farewell = json.dumps({"reason": reason}).encode()

    def _send(self, connection: _Connection) -> bool:
        """Send at most one more frame; whether anything moved."""
        link = connection.link
        if not link.idle:
            before = link.sent
            if not link.flush():
                return link.sent > before
        if connection.farewell is not None:
            if connection.described:
                link.end()
                self._drop(connection)
                return True
            connection.described = True
            self._frame(connection, FrameKind.REFUSAL, 0, memoryview(connection.farewell))
            return True
        entry = connection.entry
        if entry is None:
            return False
        if not connection.described:
            connection.described = True
            data = entry.description.encode()
            self._frame(connection, FrameKind.TENSOR, connection.offset, memoryview(data))
            return True
        rest = entry.description.nbytes - connection.offset
        if not rest:
            return False
        size = min(SEGMENT, rest)
        payload = entry.data[connection.offset : connection.offset + size]
        self._frame(connection, FrameKind.DATA, connection.offset, payload)
        connection.offset += size
        return True

    def _frame(
        self, connection: _Connection, kind: FrameKind, offset: int, payload: memoryview
    ) -> None:
        head = frame_head(kind, self._epoch, 0, offset, len(payload), 0)
        connection.link.begin(head, payload)

    def _done(self, connection: _Connection) -> None:
        """A downloader has it all."""
        entry, connection.entry = connection.entry, None
        assert entry is not None
        with self._lock:
            entry.under_way.pop((connection.dialler, connection.download), None)
            if entry.left is not None:
                entry.left -= 1
                if not entry.left and entry.ended is None:
                    entry.ended = (
                        f"its {entry.allowed} downloads are over, the last by rank "
                        + str(connection.dialler)
                    )
            key = (connection.group, connection.identifier)
            if self._entries.get(key) is entry:
                self._expire(key, entry, time.monotonic())

    def _expire(self, key: tuple[str, str], entry: _Entry, now: float) -> None:
        """Let go of what nobody may download any more; under the lock."""
        lapsed = [p for p, at in entry.under_way.items() if isinstance(at, float) and at <= now]
        for place in lapsed:
            del entry.under_way[place]
        if entry.ended is None and entry.until is not None and entry.until <= now:
            entry.ended = f"it expired {entry.ttl:g} s after it was exposed"
        if entry.ended is not None and not entry.under_way:
            del self._entries[key]
            self._remember(key, entry.ended)

    def _remember(self, key: tuple[str, str], reason: str) -> None:
        self._ended[key] = reason
        while len(self._ended) > _REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def _drop(self, connection: _Connection) -> None:
        descriptor = next((d for d, c in self._connections.items() if c is connection), None)
        if descriptor is None:
            return
        assert self._epoll is not None
        self._epoll.unregister(descriptor)
        with self._lock:  # under which `forget` goes through them
            del self._connections[descriptor]
        connection.link.close()
        entry = connection.entry
        if entry is None:
            return
        place = (connection.dialler, connection.download)
        with self._lock:
            if entry.under_way.get(place) is connection:
                entry.under_way[place] = time.monotonic() + _RESUME
        _log.info(
            "rank %d left the tensor %.80r of group %s after %s",
            connection.dialler, connection.identifier, connection.group,
            format_size(connection.offset),
        )  # fmt: skip


def _after_fork() -> None:
    for server in list(_servers):
        server.abandon()


os.register_at_fork(after_in_child=_after_fork)
