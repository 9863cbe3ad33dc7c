"""Options that several commands of ``unisono bench`` have, and how they are read.

What means nothing ends the command as wrong usage, before a rank starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from collective.figures import KINDS
from collective.units import parse_size
from unisono.bench_layout import Layout, layouts
from unisono.commands.console import fail

__all__ = [
    "USAGE",
    "Json",
    "Link",
    "Operations",
    "Ranks",
    "Repeats",
    "Sizes",
    "Topology",
    "kinds_of",
    "operations_of",
    "places_of",
    "sizes_of",
]

OPERATIONS = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter")
#: a wrong argument, as for options that typer checks
USAGE = 2

Topology = Annotated[
    str,
    typer.Option(
        metavar="flat|NxM|A,B,…",
        help="flat: one rank per node; 2x2: two nodes of two ranks; 1,4,2: the ranks of each node.",
        rich_help_panel="Ranks",
    ),
]
Ranks = Annotated[
    str | None,
    typer.Option(
        metavar="N,…",
        help="With flat: numbers of ranks, one after the other (2,4).",
        show_default=False,
        rich_help_panel="Ranks",
    ),
]
Link = Annotated[
    str | None,
    typer.Option(
        metavar="websocket|shm",
        help="One kind of link for all pairs. Without it, ranks of a node exchange through shared "
        "memory and nodes over WebSocket.",
        show_default=False,
        rich_help_panel="Ranks",
    ),
]
Sizes = Annotated[str, typer.Option(metavar="SIZE,…", help="Bytes of the whole tensor.")]
Operations = Annotated[str, typer.Option(metavar="NAME,…", help=f"Of {', '.join(OPERATIONS)}.")]
Repeats = Annotated[
    int | None, typer.Option(min=1, help="Per size (20; 5 from 25 MiB on).", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


def sizes_of(text: str) -> list[int]:
    """Bytes of the sizes in a list."""
    return [_size(part.strip()) for part in text.split(",")]


def _size(text: str) -> int:
    try:
        size = parse_size(text)
    except ValueError as error:
        fail(f"--sizes: {error}", USAGE)
    if size < 1:
        fail(f"--sizes {text}: a tensor has at least 1 byte", USAGE)
    return size


def operations_of(text: str) -> list[str]:
    """The operations in a list."""
    return _listed("--operations", text, OPERATIONS)


def kinds_of(text: str) -> list[str]:
    """The kinds of links in a list."""
    return _listed("--link", text, KINDS)


def _listed(flag: str, text: str, known: Sequence[str]) -> list[str]:
    found = [name.strip() for name in text.split(",")]
    for name in found:
        if name not in known:
            fail(
                f"{flag} {name!r} is none of {', '.join(known)}; several are separated by commas",
                USAGE,
            )
    return found


def places_of(topology: str, ranks: str | None, link: str | None) -> list[Layout]:
    """Where ranks are to be (`bench_layout.layouts`)."""
    try:
        return layouts(topology, ranks, link)
    except ValueError as error:
        fail(str(error), USAGE)
