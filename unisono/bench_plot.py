"""``unisono bench plot``: results of ``unisono bench collectives --json`` as SVG pictures.

One picture per case: time over size of all libraries, and under it, where figures of the links were
known, what the cost model predicted over what was measured.  Pictures are as wide as a phone, so
that a page shows as many side by side as it has room for, and follow its reader's light or dark.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Annotated, Any

import typer

from collective.units import format_rate, format_size, format_time
from unisono.bench_arguments import USAGE
from unisono.bench_output import SCHEMA
from unisono.commands.console import fail

__all__ = ["draw", "plot", "title"]

_WIDTH, _LEFT, _RIGHT = 400, 64, 14
_TOP, _HEIGHT, _STRIP = 62, 190, 64
_GAP, _FOOT = 42, 30
#: how each library's line is told apart, also by people who do not see all colours (Okabe and Ito)
_MARKS = {"unisono": "circle", "gloo": "square", "mpi": "diamond", "nccl": "diamond"}
_NAMES = {"unisono": "Unisono", "gloo": "gloo", "mpi": "MPICH", "nccl": "NCCL"}
_WRITE = "write it with unisono bench collectives --json"
_STYLE = """
text{font:13px system-ui,sans-serif;fill:#24292f}.small{font-size:12px;fill:#57606a}
.title{font-size:15px;font-weight:600}.end{text-anchor:end}.middle{text-anchor:middle}
.paper{fill:#fff;stroke:#d0d7de}.grid{stroke:#e4e8ec}.even{stroke:#8c959f}
.unisono{color:#0072b2}.gloo{color:#d55e00}.mpi,.nccl{color:#008a63}
.line{fill:none;stroke:currentColor;stroke-width:2}.mark{fill:currentColor}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.small{fill:#9da7b3}
.paper{fill:#0d1117;stroke:#30363d}.grid{stroke:#21262d}.even{stroke:#6e7681}
.unisono{color:#56b4e9}.gloo{color:#f0883e}.mpi,.nccl{color:#3fcf9a}}
""".replace("\n", "")


def plot(
    results: Annotated[
        list[Path],
        typer.Argument(metavar="RESULTS.json", help="What bench collectives --json wrote."),
    ],
    out: Annotated[Path, typer.Option(help="The folder for the pictures, one SVG per case.")],
) -> None:
    """Draw time over size of all libraries, and what was predicted over what was measured."""
    rows = [row for path in results for row in _rows(path)]
    cases: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault(title(row), []).append(row)
    if not cases:
        fail(f"{', '.join(map(str, results))}: no rows to draw", USAGE)
    out.mkdir(parents=True, exist_ok=True)
    for name, found in cases.items():
        path = out / (re.sub(r"[^a-z0-9]+", "-", name.lower()) + ".svg")
        path.write_text(draw(found))
        print(f"wrote {path}")


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, of several strategies only auto's."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        fail(f"{path} cannot be read as results: {error}; {_WRITE}", USAGE)
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema != SCHEMA or found.get("command") != "collectives":
        what = f"{schema} of {found.get('command')}" if schema else "something else"
        fail(f"{path} holds {what}, not {SCHEMA} of collectives; {_WRITE}", USAGE)
    rows: list[dict[str, Any]] = found["rows"]
    settings = {row["setting"] for row in rows}
    return [row for row in rows if len(settings) == 1 or row["setting"] == "auto"]


def title(row: dict[str, Any]) -> str:
    """What a row's case is called; rows of the same title differ in size only."""
    link = {"websocket": "WebSocket", "shm": "shared memory"}.get(row["link"])
    if row["nodes"] in (1, row["ranks"]):
        where = f"{row['ranks']} ranks, {link}"
    else:
        nodes, by, each = row["topology"].partition("x")
        where = f"{nodes} nodes of {each} ranks" if by else f"nodes of {nodes} ranks"
        where += f", {link}" if link else ""
    if row["bandwidth"]:
        where += f", {format_rate(row['bandwidth'] / 8, 'bit')}"
    if row["delay"]:
        where += f", round trip {format_time(row['delay'])}"
    if row["empty"]:
        where += ", collective.empty"
    if row["device"] == "cuda":
        where += ", on CUDA"
    return f"{row['op'].replace('_', '-')}, {where}"


@dataclass
class _Axis:
    """A logarithmic axis from `least` to `most`, over `length` pixels."""

    least: float
    most: float
    length: float

    def at(self, value: float) -> float:
        return self.length * math.log(value / self.least) / math.log(self.most / self.least)

    def ticks(self, base: float, room: float) -> list[float]:
        """Powers of `base` within the axis, at least `room` pixels apart."""
        low = math.ceil(math.log(self.least, base) - 1e-9)
        high = math.floor(math.log(self.most, base) + 1e-9)
        step = max(1, math.ceil(room / self.length * math.log(self.most / self.least, base)))
        return [float(base) ** power for power in range(low, high + 1, step)]


def draw(rows: Sequence[dict[str, Any]]) -> str:
    """The SVG of one case's rows, which differ in size."""
    rows = sorted(rows, key=lambda row: row["bytes"])
    lines = {"unisono": [(row["bytes"], row["seconds"]) for row in rows]}
    for row in rows:
        for name, peer in row["peers"].items():
            lines.setdefault(name, []).append((row["bytes"], peer["seconds"]))
    predictions = [
        (row["bytes"], row["predicted_seconds"] / row["seconds"])
        for row in rows
        if row["predicted_seconds"]
    ]
    sizes = [row["bytes"] for row in rows]
    across = _Axis(min(sizes), max(max(sizes), 2 * min(sizes)), _WIDTH - _LEFT - _RIGHT)
    seconds = [value for points in lines.values() for _, value in points]
    least, most = math.log10(min(seconds)), math.log10(max(seconds))
    up = _Axis(10 ** math.floor(least), 10 ** max(math.ceil(most), math.floor(least) + 1), _HEIGHT)
    parts = [
        f'<text class="title" x="16" y="26">{escape(title(rows[0]))}</text>',
        *_legend(list(lines)),
        f'<g transform="translate({_LEFT} {_TOP})">',
        *_grid(across, up, 10, format_time),
        # ours last, on top of the others
        *(part for name in reversed(lines) for part in _line(name, lines[name], across, up)),
        "</g>",
    ]
    bottom = _TOP + _HEIGHT
    if predictions:
        ratios = [value for _, value in predictions]
        reach = 2.0 ** max(1, math.ceil(math.log2(max(max(ratios), 1 / min(ratios)))))
        strip = _Axis(1 / reach, reach, _STRIP)
        bottom += _GAP
        parts += [
            f'<text class="small" x="{_LEFT}" y="{bottom - 10}">predicted ÷ measured time</text>',
            f'<g transform="translate({_LEFT} {bottom})">',
            *_grid(across, strip, 2, lambda value: f"{value:.3g}"),
            *_line("unisono", predictions, across, strip),
            "</g>",
        ]
        bottom += _STRIP
    parts += [
        f'<text class="small middle" x="{_LEFT + across.at(value):.1f}" y="{bottom + 18}">'
        f"{format_size(round(value))}</text>"
        for value in across.ticks(2, 62)
    ]
    height = bottom + _FOOT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}">\n<style>{_STYLE}</style>\n'
        f'<rect class="paper" x=".5" y=".5" width="{_WIDTH - 1}" height="{height - 1}" rx="6"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _legend(names: Sequence[str]) -> list[str]:
    found = []
    for number, name in enumerate(names):
        x = _LEFT + 100 * number
        found.append(
            f'<g class="{name}"><path class="line" d="M{x} 44h24"/>{_mark(name, x + 12, 44)}</g>'
            f'<text x="{x + 32}" y="48">{_NAMES.get(name, escape(name))}</text>'
        )
    return found


def _grid(across: _Axis, up: _Axis, base: float, spell: Any) -> list[str]:
    found = [
        f'<path class="grid" d="M{across.at(value):.1f} 0V{up.length}"/>'
        for value in across.ticks(2, 62)
    ]
    for value in up.ticks(base, 24):
        y = up.length - up.at(value)
        even = base == 2 and math.isclose(value, 1)
        found.append(
            f'<path class="{"even" if even else "grid"}" d="M0 {y:.1f}H{across.length}"/>'
            f'<text class="small end" x="-8" y="{y + 4:.1f}">{spell(value)}</text>'
        )
    return found


def _line(name: str, points: Sequence[tuple[float, float]], across: _Axis, up: _Axis) -> list[str]:
    places = [(across.at(x), up.length - up.at(y)) for x, y in points]
    way = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    marks = "".join(_mark(name, x, y) for x, y in places)
    return [f'<g class="{name}"><polyline class="line" points="{way}"/>{marks}</g>']


def _mark(name: str, x: float, y: float) -> str:
    """A library's sign at a place."""
    match _MARKS.get(name):
        case "square":
            return f'<path class="mark" d="M{x - 3:.1f} {y - 3:.1f}h6v6h-6z"/>'
        case "diamond":
            return f'<path class="mark" d="M{x:.1f} {y - 4.2:.1f}l4.2 4.2-4.2 4.2-4.2-4.2z"/>'
        case _:
            return f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="3.2"/>'
