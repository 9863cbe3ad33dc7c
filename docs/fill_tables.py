"""Puts measured figures into the tables of performance.md: `make bench` runs it.

A table stands under a comment that names what it shows and the results that it is made of, which
lie in the folder given as argument: `<!-- libraries: flat.json -->`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from collective.units import format_rate, format_size, format_time

PAGE = Path(__file__).with_name("performance.md")
MARK = re.compile(r"(<!-- (\w+): ([\w. -]+) -->\n\n)(.*?)(?=\n\n|\Z)", re.DOTALL)
SMALL = 1 << 20

Row = dict[str, Any]
Run = dict[str, Any]


def where(row: Row) -> str:
    """How many ranks, and on how many nodes where some share one."""
    if row["nodes"] in (1, row["ranks"]):
        return f"{row['ranks']}"
    return str(row["topology"])


def aim(row: Row) -> float | None:
    """The ratio to gloo's time that is to be reached, of an all-reduce under auto."""
    nbytes, ranks = row["bytes"], row["ranks"]
    if row["link"] == "shm":
        return None if nbytes < SMALL or ranks != 4 else 0.3 if row["empty"] else 0.5
    if row["link"] == "shm+websocket":
        return None if nbytes < SMALL else 0.6
    if ranks == 8:
        return 0.6 if nbytes < 4096 else 0.3
    if nbytes <= SMALL:
        return 0.6 if ranks == 4 and nbytes == 8 else 0.5
    return None if nbytes < 25 * SMALL else 0.85 if ranks == 2 else 1.0


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def machine(runs: Sequence[Run]) -> str:
    """On what it was measured."""
    found = runs[0]["machine"]
    return (
        f"The figures are from one run on {found['cores']} cores ({found['cpu']}), "
        f"{found['kernel']}, Python {found['python']}, torch {found['torch']}, begun at a load "
        f"average of {found['load']}."
    )


def libraries(runs: Sequence[Run]) -> str:
    """Times and ratios of all libraries."""
    rows = [row for run in runs for row in run["rows"]]
    names = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    titles = {"gloo": "gloo", "mpi": "MPICH"}
    head = ["ranks", "size", "strategy", "Unisono"]
    head += [cell for name in names for cell in (titles[name], "ratio")]
    return table(
        [*head, "aim (gloo)"],
        [
            [
                where(row),
                format_size(row["bytes"]),
                row["strategy"],
                format_time(row["seconds"]),
                *(
                    cell
                    for name in names
                    for cell in (
                        format_time(row["peers"][name]["seconds"]),
                        f"{row['peers'][name]['ratio']:.2f}",
                    )
                ),
                "" if (wanted := aim(row)) is None else f"{wanted:g}",
            ]
            for row in rows
        ],
    )


def shaped(runs: Sequence[Run]) -> str:
    """Behind cards of a limited rate."""
    return table(
        ["ranks", "size", "strategy", "Unisono", "gloo", "ratio", "share"],
        [
            [
                where(row),
                format_size(row["bytes"]),
                row["strategy"],
                format_time(row["seconds"]),
                format_time(row["peers"]["gloo"]["seconds"]),
                f"{row['peers']['gloo']['ratio']:.2f}",
                f"{row['share']:.1%}",
            ]
            for run in runs
            for row in run["rows"]
        ],
    )


def connections(runs: Sequence[Run]) -> str:
    """Over a long way, by connections of a link: auto, 1, 4 and 16 in this order of files."""
    rows = list(zip(*(run["rows"] for run in runs), strict=True))
    return table(
        ["size", "auto", "1", "4", "16", "gloo", "ratio (auto)"],
        [
            [
                format_size(same[0]["bytes"]),
                *(format_time(row["seconds"]) for row in same),
                format_time(same[0]["peers"]["gloo"]["seconds"]),
                f"{same[0]['peers']['gloo']['ratio']:.2f}",
            ]
            for same in rows
        ],
    )


def steps(runs: Sequence[Run]) -> str:
    """Steps of DistributedDataParallel."""
    return table(
        ["ranks", "step", "communication", "exposed", "step on gloo", "ratio", "aim"],
        [
            [
                where(row),
                format_time(row["seconds"]),
                format_time(row["communication_seconds"]),
                format_time(row["exposed_seconds"]),
                format_time(row["peers"]["gloo"]["seconds"]),
                f"{row['peers']['gloo']['ratio']:.2f}",
                "1",
            ]
            for run in runs
            for row in run["rows"]
        ],
    )


def choices(runs: Sequence[Run]) -> str:
    """What auto took beside the fastest fixed strategy."""
    return table(
        ["ranks", "links", "size", "auto", "time", "fastest fixed", "time", "ratio", "again"],
        [
            [
                str(row["ranks"]) if row["topology"] == "flat" else row["topology"],
                row["link"],
                format_size(row["bytes"]),
                row["strategy"],
                format_time(row["seconds"]),
                row["best"],
                format_time(row["best_seconds"]),
                f"{row['ratio']:.2f}",
                "" if row["again"] is None else f"{row['again']:.2f}",
            ]
            for run in runs
            for row in run["rows"]
        ],
    )


def links(runs: Sequence[Run]) -> str:
    """What the cost model goes by."""
    return table(
        ["link", "round trip", "rate", "call", "segment", "received", "sent"],
        [
            [
                row["kind"],
                format_time(row["round_trip"]),
                format_rate(row["rate"]),
                format_time(row["per_call"]),
                format_time(row["per_segment"]),
                f"{format_time(row['per_byte'] * SMALL)}/MiB",
                f"{format_time(row['per_byte_sent'] * SMALL)}/MiB",
            ]
            for run in runs
            for row in run["rows"]
        ],
    )


KINDS: dict[str, Callable[[Sequence[Run]], str]] = {
    kind.__name__: kind for kind in (machine, libraries, shaped, connections, steps, choices, links)
}


def main(folder: Path) -> None:
    """Fill every table of the page from the results in a folder."""

    def fill(match: re.Match[str]) -> str:
        runs = [json.loads((folder / name).read_text()) for name in match[3].split()]
        return match[1] + KINDS[match[2]](runs)

    PAGE.write_text(MARK.sub(fill, PAGE.read_text()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
