"""What users write is shown as text, wherever it comes from."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from conftest import Tabs
from control_plane import Api, ControlPlane
from playwright.sync_api import expect
from scripted_agent import ScriptedAgent

from collective.messages import Device

EVIL = "<img src=x onerror=alert(1)>"
NAMES = ['"><svg onload=alert(1)>', "javascript:alert(1)", "${7*7}{{7*7}}", "a'b\"c&amp;", "%2e%2e"]


@pytest.fixture
def scripted(plane: ControlPlane) -> Iterator[ScriptedAgent]:
    """A node whose name, host name and device carry markup; it starts no processes."""
    agent = ScriptedAgent(plane, EVIL.replace("/", ""), 0)
    agent.devices = [Device(index=0, kind="cuda", name=EVIL, busy=f"{EVIL} (pid 1)")]
    agent.connect()
    yield agent
    agent.close()
    with plane.client() as client:
        client.delete(f"/nodes/{agent.name}", params={"force": True})


@pytest.mark.usefixtures("nodes")
def test_markup_from_a_job(tabs: Tabs, api: Api) -> None:
    """Names, arguments, variables, output and errors with markup are text on a job's page."""
    code = f"print({EVIL!r}); raise ValueError({EVIL!r})"
    job = api.start(
        script=None,
        command=[sys.executable, "-S", "-c", code, *NAMES, EVIL],
        name=EVIL,
        set={"EVIL": EVIL},
    )
    page, _ = tabs.open(f"/jobs/{job['id']}")
    expect(page.locator(".state.big")).to_have_text("failed", timeout=30_000)
    expect(page.locator("h1")).to_have_text(EVIL)
    expect(page.locator(".cause .what")).to_contain_text(EVIL)
    expect(page.locator("#log-text")).to_have_text(f"{EVIL}\n")
    page.locator("tr[data-rank='0'] [data-log='0:stderr']").click()
    expect(page.locator("#log-text")).to_contain_text(f"ValueError: {EVIL}")
    shown = page.locator(".args li").all_text_contents()
    assert shown == ["-S", "-c", code, *NAMES, EVIL, f"EVIL={EVIL}"]
    expect(page.locator("img")).to_have_count(0)
    page.goto(tabs.plane.url)
    expect(page.locator(f"tr[data-job='{job['id']}'] a")).to_have_text(EVIL)
    page.goto(f"{tabs.plane.url}/jobs/new?source={job['id']}")
    expect(page.locator("#command-parsed li").last).to_have_text(EVIL)
    assert page.input_value("#name") == EVIL
    expect(page.locator("img")).to_have_count(0)


def test_markup_from_a_node(tabs: Tabs, scripted: ScriptedAgent) -> None:
    """Names of nodes and devices with markup are text, and a node's address stays its own."""
    page, _ = tabs.open()
    row = page.locator("tr[data-node]", has_text=scripted.name)
    expect(row).to_contain_text("1 used by others")
    row.locator("a").first.click()
    expect(page.locator("h1")).to_have_text(scripted.name)
    expect(page.locator("td", has_text="pid 1")).to_contain_text(EVIL)
    expect(page.locator("img")).to_have_count(0)


def test_names_in_addresses_are_only_names(tabs: Tabs) -> None:
    """A hostile name in an address gives a page that says that there is no such thing."""
    page, watch = tabs.open()
    watch.expected = ("404", "422")
    for name in (*NAMES, EVIL, "\u202eabc", "x" * 5000):
        for kind in ("jobs", "nodes"):
            page.evaluate(
                "([kind, name]) => { location.href = `/${kind}/${encodeURIComponent(name)}`; }",
                [kind, name],
            )
            expect(page.locator("h1")).to_have_text("Not found")
            expect(page.locator("img")).to_have_count(0)
            page.goto(tabs.plane.url)


@pytest.mark.usefixtures("nodes")
def test_logs_are_no_pages(tabs: Tabs, api: Api) -> None:
    """The whole log opens as plain text, whatever it holds, and scripts in it do not run."""
    code = f"print('<html><script>alert(1)</script>{EVIL}')"
    job = api.start(script=None, command=[sys.executable, "-S", "-c", code])
    api.until(job["id"], "completed")
    page, _ = tabs.open(f"/jobs/{job['id']}")
    page.click("text=whole log")
    page.wait_for_url("**/logs/stdout")
    assert page.evaluate("document.contentType") == "text/plain"
    assert EVIL in page.inner_text("body")
