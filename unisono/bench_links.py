"""``unisono bench links``: the figures of this machine's links, and predictions from them."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from collective import figures
from collective.cost import Topology, uniform
from collective.prediction import TooLarge, predict
from collective.schedule import Kind
from collective.strategies import engines, parse
from collective.units import format_rate, format_time
from unisono.bench_arguments import Json, kinds_of
from unisono.bench_layout import Layout, layouts
from unisono.bench_output import machine, results
from unisono.bench_run import run_ranks
from unisono.commands.console import fail, table

__all__ = ["links", "predicted"]


def links(
    link: Annotated[
        str, typer.Option(metavar="NAME,…", help="Kinds to measure, of websocket and shm.")
    ] = "websocket,shm",
    as_json: Json = False,
) -> None:
    """Measure round-trip time and rate of links between two ranks here, and keep the figures."""
    kinds = kinds_of(link)
    found, where = [], machine()
    for kind in kinds:
        (layout,) = layouts("flat", "2", kind)
        (row,) = run_ranks({"what": "links", "link": kind}, layout, "auto")
        try:
            figures.store(figures.Figures(**row))
        except (OSError, ValueError) as error:
            fail(f"what was measured cannot be kept: {error}")
        found.append(row)
    if as_json:
        print(results("links", where, found))
        return
    table(
        ["link", "round trip", "rate", "call", "segment", "received", "sent"],
        [
            [
                row["kind"],
                format_time(row["round_trip"]),
                format_rate(row["rate"]),
                format_time(row["per_call"]),
                format_time(row["per_segment"]),
                *(
                    f"{format_time(row[end] * (1 << 20))}/MiB"
                    for end in ("per_byte", "per_byte_sent")
                ),
            ]
            for row in found
        ],
    )
    print(f"kept in {figures.path()}, for unisono plan --measured and unisono bench collectives")


def _known(kind: str) -> figures.Figures | None:
    """What was measured here for a kind of link."""
    try:
        return figures.load(kind)
    except ValueError as error:
        fail(str(error))


def predicted(layout: Layout, row: dict[str, Any]) -> float | None:
    """What the cost model says of a benchmark's row, from figures of its kind of link.

    None where these have not been measured on this machine, a network was put between ranks, or
    tensors were on devices, whose copies the figures know nothing of.
    """
    if row["ranks"] < 2 or row["bandwidth"] or row["delay"] or row["device"] != "cpu":
        return None
    across, *within = (_known(kind) for kind in layout.link.split("+")[::-1])
    local = within[0] if within else across
    if across is None or local is None:
        return None
    if engines(parse(row["strategy"])):
        return None  # another library has no schedule
    if within:
        # nodes get their share of this machine's cores, and do the work of the costlier links
        machine = replace(across.machine, cores=max(1, across.cores // len(layout.nodes)))
        topology = Topology(layout.members, local.link, across.link, machine)
    else:
        # whichever way they exchange, all ranks share this machine's cores
        topology = uniform(1, row["ranks"], across.link, across.link, across.machine)
    try:
        return predict(row["strategy"], Kind(row["op"]), topology, row["bytes"]).seconds
    except TooLarge:
        return None
