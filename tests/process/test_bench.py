"""`unisono bench` runs real ranks, checks results, and reports every field of a row."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from collective.schedule import Kind
from collective.strategies import available
from unisono.namespaces import why_not

ROW = {
    "op", "setting", "strategy", "ranks", "nodes", "link", "bytes", "repeats", "seconds", "best",
    "algbw", "busbw", "peer", "peer_seconds", "ratio", "correct", "predicted_seconds",
}  # fmt: skip


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "unisono.cli", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


@pytest.mark.timeout(110)
def test_rows_of_every_operation_are_right_and_add_up() -> None:
    """Each row names its case, its result was checked, and its bandwidths follow from its time."""
    done = bench(
        "collectives", "--ranks", "2", "--sizes", "8,64Ki", "--repeats", "2", "--json",
        "--operations", "all_reduce,broadcast,reduce,all_gather,reduce_scatter",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert len(rows) == 10
    for row in rows:
        assert set(row) == ROW
        assert row["correct"] is True
        assert row["peer"] == "gloo"
        assert row["ratio"] == pytest.approx(row["seconds"] / row["peer_seconds"])
        assert row["algbw"] == pytest.approx(row["bytes"] / row["seconds"])
    ring = next(row for row in rows if row["op"] == "all_reduce" and row["bytes"] == 65536)
    assert ring["busbw"] == pytest.approx(ring["algbw"])  # 2(n−1)/n is 1 for two ranks


@pytest.mark.timeout(110)
def test_every_strategy_of_an_operation_is_timed_beside_auto() -> None:
    """One row for auto and one per strategy that exists; auto's names what it costs to have it."""
    done = bench(
        "collectives", "--ranks", "3", "--sizes", "4Ki", "--repeats", "2", "--json",
        "--operations", "reduce", "--strategy", "all", "--against", "none", "--link", "shm",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, *others = json.loads(done.stdout)
    assert first["setting"] == "auto"
    assert [row["setting"] for row in others] == available(Kind.REDUCE)
    assert all(row["correct"] and row["strategy"] == row["setting"] for row in others)
    assert first["strategy"] in {row["strategy"] for row in others}
    assert first["best"] == pytest.approx(first["seconds"] / min(row["seconds"] for row in others))
    assert {row["best"] for row in others} == {None}


@pytest.mark.timeout(110)
def test_links_are_measured_and_their_rows_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures of real ranks are plausible, and say of later rows what the cost model expects."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = bench("links", "--link", "shm", "--json")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert row["kind"] == "shm"
    assert 0 < row["round_trip"] < 1
    assert row["rate"] > 1e6
    done = bench(
        "collectives", "--ranks", "2", "--sizes", "8", "--repeats", "1", "--json",
        "--against", "none", "--link", "shm",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert 0 < row["predicted_seconds"] < 1


@pytest.mark.timeout(110)
def test_a_ddp_step_hides_communication_behind_its_backward() -> None:
    """With several buckets, the exposed communication of a step is less than all of it."""
    done = bench("ddp", "--ranks", "2", "--repeats", "3", "--against", "none", "--json")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert row["correct"] is True
    assert row["buckets"] > 2
    assert 0 < row["exposed_seconds"] < row["communication_seconds"]


@pytest.mark.timeout(110)
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize("network", [("--bandwidth", "1Gbit"), ("--delay", "20ms")])
def test_ranks_on_hosts_of_their_own(network: tuple[str, str]) -> None:
    """A shaped link cannot be outrun for long, and a round trip takes at least its time."""
    done = bench(
        "collectives", "--ranks", "2", "--sizes", "2Mi", "--repeats", "1", "--json",
        "--against", "none", "--strategy", "ring", *network,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert row["correct"] is True
    if network[0] == "--bandwidth":
        assert row["share"] < 1.2  # what a bucket of tokens lets through at once included
    else:
        assert row["seconds"] > 0.02


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("collectives", "--sizes", "12parsecs"), "12parsecs"),
        (("collectives", "--bandwidth", "fast"), "fast"),
        (("collectives", "--delay", "5ms", "--link", "shm"), "shm"),
        (("collectives", "--ranks", "two"), "two"),
        (("collectives", "--operations", "allreduce"), "all_reduce"),
        (("collectives", "--against", "mpi"), "gloo"),
        (("links", "--link", "rdma"), "websocket and shm"),
        (("plot", "nowhere.json", "--out", "x.svg"), "nowhere.json cannot be read"),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple[str, ...], said: str) -> None:
    """A wrong value is repeated, with what would do instead."""
    done = bench(*arguments)
    assert done.returncode != 0
    assert said in done.stderr
