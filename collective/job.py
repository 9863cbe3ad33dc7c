"""The job that this process is a rank of: its ids, and its one channel to the node's agent."""

from __future__ import annotations

import atexit
import os
import threading
from dataclasses import dataclass

from collective.agent_channel import AgentChannel

__all__ = ["Job", "current"]


@dataclass(frozen=True)
class Job:
    """Who this rank is, and how it speaks to its agent."""

    job: str
    attempt: str
    rank: int
    node: str
    channel: AgentChannel


_lock = threading.Lock()
_current: Job | None = None


def current() -> Job | None:
    """The job of this process, connected to its agent at the first call; None outside a job.

    Raises:
        RendezvousFailed: the environment names an agent that does not answer, or is incomplete.
    """
    global _current
    with _lock:
        if _current is None:
            channel = AgentChannel.from_environment()
            if channel is None:
                return None
            _current = Job(
                job=os.environ.get("UNISONO_JOB", "-"),
                attempt=os.environ["UNISONO_ATTEMPT"],
                rank=int(os.environ["RANK"]),
                node=os.environ.get("UNISONO_NODE", ""),
                channel=channel,
            )
            # what was reported last must reach the agent; registered first, so that it runs last
            atexit.register(channel.close)
        return _current


def _forget() -> None:
    """A forked child is no rank."""
    global _current, _lock
    _lock = threading.Lock()
    _current = None
    for name in ("UNISONO_AGENT_SOCKET", "UNISONO_RANK_TOKEN"):
        os.environ.pop(name, None)


os.register_at_fork(after_in_child=_forget)
