"""`unisono plan`: predictions from given figures, through the real command."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "unisono.cli", "plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def planned(*arguments: str) -> Any:
    done = plan(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("cluster", "seconds", "level"),
    [
        (["--nodes", "64", "--devices-per-node", "1", "--bandwidth", "50GB"], 0.551, "between"),
        (["--nodes", "1024", "--bandwidth", "50GB"], 0.559, "between"),
        (["--devices-per-node", "8", "--local-bandwidth", "450GB"], 0.0544, "local"),
    ],
)  # fmt: skip
def test_fourteen_gigabytes_by_a_ring(cluster: list[str], seconds: float, level: str) -> None:
    """The time follows from 2(n-1)/n of the bytes over the bandwidth of the links."""
    answer = planned(*cluster, "--bytes", "14GB", "--latency", "0", "--strategy", "ring")
    assert answer["seconds"] == seconds
    assert answer["levels"] == {level: seconds}
    assert (answer["operation"], answer["strategy"]) == ("all_reduce", "ring")
    ranks = answer["ranks"]
    assert answer["sent"] == round(2 * (ranks - 1) / ranks * 14e9)


def test_strategies_come_in_order_with_the_time_of_each_level() -> None:
    """Without a strategy all are listed, fastest first, and the best of two levels among them."""
    cluster = [
        "--nodes", "2", "--devices-per-node", "4", "--bytes", "16MiB", "--bandwidth", "10Gbit",
        "--latency", "50us", "--local-bandwidth", "20GB", "--local-latency", "5us",
        "--cores", "4", "--per-segment", "10us", "--fold-rate", "5GB", "--segment", "1MiB",
    ]  # fmt: skip
    answer = planned(*cluster)
    rows = answer["strategies"]
    assert [row["seconds"] for row in rows] == sorted(row["seconds"] for row in rows)
    assert rows[0]["strategy"].startswith("local=")
    assert set(rows[0]["levels"]) == {"local", "between"}
    assert {"ring", "tree:2", "double_tree"} <= {row["strategy"] for row in rows}
    assert answer["left_out"] == []
    shown = plan(*cluster)
    lines = shown.stdout.splitlines()
    assert lines[0].startswith("all_reduce of 16 MiB on 2 × 4 ranks")
    first = next(line for line in lines[2:] if "local=" in line)
    assert first.split()[0] == rows[0]["strategy"]
    assert {"strategy", "time", "local", "between", "sent", "how"} <= set(lines[2].split())


def test_every_operation_can_be_planned() -> None:
    """Each has its own strategies; more latency is more time."""
    for operation in ("broadcast", "all_gather", "all_to_all", "barrier"):
        slow, fast = (
            planned("--nodes", "3", "--bytes", "3000", "--bandwidth", "1Gbit",
                    "--latency", latency, "--operation", operation)["strategies"][0]["seconds"]
            for latency in ("1ms", "10us")
        )  # fmt: skip
        assert slow > fast > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "one rank exchanges nothing: give --nodes or --devices-per-node"),
        (["--nodes", "2"], "--bandwidth is missing"),
        (["--devices-per-node", "2"], "--local-bandwidth is missing"),
        (["--nodes", "2", "--bandwidth", "50"], "--bandwidth: '50' is no rate"),
        (["--nodes", "2", "--bandwidth", "1GB", "--latency", "5"], "--latency: '5' is no time"),
        (["--nodes", "2", "--bandwidth", "1GB", "--bytes", "x"], "--bytes: 'x' is no size"),
        (["--nodes", "2", "--bandwidth", "1GB", "--segment", "0"], "at least 1 byte"),
        (["--nodes", "9000", "--devices-per-node", "2"], "18000 ranks; at most 16384"),
        (
            ["--nodes", "2", "--bandwidth", "1GB", "--operation", "all_reduce,reduce"],
            "'all_reduce,reduce': it takes one of all_reduce, reduce",
        ),
        (["--nodes", "2", "--bandwidth", "1GB", "--strategy", "wheel"], "accepted are centralized"),
        (
            ["--nodes", "2", "--bandwidth", "1GB", "--strategy", "ring", "--operation", "reduce"],
            "there is no reduce by ring yet; there is centralized",
        ),
        (
            ["--nodes", "500", "--devices-per-node", "2", "--bandwidth", "1GB",
             "--local-bandwidth", "1GB", "--strategy", "bruck"],
            "take two levels, or fewer ranks",
        ),
    ],
)  # fmt: skip
def test_wrong_figures_are_named(arguments: list[str], said: str) -> None:
    """A figure that is missing or wrong is named, with what would do; usage errors end with 2."""
    done = plan(*(["--bytes", "1MB"] if "--bytes" not in arguments else []), *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
