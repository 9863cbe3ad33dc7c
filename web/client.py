"""How pages reach the API: by its public calls, as the browser's user, inside the process.

A page can therefore show and do nothing that its user could not by REST, and there is one place
where rights, origins and CSRF tokens are checked.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import Response

COOKIE = "unisono_session"
#: of the browser's request, handed on so that the API can check where a write comes from
_HANDED_ON = ("origin", "sec-fetch-site", "user-agent", "x-forwarded-proto", "x-forwarded-for")


class ApiProblem(Exception):
    """The API refused: its `application/problem+json` as an exception."""

    def __init__(self, answer: httpx.Response) -> None:
        try:
            body = answer.json()
        except ValueError:
            body = {}
        self.status = answer.status_code
        self.code = str(body.get("code", f"http-{answer.status_code}"))
        self.title = str(body.get("title", answer.reason_phrase))
        self.detail = str(body.get("detail", "the server did not say why"))
        self.fields: dict[str, str] = {
            str(entry["field"]): str(entry["message"]) for entry in body.get("fields") or []
        }
        super().__init__(f"{self.status} {self.code}: {self.detail}")


class Api:
    """The API's calls for one request of a browser."""

    def __init__(self, request: Request) -> None:
        headers = {name: request.headers[name] for name in _HANDED_ON if name in request.headers}
        session = request.cookies.get(COOKIE)
        if session is not None:
            headers["cookie"] = f"{COOKIE}={session}"
        client = (request.client.host, request.client.port) if request.client else ("", 0)
        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(
                app=request.app, raise_app_exceptions=False, client=client
            ),
            base_url=f"{request.url.scheme}://{request.url.netloc}/api/v1",
            headers=headers,
            timeout=None,
        )

    async def __aenter__(self) -> Api:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def answer(self, method: str, path: str, **options: Any) -> httpx.Response:
        """The answer to a call.

        Raises:
            ApiProblem: it was refused.
        """
        answer = await self._client.request(method, path, **options)
        if answer.status_code >= 400:
            raise ApiProblem(answer)
        return answer

    async def get(self, path: str, **query: str | int | None) -> Any:
        """The JSON of a reading call; parameters that are None or empty are left out."""
        given = {key: value for key, value in query.items() if value not in (None, "")}
        return (await self.answer("GET", path, params=given)).json()

    async def items(self, path: str, most: int, **query: str | int) -> tuple[list[Any], bool]:
        """The items of a paged list, at most `most` of them, and whether there are more."""
        found: list[Any] = []
        cursor: str | None = None
        while len(found) < most:
            page = await self.get(path, cursor=cursor, limit=min(200, most - len(found)), **query)
            found += page["items"]
            cursor = page["next_cursor"]
            if cursor is None:
                return found, False
        return found, True

    async def write(
        self,
        method: str,
        path: str,
        csrf: str,
        *,
        json: Any = None,
        content: AsyncIterator[bytes] | None = None,
        headers: dict[str, str] | None = None,
        query: dict[str, str] | None = None,
    ) -> httpx.Response:
        """A writing call with the session's CSRF token, as the form carried it."""
        return await self.answer(
            method,
            path,
            json=json,
            content=content,
            params=query,
            headers={"X-CSRF-Token": csrf, **(headers or {})},
        )


def copy_cookies(source: httpx.Response, target: Response) -> None:
    """Hand the cookies that the API set on to the browser."""
    for value in source.headers.get_list("set-cookie"):
        target.headers.append("set-cookie", value)
