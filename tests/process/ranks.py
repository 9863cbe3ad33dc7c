"""A set of rank processes that lives across tests and runs functions of test modules.

The ranks are started as torchrun would start them: its environment variables, and a `TCPStore`
that somebody else hosts (here the test process).  A function given to `RankPool.run` is found by
its module and name in every rank, and is called there with the arguments given.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

HERE = Path(__file__).parent


def python_path() -> str:
    """Where ranks find the tests' modules, and what this process finds."""
    return os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])


@dataclass
class Outcome:
    """What a function did in one rank: its value, or the exception that it raised."""

    value: Any = None
    #: class names of the exception, the most derived first; empty when there was none
    kinds: list[str] = field(default_factory=list)
    message: str = ""
    traceback: str = ""
    #: attributes of a `CollectiveError`
    rank: int | None = None
    operation: str | None = None
    sequence: int | None = None
    #: seconds that the function ran
    seconds: float = 0.0

    @property
    def kind(self) -> str | None:
        """The exception's class name, or None."""
        return self.kinds[0] if self.kinds else None


class RankFailed(AssertionError):
    """A function raised in a rank, or a rank died or did not answer in time."""


class RankPool:
    """`size` rank processes; use as a context manager.

    Args:
        environment: more variables for every rank; a value may hold ``{rank}``.
        prefixes: what stands before each rank's command line, by rank.
    """

    def __init__(
        self,
        size: int,
        environment: Mapping[str, str] | None = None,
        prefixes: Sequence[Sequence[str]] = (),
    ) -> None:
        self.size = size
        # the store of a job outlives its groups, as torchrun's does
        self._store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self.processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        for rank in range(size):
            ours, theirs = socket.socketpair()
            values = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(size),
                "GROUP_RANK": "0",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_RUN_ID": "tests",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": python_path(),
            }
            for name, value in (environment or {}).items():
                values[name] = value.replace("{rank}", str(rank))
            prefix = prefixes[rank] if prefixes else ()
            self.processes.append(
                subprocess.Popen(
                    [*prefix, sys.executable, str(HERE / "rank_main.py"), str(theirs.fileno())],
                    env=values,
                    pass_fds=[theirs.fileno()],
                )
            )
            theirs.close()
            self._pipes.append(Connection(ours.detach()))

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def outcomes(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        ranks: Sequence[int] | None = None,
        timeout: float = 60.0,
    ) -> list[Outcome | None]:
        """Call a function in every rank (or in some); None for a rank that died meanwhile.

        Raises:
            RankFailed: a rank did not answer within `timeout` seconds.
        """
        called = list(range(self.size)) if ranks is None else list(ranks)
        self.start(function, *arguments, ranks=called)
        return self.collect(called, timeout)

    def start(
        self, function: Callable[..., Any], *arguments: Any, ranks: Sequence[int] | None = None
    ) -> None:
        """Begin a call; `collect` must follow."""
        request = pickle.dumps((function.__module__, function.__qualname__, arguments))
        for rank in range(self.size) if ranks is None else ranks:
            self._pipes[rank].send_bytes(request)

    def collect(
        self, ranks: Sequence[int] | None = None, timeout: float = 60.0
    ) -> list[Outcome | None]:
        """The outcomes of a call that `start` began."""
        called = list(range(self.size)) if ranks is None else list(ranks)
        deadline = time.monotonic() + timeout
        waiting = {self._pipes[rank]: rank for rank in called}
        found: dict[int, Outcome | None] = {}
        while waiting:
            left = deadline - time.monotonic()
            ready = wait(list(waiting), max(0.0, left))
            if not ready and left <= 0:
                late = sorted(waiting.values())
                self._show_stacks()
                self.kill()
                raise RankFailed(f"ranks {late} did not answer within {timeout:g} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    found[rank] = pipe.recv()
                except (EOFError, ConnectionError):
                    found[rank] = None
        return [found[rank] for rank in called]

    def run(
        self, function: Callable[..., Any], *arguments: Any, timeout: float = 60.0
    ) -> list[Any]:
        """Call a function in every rank; the values by rank.

        Raises:
            RankFailed: it raised in a rank; the message holds all tracebacks.
        """
        outcomes = self.outcomes(function, *arguments, timeout=timeout)
        troubles = [
            f"rank {rank}: {'died' if outcome is None else outcome.traceback}"
            for rank, outcome in enumerate(outcomes)
            if outcome is None or outcome.kinds
        ]
        if troubles:
            raise RankFailed("\n".join([f"{function.__qualname__} failed", *troubles]))
        return [outcome.value for outcome in outcomes if outcome is not None]

    def close(self, timeout: float = 60.0) -> list[int]:
        """Let the ranks exit in order; their exit codes."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + timeout
        try:
            for process in self.processes:
                process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._show_stacks()
            raise
        finally:
            self.kill()
        return [process.returncode for process in self.processes]

    def _show_stacks(self) -> None:
        """Have the ranks that still run write their threads' stacks to standard error."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)  # a signal has no answer

    def kill(self) -> None:
        """End all ranks at once."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait()
