"""All pages and static files, added to the control plane's application."""

from __future__ import annotations

import os
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.convertors import Convertor, register_url_convertor
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles

from web import access_pages, cluster_pages, job_pages
from web.rendering import STATIC
from web.routing import PageRoute, failure


class _NotApi(Convertor[str]):
    """Any path but the API's, whose unknown addresses are answered with JSON."""

    regex = r"(?!api/|static/|healthz|readyz|version|openapi).*"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


class _Static(StaticFiles):
    """Static files that a browser asks about each time, so that an update shows at once."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers["Cache-Control"] = "no-cache"
        response.headers["X-Content-Type-Options"] = "nosniff"
        return response


register_url_convertor("notapi", _NotApi())
_unknown = APIRouter(route_class=PageRoute, include_in_schema=False)


@_unknown.get("/favicon.ico")
async def favicon() -> Response:
    """The mark, for what a browser shows without a page of ours, such as a whole log."""
    return FileResponse(STATIC / "mark.svg", media_type="image/svg+xml")


@_unknown.get("/{path:notapi}")
async def unknown(request: Request, path: str) -> Response:
    """No page has this address."""
    detail = f"There is no page at /{path[:200]}. It may have been moved, or mistyped."
    return failure(request, 404, "Not found", detail, "not-found")


def mount(app: FastAPI) -> None:
    """Add the pages and their static files; called after the API's routes are there."""
    app.mount("/static", _Static(directory=os.fspath(STATIC)), name="static")
    for router in (access_pages.router, cluster_pages.router, job_pages.router, _unknown):
        app.include_router(router)
