"""Templates, and the headers that pages carry."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import jinja2
from starlette.responses import HTMLResponse

from web import format as fmt
from web import views

HERE = Path(__file__).parent
STATIC = HERE / "static"

#: Besides what the API's middleware adds to every answer. Without a referrer policy that keeps
#: the origin, browsers post forms with `Origin: null`, which the API refuses.
PAGE_HEADERS = {"Referrer-Policy": "same-origin", "Cache-Control": "no-store"}


def static_url(name: str) -> str:
    """Address of a static file."""
    return f"/static/{name}"


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
        "ranks": views.ranks,
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
    return HTMLResponse(text, status, PAGE_HEADERS)
