"""Jobs as a person meets them: watched live, started from the form, cancelled, failed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cluster import Agent
from conftest import Gate, Tabs
from control_plane import Api
from playwright.sync_api import Page, expect
from programs import cleans, fails, long_loss, steps

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits_ddp.py"
EVIL = "<img src=x onerror=alert(1)>"
AWKWARD = ["I'm a student", 'he said "-4C"', "", '{"a": "b c"}', "*", "$HOME;echo x", "--", EVIL]
AWKWARD += ["模型 žluť 🐎", "two\nlines"]

pytestmark = pytest.mark.usefixtures("nodes")


def state(page: Page, text: str) -> None:
    expect(page.locator(".state.big")).to_have_text(text, timeout=60_000)


def test_a_job_is_watched_until_it_completes(tabs: Tabs, api: Api) -> None:
    """A real training shows steps, phases, loss and log live, over a reload too, to its end."""
    page, watch = tabs.open("/jobs/new")
    page.check("input[value=upload]")
    page.set_input_files("#file", EXAMPLE)
    page.fill("#args", '["--epochs", "8"]')
    page.fill("#nodes", "2")
    page.click("button:has-text('Start job')")
    page.wait_for_url("**/jobs/j-*")
    watch.streams.clear()
    state(page, "running")
    expect(page.locator("#phases .row")).to_have_count(2, timeout=60_000)
    expect(page.locator("#steps path.line").first).to_be_visible()
    expect(page.locator("#loss path.line").first).to_be_visible()
    expect(page.locator("#log-text")).to_contain_text("::unisono")
    expect(page.locator("tr[data-rank='1'] [data-t=compute]")).to_contain_text("s")
    # One stream per tab, whatever has changed meanwhile.
    assert len(watch.streams) == 1

    page.reload()
    expect(page.locator("#phases .row")).to_have_count(2)
    state(page, "completed")
    expect(page.locator("#fresh-text")).to_have_text("final: the job is over")
    expect(page.locator("#log-note")).to_have_text(re.compile(r"^[\d,]+ bytes$"))
    figures = page.locator(".figures")
    expect(figures).to_contain_text("identical")
    for width in (1440, 390, 1280):
        page.set_viewport_size({"width": width, "height": 900})
        ends = figures.evaluate(
            "box => [box, box.lastElementChild].map(e => e.getBoundingClientRect().right)"
        )
        assert ends[0] - ends[1] < 2, f"the last row of figures has a hole at {width} px"
    plain, _ = tabs.open(page.url.removeprefix(tabs.plane.url), java_script_enabled=False)
    expect(plain.locator("#phases")).to_contain_text("needs JavaScript")
    expect(page.locator("[data-v=accuracy]")).to_contain_text("%")
    expect(page.locator("tr[data-rank='0']")).to_contain_text("exit code 0")
    expect(page.locator("#log-text")).to_contain_text("held-out accuracy")
    job = api.job(page.url.rsplit("/", 1)[1])
    shown = int(page.inner_text("[data-v=step]").replace(",", ""))
    assert shown == job["progress"]["step"]

    page.hover("#phases .row >> nth=0")
    expect(page.locator("#phases .tip")).to_contain_text("exposed communication")
    page.locator("#steps svg").focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#steps .tip")).to_contain_text("rank 1")


def test_the_form_keeps_what_was_typed(tabs: Tabs, api: Api, gate: Gate) -> None:
    """Errors stand beside their fields, the rest stays, and arguments reach the ranks unchanged."""
    page, watch = tabs.open("/jobs/new")
    watch.expected = ("422",)
    open_gate = gate("go")
    command = json.dumps(steps(open_gate, *AWKWARD))
    page.fill("#name", "typed")
    page.check("input[value=command]")
    page.fill("#command", command[:-1])
    expect(page.locator("#command-parsed .error")).to_contain_text("Not JSON")
    page.fill("#nodes", "zero")
    page.click("button:has-text('Start job')")
    expect(page.locator("#error-command")).to_contain_text("Not a JSON list")
    expect(page.locator("#command-parsed")).to_be_empty()
    expect(page.locator("#error-nodes")).to_have_text(
        "'zero' is not a whole number from 1 to 4096."
    )
    assert page.input_value("#name") == "typed"
    assert page.input_value("#command") == command[:-1]
    page.fill("#command", command)
    expect(page.locator("#error-command")).to_have_count(0)
    items = page.locator("#command-parsed li")
    expect(items).to_have_count(5 + len(AWKWARD))
    assert items.nth(5).text_content() == AWKWARD[0]
    page.fill("#nodes", "1")
    page.click("button:has-text('Start job')")
    page.wait_for_url("**/jobs/j-*")
    job_id = page.url.rsplit("/", 1)[1]
    assert api.job(job_id)["spec"]["command"] == json.loads(command)
    log = page.locator("#log-text")
    expect(log).to_contain_text("rank 0 waits")
    said = (log.text_content() or "").splitlines()[0]
    assert json.loads(said) == AWKWARD
    open_gate.touch()
    expect(log).to_contain_text("goes on")
    state(page, "completed")


def test_a_job_is_cancelled(tabs: Tabs, api: Api, gate: Gate) -> None:
    """Cancelling asks first, then shows the job cancelled, with the signal of each rank."""
    job = api.start(script=None, command=steps(gate("never")), nodes=2, name="long")
    page, watch = tabs.open(f"/jobs/{job['id']}")
    state(page, "running")
    expect(page.locator("#log-text")).to_contain_text("rank 0 waits")
    page.click("text=Cancel job")
    page.click("dialog >> text=Back")
    expect(page.locator("dialog")).to_have_count(0)
    assert api.job(job["id"])["state"] == "running"
    page.click("text=Cancel job")
    page.click("dialog >> text=Cancel job")
    state(page, "cancelled")
    expect(page.locator("tr[data-rank='1']")).to_contain_text("signal 15 (SIGTERM)")
    expect(page.locator("text=Cancel job")).to_have_count(0)
    assert not watch.dialogs

    page.click("text=Start again")
    assert page.input_value("#name") == "long"
    assert json.loads(page.input_value("#command"))[-1] == str(job["spec"]["command"][-1])


def test_cancelling_takes_its_time(tabs: Tabs, api: Api, gate: Gate) -> None:
    """A job whose ranks still clean up is shown as cancelling, and cancelled only after that."""
    done = gate("done")
    job = api.start(script=None, command=cleans(done), grace=60)
    page, _ = tabs.open(f"/jobs/{job['id']}")
    log = page.locator("#log-text")
    expect(log).to_contain_text("ready")
    page.click("text=Cancel job")
    page.click("dialog >> text=Cancel job")
    expect(log).to_contain_text("cleans up")
    state(page, "cancelling")
    expect(page.locator(".note.warn")).to_contain_text("60 s")
    done.touch()
    state(page, "cancelled")


def test_a_viewer_only_looks(tabs: Tabs, api: Api, gate: Gate) -> None:
    """A viewer sees everything and no button that changes something; a forged form is refused."""
    job = api.start(script=None, command=steps(gate("never")))
    made = api.http.post("/tokens", json={"name": "guest", "role": "viewer"}).json()
    page, watch = tabs.open(f"/jobs/{job['id']}", token=made["token"])
    state(page, "running")
    expect(page.locator("form:not([action='/logout']):not(.log-tools)")).to_have_count(0)
    expect(page.locator("nav a")).to_have_text(["Cluster"])
    watch.expected = ("403",)
    page.evaluate("""() => {
        const form = document.querySelector("form[action='/logout']");
        form.action = `${location.pathname}/cancel`;
        form.requestSubmit();
    }""")
    expect(page.locator("h1")).to_have_text("Not allowed")
    assert api.job(job["id"])["state"] == "running"


def test_a_failure_shows_its_cause_first(tabs: Tabs, api: Api, gate: Gate) -> None:
    """A rank's exception appears on the open page, as the first cause, as text."""
    now = gate("fail")
    job = api.start(script=None, command=fails(now), nodes=1, ranks_per_node=2)
    page, _ = tabs.open(f"/jobs/{job['id']}")
    state(page, "running")
    now.touch()
    state(page, "failed")
    cause = page.locator(".cause")
    expect(cause.locator("h2")).to_contain_text("First cause: rank 1, node w")
    expect(cause).to_contain_text("bad batch <b>17</b>")
    expect(page.locator("tr[data-rank='1']")).to_contain_text("first cause")
    expect(page.locator("tr[data-rank='1']")).to_contain_text("exit code 1")


def test_a_job_that_waits_says_for_what(tabs: Tabs, api: Api) -> None:
    """A job that cannot be placed says what it waits for, on its page and in the list."""
    job = api.start(script=None, command=["true"], on={"w1": 2, "nowhere": 1})
    page, _ = tabs.open(f"/jobs/{job['id']}")
    expect(page.locator(".note.warn")).to_contain_text("nowhere")
    page.goto(tabs.plane.url)
    expect(page.locator(f"tr[data-job='{job['id']}']")).to_contain_text("nowhere")
    page.click("nav.filters >> text=queued")
    expect(page.locator("tr[data-job]")).to_have_count(1)


def test_the_list_follows_jobs(tabs: Tabs, api: Api, gate: Gate) -> None:
    """The cluster's page shows a new job, its progress and its end without a reload."""
    page, watch = tabs.open()
    open_gate = gate("go")
    job = api.start(script=None, command=steps(open_gate), name="listed")
    row = page.locator(f"tr[data-job='{job['id']}']")
    expect(row).to_contain_text("running")
    expect(row.locator("[data-v=step]")).to_have_text("20")
    expect(page.locator("tr[data-node] .devs .job")).to_have_count(1)
    open_gate.touch()
    expect(row).to_contain_text("completed")
    expect(row.locator("[data-v=step]")).to_have_text("40")
    expect(page.locator("tr[data-node] .devs .job")).to_have_count(0)
    assert len(watch.streams) == 1


def test_node_pages(tabs: Tabs, nodes: list[Agent]) -> None:
    """A node's page shows its devices, and drains it and takes it back."""
    page, _ = tabs.open()
    page.click("tr[data-node=w2] a")
    expect(page.locator("h1")).to_have_text("w2")
    expect(page.locator("td", has_text="cpu:1")).to_be_visible()
    page.click("button:has-text('Drain')")
    expect(page.locator(".state.big")).to_have_text("draining")
    page.click("text=Take jobs again")
    expect(page.locator(".state.big")).to_have_text("online")


def test_the_loss_of_a_longer_run_has_no_hole(tabs: Tabs, api: Api) -> None:
    """A page that is opened later draws what lies before its snapshot, too, and all of it."""
    job = api.start(script=None, command=long_loss())
    api.until(job["id"], "completed")
    page, _ = tabs.open(f"/jobs/{job['id']}")
    expect(page.locator("#loss path.line")).to_have_count(1)
    page.wait_for_function(
        """() => {
            const path = document.querySelector("#loss path.line");
            const x = [...path.getAttribute("d").matchAll(/[ML](-?[0-9.]+)/g)].map((m) => +m[1]);
            const width = document.querySelector("#loss svg").getBoundingClientRect().width;
            const widest = Math.max(...x.slice(1).map((at, k) => at - x[k]));
            return x.at(-1) - x[0] > width / 2 && widest < width / 20;
        }""",
        timeout=10_000,
    )
