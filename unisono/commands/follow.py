"""Follows a job until it is over, by its event stream."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from unisono.commands.console import note

if TYPE_CHECKING:
    from unisono.client import ControlPlane

__all__ = ["EXIT_CODES", "OVER", "cause_text", "exit_code", "follow", "state_text"]

#: 2 and 5 are the command's own: wrong usage, and no answer or a refusal
EXIT_CODES = {"completed": 0, "failed": 1, "cancelled": 3, "lost": 4}
OVER = frozenset(EXIT_CODES)


def exit_code(job: dict[str, Any]) -> int:
    """The exit code that stands for the state of a job that is over."""
    return EXIT_CODES.get(str(job["state"]), 1)


async def follow(control_plane: ControlPlane, job_id: str) -> dict[str, Any]:
    """Say every change of state; return the job when it is over."""
    from unisono.client import segment

    path = f"jobs/{segment(job_id)}"
    said: str | None = None
    async with aclosing(control_plane.events(f"{path}/events")) as events:
        async for event in events:
            job: dict[str, Any] | None = event.data.get("job")
            if job is None:
                continue
            text = state_text(job)
            if text != said:
                note(text)
                said = text
            if job["state"] in OVER:
                if traceback := (job.get("cause") or {}).get("traceback"):
                    note(traceback.rstrip())
                return job
    # The stream may end because the login does; the job itself says how it stands.
    last: dict[str, Any] = await control_plane.call("GET", path)
    return last


def state_text(job: dict[str, Any]) -> str:
    """One line, or a few for a failure: what the job is doing, or how it ended and why."""
    head = f"{job['id']} {job['state']}"
    if job["state"] == "queued" and job.get("waiting_for"):
        return f"{head}: waits for {job['waiting_for']}"
    if job["state"] in ("starting", "running"):
        nodes = ", ".join(job.get("nodes") or [])
        ranks = job.get("world_size")
        plural = "" if ranks == 1 else "s"
        return f"{head} on {nodes}, {ranks} rank{plural}" if nodes else head
    if job["state"] not in OVER:
        return head
    if job.get("started_at") is not None and job.get("ended_at") is not None:
        head += f" after {job['ended_at'] - job['started_at']:.1f} s"
    if job["state"] == "completed":
        accuracy = (job.get("progress") or {}).get("accuracy")
        return head if accuracy is None else f"{head}, accuracy {accuracy:.4f}"
    return f"{head}: {cause_text(job)}"


def cause_text(job: dict[str, Any]) -> str:
    """The first cause of a job's end, then how many ranks failed in consequence."""
    cause = job.get("cause")
    if not cause:
        return str(job.get("reason") or "no reason is known")
    where = [f"rank {cause['rank']}"] if cause.get("rank") is not None else []
    where += [f"node {cause['node']}"] if cause.get("node") else []
    how = []
    if cause.get("signal") is not None:
        how.append(f"signal {cause['signal']}")
    elif cause.get("exit_code") is not None:
        how.append(f"exit code {cause['exit_code']}")
    text = " on ".join(where)
    message = f"{cause.get('kind')}: {cause.get('message')}" if cause.get("message") else ""
    text = ": ".join(part for part in (text, message or str(cause.get("kind") or "")) if part)
    text += f" ({', '.join(how)})" if how else ""
    others = len(job.get("consequences") or [])
    if others:
        text += f"\n  {others} other rank{'s' if others > 1 else ''} failed in consequence"
    return text
