"""The launcher: code, paths and Python are checked first; arguments stay as they were given."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from collective.messages import Device, Host, JobSpec, Launch, Member, Plan
from worker.bundles import Bundles
from worker.devices import FakeDevices, NvidiaGpus, discover, list_devices, visible_devices
from worker.errors import LocalProblem
from worker.interpreters import Interpreters
from worker.launcher import Launcher, ReadyRun
from worker.store import Stores

pytestmark = pytest.mark.timeout(60)

SPEC = JobSpec(job="j-1", attempt="a-1", name="test", script="train.py")
RANKS = [Member(rank=1, node="w1", local_rank=0, device=0)]


class Fixture:
    def __init__(self, folder: Path, home: Path) -> None:
        self.folder = folder
        self.home = home
        self.archives: dict[str, bytes] = {}
        self.fetched: list[str] = []
        self.stores = Stores({"PATH": os.environ["PATH"]}, 60.0, 0.2)
        self.launcher = Launcher(
            node=lambda: "w1",
            agent_id="g-1",
            run_folder=lambda attempt: folder / "runs" / attempt,
            bundles=Bundles(folder / "bundles", self.fetch),
            interpreters=Interpreters(20.0),
            stores=self.stores,
            envs={"plain": "/usr/bin/env"},
            default_python=sys.executable,
        )

    def fetch(self, digest: str, target: int) -> None:
        self.fetched.append(digest)
        if digest not in self.archives:
            raise LocalProblem(f"bundle {digest[:12]}… cannot be fetched: 404")
        os.write(target, self.archives[digest])

    def bundle(self, *entries: tuple[tarfile.TarInfo, bytes]) -> str:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
            for info, data in entries:
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        digest = hashlib.sha256(buffer.getvalue()).hexdigest()
        self.archives[digest] = buffer.getvalue()
        return digest

    def prepare(self, spec: JobSpec) -> ReadyRun:
        answer, ready = self.launcher.prepare(spec, RANKS)
        assert answer.problems == [] and ready is not None
        return ready

    def problem(self, **changes: object) -> tuple[str, str]:
        answer, ready = self.launcher.prepare(replace(SPEC, **changes), RANKS)  # type: ignore[arg-type]
        assert ready is None
        (problem,) = answer.problems
        return problem.code, problem.message


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fixture]:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    node = Fixture(tmp_path, home)
    yield node
    node.stores.shut_down()


def member(name: str, data: bytes = b"") -> tuple[tarfile.TarInfo, bytes]:
    return tarfile.TarInfo(name), data


def test_missing_paths_are_named_in_full(node: Fixture) -> None:
    """Node, resolved path and working directory are in the message for each way to miss."""
    home = node.home
    code, message = node.problem()
    assert code == "script-missing"
    assert message == f"w1: the script {home}/train.py does not exist (working directory {home})"
    assert f"{home}/code/x.py" in node.problem(script="~/code/x.py")[1]
    assert "the script /nowhere/x.py" in node.problem(script="/nowhere/x.py")[1]
    assert node.problem(workdir="/nowhere/here") == (
        "workdir-missing",
        "w1: the working directory /nowhere/here does not exist",
    )
    (home / "folder").mkdir()
    assert node.problem(script="folder")[0] == "script-is-directory"
    assert node.problem(bundle="0" * 64)[0] == "bundle-unavailable"


def test_commands_are_lists_of_executables(node: Fixture) -> None:
    """A command in one string, a file without the right to run, a directory: each says the fix."""
    code, message = node.problem(script=None, command=["python train.py"])
    assert code == "command-is-one-string" and '["python", "train.py"]' in message
    assert node.problem(script=None, command=["no-such-program"])[0] == "executable-missing"
    (node.home / "run.sh").write_text("#!/bin/sh\n")
    code, message = node.problem(script=None, command=["./run.sh", "x"])
    assert code == "not-executable" and f"{node.home}/run.sh" in message and "chmod" in message
    assert node.problem(script=None, command=["./"])[0] == "command-is-directory"
    (node.home / "run.sh").chmod(0o755)
    ready = node.prepare(replace(SPEC, script=None, command=["./run.sh", "a b"]))
    assert ready.argv == [f"{node.home}/run.sh", "a b"]


def test_environments_and_pythons_are_asked(node: Fixture) -> None:
    """An unknown environment lists the known ones; what is no Python is found out."""
    (node.home / "train.py").touch()
    assert node.problem(python="/nowhere/python") == (
        "python-missing",
        "w1: the Python /nowhere/python does not exist or cannot be run",
    )
    code, message = node.problem(env_name="train")
    assert code == "env-missing" and "known: plain" in message and "--env train=" in message
    assert node.problem(env_name="plain")[0] == "python-broken"
    answer, _ = node.launcher.prepare(SPEC, RANKS)
    assert answer.python_version == ".".join(map(str, sys.version_info[:3]))
    assert answer.torch_version is not None and answer.unisono_version is not None


def test_a_python_without_torch_runs_jobs(node: Fixture, tmp_path: Path) -> None:
    """A job whose Python has neither torch nor Unisono is prepared, with a port of its own."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    (node.home / "train.py").touch()
    spec = replace(SPEC, python=str(tmp_path / "bare/bin/python"), hosts_store=True)
    answer, ready = node.launcher.prepare(spec, RANKS)
    assert answer.problems == [] and ready is not None
    assert (answer.torch_version, answer.unisono_version) == (None, None)
    assert answer.store_port is not None
    assert ready.argv[0] == f"{tmp_path}/bare/bin/python"


def test_bundles_are_fetched_once_and_copied_for_each_attempt(node: Fixture) -> None:
    """The cache is never written to: an attempt that changes its code changes its own copy."""
    digest = node.bundle(member("train.py", b"print(1)"), member("lib/data.txt", b"data"))
    first = node.prepare(replace(SPEC, bundle=digest))
    (first.workdir / "train.py").write_text("changed")
    second = node.prepare(
        replace(SPEC, bundle=digest, attempt="a-2", workdir="lib", script="../train.py")
    )
    assert node.fetched == [digest]
    assert second.workdir == node.folder / "runs/a-2/code/lib"
    code, message = node.problem(bundle=digest, attempt="a-3", workdir="lib/../..")
    assert code == "workdir-outside" and "'lib/../..' leads out of the bundle" in message
    assert Path(second.argv[1]).read_text() == "print(1)"
    assert (first.workdir / "train.py").read_text() == "changed"


@pytest.mark.parametrize("name", ["../evil.py", "/tmp/evil.py"])
def test_bundles_cannot_leave_their_folder(node: Fixture, name: str) -> None:
    """An archive with a way out of its folder is refused as a whole, or kept inside."""
    digest = node.bundle(member(name, b"evil"))
    answer, _ = node.launcher.prepare(replace(SPEC, bundle=digest), RANKS)
    assert answer.problems != []
    assert not (node.folder / "runs/a-1/evil.py").exists()
    assert not Path("/tmp/evil.py").exists()


def test_links_out_of_a_bundle_are_refused(node: Fixture) -> None:
    """A symbolic link to the outside is not unpacked."""
    link = tarfile.TarInfo("link")
    link.type = tarfile.SYMTYPE
    link.linkname = "/etc/passwd"
    assert node.problem(bundle=node.bundle((link, b"")))[0] == "bundle-unavailable"


def test_a_damaged_bundle_is_found_out(node: Fixture) -> None:
    """What does not have the digest that was asked for is thrown away."""
    digest = node.bundle(member("train.py"))
    node.archives[digest] += b"x"
    code, message = node.problem(bundle=digest)
    assert code == "bundle-unavailable" and "damaged" in message
    assert list((node.folder / "bundles").iterdir()) == []
    assert node.problem(bundle="../../etc/passwd")[0] == "bundle-unavailable"


def test_torchs_store_runs_in_the_jobs_python(node: Fixture) -> None:
    """The first node's store answers a client of torch, and is gone after its attempt."""
    (node.home / "train.py").touch()
    answer, _ = node.launcher.prepare(replace(SPEC, hosts_store=True), RANKS)
    assert answer.problems == []
    client = (
        "import sys\nfrom datetime import timedelta\nfrom torch.distributed import TCPStore\n"
        "store = TCPStore('127.0.0.1', int(sys.argv[1]), None, False, timedelta(seconds=5))\n"
        "store.set('key', 'value')\nprint(store.get('key').decode())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", client, str(answer.store_port)], capture_output=True, text=True
    )
    assert done.stdout == "value\n", done.stderr
    (host,) = node.stores._hosts.values()
    node.launcher.close("a-1")
    host.process.wait(10)
    assert not node.stores._hosts


ARGUMENTS = [
    "I'm a student",
    'he said "-4C outside"',
    "",
    '{"a": "b c"}',
    "*",
    "$HOME;echo x",
    "模型 žluť 🐎",
    "-4C",
    "--",
    "two\nlines",
    "x" * 100_000,
]


def launch(
    ready: ReadyRun,
    node: Fixture,
    core_sets: dict[str, str] | None = None,
    **devices: list[Device],
) -> dict[str, str]:
    core_sets = core_sets or {"w0": "", "w1": ""}
    plan = Plan(
        job="j-1",
        attempt="a-1",
        epoch=1,
        secret="5ec7e7",
        strategy="ring",
        engine="unisono",
        members=[Member(rank=0, node="w0", local_rank=0, device=0), *ready.ranks],
        hosts=[
            Host(node=name, addresses=["10.0.0.5"], data_port=8701, core_set=cores)
            for name, cores in core_sets.items()
        ],
    )
    order = Launch(attempt="a-1", plan=plan, master_address="10.0.0.4", master_port=29500)
    return node.launcher.environment(
        ready,
        ready.ranks[0],
        order,
        token="t0ken",
        socket_path="/s/agent.sock",
        devices=devices.get("devices", [Device(index=0, kind="cpu", name="CPU slot")]),
        cores=8,
    )


def test_arguments_and_environment_reach_the_program_unchanged(
    node: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No shell sees an argument, and the environment is torchrun's plus the job's own values."""
    monkeypatch.setenv("UNISONO_TOKEN", "agent's own")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    (node.home / "train.py").write_text(
        "import json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))"
    )
    ready = node.prepare(
        replace(SPEC, args=ARGUMENTS, environment={"LR": "0.1 $X", "PYTHONUNBUFFERED": ""})
    )
    done = subprocess.run(ready.argv, env=launch(ready, node), capture_output=True, check=True)
    arguments, environment = json.loads(done.stdout)
    assert arguments == ARGUMENTS
    expected = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "10.0.0.4",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "UNISONO_NODE": "w1",
        "UNISONO_BACKEND": "unisono",
        "UNISONO_STRATEGY": "ring",
        "UNISONO_RUN_DIR": str(node.folder / "runs/a-1"),
        "OMP_NUM_THREADS": "3",
        "CUDA_VISIBLE_DEVICES": "",
        "LR": "0.1 $X",
        "PYTHONUNBUFFERED": "",
    }
    assert {name: environment.get(name) for name in expected} == expected
    assert "UNISONO_TOKEN" not in environment
    assert not any("5ec7e7" in value for value in environment.values())


def test_defaults_fill_what_nobody_set(node: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output is unbuffered and the cores are shared out, unless somebody said otherwise."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    (node.home / "train.py").touch()
    environment = launch(node.prepare(SPEC), node)
    assert (environment["OMP_NUM_THREADS"], environment["PYTHONUNBUFFERED"]) == ("8", "1")
    for core_sets, threads in (
        ({"w0": "boot/0-7", "w1": "boot/0-7"}, "4"),
        ({"w0": "boot/0-7", "w1": "boot/8-15"}, "8"),
    ):
        assert launch(node.prepare(SPEC), node, core_sets)["OMP_NUM_THREADS"] == threads


def test_ranks_see_the_jobs_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Devices are numbered through, busy ones say why, and GPUs are named by their UUIDs."""
    gpus = [
        {"index": 0, "kind": "cuda", "name": "GPU A", "uuid": "GPU-aa"},
        {"index": 1, "kind": "cuda", "name": "GPU B", "uuid": "GPU-bb", "busy": "python (pid 1)"},
    ]
    (tmp_path / "devices.json").write_text(json.dumps(gpus))
    monkeypatch.setenv("UNISONO_FAKE_DEVICES", str(tmp_path / "devices.json"))
    providers = discover(2, lambda pid: False)
    assert isinstance(providers[0], FakeDevices)
    devices = list_devices(providers)
    assert [device.index for device in devices] == [0, 1, 2, 3]
    assert devices[1].busy == "python (pid 1)" and devices[3].kind == "cpu"
    assert visible_devices(devices, [1, 0]) == "GPU-bb,GPU-aa"
    assert visible_devices(devices, [2, 3]) == ""
    without = list_devices(discover(2, lambda pid: False, gpus=False))
    assert [device.kind for device in without] == ["cpu", "cpu"]


def test_a_machine_with_nothing_to_offer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU and without CPU slots there is nothing to join with."""
    monkeypatch.setenv("UNISONO_FAKE_DEVICES", "[]")
    with pytest.raises(LocalProblem, match="--cpu-slots N"):
        discover(0, lambda pid: False)


def test_a_gpu_with_a_foreign_process_is_busy() -> None:
    """What NVML shows becomes devices: ours do not make a GPU busy, the largest stranger does."""

    class Nvml:
        """NVML's answers on a machine with two GPUs."""

        class NVMLError_NotSupported(Exception):
            pass

        @staticmethod
        def nvmlDeviceGetCount() -> int:
            return 2

        def __getattr__(self, name: str) -> object:
            answers = {
                "nvmlDeviceGetHandleByIndex": lambda index: index,
                "nvmlDeviceGetName": lambda handle: b"GPU A",
                "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
                "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=80 << 30),
                "nvmlDeviceGetComputeRunningProcesses": self.processes,
            }
            return answers[name]

        def processes(self, handle: int) -> list[SimpleNamespace]:
            ours = SimpleNamespace(pid=7, usedGpuMemory=1 << 30)
            small = SimpleNamespace(pid=1, usedGpuMemory=None)
            large = SimpleNamespace(pid=os.getpid(), usedGpuMemory=3 << 30)
            return [ours] if handle == 0 else [ours, small, large]

    free, busy = NvidiaGpus(Nvml(), lambda pid: pid == 7).devices()
    assert (free.busy, free.name, free.uuid, free.memory_bytes) == (
        None,
        "GPU A",
        "GPU-0",
        80 << 30,
    )
    name = Path("/proc/self/comm").read_text().strip()
    assert busy.busy == f"{name} (pid {os.getpid()}), 3.0 GiB and 1 more"
