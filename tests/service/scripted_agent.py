"""An agent that does what a test tells it: the real protocol on a real socket, no processes.

It stands beside the agent of `worker`, so that the control plane's answers can be tested to the
letter, for sequences that a healthy agent never produces too.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from typing import Any, TypeVar

from control_plane import ControlPlane
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

from collective.messages import (
    AGENT_PROTOCOL,
    Ack,
    AgentHello,
    AttemptOver,
    AttemptStatus,
    Device,
    End,
    Failure,
    Heartbeat,
    Launch,
    LogChunk,
    Message,
    Metrics,
    Prepare,
    Prepared,
    Problem,
    RankState,
    Spooled,
    Steps,
    Welcome,
    decode,
    encode,
)

M = TypeVar("M", bound=Message)


class ScriptedAgent:
    """One node: joined at once, connected by `connect`."""

    def __init__(
        self,
        server: ControlPlane,
        name: str,
        devices: int = 2,
        *,
        agent_id: str | None = None,
        kind: str = "cpu",
    ) -> None:
        self.server = server
        self.agent_id = agent_id or uuid.uuid4().hex
        self.incarnation = uuid.uuid4().hex
        self.name = name
        self.devices = [
            Device(index=index, kind=kind, name=f"slot {index}")  # type: ignore[arg-type]
            for index in range(devices)
        ]
        self.socket: ClientConnection | None = None
        self._stack = contextlib.ExitStack()
        #: seconds by which this node's clock is ahead
        self.clock = 0.0
        self.number = 0
        self.acknowledged = 0
        #: spool entries that are not acknowledged yet
        self.spool: list[Spooled] = []
        self.held: dict[str, str] = {}
        self._unread: list[Message] = []
        with server.client("join") as client:
            answer = client.post(
                "/join", json={"agent_id": self.agent_id, "name": name, "hostname": "host"}
            )
        answer.raise_for_status()
        self.credential = str(answer.json()["credential"])

    # --- connection ---------------------------------------------------------------------

    def open(self) -> ClientConnection:
        """A connection without a hello, in place of the one before."""
        self.close()
        opening = connect(
            "ws" + self.server.url.removeprefix("http") + "/api/v1/agent",
            additional_headers={"Authorization": f"Bearer {self.credential}"},
            subprotocols=[Subprotocol(AGENT_PROTOCOL)],
            proxy=None,
            ping_interval=None,
            compression=None,
        )
        self.socket = self._stack.enter_context(opening)
        return self.socket

    def connect(self, timeout: float = 10.0) -> Welcome:
        """Connect, say hello, resend what is not acknowledged; the welcome."""
        self.open()
        self._unread.clear()
        self.send(self.hello())
        welcome = self.expect(Welcome, timeout)
        self.acknowledged = welcome.acknowledged
        self.spool = [entry for entry in self.spool if entry.number > welcome.acknowledged]
        self.beat()
        for entry in self.spool:
            self.send(entry)
        return welcome

    def hello(self) -> AgentHello:
        """What this agent says first."""
        return AgentHello(
            agent_id=self.agent_id,
            incarnation=self.incarnation,
            name=self.name,
            hostname="host",
            addresses=["127.0.0.1"],
            data_port=8701,
            devices=self.devices,
            envs=["train"],
            version="0.1.0",
            cores=4,
            memory_bytes=1 << 30,
            attempts=[
                AttemptStatus(attempt=attempt, state=state)  # type: ignore[arg-type]
                for attempt, state in self.held.items()
            ],
        )

    def close(self) -> None:
        """Close the connection."""
        self.socket = None
        self._stack.close()

    def send(self, message: Message) -> None:
        """Send a message."""
        assert self.socket is not None
        self.socket.send(encode(message))

    def beat(self) -> None:
        """Send a heartbeat."""
        self.send(Heartbeat(at=time.time() + self.clock))

    def receive(self, timeout: float = 10.0) -> Message:
        """The next message; heartbeats go on while it waits."""
        assert self.socket is not None
        deadline = time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise AssertionError(f"nothing came to {self.name} within {timeout:g} s")
            try:
                return decode(self.socket.recv(min(left, 0.2)))
            except TimeoutError:
                self.beat()

    def expect(self, kind: type[M], timeout: float = 10.0) -> M:
        """The next message of a kind; others are kept for later, acknowledgements noted."""
        for index, message in enumerate(self._unread):
            if isinstance(message, kind):
                del self._unread[index]
                return message
        deadline = time.monotonic() + timeout
        while True:
            message = self.receive(max(0.0, deadline - time.monotonic()))
            if isinstance(message, Ack):
                self.acknowledged = message.number
                self.spool = [entry for entry in self.spool if entry.number > message.number]
            if isinstance(message, kind):
                return message
            if not isinstance(message, Ack):
                self._unread.append(message)

    def synchronise(self, timeout: float = 10.0) -> None:
        """Until everything spooled is acknowledged."""
        while self.acknowledged < self.number:
            self.expect(Ack, timeout)

    # --- a job --------------------------------------------------------------------------

    def prepare(self, *problems: Problem, timeout: float = 10.0) -> Prepare:
        """Answer the next `Prepare`."""
        message = self.expect(Prepare, timeout)
        self.held[message.spec.attempt] = "prepared"
        self.send(
            Prepared(
                attempt=message.spec.attempt,
                problems=list(problems),
                python_version="3.11.7",
                torch_version="2.13.0",
                unisono_version="0.1.0",
                store_port=29500 if message.spec.hosts_store else None,
            )
        )
        return message

    def launch(self, timeout: float = 10.0) -> Launch:
        """Take the next `Launch` and say that all ranks of this node run."""
        message = self.expect(Launch, timeout)
        self.held[message.attempt] = "running"
        for member in message.plan.members:
            if member.node == self.name:
                self.put(
                    rank=RankState(
                        attempt=message.attempt, rank=member.rank, state="running", pid=4711
                    )
                )
        return message

    def put(self, **part: Any) -> Spooled:
        """Spool an entry, and send it where there is a connection."""
        self.number += 1
        entry = Spooled(number=self.number, at=time.time() + self.clock, **part)
        self.spool.append(entry)
        if self.socket is not None:
            self.send(entry)
        return entry

    def exit(
        self, attempt: str, rank: int, code: int | None = 0, signal: int | None = None
    ) -> None:
        """A rank ended."""
        self.put(
            rank=RankState(
                attempt=attempt, rank=rank, state="exited", exit_code=code, signal=signal
            )
        )

    def fail(
        self, attempt: str, rank: int, kind: str, message: str, culprit: int | None = None
    ) -> None:
        """A rank raised."""
        self.put(
            failure=Failure(
                attempt=attempt,
                rank=rank,
                kind=kind,
                message=message,
                traceback=f"Traceback (most recent call last):\n{kind}: {message}",
                culprit=culprit,
            )
        )

    def over(self, attempt: str) -> None:
        """Nothing is left of an attempt."""
        self.put(attempt_over=AttemptOver(attempt=attempt))
        self.held.pop(attempt, None)

    def say(self, attempt: str, rank: int, text: str, offset: int, stream: str = "stdout") -> int:
        """Output of a rank; where the next one starts."""
        size = len(text.encode())
        self.put(
            log=LogChunk(
                attempt=attempt,
                rank=rank,
                stream=stream,  # type: ignore[arg-type]
                offset=offset,
                text=text,
                size=size,
            )
        )
        return offset + size

    def steps(
        self,
        attempt: str,
        rank: int,
        first: int,
        count: int,
        *,
        total: float = 0.1,
        exposed: float = 0.02,
    ) -> None:
        """Timings of consecutive steps."""
        some = [0.0] * count
        self.put(
            steps=Steps(
                attempt=attempt,
                rank=rank,
                step=list(range(first, first + count)),
                at=[time.time()] * count,
                total=[total] * count,
                data=some,
                compute=[total - exposed] * count,
                exposed=[exposed] * count,
                optimizer=some,
                communication=[exposed] * count,
                waited=some,
                sent=[1024] * count,
                label=["step"] * count,
            )
        )

    def report(self, attempt: str, rank: int, step: int | None, **values: Any) -> None:
        """Metrics of a rank."""
        self.put(metrics=Metrics(attempt=attempt, rank=rank, step=step, values=values))

    def end(self, timeout: float = 10.0) -> End:
        """The next `End`."""
        return self.expect(End, timeout)
