"""What a job does to torch.distributed: choose the backend, time every group, report the end.

`unisono.autoload` routes ``init_process_group`` and ``new_group`` of a job's ranks through here.
"""

from __future__ import annotations

import inspect
import logging
import os
import platform
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from collective import job, timing, torch_identity
from collective.errors import CollectiveError
from collective.messages import Failure, RankFailure

_log = logging.getLogger("unisono.collective")
#: of a traceback, the last part; in characters
MAX_TRACEBACK = 32_000
MAX_TEXT = 8000

_NO_NCCL = "torch's NCCL groups are not timed: communication counts as compute"


def init_process_group(original: Callable[..., None], *args: Any, **keywords: Any) -> None:
    """``dist.init_process_group`` inside a job."""
    asked = inspect.signature(original).bind(*args, **keywords)
    name = asked.arguments.get("backend")
    if os.environ.get("UNISONO_REPLACE_BACKEND") == "1" and str(name).lower() != "unisono":
        asked.arguments["backend"] = "unisono"
        # options of another backend mean nothing to this one
        asked.arguments.pop("pg_options", None)
        asked.arguments.pop("device_id", None)
    original(*asked.args, **asked.kwargs)
    try:
        timing.start()
        timing.facts(**_facts(_watch(dist.group.WORLD)))
    except Exception as error:  # noqa: BLE001 - the group works: train on without timings
        print(f"unisono: no timings of this rank: {error}", file=sys.stderr)
        _log.debug("timing could not start", exc_info=True)


def new_group(original: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """``dist.new_group`` inside a job."""
    group = original(*args, **keywords)
    try:
        watched, _ = _watch(group)
    except Exception as error:  # noqa: BLE001 - the group works: train on without its timings
        print(f"unisono: no timings of a subgroup: {error}", file=sys.stderr)
        return group
    return watched


def _watch(group: Any) -> tuple[Any, str]:
    """A group that is timed, in the place of `group`; and why it is not, if so."""
    if not isinstance(group, dist.ProcessGroup) or isinstance(group, torch_identity.Identity):
        return group, ""
    backends = {group._get_backend(device).name() for device in group._device_types}
    if backends - {"gloo"}:
        return group, _NO_NCCL if "nccl" in backends else f"{'+'.join(backends)} is not timed"
    from collective.torch_forward import put_behind

    return put_behind(group), ""


def _facts(watched: tuple[Any, str]) -> dict[str, float | int | str | bool]:
    group, reason = watched
    values: dict[str, float | int | str | bool] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "backend": str(dist.get_backend(group)),
        "engine": os.environ.get("UNISONO_BACKEND", "unisono"),
        "strategy": str(getattr(getattr(group, "group", None), "strategy", "none")),
        "world_size": group.size(),
        "timings": "steps" if reason else "full",
    }
    if reason:
        values["timings_reason"] = reason
    here = getattr(group, "group", None)
    unreachable: dict[int, str] = getattr(here, "unreachable", {})
    if here is not None and unreachable:
        values["unreachable"] = "; ".join(
            f"rank {rank} on node {here.nodes[rank]} ({why})" for rank, why in unreachable.items()
        )[:MAX_TEXT]
    if group.rank() == 0 and here is not None and here.slow_links:
        values["slow_links"] = here.slow_links[:MAX_TEXT]
    return values


def report_failure(error: BaseException) -> None:
    """Tell the agent which exception ended this rank, and which rank is to blame for it."""
    here = job.current()
    if here is None:
        return
    text = "".join(traceback.format_exception(error))
    if len(text) > MAX_TRACEBACK:
        text = f"… {len(text) - MAX_TRACEBACK} characters left out …\n{text[-MAX_TRACEBACK:]}"
    culprit = culprit_of(error)
    here.channel.send(
        RankFailure(
            failure=Failure(
                attempt=here.attempt,
                rank=here.rank,
                kind=type(error).__name__,
                message=str(error)[:MAX_TEXT],
                traceback=text,
                culprit=None if culprit == here.rank else culprit,
            )
        )
    )


def culprit_of(error: BaseException) -> int | None:
    """The global rank that an error names, if it is about a collective.

    A collective's error that came out of a backward has lost its type on the way through C++; it
    is known by its text.
    """
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        for group in torch_identity.groups:
            cause = group.error
            if isinstance(cause, CollectiveError) and (
                cause is current or str(cause) in str(current)
            ):
                return _global(group, cause.rank)
        if isinstance(current, CollectiveError) and current.rank is not None:
            return current.rank
        current = current.__cause__ or current.__context__
    return None


def _global(group: torch_identity.Identity, rank: int | None) -> int | None:
    if rank is None or not 0 <= rank < len(group.global_ranks):
        return None
    return group.global_ranks[rank]
