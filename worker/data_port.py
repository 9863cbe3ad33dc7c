"""The node's one data port: checks who dials and hands the connected socket to the rank it is for.

One thread serves all handshakes.  A connection to a rank that has not said hello yet is held,
without an answer, until it has, or until its time is up.
"""

from __future__ import annotations

import errno
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from collective.addresses import format_address
from collective.errors import ProtocolError
from collective.links.handshake import ServerHandshake, global_rank, same_secret
from collective.messages import LinkRequest, Plan, RankLink
from worker.errors import LocalProblem
from worker.probing import ProbeServer
from worker.rank_socket import RankConnection

__all__ = ["DEFAULT_PORT", "DataPort", "Target", "global_rank"]

logger = logging.getLogger(__name__)

#: where an agent listens unless told otherwise
DEFAULT_PORT = 8701
#: connections that are not handed over yet; more are closed at once
MAX_PENDING = 4096


@dataclass(frozen=True)
class Target:
    """What this node knows about an attempt that is dialled."""

    plan: Plan
    #: ranks of this node that have not ended
    live_ranks: frozenset[int]
    #: the connections of those that have said hello
    connections: dict[int, RankConnection] = field(default_factory=dict)


@dataclass(eq=False)
class _Pending:
    connection: socket.socket
    peer: str
    deadline: float
    handshake: ServerHandshake = field(default_factory=ServerHandshake)
    #: set once the request is good and only its rank is missing
    waits_for: tuple[str, int] | None = None


def listen(address: str | None, port: int) -> socket.socket:
    """A listening socket on one address, or on all of both families.

    Raises:
        LocalProblem: the port is taken or the address is not this machine's.
    """
    candidates = [address] if address else ["::", "0.0.0.0"]
    problem: OSError | None = None
    for host in candidates:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            problem = problem or error
            continue
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if host == "::":
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.bind((host, port))
            listener.listen(1024)
        except OSError as error:
            listener.close()
            problem = error
            if error.errno == errno.EADDRINUSE:
                break
            continue
        return listener
    assert problem is not None
    where = format_address(address, port) if address else f"port {port}"
    if problem.errno == errno.EADDRINUSE:
        raise LocalProblem(
            f"the data port is taken: another program listens on {where}; choose another with "
            "--data-port, or --data-port 0 for any"
        )
    raise LocalProblem(f"cannot listen on {where}: {problem.strerror} (--bind, --data-port)")


class DataPort:
    """Accepts data connections until it is closed.

    Args:
        find: what this node knows about an attempt, or None.
        probes: answers whoever measures a link.
        handshake_timeout: seconds for a dialler to send its request.
        link_wait: seconds that a request waits for its rank.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        find: Callable[[str], Target | None],
        probes: ProbeServer,
        handshake_timeout: float,
        link_wait: float,
    ) -> None:
        self._probes = probes
        self._listener = listener
        self._find = find
        self._handshake_timeout = handshake_timeout
        self._link_wait = link_wait
        self._pending: set[_Pending] = set()
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closing = False
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="data-port", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._listener.getsockname()[1])

    def ranks_changed(self) -> None:
        """A rank said hello or ended: look at the held connections again."""
        if not self._closing:
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Stop listening and close what was not handed over."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        for pending in list(self._pending):
            self._drop(pending)
        self._selector.close()
        self._listener.close()
        os.close(self._wake)

    def _run(self) -> None:
        while not self._closing:
            timeout = None
            if self._pending:
                nearest = min(pending.deadline for pending in self._pending)
                timeout = max(0.0, nearest - time.monotonic())
            for key, _ in self._selector.select(timeout):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj == self._wake:
                    os.eventfd_read(self._wake)
                    for pending in list(self._pending):
                        if pending.waits_for is not None:
                            self._decide(pending)
                else:
                    self._read(key.data)
            now = time.monotonic()
            for pending in [entry for entry in self._pending if entry.deadline <= now]:
                if pending.waits_for is None:
                    logger.info("data connection from %s: no handshake in time", pending.peer)
                    self._drop(pending)
                else:
                    self._refuse(
                        pending,
                        404,
                        f"rank {pending.waits_for[1]} did not get ready within "
                        f"{self._link_wait:g} s",
                    )

    def _accept(self) -> None:
        while True:
            try:
                connection, peer = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # out of descriptors, or the dialler is gone already
                logger.warning("a data connection was lost at the door: %s", error)
                return
            if len(self._pending) >= MAX_PENDING:
                connection.close()
                continue
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pending = _Pending(
                connection=connection,
                peer=format_address(str(peer[0]).removeprefix("::ffff:"), int(peer[1])),
                deadline=time.monotonic() + self._handshake_timeout,
            )
            self._pending.add(pending)
            self._selector.register(connection, selectors.EVENT_READ, pending)

    def _read(self, pending: _Pending) -> None:
        try:
            data = pending.connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data and pending.waits_for is not None:
            self._drop(pending)  # the dialler gave up waiting
            return
        pending.handshake.feed(data)
        if pending.handshake.response is not None:
            logger.info("data connection from %s: not a data link's handshake", pending.peer)
            self._answer(pending, pending.handshake.response)
            self._drop(pending)
        elif not data:
            self._drop(pending)
        elif pending.handshake.request is not None and pending.waits_for is None:
            self._decide(pending)

    def _decide(self, pending: _Pending) -> None:
        """Hand a complete request over, refuse it, or hold it."""
        request = pending.handshake.request
        assert request is not None
        if request.channel == "probe":
            refusal = self._probes.refusal(pending.handshake.secret)
            if refusal is not None:
                self._refuse(pending, *refusal)
            elif self._let_in(pending):
                self._probes.take(pending.connection, pending.handshake.leftover, pending.peer)
            return
        target = self._find(request.attempt)
        if target is None:
            self._refuse(pending, 404, f"no attempt {request.attempt} runs on this node")
            return
        if not same_secret(pending.handshake.secret, target.plan.secret):
            self._refuse(pending, 401, "wrong secret")
            return
        if request.job != target.plan.job:
            self._refuse(pending, 404, f"attempt {request.attempt} is not of job {request.job}")
            return
        if request.epoch != target.plan.epoch:
            self._refuse(
                pending, 409, f"epoch {request.epoch} was asked for, this is {target.plan.epoch}"
            )
            return
        try:
            rank = global_rank(request)
        except ValueError as error:
            self._refuse(pending, 404, str(error))
            return
        if rank not in target.live_ranks:
            self._refuse(pending, 404, f"rank {rank} does not run on this node")
            return
        connection = target.connections.get(rank)
        if connection is None or connection.ended.is_set():
            if pending.waits_for is None:
                pending.waits_for = (request.attempt, rank)
                pending.deadline = time.monotonic() + self._link_wait
            return
        self._hand_over(pending, request, connection)

    def _let_in(self, pending: _Pending) -> bool:
        """Whether the dialler got its good answer; then its connection is no longer held here."""
        try:
            accepted = self._answer(pending, pending.handshake.accept())
        except ProtocolError as error:
            logger.info("data connection from %s: %s", pending.peer, error)
            self._answer(pending, pending.handshake.response or b"")
            accepted = False
        if not accepted:
            self._drop(pending)
            return False
        self._pending.discard(pending)
        self._selector.unregister(pending.connection)
        return True

    def _hand_over(self, pending: _Pending, request: LinkRequest, rank: RankConnection) -> None:
        if self._let_in(pending):
            rank.send(
                RankLink(request=request, unread=pending.handshake.leftover.decode("latin-1")),
                pending.connection,
            )

    def _refuse(self, pending: _Pending, status: int, text: str) -> None:
        request = pending.handshake.request
        assert request is not None
        logger.warning(
            "data connection from %s refused (%d %s): job %s, attempt %s, group %s, epoch %d, "
            "rank %d to rank %d",
            pending.peer,
            status,
            text,
            request.job,
            request.attempt,
            request.group,
            request.epoch,
            request.dialler,
            request.target,
        )
        self._answer(pending, pending.handshake.refuse(status, text))
        self._drop(pending)

    def _answer(self, pending: _Pending, answer: bytes) -> bool:
        """Send an answer: it is the first thing on the connection, so its buffer is empty."""
        try:
            return pending.connection.send(answer) == len(answer)
        except OSError as error:
            logger.info("data connection from %s: %s", pending.peer, error)
            return False

    def _drop(self, pending: _Pending) -> None:
        self._pending.discard(pending)
        self._selector.unregister(pending.connection)
        pending.connection.close()
