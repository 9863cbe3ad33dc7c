"""Hosts torch's stores (MASTER_ADDR, MASTER_PORT) in a process of the job's Python.

One process per interpreter hosts the stores of all its attempts, so that torch is imported once;
it ends when the agent's end of its pipe closes, or a while after its last store.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping

from worker.errors import LocalProblem

__all__ = ["Stores", "free_port"]

_HOST = """
import json, sys
from datetime import timedelta
from torch.distributed import TCPStore
stores = {}
for line in sys.stdin:
    order = json.loads(line)
    if "close" in order:
        stores.pop(order["close"], None)
        continue
    name = order["open"]
    try:
        # no name: torch asks for IPv6 first, and where a hosts file gives `localhost` none and no
        # name server answers, it asks for minutes; it listens at all addresses anyway
        store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        stores[name] = store
        answer = {"name": name, "port": store.port}
    except Exception as error:
        answer = {"name": name, "error": str(error)}
    print(json.dumps(answer), flush=True)
"""


class _Host:
    """The process of one interpreter."""

    def __init__(self, python: str, environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [python, "-c", _HOST],
            cwd="/",
            env={**environment, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        #: held from an order to its answer
        self.lock = threading.RLock()
        self.attempts: set[str] = set()
        self.idle_since = time.monotonic()
        assert self.process.stderr is not None
        self._errors = bytearray()
        threading.Thread(target=self._drain_errors, name="store-errors", daemon=True).start()

    def _drain_errors(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as pipe:
            while data := pipe.read(4096):
                self._errors = (self._errors + data)[-4000:]

    def order(self, order: Mapping[str, str]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")

    def answer(self, timeout: float) -> dict[str, object]:
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        deadline = time.monotonic() + timeout
        received = b""
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while not received.endswith(b"\n"):
                if not selector.select(deadline - time.monotonic()):
                    raise LocalProblem(f"torch's store did not start within {timeout:g} s")
                data = os.read(descriptor, 4096)
                if not data:
                    said = bytes(self._errors).decode(errors="replace").strip().splitlines()
                    raise LocalProblem(
                        f"torch's store ended: {said[-1] if said else 'without a message'}"
                    )
                received += data
        return dict(json.loads(received))

    def end(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        with self.lock:  # whoever waits for an answer finds the end of it
            self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout):
                assert pipe is not None
                pipe.close()


class Stores:
    """All store hosts of an agent."""

    def __init__(self, environment: Mapping[str, str], timeout: float, idle: float) -> None:
        self._environment = dict(environment)
        self._timeout = timeout
        self._idle = idle
        self._hosts: dict[str, _Host] = {}
        self._lock = threading.Lock()

    def open(self, python: str, attempt: str) -> int:
        """Start a store for an attempt and return its port.

        Raises:
            LocalProblem: it did not come up.
        """
        with self._lock:
            host = self._hosts.get(python)
            if host is None or host.process.poll() is not None:
                if host is not None:
                    host.end()
                try:
                    host = self._hosts[python] = _Host(python, self._environment)
                except OSError as error:
                    raise LocalProblem(f"cannot run {python}: {error.strerror}") from None
            # it must not be ended as idle before it has answered
            host.attempts.add(attempt)
        try:
            with host.lock:
                host.order({"open": attempt})
                answer = host.answer(self._timeout)
            if "port" not in answer:
                raise LocalProblem(f"torch's store did not start: {answer.get('error')}")
        except (OSError, ValueError, LocalProblem) as error:
            with self._lock:
                if self._hosts.get(python) is host:
                    del self._hosts[python]
            host.end()
            raise LocalProblem(str(error)) from None
        return int(str(answer["port"]))

    def close(self, attempt: str) -> None:
        """Close an attempt's store; a host without any ends a while later."""
        with self._lock:
            for python, host in list(self._hosts.items()):
                if attempt not in host.attempts:
                    continue
                host.attempts.discard(attempt)
                host.idle_since = time.monotonic()
                try:
                    host.order({"close": attempt})
                except OSError:  # it was killed; the next job starts another
                    host.end()
                    del self._hosts[python]
                    continue
                if not host.attempts:
                    timer = threading.Timer(self._idle, self._end_idle, [python, host])
                    timer.daemon = True
                    timer.start()

    def _end_idle(self, python: str, host: _Host) -> None:
        with self._lock:
            # a job may have come and gone since the timer was set, which set its own
            idle = time.monotonic() - host.idle_since >= self._idle
            if self._hosts.get(python) is host and not host.attempts and idle:
                del self._hosts[python]
                host.end()

    def shut_down(self) -> None:
        """End all hosts."""
        with self._lock:
            for host in self._hosts.values():
                host.end()
            self._hosts.clear()


def free_port() -> int:
    """A port that was free a moment ago, for jobs whose Python has no torch to hold one."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
