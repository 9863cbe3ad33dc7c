"""The job that this process is a rank of: its ids, and its one channel to the node's agent."""

from __future__ import annotations

import atexit
import os
import socket
import threading
from collections import deque
from dataclasses import dataclass, field

from collective.agent_channel import AgentChannel
from collective.links.doorman import Doorman
from collective.messages import LinkRequest

__all__ = ["Job", "Reception", "current"]

#: connections that are kept for groups that this rank has not made yet
MAX_EARLY = 4096


class Reception:
    """Sorts the connections that an agent hands over by the group of all ranks they belong to.

    A peer may be ahead, and dial a group that this rank is yet to make.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._doormen: dict[str, Doorman] = {}
        self._early: deque[tuple[LinkRequest, socket.socket, bytes]] = deque()

    def deposit(self, request: LinkRequest, sock: socket.socket, unread: bytes) -> None:
        """Take a connection."""
        with self._lock:
            doorman = self._doormen.get(_base(request.group))
            if doorman is None:
                self._early.append((request, sock, unread))
                if len(self._early) > MAX_EARLY:
                    self._early.popleft()[1].close()
                return
        doorman.deposit(request, sock, unread)

    def doorman(self, name: str) -> Doorman:
        """The doorman of the group of all ranks of that name, and of its subgroups."""
        doorman = Doorman()
        with self._lock:
            self._doormen[name] = doorman
            mine = [entry for entry in self._early if _base(entry[0].group) == name]
            self._early = deque(entry for entry in self._early if _base(entry[0].group) != name)
        for entry in mine:
            doorman.deposit(*entry)
        return doorman


def _base(group: str) -> str:
    return group.partition("/")[0].partition(":")[0]


@dataclass(frozen=True)
class Job:
    """Who this rank is, and how it speaks to its agent."""

    job: str
    attempt: str
    rank: int
    node: str
    channel: AgentChannel
    reception: Reception = field(default_factory=Reception)
    _names: dict[str, int] = field(default_factory=dict)

    def fresh(self, name: str) -> str:
        """A name that no group had before; all ranks make their groups in the same order.

        The plan's secret and epoch last as long as the attempt, so a second group of all ranks
        must not get links of the first.
        """
        with _lock:
            number = self._names[name] = self._names.get(name, 0) + 1
        return name if number == 1 else f"{name}.{number}"


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
            channel.on_link(_current.reception.deposit)
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
