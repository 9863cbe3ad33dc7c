"""Tokens, login codes and browser sessions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from sqlalchemy import select

from api import examples, models, queries
from api.auth import ORDER, shown
from api.control import Control
from api.deps import Caller, ControlDep, Operator, Viewer
from api.errors import Problem, not_found
from api.examples import answer
from api.schemas import CodeRequest, NewToken, TokenPage, TokenRequest
from api.sessions import clear_cookie, login_url, redeem_code, set_cookie

router = APIRouter(tags=["access"])


@router.post("/tokens", status_code=201, response_model=NewToken)
async def post_token(control: ControlDep, who: Operator, body: TokenRequest) -> dict[str, Any]:
    """Make a token, which is shown this once; role `node` makes a join token."""
    if body.role in ("operator", "admin") and not who.may("admin"):
        raise Problem(
            403, "role-missing", f"a token with the role {body.role} can be made by an admin only"
        )
    kind = "join" if body.role == "node" else "api"
    default = control.settings.join_ttl if kind == "join" else control.settings.token_ttl
    issued = await control.tokens.issue(kind, body.role, body.name, body.ttl or default)
    row = await _row(control, issued.principal.id)
    return shown(row) | {"token": issued.secret}


async def _row(control: Control, token_id: str) -> models.Token:
    row = await control.storage.read(lambda s: s.get(models.Token, token_id))
    if row is None:
        raise not_found("token", token_id)
    return row


@router.get("/tokens", response_model=TokenPage)
async def get_tokens(
    control: ControlDep, _who: Operator, cursor: str | None = None, limit: int | None = None
) -> Any:
    """All tokens, without their secrets, newest first."""
    size, before = queries.page_size(control, limit), queries.decode_cursor(cursor, list)
    token = models.Token
    query = select(token).order_by(token.created_at.desc(), token.id.desc()).limit(size + 1)
    if before is not None:
        query = query.where(
            (token.created_at < before[0])
            | ((token.created_at == before[0]) & (token.id < before[1]))
        )
    rows = await control.storage.read(lambda s: s.scalars(query).all())
    last = rows[size - 1] if len(rows) > size else None
    more = queries.encode_cursor([last.created_at, last.id]) if last else None
    return {"items": [shown(row) for row in rows[:size]], "next_cursor": more}


@router.delete("/tokens/{token_id}", status_code=204)
async def delete_token(control: ControlDep, who: Operator, token_id: str) -> Response:
    """Revoke a token; harmless when repeated."""
    row = await _row(control, token_id)
    if ORDER.get(row.role, 0) >= ORDER["operator"] and not who.may("admin") and row.id != who.id:
        raise Problem(
            403, "role-missing", f"a token with the role {row.role} can be revoked by an admin only"
        )
    await control.tokens.revoke(token_id)
    return Response(status_code=204)


@router.post("/login-codes", status_code=201, responses=answer(examples.LOGIN_CODE, 201))
async def post_login_code(request: Request, control: ControlDep, who: Viewer) -> dict[str, Any]:
    """Make a one-time code for a browser's login."""
    issued = await control.tokens.issue("code", who.role, who.name, control.settings.login_code_ttl)
    base = control.settings.public_url or str(request.base_url)
    return {
        "code": issued.secret,
        "url": login_url(base, issued.secret),
        "expires_at": issued.principal.expires_at,
    }


@router.post("/session", status_code=201, responses=answer(examples.NEW_SESSION, 201))
async def post_session(
    request: Request, response: Response, control: ControlDep, body: CodeRequest
) -> dict[str, Any]:
    """Begin a browser session with a one-time code."""
    session = await redeem_code(control.tokens, control.settings, body.code)
    if session is None:
        raise Problem(401, "code-invalid", "this login code is wrong, expired or already used")
    set_cookie(response, request, session)
    return {
        "role": session.role,
        "csrf_token": session.csrf_token,
        "expires_at": session.expires_at,
    }


@router.get("/session", responses=answer(examples.SESSION))
async def get_session(who: Caller) -> dict[str, Any]:
    """Who the caller is."""
    return {
        "name": who.name,
        "role": who.role,
        "csrf_token": who.csrf_token,
        "expires_at": who.expires_at,
    }


@router.delete("/session", status_code=204)
async def delete_session(control: ControlDep, who: Caller) -> Response:
    """Log out."""
    if who.kind != "session":
        raise Problem(409, "no-session", "this call came with a token, not with a session")
    await control.tokens.revoke(who.id)
    response = Response(status_code=204)
    clear_cookie(response)
    return response
