"""The command `unisono`: one name for the control plane, jobs, tokens, nodes and the demo.

Every command imports what it needs when it runs, so that ``--help`` and small commands start
fast and the control plane never meets torch.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from unisono import bench, plan
from unisono.commands import job, node, token
from unisono.commands.console import EXIT_ERROR, note, print_json

__all__ = ["app", "main"]

# Pretty tracebacks show local variables, and with them tokens.
app = typer.Typer(
    help="A training cluster that is managed from a browser.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(job.app, name="job")
app.add_typer(node.app, name="node")
app.add_typer(token.app, name="token")
app.add_typer(bench.app, name="bench")
app.command()(plan.plan)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        import importlib.metadata

        print(importlib.metadata.version("unisono"))
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


@app.command()
def serve(
    host: Annotated[
        str | None, typer.Option(help="Address to listen on (0.0.0.0).", show_default=False)
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port to listen on (8700); 0 for any.", show_default=False)
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Where all state is kept (unisono-data).", show_default=False),
    ] = None,
    public_url: Annotated[
        str | None,
        typer.Option(help="How nodes and browsers reach this server.", show_default=False),
    ] = None,
    tls_certificate: Annotated[
        Path | None, typer.Option(help="PEM file; switches to https.", show_default=False)
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(help="PEM file of its key.", show_default=False)
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="debug, info, warning or error.", show_default=False)
    ] = None,
    announce_fd: Annotated[
        int | None,
        typer.Option(help="Descriptor that gets a line of JSON when ready.", show_default=False),
    ] = None,
) -> None:
    """Run the control plane. Each option may come from the environment instead."""
    from pydantic import ValidationError

    from api.settings import Settings
    from unisono.serve import serve as run_server

    given: dict[str, Any] = {
        "host": host,
        "port": port,
        "data_dir": data_dir,
        "public_url": public_url,
        "tls_certificate": tls_certificate,
        "tls_key": tls_key,
        "log_level": log_level,
        "announce_fd": announce_fd,
    }
    try:
        settings = Settings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        for problem in error.errors():
            name = "_".join(str(part) for part in problem["loc"])
            where = f"UNISONO_{name.upper()}"
            if given.get(name) is not None:
                where = f"--{name.replace('_', '-')}"
            note(f"error: {where} {problem.get('input')!r}: {problem['msg']}")
        raise typer.Exit(2) from None
    raise typer.Exit(run_server(settings))


@app.command()
def demo(
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training data.")] = 60,
    leave: Annotated[
        bool, typer.Option("--exit", help="End when the job is over; 0 only if it completed.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object as the last line.")
    ] = False,
    port: Annotated[
        int | None, typer.Option(help="Of the dashboard (8700, or any if taken).")
    ] = None,
) -> None:
    """Run a control plane, two workers and a real training job on this machine."""
    from unisono.demo import Options, run

    raise typer.Exit(run(Options(epochs=epochs, leave=leave, as_json=as_json, port=port)))


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Look at this machine and say what would not work."""
    import dataclasses

    from unisono.commands.doctor import examine

    bad = False
    findings = []
    for finding in examine():
        bad = bad or finding.verdict == "bad"
        if as_json:
            findings.append(dataclasses.asdict(finding))
        else:
            mark = {"ok": "ok  ", "note": "note", "bad": "BAD "}[finding.verdict]
            print(f"{mark} {finding.what}: {finding.text}", flush=True)
    if as_json:
        print_json(findings)
    raise typer.Exit(1 if bad else 0)


def main() -> None:
    """Entry point of the command `unisono`."""
    try:
        app()
    except BrokenPipeError:
        # The reader of our output is gone, as with `| head`: nothing is left to say to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_ERROR)


if __name__ == "__main__":
    main()
