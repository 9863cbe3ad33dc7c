"""The state folder: one agent at a time, secrets for their owner, and paths that fit."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from worker.control import ControlPlane
from worker.errors import LocalProblem
from worker.state import Credential, StateFolder, default_folder


def test_identity_and_credential_survive_a_restart(tmp_path: Path) -> None:
    """The agent id stays, the incarnation does not, and the credential is its owner's alone."""
    first = StateFolder(tmp_path / "state")
    assert first.credential() is None
    first.store_credential(Credential("n-1", "w1", "s3cret"))
    path = tmp_path / "state/credential.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    first.close()
    second = StateFolder(tmp_path / "state")
    assert second.agent_id == first.agent_id
    assert second.incarnation != first.incarnation
    assert second.credential() == Credential("n-1", "w1", "s3cret")
    path.write_text("{")
    with pytest.raises(LocalProblem, match=r"credential\.json is damaged"):
        second.credential()
    second.close()


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    """Two agents never share a state folder; the message names the holder and the options."""
    first = StateFolder(tmp_path)
    with pytest.raises(LocalProblem, match=rf"pid {os.getpid()}.*--name or --state-dir"):
        StateFolder(tmp_path)
    first.close()


def test_the_ranks_socket_fits_into_its_limit(tmp_path: Path) -> None:
    """A deep state folder gets a short socket path, closed to others, for as long as it is used."""
    state = StateFolder(tmp_path / ("d" * 90))
    path = state.socket_path()
    assert len(os.fsencode(path)) < 108
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.parent.chmod(0o755)
    with pytest.raises(LocalProblem, match="open to others"):
        state.socket_path()
    state.close()
    assert not path.parent.exists()


def test_an_agent_that_cannot_join_leaves_no_socket(tmp_path: Path) -> None:
    """Also where its start fails, nothing stays outside of an agent's state folder."""
    deep = tmp_path / ("d" * 90)
    state = StateFolder(deep)
    short = state.socket_path().parent
    state.close()
    command = [sys.executable, "-m", "worker.cli", "join", "127.0.0.1:1", "--cpu-slots", "1"]
    command += ["--data-port", "0", "--state-dir", str(deep)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3 and "has not joined yet" in done.stderr
    assert (deep / "agent-id").exists() and not short.exists()


def test_each_control_plane_and_name_has_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several agents of one machine do not meet in one folder."""
    monkeypatch.setenv("XDG_STATE_HOME", "/s")
    assert default_folder("::1", 8700, "w1") == Path("/s/unisono/agents/__1-8700/w1")
    assert default_folder("10.0.0.1", 8700, "w2") == Path("/s/unisono/agents/10.0.0.1-8700/w2")


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://10.0.0.1:8700", "http://10.0.0.1:8700"),
        ("10.0.0.1", "http://10.0.0.1:8700"),
        ("head:9000/", "http://head:9000"),
        ("https://unisono.example.com/cluster/", "https://unisono.example.com:443/cluster"),
        ("http://[::1]:8700", "http://[::1]:8700"),
    ],
)
def test_addresses_of_control_planes(text: str, url: str) -> None:
    """Scheme and port may be left out; IPv6 keeps its brackets."""
    control = ControlPlane.parse(text)
    assert control.url == url
    assert control.agent_url == url.replace("http", "ws", 1) + "/api/v1/agent"


@pytest.mark.parametrize("text", ["ftp://head", "http://", "http://head:port", "http://a:b@head"])
def test_what_is_no_control_plane_is_refused(text: str) -> None:
    """A wrong address says what is expected."""
    with pytest.raises(LocalProblem, match="control plane"):
        ControlPlane.parse(text)
