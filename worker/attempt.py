"""One attempt on this node: prepare, launch, end, over."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass

from collective.messages import (
    AttemptOver,
    AttemptStatus,
    BadMessage,
    Device,
    Failure,
    Launch,
    Message,
    Prepare,
    Prepared,
    Problem,
    RankFacts,
    RankFailure,
    RankMetrics,
    RankState,
    RankSteps,
)
from worker import supervisor
from worker.data_port import Target
from worker.launcher import Launcher, ReadyRun
from worker.rank_process import RankProcess
from worker.rank_socket import RankConnection
from worker.settings import Settings
from worker.spool import Spool

__all__ = ["Attempt", "Node"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Node:
    """What all attempts of a node share."""

    agent_id: str
    launcher: Launcher
    spool: Spool
    settings: Settings
    socket_path: str
    cores: int
    devices: Callable[[], list[Device]]
    #: sends a message that is not spooled; lost when there is no connection
    send: Callable[[Message], None]
    #: a rank said hello or ended
    ranks_changed: Callable[[], None]
    #: an attempt is over
    over: Callable[[str], None]


class Attempt:
    """Created by `Prepare`; every method may be called from any thread and more than once."""

    def __init__(self, order: Prepare, node: Node) -> None:
        self.id = order.spec.attempt
        self.job = order.spec.job
        self.token = secrets.token_hex(16)
        self._order = order
        self._node = node
        self._lock = threading.RLock()
        self._prepared: Prepared | None = None
        self._ready: ReadyRun | None = None
        self._launch: Launch | None = None
        self._ended_because: str | None = None
        self._end_grace: float | None = None
        self._is_over = False
        self._ranks: dict[int, RankProcess] = {}
        self._live: set[int] = set()
        self._unfinished: set[int] = set()
        self._connections: dict[int, list[RankConnection]] = {}
        #: ranks that reported a failure themselves
        self._reported: set[int] = set()
        self.done = threading.Event()
        threading.Thread(target=self._prepare, name=f"prepare-{self.id}", daemon=True).start()

    # -- orders

    def _prepare(self) -> None:
        try:
            prepared, ready = self._node.launcher.prepare(self._order.spec, self._order.ranks)
        except Exception as error:  # whatever it is, the job must learn of it
            logger.exception("attempt %s cannot be prepared", self.id)
            problem = Problem(code="prepare-failed", message=f"{type(error).__name__}: {error}")
            prepared, ready = Prepared(attempt=self.id, problems=[problem]), None
        with self._lock:
            self._prepared = prepared
            self._ready = ready
            ended = self._ended_because is not None
        if ended:
            self._node.launcher.close(self.id)
            return
        for problem in prepared.problems:
            logger.error("%s", problem.message)
        self._node.send(prepared)

    def answer_again(self) -> None:
        """Send `Prepared` again, after a reconnect or a repeated `Prepare`."""
        with self._lock:
            answer = self._prepared if self._launch is None and not self._is_over else None
        if answer is not None:
            self._node.send(answer)

    def launch(self, order: Launch) -> None:
        """Start the ranks, unless that was done or the attempt has been ended."""
        with self._lock:
            if self._launch is not None or self._ended_because is not None or self._is_over:
                return
            ready = self._ready
            if ready is None:
                logger.warning("attempt %s cannot be launched: it is not prepared", self.id)
                return
            self._launch = order
            self._live = {member.rank for member in ready.ranks}
            self._unfinished = set(self._live)
            for member in ready.ranks:
                self._start(ready, member.rank)
        logger.info("%s: started %s (attempt %s)", self.job, _ranks(len(ready.ranks)), self.id)

    def _start(self, ready: ReadyRun, rank: int) -> None:
        node, launch = self._node, self._launch
        assert launch is not None
        (member,) = [entry for entry in ready.ranks if entry.rank == rank]
        try:
            self._ranks[rank] = RankProcess(
                attempt=self.id,
                member=member,
                argv=ready.argv,
                workdir=ready.workdir,
                environment=node.launcher.environment(
                    ready,
                    member,
                    launch,
                    token=self.token,
                    socket_path=node.socket_path,
                    devices=node.devices(),
                    cores=node.cores,
                ),
                grace=ready.spec.grace,
                orphan_grace=node.settings.orphan_grace,
                output_delay=node.settings.output_delay,
                spool=node.spool,
                last_words=self._last_words,
                exited=self._rank_exited,
                over=self._rank_over,
            )
        except OSError as error:
            node.spool.add(
                rank=RankState(
                    attempt=self.id,
                    rank=rank,
                    state="failed-to-start",
                    message=f"the supervisor could not be started: {error.strerror}",
                )
            )
            self._rank_exited(rank)
            # its own thread would have called this
            threading.Thread(target=self._rank_over, args=(rank,), daemon=True).start()

    def abandon(self, reason: str, grace: float | None = None) -> None:
        """End everything because this agent stops, which no rank may survive as a success."""
        with self._lock:
            live = sorted(self._live) if self._ended_because is None else []
            waiting = self._launch is None and not self._is_over
        for rank in live:
            failure = Failure(
                attempt=self.id, rank=rank, kind="AgentStopped", message=reason, traceback=""
            )
            self._node.spool.add(failure=failure)
        if waiting:
            problem = Problem(code="agent-stopped", message=reason)
            self._node.send(Prepared(attempt=self.id, problems=[problem]))
        self.end(reason, grace)

    def end(self, reason: str, grace: float | None = None) -> None:
        """End everything of this attempt; `done` is set when nothing is left."""
        with self._lock:
            first = self._ended_because is None
            self._ended_because = self._ended_because or reason
            if self._is_over:
                return
            # Nothing of it runs before the launch; a preparation that comes back finds it ended.
            finish = self._launch is None
            if not finish:
                wanted = self._order.spec.grace if grace is None else grace
                for process in self._ranks.values():
                    process.end(wanted, f"ended: {reason}")
        if first:
            logger.info("%s: ending (%s)", self.job, reason)
        if finish:
            self._finish()

    def grace(self, wanted: float | None) -> float:
        """Seconds that the ranks get when the attempt is ended with `wanted`."""
        return self._order.spec.grace if wanted is None else wanted

    # -- the end

    def _rank_exited(self, rank: int) -> None:
        with self._lock:
            self._live.discard(rank)
        self._node.ranks_changed()

    def _rank_over(self, rank: int) -> None:
        with self._lock:
            self._unfinished.discard(rank)
            if self._unfinished:
                return
        self._finish()

    def _finish(self) -> None:
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            connections = [entry for entries in self._connections.values() for entry in entries]
        # another agent on this machine may run ranks of the same attempt
        marker = {"UNISONO_ATTEMPT": self.id, "UNISONO_AGENT": self._node.agent_id}
        left = supervisor.marked_processes(marker)
        if left:
            left = supervisor.end_marked(marker, 0.0)
        if left:
            logger.error("%s: processes hang in the kernel: %s", self.job, left)
        for connection in connections:
            connection.ended.wait(self._node.settings.last_words)
        self._node.launcher.close(self.id)
        self._node.spool.add(attempt_over=AttemptOver(attempt=self.id))
        logger.info("%s: over on this node (attempt %s)", self.job, self.id)
        self._node.over(self.id)
        self.done.set()

    # -- what others ask

    def status(self) -> AttemptStatus:
        """What this node still holds of the attempt."""
        with self._lock:
            if self._is_over:
                return AttemptStatus(attempt=self.id, state="ended")
            return AttemptStatus(
                attempt=self.id, state="prepared" if self._launch is None else "running"
            )

    def target(self) -> Target | None:
        """For the data port; None before the launch and after the end."""
        with self._lock:
            if self._launch is None or self._is_over:
                return None
            return Target(
                plan=self._launch.plan,
                live_ranks=frozenset(self._live),
                connections={
                    rank: entries[-1] for rank, entries in self._connections.items() if entries
                },
            )

    # -- ranks

    def connected(self, connection: RankConnection) -> None:
        """A rank said hello; the latest of its connections gets the data links."""
        with self._lock:
            self._connections.setdefault(connection.rank, []).append(connection)
        self._node.ranks_changed()

    def disconnected(self, connection: RankConnection) -> None:
        """A rank's connection ended."""
        with self._lock:
            entries = self._connections.get(connection.rank, [])
            if connection in entries:
                entries.remove(connection)

    def received(self, connection: RankConnection, message: Message) -> None:
        """Put a rank's message into the spool.

        Raises:
            BadMessage: it is about another rank or attempt, or not a rank's message.
        """
        spool = self._node.spool
        part: dict[str, object]
        if isinstance(message, RankSteps):
            part = {"steps": message.steps}
        elif isinstance(message, RankMetrics):
            part = {"metrics": message.metrics}
        elif isinstance(message, RankFacts):
            part = {"report": message.report}
        elif isinstance(message, RankFailure):
            part = {"failure": message.failure}
        else:
            raise BadMessage(f"a rank does not send {message.TYPE}")
        ((_, body),) = part.items()
        said = (getattr(body, "attempt", None), getattr(body, "rank", None))
        if said != (connection.attempt, connection.rank):
            raise BadMessage(
                f"rank {connection.rank} of {connection.attempt} spoke for rank {said[1]} "
                f"of {said[0]}"
            )
        if isinstance(body, Failure):
            with self._lock:
                self._reported.add(connection.rank)
        spool.add(**part)

    def _last_words(self, rank: int) -> bool:
        """After a rank's exit: wait until its messages are handled; whether it told its failure."""
        with self._lock:
            entries = list(self._connections.get(rank, []))
        for connection in entries:
            connection.ended.wait(self._node.settings.last_words)
        with self._lock:
            return rank in self._reported


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
