"""Templates, static files and the headers that every page carries."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import jinja2
from starlette.responses import HTMLResponse

from web import format as fmt
from web import views

HERE = Path(__file__).parent
STATIC = HERE / "static"

#: Nothing inline, nothing from elsewhere, nothing framed.
SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


def static_url(name: str) -> str:
    """Address of a static file."""
    return f"/static/{name}"


def static_version() -> str:
    """A tag that changes whenever any static file does."""
    digest = hashlib.sha256()
    for path in sorted(STATIC.iterdir()):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def environment() -> jinja2.Environment:
    """Jinja with everything escaped; parts that a job does not have yet are empty."""
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=jinja2.Undefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.globals["static"] = static_url
    filters = {
        "whole": fmt.whole,
        "number": fmt.number,
        "percent": fmt.percent,
        "duration": fmt.duration,
        "ago": fmt.ago,
        "iso": fmt.iso,
        "moment": fmt.moment,
        "clock": fmt.clock,
        "bytes": fmt.bytes_,
        "shorten": fmt.shorten,
        "rank_name": fmt.rank_name,
        "identical": fmt.identical,
        "query": fmt.query,
        "job_url": views.job_url,
        "node_url": views.node_url,
        "node_list": views.node_list,
        "device_use": views.device_use,
        "device_title": views.device_title,
        "device_count": views.device_count,
        "share_done": views.share_done,
        "run_time": views.run_time,
        "time_left": views.time_left,
        "cause_where": views.cause_where,
        "cause_what": views.cause_what,
        "cause_exit": views.cause_exit,
    }
    env.filters.update(filters)
    return env


_environment = environment()


def page(template: str, *, status: int = 200, **values: Any) -> HTMLResponse:
    """A rendered page that no cache keeps."""
    text = _environment.get_template(template).render(now=time.time(), **values)
    return HTMLResponse(text, status, {**SECURITY_HEADERS, "Cache-Control": "no-store"})
