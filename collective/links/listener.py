"""Where links come in: a rank listens, accepts, and checks who dials it."""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import threading
import time
from dataclasses import dataclass

from collective.errors import ProtocolError, RendezvousFailed
from collective.links import dialling
from collective.links.doorman import Doorman
from collective.links.handshake import TOO_EARLY, ServerHandshake, global_rank, same_secret
from collective.membership import difference
from collective.messages import LinkRequest

_log = logging.getLogger("unisono.collective")
#: a connection that has not finished its handshake after this many seconds is closed
_HANDSHAKE = 10.0
#: connections in their handshake at one time; strangers must not use up a rank's descriptors
_OPEN = 128


@dataclass(frozen=True)
class Admission:
    """Who may dial: the ranks of one job and attempt, at one epoch, that know the secret."""

    job: str
    attempt: str
    epoch: int
    secret: str
    #: of all ranks, where they were given by hand, as `collective.membership` says them
    addresses: str = ""

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
            refusal = self._admission.refusal(request, handshake.secret)
            conflict = None if refusal is not None else self._conflict(request)
            if conflict is not None:
                refusal = 409, conflict
            refusal = refusal or self._astray(request)
            if refusal is not None:
                status, text = refusal
                _log.warning("refused rank %d from %s: %d %s", request.dialler, peer, status, text)
                self._answer(sock, handshake.refuse(status, text))
                if conflict is not None:
                    error = RendezvousFailed(
                        f"group {request.group}: refused a rank at {peer}: {conflict}",
                        rank=request.dialler,
                    )
                    self._doorman.give_up(request.group, error)
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

    def _conflict(self, request: LinkRequest) -> str | None:
        """Why this rank and one that knows the secret can be in no group together."""
        if self._rank is None or not request.addresses:
            return None
        if request.dialler == request.target == self._rank:
            return f"there are two programs with rank {self._rank}: give each a rank of its own"
        return difference(self._rank, self._admission.addresses, request.dialler, request.addresses)

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
        raise RendezvousFailed(f"cannot listen on {where}: {_why(error)}") from error


def listen_as(
    rank: int, host: str, port: int, admission: Admission, group: str
) -> list[socket.socket]:
    """Listening sockets at the address that all ranks of `group` have of this one.

    Raises:
        RendezvousFailed: the address is not of this machine, or taken; if by a program that is the
            same rank, both are told.
    """
    try:
        return listen(host, port)
    except RendezvousFailed as error:
        request = LinkRequest(
            job=admission.job, attempt=admission.attempt, group=group, epoch=admission.epoch,
            dialler=rank, target=rank, channel="collective", addresses=admission.addresses,
        )  # fmt: skip
        answer = dialling.refusal((host, port), request, admission.secret)
        raise RendezvousFailed(f"rank {rank} {error}{answer}", rank=rank) from error


def _why(error: OSError) -> str:
    """What is in the way, and the way out."""
    text = error.strerror or str(error)
    text = text.partition(" (while attempting")[0]  # what Python's create_server adds
    if error.errno == errno.EADDRINUSE:
        text += "; another program listens there, or a group of this one that was not closed"
    elif error.errno == errno.EADDRNOTAVAIL:
        text += "; it must be an address of this machine"
    return text
