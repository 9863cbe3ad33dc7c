"""Speaks to the control plane over REST and server-sent events."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import quote

import httpx

from unisono.access import Access

__all__ = ["ApiError", "ControlPlane", "Event", "EventParser", "Unreachable"]

#: seconds without a byte on an event stream, which beats every five
STREAM_SILENCE = 20.0


class Unreachable(RuntimeError):
    """No answer came from the control plane's address."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(
            f"cannot reach the control plane at {url}: {reason}. "
            "Is `unisono serve` running there? UNISONO_URL names its address"
        )


class ApiError(RuntimeError):
    """The control plane refused a request; carries its problem document."""

    def __init__(self, status: int, problem: Mapping[str, Any]) -> None:
        self.status = status
        self.code = str(problem.get("code") or f"http-{status}")
        self.title = str(problem.get("title") or "request failed")
        self.detail = str(problem.get("detail") or self.title)
        self.fields = _fields(problem.get("fields"))
        super().__init__(f"{self.detail} [{self.code}]")


def _fields(raw: object) -> list[tuple[str, str]]:
    """Input errors as (field, message), from either a mapping or a list of objects."""
    if isinstance(raw, Mapping):
        return [(str(name), str(message)) for name, message in raw.items()]
    if isinstance(raw, list):
        return [
            (str(each.get("field") or each.get("name") or ""), str(each.get("message") or each))
            for each in raw
            if isinstance(each, Mapping)
        ]
    return []


@dataclass(frozen=True)
class Event:
    """One server-sent event."""

    name: str
    data: dict[str, Any]
    id: str | None


class EventParser:
    """Turns the bytes of a ``text/event-stream`` into events (WHATWG HTML, section 9.2)."""

    def __init__(self, last_id: str | None = None) -> None:
        #: of the last whole event
        self.last_id = last_id
        self._rest = b""
        self._start()

    def _start(self) -> None:
        self._name = ""
        self._data: list[str] = []
        self._id: str | None = None

    def feed(self, chunk: bytes) -> list[Event]:
        """Take the bytes that came; return the events that they complete."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        events = (self._line(line.removesuffix(b"\r").decode()) for line in lines)
        return [event for event in events if event is not None]

    def _line(self, line: str) -> Event | None:
        if line:
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if field == "event":
                self._name = value
            elif field == "data":
                self._data.append(value)
            elif field == "id":
                self._id = value
            return None
        name, data, self.last_id = self._name, self._data, self._id or self.last_id
        self._start()
        if not data:
            return None
        return Event(name or "message", json.loads("\n".join(data)), self.last_id)


class ControlPlane:
    """A client for one control plane; use it as an asynchronous context."""

    def __init__(self, access: Access) -> None:
        self.access = access
        # Proxy variables of the shell are for the internet, not for a cluster's own machines.
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {access.token}"},
            timeout=httpx.Timeout(30.0, connect=10.0),
            trust_env=False,
            # Reading the system's certificates takes 20 ms, which plain http has no use for.
            verify=ssl.create_default_context() if access.url.startswith("https") else False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.aclose()

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: object = None,
        content: bytes | None = None,
        query: Mapping[str, str | int] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """The decoded answer to one request; None where the answer has no body.

        Args:
            path: below ``/api/v1/``, or below the server itself with a slash at its beginning.

        Raises:
            Unreachable: no answer came.
            ApiError: the answer was an error.
        """
        try:
            answer = await self._http.request(
                method, self._url(path), json=body, content=content, params=query, headers=headers
            )
        except httpx.HTTPError as error:
            raise Unreachable(self.access.url, _reason(error)) from None
        _check(answer)
        return answer.json() if answer.content else None

    def _url(self, path: str) -> str:
        return self.access.url + (path if path.startswith("/") else f"/api/v1/{path}")

    async def pages(
        self, path: str, query: Mapping[str, str | int] | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """Every item of a list, page after page."""
        asked = dict(query or {})
        while True:
            page = await self.call("GET", path, query=asked)
            for item in page["items"]:
                yield item
            if not page.get("next_cursor"):
                return
            asked["cursor"] = page["next_cursor"]

    async def upload(self, data: bytes) -> str:
        """Store a bundle and return its digest."""
        answer = await self.call(
            "POST", "bundles", content=data, headers={"Content-Type": "application/gzip"}
        )
        return str(answer["digest"])

    @asynccontextmanager
    async def stream(
        self, path: str, query: Mapping[str, str | int] | None = None
    ) -> AsyncIterator[httpx.Response]:
        """An answer whose body is read as it comes; silence has no limit."""
        timeout = httpx.Timeout(30.0, connect=10.0, read=None)
        try:
            async with self._http.stream(
                "GET", self._url(path), params=query, timeout=timeout
            ) as answer:
                if answer.is_error:
                    await answer.aread()
                _check(answer)
                yield answer
        except httpx.HTTPError as error:
            raise Unreachable(self.access.url, _reason(error)) from None

    async def events(self, path: str) -> AsyncGenerator[Event, None]:
        """Events of a stream, for ever or until its `end`; reconnects where it left off.

        A control plane that restarts is waited for: jobs go on meanwhile.  Whoever stops before
        the end closes the generator (`contextlib.aclosing`), and with it the connection.

        Raises:
            ApiError: the stream is refused.
        """
        last_id: str | None = None
        pause = 0.25
        while True:
            parser = EventParser(last_id)
            try:
                async with aclosing(self._events_once(path, parser)) as events:
                    async for event in events:
                        pause = 0.25
                        yield event
                        if event.name == "end" and event.data.get("reason") != "shutdown":
                            return
            except httpx.HTTPError:
                pass  # the connection broke: the next try says whether there is still a server
            last_id = parser.last_id
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, 5.0)

    async def _events_once(self, path: str, parser: EventParser) -> AsyncGenerator[Event, None]:
        headers = {"Accept": "text/event-stream"}
        if parser.last_id is not None:
            headers["Last-Event-ID"] = parser.last_id
        timeout = httpx.Timeout(10.0, read=STREAM_SILENCE)
        async with self._http.stream(
            "GET", self._url(path), headers=headers, timeout=timeout
        ) as answer:
            if answer.is_error:
                await answer.aread()
                # 5xx comes from a proxy or a server that is just starting: worth another try
                if answer.status_code >= 500:
                    answer.raise_for_status()
            _check(answer)
            async for chunk in answer.aiter_bytes():
                for event in parser.feed(chunk):
                    yield event


def _reason(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__


def _check(answer: httpx.Response) -> None:
    if not answer.is_error:
        return
    try:
        problem = answer.json()
    except ValueError:
        problem = None
    if not isinstance(problem, dict):
        problem = {"detail": f"{answer.reason_phrase}: {answer.text[:200]}"}
    raise ApiError(answer.status_code, problem)


def segment(text: str) -> str:
    """A name or id as one segment of a path."""
    return quote(text, safe="")
