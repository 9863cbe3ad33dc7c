"""Control planes for tests of the service: one that is shared, and fresh ones to be killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from control_plane import Api, ControlPlane
from scripted_agent import ScriptedAgent

MakeServer = Callable[..., ControlPlane]
MakeAgent = Callable[..., ScriptedAgent]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """The shared control plane; a test that uses it leaves no job or node behind."""
    plane = ControlPlane(tmp_path_factory.mktemp("shared") / "data").start()
    yield plane
    assert plane.stop() == 0, plane.log()
    plane.close()


@pytest.fixture
def api(server: ControlPlane) -> Iterator[Api]:
    """The shared control plane's API, as its operator."""
    client = Api(server)
    yield client
    for node in client.http.get("/nodes").json()["items"]:
        client.http.delete(f"/nodes/{node['name']}", params={"force": True}).raise_for_status()
    client.close()


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[MakeServer]:
    """Makes control planes of a test's own, started, with settings."""
    made: list[ControlPlane] = []

    def make(**settings: Any) -> ControlPlane:
        plane = ControlPlane(tmp_path / f"data{len(made)}", **settings)
        made.append(plane)
        return plane.start()

    yield make
    for plane in made:
        plane.close()


@pytest.fixture
def make_agent() -> Iterator[MakeAgent]:
    """Makes scripted agents, connected unless told otherwise, and closes them."""
    made: list[ScriptedAgent] = []

    def make(server: ControlPlane, name: str, devices: int = 2, **options: Any) -> ScriptedAgent:
        connected = options.pop("connected", True)
        agent = ScriptedAgent(server, name, devices, **options)
        made.append(agent)
        if connected:
            agent.connect()
        return agent

    yield make
    for agent in made:
        agent.close()
