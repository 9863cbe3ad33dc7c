"""Where links come from: a rank listens, accepts and checks who dials it, and dials its peers."""

from __future__ import annotations

import logging
import random
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from collective.errors import PeerLost, ProtocolError, RendezvousFailed
from collective.links.handshake import (
    CHANNELS,
    ClientHandshake,
    ServerHandshake,
    global_rank,
    same_secret,
)
from collective.messages import LinkRequest

_log = logging.getLogger("unisono.collective")
#: a connection that has not finished its handshake after this many seconds is closed
_HANDSHAKE = 10.0
#: connections in their handshake at one time; strangers must not use up a rank's descriptors
_OPEN = 128
#: HTTP status: this side is at an earlier epoch still, and may follow
TOO_EARLY = 425
#: seconds for one attempt to connect to one address
_CONNECT = 3.0
#: links for tensors that are kept for groups which this rank has not made yet
_EARLY = 256


@dataclass(frozen=True)
class Admission:
    """Who may dial: the ranks of one job and attempt, at one epoch, that know the secret."""

    job: str
    attempt: str
    epoch: int
    secret: str

    def refusal(self, request: LinkRequest, secret: str | None) -> tuple[int, str] | None:
        """Status and text with which a dialler is refused, or None when it may come in."""
        if not same_secret(secret, self.secret):
            return 401, "wrong secret"
        if (request.job, request.attempt) != (self.job, self.attempt):
            return 404, (
                f"this is attempt {self.attempt} of job {self.job}, "
                f"not attempt {request.attempt} of job {request.job}"
            )
        if request.epoch != self.epoch:
            status = 409 if request.epoch < self.epoch else TOO_EARLY
            return status, f"the group is at epoch {self.epoch}, the dialler at {request.epoch}"
        return None


#: takes a rank's connection, and what has been read of it already
Taker = Callable[[int, socket.socket, bytes], None]


class Doorman:
    """Keeps accepted connections until the group that they are meant for asks for them."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._waiting: dict[tuple[str, str, int], tuple[socket.socket, bytes]] = {}
        self._closed = False
        self._gone: dict[str, PeerLost] = {}
        #: by group and channel: who takes links at once
        self._takers: dict[tuple[str, str], Taker] = {}
        #: links of a rank for tensors are many, unlike those for anything else
        self._early: list[tuple[LinkRequest, socket.socket, bytes]] = []

    def deposit(self, request: LinkRequest, sock: socket.socket, unread: bytes) -> None:
        """A connection from `request.dialler` for a group of this rank."""
        key = (request.group, request.channel, request.dialler)
        with self._condition:
            if self._closed:
                sock.close()
                return
            taker = self._takers.get((request.group, request.channel))
            if taker is not None:
                taker(request.dialler, sock, unread)
                return
            if request.channel == "tensor":
                self._early.append((request, sock, unread))
                if len(self._early) > _EARLY:
                    self._early.pop(0)[1].close()
                return
            old = self._waiting.pop(key, None)
            self._waiting[key] = (sock, unread)
            self._condition.notify_all()
        if old is not None:
            old[0].close()  # the dialler gave that one up and tries again

    def claim(
        self,
        group: str,
        diallers: Sequence[int],
        deadline: float,
        labels: Sequence[str],
        channel: str = "collective",
    ) -> dict[int, tuple[socket.socket, bytes]]:
        """The links for collectives of all `diallers`, waiting for those that have not come yet.

        Raises:
            RendezvousFailed: `deadline` (monotonic) passed; names who did not come.
            PeerLost: `give_up` was called for the group.
        """
        keys = {rank: (group, channel, rank) for rank in diallers}
        with self._condition:
            while True:
                if group in self._gone:
                    raise self._gone.pop(group)
                missing = [rank for rank, key in keys.items() if key not in self._waiting]
                if not missing:
                    return {rank: self._waiting.pop(key) for rank, key in keys.items()}
                left = deadline - time.monotonic()
                if left <= 0 or self._closed:
                    names = ", ".join(labels[rank] for rank in missing)
                    raise RendezvousFailed(
                        f"group {group}: {names} did not connect in time; it may not have "
                        "started, or cannot reach this machine",
                        rank=missing[0],
                    )
                self._condition.wait(left)

    def give_up(self, group: str, error: PeerLost) -> None:
        """Nobody need wait for links of `group` any more: `claim` raises `error`."""
        with self._condition:
            self._gone[group] = error
            self._condition.notify_all()

    def forward(self, group: str, channel: str, taker: Taker) -> None:
        """Give links of `group` on a channel to `taker(rank, socket, unread)` as they come."""
        with self._condition:
            self._takers[group, channel] = taker
            mine = [key for key in self._waiting if key[:2] == (group, channel)]
            ready = [(key[2], *self._waiting.pop(key)) for key in mine]
            early, self._early = self._early, []
            for entry in early:
                request, sock, unread = entry
                if (request.group, request.channel) == (group, channel):
                    ready.append((request.dialler, sock, unread))
                else:
                    self._early.append(entry)
        for rank, sock, unread in ready:
            taker(rank, sock, unread)

    def forget(self, group: str) -> None:
        """The group is closed: whoever dials it from now on is turned away."""
        with self._condition:
            for taken in [taken for taken in self._takers if taken[0] == group]:
                del self._takers[taken]
            for entry in [entry for entry in self._early if entry[0].group == group]:
                self._early.remove(entry)
                entry[1].close()
            self._gone.pop(group, None)
            for key in [key for key in self._waiting if key[0] == group]:
                self._waiting.pop(key)[0].close()

    def abandon(self) -> None:
        """Release this process's copies only; for a forked child."""
        self._condition = threading.Condition()
        self.close()

    def close(self) -> None:
        """Close what nobody claimed."""
        with self._condition:
            self._closed = True
            for sock, _ in self._waiting.values():
                sock.close()
            self._waiting.clear()
            for _, sock, _ in self._early:
                sock.close()
            self._early.clear()
            self._condition.notify_all()


class Listener:
    """A listening socket and the thread that shakes hands on it."""

    def __init__(
        self,
        admission: Admission,
        doorman: Doorman,
        sockets: list[socket.socket],
        rank: int | None = None,
    ) -> None:
        """Take over `sockets`; whoever means another rank than `rank` (of the world) is refused."""
        self._admission = admission
        self._rank = rank
        self._doorman = doorman
        self._sockets = sockets
        #: where it listens; a Unix socket has no port
        self.port = 0 if sockets[0].family == socket.AF_UNIX else int(sockets[0].getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._quit, self._quit_peer = socket.socketpair()
        self._selector.register(self._quit, selectors.EVENT_READ, None)
        for listening in sockets:
            listening.setblocking(False)
            self._selector.register(listening, selectors.EVENT_READ, listening)
        self._open: dict[socket.socket, tuple[ServerHandshake, float, str]] = {}
        self._thread = threading.Thread(target=self._serve, name="unisono-listener", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            timeout = None
            if self._open:
                first = min(until for _, until, _ in self._open.values())
                timeout = max(0.0, first - time.monotonic())
            for key, _ in self._selector.select(timeout):
                if key.fileobj is self._quit:
                    return
                assert isinstance(key.fileobj, socket.socket)
                if key.data is not None:
                    self._accept(key.fileobj)
                    continue
                try:
                    self._read(key.fileobj)
                except Exception:  # noqa: BLE001 — one stranger must not keep out all others
                    _log.exception("a handshake failed")
                    if key.fileobj in self._open:
                        self._drop(key.fileobj)
            now = time.monotonic()
            for sock, (_, until, peer) in list(self._open.items()):
                if now >= until:
                    _log.warning(
                        "closed a connection from %s that did not finish its handshake", peer
                    )
                    self._drop(sock)

    def _accept(self, listening: socket.socket) -> None:
        try:
            sock, address = listening.accept()
        except OSError:
            return  # the dialler went away between the event and here
        if len(self._open) >= _OPEN:
            oldest = next(iter(self._open))
            _log.warning("closed a connection from %s: too many unfinished", self._open[oldest][2])
            self._drop(oldest)
        sock.setblocking(False)
        peer = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "this node"
        self._open[sock] = (ServerHandshake(), time.monotonic() + _HANDSHAKE, peer)
        self._selector.register(sock, selectors.EVENT_READ, None)

    def _drop(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        self._open.pop(sock)
        sock.close()

    def _read(self, sock: socket.socket) -> None:
        if sock not in self._open:
            return  # dropped in this very round
        handshake, _, peer = self._open[sock]
        try:
            data = sock.recv(8192)
        except BlockingIOError:
            return
        except OSError:
            self._drop(sock)
            return
        if not data:
            self._drop(sock)
            return
        handshake.feed(data)
        request = handshake.request
        if handshake.response is not None:
            _log.warning("refused a connection from %s: %s", peer, _first_line(handshake.response))
            self._answer(sock, handshake.response)
        elif request is not None:
            refusal = self._admission.refusal(request, handshake.secret) or self._astray(request)
            if refusal is not None:
                status, text = refusal
                _log.warning("refused rank %d from %s: %d %s", request.dialler, peer, status, text)
                self._answer(sock, handshake.refuse(status, text))
                return
            try:
                answer = handshake.accept()
            except ProtocolError as error:
                _log.warning("refused a connection from %s: %s", peer, error)
                self._answer(sock, handshake.response or b"")
                return
            try:
                sock.sendall(answer)  # some 200 bytes on an empty socket
            except OSError:
                self._drop(sock)
                return
            self._selector.unregister(sock)
            self._open.pop(sock)
            self._doorman.deposit(request, sock, handshake.leftover)

    def _astray(self, request: LinkRequest) -> tuple[int, str] | None:
        try:
            meant = global_rank(request)
        except ValueError as error:
            return 404, str(error)
        if self._rank is None or meant == self._rank:
            return None
        return 404, (
            f"this is rank {self._rank}, not rank {meant}; "
            "do all ranks have the same list of addresses?"
        )

    def _answer(self, sock: socket.socket, response: bytes) -> None:
        try:
            sock.sendall(response)
            sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it did not wait for the refusal
        self._drop(sock)

    def close(self) -> None:
        """Stop listening."""
        if self._thread.is_alive():
            self._quit_peer.send(b"x")
            self._thread.join(timeout=5.0)
        self.abandon()

    def abandon(self) -> None:
        """Close the sockets only; for a forked child, where the thread does not exist."""
        self._selector.close()
        for sock in (*self._sockets, *self._open, self._quit, self._quit_peer):
            sock.close()
        self._open.clear()


def _first_line(response: bytes) -> str:
    head, _, body = response.partition(b"\r\n\r\n")
    return f"{head.split(b' ', 2)[1].decode()} {body.decode(errors='replace').strip()}"


def listen(host: str | None = None, port: int = 0) -> list[socket.socket]:
    """Listening sockets at `host`, or at every address of this machine, IPv6 too where it exists.

    Raises:
        RendezvousFailed: the address is taken or not of this machine.
    """
    try:
        if host is not None:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            return [socket.create_server((host, port), family=family, backlog=256)]
        if socket.has_dualstack_ipv6():
            try:
                return [
                    socket.create_server(
                        ("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=256
                    )
                ]
            except OSError:
                pass  # IPv6 is compiled in, but switched off: IPv4 alone
        return [socket.create_server(("0.0.0.0", port), backlog=256)]
    except OSError as error:
        where = f"{host or 'any address'}, port {port}"
        raise RendezvousFailed(f"cannot listen on {where}: {error}") from error


def dial(
    addresses: Sequence[tuple[str, int]],
    request: LinkRequest,
    secret: str,
    deadline: float,
    label: str,
    check: Callable[[], None] = lambda: None,
) -> socket.socket:
    """Connect to a peer at the first of its addresses that works, trying until `deadline`.

    `check` is called before each round of attempts and may raise to end them.

    Raises:
        RendezvousFailed: refused by the peer, or not reached in time; names every address tried.
    """
    pause = 0.01
    while True:
        check()
        problems = []
        refusals = 0
        for host, port in addresses:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            try:
                return _dial_one(host, port, request, secret, left)
            except OSError as error:
                where = "shared memory" if host.startswith("\0") else f"{host}:{port}"
                problems.append(f"{where}: {error}")
            except RendezvousFailed as error:
                refusals += 1  # perhaps another machine that has this address: try the next one
                problems.append(str(error))
        # a refusal is final, but a peer that cannot be reached, or has not left its earlier epoch,
        # may only not listen yet
        if refusals == len(addresses) or time.monotonic() + pause >= deadline:
            raise RendezvousFailed(
                f"cannot reach {label}: {'; '.join(problems) or 'no time left'}",
                rank=request.target,
            )
        # nobody tells when the peer begins to listen: look again, less and less often
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(pause * 1.7, 0.5)


def _dial_one(
    host: str, port: int, request: LinkRequest, secret: str, timeout: float
) -> socket.socket:
    assert request.channel in CHANNELS
    near = host.startswith("\0")
    if near:
        host, sock = "localhost", _connect_unix(host, min(_CONNECT, timeout))
    else:
        sock = socket.create_connection((host, port), timeout=min(_CONNECT, timeout))
    try:
        if not near and sock.getsockname() == sock.getpeername():
            # nobody listens, and the kernel chose this very port as the source
            raise ConnectionRefusedError("nobody listens there")
        handshake = ClientHandshake(host, port, request, secret)
        sock.settimeout(min(_HANDSHAKE, timeout))
        sock.sendall(handshake.hello)
        while not handshake.done:
            data = sock.recv(4096)
            if not data and handshake.status is None:
                raise ConnectionResetError("closed during the handshake")
            try:
                handshake.feed(data)
            except RendezvousFailed as error:
                if handshake.status == TOO_EARLY:
                    raise ConnectionRefusedError(str(error)) from None
                raise
    except BaseException:
        sock.close()
        raise
    return sock


def _connect_unix(address: str, timeout: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout)
        sock.connect(address)
    except BaseException:
        sock.close()
        raise
    return sock
