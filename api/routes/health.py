"""What anyone may ask: whether the server lives, is ready, and which version it is."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse
from sqlalchemy import text

from api import examples
from api.deps import ControlDep, Viewer
from api.errors import Problem
from api.examples import answer
from api.queries import cluster_snapshot
from api.routes.jobs import LastEventId, event_stream
from collective.messages import AGENT_PROTOCOL

router = APIRouter(tags=["server"])
cluster_router = APIRouter(tags=["nodes"])


@router.get("/healthz", responses=answer({"status": "ok"}))
async def healthz() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


@router.get("/readyz", responses=answer({"status": "ready"}))
async def readyz(control: ControlDep) -> dict[str, str]:
    """The database answers too, and jobs are being handled."""
    if not control.ready:
        raise Problem(503, "not-ready", "the server is starting or ending")
    await control.storage.read(lambda s: s.execute(text("SELECT 1")))
    return {"status": "ready"}


@router.get("/version", responses=answer(examples.VERSION))
async def version() -> dict[str, str]:
    """Versions of the server and of its agents' protocol."""
    return {
        "version": importlib.metadata.version("unisono"),
        "api": "v1",
        "agent_protocol": AGENT_PROTOCOL,
    }


@cluster_router.get("/events", response_class=StreamingResponse)
async def get_events(
    request: Request, control: ControlDep, who: Viewer, last_event_id: LastEventId = None
) -> Any:
    """Server-sent events of the cluster: nodes and jobs."""
    return event_stream(
        control.hub.stream(
            control.cluster.channel,
            who,
            request.headers.get("last-event-id", last_event_id),
            lambda: cluster_snapshot(control),
        )
    )
