"""Logging in and out, and tokens."""

from __future__ import annotations

import math
import time
from typing import Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Request
from starlette.responses import Response

from web.client import Api, ApiProblem, copy_cookies
from web.format import path_part
from web.rendering import page
from web.routing import FORM_FIELDS, CurrentUser, PageRoute, User, failure, see_other, text

router = APIRouter(route_class=PageRoute, include_in_schema=False)

ROLES = (
    ("node", "lets machines join"),
    ("viewer", "sees everything"),
    ("operator", "starts and cancels jobs"),
    ("admin", "makes every token"),
)
KINDS = {"api": "API", "join": "joining", "node": "a node's own", "session": "browser session"}
TOKENS = 500


def local(url: str) -> str:
    """A place on this server to go on to; anything else becomes the first page."""
    plain = url.startswith("/") and not url.startswith(("//", "/\\")) and "\\" not in url
    return url if plain and url.isprintable() else "/"


def _login_page(request: Request, next_: str, error: str = "", status: int = 200) -> Response:
    return page(
        "login.html",
        status=status,
        session=None,
        version=request.app.version,
        next=next_,
        error=error,
    )


@router.get("/login")
async def login_form(request: Request, next: str = "") -> Response:
    """The form for the one-time code; the code in a link's fragment never gets here."""
    async with Api(request) as api:
        try:
            await api.get("/session")
        except ApiProblem as problem:
            if problem.status != 401:
                raise
            return _login_page(request, next)
    return see_other(local(next))


@router.post("/login")
async def login(request: Request) -> Response:
    """Take the code, answer with a session's cookie."""
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.url.netloc:
        # Another site could log its visitors in as somebody else.
        detail = "this login comes from a page of another server"
        return failure(request, 403, "Not allowed", detail, "origin-refused")
    form = await request.form(max_files=0, max_fields=FORM_FIELDS)
    next_ = text(form, "next")
    async with Api(request) as api:
        try:
            answer = await api.answer("POST", "/session", json={"code": text(form, "code").strip()})
        except ApiProblem as problem:
            detail = problem.detail[:1].upper() + problem.detail[1:]
            return _login_page(request, next_, detail, problem.status)
    response = see_other(local(next_))
    copy_cookies(answer, response)
    return response


@router.post("/logout")
async def logout(user: CurrentUser) -> Response:
    """End the session."""
    form = await user.form()
    answer = await user.api.write("DELETE", "/session", text(form, "csrf_token"))
    response = see_other("/login")
    copy_cookies(answer, response)
    return response


@router.get("/tokens")
async def tokens(user: CurrentUser) -> Response:
    """All tokens, and the form for another."""
    return await _tokens_page(user)


@router.post("/tokens")
async def make_token(user: CurrentUser) -> Response:
    """A new token, shown this once."""
    form = await user.form()
    values = {name: text(form, name).strip() for name in ("role", "name", "hours")}
    errors: dict[str, str] = {}
    try:
        hours = float(values["hours"])
    except ValueError:
        hours = math.nan
    if not (math.isfinite(hours) and hours > 0):
        errors["hours"] = f"{values['hours'][:40]!r} is not a number of hours above 0."
    if not values["name"]:
        errors["name"] = "Say what the token is for."
    if errors:
        return await _tokens_page(user, values=values, errors=errors, status=422)
    body = {"name": values["name"], "role": values["role"], "ttl": hours * 3600}
    try:
        answer = await user.api.write("POST", "/tokens", text(form, "csrf_token"), json=body)
    except ApiProblem as problem:
        if problem.status not in (403, 422):
            raise
        known = {"ttl": "hours"} | {name: name for name in values}
        errors = {known.get(name, ""): said for name, said in problem.fields.items()}
        errors = errors or {"": problem.detail}
        return await _tokens_page(user, values=values, errors=errors, status=problem.status)
    return await _tokens_page(user, created=answer.json())


@router.post("/tokens/{token}/revoke")
async def revoke(user: CurrentUser, token: str) -> Response:
    """End a token before its time."""
    await user.post("DELETE", f"/tokens/{path_part(token)}")
    return see_other("/tokens")


def _worth_showing(token: dict[str, Any], now: float) -> bool:
    """Not login codes, and not the sessions that are over: both come and go by the dozen."""
    dead = token["revoked_at"] is not None or token["expires_at"] <= now
    return token["kind"] != "code" and not (token["kind"] == "session" and dead)


async def _tokens_page(
    user: User,
    *,
    created: dict[str, Any] | None = None,
    values: dict[str, str] | None = None,
    errors: dict[str, str] | None = None,
    status: int = 200,
) -> Response:
    found, _ = await user.api.items("/tokens", TOKENS)
    now = time.time()
    found = [token for token in found if _worth_showing(token, now)]
    return user.page(
        "tokens.html",
        status=status,
        here="tokens",
        tokens=found,
        kinds=KINDS,
        created=created,
        roles=ROLES,
        values=values or {"role": "node", "name": "", "hours": "24"},
        errors=errors or {},
    )
