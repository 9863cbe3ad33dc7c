"""Rank processes that are forked from one that has imported everything, and can be replaced.

A test that kills a rank a hundred times cannot import torch each time.  The process that is forked
has one thread and no group; what its children do is as in any other rank of a `RankPool`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from ranks import RankPool, python_path


class Forked:
    """A process that somebody else has started and waits for."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._handle = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Not None when it is over."""
        return self.wait(0.0)

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait until it is over."""
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._handle, select.POLLIN)
            if not poll.poll(None if timeout is None else timeout * 1000):
                return None
            os.close(self._handle)
            self.returncode = 0
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkedRanks(RankPool):
    """`size` rank processes; a killed one can be replaced by `revive`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.processes: list[Forked] = []  # type: ignore[assignment]
        self._pipes: list[Connection] = []
        self._template, theirs = socket.socketpair()
        self._parent = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("fork_main.py")), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        for rank in range(size):
            process, pipe = self._fork(rank)
            self.processes.append(process)
            self._pipes.append(pipe)

    def _fork(self, rank: int) -> tuple[Forked, Connection]:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._template, [json.dumps(rank).encode()], [theirs.fileno()])
        answer = self._template.recv(64)
        return Forked(int(answer)), Connection(ours.detach())

    def revive(self, rank: int) -> None:
        """A new process instead of the one of `rank`, which is dead."""
        self.processes[rank].wait()
        self._pipes[rank].close()
        self.processes[rank], self._pipes[rank] = self._fork(rank)

    def kill(self) -> None:
        super().kill()
        self._template.close()
        self._parent.wait()
