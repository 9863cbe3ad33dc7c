"""``unisono token``: create, list, revoke, and links to log in."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unisono.commands.console import fail, note, print_json, run, table, when

if TYPE_CHECKING:
    from unisono.client import ControlPlane

__all__ = ["app", "parse_ttl"]

app = typer.Typer(help="Make, list and revoke tokens, and links to log in.", no_args_is_help=True)

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def parse_ttl(text: str) -> float:
    """Seconds of a duration such as ``90s``, ``30m``, ``24h`` or ``7d``.

    Raises:
        ValueError: it is none.
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", text)
    if found is None or float(found[1]) == 0:
        raise ValueError(f"{text!r} is no duration: expected a number and s, m, h or d, as in 24h")
    return float(found[1]) * _UNITS[found[2]]


@app.command()
def create(
    role: Annotated[
        str, typer.Option(help="viewer, operator, admin, or node: a token to join with.")
    ],
    name: Annotated[str | None, typer.Option(help="What it is for; shown in lists.")] = None,
    ttl: Annotated[
        str | None, typer.Option(metavar="DURATION", help="How long it lives, such as 24h or 7d.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write it to FILE with mode 0600."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all about it as JSON.")] = False,
) -> None:
    """Make a token; it is shown this once."""
    body: dict[str, Any] = {"name": name or role, "role": role}
    if ttl is not None:
        try:
            body["ttl"] = parse_ttl(ttl)
        except ValueError as error:
            fail(f"--ttl: {error}", code=2)
    if output is not None and output.exists():
        fail(f"{output} exists already; remove it or name another file")

    async def work(control_plane: ControlPlane) -> dict[str, Any]:
        made: dict[str, Any] = await control_plane.call("POST", "tokens", body=body)
        return made

    made = run(work)
    if output is not None:
        _write_secret(output, made["token"])
        note(f"wrote the token {made['id']} to {output}")
        made.pop("token")
    if as_json:
        print_json(made)
    elif output is None:
        print(made["token"])
    if made.get("expires_at"):
        note(f"{made['id']} is valid until {when(made['expires_at'])}")


def _write_secret(path: Path, token: str) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        fail(f"cannot write {path}: {error.strerror}")
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(token + "\n")


@app.command("list")
def list_tokens(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List tokens; the tokens themselves are not stored."""

    async def work(control_plane: ControlPlane) -> list[dict[str, Any]]:
        return [token async for token in control_plane.pages("tokens")]

    tokens = run(work)
    if as_json:
        print_json(tokens)
        return
    columns = ("created_at", "expires_at", "revoked_at", "last_used_at")
    rows = [
        (
            *(token.get(column) for column in ("id", "name", "role", "kind")),
            *(when(token.get(column)) for column in columns),
        )
        for token in tokens
    ]
    head = ("token", "name", "role", "kind", "created", "expires", "revoked", "last used")
    table(head, rows)


@app.command()
def revoke(token_id: Annotated[str, typer.Argument(metavar="TOKEN", help="Its id.")]) -> None:
    """Revoke a token; what uses it is cut off at once."""

    async def work(control_plane: ControlPlane) -> None:
        from unisono.client import segment

        await control_plane.call("DELETE", f"tokens/{segment(token_id)}")

    run(work)
    note(f"revoked {token_id}")


@app.command()
def login(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print a link that logs a browser in, once."""

    async def work(control_plane: ControlPlane) -> dict[str, Any]:
        made: dict[str, Any] = await control_plane.call("POST", "login-codes")
        return made

    made = run(work)
    if as_json:
        print_json(made)
    else:
        print(made["url"])
        note(f"valid until {when(made['expires_at'])}")
