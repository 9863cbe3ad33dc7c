"""The command ``worker probe``: what this machine would offer, and what its links can carry."""

from __future__ import annotations

import dataclasses
import json
import socket
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from collective import figures
from collective.addresses import AddressError, parse_address
from collective.errors import RendezvousFailed
from collective.machine import cores
from collective.units import format_rate, format_time
from worker.agent import own_addresses
from worker.data_port import DEFAULT_PORT
from worker.devices import discover, list_devices
from worker.errors import LocalProblem
from worker.interpreters import Interpreters
from worker.probing import measure_peer, secret_of
from worker.settings import Settings

__all__ = ["probe"]

#: seconds that measuring shared memory should take
_LIMIT = 0.3


def probe(
    python: Annotated[
        str, typer.Option(help="The Python whose packages are looked at.")
    ] = sys.executable,
    cpu_slots: Annotated[int, typer.Option(min=0, max=1024, help="As for join.")] = 0,
    peer: Annotated[
        str | None,
        typer.Option(
            metavar="HOST[:PORT]",
            help="Measure the links instead: shared memory here, and the one to the agent of "
            f"another node at its data port ({DEFAULT_PORT}).",
            show_default=False,
        ),
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(help="State folder of this node's agent, with --peer.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what this machine would offer, or measure its links to another node."""
    if peer is not None:
        links = _measure(peer, state_dir)
        if as_json:
            print(json.dumps({"links": links, "kept": str(figures.path())}, indent=1))
        else:
            _show_links(links)
        return
    offer = _offer(python, cpu_slots)
    if as_json:
        print(json.dumps(offer, indent=1))
    else:
        _show_offer(offer)


def _measure(peer: str, state_dir: Path | None) -> list[dict[str, Any]]:
    from collective.links.probe_here import within  # loads numpy

    try:
        host, port = parse_address(peer)
    except AddressError as error:
        raise typer.BadParameter(str(error), param_hint="--peer") from None
    found = measure_peer(host, DEFAULT_PORT if port is None else port, secret_of(state_dir))
    try:
        here = within(_LIMIT)
    except RendezvousFailed as error:
        raise LocalProblem(f"shared memory was not measured: {error}") from None
    name = socket.gethostname()
    try:
        figures.store_samples({(found.here, found.there): found.sample, (name, name): here})
    except (OSError, ValueError) as error:
        raise LocalProblem(f"what was measured cannot be kept: {error}") from None
    return [
        {"kind": kind, "from": there, "to": to, **dataclasses.asdict(sample)}
        for kind, there, to, sample in (
            ("websocket", found.there, found.here, found.sample),
            ("shm", name, name, here),
        )
    ]


def _show_links(links: list[dict[str, Any]]) -> None:
    table = Table("link", "from", "to", "round trip", "rate", box=None, pad_edge=False)
    for link in links:
        table.add_row(
            link["kind"],
            link["from"],
            link["to"],
            format_time(link["round_trip"]),
            format_rate(link["rate"]),
        )
    console = Console(highlight=False)
    console.print(table)
    console.print(f"kept in {figures.path()}, for auto and unisono plan --measured", soft_wrap=True)


def _offer(python: str, cpu_slots: int) -> dict[str, Any]:
    found = Interpreters(Settings.read().probe_timeout).ask(python)
    try:
        devices = list_devices(discover(cpu_slots, lambda pid: False))
    except LocalProblem:
        devices = []
    return {
        "host": socket.gethostname(),
        "cores": cores(),
        "devices": [dataclasses.asdict(device) for device in devices],
        "python": {"version": found.python, "path": found.path},
        "torch": found.torch,
        "unisono": found.unisono,
        "addresses": own_addresses(),
    }


def _show_offer(offer: dict[str, Any]) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("host", f"{offer['host']}, {offer['cores']} cores")
    for device in offer["devices"]:
        memory = f", {device['memory_bytes'] / 2**30:.0f} GiB" if device["memory_bytes"] else ""
        state = f"busy: {device['busy']}" if device["busy"] else "free"
        table.add_row("device", f"{device['index']}: {device['name']}{memory} ({state})")
    if not offer["devices"]:
        table.add_row("device", "no GPU found; join with --cpu-slots N to offer its CPU")
    table.add_row("python", f"{offer['python']['version']}  {offer['python']['path']}")
    table.add_row("torch", offer["torch"] or "not installed: jobs run, without torch's store")
    table.add_row("unisono", offer["unisono"] or "not installed: jobs run, without timings")
    table.add_row("addresses", ", ".join(offer["addresses"]))
    Console(highlight=False).print(table)
