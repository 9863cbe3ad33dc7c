"""Keeps the processes of a demo, and sees to it that none of them outlives it.

Run as ``python -m unisono.warden`` with a socket as standard input, whose other end only its
owner holds.  It is in a session of its own, so a Ctrl-C in the terminal reaches the owner alone,
and it is a subreaper, so every process below it, however it was started, becomes its child in the
end.  When the owner says so, or is gone, it ends all of them and removes their folder: also after
the owner was killed.  Processes that it started are told to end when it is killed itself.

Lines of JSON from the owner: ``{"start": NAME, "argv": […], "announce": FLAG or null}`` and
``{"end": true}``.  To the owner: ``{"folder": PATH}`` at first, ``{"announced": NAME, "data": …}``
for each line that a process writes to the descriptor behind FLAG, and ``{"exited": NAME, "code":
CODE}``, negative for a signal.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from worker.supervisor import descendants, send_signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
#: seconds for one process to end by itself after SIGTERM
GRACE = 6.0
#: seconds for killed processes to be gone
KILL_LIMIT = 20.0

_libc = ctypes.CDLL(None, use_errno=True)


class Warden:
    """The processes, by name, in the order in which they were started."""

    def __init__(self, owner: socket.socket) -> None:
        self.owner = owner
        self.folder = Path(tempfile.mkdtemp(prefix="unisono-demo-"))
        (self.folder / "tmp").mkdir()
        self.environment = {**os.environ, "TMPDIR": str(self.folder / "tmp")}
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.selector = selectors.DefaultSelector()
        self._rest: dict[int, bytes] = {}
        self._over = False
        reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, _: self._signalled(number))
        self._watch(reading, lambda _: None)
        self._watch(owner.fileno(), self._command)

    def run(self) -> None:
        """Serve the owner until it says so or is gone; then end everything."""
        try:
            self._tell({"folder": str(self.folder)})
            while not self._over:
                self._turn(None)
        finally:
            self._end_all()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _turn(self, timeout: float | None) -> None:
        for key, _ in self.selector.select(timeout):
            self._read(key.fd, key.data)
        self._reap()

    def _watch(self, descriptor: int, take: Callable[[bytes], None]) -> None:
        os.set_blocking(descriptor, False)
        self._rest[descriptor] = b""
        self.selector.register(descriptor, selectors.EVENT_READ, take)

    def _read(self, descriptor: int, take: Callable[[bytes], None]) -> None:
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self.selector.unregister(descriptor)
            self._over = self._over or descriptor == self.owner.fileno()
            if descriptor != self.owner.fileno():
                os.close(descriptor)
            return
        *lines, self._rest[descriptor] = (self._rest[descriptor] + data).split(b"\n")
        for line in lines:
            take(line)

    def _signalled(self, number: int) -> None:
        if number != signal.SIGCHLD:
            self._over = True

    def _tell(self, message: dict[str, Any]) -> None:
        try:
            self.owner.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self._over = True  # nobody is left to be told

    def _command(self, line: bytes) -> None:
        message = json.loads(line)
        if "start" in message:
            self._start(message["start"], message["argv"], message.get("announce"))
        else:
            self._over = True

    def _start(self, name: str, argv: list[str], announce: str | None) -> None:
        passed: list[int] = []
        if announce is not None:
            reading, writing = os.pipe2(os.O_CLOEXEC)
            passed = [writing]
            argv = [*argv, announce, str(writing)]
            self._watch(
                reading,
                lambda line: self._tell({"announced": name, "data": json.loads(line)}),
            )
        with open(self.folder / f"{name}.log", "wb") as log:
            self.children[name] = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env=self.environment,
                pass_fds=passed,
                preexec_fn=_end_with_parent,
            )
        for descriptor in passed:
            os.close(descriptor)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for name, child in self.children.items():
                if child.pid == pid:
                    child.returncode = os.waitstatus_to_exitcode(status)
                    self._tell({"exited": name, "code": child.returncode})

    def _end_all(self) -> None:
        """The last started first: agents say goodbye while the control plane still listens."""
        running = [child for child in self.children.values() if child.returncode is None]
        for group in (running[1:], running[:1]):
            for child in group:
                child.terminate()
            deadline = time.monotonic() + GRACE
            while any(child.returncode is None for child in group):
                if (left := deadline - time.monotonic()) <= 0:
                    break
                self._turn(left)
        self._kill_rest()

    def _kill_rest(self) -> None:
        deadline = time.monotonic() + KILL_LIMIT
        while rest := descendants(os.getpid()):
            if time.monotonic() > deadline:
                print(f"error: processes {rest} do not end", file=sys.stderr)
                return
            send_signal(signal.SIGKILL, lambda: descendants(os.getpid()))
            # Orphans become our children only now, so the next look may find more.
            self._turn(0.05)
        self._reap()


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def main() -> None:
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    with socket.socket(fileno=os.dup(0)) as owner:
        os.set_inheritable(owner.fileno(), False)
        Warden(owner).run()


if __name__ == "__main__":
    main()
