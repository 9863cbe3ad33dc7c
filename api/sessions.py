"""Browser logins: one-time codes, the session's cookie, and what guards its writes."""

from __future__ import annotations

import time
from dataclasses import dataclass

from fastapi import Request, Response

from api.auth import Tokens
from api.settings import Settings

COOKIE = "unisono_session"
CSRF_HEADER = "X-CSRF-Token"
CSRF_FIELD = "csrf_token"


@dataclass(frozen=True)
class BrowserSession:
    """A session that has just begun."""

    id: str
    #: goes into the cookie and nowhere else
    secret: str
    role: str
    name: str
    csrf_token: str
    expires_at: float


async def redeem_code(tokens: Tokens, settings: Settings, code: str) -> BrowserSession | None:
    """A session for a one-time code; None when the code is wrong, expired or used."""
    issued = await tokens.redeem(code.strip(), settings.session_ttl)
    if issued is None:
        return None
    who = issued.principal
    assert who.csrf_token is not None
    return BrowserSession(who.id, issued.secret, who.role, who.name, who.csrf_token, who.expires_at)


def set_cookie(response: Response, request: Request, session: BrowserSession) -> None:
    """Give the browser its session."""
    response.set_cookie(
        COOKIE,
        session.secret,
        max_age=max(1, int(session.expires_at - time.time())),
        httponly=True,
        samesite="lax",
        secure=request.url.scheme == "https",
        path="/",
    )


def clear_cookie(response: Response) -> None:
    """Take the session from the browser."""
    response.delete_cookie(COOKIE, path="/", httponly=True, samesite="lax")


def login_url(base: str, code: str) -> str:
    """The link that carries a code, in the fragment, which no browser sends to a server."""
    return f"{base.rstrip('/')}/login#code={code}"
