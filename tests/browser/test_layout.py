"""Narrow screens, pages without JavaScript, and the same numbers on both sides."""

from __future__ import annotations

import pytest
from conftest import Gate, Tabs
from control_plane import Api
from playwright.sync_api import Page, expect
from programs import fails, steps

from web import format as fmt

NUMBERS = [0, 1e-9, 3.4e-4, 0.00838, 0.0838, 0.5, 1, 9.999, 12.34, 59.96, 75.4, 3600, 90061]
NUMBERS += [123.456, 999.96, 2300.4, 1e7, -0.5, -2300, -1e-5]


def no_overflow(page: Page) -> None:
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= page.evaluate("innerWidth"), f"{page.url} is {wide} px wide"


@pytest.mark.usefixtures("nodes")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_every_page(tabs: Tabs, api: Api, gate: Gate, scheme: str) -> None:
    """At 390 px no page scrolls sideways, not even with long words in names and output."""
    long = "x" * 180
    job = api.start(script=None, command=steps(gate("go"), long * 20), name=long, nodes=2)
    size = {"width": 390, "height": 844}
    page, _ = tabs.open(f"/jobs/{job['id']}", viewport=size, color_scheme=scheme)
    expect(page.locator("#log-text")).to_contain_text("rank 0 waits")
    expect(page.locator("#loss path.line").first).to_be_visible()
    no_overflow(page)
    for path in ("/", "/jobs/new", f"/jobs/new?source={job['id']}", "/nodes/w1", "/tokens"):
        page.goto(tabs.plane.url + path)
        expect(page.locator("h1")).to_be_attached()
        no_overflow(page)
    page.click("text=Log out")
    page.wait_for_url("**/login")
    no_overflow(page)


@pytest.mark.usefixtures("nodes")
def test_a_phone_shows_a_failure(tabs: Tabs, api: Api, gate: Gate) -> None:
    """A long error and its traceback stay within the width of a phone."""
    now = gate("fail")
    now.touch()
    job = api.start(script=None, command=fails(now), ranks_per_node=2)
    api.until(job["id"], "failed", timeout=30)
    page, _ = tabs.open(f"/jobs/{job['id']}", viewport={"width": 390, "height": 844})
    expect(page.locator(".cause pre")).to_contain_text("bad batch")
    no_overflow(page)


@pytest.mark.usefixtures("nodes")
def test_tables_without_javascript(tabs: Tabs, api: Api, gate: Gate) -> None:
    """Without JavaScript a job is started and cancelled, and its tables and log are there."""
    page, _ = tabs.open("/jobs/new", java_script_enabled=False)
    page.check("input[value=command]")
    command = steps(gate("never"))
    page.fill("#command", "[" + ", ".join(_json(part) for part in command) + "]")
    page.fill("#nodes", "2")
    page.click("button:has-text('Start job')")
    page.wait_for_url("**/jobs/j-*")
    job_id = page.url.rsplit("/", 1)[1]
    api.until(job_id, "running")
    with api.http.stream("GET", f"/jobs/{job_id}/ranks/1/logs/stdout?follow=true") as log:
        next(line for line in log.iter_lines() if "waits" in line)
    page.reload()
    expect(page.locator("tr[data-rank]")).to_have_count(2)
    page.locator("tr[data-rank='1'] >> text=out").click()
    expect(page.locator("#log-text")).to_contain_text("rank 1 waits")
    expect(page.locator("#fresh-text")).to_contain_text("as of")
    page.click("text=Cancel job")
    api.until(job_id, "cancelled")
    page.goto(tabs.plane.url)
    expect(page.locator(f"tr[data-job='{job_id}']")).to_contain_text("cancelled")
    expect(page.locator("tr[data-node]")).to_have_count(2)


def _json(text: str) -> str:
    import json

    return json.dumps(text)


def test_numbers_are_written_alike(tabs: Tabs) -> None:
    """A number looks the same whether the server or the browser wrote it."""
    page, _ = tabs.open()
    values: list[object] = [*NUMBERS, "NaN", "Infinity", "-Infinity", None, True]
    for name in ("whole", "number", "percent", "duration"):
        script = f"""async (values) => {{
            const format = await import("/static/format.js");
            return values.map((value) => format.{name}(value));
        }}"""
        shown = page.evaluate(script, values)
        assert shown == [getattr(fmt, name)(value) for value in values], name


def test_keyboard_reaches_everything(tabs: Tabs) -> None:
    """The first stop of the Tab key leads past the navigation, and every control has a name."""
    page, _ = tabs.open("/jobs/new")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    nameless = page.evaluate("""() => [...document.querySelectorAll("input, select, textarea")]
        .filter((e) => e.type !== "hidden" && !e.labels.length && !e.ariaLabel)
        .map((e) => e.name)""")
    assert nameless == []
