"""Page routes: who is logged in, and errors as pages rather than as JSON."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import Depends, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, RedirectResponse, Response

from web.client import Api, ApiProblem
from web.rendering import PAGE_HEADERS, page

#: of forms without a file: more than any honest one needs
FORM_FIELDS = 64
#: roles that see buttons which change something; what they do is for the API to allow
WRITERS = ("operator", "admin")


@dataclass(frozen=True)
class User:
    """Somebody who is logged in, and the API in their name."""

    api: Api
    session: dict[str, Any]
    request: Request

    @property
    def csrf_token(self) -> str:
        """What this session's forms carry."""
        return str(self.session.get("csrf_token") or "")

    @property
    def _origin(self) -> str:
        """How nodes reach this server, as far as it is known."""
        public: str | None = self.request.app.state.settings.public_url
        return (public or f"{self.request.url.scheme}://{self.request.url.netloc}").rstrip("/")

    def page(self, template: str, **values: Any) -> HTMLResponse:
        """A page for this user."""
        return page(
            template,
            session=self.session,
            csrf_token=self.csrf_token,
            can_write=self.session["role"] in WRITERS,
            version=self.request.app.version,
            origin=self._origin,
            **values,
        )

    async def form(self) -> FormData:
        """What the browser posted.

        Raises:
            HTTPException: it is no form.
        """
        return await self.request.form(max_files=1, max_fields=FORM_FIELDS, max_part_size=4 << 20)

    async def post(self, method: str, path: str, **options: Any) -> None:
        """A writing call on behalf of a form that has nothing but its CSRF token."""
        form = await self.form()
        await self.api.write(method, path, text(form, "csrf_token"), **options)


def text(form: FormData, name: str) -> str:
    """A field of a form; empty when it is missing or a file."""
    value = form.get(name)
    return value if isinstance(value, str) else ""


async def user(request: Request) -> Any:
    """The user of a page; `ApiProblem` 401 without a valid session."""
    async with Api(request) as api:
        session = await api.get("/session")
        # An error page, made outside of this dependency, keeps the navigation.
        request.state.session = session
        yield User(api, session, request)


CurrentUser = Annotated[User, Depends(user)]


def see_other(url: str) -> RedirectResponse:
    """On to another page after a form was taken."""
    return RedirectResponse(url, 303, PAGE_HEADERS)


def login_redirect(request: Request) -> RedirectResponse:
    """To the login, and back to this page afterwards if it can be shown again."""
    here = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    next_ = here if request.method == "GET" and here != "/" else ""
    return see_other("/login" + (f"?next={quote(next_, safe='/')}" if next_ else ""))


def error_page(request: Request, problem: ApiProblem) -> Response:
    """What the API refused, as a page."""
    if problem.status == 401:
        return login_redirect(request)
    titles = {403: "Not allowed", 404: "Not found", 409: "Not possible now"}
    title = titles.get(problem.status, problem.title)
    return failure(request, problem.status, title, problem.detail, problem.code)


def failure(request: Request, status: int, title: str, detail: str, code: str) -> HTMLResponse:
    """A page that says what went wrong."""
    sentence = detail[:1].upper() + detail[1:]
    session = getattr(request.state, "session", None)
    return page(
        "error.html",
        status=status,
        number=status,
        session=session,
        csrf_token=session and session.get("csrf_token"),
        can_write=session and session["role"] in WRITERS,
        title=title,
        detail=sentence if sentence.endswith((".", "?", "!")) else sentence + ".",
        code=code,
        version=request.app.version,
    )


class PageRoute(APIRoute):
    """A route whose errors are pages."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, with every refusal turned into a page or into the login."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await handler(request)
            except ApiProblem as problem:
                return error_page(request, problem)
            except RequestValidationError as error:
                first = error.errors()[0]
                name = ".".join(str(part) for part in first["loc"][1:])
                detail = f"{name}: {first['msg']}"
                return failure(request, 422, "Not understood", detail, "input-invalid")
            except HTTPException as error:
                return failure(
                    request,
                    error.status_code,
                    "Not possible",
                    str(error.detail),
                    f"http-{error.status_code}",
                )

        return handle
