"""One shape for every error: `application/problem+json`."""

from __future__ import annotations

import http
import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import DataError
from starlette.exceptions import HTTPException

from api.storage import StorageFull, StorageUnavailable

log = logging.getLogger("unisono.api")


class Problem(Exception):
    """An answer other than success: status, a stable code, and what to do about it."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        fields: list[dict[str, str]] | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail
        self.fields = fields
        self.headers = headers

    def response(self) -> JSONResponse:
        """The problem as an answer."""
        body: dict[str, Any] = {
            "type": f"urn:unisono:problem:{self.code}",
            "title": http.HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": self.detail,
            "code": self.code,
        }
        if self.fields is not None:
            body["fields"] = self.fields
        return JSONResponse(body, self.status, self.headers, media_type="application/problem+json")


def not_found(kind: str, name: str) -> Problem:
    """404 for a thing that is not there."""
    return Problem(404, f"{kind}-unknown", f"there is no {kind} {name!r:.120}")


_CODES = {404: "not-found", 405: "method-not-allowed", 401: "not-authenticated"}


def _unreadable(request: Request, error: RequestValidationError) -> Problem | None:
    """What is said of a body that is no JSON at all."""
    for entry in error.errors():
        if entry["type"] == "json_invalid":
            where = (
                f"the body is not JSON, at character {entry['loc'][-1]}: {entry['ctx']['error']}"
            )
            return Problem(
                422, "input-invalid", where, fields=[{"field": "", "message": "not JSON"}]
            )
        kind = request.headers.get("content-type", "")
        if tuple(entry["loc"]) == ("body",) and entry.get("input") and "json" not in kind:
            return Problem(
                415,
                "media-type-unsupported",
                f"the body must be JSON, with the header Content-Type: application/json; it came "
                f"as {kind!r:.80}",
            )
    return None


def install(app: FastAPI) -> None:
    """Make every error of the application a problem."""

    @app.exception_handler(Problem)
    async def _problem(_request: Request, error: Problem) -> JSONResponse:
        return error.response()

    @app.exception_handler(StorageFull)
    async def _full(_request: Request, error: StorageFull) -> JSONResponse:
        return Problem(
            507, "storage-full", f"{error}: nothing was stored; free some space and try again"
        ).response()

    @app.exception_handler(StorageUnavailable)
    async def _unavailable(_request: Request, error: StorageUnavailable) -> JSONResponse:
        return Problem(
            503, "storage-unavailable", f"the database does not answer ({error}): try again later"
        ).response()

    @app.exception_handler(DataError)
    async def _data(_request: Request, _error: DataError) -> JSONResponse:
        # PostgreSQL, unlike SQLite, refuses to compare with text that it cannot hold.
        return Problem(422, "input-invalid", "a NUL character is no part of any name").response()

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        # The framework answers 400 to whatever ends the reading of a body; ours says what.
        if isinstance(error.__cause__, Problem):
            return error.__cause__.response()
        code = _CODES.get(error.status_code, f"http-{error.status_code}")
        detail = {
            404: "there is nothing at this address",
            405: f"{request.method} is not possible at this address",
        }.get(error.status_code, str(error.detail))
        headers = dict(error.headers) if error.headers else None
        return Problem(error.status_code, code, detail, headers=headers).response()

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        if (problem := _unreadable(request, error)) is not None:
            return problem.response()
        fields = []
        for entry in error.errors():
            where = [str(part) for part in entry["loc"] if part not in ("body", "query", "path")]
            message = str(entry["msg"]).removeprefix("Value error, ")
            # A code or token must not come back in an answer that may be logged.
            if "code" not in where and isinstance(entry.get("input"), str | int | float | bool):
                message += f" (got {entry['input']!r:.80})"
            fields.append({"field": ".".join(where), "message": message})
        first = fields[0]
        detail = f"{first['field']}: {first['message']}" if first["field"] else first["message"]
        return Problem(422, "input-invalid", detail, fields=fields).response()

    @app.exception_handler(Exception)
    async def _unexpected(request: Request, error: Exception) -> JSONResponse:
        log.error("%s %s failed: %r", request.method, request.url.path, type(error).__name__)
        return Problem(
            500, "internal-error", "the server failed on this request; its log says where"
        ).response()
