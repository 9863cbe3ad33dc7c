"""Which event ended an attempt, and which only followed from it: a pure decision.

When a rank fails, every other rank fails too: its peer is lost, its operation is aborted, or the
control plane ends it.  The cause is the earliest event that is none of these.  It is decided
anew whenever something arrives, and for good when the attempt is over, because the real
exception may arrive after the errors that it caused.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

#: errors of `collective.errors` that another rank's end brings about
CONSEQUENCES = frozenset({"PeerLost", "OperationAborted", "DeadlineExceeded", "GroupClosed"})
#: what other engines, and torch when it wraps an error of ours, say when a peer went away
_WRAPPED = re.compile(
    r"\b(PeerLost|OperationAborted|DeadlineExceeded|GroupClosed): "
    r"|Connection closed by peer|Connection reset by peer"
    r"|Timed out waiting \d+ms for (recv|send) operation"
    r"|remote process exited or there was a network error"
)
#: how Python tells an orderly end that was asked for
_ASKED = frozenset({"KeyboardInterrupt", "SystemExit"})


@dataclass(frozen=True)
class RankFailed:
    """An exception of a rank; `at` on the control plane's clock."""

    rank: int
    kind: str
    message: str
    traceback: str
    culprit: int | None
    at: float


@dataclass(frozen=True)
class RankEnded:
    """The end of a rank; both None: its end is not known (its node is lost)."""

    rank: int
    exit_code: int | None
    signal: int | None
    at: float
    #: why it did not start, where it did not
    message: str | None = None
    started: bool = True

    @property
    def well(self) -> bool:
        """Whether it ended as it should."""
        return self.exit_code == 0 and not self.signal


@dataclass(frozen=True)
class NodeGone:
    """A node that is lost with ranks of the attempt; `at`: when it was last heard of."""

    node: str
    reason: str
    at: float


@dataclass(frozen=True)
class Verdict:
    """The cause, or None where nothing went wrong, and what followed from it."""

    cause: dict[str, Any] | None
    consequences: list[dict[str, Any]]
    #: the cause is a node that is gone, not something that a rank did
    lost: bool = False


def is_consequence(failure: RankFailed) -> bool:
    """Whether an exception only says that another rank is gone."""
    if failure.culprit is not None and failure.culprit != failure.rank:
        return True
    return failure.kind in CONSEQUENCES or bool(_WRAPPED.search(failure.message))


def describe_exit(ended: RankEnded) -> str:
    """An end in words."""
    if ended.message:
        return ended.message
    if ended.signal:
        try:
            name = signal.Signals(ended.signal).name
        except ValueError:
            name = "unknown"
        return f"killed by signal {ended.signal} ({name})"
    return f"exited with code {ended.exit_code}"


def decide(
    failures: Sequence[RankFailed],
    ends: Sequence[RankEnded],
    gone: Sequence[NodeGone],
    node_of: dict[int, str],
    end_at: float | None,
) -> Verdict:
    """The cause of an attempt's failure.

    Args:
        failures: exceptions, in order of arrival.
        ends: the ranks that ended.
        gone: nodes that are lost.
        node_of: the node's name of each rank.
        end_at: when the control plane first told the nodes to end the attempt.
    """
    end_of = {ended.rank: ended for ended in ends}

    def own_doing(at: float) -> bool:
        return end_at is None or at < end_at

    def asked_for(failure: RankFailed) -> bool:
        return not own_doing(failure.at) and failure.kind in _ASKED

    secondary = {f.rank for f in failures if is_consequence(f) or asked_for(f)}
    candidates: list[tuple[float, int, dict[str, Any]]] = []
    told: set[int] = set()
    for order, failure in enumerate(failures):
        if failure.rank in told or failure.rank in secondary or not own_doing(failure.at):
            continue
        told.add(failure.rank)
        candidates.append(
            (failure.at, order, _of_failure(failure, end_of.get(failure.rank), node_of))
        )
    for order, ended in enumerate(ends, start=len(failures)):
        if ended.well or ended.rank in told or ended.rank in secondary or not own_doing(ended.at):
            continue
        candidates.append((ended.at, order, _of_end(ended, node_of)))
    lost = False
    for order, node in enumerate(gone, start=len(failures) + len(ends)):
        candidates.append(
            (
                node.at,
                order,
                {"rank": None, "node": node.node, "kind": "NodeLost", "message": node.reason}
                | {"at": node.at},
            )
        )
    cause: dict[str, Any] | None = None
    if candidates:
        _, _, cause = min(candidates, key=lambda entry: entry[:2])
        lost = cause["kind"] == "NodeLost"
    elif failures:
        cause = _fallback(failures, end_of, node_of)
    elif bad := [ended for ended in ends if not ended.well]:
        cause = _of_end(bad[0], node_of)
    consequences = []
    seen = {cause["rank"]} if cause is not None and not _is_reported(cause) else set()
    for failure in failures:
        if failure.rank not in seen:
            seen.add(failure.rank)
            consequences.append(
                {
                    "rank": failure.rank,
                    "node": node_of.get(failure.rank),
                    "kind": failure.kind,
                    "message": failure.message,
                }
            )
    for ended in ends:
        if not ended.well and ended.rank not in seen:
            seen.add(ended.rank)
            by_agent = (ended.message or "").startswith("ended: ")  # which then says why
            consequences.append(
                {
                    "rank": ended.rank,
                    "node": node_of.get(ended.rank),
                    "kind": "Ended",
                    "message": describe_exit(ended)
                    + ("" if by_agent or own_doing(ended.at) else ", after it was told to end"),
                }
            )
    return Verdict(cause, consequences, lost)


def _is_reported(cause: dict[str, Any]) -> bool:
    """Whether the cause is told only by another rank's error, which then is a consequence."""
    return "reported_by" in cause and cause["reported_by"] != cause["rank"]


def _of_failure(
    failure: RankFailed, ended: RankEnded | None, node_of: dict[int, str]
) -> dict[str, Any]:
    return {
        "rank": failure.rank,
        "node": node_of.get(failure.rank),
        "kind": failure.kind,
        "message": failure.message,
        "traceback": failure.traceback,
        "exit_code": ended.exit_code if ended else None,
        "signal": ended.signal if ended else None,
        "at": failure.at,
    }


def _of_end(ended: RankEnded, node_of: dict[int, str]) -> dict[str, Any]:
    kind = "NotStarted" if not ended.started else "Signal" if ended.signal else "ExitCode"
    return {
        "rank": ended.rank,
        "node": node_of.get(ended.rank),
        "kind": kind,
        "message": describe_exit(ended),
        "exit_code": ended.exit_code,
        "signal": ended.signal,
        "at": ended.at,
    }


def _fallback(
    failures: Sequence[RankFailed], end_of: dict[int, RankEnded], node_of: dict[int, str]
) -> dict[str, Any]:
    """Nothing but consequences: the rank that the first of them names is at fault."""
    first = min(failures, key=lambda failure: failure.at)
    named = [f for f in failures if f.culprit is not None and f.culprit != f.rank]
    if named:
        first = min(named, key=lambda failure: failure.at)
    rank = first.culprit if first.culprit is not None else first.rank
    ended = end_of.get(rank)
    cause = _of_failure(first, ended, node_of) | {"rank": rank, "node": node_of.get(rank)}
    if rank != first.rank:
        cause["reported_by"] = first.rank
        if ended is not None and ended.well:
            cause["kind"] = "LeftEarly"
            cause["message"] = (
                f"rank {rank} exited with code 0 while others still needed it; "
                f"rank {first.rank} says: {first.message}"
            )
    return cause
