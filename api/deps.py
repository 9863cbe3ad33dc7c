"""What route functions ask for: the control plane's parts, and who is calling.

`Viewer`, `Operator` and `Admin` refuse callers without that role; `OptionalSession` is for pages,
which send a caller without a session to the login page instead.
"""

from __future__ import annotations

import hmac
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, Request

from api.auth import Principal
from api.control import Control
from api.errors import Problem
from api.sessions import COOKIE, CSRF_FIELD, CSRF_HEADER

_SAFE = ("GET", "HEAD", "OPTIONS")
_FORMS = ("application/x-www-form-urlencoded", "multipart/form-data")


def get_control(request: Request) -> Control:
    """The control plane of this application."""
    control: Control = request.app.state.control
    return control


ControlDep = Annotated[Control, Depends(get_control)]


def bearer(request: Request) -> str | None:
    """The token of the `Authorization` header."""
    scheme, _, secret = request.headers.get("authorization", "").partition(" ")
    return secret.strip() if scheme.lower() == "bearer" else None


async def optional_session(request: Request, control: ControlDep) -> Principal | None:
    """The browser's session, from its cookie; None without a valid one."""
    secret = request.cookies.get(COOKIE)
    return await control.tokens.authenticate(secret, ("session",)) if secret else None


OptionalSession = Annotated[Principal | None, Depends(optional_session)]


async def check_csrf(request: Request, session: Principal) -> None:
    """Refuse a write that the session's own page did not ask for.

    Raises:
        Problem: the CSRF token is missing or wrong, or the request comes from another site.
    """
    if request.method in _SAFE:
        return
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        raise Problem(403, "origin-refused", "this request comes from a page of another server")
    given = request.headers.get(CSRF_HEADER)
    if given is None and request.headers.get("content-type", "").split(";")[0] in _FORMS:
        field = (await request.form()).get(CSRF_FIELD)
        given = field if isinstance(field, str) else None
    if given is None or not hmac.compare_digest(
        given.encode("utf-8", "replace"), (session.csrf_token or "").encode()
    ):
        raise Problem(
            403,
            "csrf-token-wrong",
            f"a write with a session's cookie needs its CSRF token in {CSRF_HEADER}; reload the "
            "page and try again",
        )


async def caller(request: Request, control: ControlDep, session: OptionalSession) -> Principal:
    """Who is calling, by token or by session.

    Raises:
        Problem: nobody that is known.
    """
    secret = bearer(request)
    if secret is not None:
        found = await control.tokens.authenticate(secret, ("api", "node"))
        if found is not None:
            return found
        detail = "this token is wrong, expired or revoked, or not one for this call"
    elif session is not None:
        await check_csrf(request, session)
        return session
    else:
        detail = "this call needs a token (Authorization: Bearer …) or a browser's session"
    raise Problem(401, "not-authenticated", detail, headers={"WWW-Authenticate": "Bearer"})


Caller = Annotated[Principal, Depends(caller)]


def _require(principal: Principal, *roles: str) -> Principal:
    if any(principal.may(role) for role in roles):
        return principal
    raise Problem(
        403,
        "role-missing",
        f"this needs the role {' or '.join(roles)}; yours is {principal.role}",
    )


def viewer(principal: Caller) -> Principal:
    """A caller who may look."""
    return _require(principal, "viewer")


def operator(principal: Caller) -> Principal:
    """A caller who may start and cancel jobs, and manage nodes."""
    return _require(principal, "operator")


def admin(principal: Caller) -> Principal:
    """A caller who may do anything."""
    return _require(principal, "admin")


def node_or_viewer(principal: Caller) -> Principal:
    """A node, or a caller who may look."""
    return _require(principal, "node", "viewer")


def node_or_operator(principal: Caller) -> Principal:
    """A node, or a caller who may start jobs."""
    return _require(principal, "node", "operator")


Viewer = Annotated[Principal, Depends(viewer)]
Operator = Annotated[Principal, Depends(operator)]
Admin = Annotated[Principal, Depends(admin)]
NodeOrViewer = Annotated[Principal, Depends(node_or_viewer)]
NodeOrOperator = Annotated[Principal, Depends(node_or_operator)]
