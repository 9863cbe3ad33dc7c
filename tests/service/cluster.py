"""A cluster on this machine: a real control plane and real agents, each a process to be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from control_plane import Api, ControlPlane
from waiting import eventually

from worker.supervisor import end_marked, marked_processes

#: shortened product times of agents
WORKER_TIMES = {
    "reconnect_first": 0.1,
    "reconnect_longest": 0.5,
    "orphan_grace": 1.0,
    "leftover_grace": 1.0,
    "leave_timeout": 5.0,
    "output_delay": 0.05,
    "last_words": 0.5,
}


class Agent:
    """One `worker join` with a state folder and a home of its own."""

    def __init__(
        self, server: ControlPlane, folder: Path, name: str, slots: int = 2, *options: str
    ) -> None:
        self.server = server
        self.name = name
        self.slots = slots
        self.options = options
        self.state = folder / name / "state"
        self.home = folder / name / "home"
        self.home.mkdir(parents=True)
        self.log_path = folder / name / "agent.log"
        self.log_path.touch()
        #: what stands before its command line, and the control plane's address for it
        self.prefix: list[str] = []
        self.url = server.url
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def agent_id(self) -> str:
        """The id that its processes are marked with."""
        return (self.state / "agent-id").read_text().strip()

    def start(self, *, wait: bool = True, token: str | None = "join") -> Agent:
        """Start it, and wait until it has joined; `token` names a file of the control plane."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("UNISONO_")}
        environment |= {f"UNISONO_WORKER_{k.upper()}": str(v) for k, v in WORKER_TIMES.items()}
        environment |= {"HOME": str(self.home)}
        if "127.0.0.1" in self.url:
            # a proxy that is not there must not keep the agent from its own machine
            environment["http_proxy"] = "http://127.0.0.1:9"
        files = [] if token is None else ["--token-file", str(self._token_file(token))]
        joined = self.log().count("joined ")
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *self.prefix,
                    *(sys.executable, "-m", "worker.cli", "join", self.url, *files),
                    *("--name", self.name, "--cpu-slots", str(self.slots)),
                    *("--data-port", "0", "--state-dir", str(self.state), *self.options),
                ],
                env=environment,
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        if wait:
            eventually(lambda: self.log().count("joined ") > joined, 20.0, "the agent joins")
        return self

    def _token_file(self, name: str) -> Path:
        return self.server.data_dir / f"{name}.token"

    def log(self) -> str:
        """All that the agent has said."""
        return self.log_path.read_text(errors="replace")

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def wait(self, timeout: float = 20.0) -> int:
        """Its exit code, once it has ended."""
        assert self.process is not None
        return self.process.wait(timeout)

    def stop(self, number: int = signal.SIGTERM, timeout: float = 20.0) -> int:
        """End it by a signal; its exit code."""
        if self.process is None:
            return 0
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.wait(timeout)

    def clean_up(self) -> None:
        """End it and everything of it, whatever a failed test left."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        if (self.state / "agent-id").exists():
            end_marked({"UNISONO_AGENT": self.agent_id}, 0.0)


class Cluster:
    """A control plane and its agents."""

    def __init__(self, folder: Path, *names: str, slots: int = 2, **settings: Any) -> None:
        self.folder = folder
        self.server = ControlPlane(folder / "data", **settings).start()
        self.api = Api(self.server)
        self.agents: dict[str, Agent] = {}
        for name in names:
            self.add(name, slots)

    def add(self, name: str, slots: int = 2, *options: str, start: bool = True) -> Agent:
        """One more agent."""
        agent = self.agents[name] = Agent(self.server, self.folder, name, slots, *options)
        return agent.start() if start else agent

    def log(self, job: str, rank: int = 0, stream: str = "stdout") -> str:
        """All that a rank wrote to a stream."""
        answer = self.api.http.get(f"/jobs/{job}/ranks/{rank}/logs/{stream}")
        return answer.raise_for_status().content.decode()

    def processes(self, job: dict[str, Any]) -> list[int]:
        """Processes of a job that live on this machine."""
        attempt = self.api.job(job["id"])["attempt"]
        return marked_processes({"UNISONO_ATTEMPT": attempt}) if attempt else []

    def close(self) -> None:
        """End everything."""
        self.api.close()
        for agent in self.agents.values():
            agent.clean_up()
        self.server.stop()


def python_without_torch(folder: Path) -> str:
    """A Python that starts in milliseconds, for jobs that need no torch."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "bare"], check=True)
    return str(folder / "bare/bin/python")
