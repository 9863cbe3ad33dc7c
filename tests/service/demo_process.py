"""A demo as its user runs it: a process of its own, watched by what it says on stderr."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

from waiting import eventually

from worker.supervisor import descendants, marked_processes

MARK = "DEMO_UNDER_TEST"


class Demo:
    """Runs `unisono demo`; use it as a context, which kills what a failed test would leave."""

    def __init__(self, tmp_path: Path, *options: str) -> None:
        self.folder = tmp_path / "tmp"
        self.folder.mkdir(parents=True)
        self.mark = {MARK: uuid4().hex}
        self.shared_memory = set(os.listdir("/dev/shm"))
        self.said: list[str] = []
        self.seen: dict[int, str] = {}
        self._changed = threading.Condition()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "unisono.cli", "demo", "--port", "0", *options],
            env={**os.environ, **self.mark, "TMPDIR": str(self.folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                self.said.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self.said.append("")
            self._changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for pid in [self.process.pid, *marked_processes(self.mark)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # already over, as it should be
        self.process.wait(30)
        self._reader.join(30)
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()

    def reach(self, phase: str, timeout: float = 90.0) -> None:
        """Wait until the demo announces a phase, and note its processes."""
        with self._changed:
            there = self._changed.wait_for(
                lambda: f"demo: {phase}" in self.said or "" in self.said[-1:], timeout
            )
        if not there or f"demo: {phase}" not in self.said:
            raise AssertionError(f"the demo did not come to {phase!r}:\n{self.transcript()}")
        self.note_processes()

    def note_processes(self) -> None:
        """Remember every process of the demo as it is now."""
        for pid in [self.process.pid, *descendants(self.process.pid)]:
            if born := _born(pid):
                self.seen[pid] = born

    def send(self, number: int) -> None:
        self.note_processes()
        self.process.send_signal(number)

    def wait(self, timeout: float = 60.0) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the demo does not end:\n{self.transcript()}") from None

    def result(self) -> dict[str, Any]:
        """The JSON object in the last line of stdout; the demo is over."""
        assert self.process.stdout is not None
        lines = self.process.stdout.read().splitlines()
        assert lines, self.transcript()
        value = json.loads(lines[-1])
        assert isinstance(value, dict)
        return value

    def transcript(self) -> str:
        return "\n".join(self.said)

    def left(self) -> list[str]:
        """Everything of the demo that is still there."""
        found = [f"process {pid}" for pid in marked_processes(self.mark)]
        found += [f"process {pid}" for pid, born in self.seen.items() if _born(pid) == born]
        found += [str(path) for path in self.folder.iterdir()]
        segments = [f"/dev/shm/{name}" for name in set(os.listdir("/dev/shm")) - self.shared_memory]
        return found + [path for path in segments if not _mapped(path) and os.path.exists(path)]

    def assert_nothing_left(self, timeout: float = 0.0) -> None:
        """At once after a normal end; `timeout` is for ends that only the warden sees."""
        deadline = time.monotonic() + timeout
        left = self.left()
        if left and timeout:
            eventually(lambda: not self.left(), deadline - time.monotonic(), "nothing left")
            left = self.left()
        assert not left, f"left behind: {left}\n{self.transcript()}"


def _mapped(path: str) -> bool:
    """Whether a process has a segment mapped: no process of the demo lives, so it is another's."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if path in maps.read_text():
                return True
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            pass  # ended meanwhile, or another user's
    return False


def _born(pid: int) -> str | None:
    """When a live process started, in ticks; None when it is gone or a zombie."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state == "Z" else fields[18]
