"""Nodes: list, join, drain, remove; bundles for them; and meetings of hand-started programs."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse
from sqlalchemy import select
from sqlalchemy.orm import Session

from api import examples, models, queries
from api.auth import Issued, Tokens, revoke_of_node
from api.cluster import NodeState
from api.control import Control
from api.deps import ControlDep, NodeOrOperator, NodeOrViewer, Operator, Viewer, bearer
from api.errors import Problem, not_found
from api.examples import answer
from api.schemas import JoinAnswer, JoinRequest, Node, NodePage, RendezvousRequest, shown

router = APIRouter(tags=["nodes"])
_DIGEST = re.compile("[0-9a-f]{64}")


def _node(control: Control, name: str) -> NodeState:
    node = control.cluster.by_name(name)
    if node is None:
        raise not_found("node", name)
    return node


@router.get("/nodes", response_model=NodePage)
async def get_nodes(
    control: ControlDep, _who: Viewer, cursor: str | None = None, limit: int | None = None
) -> Any:
    """Nodes, in the order in which they joined."""
    size = queries.page_size(control, limit, 200)
    after = queries.decode_cursor(cursor, list)
    nodes = queries.list_nodes(control)
    if after is not None:
        nodes = [node for node in nodes if [node["joined_at"], node["id"]] > after]
    last = nodes[size - 1] if len(nodes) > size else None
    more = queries.encode_cursor([last["joined_at"], last["id"]]) if last else None
    return {"items": nodes[:size], "next_cursor": more}


@router.get("/nodes/{name}", response_model=Node)
async def get_node(control: ControlDep, _who: Viewer, name: str) -> dict[str, Any]:
    """One node."""
    return _node(control, name).shown()


async def set_draining(control: Control, name: str, draining: bool) -> dict[str, Any]:
    """Stop or go on giving jobs to a node; it as it is then.

    Raises:
        Problem: there is no such node.
    """
    node = _node(control, name)

    def work(session: Session) -> None:
        session.get_one(models.Node, node.id).draining = draining

    await control.storage.write(work)
    node.draining = draining
    control.cluster.touch(node)
    control.cluster.on_capacity()
    return node.shown()


@router.post("/nodes/{name}/drain", response_model=Node)
async def drain(control: ControlDep, _who: Operator, name: str) -> dict[str, Any]:
    """Give a node no further jobs; what runs there goes on."""
    return await set_draining(control, name, True)


@router.post("/nodes/{name}/resume", response_model=Node)
async def resume(control: ControlDep, _who: Operator, name: str) -> dict[str, Any]:
    """Give a node jobs again."""
    return await set_draining(control, name, False)


@router.delete("/nodes/{name}", status_code=204)
async def remove(control: ControlDep, _who: Operator, name: str, force: bool = False) -> Response:
    """Remove a node: its credential is dead and its agent stops."""
    node = _node(control, name)
    jobs = sorted(set(node.held.values()))
    if jobs and not force:
        raise Problem(
            409,
            "node-busy",
            f"node {name} runs {', '.join(jobs)}: drain it and wait, cancel, or use force=true, "
            "which counts its ranks as lost",
        )

    def work(session: Session) -> list[str]:
        session.get_one(models.Node, node.id).removed_at = time.time()
        return revoke_of_node(session, node.id)

    revoked = await control.storage.write(work)
    await control.orchestrator.remove_node(node)
    control.cluster.drop(node)
    control.tokens.forget(revoked)
    return Response(status_code=204)


@router.post("/join", response_model=JoinAnswer, status_code=201)
async def join(request: Request, control: ControlDep, body: JoinRequest) -> Any:
    """Exchange a join token for a node's own credential."""
    secret = bearer(request)
    who = await control.tokens.authenticate(secret, ("join",)) if secret else None
    if who is None:
        raise Problem(
            401,
            "not-authenticated",
            "joining needs a join token that is not expired",
            headers={"WWW-Authenticate": "Bearer"},
        )

    def work(session: Session) -> tuple[models.Node, Issued, list[str]]:
        alive = models.Node.removed_at.is_(None)
        holder = session.scalar(
            select(models.Node).where(
                models.Node.name == body.name, alive, models.Node.agent_id != body.agent_id
            )
        )
        if holder is not None:
            raise Problem(
                409,
                "name-taken",
                f"the name {body.name!r} belongs to another node (host {holder.hostname!r}): "
                "choose another with --name, or remove that node first",
            )
        row = session.scalar(
            select(models.Node).where(models.Node.agent_id == body.agent_id, alive)
        )
        revoked: list[str] = []
        if row is None:
            row = models.Node(
                id=f"n-{secrets.token_hex(6)}",
                agent_id=body.agent_id,
                joined_at=time.time(),
                draining=False,
                acknowledged=0,
                facts={},
            )
            session.add(row)
        else:
            revoked = revoke_of_node(session, row.id)
        row.name, row.hostname = body.name, body.hostname
        ttl = control.settings.node_credential_ttl
        return row, Tokens.make(session, "node", "node", body.name, ttl, row.id), revoked

    row, issued, revoked = await control.storage.write(work)
    node = control.cluster.by_id.get(row.id)
    if node is None:
        node = NodeState(row.id, row.agent_id, row.name, row.hostname, row.joined_at)
        control.cluster.by_id[row.id] = node
    elif node.connection is not None:
        node.connection.fence("this agent has joined again")
    control.tokens.forget(revoked)
    node.name, node.hostname = row.name, row.hostname
    control.cluster.touch(node)
    return JoinAnswer(node_id=row.id, name=row.name, credential=issued.secret)


@router.post("/bundles", status_code=201, tags=["jobs"], responses=answer(examples.BUNDLE, 201))
async def post_bundle(request: Request, control: ControlDep, _who: Operator) -> dict[str, Any]:
    """Upload job code: the body is a `.tar.gz`."""
    digest, size, files = await control.bundles.receive(request.stream())
    return {"digest": digest, "size": size, "files": files}


@router.get("/bundles/{digest}", response_class=FileResponse, tags=["jobs"])
async def get_bundle(control: ControlDep, _who: NodeOrViewer, digest: str) -> FileResponse:
    """A bundle's file."""
    path = control.bundles.path(digest)
    if not _DIGEST.fullmatch(digest) or not path.is_file():
        raise not_found("bundle", digest)
    return FileResponse(path, media_type="application/gzip")


@router.post("/rendezvous/{group}", responses=answer(examples.MEETING))
async def rendezvous(
    request: Request, control: ControlDep, _who: NodeOrOperator, group: str, body: RendezvousRequest
) -> dict[str, Any]:
    """Meet the other programs of a group; the answer comes when all are there."""
    try:
        shown(group)
    except ValueError as error:
        raise Problem(422, "input-invalid", f"group: {error}") from None
    if len(group) > 200:
        raise Problem(422, "input-invalid", "group: longer than 200 characters")
    gone = asyncio.Event()

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone.set()

    watcher = asyncio.create_task(watch())
    try:
        return await control.rendezvous.join(group, body, gone)
    finally:
        watcher.cancel()
