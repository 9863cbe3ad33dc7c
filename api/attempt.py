"""One attempt of a job in memory: its ranks and nodes, and what happened to them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Literal

from api.causes import NodeGone, RankEnded, RankFailed, Verdict, decide, is_consequence
from collective.messages import Member, Plan

#: the problem of a node whose agent is ending
AGENT_STOPPED = "agent-stopped"
NodePhase = Literal["waiting", "prepared", "over", "lost"]
#: what becomes of the ranks in these states when their attempt is over
UNSETTLED = {"waiting": "not-started", "running": "lost"}


@dataclass
class Part:
    """One node's part of an attempt."""

    node_id: str
    name: str
    state: NodePhase = "waiting"
    store_port: int | None = None
    #: of the job's Python on this node
    versions: dict[str, Any] = field(default_factory=dict)
    lost_at: float | None = None
    lost_reason: str | None = None

    @property
    def done(self) -> bool:
        """Whether nothing more is to come from this node."""
        return self.state in ("over", "lost")


@dataclass
class RankInfo:
    """One rank."""

    member: Member
    device: dict[str, Any]
    state: str = "waiting"
    pid: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    message: str | None = None
    started_at: float | None = None
    ended_at: float | None = None
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        """Whether its end is known."""
        return self.state in ("exited", "failed-to-start")


@dataclass
class AttemptState:
    """What the control plane knows of an attempt that is not over."""

    id: str
    job: str
    plan: Plan
    parts: list[Part]
    ranks: dict[int, RankInfo]
    phase: str = "preparing"
    end_at: float | None = None
    end_reason: str | None = None
    failures: list[RankFailed] = field(default_factory=list)
    #: (node, code, message): why a node cannot run its part
    problems: list[tuple[str, str, str]] = field(default_factory=list)
    #: a cause that is the control plane's own finding, such as a start that took too long
    finding: dict[str, Any] | None = None
    start_timer: asyncio.TimerHandle | None = None
    settle_timer: asyncio.TimerHandle | None = None

    def part(self, node_id: str) -> Part | None:
        """A node's part."""
        return next((part for part in self.parts if part.node_id == node_id), None)

    def members_on(self, node: str) -> list[Member]:
        """The ranks of one node."""
        return [member for member in self.plan.members if member.node == node]

    @property
    def over(self) -> bool:
        """Whether every node's part is done."""
        return all(part.done for part in self.parts)

    def ends(self) -> list[RankEnded]:
        """The ranks that ended, in order of time."""
        ended = [
            RankEnded(
                rank,
                info.exit_code,
                info.signal,
                info.ended_at or 0.0,
                info.message,
                started=info.state != "failed-to-start",
            )
            for rank, info in self.ranks.items()
            if info.ended
        ]
        return sorted(ended, key=lambda end: end.at)

    def all_well(self) -> bool:
        """Whether every rank exited with code 0."""
        ends = self.ends()
        return len(ends) == len(self.ranks) and all(ended.well for ended in ends)

    def settle_ranks(self) -> list[int]:
        """Now that the attempt is over: end what no node told the end of; these ranks."""
        settled = []
        for rank, info in self.ranks.items():
            if info.state in UNSETTLED:
                info.state = UNSETTLED[info.state]
                settled.append(rank)
        return settled

    def verdict(self) -> Verdict:
        """Why it fails, as far as is known now."""
        if self.finding is not None:
            return Verdict(self.finding, [])
        if self.problems:
            told = [
                {"rank": None, "node": node, "kind": code, "message": message}
                for node, code, message in self.problems
            ]
            return Verdict(told[0], told[1:])
        gone = [
            NodeGone(part.name, part.lost_reason or "lost", part.lost_at or 0.0)
            for part in self.parts
            if part.state == "lost"
        ]
        node_of = {rank: info.member.node for rank, info in self.ranks.items()}
        verdict = decide(self.failures, self.ends(), gone, node_of, self.end_at)
        if verdict.cause is None and self.over:
            silent = [rank for rank, info in self.ranks.items() if not info.ended]
            if silent:
                cause = {
                    "rank": silent[0],
                    "node": node_of[silent[0]],
                    "kind": "NodeLost",
                    "message": f"node {node_of[silent[0]]} never told how rank {silent[0]} ended",
                }
                return Verdict(cause, verdict.consequences, lost=True)
        return verdict

    def only_stopped_agents(self) -> bool:
        """Whether it ended before it ran, for no reason but that an agent is ending."""
        return (
            self.finding is None
            and bool(self.problems)
            and all(code == AGENT_STOPPED for _, code, _ in self.problems)
            and all(part.state == "over" for part in self.parts)
        )

    def real_cause_known(self) -> bool:
        """Whether anything but consequences is known, and its rank has ended by itself.

        A rank that has told its exception is about to exit: ended now, it would show a signal
        in the place of its own exit code.
        """
        if self.finding is not None or self.problems or any(p.state == "lost" for p in self.parts):
            return True
        if any(
            not is_consequence(failure) and self.ranks[failure.rank].ended
            for failure in self.failures
        ):
            return True
        secondary = {failure.rank for failure in self.failures}
        return any(not end.well and end.rank not in secondary for end in self.ends())

    def cancel_timers(self) -> None:
        """Forget what was to happen later."""
        for timer in (self.start_timer, self.settle_timer):
            if timer is not None:
                timer.cancel()
        self.start_timer = self.settle_timer = None

    def shown_rank(self, rank: int) -> dict[str, Any]:
        """A rank as REST and pages show it, without its step and log sizes."""
        info = self.ranks[rank]
        return {
            "rank": rank,
            "node": info.member.node,
            "local_rank": info.member.local_rank,
            "device": info.device,
            "state": info.state,
            "pid": info.pid,
            "exit_code": info.exit_code,
            "signal": info.signal,
            "message": info.message,
            "started_at": info.started_at,
            "ended_at": info.ended_at,
            "report": info.report,
        }


def members_of(devices: dict[str, list[int]]) -> list[Member]:
    """Ranks numbered node by node, in the order of the placement."""
    members: list[Member] = []
    for node, indexes in devices.items():
        for local_rank, device in enumerate(indexes):
            members.append(
                Member(rank=len(members), node=node, local_rank=local_rank, device=device)
            )
    return members


def version_conflict(parts: list[Part]) -> str | None:
    """Why the nodes' Python environments cannot work together; None where they can."""
    for field_name, label, digits in (("python", "Python", 2), ("torch", "torch", 2)):
        seen: dict[str, list[str]] = {}
        for part in parts:
            version = part.versions.get(field_name)
            if version:
                seen.setdefault(".".join(str(version).split(".")[:digits]), []).append(part.name)
        if len(seen) > 1:
            told = ", ".join(f"{version} on {'/'.join(names)}" for version, names in seen.items())
            return (
                f"the job's {label} differs between nodes: {told}; install the same version, or "
                "name an environment with --env or --python"
            )
    return None
