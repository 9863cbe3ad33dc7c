"""The agent: puts a node's parts together and carries out what the control plane orders."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from collective.addresses import AddressError, choose_addresses
from collective.machine import core_set, cores
from collective.messages import (
    AgentHello,
    AttemptOver,
    AttemptStatus,
    Device,
    DevicesChanged,
    End,
    Launch,
    Message,
    Prepare,
    Prepared,
    Problem,
    RankHello,
    RankPlan,
    Welcome,
)
from worker import supervisor
from worker.attempt import Attempt, Node
from worker.bundles import Bundles
from worker.connection import Connection, CredentialDead
from worker.control import ControlPlane, Unreachable
from worker.data_port import DEFAULT_PORT, DataPort, Target, listen
from worker.devices import CpuSlots, discover, list_devices
from worker.errors import LocalProblem, Refused
from worker.interpreters import Interpreters
from worker.launcher import Launcher, base_environment
from worker.probing import ProbeServer
from worker.rank_socket import RankSocket
from worker.settings import Settings
from worker.spool import Spool
from worker.state import Credential, StateFolder
from worker.store import Stores

__all__ = ["Agent", "Options", "own_addresses"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """What ``worker join`` was asked for."""

    control: ControlPlane
    name: str
    token: str | None
    state_dir: Path
    cpu_slots: int = 0
    gpus: bool = True
    advertise: Sequence[str] = ()
    bind: str | None = None
    data_port: int = DEFAULT_PORT
    envs: Mapping[str, str] = field(default_factory=dict)


class Agent:
    """One node's agent, from its start to its end.

    Raises:
        LocalProblem: this machine cannot do what was asked.
    """

    def __init__(self, options: Options, settings: Settings) -> None:
        self.options = options
        self.settings = settings
        self.node_name = options.name
        self._attempts: dict[str, Attempt] = {}
        self._lock = threading.Lock()
        self._departing = False
        self._leaving = threading.Event()
        self._connection: Connection | None = None
        self._credential: Credential | None = None
        self._joined: Callable[[str], None] | None = None
        self.state = StateFolder(options.state_dir)
        self.providers = discover(options.cpu_slots, self._is_ours, gpus=options.gpus)
        self.devices = list_devices(self.providers)
        listener = listen(options.bind, options.data_port)
        self._end_leftovers()
        self._spool = Spool(self.state.spool, settings.spool_bytes)
        self._rank_socket = RankSocket(self.state.socket_path(), welcome=self._welcome_rank)
        self._probes = ProbeServer()
        self.data_port = DataPort(
            listener,
            find=self._target,
            probes=self._probes,
            handshake_timeout=settings.handshake_timeout,
            link_wait=settings.link_wait,
        )
        self._stores = Stores(
            {**base_environment(os.environ), "UNISONO_AGENT": self.state.agent_id},
            settings.store_timeout,
            settings.store_idle,
        )
        launcher = Launcher(
            node=lambda: self.node_name,
            agent_id=self.state.agent_id,
            run_folder=self.state.run_folder,
            bundles=Bundles(self.state.bundles, self._fetch_bundle),
            interpreters=Interpreters(settings.probe_timeout),
            stores=self._stores,
            envs=options.envs,
            default_python=sys.executable,
        )
        self._node = Node(
            agent_id=self.state.agent_id,
            launcher=launcher,
            spool=self._spool,
            settings=settings,
            socket_path=str(self._rank_socket.path),
            cores=cores(),
            devices=lambda: self.devices,
            send=self._send,
            ranks_changed=self.data_port.ranks_changed,
            over=self._attempt_over,
        )

    # -- life

    def run(self, joined: Callable[[str], None]) -> None:
        """Join, then serve until `leave` is called from another thread or a signal handler.

        Args:
            joined: called once, with the node's name, when the control plane has said welcome.

        Raises:
            Refused: the control plane does not want this agent.
        """
        self._joined = joined
        watcher = threading.Thread(target=self._watch_devices, name="devices", daemon=True)
        watcher.start()
        try:
            while not self._leaving.is_set():
                credential = self._credential = self.state.credential() or self._join()
                if credential is None:
                    return
                self.node_name = credential.name
                connection = Connection(
                    self.options.control,
                    credential=credential.secret,
                    settings=self.settings,
                    spool=self._spool,
                    hello=self._hello,
                    welcomed=self._welcomed,
                    received=self._received,
                )
                with self._lock:
                    self._connection = connection
                if self._leaving.is_set():
                    return
                try:
                    connection.run()
                    return
                except CredentialDead:
                    if connection.was_welcome or self.options.token is None:
                        raise
                    logger.warning("the stored credential is dead; joining again by the token")
                    self.state.forget_credential()
        finally:
            self._leaving.set()
            watcher.join()

    def _join(self) -> Credential | None:
        token = self.options.token
        if token is None:
            raise Refused(
                "this node has not joined yet: give a join token with --token-file (an operator "
                "makes one with: unisono token create --role node)"
            )
        wait = self.settings.reconnect_first
        told: str | None = None
        while not self._leaving.is_set():
            try:
                credential = self.options.control.join(
                    token, self.state.agent_id, self.options.name, self.settings.connect_timeout
                )
            except Unreachable as error:
                if str(error) != told:
                    told = str(error)
                    logger.warning("%s; trying again until it answers", error)
                self._leaving.wait(wait)
                wait = min(self.settings.reconnect_longest, wait * 2)
                continue
            self.state.store_credential(credential)
            return credential
        return None

    def leave(self, reason: str, *, grace: float | None = None) -> None:
        """End all ranks, tell the control plane, and let `run` return; bounded in time."""
        with self._lock:
            self._departing = True
            attempts = list(self._attempts.values())
            connection = self._connection
        for attempt in attempts:
            attempt.abandon(reason, grace)
        longest = max((attempt.grace(grace) for attempt in attempts), default=0.0)
        deadline = time.monotonic() + longest + self.settings.leave_timeout
        for attempt in attempts:
            if not attempt.done.wait(max(0.0, deadline - time.monotonic())):
                logger.error("attempt %s did not end in time", attempt.id)
        self._leaving.set()
        if connection is not None:
            if connection.connected and not self._spool.wait_acknowledged(
                self.settings.leave_timeout
            ):
                logger.warning("not everything was acknowledged; it stays in %s", self.state.spool)
            connection.stop()

    def hurry(self) -> None:
        """End all ranks now, without any further grace."""
        with self._lock:
            attempts = list(self._attempts.values())
        for attempt in attempts:
            attempt.end("the agent was stopped twice", 0.0)

    def close(self) -> None:
        """Let go of everything; supervisors that still run end their ranks now."""
        self._leaving.set()
        self.data_port.close()
        self._probes.close()
        self._rank_socket.close()
        self._stores.shut_down()
        self._spool.close()
        self.state.close()

    def _end_leftovers(self) -> None:
        """Processes that an agent of this state folder left behind when it was killed."""
        marker = {"UNISONO_AGENT": self.state.agent_id}
        found = supervisor.marked_processes(marker)
        if not found:
            return
        logger.warning("ending %d processes of this agent's earlier life", len(found))
        left = supervisor.end_marked(marker, self.settings.leftover_grace)
        if left:
            raise LocalProblem(
                f"processes of an earlier agent cannot be ended, they hang in the kernel: {left}"
            )

    # -- orders of the control plane

    def _hello(self, own_address: str) -> AgentHello:
        bound = [self.options.bind] if self.options.bind else []
        try:
            addresses = choose_addresses(
                own_address, bound or own_addresses(), self.options.advertise or bound
            )
        except AddressError as error:
            raise LocalProblem(str(error)) from None
        with self._lock:
            held = {name: attempt.status() for name, attempt in self._attempts.items()}
        for name in self._spool.attempts():
            held.setdefault(name, AttemptStatus(attempt=name, state="ended"))
        return AgentHello(
            agent_id=self.state.agent_id,
            incarnation=self.state.incarnation,
            name=self.node_name,
            hostname=socket.gethostname(),
            addresses=addresses,
            data_port=self.data_port.port,
            devices=self.devices,
            envs=sorted(self.options.envs),
            version=_version(),
            cores=cores(),
            memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            core_set=core_set(),
            attempts=list(held.values()),
        )

    def _welcomed(self, welcome: Welcome) -> None:
        self.node_name = welcome.name
        self._probes.admit(welcome.probe_secret)
        try:
            self.state.store_probe_secret(welcome.probe_secret)
        except OSError as error:
            logger.warning("worker probe --peer cannot measure from here: %s", error)
        with self._lock:
            attempts = dict(self._attempts)
        for name in welcome.end:
            if name in attempts:
                attempts[name].end("the control plane has ended this attempt")
        for name, attempt in attempts.items():
            if name not in welcome.end:
                attempt.answer_again()
        if self._joined is not None:
            self._joined(welcome.name)
            self._joined = None
        else:
            logger.info("connected again")

    def _received(self, message: Message) -> None:
        if isinstance(message, Prepare):
            name = message.spec.attempt
            with self._lock:
                attempt = self._attempts.get(name)
                fresh = attempt is None and not self._departing
                if fresh:
                    logger.info("%s: preparing (attempt %s)", message.spec.job, name)
                    self._attempts[name] = Attempt(message, self._node)
            if attempt is not None:
                attempt.answer_again()
            elif not fresh:
                problem = Problem(
                    code="agent-stopped", message=f"{self.node_name}: this agent is being stopped"
                )
                self._send(Prepared(attempt=name, problems=[problem]))
        elif isinstance(message, Launch):
            if (attempt := self._attempts.get(message.attempt)) is not None:
                attempt.launch(message)
            else:
                logger.warning("no attempt %s is prepared here", message.attempt)
        elif isinstance(message, End):
            if (attempt := self._attempts.get(message.attempt)) is not None:
                attempt.end(message.reason, message.grace)
            else:
                self._spool.add(attempt_over=AttemptOver(attempt=message.attempt))
        else:
            logger.warning("the control plane sent %s, which agents do not know", message.TYPE)

    def _send(self, message: Message) -> None:
        with self._lock:
            connection = self._connection
        if connection is not None:
            connection.send(message)

    def _attempt_over(self, name: str) -> None:
        with self._lock:
            self._attempts.pop(name, None)

    def _fetch_bundle(self, digest: str, target: int) -> None:
        assert self._credential is not None
        self.options.control.fetch_bundle(
            digest, target, self._credential.secret, self.settings.bundle_timeout
        )

    # -- ranks

    def _welcome_rank(self, hello: RankHello) -> tuple[Attempt, RankPlan] | None:
        with self._lock:
            attempt = self._attempts.get(hello.attempt)
        target = attempt.target() if attempt is not None else None
        if attempt is None or target is None or hello.rank not in target.live_ranks:
            return None
        return attempt, RankPlan(plan=target.plan)

    def _target(self, name: str) -> Target | None:
        with self._lock:
            attempt = self._attempts.get(name)
        return attempt.target() if attempt is not None else None

    # -- devices

    def _is_ours(self, pid: int) -> bool:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False
        return f"UNISONO_AGENT={self.state.agent_id}".encode() in environment.split(b"\0")

    def _watch_devices(self) -> None:
        """Look at the devices again and again: no driver tells who came and went."""
        if all(isinstance(provider, CpuSlots) for provider in self.providers):
            return
        while not self._leaving.wait(self.settings.device_interval):
            found: list[Device] = list_devices(self.providers)
            if found != self.devices:
                self.devices = found
                self._send(DevicesChanged(devices=found))


def own_addresses() -> list[str]:
    """The addresses of this machine's interfaces."""
    try:
        import psutil
    except ImportError:  # then the one by which the control plane is reached has to do
        return []
    return [
        entry.address.partition("%")[0]
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    ]


def _version() -> str:
    try:
        return version("unisono")
    except PackageNotFoundError:
        return "0"
