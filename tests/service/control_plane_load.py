"""A load for a control plane of its own: many agents, one job on all, steps, and readers of pages.

Run as a program, it prints what the control plane took and how long pages took, as JSON; a machine
that is busy with other things changes the CPU time little, but the times of pages a lot.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx
from control_plane import Api, ControlPlane
from websockets.asyncio.client import ClientConnection, connect
from websockets.typing import Subprotocol

from collective.messages import (
    AGENT_PROTOCOL,
    Ack,
    AgentHello,
    Device,
    Heartbeat,
    Launch,
    Prepare,
    Prepared,
    RankState,
    Spooled,
    Steps,
    Welcome,
    decode,
    encode,
)

#: product times as they are by default, other than in tests
TIMES = {"heartbeat": 2.0, "node_timeout": 15.0, "stream_interval": 0.25, "stream_beat": 5.0}
#: as a rank's reporter sends them: once a second
RATE = 10
COLUMNS = ("data", "compute", "exposed", "optimizer", "communication", "waited")


class Agent:
    """One simulated node."""

    def __init__(self, name: str, ranks: int, seconds: float) -> None:
        self.name, self.ranks, self.seconds = name, ranks, seconds
        self.number = self.acknowledged = 0
        self.sent: dict[int, float] = {}
        self.delays: list[float] = []
        self.done = asyncio.Event()

    async def run(self, plane: ControlPlane, joined: asyncio.Semaphore) -> None:
        """Join, take the job, send its steps, and stay until all is acknowledged."""
        agent_id = uuid.uuid4().hex
        body = {"agent_id": agent_id, "name": self.name, "hostname": "simulated"}
        headers = {"Authorization": f"Bearer {plane.token('join')}"}
        async with httpx.AsyncClient(trust_env=False, timeout=60, headers=headers) as http:
            answer = await http.post(f"{plane.url}/api/v1/join", json=body)
        credential = answer.raise_for_status().json()["credential"]
        async with connect(
            f"ws{plane.url.removeprefix('http')}/api/v1/agent",
            additional_headers={"Authorization": f"Bearer {credential}"},
            subprotocols=[Subprotocol(AGENT_PROTOCOL)],
            proxy=None,
            compression=None,
            ping_interval=None,
            max_size=None,
        ) as socket:
            await socket.send(encode(self._hello(agent_id)))
            async with asyncio.TaskGroup() as tasks:
                async for text in socket:
                    message = decode(text)
                    if isinstance(message, Welcome):
                        tasks.create_task(self._beat(socket))
                        joined.release()
                    elif isinstance(message, Prepare):
                        await socket.send(encode(self._prepared(message)))
                    elif isinstance(message, Launch):
                        tasks.create_task(self._train(socket, message))
                    elif isinstance(message, Ack):
                        self._acknowledge(message.number)
                        if self.done.is_set() and self.acknowledged == self.number:
                            return

    def _hello(self, agent_id: str) -> AgentHello:
        devices = [Device(index=k, kind="cpu", name=f"slot {k}") for k in range(self.ranks)]
        return AgentHello(
            agent_id=agent_id, incarnation=uuid.uuid4().hex, name=self.name, hostname="simulated",
            addresses=["10.0.0.1"], data_port=8701, devices=devices, envs=[], version="0",
            cores=self.ranks, memory_bytes=1 << 30,
        )  # fmt: skip

    def _prepared(self, order: Prepare) -> Prepared:
        port = 29500 if order.spec.hosts_store else None
        return Prepared(attempt=order.spec.attempt, problems=[], store_port=port)

    async def _beat(self, socket: ClientConnection) -> None:
        while not self.done.is_set():
            await socket.send(encode(Heartbeat(at=time.time())))
            await asyncio.sleep(TIMES["heartbeat"])

    async def _put(self, socket: ClientConnection, **part: Any) -> None:
        self.number += 1
        self.sent[self.number] = time.monotonic()
        await socket.send(encode(Spooled(number=self.number, at=time.time(), **part)))

    def _acknowledge(self, number: int) -> None:
        now = time.monotonic()
        for entry in range(self.acknowledged + 1, number + 1):
            self.delays.append(now - self.sent.pop(entry))
        self.acknowledged = number

    async def _train(self, socket: ClientConnection, order: Launch) -> None:
        ranks = [member.rank for member in order.plan.members if member.node == self.name]
        for rank in ranks:
            state = RankState(attempt=order.attempt, rank=rank, state="running", pid=1)
            await self._put(socket, rank=state)
        start = time.monotonic() + ranks[0] % 97 / 97
        for second in range(int(self.seconds)):
            await asyncio.sleep(max(0.0, start + second - time.monotonic()))
            if second + 1 == int(self.seconds):
                self.done.set()
            for rank in ranks:
                await self._put(socket, steps=_steps(order.attempt, rank, second * RATE + 1))


def _steps(attempt: str, rank: int, first: int) -> Steps:
    parts = {name: [0.0123 + k * 0.0011 for k in range(RATE)] for name in COLUMNS}
    return Steps(
        attempt=attempt, rank=rank, step=list(range(first, first + RATE)),
        at=[time.time() + k / RATE for k in range(RATE)], total=[1 / RATE] * RATE,
        sent=[1 << 20] * RATE, label=["step"] * RATE, **parts,
    )  # fmt: skip


def _cpu(pid: int) -> float:
    """Seconds that a process has computed so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _look(plane: ControlPlane, job: str, over: threading.Event) -> dict[str, list[float]]:
    """Fetch pages as a browser does, one after the other, until it is over."""
    found: dict[str, list[float]] = {}
    with (
        plane.client() as api,
        httpx.Client(base_url=plane.url, trust_env=False, timeout=60) as web,
    ):
        code = api.post("/login-codes").raise_for_status().json()["code"]
        web.post("/api/v1/session", json={"code": code}).raise_for_status()
        while not over.wait(0.2):
            for path in (
                "/",
                f"/jobs/{job}",
                "/nodes/n0",
                f"/api/v1/jobs/{job}/steps?from_step=-50",
            ):
                start = time.monotonic()
                web.get(path).raise_for_status()
                found.setdefault(path.replace(job, "JOB"), []).append(time.monotonic() - start)
    return found


def _listen(plane: ControlPlane, path: str, over: threading.Event) -> None:
    """Read an event stream as an open page does."""
    with plane.client() as api, api.stream("GET", path) as stream:
        for _ in stream.iter_bytes():
            if over.is_set():
                return


async def measure(plane: ControlPlane, nodes: int, ranks: int, seconds: float) -> dict[str, Any]:
    """The figures of one run."""
    agents = [Agent(f"n{number}", ranks, seconds) for number in range(nodes)]
    joined, over = asyncio.Semaphore(0), threading.Event()
    running = [asyncio.create_task(agent.run(plane, joined)) for agent in agents]
    for _ in agents:
        await joined.acquire()
    api = Api(plane)
    job = (await asyncio.to_thread(api.start, nodes=nodes, ranks_per_node=ranks))["id"]
    await asyncio.to_thread(api.until, job, "running", timeout=60.0)
    assert plane.process is not None
    before, start = _cpu(plane.process.pid), time.monotonic()
    looking = asyncio.create_task(asyncio.to_thread(_look, plane, job, over))
    streams = [
        asyncio.create_task(asyncio.to_thread(_listen, plane, path, over))
        for path in (f"/jobs/{job}/events", "/events")
    ]
    await asyncio.gather(*running)
    spent = (_cpu(plane.process.pid) - before) / (time.monotonic() - start)
    over.set()
    pages, _ = await looking, await asyncio.gather(*streams)
    delays = [delay for agent in agents for delay in agent.delays]
    lost = sum(agent.number - agent.acknowledged for agent in agents)
    api.close()
    return {
        "cpu_per_second": round(spent, 3),
        "messages": sum(agent.number for agent in agents),
        "not_acknowledged": lost,
        "acknowledged_after": {
            "median": round(statistics.median(delays), 3), "most": round(max(delays), 3)
        },
        "pages": {
            path: {"median": round(statistics.median(times), 3), "most": round(max(times), 3)}
            for path, times in pages.items()
        },
    }  # fmt: skip


def main() -> None:
    """Parse options, run, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=4, help="of each node")
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plane = ControlPlane(Path(folder) / "data", **TIMES).start()
        try:
            found = asyncio.run(measure(plane, options.nodes, options.ranks, options.seconds))
        finally:
            plane.close()
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
