"""``unisono plan``: how long a collective takes on a cluster that need not be there yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from unisono.commands.console import fail, print_json, table

if TYPE_CHECKING:
    from collective.cost import Link, Machine
    from collective.prediction import Prediction
    from collective.schedule import Kind

    Known = tuple[Link, Machine]

__all__ = ["plan"]

T = TypeVar("T")

#: schedules of more ranks take minutes to write out
MAX_RANKS = 16_384


def plan(
    nbytes: Annotated[
        str,
        typer.Option("--bytes", metavar="SIZE", help="Bytes of the whole tensor: 64Ki, 14GB, …"),
    ],
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 1,
    devices_per_node: Annotated[int, typer.Option(min=1, help="Ranks of each node.")] = 1,
    bandwidth: Annotated[
        str | None,
        typer.Option(
            metavar="RATE", help="Of a node's network card, per second and direction: 50GB, 1Gbit."
        ),
    ] = None,
    latency: Annotated[
        str | None, typer.Option(metavar="TIME", help="Between nodes, one way: 0, 50us, …")
    ] = None,
    local_bandwidth: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="Of a device to others of its node, per direction."),
    ] = None,
    local_latency: Annotated[
        str | None, typer.Option(metavar="TIME", help="Within a node, one way.")
    ] = None,
    cores: Annotated[
        int | None, typer.Option(min=1, help="Cores that the ranks of a node share.")
    ] = None,
    per_segment: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="On a core, to send or to receive a segment."),
    ] = None,
    fold_rate: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="At which a core puts what it receives into its place."),
    ] = None,
    segment: Annotated[str, typer.Option(metavar="SIZE", help="Bytes of a segment.")] = "512Ki",
    operation: Annotated[
        str, typer.Option(metavar="NAME", help="all_reduce, broadcast, …")
    ] = "all_reduce",
    strategy: Annotated[
        str, typer.Option(metavar="auto|NAME", help="One strategy; auto: all, fastest first.")
    ] = "auto",
    measured: Annotated[
        bool,
        typer.Option(
            "--measured",
            help="Take what is not given from what a group, worker probe --peer or unisono bench "
            "links has measured: websocket between nodes, shm within one.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Predict from given or measured figures what a collective takes, fastest first."""
    from collective.choosing import Chooser
    from collective.cost import Link, Machine, uniform
    from collective.prediction import predict, ranked
    from collective.units import format_size, parse_rate, parse_size, parse_time

    ranks = nodes * devices_per_node
    if ranks < 2:
        fail("one rank exchanges nothing: give --nodes or --devices-per-node of 2 or more", code=2)
    if ranks > MAX_RANKS:
        fail(
            f"--nodes {nodes} × --devices-per-node {devices_per_node} are {ranks} ranks; "
            f"at most {MAX_RANKS} can be planned",
            code=2,
        )
    across = within = None
    if measured:
        across, within = _measured("websocket", nodes > 1), _measured("shm", devices_per_node > 1)
    if nodes > 1 and bandwidth is None and across is None:
        fail("--bandwidth is missing: between nodes it takes one, such as 50GB or 1Gbit", code=2)
    if devices_per_node > 1 and local_bandwidth is None and within is None:
        fail(
            "--local-bandwidth is missing: devices of one node take one, such as 450GB or 20GB",
            code=2,
        )
    kind = _kind(operation)
    size = _read("--bytes", parse_size, nbytes)
    pieces = _read("--segment", parse_size, segment)
    if pieces < 1:
        fail(f"--segment {segment}: a segment has at least 1 byte", code=2)

    def link(flags: str, lag: str | None, rate: str | None, known: Known | None) -> Link | None:
        """As given, else as measured; None where ranks have no such link."""
        found = known[0] if known is not None else None
        if rate is not None:
            bandwidth = _read(f"--{flags}bandwidth", parse_rate, rate)
            found = Link(found.latency if found is not None else 0.0, bandwidth)
        if lag is not None and found is not None:
            found = replace(found, latency=_read(f"--{flags}latency", parse_time, lag))
        return found

    between = link("", latency, bandwidth, across)
    local = link("local-", local_latency, local_bandwidth, within)
    # where there is one kind of link only, the other is not used
    between, local = between or local, local or between
    assert between is not None and local is not None
    # the work of the ends that are the slower ones, where both kinds are used
    known = across or within
    machine = known[1] if known is not None else Machine()
    if cores is not None:
        machine = replace(machine, cores=cores)
    if per_segment is not None:
        machine = replace(machine, per_segment=_read("--per-segment", parse_time, per_segment))
    if fold_rate is not None:
        machine = replace(machine, per_byte=1 / _read("--fold-rate", parse_rate, fold_rate))
    topology = uniform(nodes, devices_per_node, local, between, machine)
    head = {
        "operation": kind.value,
        "bytes": size,
        "nodes": nodes,
        "devices_per_node": devices_per_node,
        "ranks": ranks,
        "auto": str(Chooser(topology).choose(kind, size)),
    }
    try:
        found, left_out = (
            ranked(kind, topology, size, pieces)
            if strategy == "auto"
            else ([predict(strategy, kind, topology, size, pieces)], [])
        )
    except ValueError as error:
        fail(f"--strategy {strategy}: {error}", code=2)
    if as_json:
        rows = [_row(prediction) for prediction in found]
        if strategy == "auto":
            print_json({**head, "strategies": rows, "left_out": left_out})
        else:
            print_json({**rows[0], **head})
        return
    print(
        f"{kind.value} of {format_size(size)} on {nodes} × {devices_per_node} ranks; "
        f"at this size auto takes {head['auto']}"
    )
    _show(found)
    if left_out:
        print(f"Too many moves to be timed here: {', '.join(left_out)}")


def _measured(kind: str, wanted: bool) -> Known | None:
    """Link and ends of a kind, if ranks would use it."""
    from collective import figures

    if not wanted:
        return None
    try:
        found = figures.measured(kind)
    except ValueError as error:
        fail(str(error))
    if found is None:
        fail(
            f"--measured: nothing is known of {kind} links; run worker probe --peer HOST on a "
            f"node, or unisono bench links --link {kind}",
            code=2,
        )
    return found


def _kind(operation: str) -> Kind:
    from collective.schedule import Kind

    try:
        return Kind(operation)
    except ValueError:
        kinds = ", ".join(kind.value for kind in Kind)
        fail(f"--operation {operation!r}: it takes one of {kinds}", code=2)


def _read(flag: str, parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text)
    except ValueError as error:
        fail(f"{flag}: {error}", code=2)


def _digits(seconds: float) -> float:
    """A prediction has no more than three digits to give."""
    return float(f"{seconds:.3g}")


def _row(prediction: Prediction) -> dict[str, Any]:
    return {
        "seconds": _digits(prediction.seconds),
        "strategy": prediction.strategy,
        "levels": {level: _digits(seconds) for level, seconds in prediction.levels.items()},
        "sent": prediction.sent,
        "method": prediction.method,
    }


def _show(found: list[Prediction]) -> None:
    from collective.units import format_size, format_time

    levels = [
        level
        for level in ("local", "between")
        if any(level in prediction.levels for prediction in found)
    ]
    table(
        ["strategy", "time", *levels, "sent", "how"],
        [
            [
                prediction.strategy,
                format_time(prediction.seconds),
                *(
                    format_time(prediction.levels[level]) if level in prediction.levels else "—"
                    for level in levels
                ),
                "—" if prediction.sent is None else format_size(prediction.sent),
                prediction.method,
            ]
            for prediction in found
        ],
    )
