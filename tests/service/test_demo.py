"""The demo: what it shows, how it ends, and that nothing of it is left."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
from pathlib import Path

import pytest
from demo_process import Demo
from waiting import eventually

from unisono.demo import KEYS
from worker.supervisor import marked_processes

pytestmark = pytest.mark.timeout(240)

PHASES = [
    "starting",
    "starting the control plane",
    "control plane ready",
    "joining two workers",
    "workers joined",
    "job submitted",
    "job running",
]
SIGNALS = [signal.SIGINT, signal.SIGTERM]


def test_a_whole_run(tmp_path: Path) -> None:
    """It trains to over 95 %, says so as JSON in its last line, ends with 0 and leaves nothing."""
    with Demo(tmp_path, "--exit", "--json", "--epochs", "15") as demo:
        demo.reach("job running")
        assert secrets_shown(demo) == []
        assert demo.wait(150) == 0, demo.transcript()
        result = demo.result()
        demo.assert_nothing_left()
    assert tuple(result) == KEYS
    assert result["state"] == "completed"
    assert (result["nodes"], result["ranks"]) == (2, 4)
    assert result["steps"] == 15 * 12
    assert result["accuracy"] > 0.95
    assert result["samples_per_second"] > 0
    assert result["replicas_identical"] is True
    assert result["slowest_rank"] in range(4)
    assert any("/login#code=" in line for line in demo.said)


def secrets_shown(demo: Demo) -> list[str]:
    """Where a token of the demo can be read by others: arguments, ranks' environments, logs."""
    (folder,) = demo.folder.iterdir()
    tokens = [path.read_bytes().strip() for path in folder.glob("data/*.token")]
    assert len(tokens) >= 3
    texts = {str(path): path.read_bytes() for path in folder.rglob("*.log")}
    for pid in demo.seen:
        texts[f"arguments of {pid}"] = Path(f"/proc/{pid}/cmdline").read_bytes()
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        if b"UNISONO_ATTEMPT=" in environment:
            texts[f"environment of {pid}"] = environment
    assert any(name.startswith("environment") for name in texts)
    texts["what the demo says"] = demo.transcript().encode()
    return [name for name, text in texts.items() if any(token in text for token in tokens)]


def test_a_killed_rank_is_a_failure(tmp_path: Path) -> None:
    """When a rank is killed the job has failed, and so has the demo; its pages stay until Ctrl-C,
    after which nothing of it is left."""
    with Demo(tmp_path, "--json", "--epochs", "2000") as demo:
        demo.reach("job running")
        (rank,) = [pid for pid in marked_processes({"RANK": "2"} | demo.mark) if _trains(pid)]
        os.kill(rank, signal.SIGKILL)
        demo.reach("waiting for Ctrl-C")
        demo.send(signal.SIGINT)
        assert demo.wait() == 1, demo.transcript()
        result = demo.result()
        demo.assert_nothing_left()
    assert result["state"] == "failed"
    assert "rank 2 on node" in demo.transcript()
    assert "signal 9" in demo.transcript()


def _trains(pid: int) -> bool:
    return any(word.endswith("digits_ddp.py") for word in _arguments(pid))


def _arguments(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


@pytest.mark.parametrize("phase", PHASES)
def test_interrupted_in_a_phase(tmp_path: Path, phase: str) -> None:
    """After either signal in any phase no process, file or memory segment is left."""
    with contextlib.ExitStack() as stack:
        # Both at once: a demo's parts start one after the other, and leave a core idle.
        demos = {
            number: stack.enter_context(Demo(tmp_path / number.name, "--json", "--epochs", "2000"))
            for number in SIGNALS
        }
        for number, demo in demos.items():
            demo.reach(phase)
            demo.send(number)
        for number, demo in demos.items():
            assert demo.wait() == 128 + number, demo.transcript()
            assert demo.result()["state"] in (None, "cancelled")
            demo.assert_nothing_left()


def test_killed(tmp_path: Path) -> None:
    """Also when the demo is killed, everything below it ends."""
    with Demo(tmp_path, "--epochs", "2000") as demo:
        demo.reach("job running")
        demo.send(signal.SIGKILL)
        assert demo.wait() == -signal.SIGKILL
        demo.assert_nothing_left(timeout=40)


def test_killed_below(tmp_path: Path) -> None:
    """When the process that looks after the others is killed, they end and the demo says so."""
    with Demo(tmp_path, "--epochs", "2000") as demo:
        demo.reach("workers joined")
        (warden,) = [pid for pid in demo.seen if "unisono.warden" in _arguments(pid)]
        os.kill(warden, signal.SIGKILL)
        assert demo.wait() == 5
        assert str(demo.folder) in demo.transcript()
        eventually(lambda: not marked_processes(demo.mark), 40)


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    """A dashboard that cannot listen where it was told ends the demo with the reason."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with Demo(tmp_path, "--exit", "--json", "--port", str(port)) as demo:
            assert demo.wait() == 5
            assert demo.result() == dict.fromkeys(KEYS)
            assert f"cannot listen on 127.0.0.1 port {port}" in demo.transcript()
            demo.assert_nothing_left()


def test_two_signals_are_no_worse_than_one(tmp_path: Path) -> None:
    """An impatient second Ctrl-C does not keep the first from cleaning up."""
    with Demo(tmp_path, "--epochs", "2000") as demo:
        demo.reach("joining two workers")
        demo.send(signal.SIGINT)
        demo.reach("stopping")
        demo.send(signal.SIGINT)
        assert demo.wait() == 128 + signal.SIGINT
        demo.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(3))
def test_interrupted_at_random_times(tmp_path: Path, batch: int) -> None:
    """Wherever the signal hits, also before the first phase, nothing is left."""
    chance = random.Random(batch)
    demos = [Demo(tmp_path / str(index), "--epochs", "2000") for index in range(4)]
    try:
        # Several at once, so that none is as fast as alone; the pause is the random time itself.
        for demo in demos:
            _pause(chance.uniform(0.0, 2.5))
            demo.send(chance.choice(SIGNALS))
        for demo in demos:
            assert demo.wait() != 0
            demo.assert_nothing_left()
    finally:
        for demo in demos:
            demo.__exit__()


def _pause(seconds: float) -> None:
    signal.sigtimedwait([], seconds)
