"""The page of a job, and the form that starts one."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.responses import Response

from api.schemas import JobRequest
from web import forms, uploads, views
from web.client import ApiProblem
from web.format import path_part
from web.routing import CurrentUser, PageRoute, User, see_other, text

router = APIRouter(route_class=PageRoute, include_in_schema=False)

#: rows of the table of ranks
RANKS = 400
#: up to this many ranks the server works out the times itself; beyond, the event stream brings them
TIMED_RANKS = 64
#: bytes of the log's end that come with the page
TAIL = 16 << 10
_STREAMS = ("stdout", "stderr")


@router.get("/jobs/new")
async def new_job(user: CurrentUser, source: str = "") -> Response:
    """The form, empty or as another job was started."""
    values = forms.blank()
    if source:
        job = await user.api.get(f"/jobs/{path_part(source)}")
        values = forms.of_spec(job["name"], job["spec"])
    return await _form_page(user, values, {})


@router.post("/jobs/new")
async def start_job(user: CurrentUser) -> Response:
    """Start the job that the form describes, or show what is wrong with it."""
    _bound(user)
    form = await user.form()
    values = forms.typed(form)
    errors = await _take_file(user, form, values)
    request, found = forms.read(values)
    errors = found | errors
    if request is None or errors:
        return await _form_page(user, values, errors, 422)
    try:
        job = await _start(user, request, values, text(form, "csrf_token"))
    except ApiProblem as problem:
        if problem.status not in (400, 404, 409, 422):
            raise
        fields = {k if k in forms.FIELDS else "": said for k, said in problem.fields.items()}
        return await _form_page(user, values, fields or {"": problem.detail}, problem.status)
    return see_other(views.job_url(job["id"]))


def _bound(user: User) -> None:
    """Refuse a form that is larger than a bundle may be, before any of it is read.

    Raises:
        HTTPException: it is, or does not say how large it is.
    """
    settings = user.request.app.state.settings
    length = user.request.headers.get("content-length", "")
    if not length.isdecimal():
        raise HTTPException(411, "The form does not say how long it is.")
    if int(length) > settings.bundle_limit + settings.body_limit:
        raise HTTPException(
            413,
            f"A bundle may have {settings.bundle_limit} bytes; leave data out of it and name a "
            "path on the nodes instead.",
        )


async def _start(user: User, request: JobRequest, values: forms.Values, csrf: str) -> Any:
    answer = await user.api.write(
        "POST",
        "/jobs",
        csrf,
        json=request.model_dump(exclude_defaults=True),
        # The form's own key: sent twice, by a double click or a reload, it starts one job.
        headers={"Idempotency-Key": values["idempotency_key"]},
    )
    return answer.json()


async def _take_file(user: User, form: FormData, values: forms.Values) -> forms.Errors:
    """Store an uploaded file at once, so that it need not be chosen again after an error."""
    file = form.get("file")
    if values["kind"] != "upload" or not isinstance(file, UploadFile) or not file.filename:
        return {}
    try:
        answer = await user.api.write(
            "POST",
            "/bundles",
            text(form, "csrf_token"),
            content=uploads.blocks(file),
            headers={"Content-Type": "application/gzip"},
        )
    except uploads.NotUploadable as error:
        return {"file": str(error)}
    except ApiProblem as problem:
        if problem.status not in (413, 422):
            raise
        return {"file": problem.detail}
    values["bundle"] = answer.json()["digest"]
    values["bundle_name"] = uploads.script_name(file.filename)
    if not uploads.is_archive(file.filename):
        values["entry"] = values["bundle_name"]
    return {}


async def _form_page(
    user: User, values: forms.Values, errors: forms.Errors, status: int = 200
) -> Response:
    nodes, _ = await user.api.items("/nodes", 1000)
    shown = [views.shown_node(node) for node in nodes]
    envs = sorted({env for node in nodes for env in node.get("envs") or []})
    return user.page(
        "new.html",
        status=status,
        here="new",
        values=values,
        errors=errors,
        engines=forms.ENGINES,
        free=views.free_now(shown),
        envs=", ".join(envs[:12]),
        parsed_args=forms.parsed_args(values),
    )


@router.get("/jobs/{job_id}")
async def job(user: CurrentUser, job_id: str, rank: int = 0, stream: str = "stdout") -> Response:
    """Everything about one job."""
    path = f"/jobs/{path_part(job_id)}"
    found = await user.api.get(path)
    ranks, more = await user.api.items(f"{path}/ranks", RANKS)
    columns: dict[int, Any] = {}
    if ranks and len(ranks) <= TIMED_RANKS:
        steps = await user.api.get(f"{path}/steps", from_step=-views.WINDOW, limit=views.WINDOW)
        columns = {entry["rank"]: entry for entry in steps["ranks"]}
    world = found.get("world_size") or 0
    return user.page(
        "job.html",
        events=f"/api/v1{path}/events",
        job=found,
        ranks=[views.shown_rank(r, columns.get(r["rank"]), found) for r in ranks],
        more_ranks=f"The first {len(ranks)} of {world} ranks." if more else "",
        facts=views.job_facts(found),
        notes=views.rank_notes(ranks),
        window=views.WINDOW,
        log=await _log(user, found, rank, stream if stream in _STREAMS else "stdout", bool(ranks)),
    )


async def _log(
    user: User, job: dict[str, Any], rank: int, stream: str, placed: bool
) -> dict[str, Any]:
    """The end of one rank's output."""
    path = f"/jobs/{path_part(job['id'])}/ranks/{rank}/logs/{stream}"
    # as static/log.js has it
    empty, more = ("no output", "") if job["ended_at"] else ("no output yet", " so far")
    shown = {"rank": rank, "stream": stream, "full_url": f"/api/v1{path}"}
    if not placed:
        return shown | {"text": "", "next": 0, "note": empty}
    query = {"offset": -TAIL, "limit": TAIL}
    answer = await user.api.answer("GET", path, params=query)
    size = int(answer.headers["unisono-size"])
    note = f"{size:,} bytes{more}" if size else empty
    if size > TAIL:
        note = f"the end of {size:,} bytes"
    tail = {"text": answer.text, "next": int(answer.headers["unisono-next-offset"])}
    return shown | tail | {"note": note}


@router.post("/jobs/{job_id}/cancel")
async def cancel(user: CurrentUser, job_id: str) -> Response:
    """End a job's ranks; harmless when repeated."""
    await user.post("POST", f"/jobs/{path_part(job_id)}/cancel")
    return see_other(views.job_url(job_id))
