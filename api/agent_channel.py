"""The agents' WebSocket: who may open it, and what arrives on it."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from fastapi import APIRouter, WebSocket, WebSocketDisconnect

from api.cluster import Connection, NodeState
from api.errors import Problem
from collective.messages import (
    AGENT_PROTOCOL,
    AgentHello,
    BadMessage,
    DevicesChanged,
    Fenced,
    Heartbeat,
    Message,
    Prepared,
    Spooled,
    decode,
    encode,
)

if TYPE_CHECKING:
    from api.control import Control

log = logging.getLogger("unisono.agents")
router = APIRouter()

#: for the first message; an agent sends it at once
_HELLO_TIMEOUT = 20.0
_POLICY_VIOLATION = 1008


@router.websocket("/api/v1/agent")
async def agent(websocket: WebSocket) -> None:
    """One connection of one agent, from handshake to end."""
    control: Control = websocket.app.state.control
    admitted = await _admit(control, websocket)
    if admitted is None:
        return
    node, token_id = admitted
    await websocket.accept(AGENT_PROTOCOL)
    connection: Connection | None = None
    sender: asyncio.Task[None] | None = None
    try:
        async with asyncio.timeout(_HELLO_TIMEOUT):
            hello = await _receive(websocket)
        if not isinstance(hello, AgentHello):
            raise BadMessage(f"the first message must be agent_hello, not {hello.TYPE}")
        attached = control.cluster.attach(node, hello, token_id)
        if isinstance(attached, str):
            log.warning("agent of node %s is fenced off: %s", node.name, attached)
            await websocket.send_text(encode(Fenced(reason=attached)))
            await websocket.close()
            return
        connection = attached
        await control.cluster.store(node)
        control.orchestrator.node_up(node, connection, hello)
        sender = asyncio.create_task(_send(websocket, connection))
        while True:
            message = await _receive(websocket)
            if connection.fenced is None:
                _dispatch(control, node, connection, message)
    except TimeoutError:
        await websocket.close(_POLICY_VIOLATION, "no agent_hello came")
    except BadMessage as error:
        log.warning("node %s sent a bad message: %s", node.name, error)
        await websocket.close(_POLICY_VIOLATION, str(error)[:120])
    except WebSocketDisconnect:
        pass
    finally:
        if connection is not None:
            control.cluster.detach(node, connection)
        if sender is not None:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)


async def _admit(control: Control, websocket: WebSocket) -> tuple[NodeState, str] | None:
    """The node that opens the channel and its credential's id; None after a refusal."""
    scheme, _, secret = websocket.headers.get("authorization", "").partition(" ")
    principal = None
    if scheme.lower() == "bearer":
        principal = await control.tokens.authenticate(secret.strip(), ("node",))
    node = control.cluster.by_id.get(principal.node_id or "") if principal else None
    if node is None or principal is None:
        problem = Problem(
            401,
            "not-authenticated",
            "this channel needs the credential of a node that has not been removed",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await _refuse(websocket, problem)
        return None
    offered = websocket.scope.get("subprotocols", [])
    if AGENT_PROTOCOL not in offered:
        problem = Problem(
            426,
            "subprotocol-unknown",
            f"this server speaks {AGENT_PROTOCOL}, the agent offers "
            f"{', '.join(offered)[:200] or 'nothing'}: install the same version on both",
        )
        await _refuse(websocket, problem)
        return None
    return node, principal.id


async def _refuse(websocket: WebSocket, problem: Problem) -> None:
    where = websocket.client.host if websocket.client is not None else "an unknown address"
    log.warning("an agent at %s was refused (%d): %s", where, problem.status, problem.detail)
    await websocket.send_denial_response(problem.response())


async def _receive(websocket: WebSocket) -> Message:
    event = await websocket.receive()
    if event["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(event.get("code", 1006))
    text = event.get("text")
    if text is None:
        raise BadMessage("messages are text")
    return decode(text)


async def _send(websocket: WebSocket, connection: Connection) -> None:
    while (text := await connection.outgoing.get()) is not None:
        await websocket.send_text(text)
    await websocket.close()


def _dispatch(control: Control, node: NodeState, connection: Connection, message: Message) -> None:
    control.cluster.heard(node)
    match message:
        case Heartbeat(at=at):
            node.skews.append(time.time() - at)
            if not node.online:
                node.online = True
                control.cluster.touch(node)
                control.cluster.on_capacity()
        case Spooled():
            control.ingest.add(node, connection, message)
        case DevicesChanged(devices=devices):
            node.devices = devices
            control.cluster.touch(node)
            control.cluster.on_capacity()
        case Prepared():
            control.orchestrator.prepared(node, message)
        case _:
            raise BadMessage(f"an agent does not send {message.TYPE}")
