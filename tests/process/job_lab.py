"""A node's agent as its ranks see it: the real rank socket and data port, without the rest."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TypeVar

from waiting import eventually

from collective.messages import (
    Failure,
    Host,
    Member,
    Message,
    Plan,
    RankFacts,
    RankFailure,
    RankHello,
    RankMetrics,
    RankPlan,
    RankSteps,
)
from worker.data_port import DataPort, Target, listen
from worker.probing import ProbeServer
from worker.rank_socket import RankConnection, RankSocket

Kind = TypeVar("Kind", bound=Message)


class JobLab:
    """One attempt of `size` ranks on one node, and all that its ranks report."""

    token = "t0ken"

    def __init__(self, folder: Path, size: int, engine: str = "unisono") -> None:
        self.size = size
        self.engine = engine
        self._lock = threading.Lock()
        self._received: list[tuple[int, Message]] = []
        self._connections: dict[int, RankConnection] = {}
        listener = listen("127.0.0.1", 0)
        self.plan = Plan(
            job="j-lab",
            attempt="a-lab",
            epoch=1,
            secret="1ab",
            strategy="auto",
            engine=engine,  # type: ignore[arg-type]
            members=[
                Member(rank=rank, node="w1", local_rank=rank, device=rank) for rank in range(size)
            ],
            hosts=[Host(node="w1", addresses=["127.0.0.1"], data_port=listener.getsockname()[1])],
        )
        self.data_port = DataPort(
            listener,
            find=self._find,
            probes=ProbeServer(),
            handshake_timeout=10.0,
            link_wait=30.0,
        )
        self.socket = RankSocket(folder / "agent.sock", welcome=self._welcome)

    def _find(self, attempt: str) -> Target | None:
        with self._lock:
            return Target(self.plan, frozenset(range(self.size)), dict(self._connections))

    def _welcome(self, hello: RankHello) -> tuple[JobLab, RankPlan] | None:
        return self, RankPlan(plan=self.plan)

    def connected(self, connection: RankConnection) -> None:
        with self._lock:
            self._connections[connection.rank] = connection
        self.data_port.ranks_changed()

    def received(self, connection: RankConnection, message: Message) -> None:
        with self._lock:
            self._received.append((connection.rank, message))

    def disconnected(self, connection: RankConnection) -> None:
        with self._lock:
            self._connections.pop(connection.rank, None)

    @property
    def environment(self) -> dict[str, str]:
        """What the agent adds to a rank's environment."""
        return {
            "UNISONO_JOB": self.plan.job,
            "UNISONO_ATTEMPT": self.plan.attempt,
            "UNISONO_NODE": "w1",
            "UNISONO_AGENT_SOCKET": str(self.socket.path),
            "UNISONO_RANK_TOKEN": self.token,
            "UNISONO_BACKEND": self.engine,
        }

    def reports(self, kind: type[Kind], rank: int | None = None) -> list[Kind]:
        """Messages of a kind, of one rank or of all, in order."""
        with self._lock:
            return [
                message
                for sender, message in self._received
                if isinstance(message, kind) and rank in (None, sender)
            ]

    def rows(self, rank: int, *labels: str) -> list[dict[str, float]]:
        """A rank's step rows, with their labels, in the order of arrival."""
        found = []
        for message in self.reports(RankSteps, rank):
            steps = message.steps
            names = (
                "step", "at", "total", "data", "compute", "exposed", "optimizer",
                "communication", "waited", "sent", "label",
            )  # fmt: skip
            for values in zip(*(getattr(steps, name) for name in names), strict=True):
                row = dict(zip(names, values, strict=True))
                if not labels or row["label"] in labels:
                    found.append(row)
        return found

    def wait_for_rows(self, count: int, *labels: str) -> list[list[dict[str, float]]]:
        """The rows of every rank, once each has `count`."""
        eventually(
            lambda: all(len(self.rows(rank, *labels)) >= count for rank in range(self.size)),
            timeout=30.0,
            what=f"{count} rows of every rank",
        )
        return [self.rows(rank, *labels) for rank in range(self.size)]

    def failures(self) -> list[Failure]:
        """The exceptions that ended ranks."""
        return [message.failure for message in self.reports(RankFailure)]

    def facts(self, rank: int) -> dict[str, float | int | str | bool]:
        """What a rank said about itself, the latest last."""
        values: dict[str, float | int | str | bool] = {}
        for message in self.reports(RankFacts, rank):
            values.update(message.report.values)
        return values

    def metrics(self, rank: int) -> list[tuple[int | None, dict[str, float | int | str | bool]]]:
        """What a rank logged."""
        return [
            (message.metrics.step, message.metrics.values)
            for message in self.reports(RankMetrics, rank)
        ]

    def forget(self) -> None:
        """Drop what was received so far."""
        with self._lock:
            self._received.clear()

    def close(self) -> None:
        self.socket.close()
        self.data_port.close()
