"""Results of ``unisono bench``: as lines of a table for people, and as JSON for programs."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from collective.machine import cores
from collective.units import format_rate, format_size, format_time
from unisono.bench_layout import Layout

__all__ = ["SCHEMA", "head", "line", "machine", "results", "title", "wrong"]

#: of the JSON; the number rises when a field changes its meaning or is gone
SCHEMA = "unisono.bench/1"


def machine() -> dict[str, Any]:
    """On what a run that begins now is made, and what else goes on there."""
    from importlib.metadata import version

    return {
        "cpu": _cpu(),
        "cores": cores(),
        "load": round(os.getloadavg()[0], 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "unisono": version("unisono"),
    }


def results(command: str, where: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """The JSON object of a run on a `machine`."""
    found = {"schema": SCHEMA, "command": command, "machine": where, "rows": list(rows)}
    return json.dumps(found, indent=1)


def _cpu() -> str:
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return names[0] if names else platform.machine()


def title(layout: Layout) -> str:
    """What stands above the rows of a layout."""
    here = f"{layout.link}, on {cores()} cores"
    if not layout.levels:
        return f"{layout.ranks} ranks, {here}"
    each = " + ".join(map(str, layout.nodes))
    return f"{len(layout.nodes)} nodes with {each} ranks, {here}"


def head(layout: Layout, command: str, peers: Sequence[str]) -> str:
    """The first line of a table."""
    if command == "ddp":
        start = f"{'buckets':<9}{'gradients':>10}{'step':>12}{'comm.':>12}{'exposed':>12}"
    else:
        start = f"{'strategy':<{_width(layout)}}{'size':>9}{'time':>12}{'algbw':>12}{'busbw':>12}"
    ends = "".join(f"{name:>12}{'ratio':>8}" for name in peers)
    return f"{'operation':<15}{start}{ends}" + ("" if command == "ddp" else f"{'best':>7}")


def _width(layout: Layout) -> int:
    """Of the column that names strategies."""
    return 56 if layout.levels else 26


def line(layout: Layout, row: dict[str, Any]) -> str:
    """One row of a table."""
    size = format_size(row["bytes"])
    if row["op"] == "ddp_step":
        best = ""
        middle = (
            f"{row['buckets']:<9}{size:>10}{format_time(row['seconds']):>12}"
            f"{format_time(row['communication_seconds']):>12}{format_time(row['exposed_seconds']):>12}"
        )
    else:
        best = f"{'—' if row['best'] is None else format(row['best'], '.2f'):>7}"
        name = row["strategy"] if row["setting"] != "auto" else f"auto: {row['strategy']}"
        middle = (
            f"{name:<{_width(layout)}}{size:>9}{format_time(row['seconds']):>12}"
            f"{format_rate(row['algbw']):>12}{format_rate(row['busbw']):>12}"
        )
    peers = "".join(
        f"{format_time(peer['seconds']):>12}{peer['ratio']:>8.2f}" for peer in row["peers"].values()
    )
    share = f"  {row['share']:.1%} of the payload rate" if "share" in row else ""
    bad = wrong(row)
    complaint = f"  WRONG RESULT of {', '.join(bad)}" if bad else ""
    return f"{row['op']:<15}{middle}{peers}{best}{share}{complaint}"


def wrong(row: dict[str, Any]) -> list[str]:
    """Whose result was not what the operation means."""
    found = [] if row["correct"] else ["unisono"]
    return found + [name for name, peer in row["peers"].items() if not peer["correct"]]
