"""Agents as real processes: `worker join` with CPU slots, ended with all that they started."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from control_plane import ControlPlane
from waiting import eventually


class Agent:
    """One `worker join`, on a state folder of its own."""

    def __init__(self, plane: ControlPlane, folder: Path, name: str, slots: int = 2) -> None:
        self.plane = plane
        self.folder = folder
        self.name = name
        self.slots = slots

    def start(self) -> Agent:
        """Join, and wait until the control plane has the node."""
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "worker.cli", "join", self.plane.url]
        command += ["--token-file", str(self.plane.data_dir / "join.token")]
        command += [f"--name={self.name}", "--cpu-slots", str(self.slots), "--data-port", "0"]
        command += ["--bind", "127.0.0.1", "--advertise", "127.0.0.1"]
        command += ["--state-dir", str(self.folder / "state")]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        eventually(self._there, 30.0, f"{self.name} joined")
        return self

    def _there(self) -> bool:
        assert self.process.poll() is None, (self.folder / "log").read_text()
        with self.plane.client() as client:
            nodes = client.get("/nodes").raise_for_status().json()["items"]
        return any(node["name"] == self.name and node["connected"] for node in nodes)

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> None:
        """SIGTERM, and wait until it and its ranks are gone."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(30)
