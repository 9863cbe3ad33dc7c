"""The agent's one WebSocket to the control plane: kept up for ever, with everything spooled."""

from __future__ import annotations

import logging
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

from collective.messages import (
    AGENT_PROTOCOL,
    MAX_MESSAGE,
    Ack,
    AgentHello,
    BadMessage,
    Fenced,
    Heartbeat,
    Message,
    Welcome,
    decode,
    encode,
)
from worker.control import ControlPlane, Unreachable
from worker.errors import Refused
from worker.settings import Settings
from worker.spool import Spool

__all__ = ["Connection", "CredentialDead"]

logger = logging.getLogger(__name__)


class CredentialDead(Refused):
    """The control plane does not know this node's credential (any more)."""


class Connection:
    """Runs in the calling thread of `run`; sends from threads of its own.

    Args:
        credential: the node's credential.
        hello: makes the first message, given the agent's own address on this connection.
        welcomed: a `Welcome` has come.
        received: any other message.
    """

    def __init__(
        self,
        control: ControlPlane,
        *,
        credential: str,
        settings: Settings,
        spool: Spool,
        hello: Callable[[str], AgentHello],
        welcomed: Callable[[Welcome], None],
        received: Callable[[Message], None],
    ) -> None:
        self._control = control
        self._credential = credential
        self._settings = settings
        self._spool = spool
        self._hello = hello
        self._welcomed = welcomed
        self._received = received
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._socket: ClientConnection | None = None
        #: whether the control plane has ever welcomed this process
        self.was_welcome = False

    # -- used by others

    def send(self, message: Message) -> None:
        """Send a message that is not spooled; without a connection it is lost."""
        with self._lock:
            current = self._socket
        if current is not None:
            try:
                current.send(encode(message))
            except ConnectionClosed:
                logger.debug("%s was not sent: the connection is down", message.TYPE)

    @property
    def connected(self) -> bool:
        """Whether the control plane can be told something at this moment."""
        with self._lock:
            return self._socket is not None

    def stop(self) -> None:
        """Leave: close the connection, if there is one, and let `run` return."""
        self._stopping.set()
        with self._lock:
            current = self._socket
        if current is not None:
            current.close(1000, "leaving")

    # -- the loop

    def run(self) -> None:
        """Connect, again and again, until `stop`.

        Raises:
            Refused: fenced off, or the credential is dead.
        """
        wait = self._settings.reconnect_first
        told: str | None = None
        while not self._stopping.is_set():
            since = time.monotonic()
            reason = self._once()
            if self._stopping.is_set():
                return
            if time.monotonic() - since > self._settings.reconnect_longest:
                wait = self._settings.reconnect_first
            if reason != told:
                told = reason
                logger.warning("%s; trying again until it answers", reason)
            self._stopping.wait(wait * random.uniform(0.5, 1.0))
            wait = min(self._settings.reconnect_longest, wait * 2)

    def _once(self) -> str:
        """One connection from start to end; returns why it ended."""
        try:
            raw = None if self._control.uses_proxy else self._dial()
            with connect(
                self._control.agent_url,
                sock=raw,
                additional_headers={"Authorization": f"Bearer {self._credential}"},
                subprotocols=[Subprotocol(AGENT_PROTOCOL)],
                compression=None,
                proxy=True if self._control.uses_proxy else None,
                open_timeout=self._settings.connect_timeout,
                close_timeout=2.0,
                # A busy control plane may be late with a pong; whether its machine lives, the
                # kernel finds out (TCP_USER_TIMEOUT).
                ping_interval=None,
                max_size=4 * MAX_MESSAGE,
            ) as websocket:
                self._tune(websocket.socket)
                return self._converse(websocket)
        except Unreachable as error:
            return str(error)
        except InvalidStatus as error:
            if error.response.status_code in (401, 403):
                raise CredentialDead(
                    f"{self._control.url} does not know this node's credential: the node was "
                    "removed; join again with a new token"
                ) from None
            return f"{self._control.url} answered {error.response.status_code}"
        except BadMessage as error:
            return f"{self._control.url} speaks another protocol: {error}"
        except (InvalidHandshake, ConnectionClosed, OSError) as error:
            reason = str(error) or type(error).__name__
            return f"no connection to {self._control.url}: {reason}{self._control.proxy_note}"

    def _dial(self) -> socket.socket:
        return self._control.connect(self._settings.connect_timeout)

    def _tune(self, raw: socket.socket) -> None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        raw.setsockopt(
            socket.IPPROTO_TCP,
            socket.TCP_USER_TIMEOUT,
            int(self._settings.unacknowledged_timeout * 1000),
        )

    def _converse(self, websocket: ClientConnection) -> str:
        own = str(websocket.socket.getsockname()[0])
        websocket.send(encode(self._hello(own)))
        answer = decode(websocket.recv(self._settings.connect_timeout))
        if isinstance(answer, Fenced):
            raise Refused(f"the control plane fenced this agent off: {answer.reason}")
        if not isinstance(answer, Welcome):
            return f"{self._control.url} answered {answer.TYPE} to agent_hello"
        closed = threading.Event()
        self.was_welcome = True
        self._spool.acknowledge(answer.acknowledged)
        websocket.send(encode(Heartbeat(at=time.time())))
        threads = [
            threading.Thread(
                target=self._beat, args=(websocket, answer.heartbeat, closed), name="heartbeat"
            ),
            threading.Thread(
                target=self._send_spool, args=(websocket, answer.acknowledged, closed), name="spool"
            ),
        ]
        with self._lock:
            self._socket = websocket
        for thread in threads:
            thread.start()
        try:
            if self._stopping.is_set():
                return "leaving"
            self._welcomed(answer)
            for text in websocket:
                message = decode(text)
                if isinstance(message, Ack):
                    self._spool.acknowledge(message.number)
                elif isinstance(message, Fenced):
                    raise Refused(f"the control plane fenced this agent off: {message.reason}")
                else:
                    self._received(message)
            return f"the control plane at {self._control.url} closed the connection"
        finally:
            with self._lock:
                self._socket = None
            closed.set()
            self._spool.wake()
            websocket.close()
            for thread in threads:
                thread.join()

    def _beat(self, websocket: ClientConnection, interval: float, closed: threading.Event) -> None:
        while not closed.wait(interval):
            try:
                websocket.send(encode(Heartbeat(at=time.time())))
            except ConnectionClosed:
                return

    def _send_spool(
        self, websocket: ClientConnection, acknowledged: int, closed: threading.Event
    ) -> None:
        """Send entries in order; never more under way than the window holds."""
        under_way: deque[tuple[int, int]] = deque()
        waiting_bytes = 0
        try:
            for number, text in self._spool.entries(acknowledged, closed):
                size = len(text)
                while under_way and (
                    under_way[0][0] <= self._spool.acknowledged
                    or len(under_way) >= self._settings.window_entries
                    or waiting_bytes + size > self._settings.window_bytes
                ):
                    self._spool.wait(under_way[0][0], closed)
                    if closed.is_set():
                        return
                    waiting_bytes -= under_way.popleft()[1]
                websocket.send(text)
                under_way.append((number, size))
                waiting_bytes += size
        except ConnectionClosed:
            return
