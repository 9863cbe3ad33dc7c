"""``unisono demo``: a whole cluster on this machine that trains a real model, to watch.

A control plane on SQLite and two agents with two CPU slots each run below a warden
(`unisono.warden`), which ends them and removes their folder when the demo ends, however it ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import aclosing
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from unisono.access import AccessError, locate
from unisono.bundle import BundleError, pack
from unisono.client import ApiError, ControlPlane, Unreachable
from unisono.commands.console import EXIT_ERROR, describe, note
from unisono.commands.follow import OVER, exit_code, state_text
from unisono.demo_view import View

__all__ = ["KEYS", "Options", "example_script", "run", "summary"]

NODES = ("w1", "w2")
SLOTS = 2
PORT = 8700
#: seconds for the control plane to listen, and then for the workers to join
START_LIMIT = 90.0
#: seconds for the warden to end everything; it needs a few at most
END_LIMIT = 60.0
#: what `--json` prints, in this order
KEYS = (
    "job",
    "state",
    "nodes",
    "ranks",
    "steps",
    "accuracy",
    "samples_per_second",
    "replicas_identical",
    "slowest_rank",
)


class DemoError(RuntimeError):
    """The demo cannot go on; says why, with what the process at fault wrote last."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a person may choose."""

    epochs: int = 60
    #: end when the job is over
    leave: bool = False
    as_json: bool = False
    port: int | None = None


def example_script() -> Path:
    """The digits example: inside the installed package, or beside it in a checkout."""
    packaged = Path(str(resources.files("unisono"))) / "_examples" / "digits_ddp.py"
    checkout = Path(__file__).resolve().parents[1] / "examples" / "digits_ddp.py"
    for path in (packaged, checkout):
        if path.is_file():
            return path
    raise DemoError(f"the example is missing: neither {packaged} nor {checkout} exists")


def run(options: Options) -> int:
    """Run the demo to its end and return the exit code."""
    return asyncio.run(_Demo(options).main())


def summary(job: dict[str, Any] | None) -> dict[str, Any]:
    """What `--json` prints of a job, or of none."""
    if job is None:
        return dict.fromkeys(KEYS)
    progress = job.get("progress") or {}
    values = {
        "job": job["id"],
        "state": job["state"],
        "nodes": len(job.get("nodes") or []),
        "ranks": job.get("world_size"),
        "steps": progress.get("step"),
        **{key: progress.get(key) for key in KEYS[5:]},
    }
    return {key: values[key] for key in KEYS}


class _Demo:
    def __init__(self, options: Options) -> None:
        self.options = options
        self.view = View()
        self.job: dict[str, Any] | None = None
        self.stopped_by: int | None = None
        self.warden: _WardenClient | None = None

    async def main(self) -> int:
        loop = asyncio.get_running_loop()
        body = asyncio.create_task(self._body())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # nohup ignores this one on purpose
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._stop, number, body)
        code = 0
        try:
            await body
        except asyncio.CancelledError:
            code = 128 + (self.stopped_by or signal.SIGINT)
        except ApiError as error:
            code = _failed(describe(error))
        except Unreachable as error:
            code = _failed(await self._why(error))
        except (DemoError, BundleError, AccessError) as error:
            code = _failed(str(error))
        finally:
            self.view.close()
            if self.warden is not None:
                self.view.phase("stopping")
                await self.warden.end()
        if self.job is not None:
            if self.job["state"] in OVER:
                code = exit_code(self.job)
            else:
                self.job["state"] = "cancelled"  # it ended with its cluster
        self.view.phase("ended")
        if self.options.as_json:
            print(json.dumps(summary(self.job)), flush=True)
        return code

    async def _why(self, error: Unreachable) -> str:
        """How the process that gave no answer ended, which is told a moment later."""
        try:
            async with asyncio.timeout(2.0):
                return await self.warden.failure() if self.warden is not None else str(error)
        except TimeoutError:
            return str(error)

    def _stop(self, number: int, body: asyncio.Task[None]) -> None:
        if self.stopped_by is None and not body.done():
            self.stopped_by = number
            body.cancel()
        else:
            note("already stopping; a few seconds more")

    async def _body(self) -> None:
        script = example_script()
        self.view.phase("starting")
        self.warden = warden = _WardenClient.start()
        folder = await warden.folder()
        self.view.phase("starting the control plane")
        url, token, join_token = await self._start_control_plane(warden, folder)
        access = locate({"UNISONO_URL": url, "UNISONO_TOKEN_FILE": str(token)})
        async with ControlPlane(access) as control_plane:
            login = await control_plane.call("POST", "login-codes")
            self.view.phase("control plane ready")
            self.view.address(url, str(login["url"]))
            self.view.phase("joining two workers")
            for name in NODES:
                self._join(warden, name, folder, url, join_token)
            await _within(self._all_online(control_plane), warden, "the workers")
            self.view.phase("workers joined")
            await self._train(warden, control_plane, script)
        if not self.options.leave:
            self.view.phase("waiting for Ctrl-C")
            raise DemoError(await warden.failure())

    async def _start_control_plane(
        self, warden: _WardenClient, folder: Path
    ) -> tuple[str, Path, Path]:
        data = str(folder / "data")
        options = ["--host", "127.0.0.1", "--data-dir", data, "--port", str(self._port())]
        warden.launch("control-plane", "unisono.cli", ["serve", *options], announce="--announce-fd")
        ready = await _within(warden.announced("control-plane"), warden, "the control plane")
        return str(ready["url"]), Path(ready["operator_token_file"]), Path(ready["join_token_file"])

    def _port(self) -> int:
        """The port asked for, else 8700 if it is free, else 0 for any."""
        if self.options.port is not None:
            return self.options.port
        with socket.socket() as probe:
            # As the server does: a port in TIME_WAIT is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", PORT))
            except OSError:
                return 0
        return PORT

    def _join(
        self, warden: _WardenClient, name: str, folder: Path, url: str, token_file: Path
    ) -> None:
        options = ["--token-file", str(token_file), "--name", name, "--cpu-slots", str(SLOTS)]
        options += [
            "--no-gpus",
            "--advertise",
            "127.0.0.1",
            "--bind",
            "127.0.0.1",
            "--data-port",
            "0",
        ]
        options += ["--state-dir", str(folder / name)]
        warden.launch(name, "worker.cli", ["join", url, *options])

    async def _all_online(self, control_plane: ControlPlane) -> None:
        online: set[str] = set()
        async with aclosing(control_plane.events("events")) as events:
            async for event in events:
                for node in event.data.get("nodes") or []:
                    if node["state"] == "online" and len(node.get("devices") or []) >= SLOTS:
                        online.add(node["name"])
                if online >= set(NODES):
                    return

    async def _train(
        self, warden: _WardenClient, control_plane: ControlPlane, script: Path
    ) -> None:
        bundle = pack(script, script_only=True)
        digest = await control_plane.upload(bundle.data)
        job: dict[str, Any] = await control_plane.call(
            "POST",
            "jobs",
            body={
                "name": "digits demo",
                "bundle": digest,
                "script": bundle.script,
                "args": ["--epochs", str(self.options.epochs), "--device", "cpu"],
                "on": dict.fromkeys(NODES, SLOTS),
            },
        )
        self.job = job
        self.view.phase("job submitted")
        await warden.beside(self._watch(control_plane, job["id"]))
        self.view.phase("job over")
        self.view.summary(self.job)

    async def _watch(self, control_plane: ControlPlane, job_id: str) -> None:
        async with aclosing(control_plane.events(f"jobs/{job_id}/events")) as events:
            async for event in events:
                job = event.data.get("job")
                if job is None:
                    continue
                self._note_state(job)
                self.job = job
                self.view.show(job)
                if job["state"] in OVER:
                    return

    def _note_state(self, job: dict[str, Any]) -> None:
        if job["state"] == (self.job or {}).get("state"):
            return
        if job["state"] in OVER:
            self.view.close()
            note(state_text(job))
            if traceback := (job.get("cause") or {}).get("traceback"):
                note(traceback.rstrip())
        else:
            self.view.phase(f"job {job['state']}")


async def _within(work: Any, warden: _WardenClient, what: str) -> Any:
    try:
        async with asyncio.timeout(START_LIMIT):
            return await warden.beside(work)
    except TimeoutError:
        raise DemoError(
            f"{what} did not start within {START_LIMIT:.0f} s{warden.tails()}"
        ) from None


def _failed(message: str) -> int:
    note(f"error: {message}")
    return EXIT_ERROR


class _WardenClient:
    """The demo's side of its warden: one socket, on which end of file means the end."""

    def __init__(self, process: subprocess.Popen[bytes], owner: socket.socket) -> None:
        self._process = process
        self._owner = owner
        self._folder: Path | None = None
        loop = asyncio.get_running_loop()
        self._folder_known: asyncio.Future[Path] = loop.create_future()
        self._announced: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._failure: asyncio.Future[str] = loop.create_future()
        self._ending = False
        self._reader = asyncio.create_task(self._read())

    @classmethod
    def start(cls) -> _WardenClient:
        """Start a warden; no signal handler runs in between, since nothing here is awaited."""
        ours, theirs = socket.socketpair()
        # The user's own settings are for the user's own cluster.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("UNISONO_")}
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "unisono.warden"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        ours.setblocking(False)
        return cls(process, ours)

    async def folder(self) -> Path:
        folder: Path = await self.beside_future(asyncio.shield(self._folder_known))
        return folder

    def launch(
        self, name: str, module: str, argv: list[str], *, announce: str | None = None
    ) -> None:
        """Have the warden start a module of ours as a program."""
        if announce is not None:
            self._announced[name] = asyncio.get_running_loop().create_future()
        command = [sys.executable, "-P", "-m", module, *argv]
        message = json.dumps({"start": name, "argv": command, "announce": announce})
        self._owner.send(message.encode() + b"\n")

    async def announced(self, name: str) -> dict[str, Any]:
        return await self._announced[name]

    async def failure(self) -> str:
        """Wait until a process of the demo ends by itself; it says which, and its last lines."""
        return await asyncio.shield(self._failure)

    async def beside(self, work: Any) -> Any:
        """The result of `work`, or an error as soon as a process of the demo ends."""
        return await self.beside_future(asyncio.ensure_future(work))

    async def beside_future(self, task: asyncio.Future[Any]) -> Any:
        try:
            await asyncio.wait([task, self._failure], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise DemoError(self._failure.result())
            return task.result()
        finally:
            if not task.done():
                task.cancel()

    def tails(self) -> str:
        """The last lines of every log, to be put behind an error."""
        if self._folder is None:
            return ""
        return "".join(_tail(log) for log in sorted(self._folder.glob("*.log")))

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        rest = b""
        while data := await loop.sock_recv(self._owner, 1 << 16):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._take(json.loads(line))
        self._fail(f"the process that looks after the others ended; its folder: {self._folder}")

    def _take(self, message: dict[str, Any]) -> None:
        if "folder" in message:
            self._folder = Path(message["folder"])
            self._folder_known.set_result(self._folder)
        elif "announced" in message:
            future = self._announced[message["announced"]]
            if not future.done():
                future.set_result(message["data"])
        elif "exited" in message:
            name, code = message["exited"], message["code"]
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            tail = "" if self._folder is None else _tail(self._folder / f"{name}.log")
            self._fail(f"{name} ended by itself ({how}){tail}")

    def _fail(self, reason: str) -> None:
        if not self._failure.done():
            self._failure.set_result(reason)

    async def end(self) -> None:
        """Have everything ended, and wait for it."""
        self._owner.shutdown(socket.SHUT_WR)
        try:
            async with asyncio.timeout(END_LIMIT):
                await self._reader
                await asyncio.to_thread(self._process.wait)
        except TimeoutError:
            note(f"error: the demo's processes did not end within {END_LIMIT:.0f} s")
            self._process.kill()
            self._process.wait()
        finally:
            self._owner.close()


def _tail(path: Path, lines: int = 15) -> str:
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return ""
    last = text.strip().splitlines()[-lines:]
    return "".join(f"\n  {path.stem}: {line}" for line in last)
