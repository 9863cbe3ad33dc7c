"""``unisono doctor``: looks at this machine and says what would not work, and the way out."""

from __future__ import annotations

import asyncio
import errno
import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["Finding", "examine"]

#: a rank holds a socket per peer and direction, and a control plane one per agent and browser tab
WANTED_DESCRIPTORS = 1024


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    verdict: Literal["ok", "note", "bad"]
    text: str


def examine() -> Iterator[Finding]:
    """Every check, one after the other; none of them changes anything."""
    checks: list[Callable[[], Iterator[Finding]]] = [
        _python,
        _torch,
        _names,
        _backend,
        _ports,
        _descriptors,
        _shared_memory,
        _control_plane,
    ]
    for check in checks:
        yield from check()


def _python() -> Iterator[Finding]:
    version = f"{platform.python_version()} at {sys.executable}"
    good = sys.version_info >= (3, 11)
    yield Finding("python", "ok" if good else "bad", version if good else f"{version}: 3.11 needed")
    unisono = importlib.metadata.version("unisono")
    worker = shutil.which("worker", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    yield Finding("unisono", "ok", unisono)
    if worker is None:
        yield Finding("worker", "bad", "no command `worker`: install the project, pip install .")


def _torch() -> Iterator[Finding]:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        text = "not installed: enough for a control plane; a node needs `unisono[worker]`"
        yield Finding("torch", "note", text)
        return
    yield Finding("torch", "ok", version)


def _names() -> Iterator[Finding]:
    """A file of the current folder that hides a package of ours breaks programs that use it."""
    spec = importlib.util.find_spec("collective")
    origin = Path(spec.origin or "") if spec else None
    home = Path(__file__).resolve().parents[2] / "collective"
    if origin is None or origin.resolve().parent != home:
        text = f"`import collective` finds {origin} and not {home}: rename that file or folder"
        yield Finding("collective", "bad", text)
    else:
        yield Finding("collective", "ok", str(home))


def _backend() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        return
    names = [entry.name for entry in importlib.metadata.entry_points(group="torch.backends")]
    if "unisono" not in names:
        text = "torch's entry point is missing: install the project into this Python, pip install ."
        yield Finding("backend", "bad", text)
        return
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "0":
        text = "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from finding it: unset it"
        yield Finding("backend", "bad", text)
        return
    code = (
        "import torch, torch.distributed as d;"
        "print('unisono' in d.Backend.backend_list, torch.cuda.device_count())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    words = done.stdout.split()
    if done.returncode != 0 or words[:1] != ["True"]:
        last = (done.stderr.strip().splitlines() or ["torch does not list it"])[-1]
        yield Finding("backend", "bad", f'init_process_group("unisono") would fail: {last}')
        return
    yield Finding("backend", "ok", f'init_process_group("unisono") works; {words[1]} CUDA devices')


def _ports() -> Iterator[Finding]:
    for port, use in ((8700, "control plane"), (8701, "data port of a node")):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("0.0.0.0", port))
            except OSError as error:
                taken = error.errno == errno.EADDRINUSE
                text = "in use: fine if it is ours" if taken else str(error.strerror)
                yield Finding(f"port {port}", "note", f"{use}: {text}")
            else:
                yield Finding(f"port {port}", "ok", f"{use}: free")


def _descriptors() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    good = soft >= WANTED_DESCRIPTORS
    text = f"{soft} open files (hard limit {hard})"
    yield Finding(
        "limits", "ok" if good else "note", text if good else f"{text}: raise it, ulimit -n"
    )


def _shared_memory() -> Iterator[Finding]:
    try:
        os.close(os.memfd_create("unisono-doctor", os.MFD_CLOEXEC))
    except OSError as error:
        yield Finding("memory", "bad", f"memfd_create does not work here: {error.strerror}")
    else:
        yield Finding("memory", "ok", "memfd_create works")


def _control_plane() -> Iterator[Finding]:
    from unisono.access import AccessError, control_plane_url, locate
    from unisono.client import ApiError, ControlPlane, Unreachable

    try:
        url = control_plane_url(dict(os.environ))
        access = locate()
    except AccessError as error:
        yield Finding("token", "note", str(error))
        return

    async def ask() -> tuple[dict[str, object], dict[str, object]]:
        async with ControlPlane(access) as control_plane:
            return (
                await control_plane.call("GET", "/version"),
                await control_plane.call("GET", "session"),
            )

    try:
        version, caller = asyncio.run(ask())
    except Unreachable as error:
        yield Finding("control plane", "note", str(error))
        return
    except ApiError as error:
        yield Finding("token", "bad", f"{access.source} is not accepted at {url}: {error}")
        return
    ours = importlib.metadata.version("unisono")
    same = version.get("version") == ours
    text = f"{url} runs {version.get('version')}" + ("" if same else f", this is {ours}")
    yield Finding("control plane", "ok" if same else "note", text)
    yield Finding("token", "ok", f"{access.source}: {caller.get('role')} {caller.get('name')}")
