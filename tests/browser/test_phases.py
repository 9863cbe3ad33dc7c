"""Where a step goes, for figures that a test makes up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conftest import Tabs
from control_plane import Api, ControlPlane
from playwright.sync_api import expect
from scripted_agent import ScriptedAgent


@pytest.fixture
def agent(plane: ControlPlane, api: Api) -> Iterator[ScriptedAgent]:
    """A node whose ranks do what the test says; it is removed with whatever it runs."""
    agent = ScriptedAgent(plane, "scripted")
    agent.connect()
    yield agent
    agent.close()
    api.http.delete("/nodes/scripted", params={"force": True}).raise_for_status()


def test_a_library_that_tells_no_waiting_gets_an_estimate(
    tabs: Tabs, api: Api, agent: ScriptedAgent
) -> None:
    """Where no rank says how long it waited, it is what one stands still longer than another."""
    job = api.start(on={"scripted": 2}, engine="gloo")["id"]
    agent.prepare()
    attempt = agent.launch().attempt
    for rank, exposed in enumerate((0.02, 0.06)):
        agent.steps(attempt, rank, 1, 20, total=0.1, exposed=exposed)
    agent.synchronise()
    page, _ = tabs.open(f"/jobs/{job}")
    rows = page.locator("#phases .row")
    expect(rows).to_have_count(2)
    for rank, waited in enumerate(("0 s", "40.0 ms")):
        rows.nth(rank).hover()
        expect(page.locator("#phases .tip")).to_contain_text(f"rank {rank} on scripted")
        expect(page.locator("#phases .tip")).to_contain_text(f"waiting for others, about{waited}")
