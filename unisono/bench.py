"""``unisono bench``: our collectives beside other libraries', in the same processes, as ratios."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from collective.strategies import check_levels, parse
from unisono import bench_mpi, bench_network, bench_output
from unisono.bench_arguments import (
    USAGE,
    Json,
    Link,
    Operations,
    Ranks,
    Repeats,
    Sizes,
    Topology,
    operations_of,
    places_of,
    sizes_of,
)
from unisono.bench_choices import choices
from unisono.bench_layout import Layout
from unisono.bench_links import links, predicted
from unisono.bench_plot import plot
from unisono.bench_run import run_ranks
from unisono.commands.console import fail

app = typer.Typer(
    help="Measure collectives beside other libraries, and links; draw results.",
    no_args_is_help=True,
)
PEERS = ("gloo", "mpi")
#: the same for tensors on CUDA devices
CUDA_PEERS = ("gloo", "nccl")


@app.command()
def collectives(
    topology: Topology = "flat",
    ranks: Ranks = None,
    link: Link = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="Of each node's card, such as 1Gbit: every node is a network namespace (root).",
            show_default=False,
            rich_help_panel="Network",
        ),
    ] = None,
    delay: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Round trip between nodes, such as 50ms, through a packet relay (root).",
            show_default=False,
            rich_help_panel="Network",
        ),
    ] = None,
    sizes: Sizes = "8,64Ki,1Mi,25Mi,100Mi",
    operations: Operations = "all_reduce",
    strategy: Annotated[
        str,
        typer.Option(
            metavar="auto|NAME|all",
            help="auto, one strategy such as ring or local=ring,between=ring, or all of them "
            "in turn.",
        ),
    ] = "auto",
    against: Annotated[
        str,
        typer.Option(
            metavar="NAME,…",
            help="Of gloo and mpi (MPICH), or none; with --device cuda, of gloo and nccl.",
        ),
    ] = "gloo",
    empty: Annotated[
        bool,
        typer.Option(
            "--empty", help="Tensors of collective.empty, which ranks of a node read in place."
        ),
    ] = False,
    device: Annotated[
        str,
        typer.Option(
            metavar="cpu|cuda", help="Where the tensors are; ranks share out a node's GPUs."
        ),
    ] = "cpu",
    repeats: Repeats = None,
    as_json: Json = False,
) -> None:
    """Time collectives of float32 tensors, ours and other libraries' in turn.

    All ranks run on this machine, and every result is checked.

    A ratio below 1 means that Unisono was faster.

    Examples:

      unisono bench collectives --ranks 2,4 --against gloo,mpi

      unisono bench collectives --topology 2x2 --sizes 1Mi,25Mi,100Mi

      unisono bench collectives --ranks 4 --bandwidth 1Gbit --strategy ring
    """
    if strategy != "all":
        _check_strategy(strategy)
    places = places_of(topology, ranks, link)
    if empty and any(layout.link == "websocket" for layout in places):
        fail(
            "--empty is about ranks that share memory: take nodes of several ranks, such as "
            "--topology 1x4, and leave --link out",
            USAGE,
        )
    if device not in ("cpu", "cuda"):
        fail(f"--device {device!r}: it takes one of cpu, cuda", USAGE)
    if device == "cuda":
        _check_cuda(empty)
    work = {
        "what": "collectives",
        "sizes": sizes_of(sizes),
        "operations": operations_of(operations),
        **_network(bandwidth, delay, places),
        "against": _against(against, PEERS if device == "cpu" else CUDA_PEERS, places),
        "empty": empty,
        "device": device,
        "repeats": repeats,
    }
    _run(work, places, strategy, as_json)


@app.command()
def ddp(
    topology: Topology = "flat",
    ranks: Ranks = None,
    link: Link = None,
    strategy: Annotated[
        str, typer.Option(metavar="auto|NAME", help="auto, or one strategy for all operations.")
    ] = "auto",
    against: Annotated[str, typer.Option(metavar="NAME", help="gloo, or none.")] = "gloo",
    width: Annotated[int, typer.Option(help="Width of a layer.", min=1)] = 1024,
    layers: Annotated[int, typer.Option(help="Number of layers.", min=1)] = 8,
    batch: Annotated[int, typer.Option(help="Samples per rank.", min=1)] = 64,
    bucket_mib: Annotated[int, typer.Option(help="DDP's bucket_cap_mb.", min=1)] = 4,
    repeats: Annotated[int, typer.Option(help="Steps.", min=1)] = 20,
    as_json: Json = False,
) -> None:
    """Time a training step of DistributedDataParallel with several buckets."""
    _check_strategy(strategy)
    places = places_of(topology, ranks, link)
    work = {
        "what": "ddp",
        # torch trains over the backends that it has itself: MPI is not among them
        "against": _against(against, ("gloo",), places),
        "width": width,
        "layers": layers,
        "batch": batch,
        "bucket_mib": bucket_mib,
        "repeats": repeats,
    }
    _run(work, places, strategy, as_json)


# in the order in which --help lists them
for command in (choices, links, plot):
    app.command()(command)


def _network(bandwidth: str | None, delay: str | None, places: list[Layout]) -> dict[str, Any]:
    """Bits per second and seconds of the network that the nodes are to be on."""
    if bandwidth is None and delay is None:
        return {}
    try:
        asked = bench_network.asked(bandwidth, delay)
    except ValueError as error:
        fail(f"--bandwidth or --delay: {error}", USAGE)
    for layout in places:
        if len(layout.nodes) == 1 and layout.ranks > 1:
            fail(
                "--bandwidth and --delay are of the network between nodes, and there is one node: "
                "leave them out, or take more nodes, such as --topology 2x2",
                USAGE,
            )
    reason = bench_network.why_not()
    if reason is not None:
        fail(
            f"--bandwidth and --delay give each node a host of its own: {reason}; "
            "run this as root on Linux with iproute2, or leave them out to measure on loopback"
        )
    return asked


def _check_strategy(text: str) -> None:
    try:
        check_levels(parse(text))
    except ValueError as error:
        fail(f"--strategy: {error}", USAGE)


def _against(text: str, there: tuple[str, ...], places: list[Layout]) -> list[str]:
    if text == "none":
        return []
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    if not set(names) <= set(there):
        both = f", both ({','.join(there)})" if len(there) > 1 else ""
        fail(f"--against {text!r}: it takes {', '.join(there)}{both}, or none", USAGE)
    if "mpi" in names:
        for layout in places:
            reason = bench_mpi.why_not(layout)
            if reason is not None:
                fail(f"--against mpi: {reason}")
    return names


def _check_cuda(empty: bool) -> None:
    if empty:
        fail("--empty makes tensors in host memory: leave out --device cuda", USAGE)
    import torch

    if not torch.cuda.is_available():
        fail("--device cuda: torch sees no CUDA device here (see nvidia-smi, CUDA_VISIBLE_DEVICES)")


def _run(work: dict[str, Any], places: list[Layout], strategy: str, as_json: bool) -> None:
    rows: list[dict[str, Any]] = []
    where = bench_output.machine()
    for layout in places:
        if not as_json:
            print(f"\n{bench_output.title(layout)}", flush=True)
            print(bench_output.head(layout, work["what"], work["against"]), flush=True)
        for found in run_ranks(work, layout, strategy):
            row = found | layout.fields
            if work["what"] == "collectives":
                row |= {name: work.get(name) for name in ("bandwidth", "delay", "empty", "device")}
                row["predicted_seconds"] = predicted(layout, row)
            rows.append(row)
            # who was but looked at is in the JSON
            if not as_json and row["repeats"]:
                print(bench_output.line(layout, row), flush=True)
    if as_json:
        print(bench_output.results(work["what"], where, rows))
    if any(bench_output.wrong(row) for row in rows):
        raise typer.Exit(1)
