"""A control plane as a real process, for tests: started, killed, started again on its folder."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from waiting import eventually

#: shortened product times; every test server gets them unless it says otherwise
TIMES = {
    "heartbeat": 0.25,
    "node_timeout": 2.0,
    "start_timeout": 30.0,
    "settle": 0.3,
    "grace": 3.0,
    "rendezvous_timeout": 10.0,
    "stream_interval": 0.05,
    "stream_beat": 0.5,
    "shutdown_grace": 1,
}


class ControlPlane:
    """One `unisono serve` on a data folder; `start` after `kill` keeps the port."""

    def __init__(self, data_dir: Path, **settings: Any) -> None:
        self.data_dir = data_dir
        self.settings = TIMES | settings
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.url = ""
        self._clients: list[httpx.Client] = []

    @property
    def log_path(self) -> Path:
        """Where the server's own output goes."""
        return self.data_dir.with_name(self.data_dir.name + ".log")

    def log(self) -> str:
        """All that the server has said."""
        return self.log_path.read_text(errors="replace")

    def start(self, timeout: float = 30.0) -> ControlPlane:
        """Start it and wait until it says that it is ready."""
        ours, theirs = os.pipe()
        environment = {k: v for k, v in os.environ.items() if not k.startswith("UNISONO_")}
        settings = {"host": "127.0.0.1", "port": self.port, "data_dir": self.data_dir}
        settings |= self.settings | {"announce_fd": theirs}
        environment |= {f"UNISONO_{name.upper()}": str(value) for name, value in settings.items()}
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "unisono.serve"],
                env=environment,
                pass_fds=[theirs],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # The process must not inherit the terminal's Ctrl-C before its tests end it.
                start_new_session=True,
            )
        os.close(theirs)
        with os.fdopen(ours, "rb") as announced:
            ready, _, _ = select.select([announced], [], [], timeout)
            line = announced.readline() if ready else b""
        if not line:
            self.stop()
            raise AssertionError(f"the control plane did not start:\n{self.log()}")
        self.url = json.loads(line)["url"]
        self.port = int(self.url.rsplit(":", 1)[1])
        return self

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def stop(self, number: int = signal.SIGTERM, timeout: float = 15.0) -> int:
        """End it by a signal; its exit code."""
        if self.process is None:
            return 0
        if self.process.poll() is None:
            self.process.send_signal(number)
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
                raise AssertionError(f"the control plane did not end:\n{self.log()}") from None
        return self.process.returncode

    def close(self) -> None:
        """End it, and close all clients that were made for it."""
        self.stop()
        for client in self._clients:
            client.close()

    def token(self, name: str = "operator") -> str:
        """The secret in one of the data folder's token files."""
        return (self.data_dir / f"{name}.token").read_text().strip()

    def client(self, token: str | None = "operator", **options: Any) -> httpx.Client:
        """A client below `/api/v1`; `token` names a token file, None: no token."""
        headers = {"Authorization": f"Bearer {self.token(token)}"} if token else {}
        client = httpx.Client(
            base_url=f"{self.url}/api/v1", headers=headers, trust_env=False, timeout=20, **options
        )
        self._clients.append(client)
        return client


class Api:
    """What tests ask of a control plane, in few words."""

    def __init__(self, server: ControlPlane, token: str = "operator") -> None:
        self.server = server
        self.http = server.client(token)

    def close(self) -> None:
        """Close the connections."""
        self.http.close()

    def start(self, **job: Any) -> dict[str, Any]:
        """Start a job."""
        answer = self.http.post("/jobs", json={"script": "train.py"} | job)
        assert answer.status_code == 201, answer.text
        return dict(answer.json())

    def job(self, job_id: str) -> dict[str, Any]:
        """A job as it is now."""
        return dict(self.http.get(f"/jobs/{job_id}").raise_for_status().json())

    def ranks(self, job_id: str) -> list[dict[str, Any]]:
        """A job's ranks."""
        return list(self.http.get(f"/jobs/{job_id}/ranks").raise_for_status().json()["items"])

    def until(self, job_id: str, *states: str, timeout: float = 15.0) -> dict[str, Any]:
        """The job once it is in one of the states."""

        def reached() -> dict[str, Any] | None:
            job = self.job(job_id)
            return job if job["state"] in states else None

        found = eventually(reached, timeout, f"job {job_id} is {' or '.join(states)}")
        assert found is not None
        return found

    def node(self, name: str) -> dict[str, Any]:
        """A node as it is now."""
        return dict(self.http.get(f"/nodes/{name}").raise_for_status().json())


def read_events(response: httpx.Response, timeout: float = 15.0) -> Iterator[dict[str, Any]]:
    """The events of a stream, each with `id`, `event` and its decoded `data`."""
    deadline = time.monotonic() + timeout
    event: dict[str, Any] = {}
    for line in response.iter_lines():
        if time.monotonic() > deadline:
            raise AssertionError(f"the stream went on for more than {timeout:g} s")
        if not line:
            # what comes first says only how soon to connect again
            if "event" in event:
                yield event
            event = {}
            continue
        name, _, value = line.partition(": ")
        event[name] = json.loads(value) if name == "data" else value
