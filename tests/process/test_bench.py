"""`unisono bench` runs real ranks, checks results, and reports every field of a row."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from collective.schedule import Kind
from collective.strategies import available
from collective.strategies.spelling import SPELLINGS
from collective.strategies.two_level import LEVELS
from unisono.bench import app
from unisono.namespaces import why_not

ROW = {
    "op", "setting", "strategy", "topology", "ranks", "nodes", "link", "bandwidth", "delay",
    "bytes", "repeats", "final", "seconds", "best", "algbw", "busbw", "peers", "correct", "empty",
    "device",
    "predicted_seconds",
}  # fmt: skip


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "unisono.cli", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def rows_of(*arguments: str) -> list[dict[str, Any]]:
    """The rows of a run that ended well."""
    done = bench(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["schema"] == "unisono.bench/1"
    assert found["command"] == arguments[0]
    assert found["machine"]["cores"] >= 1
    rows: list[dict[str, Any]] = found["rows"]
    return rows


@pytest.mark.timeout(110)
def test_rows_of_every_operation_and_library_are_right_and_add_up() -> None:
    """Each row names its case, all results were checked, and bandwidths follow from times."""
    rows = rows_of(
        "collectives", "--topology", "2x2", "--sizes", "8,64Ki", "--repeats", "1", "--empty",
        "--operations", "all_reduce,broadcast,reduce,all_gather,reduce_scatter",
        "--against", "gloo,mpi",
    )  # fmt: skip
    assert len(rows) == 10
    for row in rows:
        assert set(row) == ROW
        assert (row["topology"], row["link"]) == ("2x2", "shm+websocket")
        assert (row["ranks"], row["nodes"], row["empty"]) == (4, 2, True)
        assert row["correct"] is True
        assert_beside(row, ["gloo", "mpi"])
        assert row["algbw"] == pytest.approx(row["bytes"] / row["seconds"])
    first = rows[0]
    assert first["op"] == "all_reduce"
    assert first["busbw"] == pytest.approx(first["algbw"] * 2 * (4 - 1) / 4)


def assert_beside(row: dict[str, Any], names: list[str]) -> None:
    """The row has right results and true ratios of these libraries."""
    assert list(row["peers"]) == names
    for peer in row["peers"].values():
        assert peer["correct"] is True
        assert peer["ratio"] == pytest.approx(row["seconds"] / peer["seconds"])


@pytest.mark.timeout(110)
def test_every_strategy_of_an_operation_is_timed_beside_auto() -> None:
    """One row for auto and one per strategy that exists; auto's names what it costs to have it."""
    first, *others = rows_of(
        "collectives", "--topology", "1,2", "--sizes", "4Ki", "--repeats", "2",
        "--operations", "reduce", "--strategy", "all", "--against", "none",
    )  # fmt: skip
    assert first["setting"] == "auto"
    flat, levels = available(Kind.REDUCE), LEVELS[Kind.REDUCE]
    assert [row["setting"] for row in others] == flat + [
        f"local={SPELLINGS[local]},between={SPELLINGS[between]}"
        for local in levels[0]
        for between in levels[1]
    ]
    timed = [row for row in others if row["repeats"]]
    assert 1 < len(timed) <= 13
    assert all(row["correct"] and row["strategy"] == row["setting"] for row in others)
    assert first["strategy"] in {row["strategy"] for row in others}
    final = [row for row in timed if row["final"]]
    assert first["final"]
    assert 1 <= len(final) <= 2
    assert first["strategy"] in {row["strategy"] for row in final}
    assert first["best"] == pytest.approx(first["seconds"] / min(row["seconds"] for row in final))
    assert {row["best"] for row in others} == {None}


@pytest.mark.timeout(110)
def test_links_are_measured_and_their_rows_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures of real ranks are plausible, and say of later rows what the cost model expects;
    a user's own collective.py in the folder is not what ranks import."""
    monkeypatch.setenv("UNISONO_CACHE_DIR", str(tmp_path))
    (tmp_path / "collective.py").write_text("raise SystemExit('a module of the user')\n")
    monkeypatch.chdir(tmp_path)
    (row,) = rows_of("links", "--link", "shm")
    assert row["kind"] == "shm"
    assert 0 < row["round_trip"] < 1
    assert row["rate"] > 1e6
    assert (tmp_path / "links.json").exists()
    (row,) = rows_of(
        "collectives", "--topology", "1x2", "--sizes", "8", "--repeats", "1", "--against", "none"
    )
    assert 0 < row["predicted_seconds"] < 1


@pytest.mark.timeout(110)
def test_a_ddp_step_hides_communication_behind_its_backward() -> None:
    """With several buckets, the exposed communication of a step is less than all of it."""
    (row,) = rows_of("ddp", "--ranks", "2", "--repeats", "3", "--against", "none")
    assert row["correct"] is True
    assert row["buckets"] > 2
    assert 0 < row["exposed_seconds"] < row["communication_seconds"]


@pytest.mark.timeout(110)
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize(
    ("topology", "network"),
    [("2x2", ("--bandwidth", "1Gbit")), ("2x1", ("--delay", "20ms"))],
    ids=["bandwidth", "delay"],
)
def test_nodes_on_hosts_of_their_own(topology: str, network: tuple[str, str]) -> None:
    """A shaped link cannot be outrun for long, and a round trip takes at least its time."""
    (row,) = rows_of(
        "collectives", "--topology", topology, "--sizes", "2Mi", "--repeats", "1",
        "--against", "none" if topology == "2x2" else "gloo,mpi", *network,
    )  # fmt: skip
    assert row["correct"] is True
    assert row["nodes"] == 2
    if network[0] == "--bandwidth":
        assert row["share"] < 1.2  # what a bucket of tokens lets through at once included
    else:
        assert_beside(row, ["gloo", "mpi"])
        assert min(row["seconds"], *(peer["seconds"] for peer in row["peers"].values())) > 0.02


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("collectives", "--sizes", "12parsecs"), "12parsecs"),
        (("collectives", "--bandwidth", "fast"), "fast"),
        (("collectives", "--delay", "5ms", "--link", "shm"), "one node"),
        (("collectives", "--ranks", "two"), "two"),
        (("collectives", "--operations", "all_reduce reduce"), "several are separated by commas"),
        (("collectives", "--against", "gloo,none"), "it takes gloo, mpi, both (gloo,mpi), or none"),
        (("ddp", "--against", "mpi"), "it takes gloo, or none"),
        (("collectives", "--topology", "2x0"), "at least one rank"),
        (("collectives", "--empty"), "--topology 1x4"),
        (("collectives", "--device", "cpu,cuda"), "it takes one of cpu, cuda"),
        (("collectives", "--device", "cuda", "--empty", "--topology", "1x4"), "leave out --device"),
        (("collectives", "--strategy", "rings"), "double_tree"),
        (("ddp", "--strategy", "local=binomial,between=ring"), "exists for no operation"),
        (("collectives", "--sizes", "0"), "at least 1 byte"),
        (("choices", "--operations", "allreduce"), "all_reduce"),
        (("choices", "--sizes", "0"), "at least 1 byte"),
        (("choices", "--sizes", "8x"), "8x"),
        (("choices", "--topology", "2x2", "--ranks", "8"), "leave one of them out"),
        (("choices", "--topology", "2x2", "--link", "shm"), "nodes share no memory"),
        (("choices", "--link", "shm+websocket"), "is none of websocket, shm; several are"),
        (("links", "--link", "rdma"), "is none of websocket, shm; several are"),
        (("plot", "nowhere.json", "--out", "x.svg"), "nowhere.json cannot be read"),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple[str, ...], said: str) -> None:
    """A wrong value is repeated, with what would do instead, and is wrong usage."""
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert said in done.stderr


@pytest.mark.timeout(110)
def test_choices_of_auto_stand_beside_the_best_fixed_strategy() -> None:
    """One row per kind of link and size: what auto took, what was best, and both ratios."""
    rows = rows_of("choices", "--ranks", "2", "--link", "shm", "--sizes", "8", "--repeats", "1")
    assert [(row["link"], row["ranks"], row["bytes"]) for row in rows] == [("shm", 2, 8)]
    for row in rows:
        assert row["ratio"] == pytest.approx(row["seconds"] / row["best_seconds"])
        assert row["strategy"] in available(Kind.ALL_REDUCE)
        assert row["best"] in available(Kind.ALL_REDUCE)
