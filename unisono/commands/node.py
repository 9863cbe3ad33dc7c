"""``unisono node``: list, drain, resume, remove."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from unisono.commands.console import note, print_json, run, table, when

if TYPE_CHECKING:
    from unisono.client import ControlPlane

__all__ = ["app"]

app = typer.Typer(help="Look at nodes and take them out of service.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NODE", help="The node's name.")]


@app.command("list")
def list_nodes(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List nodes with their devices and state."""

    async def work(control_plane: ControlPlane) -> list[dict[str, Any]]:
        return [node async for node in control_plane.pages("nodes")]

    nodes = run(work)
    if as_json:
        print_json(nodes)
        return
    rows = [
        (
            node["name"],
            node["state"] + (", draining" if node.get("draining") else ""),
            _devices(node),
            ", ".join(node.get("addresses") or []),
            node.get("data_port"),
            when(node.get("last_seen_at")),
        )
        for node in nodes
    ]
    table(("node", "state", "devices", "addresses", "data port", "last seen"), rows)


def _devices(node: dict[str, Any]) -> str:
    devices = node.get("devices") or []
    free = sum(1 for device in devices if not device.get("busy") and not device.get("job"))
    kinds = sorted({str(device.get("name") or device.get("kind")) for device in devices})
    return f"{free} of {len(devices)} free: {', '.join(kinds)}" if devices else "none"


@app.command()
def drain(name: Name) -> None:
    """Give a node no further job; what runs on it goes on."""
    _post(name, "drain")
    note(f"{name} gets no further job")


@app.command()
def resume(name: Name) -> None:
    """Give a drained node jobs again."""
    _post(name, "resume")
    note(f"{name} gets jobs again")


def _post(name: str, what: str) -> None:
    async def work(control_plane: ControlPlane) -> None:
        from unisono.client import segment

        await control_plane.call("POST", f"nodes/{segment(name)}/{what}")

    run(work)


@app.command()
def remove(
    name: Name,
    force: Annotated[
        bool, typer.Option("--force", help="Also while it runs a job, which is then lost.")
    ] = False,
) -> None:
    """Forget a node; its credential is dead from then on."""

    async def work(control_plane: ControlPlane) -> None:
        from unisono.client import segment

        query = {"force": "true"} if force else None
        await control_plane.call("DELETE", f"nodes/{segment(name)}", query=query)

    run(work)
    note(f"removed {name}")
