"""Logging in, and being refused without it."""

from __future__ import annotations

import httpx
import pytest
from conftest import Tabs
from control_plane import ControlPlane
from playwright.sync_api import expect

PAGES = ["/", "/jobs/new", "/jobs/j-1", "/nodes/w1", "/tokens"]
FORMS = [
    "/jobs/new",
    "/jobs/j-1/cancel",
    "/nodes/w1/drain",
    "/nodes/w1/resume",
    "/nodes/w1/remove",
    "/tokens",
    "/tokens/t-1/revoke",
    "/logout",
]


def test_a_code_works_once(tabs: Tabs) -> None:
    """A login link opens the cluster's page once, and its code is in no address afterwards."""
    link = tabs.link()
    page, _ = tabs.blank()
    page.goto(link)
    page.wait_for_url(f"{tabs.plane.url}/")
    expect(page.locator("#fresh-text")).to_contain_text("live")
    code = link.split("code=")[1]
    page.go_back()
    assert code not in page.url

    second, watch = tabs.blank()
    watch.expected = ("401",)
    second.goto(link)
    expect(second.get_by_role("alert")).to_have_text(
        "This login code is wrong, expired or already used"
    )
    assert code not in second.url


def test_logging_out_ends_the_session(tabs: Tabs) -> None:
    """After the log-out the cookie is worth nothing, even to somebody who kept it."""
    page, _ = tabs.open()
    cookies = {c["name"]: c["value"] for c in page.context.cookies()}
    page.click("text=Log out")
    page.wait_for_url(f"{tabs.plane.url}/login")
    answer = httpx.get(f"{tabs.plane.url}/tokens", cookies=cookies, trust_env=False)
    assert answer.status_code == 303


def test_login_goes_on_to_the_page_asked_for(tabs: Tabs) -> None:
    """Whoever was sent to the login sees the page that was asked for, never another site."""
    page, _ = tabs.blank()
    page.goto(f"{tabs.plane.url}/tokens")
    page.wait_for_url("**/login?next=/tokens")
    page.fill("#code", tabs.link().split("code=")[1])
    page.click("button:has-text('Log in')")
    page.wait_for_url(f"{tabs.plane.url}/tokens")

    other, _ = tabs.blank()
    other.goto(f"{tabs.plane.url}/login?next=//example.org/")
    other.fill("#code", tabs.link().split("code=")[1])
    other.click("button:has-text('Log in')")
    other.wait_for_url(f"{tabs.plane.url}/")


@pytest.mark.parametrize("cookie", [None, "un_session_wrong", ""])
def test_every_route_refuses_strangers(plane: ControlPlane, cookie: str | None) -> None:
    """Without a valid session every page leads to the login, and every form does nothing."""
    cookies = {} if cookie is None else {"unisono_session": cookie}
    with httpx.Client(base_url=plane.url, cookies=cookies, trust_env=False) as client:
        for path in PAGES:
            answer = client.get(path)
            assert (answer.status_code, answer.headers["location"].split("?")[0]) == (
                303,
                "/login",
            ), path
        for path in FORMS:
            answer = client.post(path, data={"csrf_token": "x"})
            assert answer.status_code == 303, path
            assert answer.headers["location"] == "/login"


def test_a_bearer_token_opens_no_page(plane: ControlPlane) -> None:
    """Pages know sessions only: a token in a header is for the API."""
    headers = {"Authorization": f"Bearer {plane.token('admin')}"}
    assert httpx.get(plane.url, headers=headers, trust_env=False).status_code == 303


def test_forms_from_elsewhere_are_refused(tabs: Tabs) -> None:
    """A form without the session's CSRF token, or from another site, changes nothing."""
    page, _ = tabs.open()
    cookies = {c["name"]: c["value"] for c in page.context.cookies()}
    page.goto(f"{tabs.plane.url}/tokens")
    csrf = page.locator("form.form [name=csrf_token]").get_attribute("value") or ""
    form = {"role": "viewer", "name": "stolen", "hours": "1"}
    with httpx.Client(base_url=tabs.plane.url, cookies=cookies, trust_env=False) as client:
        assert client.post("/tokens", data=form).status_code == 403
        assert client.post("/tokens", data=form | {"csrf_token": "x"}).status_code == 403
        good = form | {"csrf_token": csrf}
        foreign = client.post("/tokens", data=good, headers={"Origin": "https://example.org"})
        assert foreign.status_code == 403
        assert "stolen" not in client.get("/tokens").text
        assert client.post("/tokens", data=good | {"name": "mine"}).status_code == 200
        login = client.post("/login", data={"code": "x"}, headers={"Origin": "https://example.org"})
        assert login.status_code == 403


def test_a_token_is_shown_once(tabs: Tabs) -> None:
    """A new token is shown at its making, and the list never shows it again."""
    page, watch = tabs.open("/tokens")
    page.fill("#name", "for w9")
    page.fill("#hours", "soon")
    watch.expected = ("422",)
    page.click("button:has-text('Make token')")
    expect(page.locator("#error-hours")).to_contain_text("'soon' is not a number of hours")
    assert page.input_value("#name") == "for w9"
    page.fill("#hours", "2")
    page.click("button:has-text('Make token')")
    token = page.inner_text("#new-token")
    assert token.startswith("un_join_")
    page.goto(f"{tabs.plane.url}/tokens")
    assert token not in page.content()
    row = page.locator("tr", has_text="for w9")
    row.get_by_role("button").click()
    expect(page.locator("tr", has_text="for w9")).to_contain_text("revoked")
    assert token not in tabs.plane.log()


def test_unknown_addresses(tabs: Tabs) -> None:
    """An unknown page is a page that says so; an unknown call of the API is JSON."""
    page, watch = tabs.open()
    watch.expected = ("404",)
    for path in ("/nowhere", "/jobs/j-nothing", "/nodes/nothing", "/nodes/..%2fx"):
        answer = page.goto(tabs.plane.url + path)
        assert answer is not None and answer.status == 404, path
        assert page.inner_text("h1") == "Not found"
    answer = httpx.get(f"{tabs.plane.url}/api/v1/nowhere", trust_env=False)
    assert answer.headers["content-type"] == "application/problem+json"
