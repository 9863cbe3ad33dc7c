"""The age of what is shown: hidden tabs, lost nodes, a control plane that goes away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Agent, Cluster
from conftest import Gate, Tabs
from control_plane import Api, ControlPlane
from playwright.sync_api import Browser, Page, expect
from programs import steps

#: what the browser says when a server is away, which the page cannot keep it from
AWAY = ("ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING", "ERR_CONNECTION_RESET")
_HIDE = """(hidden) => {
    Object.defineProperty(document, "hidden", { configurable: true, get: () => hidden });
    document.dispatchEvent(new Event("visibilitychange"));
}"""


@pytest.mark.usefixtures("nodes")
def test_a_hidden_tab_lets_go_of_its_stream(tabs: Tabs, api: Api, gate: Gate) -> None:
    """A tab closes its stream while hidden, and goes on from the last id when looked at again."""
    open_gate = gate("go")
    job = api.start(script=None, command=steps(open_gate))
    page, watch = tabs.open(f"/jobs/{job['id']}")
    expect(page.locator("#loss path.line")).to_have_count(1)
    expect(page.locator("#log-text")).to_contain_text("rank 0 waits")
    page.evaluate(_HIDE, True)
    expect(page.locator("#fresh-text")).to_contain_text("paused")
    before = len(watch.streams)
    open_gate.touch()
    api.until(job["id"], "completed")
    assert "goes on" not in page.inner_text("#log-text")
    page.evaluate(_HIDE, False)
    expect(page.locator("#log-text")).to_contain_text("goes on")
    expect(page.locator(".state.big")).to_have_text("completed")
    assert len(watch.streams) == before + 1
    assert "last_event_id=" in watch.streams[-1]
    log = page.inner_text("#log-text")
    assert log.count("rank 0 waits") == log.count("goes on") == 1


@pytest.fixture
def own(tmp_path: Path, chromium: Browser) -> Iterator[tuple[Tabs, Agent]]:
    """A control plane and a node of a test's own, to be killed."""
    cluster = Cluster(tmp_path, "w9")
    tabs = Tabs(chromium, cluster.server)
    try:
        yield tabs, cluster.agents["w9"]
    finally:
        for context in tabs.contexts:
            context.close()
        cluster.close()
    for watch in tabs.watches:
        watch.check()


def running(plane: ControlPlane, page: Page, gate: Path) -> str:
    api = Api(plane)
    job = str(api.start(script=None, command=steps(gate))["id"])
    api.close()
    page.goto(f"{plane.url}/jobs/{job}")
    expect(page.locator("#log-text")).to_contain_text("rank 0 waits")
    return job


def test_a_lost_node(own: tuple[Tabs, Agent], gate: Gate) -> None:
    """When an agent is killed, the open page says that the job is lost and the node offline."""
    tabs, agent = own
    page, _ = tabs.open()
    running(tabs.plane, page, gate("never"))
    agent.kill()
    expect(page.locator(".state.big")).to_have_text("lost", timeout=20_000)
    expect(page.locator(".cause, .note.lost").first).to_contain_text("w9")
    page.goto(tabs.plane.url)
    expect(page.locator("tr[data-node=w9]")).to_contain_text("offline")
    page.click("tr[data-node=w9] a")
    expect(page.locator(".note.lost")).to_contain_text("worker join")


def test_a_control_plane_that_restarts(own: tuple[Tabs, Agent], gate: Gate) -> None:
    """While the server is away the page says how old its data is, and then goes on by itself."""
    tabs, _ = own
    page, watch = tabs.open()
    watch.expected = AWAY
    open_gate = gate("go")
    running(tabs.plane, page, open_gate)
    tabs.plane.kill()
    expect(page.locator("#fresh")).to_have_attribute("data-state", "connecting")
    expect(page.locator("#fresh-text")).to_contain_text("reconnecting, last data")
    open_gate.touch()
    tabs.plane.start()
    expect(page.locator("#log-text")).to_contain_text("goes on", timeout=30_000)
    expect(page.locator(".state.big")).to_have_text("completed", timeout=20_000)


def test_a_revoked_session(own: tuple[Tabs, Agent]) -> None:
    """A page whose session is revoked elsewhere says so instead of showing old data as live."""
    tabs, _ = own
    page, watch = tabs.open()
    expect(page.locator("#fresh-text")).to_contain_text("live")
    watch.expected = ("401",)
    with tabs.plane.client("admin") as admin:
        for token in admin.get("/tokens").raise_for_status().json()["items"]:
            if token["kind"] == "session":
                admin.delete(f"/tokens/{token['id']}").raise_for_status()
    expect(page.locator("#fresh-text")).to_contain_text("logged out")
