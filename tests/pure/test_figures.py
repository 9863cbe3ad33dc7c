"""Measured figures of links: kept, read back, and what plans and pictures make of them."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from collective import figures
from collective.benchmark_links import per_byte, slope
from collective.cost import Link, Machine, Topology, uniform
from collective.figures import Figures, Sample
from collective.prediction import predict
from collective.program import SEGMENT
from collective.schedule import Kind
from unisono import bench, bench_links
from unisono.bench_layout import Layout
from unisono.bench_links import predicted
from unisono.bench_plot import draw, title

FIGURES = Figures("websocket", 40e-6, 1e9, 60e-6, 20e-6, 2e-10, 1e-10, 2, 0.2e-3, 0.9e9)
ROW: dict[str, Any] = {
    "op": "all_reduce", "strategy": "ring", "setting": "auto", "ranks": 2, "link": "websocket",
    "bytes": 8, "seconds": 2e-4, "peers": {"gloo": {"seconds": 4e-4}}, "bandwidth": None,
    "delay": None, "empty": False, "device": "cpu", "predicted_seconds": None,
    "topology": "flat", "nodes": 2,
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of each test's own."""
    monkeypatch.delenv("UNISONO_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "unisono" / "links.json"


def test_figures_are_kept_per_kind_of_link(cache: Path) -> None:
    """What was stored is read back; other kinds, hosts and versions are not touched by it."""
    assert figures.load("websocket") is None
    figures.store(FIGURES)
    figures.store(replace(FIGURES, kind="shm", latency=0.0))
    newer = replace(FIGURES, latency=50e-6)
    figures.store(newer)
    assert figures.load("websocket") == newer
    assert figures.load("shm") == replace(FIGURES, kind="shm", latency=0.0)
    assert {path.name for path in cache.parent.iterdir()} == {"links.json", "links.lock"}


@pytest.mark.parametrize("text", ["{", "[]", '{"KEY": {"kind": "websocket"}}'])
def test_a_spoilt_file_is_named(cache: Path, text: str) -> None:
    """A file that something else wrote is an error that says which and what to do."""
    figures.store(FIGURES)
    (key,) = json.loads(cache.read_text())
    cache.write_text(text.replace("KEY", key))
    with pytest.raises(ValueError, match=r"links\.json .*remove it and measure again"):
        figures.load("websocket")


def test_figures_that_cannot_be_kept_are_named(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command that measured them ends with the file's name and what to do."""
    monkeypatch.setattr(bench_links, "run_ranks", lambda *_: [asdict(FIGURES)])
    cache.parent.mkdir()
    cache.write_text("{")
    done = CliRunner().invoke(bench.app, ["links", "--link", "websocket"])
    assert done.exit_code == 5
    assert "links.json is no JSON" in done.stderr
    assert "remove it and measure again" in done.stderr


def test_a_row_is_predicted_from_the_figures_of_its_links() -> None:
    """All ranks share the machine; without figures, on a network or devices, nothing is said."""
    flat = Layout("flat", (1, 1), "websocket")
    assert predicted(flat, ROW) is None
    figures.store(FIGURES)
    topology = uniform(1, 2, FIGURES.link, FIGURES.link, FIGURES.machine)
    assert predicted(flat, ROW) == predict("ring", Kind.ALL_REDUCE, topology, 8).seconds
    assert predicted(flat, ROW | {"delay": 0.05}) is None
    assert predicted(flat, ROW | {"device": "cuda", "strategy": "device"}) is None
    assert predicted(Layout("1x2", (2,), "shm"), ROW) is None


def test_a_row_of_two_levels_is_predicted_from_both_kinds_of_links() -> None:
    """Shared memory's figures hold within nodes, WebSocket's between; nodes share the cores."""
    layout, row = Layout("1,2", (1, 2), "shm+websocket"), ROW | {"ranks": 3}
    figures.store(FIGURES)
    assert predicted(layout, row) is None
    near = replace(FIGURES, kind="shm", latency=1e-6)
    figures.store(near)
    machine = replace(FIGURES.machine, cores=1)
    topology = Topology(((0,), (1, 2)), near.link, FIGURES.link, machine)
    assert predicted(layout, row) == predict("ring", Kind.ALL_REDUCE, topology, 8).seconds


def test_calls_and_sent_bytes_take_time() -> None:
    """Each rank makes its call on a core before it sends, and what it sends costs its bytes."""
    machine = Machine(1, 5e-6, 0.0, 1e-9, per_call=1e-3)
    topology = uniform(2, 1, FIGURES.link, replace_latency(1e-4), machine)
    found = predict("direct", Kind.ALL_REDUCE, topology, 10**5).seconds
    assert found == pytest.approx(1e-3 + 5e-6 + 1e-4 + 1e-4 + 1e-4 + 5e-6)


def test_plans_take_what_is_not_given_from_measurements() -> None:
    """Figures are needed first; a given one takes the place of a measured one."""

    def plan(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "unisono.cli", "plan", "--nodes", "4", "--bytes", "1MiB"]
        command += ["--strategy", "ring", "--json", "--measured", *more]
        return subprocess.run(command, capture_output=True, text=True, timeout=30)

    missing = plan()
    assert missing.returncode == 2
    assert "worker probe --peer" in missing.stderr
    figures.store(FIGURES)
    machine = FIGURES.machine
    known, slow = (
        uniform(4, 1, link, link, machine) for link in (FIGURES.link, replace_latency(1.0))
    )
    for arguments, topology in (((), known), (("--latency", "1s"), slow)):
        seconds = json.loads(plan(*arguments).stdout)["seconds"]
        expected = predict("ring", Kind.ALL_REDUCE, topology, 1 << 20).seconds
        assert seconds == pytest.approx(expected, rel=0.01)


def test_a_byte_always_costs_a_core_something() -> None:
    """One measurement that is far off does not move the fit, and noise makes no cost vanish."""
    sizes = [SEGMENT << step for step in range(5)]
    right = [20e-6 + 3e-10 * size for size in sizes]
    assert slope(sizes, right) == pytest.approx(3e-10)
    assert slope(sizes, [*right[:2], 1.0, *right[3:]]) == pytest.approx(3e-10, rel=0.3)
    assert per_byte(3e-10, SEGMENT * 1e-10, 1e9) == pytest.approx(2e-10)
    assert per_byte(3e-10, SEGMENT * 5e-10, 1e9) == pytest.approx(0.75e-10)
    assert per_byte(-1e-10, 0.0, 1e9) > 0


def test_links_between_machines_stand_before_links_within_one() -> None:
    """Of the network what other nodes showed counts, of shared memory what two processes did."""
    assert figures.measured("websocket") is None
    figures.store_samples({("10.0.0.1", "10.0.0.2"): Sample(1e-4, 1e9)})
    assert figures.measured("websocket") == (Link(50e-6, 1e9), figures.MACHINE)
    assert figures.measured("shm") is None
    figures.store(FIGURES)
    assert figures.measured("websocket") == (Link(50e-6, 1e9), FIGURES.machine)
    host = socket.gethostname()
    figures.store_samples({(host, host): Sample(2e-5, 9e9)})
    assert figures.measured("shm") == (Link(1e-5, 9e9), figures.MACHINE)
    figures.store(replace(FIGURES, kind="shm"))
    assert figures.measured("shm") == (replace(FIGURES.link, held=figures.HELD), FIGURES.machine)


def test_a_picture_shows_every_series() -> None:
    """All libraries' times, and predictions where there are some, as well-formed SVG."""
    rows = [
        ROW | {"bytes": size, "seconds": size * 1e-9 + 1e-4, "predicted_seconds": 2e-4,
               "peers": {"gloo": {"seconds": 1e-3}, "mpi": {"seconds": 1e-5}}}
        for size in (8, 65536, 100 << 20)
    ]  # fmt: skip
    svg = "{http://www.w3.org/2000/svg}"
    picture = ElementTree.fromstring(draw(rows))
    lines = picture.findall(f".//{svg}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [3, 3, 3, 3]
    texts = {text.text for text in picture.iter(f"{svg}text")}
    assert {"all-reduce, 2 ranks, WebSocket", "Unisono", "gloo", "MPICH"} <= texts
    assert "predicted ÷ measured time" in texts
    bare = [row | {"predicted_seconds": None, "peers": {}} for row in rows]
    assert len(ElementTree.fromstring(draw(bare)).findall(f".//{svg}polyline")) == 1


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"ranks": 4, "nodes": 4, "link": "websocket"}, "4 ranks, WebSocket"),
        ({"nodes": 1, "link": "shm", "device": "cuda"}, "2 ranks, shared memory, on CUDA"),
        ({"nodes": 1, "link": "shm", "empty": True}, "2 ranks, shared memory, collective.empty"),
        ({"ranks": 4, "nodes": 1, "link": "shm"}, "4 ranks, shared memory"),
        (
            {"ranks": 4, "nodes": 2, "link": "shm+websocket", "topology": "2x2"},
            "2 nodes of 2 ranks",
        ),
        ({"ranks": 2, "nodes": 2, "bandwidth": 1e9}, "2 ranks, WebSocket, 1 Gbit/s"),
        ({"ranks": 2, "nodes": 2, "delay": 0.05}, "2 ranks, WebSocket, round trip 50 ms"),
    ],
)
def test_cases_are_told_apart_by_their_titles(row: dict[str, Any], expected: str) -> None:
    """A title says all in which rows of one picture are alike."""
    assert title(ROW | row) == f"all-reduce, {expected}"


@pytest.mark.parametrize("text", ["[]", '{"schema": "unisono.bench/0"}', '{"rows": []}', "{"])
def test_other_files_are_not_drawn(tmp_path: Path, text: str) -> None:
    """What is no result of this version of the benchmark is named."""
    path = tmp_path / "some.json"
    path.write_text(text)
    command = [sys.executable, "-m", "unisono.cli", "bench", "plot", str(path)]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 2
    assert str(path) in done.stderr and "of —" not in done.stderr
    assert "write it with unisono bench collectives --json" in done.stderr


def replace_latency(seconds: float) -> Link:
    return replace(FIGURES.link, latency=seconds)
