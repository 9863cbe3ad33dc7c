"""``unisono job``: start, list, show, cancel, logs, wait."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unisono.commands.console import fail, note, print_json, run, table, when
from unisono.commands.request import Request, UsageError, parse_on, parse_settings

if TYPE_CHECKING:
    from unisono.client import ControlPlane

__all__ = ["app"]

app = typer.Typer(help="Start jobs and look after them.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")]


@app.command()
def start(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT [-- ARG...]",
            help="The script, and behind -- its arguments, which reach it unchanged. With "
            "--command all of it is the command, run without a shell.",
            show_default=False,
        ),
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Number of nodes (1).")] = None,
    ranks_per_node: Annotated[
        int | None, typer.Option(min=1, help="Ranks, that is devices, of each node (1).")
    ] = None,
    on: Annotated[
        str | None, typer.Option(metavar="NODE:RANKS,...", help="These nodes, such as w1:4,w2:1.")
    ] = None,
    all_free: Annotated[bool, typer.Option("--all-free", help="Every free device.")] = False,
    name: Annotated[str | None, typer.Option(help="A name to show.")] = None,
    command: Annotated[
        bool, typer.Option("--command", help="The words are a command, not a Python script.")
    ] = False,
    python: Annotated[
        str | None, typer.Option(metavar="PATH", help="The job's Python, a path on the nodes.")
    ] = None,
    env: Annotated[
        str | None, typer.Option(metavar="NAME", help="A Python that the nodes gave this name.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Environment variable; repeatable."),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(help="auto, ring, tree:2, centralized, or local=ring,between=tree:2."),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="unisono, gloo or nccl: what carries the tensors.")
    ] = None,
    replace_backend: Annotated[
        bool,
        typer.Option("--replace-backend", help="Use the engine also where the script names one."),
    ] = False,
    workdir: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Working directory: in the bundle, or on the nodes."),
    ] = None,
    grace: Annotated[
        float | None,
        typer.Option(min=0, metavar="SECONDS", help="Between SIGTERM and SIGKILL at the end."),
    ] = None,
    bundle: Annotated[
        bool | None,
        typer.Option(
            "--bundle/--no-bundle",
            help="Send the script's folder along, or take paths as paths of the nodes.",
            show_default=False,
        ),
    ] = None,
    include: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Send this folder, not the script's own.")
    ] = None,
    script_only: Annotated[
        bool, typer.Option("--script-only", help="Send the script and nothing beside it.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Follow the job; its state is the exit code.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Start a job: a script on the ranks of some nodes.

    Exit code with --wait: 0 completed, 1 failed, 3 cancelled, 4 lost.
    """
    request = Request(
        words=words or [],
        command=command,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        on=on,
        all_free=all_free,
        name=name,
        python=python,
        env=env,
        settings=settings or (),
        strategy=strategy,
        engine=engine,
        replace_backend=replace_backend,
        workdir=workdir,
        grace=grace,
        bundle=bundle,
        include=include,
        script_only=script_only,
    )
    try:
        request.check()
        if on is not None:
            parse_on(on)
        parse_settings(request.settings)
    except UsageError as error:
        fail(str(error), code=2)

    async def work(control_plane: ControlPlane) -> dict[str, Any]:
        job = await submit(control_plane, request)
        if as_json and not wait:
            print_json(job)
        elif not as_json:
            print(job["id"], flush=True)
        return await _follow(control_plane, job["id"]) if wait else job

    job = run(work)
    if wait:
        _finish(job, as_json)


async def submit(control_plane: ControlPlane, request: Request) -> dict[str, Any]:
    """Pack and store the code if the request says so, and start the job."""
    import uuid

    from unisono.bundle import BundleError, pack
    from unisono.client import Unreachable

    digest = script = None
    if request.packs():
        try:
            bundle = pack(
                None if request.command else Path(request.words[0]),
                request.include,
                script_only=request.script_only,
            )
        except BundleError as error:
            fail(str(error))
        digest, script = await control_plane.upload(bundle.data), bundle.script
    body = request.body(digest=digest, script=script)
    headers = {"Idempotency-Key": uuid.uuid4().hex}
    job: dict[str, Any]
    try:
        job = await control_plane.call("POST", "jobs", body=body, headers=headers)
    except Unreachable:
        # The answer may have been lost on its way; the key makes a second try harmless.
        job = await control_plane.call("POST", "jobs", body=body, headers=headers)
    return job


async def _follow(control_plane: ControlPlane, job_id: str) -> dict[str, Any]:
    import asyncio

    from unisono.commands.follow import follow

    try:
        return await follow(control_plane, job_id)
    except asyncio.CancelledError:
        note(f"the job goes on; to end it: unisono job cancel {job_id}")
        raise


def _finish(job: dict[str, Any], as_json: bool) -> None:
    from unisono.commands.follow import exit_code

    if as_json:
        print_json(job)
    raise typer.Exit(exit_code(job))


@app.command("list")
def list_jobs(
    state: Annotated[str | None, typer.Option(help="Only jobs in this state.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many, the newest first.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List jobs, the newest first."""

    async def work(control_plane: ControlPlane) -> list[dict[str, Any]]:
        query: dict[str, str | int] = {"limit": min(limit, 100)}
        if state is not None:
            query["state"] = state
        jobs: list[dict[str, Any]] = []
        async for job in control_plane.pages("jobs", query):
            jobs.append(job)
            if len(jobs) == limit:
                break
        return jobs

    jobs = run(work)
    if as_json:
        print_json(jobs)
        return
    rows = [
        (
            job["id"],
            job.get("name"),
            job["state"],
            when(job.get("created_at")),
            ", ".join(job.get("nodes") or []),
            job.get("world_size"),
            _short_reason(job),
        )
        for job in jobs
    ]
    table(("job", "name", "state", "created", "nodes", "ranks", "why"), rows)


def _short_reason(job: dict[str, Any]) -> str:
    cause = job.get("cause")
    text = job.get("waiting_for") or job.get("reason") or (cause or {}).get("message") or ""
    return str(text).partition("\n")[0][:80]


@app.command()
def show(job_id: JobId, as_json: AsJson = False) -> None:
    """Show one job with its ranks."""

    async def work(control_plane: ControlPlane) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        from unisono.client import segment

        path = f"jobs/{segment(job_id)}"
        job = await control_plane.call("GET", path)
        return job, [rank async for rank in control_plane.pages(f"{path}/ranks")]

    job, ranks = run(work)
    if as_json:
        print_json({**job, "ranks": ranks})
        return
    from unisono.commands.follow import state_text

    print(state_text(job))
    facts = {
        "name": job.get("name"),
        "created": when(job.get("created_at")),
        "started": when(job.get("started_at")),
        "ended": when(job.get("ended_at")),
        "engine": job.get("engine"),
        "strategy": job.get("strategy"),
        **{key: value for key, value in (job.get("progress") or {}).items() if value is not None},
    }
    for name, value in facts.items():
        if value not in (None, ""):
            print(f"  {name.replace('_', ' ')}: {_figure(value)}")
    rows = [
        (
            rank["rank"],
            rank.get("node"),
            rank.get("state"),
            rank.get("pid"),
            rank.get("exit_code"),
            rank.get("signal"),
            rank.get("step"),
            rank.get("message"),
        )
        for rank in ranks
    ]
    table(("rank", "node", "state", "pid", "exit code", "signal", "step", "message"), rows)
    traceback = (job.get("cause") or {}).get("traceback")
    if traceback:
        print(traceback)


def _figure(value: object) -> str:
    """A number with as many digits as a person reads."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}"
    return str(value)


@app.command()
def cancel(job_id: JobId, as_json: AsJson = False) -> None:
    """Cancel a job; harmless when repeated."""

    async def work(control_plane: ControlPlane) -> dict[str, Any]:
        from unisono.client import segment

        job: dict[str, Any] = await control_plane.call("POST", f"jobs/{segment(job_id)}/cancel")
        return job

    job = run(work)
    if as_json:
        print_json(job)
    else:
        print(f"{job['id']} {job['state']}")


@app.command()
def wait(job_id: JobId, as_json: AsJson = False) -> None:
    """Follow a job until it is over; its state is the exit code.

    0 completed, 1 failed, 3 cancelled, 4 lost.
    """
    _finish(run(lambda control_plane: _follow(control_plane, job_id)), as_json)


@app.command()
def logs(
    job_id: JobId,
    rank: Annotated[int, typer.Option(min=0, help="Which rank's output.")] = 0,
    stderr: Annotated[bool, typer.Option("--stderr", help="Standard error, not output.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the rank is over.")
    ] = False,
    tail: Annotated[
        int | None, typer.Option(min=1, metavar="BYTES", help="Start so far before the end.")
    ] = None,
) -> None:
    """Print what a rank wrote, byte for byte."""

    async def work(control_plane: ControlPlane) -> None:
        from unisono.client import segment

        stream = "stderr" if stderr else "stdout"
        query: dict[str, str | int] = {"follow": "true" if follow else "false"}
        if tail is not None:
            query["offset"] = -tail
        path = f"jobs/{segment(job_id)}/ranks/{rank}/logs/{stream}"
        async with control_plane.stream(path, query) as answer:
            async for chunk in answer.aiter_bytes():
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()

    run(work)
