"""``unisono bench plot``: results of ``unisono bench collectives --json`` as one SVG picture.

On the left, time over size, ours and the other library's; on the right, what the cost model
predicted over what was measured, where figures of the links were known.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Annotated, Any

import typer

from collective.units import format_size, format_time
from unisono.commands.console import fail

__all__ = ["draw", "plot"]

#: told apart by people who do not see all colours (Okabe and Ito)
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#555555", "#000000")
_WIDTH, _HEIGHT = 460, 340
_LEFT, _TOP, _BOTTOM = 70, 34, 48
_GAP = 90
_NEEDED = ("op", "ranks", "link", "bytes", "seconds", "peer", "peer_seconds")


def plot(
    results: Annotated[
        list[Path], typer.Argument(help="Files that unisono bench collectives --json wrote.")
    ],
    out: Annotated[Path, typer.Option(help="The picture to write, an SVG file.")],
) -> None:
    """Draw time over size, and what was predicted over what was measured."""
    rows = [row for path in results for row in _rows(path)]
    if not rows:
        fail("there is no row of auto, or of one strategy, in these files")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(draw(rows))
    print(f"wrote {out}")


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, of several strategies only auto's."""
    try:
        rows = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        fail(f"{path} cannot be read as results: {error}")
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and all(name in row for name in _NEEDED) for row in rows
    ):
        fail(f"{path} holds no rows of unisono bench collectives --json")
    settings = {row.get("setting", "auto") for row in rows}
    return [row for row in rows if len(settings) == 1 or row.get("setting") == "auto"]


@dataclass
class _Line:
    name: str
    colour: str
    dashed: bool
    points: list[tuple[float, float]]


@dataclass
class _Axis:
    """A logarithmic axis from `least` to `most`, over `length` pixels."""

    least: float
    most: float
    length: float

    def at(self, value: float) -> float:
        return self.length * math.log(value / self.least) / math.log(self.most / self.least)


def draw(rows: Sequence[dict[str, Any]]) -> str:
    """The SVG of rows of results."""
    times: list[_Line] = []
    predictions: list[_Line] = []
    keys = sorted({(row["op"], row["link"], row["ranks"]) for row in rows})
    peers: dict[str, None] = {}
    for number, key in enumerate(keys):
        colour = _COLOURS[number % len(_COLOURS)]
        operation, link, ranks = key
        name = f"{operation}, {ranks} ranks, {link}"
        own = sorted(
            (row for row in rows if (row["op"], row["link"], row["ranks"]) == key),
            key=lambda row: row["bytes"],
        )
        times.append(_Line(name, colour, False, [(r["bytes"], r["seconds"]) for r in own]))
        beside = [(r["bytes"], r["peer_seconds"]) for r in own if r["peer_seconds"]]
        if beside:
            peers[str(own[0]["peer"])] = None
            times.append(_Line("", colour, True, beside))
        foretold = [
            (r["bytes"], r["predicted_seconds"] / r["seconds"])
            for r in own
            if r.get("predicted_seconds")
        ]
        if foretold:
            predictions.append(_Line("", colour, False, foretold))
    sizes = _bounds([x for line in times for x, _ in line.points], 4)
    panels = [
        _panel(
            0,
            "time over size" + (f" (dashed: {', '.join(peers)})" if peers else ""),
            sizes,
            _bounds([y for line in times for _, y in line.points], 10),
            times,
        )
    ]
    if predictions:
        ratios = [y for line in predictions for _, y in line.points]
        reach = 2.0 ** max(2, math.ceil(math.log2(max(max(ratios), 1 / min(ratios)))))
        panels.append(
            _panel(
                _LEFT + _WIDTH + _GAP,
                "predicted over measured time",
                sizes,
                (1 / reach, reach),
                predictions,
                ratio=True,
            )
        )
    height = _TOP + _HEIGHT + _BOTTOM
    legend = []
    for number, line in enumerate(line for line in times if line.name):
        y = height + 18 * number
        legend.append(
            f'<line x1="{_LEFT}" x2="{_LEFT + 28}" y1="{y}" y2="{y}" stroke="{line.colour}" '
            f'stroke-width="2"/><text x="{_LEFT + 36}" y="{y + 4}">{escape(line.name)}</text>'
        )
    full = height + 18 * len(legend) + 6
    wide = (_LEFT + _WIDTH) * len(panels) + (_GAP if len(panels) > 1 else 0) + 30
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {full}" width="{wide}" '
        f'height="{full}" font-family="sans-serif" font-size="12" fill="#222">\n'
        f'<rect width="{wide}" height="{full}" fill="#fff"/>\n'
        + "\n".join([*panels, *legend])
        + "\n</svg>\n"
    )


def _bounds(values: Sequence[float], base: float) -> tuple[float, float]:
    """Powers of `base` around the values."""
    low = math.floor(math.log(min(values), base) + 1e-9)
    high = math.ceil(math.log(max(values), base) - 1e-9)
    return base**low, base ** max(high, low + 1)


def _panel(
    offset: float,
    title: str,
    across: tuple[float, float],
    up: tuple[float, float],
    lines: Sequence[_Line],
    *,
    ratio: bool = False,
) -> str:
    x, y = _Axis(*across, _WIDTH), _Axis(*up, _HEIGHT)
    parts = [
        f'<g transform="translate({offset + _LEFT:g} {_TOP})">',
        f'<text x="0" y="-12" font-weight="bold">{escape(title)}</text>',
    ]
    for value in _ticks(across, 4):
        at = x.at(value)
        parts.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{_HEIGHT}" stroke="#e4e4e4"/>'
            f'<text x="{at:.1f}" y="{_HEIGHT + 18}" text-anchor="middle" font-size="10">'
            f"{format_size(round(value))}</text>"
        )
    for value in _ticks(up, 2 if ratio else 10):
        at = _HEIGHT - y.at(value)
        strong = ratio and abs(value - 1) < 1e-9
        parts.append(
            f'<line x1="0" x2="{_WIDTH}" y1="{at:.1f}" y2="{at:.1f}" '
            f'stroke="{"#888" if strong else "#e4e4e4"}"/>'
            f'<text x="-8" y="{at + 4:.1f}" text-anchor="end" font-size="10">'
            f"{f'{value:g}' if ratio else format_time(value)}</text>"
        )
    for line in lines:
        points = " ".join(f"{x.at(a):.1f},{_HEIGHT - y.at(b):.1f}" for a, b in line.points)
        dash = ' stroke-dasharray="6 4"' if line.dashed else ""
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{line.colour}" '
            f'stroke-width="2"{dash}/>'
        )
        if not line.dashed:
            parts += [
                f'<circle cx="{x.at(a):.1f}" cy="{_HEIGHT - y.at(b):.1f}" r="2.5" '
                f'fill="{line.colour}"/>'
                for a, b in line.points
            ]
    parts.append("</g>")
    return "\n".join(parts)


def _ticks(bounds: tuple[float, float], base: float) -> list[float]:
    """Powers of `base` from bound to bound, not too many to be read."""
    low, high = (round(math.log(bound, base)) for bound in bounds)
    step = max(1, math.ceil((high - low) / 8))
    return [float(base) ** power for power in range(low, high + 1, step)]
