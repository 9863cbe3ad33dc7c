"""Runs single ranks under real supervisors, with a real spool, and reads what came into it.

As a program, ``worker_lab.py FOLDER ARGV…``, it is an agent that can be killed.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from collective.messages import Failure, LogChunk, Member, Metrics, RankState, Spooled, decode
from worker.rank_process import RankProcess
from worker.spool import Spool


class Lab:
    """One attempt of one rank, started in `start`, whose entries stay in the spool."""

    def __init__(self, folder: Path, *, attempt: str = "a-lab", limit: int = 1 << 30) -> None:
        self.folder = folder
        self.attempt = attempt
        self.spool = Spool(folder / "spool", limit)
        self.exited = threading.Event()
        self.over = threading.Event()
        self.reported = False

    def start(
        self,
        argv: Sequence[str],
        *,
        grace: float = 5.0,
        orphan_grace: float = 1.0,
        environment: dict[str, str] | None = None,
    ) -> RankProcess:
        """Start the rank; `environment` is added to a small one."""
        self.process = RankProcess(
            attempt=self.attempt,
            member=Member(rank=0, node="w1", local_rank=0, device=0),
            argv=argv,
            workdir=self.folder,
            environment={
                "PATH": os.environ["PATH"],
                "UNISONO_ATTEMPT": self.attempt,
                "RANK": "0",
                "PYTHONUNBUFFERED": "1",
                **(environment or {}),
            },
            grace=grace,
            orphan_grace=orphan_grace,
            output_delay=0.05,
            spool=self.spool,
            last_words=lambda rank: self.reported,
            exited=lambda rank: self.exited.set(),
            over=lambda rank: self.over.set(),
        )
        return self.process

    def run(self, code: str, **options: Any) -> list[Spooled]:
        """Run a Python program to its end and return what the spool got."""
        self.start([sys.executable, "-S", "-c", code], **options)
        self.finish()
        return self.entries()

    def finish(self, timeout: float = 30.0) -> None:
        assert self.over.wait(timeout), "the rank is not over"
        self.process.join()

    def entries(self) -> list[Spooled]:
        """All entries so far."""
        found: list[Spooled] = []
        last = self.spool.last
        reader = self.spool.entries(0, threading.Event())
        while len(found) < last:
            entry = decode(next(reader)[1])
            assert isinstance(entry, Spooled)
            found.append(entry)
        return found

    def logs(self, stream: str = "stdout") -> list[LogChunk]:
        return [e.log for e in self.entries() if e.log is not None and e.log.stream == stream]

    def text(self, stream: str = "stdout") -> str:
        return "".join(chunk.text for chunk in self.logs(stream))

    def states(self) -> list[RankState]:
        return [e.rank for e in self.entries() if e.rank is not None]

    def failures(self) -> list[Failure]:
        return [e.failure for e in self.entries() if e.failure is not None]

    def metrics(self) -> list[Metrics]:
        return [e.metrics for e in self.entries() if e.metrics is not None]

    def close(self) -> None:
        if hasattr(self, "process") and not self.over.is_set():
            self.process.end(0.0, "test over")
            self.finish()
        self.spool.close()


def main() -> None:
    lab = Lab(Path(sys.argv[1]))
    lab.start(sys.argv[2:], grace=20.0)
    print("started", flush=True)
    lab.finish(60.0)
    lab.close()


if __name__ == "__main__":
    main()
