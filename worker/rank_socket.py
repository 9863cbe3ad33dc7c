"""The Unix socket on which the ranks of a node speak to their agent.

A frame is four bytes of length, big-endian, and JSON (`collective.messages`).  Who connects must
run as the agent's own user and know its attempt's token.
"""

from __future__ import annotations

import hmac
import logging
import os
import queue
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from collective.messages import (
    MAX_MESSAGE,
    RANK_PROTOCOL,
    BadMessage,
    Message,
    RankHello,
    RankPlan,
    decode,
    encode,
)

__all__ = ["RankConnection", "RankOwner", "RankSocket"]

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("!I")
_CREDENTIALS = struct.Struct("3i")
#: a connection that does not say hello is closed; seconds
_HELLO_TIMEOUT = 10.0


class RankConnection:
    """One rank's connection after its hello."""

    def __init__(self, connection: socket.socket, hello: RankHello) -> None:
        self.attempt = hello.attempt
        self.rank = hello.rank
        self.pid = hello.pid
        self._socket = connection
        self._lock = threading.Lock()
        self._stopped = False
        self._outgoing: queue.SimpleQueue[tuple[bytes, socket.socket | None] | None] = (
            queue.SimpleQueue()
        )
        #: set when the rank's side has closed and all it sent was handled
        self.ended = threading.Event()

    def send(self, message: Message, passed: socket.socket | None = None) -> None:
        """Queue a message, with the descriptor of a socket that the rank takes over."""
        body = encode(message).encode()
        with self._lock:
            if not self._stopped:
                self._outgoing.put((_LENGTH.pack(len(body)) + body, passed))
                return
        if passed is not None:
            passed.close()

    def write_all(self) -> None:
        """Send what is queued until `stop`: the body of the connection's writing thread."""
        while (item := self._outgoing.get()) is not None:
            frame, passed = item
            try:
                if passed is None:
                    self._socket.sendall(frame)
                else:
                    sent = socket.send_fds(self._socket, [frame], [passed.fileno()])
                    self._socket.sendall(frame[sent:])
            except OSError:
                self.ended.wait()  # the reader finds the same end; nothing can be sent any more
            finally:
                if passed is not None:
                    passed.close()

    def stop(self) -> None:
        """End the writing thread; what is sent from now on goes nowhere."""
        with self._lock:
            self._stopped = True
            self._outgoing.put(None)


class RankOwner(Protocol):
    """What a rank's connection belongs to: its attempt."""

    token: str

    def connected(self, connection: RankConnection) -> None:
        """The rank was let in."""

    def received(self, connection: RankConnection, message: Message) -> None:
        """A message of the rank; raises `BadMessage` for one that ranks may not send."""

    def disconnected(self, connection: RankConnection) -> None:
        """The connection ended."""


class RankSocket:
    """Accepts ranks and hands their messages to their owners.

    Args:
        path: where the socket is made.
        welcome: the owner and the plan of the rank that says hello, or None if there is no such
            rank here; the token is checked afterwards.
    """

    def __init__(
        self,
        path: Path,
        *,
        welcome: Callable[[RankHello], tuple[RankOwner, RankPlan] | None],
    ) -> None:
        self.path = path
        self._welcome = welcome
        path.unlink(missing_ok=True)  # of an agent that was killed; the state folder's lock is ours
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen(128)
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._closing = False
        self._accepting = threading.Thread(target=self._accept, name="rank-socket", daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            with self._lock:
                if self._closing:
                    connection.close()
                    return
                self._connections.add(connection)
                self._threads.add(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        rank: RankConnection | None = None
        owner: RankOwner | None = None
        writer: threading.Thread | None = None
        try:
            admitted = self._admit(connection)
            if admitted is None:
                return
            rank, owner = admitted
            writer = threading.Thread(target=rank.write_all, name="rank-writer", daemon=True)
            writer.start()
            owner.connected(rank)
            while (message := _read(connection)) is not None:
                owner.received(rank, message)
        except BadMessage as error:
            logger.warning("a rank's connection is closed: %s", error)
        except OSError as error:
            logger.debug("a rank's connection broke: %s", error)
        finally:
            if rank is not None and owner is not None:
                rank.ended.set()
                rank.stop()
                owner.disconnected(rank)
            connection.close()
            if writer is not None:
                writer.join()
            with self._lock:
                self._connections.discard(connection)
                self._threads.discard(threading.current_thread())

    def _admit(self, connection: socket.socket) -> tuple[RankConnection, RankOwner] | None:
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(raw)
        if uid != os.getuid():
            logger.warning("process %d of user %d may not use the ranks' socket", pid, uid)
            return None
        connection.settimeout(_HELLO_TIMEOUT)
        hello = _read(connection)
        if not isinstance(hello, RankHello):
            raise BadMessage(f"process {pid} did not begin with rank_hello")
        if hello.protocol != RANK_PROTOCOL:
            raise BadMessage(
                f"rank {hello.rank} speaks protocol {hello.protocol}, this agent {RANK_PROTOCOL}: "
                "install the same version of unisono in the job's Python"
            )
        answer = self._welcome(hello)
        if answer is None:
            raise BadMessage(f"no rank {hello.rank} of attempt {hello.attempt} runs here")
        owner, plan = answer
        if not hmac.compare_digest(hello.token.encode(), owner.token.encode()):
            raise BadMessage(f"wrong token for rank {hello.rank} of attempt {hello.attempt}")
        connection.settimeout(None)
        rank = RankConnection(connection, hello)
        rank.send(plan)
        return rank, owner

    def close(self) -> None:
        """Close the listener and all connections."""
        with self._lock:
            self._closing = True
            connections, threads = list(self._connections), list(self._threads)
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # its rank was faster
        for thread in [self._accepting, *threads]:
            thread.join()
        self.path.unlink(missing_ok=True)


def _read(connection: socket.socket) -> Message | None:
    """The next message, or None at the end of the stream."""
    head = _exactly(connection, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > MAX_MESSAGE:
        raise BadMessage(f"a message of {length} bytes; at most {MAX_MESSAGE} are allowed")
    body = _exactly(connection, length)
    return None if body is None else decode(body)


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            return None
        data += part
    return bytes(data)
