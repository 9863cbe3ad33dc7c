"""An agent's state folder: who it is, its credential, its run folders, and the lock on it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path

from worker.errors import LocalProblem

__all__ = ["Credential", "StateFolder", "default_folder"]

_MAX_SOCKET_PATH = 100
#: the file with the secret by which nodes of a cluster measure their links
PROBE_SECRET = "probe-secret"


@dataclass(frozen=True)
class Credential:
    """What the control plane gave this node at its join."""

    node_id: str
    name: str
    secret: str


def default_folder(host: str, port: int, name: str) -> Path:
    """Where an agent keeps its state: one folder per control plane and node name."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    place = re.sub(r"[^A-Za-z0-9.-]", "_", f"{host}-{port}")
    return Path(base) / "unisono" / "agents" / place / name


class StateFolder:
    """Held by one agent at a time.

    Raises:
        LocalProblem: another agent holds it, or it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._short: Path | None = None
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            # it holds a credential: neither git nor a job's bundle may pick it up
            (self.path / ".gitignore").write_text("*\n")
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LocalProblem(
                f"cannot use the state folder {self.path}: {error.strerror}; "
                "choose another with --state-dir"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._lock)
            raise LocalProblem(
                f"another agent (pid {holder}) uses the state folder {self.path}; a second agent "
                "on this machine needs its own --name or --state-dir"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        self.agent_id = self._agent_id()
        self.incarnation = secrets.token_hex(8)

    def _agent_id(self) -> str:
        path = self.path / "agent-id"
        if path.exists():
            return path.read_text().strip()
        agent_id = f"g-{secrets.token_hex(8)}"
        self._write(path, agent_id + "\n")
        return agent_id

    def _write(self, path: Path, text: str) -> None:
        """Replace a file in one step; readable by its owner only."""
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(descriptor)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise

    # -- credential

    def credential(self) -> Credential | None:
        """The stored credential, if this agent has joined before."""
        path = self.path / "credential.json"
        if not path.exists():
            return None
        try:
            body = json.loads(path.read_text())
            return Credential(body["node_id"], body["name"], body["credential"])
        except (ValueError, KeyError, TypeError):
            raise LocalProblem(
                f"{path} is damaged; delete it and join again with a join token"
            ) from None

    def store_credential(self, credential: Credential) -> None:
        """Keep the credential, mode 0600."""
        body = {
            "node_id": credential.node_id,
            "name": credential.name,
            "credential": credential.secret,
        }
        self._write(self.path / "credential.json", json.dumps(body) + "\n")

    def store_probe_secret(self, secret: str) -> None:
        """Keep what ``worker probe --peer`` shows to other nodes, mode 0600."""
        self._write(self.path / PROBE_SECRET, secret + "\n")

    def forget_credential(self) -> None:
        """The credential is dead."""
        (self.path / "credential.json").unlink(missing_ok=True)

    # -- places

    @property
    def spool(self) -> Path:
        return self.path / "spool"

    @property
    def bundles(self) -> Path:
        return self.path / "bundles"

    def run_folder(self, attempt: str) -> Path:
        """The run folder of an attempt; it outlives the job and is never cleaned up."""
        return self.path / "runs" / attempt

    def socket_path(self) -> Path:
        """Where the ranks' socket goes: in this folder, or in a short one if that is too deep."""
        path = self.path / "agent.sock"
        if len(os.fsencode(path)) <= _MAX_SOCKET_PATH:
            return path
        digest = hashlib.sha256(os.fsencode(self.path)).hexdigest()[:16]
        folder = Path("/tmp") / f"unisono-{os.getuid()}-{digest}"
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise LocalProblem(f"{folder} belongs to somebody else or is open to others; remove it")
        self._short = folder
        return folder / "agent.sock"

    def close(self) -> None:
        """Let another agent have the folder."""
        if self._short is not None:
            with contextlib.suppress(OSError):  # somebody removed it, or put something else in it
                self._short.rmdir()
        os.close(self._lock)
