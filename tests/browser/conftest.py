"""A control plane with two real nodes, and Chromium to look at its pages."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from cluster import Agent
from control_plane import Api, ControlPlane
from playwright.sync_api import Browser, BrowserContext, Page, Request, expect, sync_playwright

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
#: milliseconds that the browser may take for anything it is asked for
PATIENCE = 20_000
expect.set_options(timeout=PATIENCE)

Gate = Callable[[str], Path]


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """The control plane whose pages are looked at."""
    plane = ControlPlane(tmp_path_factory.mktemp("pages") / "data").start()
    yield plane
    assert plane.stop() == 0, plane.log()
    assert "Traceback" not in plane.log()


@pytest.fixture(scope="session")
def nodes(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Agent]]:
    """Two nodes of two CPU slots each, real agents."""
    folder = tmp_path_factory.mktemp("nodes")
    agents = [Agent(plane, folder, name) for name in ("w1", "w2")]
    try:
        yield [agent.start() for agent in agents]
        assert [agent.stop() for agent in agents] == [0, 0]
    finally:
        for agent in agents:
            agent.clean_up()


@pytest.fixture
def api(plane: ControlPlane) -> Iterator[Api]:
    """The API as an operator; jobs that a test leaves behind are cancelled."""
    client = Api(plane)
    yield client
    for state in ("queued", "starting", "running", "cancelling"):
        for job in client.http.get("/jobs", params={"state": state}).json()["items"]:
            client.http.post(f"/jobs/{job['id']}/cancel")
            client.until(job["id"], "cancelled", "completed", "failed", "lost", timeout=30)
    client.close()


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """Files for which a job waits; all are there after the test, so that no job waits for ever."""
    names: list[Path] = []

    def make(name: str) -> Path:
        names.append(tmp_path / name)
        return names[-1]

    yield make
    for path in names:
        path.touch()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """The system's Chromium, gone after each module: its driver keeps an event loop running."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("no Chromium is installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield browser
        browser.close()


@dataclass
class Watch:
    """What a tab did besides what it was asked for."""

    url: str
    #: texts of console messages that a test expects
    expected: tuple[str, ...] = ()
    messages: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)
    streams: list[str] = field(default_factory=list)

    def attach(self, page: Page) -> None:
        page.on("console", lambda message: self._console(message.type, message.text))
        page.on("pageerror", lambda error: self.messages.append(f"error: {error}"))
        page.on("dialog", self._dialog)
        page.on("request", self._request)

    def _console(self, kind: str, text: str) -> None:
        if kind in ("error", "warning") and not any(part in text for part in self.expected):
            self.messages.append(f"{kind}: {text}")

    def _dialog(self, dialog: object) -> None:
        self.dialogs.append(dialog.message)  # type: ignore[attr-defined]
        dialog.dismiss()  # type: ignore[attr-defined]

    def _request(self, request: Request) -> None:
        if urlsplit(request.url).netloc != urlsplit(self.url).netloc:
            self.elsewhere.append(request.url)
        if request.resource_type == "eventsource":
            self.streams.append(request.url)

    def check(self) -> None:
        """Nothing went wrong, nothing left the host, no script of a stranger ran."""
        assert not self.messages
        assert not self.elsewhere
        assert not self.dialogs


@dataclass
class Tabs:
    """Opens tabs that are logged in by a one-time code."""

    browser: Browser
    plane: ControlPlane
    contexts: list[BrowserContext] = field(default_factory=list)
    watches: list[Watch] = field(default_factory=list)

    def link(self, token: str | None = None) -> str:
        """A login link with a fresh code, of an operator or of the token's role."""
        with self.plane.client() as client:
            if token is not None:
                client.headers["Authorization"] = f"Bearer {token}"
            return str(client.post("/login-codes").raise_for_status().json()["url"])

    def blank(self, **options: object) -> tuple[Page, Watch]:
        """A tab of a browser that knows nothing."""
        context = self.browser.new_context(**options)  # type: ignore[arg-type]
        context.set_default_timeout(PATIENCE)
        self.contexts.append(context)
        page = context.new_page()
        watch = Watch(self.plane.url)
        watch.attach(page)
        self.watches.append(watch)
        return page, watch

    def open(
        self, path: str = "/", token: str | None = None, **options: object
    ) -> tuple[Page, Watch]:
        """A tab that is logged in and looks at a page."""
        page, watch = self.blank(**options)
        if options.get("java_script_enabled") is False:
            page.goto(f"{self.plane.url}/login")
            page.fill("#code", self.link(token).split("code=")[1])
            page.click("button:has-text('Log in')")
        else:
            page.goto(self.link(token))
        page.wait_for_url(f"{self.plane.url}/")
        if path != "/":
            page.goto(self.plane.url + path)
        return page, watch


@pytest.fixture
def tabs(chromium: Browser, plane: ControlPlane) -> Iterator[Tabs]:
    """Tabs on the control plane's pages; after the test all of them must have behaved."""
    made = Tabs(chromium, plane)
    yield made
    for context in made.contexts:
        context.close()
    for watch in made.watches:
        watch.check()
