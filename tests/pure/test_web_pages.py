"""Pages rendered from the API's dictionaries, without a server."""

from __future__ import annotations

import html.parser
import time
from typing import Any

import pytest

from web import format as fmt
from web import rendering, views

EVIL = "\"><img src=x onerror=alert(1)><script>alert(2)</script>a'b${7*7}{{7*7}}"


class Tags(html.parser.HTMLParser):
    """The tags and attributes of a page, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def job(**changed: Any) -> dict[str, Any]:
    now = time.time()
    return {
        "id": "j-1",
        "name": EVIL,
        "state": "failed",
        "reason": EVIL,
        "waiting_for": EVIL,
        "created_at": now,
        "started_at": now,
        "ended_at": now,
        "spec": {"script": EVIL, "args": [EVIL, ""], "set": {EVIL: EVIL}, "on": {EVIL: 1}},
        "attempt": "a-1",
        "nodes": [EVIL],
        "world_size": 1,
        "strategy": "auto",
        "engine": "unisono",
        "cause": {"rank": 0, "node": EVIL, "kind": EVIL, "message": EVIL, "traceback": EVIL},
        "consequences": [{"rank": 0, "node": EVIL, "kind": EVIL, "message": EVIL}],
        "progress": None,
        "created_by": EVIL,
    } | changed


def rank() -> dict[str, Any]:
    device = {"kind": "cuda", "index": 0, "name": EVIL}
    return {"rank": 0, "node": EVIL, "local_rank": 0, "device": device, "state": "exited"} | {
        "exit_code": 1,
        "signal": None,
        "message": EVIL,
        "step": None,
    }


def node() -> dict[str, Any]:
    device = {
        "kind": "cuda",
        "index": 0,
        "name": EVIL,
        "busy": EVIL,
        "memory_bytes": 1,
        "job": None,
    }
    return {"name": EVIL, "hostname": EVIL, "state": "offline", "devices": [device]} | {
        "addresses": [EVIL],
        "envs": [EVIL],
        "last_seen_at": time.time(),
    }


SHELL: dict[str, Any] = {
    "session": {"role": "viewer"},
    "csrf_token": "c",
    "version": "0",
    "can_write": True,
}


def job_page(**changed: Any) -> str:
    shown = job(**changed)
    log = {"rank": 0, "stream": "stdout", "text": EVIL, "next": 0, "full_url": "/", "note": ""}
    response = rendering.page(
        "job.html",
        job=shown,
        ranks=[views.shown_rank(rank(), None, shown)],
        facts=views.job_facts(shown),
        notes=[EVIL],
        log=log,
        **SHELL,
    )
    return bytes(response.body).decode()


def pages() -> dict[str, str]:
    nodes = [views.shown_node(node())]
    home = rendering.page(
        "home.html",
        jobs=[job()],
        nodes=nodes,
        summary=views.cluster_summary(nodes, {}),
        job_states=[],
        **SHELL,
    )
    one = rendering.page("node.html", node=nodes[0], facts=views.node_facts(nodes[0]), **SHELL)
    return {
        "job": job_page(),
        "home": bytes(home.body).decode(),
        "node": bytes(one.body).decode(),
    }


def test_a_job_that_waits_has_not_started() -> None:
    """The cluster's page says of such a job when it was created, and not that it was started."""
    home = rendering.page(
        "home.html",
        jobs=[job(started_at=None, ended_at=None, created_at=time.time() - 7200, progress=None)],
        nodes=[],
        summary=views.cluster_summary([], {}),
        job_states=[],
        **SHELL,
    )
    text = Tags(bytes(home.body).decode()).text
    assert "not started created 2 h ago" in text, text


def test_nodes_stand_by_name() -> None:
    """The cluster's page has its nodes by name, whoever joined first; numbers count as numbers."""
    nodes = [{**node(), "name": name} for name in ("w10", "w2", "w1")]
    assert [shown["name"] for shown in views.shown_nodes(nodes)] == ["w1", "w2", "w10"]


@pytest.mark.parametrize("name", ["job", "home", "node"])
def test_markup_in_names_is_text(name: str) -> None:
    """Names, errors, arguments and log lines with markup are text in every place of a page."""
    found = Tags(pages()[name])
    assert EVIL in found.text
    assert not [tag for tag, _ in found.tags if tag == "img"]
    for tag, attributes in found.tags:
        assert not [key for key in attributes if key.startswith("on") or key == "style"], tag
        if tag == "script":
            assert attributes["src"] and attributes["src"].startswith("/static/")
        for key in ("href", "action", "src"):
            assert not (attributes.get(key) or "").startswith(("javascript:", "//")), attributes


@pytest.mark.parametrize("name", ["javascript:alert(1)", "../x", "a/b?c#d", "%2e%2e", "ž\u202ey"])
def test_a_name_is_one_part_of_a_path(name: str) -> None:
    """A name in an address can neither leave its place in the path nor become another scheme."""
    url = views.node_url(name)
    assert url.startswith("/nodes/")
    assert not set(url.removeprefix("/nodes/")) & set("/?#:")


def test_the_cause_stands_before_its_consequences() -> None:
    """The first cause comes with its traceback, and what followed from it is marked as such."""
    cause = {"rank": 2, "node": "w2", "kind": "ValueError", "message": "bad batch"}
    late = {"rank": 0, "node": "w1", "kind": "PeerLost", "message": "rank 2 left"}
    text = Tags(
        job_page(
            cause=cause | {"traceback": "line 88", "exit_code": None, "signal": 9},
            consequences=[late],
        )
    ).text
    places = [
        text.index(part)
        for part in (
            "First cause: rank 2, node w2",
            "ValueError: bad batch",
            "signal 9 (SIGKILL)",
            "line 88",
            "Consequences: 1 rank",
            "rank 0 on w1: PeerLost: rank 2 left",
        )
    ]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (fmt.duration, 0.00034, "340 µs"),
        (fmt.duration, 0.00838, "8.38 ms"),
        (fmt.duration, 0.0838, "83.8 ms"),
        (fmt.duration, 0.5, "500 ms"),
        (fmt.duration, 75.4, "1 min 15 s"),
        (fmt.duration, None, "–"),
        (fmt.number, "NaN", "NaN"),
        (fmt.number, "-Infinity", "−∞"),
        (fmt.number, 2300.4, "2,300"),
        (fmt.number, 0.31230, "0.3123"),
        (fmt.number, -0.5, "−0.5"),
        (fmt.number, True, "–"),
        (fmt.percent, 0.1236, "12.4 %"),
        (fmt.bytes_, 512 << 30, "512.0 GiB"),
        (fmt.whole, 1234.0, "1,234"),
    ],
)
def test_numbers_as_text(function: Any, value: Any, text: str) -> None:
    """Numbers are shown with a unit that suits them, and what is no number as what it is."""
    assert function(value) == text


def test_states_of_ranks_are_words() -> None:
    """A rank that was never started says so in words, as one that nothing went wrong with."""
    shown = views.shown_rank(rank() | {"state": "not-started", "exit_code": None}, None, job())
    assert (shown["state_text"], shown["shown_state"]) == ("not started", "cancelled")


def test_a_typical_step_is_no_warm_up() -> None:
    """A rank's figures are of its ordinary steps, not of the first or of rare slow ones."""
    columns: dict[str, Any] = {name: [9.0, 0.1, 7.0, 0.2, 0.4] for name in views.PHASES}
    columns |= {"step": [0, 1, 2, 3, 4], "label": ["warmup", "step", "step", "step", "step"]}
    assert views.typical(columns)["total"] == pytest.approx(0.3)
    assert views.typical(None)["total"] is None


def test_notes_say_what_is_missing_or_slow_and_of_whom() -> None:
    """Ranks with the same reason share a line; a report without reasons makes none."""
    slow = {"unreachable": "rank 1 on node w2 (10.0.0.5:8701: timed out)"}
    links = {"slow_links": "w2 → w1 1.2 MB/s"}
    reports = [slow, {"timings_reason": "NCCL is not timed"}, {"torch": "2"}, None, slow, links]
    notes = views.rank_notes([{"rank": n, "report": report} for n, report in enumerate(reports)])
    assert notes == [
        "Data reach ranks 0, 4 masked, which is slower, from what cannot be dialled: "
        "rank 1 on node w2 (10.0.0.5:8701: timed out)",
        "No timings of rank 1: NCCL is not timed",
        "All ranks wait for slow links between nodes: w2 → w1 1.2 MB/s",
    ]
