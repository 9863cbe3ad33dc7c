"""The cluster's page and the pages of nodes."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.responses import Response

from web import views
from web.client import ApiProblem
from web.format import path_part
from web.routing import CurrentUser, PageRoute, see_other

router = APIRouter(route_class=PageRoute, include_in_schema=False)

#: jobs on one page
JOBS = 50
#: nodes on the cluster's page; more than the largest cluster this is made for
NODES = 1000
#: counted of each state, for the figures at the top
_COUNTED = ("queued", "starting", "running", "cancelling")
_COUNT_LIMIT = 200


@router.get("/")
async def home(user: CurrentUser, state: str = "", cursor: str = "") -> Response:
    """Nodes, jobs and what is free."""
    (nodes, _), jobs, *counts = await asyncio.gather(
        user.api.items("/nodes", NODES),
        user.api.get("/jobs", state=state, cursor=cursor, limit=JOBS),
        *(user.api.items("/jobs", _COUNT_LIMIT, state=name) for name in _COUNTED),
    )
    shown = views.shown_nodes(nodes)
    numbers = {name: len(found) for name, (found, _) in zip(_COUNTED, counts, strict=True)}
    return user.page(
        "home.html",
        here="home",
        events="/api/v1/events",
        nodes=shown,
        jobs=jobs["items"],
        next_cursor=jobs["next_cursor"],
        summary=views.cluster_summary(shown, numbers),
        state_filter=state,
        job_states=list(views.JOB_STATES),
    )


@router.get("/nodes/{name}")
async def node(user: CurrentUser, name: str) -> Response:
    """One node: its devices and what it is."""
    found = await user.api.get(f"/nodes/{path_part(name)}")
    return user.page(
        "node.html",
        events="/api/v1/events",
        node=views.shown_node(found),
        facts=views.node_facts(found),
        force=False,
    )


@router.post("/nodes/{name}/drain")
async def drain(user: CurrentUser, name: str) -> Response:
    """Place no new jobs on a node."""
    await user.post("POST", f"/nodes/{path_part(name)}/drain")
    return see_other(views.node_url(name))


@router.post("/nodes/{name}/resume")
async def resume(user: CurrentUser, name: str) -> Response:
    """Place jobs on a drained node again."""
    await user.post("POST", f"/nodes/{path_part(name)}/resume")
    return see_other(views.node_url(name))


@router.post("/nodes/{name}/remove")
async def remove(user: CurrentUser, name: str, force: bool = False) -> Response:
    """Take a node out of the cluster; one that is busy only when asked a second time."""
    query = {"force": "true"} if force else None
    try:
        await user.post("DELETE", f"/nodes/{path_part(name)}", query=query)
    except ApiProblem as problem:
        if problem.code != "node-busy":
            raise
        found = await user.api.get(f"/nodes/{path_part(name)}")
        return user.page(
            "node.html",
            status=409,
            events="/api/v1/events",
            node=views.shown_node(found),
            facts=views.node_facts(found),
            force=problem.detail,
        )
    return see_other("/")
