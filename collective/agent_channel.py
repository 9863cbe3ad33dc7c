"""The rank's end of the Unix socket to its node's agent: the plan, data links, what is reported.

Standard library only.  A rank is never held up by its agent: what does not fit the queue is
dropped and counted.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping

from collective.errors import RendezvousFailed
from collective.messages import (
    MAX_MESSAGE,
    RANK_PROTOCOL,
    BadMessage,
    LinkRequest,
    Message,
    Plan,
    RankHello,
    RankLink,
    RankPlan,
    decode,
    encode,
)

__all__ = ["AgentChannel"]

logger = logging.getLogger(__name__)

#: what waits for the agent is at most this much
QUEUE_BYTES = 4 << 20
_LENGTH = struct.Struct("!I")
#: one message carries one descriptor; several messages may be read at once
_DESCRIPTORS = 64

LinkCallback = Callable[[LinkRequest, socket.socket, bytes], None]

_channels: weakref.WeakSet[AgentChannel] = weakref.WeakSet()


class AgentChannel:
    """Connected to the agent; all methods may be called from any thread.

    In a forked child the channel is closed: it belongs to the process that opened it.
    """

    def __init__(self, path: str, attempt: str, rank: int, token: str) -> None:
        """Connect and say hello.

        Raises:
            RendezvousFailed: no agent listens at `path`.
        """
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise RendezvousFailed(
                f"the agent of this node does not answer at {path}: {error.strerror}"
            ) from None
        self._changed = threading.Condition()
        self._outgoing: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._plan: Plan | None = None
        self._on_link: LinkCallback | None = None
        self._early: deque[tuple[LinkRequest, socket.socket, bytes]] = deque()
        self._gone: str | None = None
        self._closing = False
        self._forked = False
        #: messages that were dropped because the agent did not take them in time
        self.dropped = 0
        hello = RankHello(
            protocol=RANK_PROTOCOL, attempt=attempt, rank=rank, token=token, pid=os.getpid()
        )
        with self._changed:
            self._queue(hello)
        self._threads = [
            threading.Thread(target=self._write, name="unisono-agent-writer", daemon=True),
            threading.Thread(target=self._read, name="unisono-agent-reader", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        _channels.add(self)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> AgentChannel | None:
        """The channel that the environment names, or None outside a job.

        Raises:
            RendezvousFailed: the environment names an agent that does not answer.
        """
        values = os.environ if environment is None else environment
        path = values.get("UNISONO_AGENT_SOCKET")
        if not path:
            return None
        try:
            return cls(
                path,
                values["UNISONO_ATTEMPT"],
                int(values["RANK"]),
                values["UNISONO_RANK_TOKEN"],
            )
        except (KeyError, ValueError) as error:
            raise RendezvousFailed(
                f"UNISONO_AGENT_SOCKET is set, but the job's environment is incomplete: {error}"
            ) from None

    # -- from the agent

    def plan(self, timeout: float = 30.0) -> Plan:
        """The plan of this attempt.

        Raises:
            RendezvousFailed: the agent is gone, refused this rank, or did not answer in time.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._plan is not None or self._gone, timeout)
            if self._plan is not None:
                return self._plan
            if self._gone is not None:
                raise RendezvousFailed(f"no plan from the agent: {self._gone}")
            raise RendezvousFailed(f"the agent sent no plan within {timeout:g} s")

    def on_link(self, callback: LinkCallback) -> None:
        """Have each data connection to this rank delivered: its request, socket and unread bytes.

        Connections that came before are delivered at once, in this thread; later ones in the
        reading thread.  The callback owns the socket.
        """
        with self._changed:
            self._on_link = callback
            early = list(self._early)
            self._early.clear()
        for link in early:
            callback(*link)

    def _read(self) -> None:
        received = bytearray()
        descriptors: deque[int] = deque()
        reason = "it closed the connection (its log says why)"
        try:
            while True:
                data, fds, _, _ = socket.recv_fds(self._socket, 1 << 16, _DESCRIPTORS)
                descriptors.extend(fds)
                if not data:
                    break
                received += data
                while (body := _next_frame(received)) is not None:
                    self._take(decode(body), descriptors)
        except OSError as error:
            reason = error.strerror or str(error)
        except BadMessage as error:
            reason = f"it speaks another protocol: {error}"
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
            with self._changed:
                self._gone = self._gone or reason
                self._changed.notify_all()

    def _take(self, message: Message, descriptors: deque[int]) -> None:
        if isinstance(message, RankPlan):
            with self._changed:
                self._plan = message.plan
                self._changed.notify_all()
        elif isinstance(message, RankLink):
            if not descriptors:
                raise BadMessage("a rank_link came without its descriptor")
            connection = socket.socket(fileno=descriptors.popleft())
            link = (message.request, connection, message.unread.encode("latin-1"))
            with self._changed:
                callback = self._on_link
                if callback is None:
                    self._early.append(link)
            if callback is not None:
                callback(*link)
        else:
            raise BadMessage(f"an agent does not send {message.TYPE}")

    # -- to the agent

    def send(self, message: Message) -> bool:
        """Queue a message; False, and counted in `dropped`, if there is no room or no agent."""
        with self._changed:
            if self._closing or self._forked:
                return False
            return self._queue(message)

    def _queue(self, message: Message) -> bool:
        body = encode(message).encode("utf-8", "replace")
        if (
            self._gone is not None
            or len(body) > MAX_MESSAGE
            or self._waiting_bytes + len(body) > QUEUE_BYTES
        ):
            self.dropped += 1
            return False
        self._outgoing.append(_LENGTH.pack(len(body)) + body)
        self._waiting_bytes += len(body)
        self._changed.notify_all()
        return True

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._outgoing or self._closing or self._gone)
                if self._gone is not None or not self._outgoing:
                    break
                frame = self._outgoing[0]
            try:
                self._socket.sendall(frame)
            except OSError as error:
                with self._changed:
                    self._gone = self._gone or error.strerror or str(error)
                break
            with self._changed:
                self._outgoing.popleft()
                self._waiting_bytes -= len(frame) - _LENGTH.size
                self._changed.notify_all()
        with self._changed:
            self.dropped += len(self._outgoing)
            self._outgoing.clear()
            self._waiting_bytes = 0
            self._changed.notify_all()

    def close(self, timeout: float = 5.0) -> None:
        """Send what is queued, for at most `timeout` seconds, and close."""
        if self._forked:
            return
        deadline = time.monotonic() + timeout
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: not self._outgoing, max(0.0, deadline - time.monotonic())
            )
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the agent was faster
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.1, deadline - time.monotonic()))
        self._socket.close()
        with self._changed:
            early = list(self._early)
            self._early.clear()
        for _, connection, _ in early:
            connection.close()
        _channels.discard(self)

    def _forget(self) -> None:
        """In a forked child: let go of the descriptors, without a word to the agent."""
        self._forked = True
        self._changed = threading.Condition()  # the parent's may have been held at the fork
        self._gone = "this process was forked from the rank"
        self._outgoing.clear()
        self._socket.close()
        for _, connection, _ in self._early:
            connection.close()
        self._early.clear()


def _next_frame(received: bytearray) -> bytes | None:
    if len(received) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(received)
    if length > MAX_MESSAGE:
        raise BadMessage(f"a message of {length} bytes; at most {MAX_MESSAGE} are allowed")
    if len(received) < _LENGTH.size + length:
        return None
    body = bytes(received[_LENGTH.size : _LENGTH.size + length])
    del received[: _LENGTH.size + length]
    return body


def _after_fork() -> None:
    for channel in list(_channels):
        channel._forget()
    _channels.clear()


os.register_at_fork(after_in_child=_after_fork)
