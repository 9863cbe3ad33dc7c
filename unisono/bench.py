"""``unisono bench``: our collectives beside another library's, in the same processes, as ratios."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Annotated, Any

import typer

from collective.units import format_rate, format_size, parse_size
from unisono import bench_network
from unisono.bench_links import links, predicted
from unisono.bench_plot import plot
from unisono.commands.console import fail

app = typer.Typer(help="Measure collectives against another library.", no_args_is_help=True)
app.command()(links)
app.command()(plot)

OPERATIONS = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter")


@app.command()
def collectives(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, separated by commas.")] = "2,4",
    sizes: Annotated[
        str, typer.Option(help="Bytes of the tensor: 8, 64Ki, 25Mi, …")
    ] = "8,64Ki,1Mi,25Mi,100Mi",
    operations: Annotated[str, typer.Option(help=f"Of {', '.join(OPERATIONS)}.")] = "all_reduce",
    against: Annotated[str, typer.Option(help="gloo, or none.")] = "gloo",
    strategy: Annotated[
        str, typer.Option(help="auto, one strategy, or all: each that exists, beside auto.")
    ] = "auto",
    link: Annotated[
        str, typer.Option(help="websocket: as between nodes; shm: as between ranks of one node.")
    ] = "websocket",
    bandwidth: Annotated[
        str | None,
        typer.Option(
            help="Rate of each rank's link, such as 1Gbit: every rank on a host of its own, in a "
            "network namespace (root).",
            show_default=False,
        ),
    ] = None,
    delay: Annotated[
        str | None,
        typer.Option(
            help="Round-trip time between the ranks, such as 50ms, through a packet relay (root).",
            show_default=False,
        ),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(help="Repeats per size (20; 5 from 25 MiB).", min=1, show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> None:
    """Time operations of float32 tensors, by default as one rank per node over loopback."""
    chosen = [name.strip() for name in operations.split(",")]
    for name in chosen:
        if name not in OPERATIONS:
            fail(f"unknown operation {name!r}; there are {', '.join(OPERATIONS)}")
    work = {
        "what": "collectives",
        "link": _link(link),
        "sizes": [_size(text) for text in sizes.split(",")],
        "operations": chosen,
        **_network(bandwidth, delay, link),
        "against": _against(against),
        "repeats": repeats,
    }
    _run(work, _ranks(ranks), strategy, as_json)


@app.command()
def ddp(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, separated by commas.")] = "2",
    against: Annotated[str, typer.Option(help="gloo, or none.")] = "gloo",
    strategy: Annotated[str, typer.Option(help="auto, or one strategy for all.")] = "auto",
    link: Annotated[str, typer.Option(help="websocket or shm.")] = "websocket",
    width: Annotated[int, typer.Option(help="Width of a layer.", min=1)] = 1024,
    layers: Annotated[int, typer.Option(help="Number of layers.", min=1)] = 8,
    batch: Annotated[int, typer.Option(help="Samples per rank.", min=1)] = 64,
    bucket_mib: Annotated[int, typer.Option(help="DDP's bucket_cap_mb.", min=1)] = 4,
    repeats: Annotated[int, typer.Option(help="Steps.", min=1)] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> None:
    """Time a training step of DistributedDataParallel with several buckets."""
    work = {
        "what": "ddp",
        "link": _link(link),
        "against": _against(against),
        "width": width,
        "layers": layers,
        "batch": batch,
        "bucket_mib": bucket_mib,
        "repeats": repeats,
    }
    _run(work, _ranks(ranks), strategy, as_json)


def _network(bandwidth: str | None, delay: str | None, link: str) -> dict[str, float | None]:
    """Bits per second and seconds of the network that the ranks are to be on."""
    if bandwidth is None and delay is None:
        return {}
    try:
        asked = bench_network.asked(bandwidth, delay)
    except ValueError as error:
        fail(str(error))
    if link == "shm":
        fail("--link shm has no network: leave out --bandwidth and --delay")
    reason = bench_network.why_not()
    if reason is not None:
        fail(f"--bandwidth and --delay give each rank a host of its own: {reason}")
    return asked


def _size(text: str) -> int:
    try:
        return parse_size(text.strip())
    except ValueError as error:
        fail(str(error))


def _link(text: str) -> str:
    if text not in ("websocket", "shm"):
        fail(f"--link {text!r}: there are websocket and shm")
    return text


def _ranks(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        fail(f"--ranks {text!r}: expected numbers separated by commas, such as 2,4")
    if min(numbers) < 1:
        fail(f"--ranks {text!r}: a group has at least one rank")
    return numbers


def _against(text: str) -> str | None:
    if text not in ("gloo", "none"):
        fail(f"--against {text!r}: there are gloo and none")
    return None if text == "none" else text


def _run(work: dict[str, Any], ranks: list[int], strategy: str, as_json: bool) -> None:
    rows: list[dict[str, Any]] = []
    for size in ranks:
        if not as_json:
            print(f"\n{size} ranks on {os.cpu_count()} cores", flush=True)
            print(_DDP_HEAD if work["what"] == "ddp" else _HEAD, flush=True)
        for row in run_ranks(work, size, strategy):
            if work["what"] == "collectives":
                row["predicted_seconds"] = predicted(row)
            rows.append(row)
            if not as_json:
                print(_line(row), flush=True)
    if as_json:
        print(json.dumps(rows, indent=1))
    if not all(row["correct"] for row in rows):
        raise typer.Exit(1)


def run_ranks(work: dict[str, Any], size: int, strategy: str) -> Iterator[dict[str, Any]]:
    """Start `size` ranks, yield the rows that rank 0 prints, and see them all end well."""
    rate = bench_network.payload_rate(work)
    try:
        with bench_network.laboratory(work, size) as hosts:
            for row in _run_on(hosts, work, size, strategy):
                if rate is not None:
                    row["share"] = row["busbw"] / rate
                yield row
    except bench_network.NetworkError as error:
        fail(str(error))


def _run_on(
    hosts: Sequence[bench_network.Host], work: dict[str, Any], size: int, strategy: str
) -> Iterator[dict[str, Any]]:
    from torch._C._distributed_c10d import TCPStore

    with hosts[0].entered() if hosts else nullcontext():
        first = hosts[0].ipv4 if hosts else "127.0.0.1"
        store = TCPStore(first, 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    base = {
        **os.environ,
        "MASTER_ADDR": first,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "GLOO_SOCKET_IFNAME": "eth0" if hosts else "lo",
        # no name server reaches the hosts, which torch would say for each of its connections
        **({"TORCH_CPP_LOG_LEVEL": "ERROR"} if hosts else {}),
        "OMP_NUM_THREADS": "1",
        "UNISONO_STRATEGY": strategy,
        "UNISONO_LINKS": "auto" if work["link"] == "shm" else "websocket",
        "UNISONO_BENCH": json.dumps(work),
    }
    command = [sys.executable, "-m", "collective.benchmark"]
    processes = [
        subprocess.Popen(
            hosts[rank].command(*command) if hosts else command,
            env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        assert processes[0].stdout is not None
        for line in processes[0].stdout:
            yield json.loads(line)
        codes = [process.wait(timeout=60) for process in processes]
        if any(codes):
            fail(f"ranks ended with codes {codes}; what they said stands above")
    finally:
        for process in processes:
            process.kill()
            process.wait()


_HEAD = (
    f"{'operation':<15}{'strategy':<21}{'size':>9}{'time':>12}{'algbw':>12}{'busbw':>12}"
    f"{'peer':>12}{'ratio':>8}{'best':>7}"
)
_DDP_HEAD = (
    f"{'operation':<15}{'buckets':<9}{'gradients':>10}{'step':>12}{'comm.':>12}{'exposed':>12}"
    f"{'peer':>12}{'ratio':>8}"
)


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "—"
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def _line(row: dict[str, Any]) -> str:
    ratio = "—" if row["ratio"] is None else f"{row['ratio']:.2f}"
    wrong = "" if row["correct"] else "  WRONG RESULT"
    size = format_size(row["bytes"])
    if row["op"] == "ddp_step":
        middle = (
            f"{row['buckets']:<9}{size:>10}{_time(row['seconds']):>12}"
            f"{_time(row['communication_seconds']):>12}{_time(row['exposed_seconds']):>12}"
        )
    else:
        best = "—" if row["best"] is None else f"{row['best']:.2f}"
        wrong = f"{best:>7}{wrong}"
        name = row["strategy"] if row["setting"] != "auto" else f"auto: {row['strategy']}"
        middle = (
            f"{name:<21}{size:>9}{_time(row['seconds']):>12}"
            f"{format_rate(row['algbw']):>12}{format_rate(row['busbw']):>12}"
        )
    share = f"  {row['share']:.1%} of the payload rate" if "share" in row else ""
    return f"{row['op']:<15}{middle}{_time(row['peer_seconds']):>12}{ratio:>8}{share}{wrong}"
