"""The nodes as they are now: connections, devices, who was last heard of when."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from sqlalchemy import select
from sqlalchemy.orm import Session

from api.events import Channel, Hub
from api.models import Node
from api.placement import Offer
from api.settings import Settings
from api.storage import Storage, StorageUnavailable
from collective.messages import (
    AgentHello,
    AttemptStatus,
    Device,
    Fenced,
    Message,
    encode,
    from_plain,
)

log = logging.getLogger("unisono.cluster")

#: superseded incarnations that a node's row remembers
_SUPERSEDED = 32


class Connection:
    """The open channel of one agent: messages to send, and whether it was replaced."""

    def __init__(self, incarnation: str, token_id: str) -> None:
        self.incarnation = incarnation
        #: the credential with which it was opened
        self.token_id = token_id
        #: messages as text; None closes
        self.outgoing: asyncio.Queue[str | None] = asyncio.Queue()
        #: set when the connection must end for good
        self.fenced: str | None = None

    def send(self, message: Message | str) -> None:
        """Queue a message, or the text of one that goes to many."""
        self.outgoing.put_nowait(message if isinstance(message, str) else encode(message))

    def fence(self, reason: str) -> None:
        """Tell the agent to stop for good, and close."""
        self.fenced = reason
        self.send(Fenced(reason=reason))
        self.close()

    def close(self) -> None:
        """Close once everything queued is sent."""
        self.outgoing.put_nowait(None)


@dataclass
class NodeState:
    """One node in memory."""

    id: str
    agent_id: str
    name: str
    hostname: str
    joined_at: float
    draining: bool = False
    online: bool = False
    #: its agent is ending, and will not be back before its next hello
    leaving: bool = False
    last_seen_at: float | None = None
    #: monotonic
    heard: float = float("-inf")
    connection: Connection | None = None
    incarnation: str | None = None
    superseded: list[str] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)
    data_port: int = 0
    devices: list[Device] = field(default_factory=list)
    envs: list[str] = field(default_factory=list)
    version: str = ""
    cores: int = 0
    memory_bytes: int = 0
    core_set: str = ""
    #: job that holds each device
    held: dict[int, str] = field(default_factory=dict)
    #: server's time − node's time, as seen at heartbeats; the least one has the least delay in it
    skews: deque[float] = field(default_factory=lambda: deque(maxlen=16))

    @property
    def skew(self) -> float:
        """Seconds to add to the node's clock to get this server's."""
        return min(self.skews) if self.skews else 0.0

    def facts(self) -> dict[str, Any]:
        """What is stored of the last hello."""
        names = ("addresses", "data_port", "envs", "version", "cores", "memory_bytes", "core_set")
        return {name: getattr(self, name) for name in (*names, "superseded")} | {
            "devices": [asdict(device) for device in self.devices]
        }

    def offer(self) -> Offer:
        """What the node could give to a job now."""
        free: dict[str, list[int]] = {}
        for device in self.devices:
            if device.index not in self.held and device.busy is None:
                free.setdefault(device.kind, []).append(device.index)
        closed = (
            "offline"
            if not self.online or self.connection is None
            else "draining"
            if self.draining
            else "leaving"
            if self.leaving
            else None
        )
        return Offer(self.name, free, len(self.devices), tuple(self.envs), closed)

    def shown(self) -> dict[str, Any]:
        """The node as REST and pages show it."""
        return {
            "id": self.id,
            "name": self.name,
            "hostname": self.hostname,
            "state": "online" if self.online else "offline",
            "connected": self.connection is not None,
            "draining": self.draining,
            "addresses": self.addresses,
            "data_port": self.data_port,
            "version": self.version,
            "cores": self.cores,
            "memory_bytes": self.memory_bytes,
            "envs": self.envs,
            "last_seen_at": self.last_seen_at,
            "joined_at": self.joined_at,
            "devices": [
                asdict(device) | {"job": self.held.get(device.index)} for device in self.devices
            ],
        }


class JobShown(Protocol):
    """A job, for the cluster's event stream."""

    id: str

    def shown_short(self) -> dict[str, Any]:
        """The job as lists show it."""


class Cluster:
    """All nodes that have not been removed."""

    def __init__(self, settings: Settings, storage: Storage, hub: Hub) -> None:
        self._settings = settings
        self._storage = storage
        self.by_id: dict[str, NodeState] = {}
        self.changed: set[str] = set()
        self.removed: list[str] = []
        #: changed jobs, for the cluster's event stream
        self.jobs: dict[str, JobShown] = {}
        self.channel = Channel(hub, self._compose)
        #: called with a node that has just been found to be offline
        self.on_offline: Callable[[NodeState], None] = lambda node: None
        #: called when devices or availability changed
        self.on_capacity: Callable[[], None] = lambda: None
        self._watch: asyncio.Task[None] | None = None

    # --- life ---------------------------------------------------------------------------

    async def load(self) -> None:
        """Read the nodes from the database."""
        rows = await self._storage.read(
            lambda s: s.scalars(
                select(Node).where(Node.removed_at.is_(None)).order_by(Node.joined_at)
            ).all()
        )
        for row in rows:
            self.by_id[row.id] = _state(row)

    def start(self) -> None:
        """Begin to watch for nodes that fall silent."""
        self._watch = asyncio.create_task(self._watch_silence(), name="node-watch")

    async def stop(self) -> None:
        """End the watch and store when each node was last heard of."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        for node in self.by_id.values():
            if node.connection is not None:
                node.connection.close()

    async def _watch_silence(self) -> None:
        """Find nodes without a message for a whole timeout in which this process was awake.

        This task's own lateness is the measure of a stall: messages that arrived meanwhile are
        still unread, and agents whose connections broke need time to come back.
        """
        timeout = self._settings.node_timeout
        interval = timeout / 10
        awake_since = time.monotonic()
        while True:
            due = time.monotonic() + interval
            await asyncio.sleep(interval)
            now = time.monotonic()
            if now - due > interval:
                log.warning(
                    "this server stood still for %.1f s: nodes get a new timeout", now - due
                )
                awake_since = now
            for node in list(self.by_id.values()):
                if node.online and now - max(node.heard, awake_since) > timeout:
                    node.online = False
                    self.touch(node)
                    log.warning("node %s is offline: silent for %.1f s", node.name, timeout)
                    self.on_offline(node)

    # --- lookups ------------------------------------------------------------------------

    def by_name(self, name: str) -> NodeState | None:
        """The node of that name."""
        return next((node for node in self.by_id.values() if node.name == name), None)

    def named(self) -> dict[str, NodeState]:
        """All nodes by name."""
        return {node.name: node for node in self.by_id.values()}

    def offers(self) -> list[Offer]:
        """What all nodes could give now, by name, so that w2 is before w10."""
        nodes = sorted(self.by_id.values(), key=lambda node: natural(node.name))
        return [node.offer() for node in nodes]

    def send(self, node_id: str, message: Message | str) -> None:
        """Send to a node; without a connection nothing is sent: its next hello settles all."""
        node = self.by_id.get(node_id)
        if node is not None and node.connection is not None:
            node.connection.send(message)

    # --- changes ------------------------------------------------------------------------

    def touch(self, node: NodeState) -> None:
        """A node changed: tell the pages."""
        if self.channel.wanted:
            self.changed.add(node.id)
        self.channel.touch()

    def heard(self, node: NodeState) -> None:
        """A message came from a node."""
        node.heard = time.monotonic()
        node.last_seen_at = time.time()

    def attach(self, node: NodeState, hello: AgentHello, token_id: str) -> Connection | str:
        """Take in a hello; the new connection, or why the agent is refused for good."""
        if hello.agent_id != node.agent_id:
            return f"this credential belongs to another agent than {hello.agent_id}"
        if hello.incarnation in node.superseded:
            return "a newer start of this agent has taken its place"
        old = node.connection
        if old is not None:
            if old.incarnation == hello.incarnation:
                old.close()
            else:
                old.fence("a newer start of this agent has connected")
        if node.incarnation is not None and node.incarnation != hello.incarnation:
            node.superseded = [*node.superseded, node.incarnation][-_SUPERSEDED:]
        node.incarnation = hello.incarnation
        node.connection = Connection(hello.incarnation, token_id)
        node.online, node.leaving = True, False
        self.heard(node)
        node.skews.clear()
        node.hostname = hello.hostname
        node.addresses = hello.addresses
        node.data_port = hello.data_port
        node.devices = hello.devices
        node.envs = hello.envs
        node.version = hello.version
        node.cores = hello.cores
        node.memory_bytes = hello.memory_bytes
        node.core_set = hello.core_set
        self.touch(node)
        return node.connection

    async def store(self, node: NodeState) -> None:
        """Store what the node's last hello said."""
        facts, hostname = node.facts(), node.hostname
        incarnation, seen = node.incarnation, node.last_seen_at

        def work(session: Session) -> None:
            row = session.get_one(Node, node.id)
            row.facts, row.hostname = facts, hostname
            row.incarnation, row.last_seen_at = incarnation, seen

        try:
            await self._storage.write(work)
        except StorageUnavailable as error:
            # The agent must get in all the same: its next hello is stored.
            log.error("what node %s said of itself is not stored: %s", node.name, error)

    def detach(self, node: NodeState, connection: Connection) -> None:
        """A connection ended."""
        if node.connection is connection:
            node.connection = None
            self.touch(node)
            self.on_capacity()

    def leaving(self, node: NodeState) -> None:
        """A node's agent is ending: no more jobs for it."""
        node.leaving = True
        self.touch(node)

    def end_credential(self, token_id: str) -> None:
        """Close the channel of an agent whose credential is dead."""
        for node in self.by_id.values():
            if node.connection is not None and node.connection.token_id == token_id:
                node.connection.fence("this node's credential was revoked")

    def hold(self, name: str, devices: list[int], job: str) -> None:
        """Give devices of a node to a job."""
        node = self.by_name(name)
        if node is not None:
            node.held.update(dict.fromkeys(devices, job))
            self.touch(node)

    def release(self, job: str) -> None:
        """Take all devices back from a job."""
        for node in self.by_id.values():
            kept = {index: holder for index, holder in node.held.items() if holder != job}
            if len(kept) != len(node.held):
                node.held = kept
                self.touch(node)
        self.on_capacity()

    def drop(self, node: NodeState) -> None:
        """Forget a removed node and close its connection."""
        del self.by_id[node.id]
        if node.connection is not None:
            node.connection.fence("this node was removed from the cluster")
            node.connection = None
        if self.channel.wanted:
            self.removed.append(node.name)
        self.channel.touch()

    # --- events -------------------------------------------------------------------------

    def touch_job(self, job: JobShown) -> None:
        """A job changed: tell the pages."""
        if self.channel.wanted:
            self.jobs[job.id] = job
        self.channel.touch()

    def _compose(self) -> dict[str, Any] | None:
        payload: dict[str, Any] = {}
        nodes = [self.by_id[key].shown() for key in self.changed if key in self.by_id]
        if nodes:
            payload["nodes"] = nodes
        if self.removed:
            payload["nodes_removed"] = self.removed
        if self.jobs:
            payload["jobs"] = [job.shown_short() for job in self.jobs.values()]
        self.changed, self.removed, self.jobs = set(), [], {}
        return payload or None


def natural(name: str) -> list[tuple[int, str]]:
    """A sort key under which numbers in names count as numbers."""
    parts = re.split(r"([0-9]+)", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _state(row: Node) -> NodeState:
    facts = dict(row.facts)
    devices = [from_plain(Device, entry) for entry in facts.pop("devices", [])]
    return NodeState(
        row.id,
        row.agent_id,
        row.name,
        row.hostname,
        row.joined_at,
        draining=row.draining,
        last_seen_at=row.last_seen_at,
        incarnation=row.incarnation,
        devices=devices,
        **facts,
    )


def status_of(hello: AgentHello, attempt: str) -> AttemptStatus | None:
    """What an agent says that it holds of an attempt."""
    return next((entry for entry in hello.attempts if entry.attempt == attempt), None)
