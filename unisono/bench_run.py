"""Starts the ranks of ``unisono bench``, each node on a host if asked, and reads their rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

from unisono import bench_mpi, bench_network
from unisono.bench_layout import Layout
from unisono.commands.console import fail, note

__all__ = ["run_ranks"]


def run_ranks(work: dict[str, Any], layout: Layout, strategy: str) -> Iterator[dict[str, Any]]:
    """Start the ranks of a layout, yield the rows that rank 0 prints, and see them all end well."""
    rate = bench_network.payload_rate(work)
    try:
        with bench_network.laboratory(work, len(layout.nodes)) as hosts:
            for row in _run_on(hosts, work, layout, strategy):
                if rate is not None:
                    row["share"] = _card(row, len(layout.nodes)) / rate
                yield row
    except bench_network.NetworkError as error:
        fail(str(error))


def _card(row: dict[str, Any], nodes: int) -> float:
    """Bytes per second that each node's card has to carry in a direction, at the very least."""
    from collective.benchmark_case import BUS_FACTOR

    return float(row["algbw"]) * BUS_FACTOR[row["op"]](nodes)


def _run_on(
    hosts: Sequence[bench_network.Host], work: dict[str, Any], layout: Layout, strategy: str
) -> Iterator[dict[str, Any]]:
    if hosts:
        # no name server reaches the hosts, which torch would say for each of its connections
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    from torch._C._distributed_c10d import TCPStore

    with hosts[0].entered() if hosts else nullcontext():
        first = hosts[0].ipv4 if hosts else "127.0.0.1"
        store = TCPStore(first, 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    interface = "eth0" if hosts else "lo"
    with_mpi = "mpi" in work.get("against", ())
    shared = {
        **os.environ,
        "MASTER_ADDR": first,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": interface,
        "OMP_NUM_THREADS": "1",
        "UNISONO_STRATEGY": strategy,
        "UNISONO_BENCH": json.dumps(work),
        **(bench_mpi.environment(layout, interface) if with_mpi else {}),
    }
    # -P: nothing in the folder that the user is in takes the place of a module
    command = [sys.executable, "-P", "-m", "collective.benchmark"]
    ranks = [
        (
            hosts[layout.node_of(rank)].command(*command) if hosts else command,
            layout.environment(rank, hosts=bool(hosts)),
        )
        for rank in range(layout.ranks)
    ]
    processes = _start([(bench_mpi.command(ranks), {})] if with_mpi else ranks, shared)
    try:
        assert processes[0].stdout is not None
        for line in processes[0].stdout:
            if line.startswith("{"):
                yield json.loads(line)
            else:
                note(line.rstrip())  # a library's own words
        codes = [process.wait(timeout=60) for process in processes]
        if any(codes):
            fail(f"ranks ended with codes {codes}; what they said stands above")
    finally:
        for process in processes:
            # mpiexec ends its ranks when it is asked to, but not when it is killed
            process.terminate() if with_mpi else process.kill()
        for process in processes:
            process.wait()


def _start(
    ranks: Sequence[tuple[Sequence[str], Mapping[str, str]]], shared: Mapping[str, str]
) -> list[subprocess.Popen[str]]:
    """Start processes, of which the first one says what rank 0 says."""
    return [
        subprocess.Popen(
            command,
            env={**shared, **added},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if number else subprocess.PIPE,
            text=True,
        )
        for number, (command, added) in enumerate(ranks)
    ]
