"""REST as clients meet it: errors, pages, tokens, logins, bundles, logs, events, meetings."""

from __future__ import annotations

import concurrent.futures
import gzip
import io
import json
import re
import resource
import tarfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from control_plane import Api, ControlPlane, read_events
from scripted_agent import ScriptedAgent
from sqlalchemy import insert
from waiting import eventually
from websockets.exceptions import ConnectionClosed, InvalidStatus

import migrations
from api import models
from api.storage import open_engine
from collective.messages import Fenced

pytestmark = pytest.mark.timeout(60)
MakeAgent = Callable[..., ScriptedAgent]


@pytest.fixture
def running(api: Api, make_agent: MakeAgent) -> tuple[str, str, ScriptedAgent]:
    """A job of two ranks on one node; its id, its attempt, and the node."""
    agent = make_agent(api.server, "w1")
    job = api.start(ranks_per_node=2)["id"]
    agent.prepare()
    attempt = agent.launch().attempt
    api.until(job, "running")
    return job, attempt, agent


def problem(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """The answer's body, which must be a problem with this status and code."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body = dict(answer.json())
    assert body["status"] == status and body["code"] == code and body["detail"]
    return body


# --- errors and documents ---------------------------------------------------------------


def test_every_error_is_a_problem(api: Api) -> None:
    """Wrong addresses, methods and inputs are answered in one shape that names the field."""
    problem(api.http.get("/nothing"), 404, "not-found")
    problem(api.http.put("/jobs"), 405, "method-not-allowed")
    problem(api.http.get("/jobs/j-none"), 404, "job-unknown")
    problem(api.http.get("/nodes/w77"), 404, "node-unknown")
    problem(api.http.get("/jobs?cursor=xyz"), 422, "cursor-invalid")
    problem(api.http.get("/jobs?limit=100000"), 422, "limit-invalid")
    body = problem(api.http.post("/jobs", content=b"{nope"), 415, "media-type-unsupported")
    assert "Content-Type: application/json" in body["detail"]
    json_text = {"Content-Type": "application/json"}
    body = problem(
        api.http.post("/jobs", content=b"{nope", headers=json_text), 422, "input-invalid"
    )
    assert "not JSON, at character 1" in body["detail"]
    body = problem(
        api.http.post("/jobs", json={"script": "a", "nodes": "two"}), 422, "input-invalid"
    )
    assert body["fields"][0]["field"] == "nodes" and "'two'" in body["fields"][0]["message"]
    large = api.http.post("/jobs", json={"script": "a", "args": ["x" * (5 << 20)]})
    problem(large, 413, "body-too-large")
    # without a length beforehand it is counted as it comes
    parts = (b"x" * (1 << 20) for _ in range(6))
    problem(api.http.post("/jobs", content=parts, headers=json_text), 413, "body-too-large")


def test_answers_cannot_be_framed_or_sniffed(api: Api) -> None:
    """Every answer carries the headers that keep browsers from guessing and framing."""
    for path in ("/jobs", "/nothing", "/version"):
        headers = api.http.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["cache-control"] == "no-store"
        # over http a browser would only complain of it, on the console of each page
        assert "cross-origin-opener-policy" not in headers


def test_every_call_refuses_strangers(api: Api) -> None:
    """No call of the API but those made for strangers answers without a token or to a wrong one."""
    schema = api.http.get("/openapi.json").json()
    open_to_all = {"/healthz", "/readyz", "/version", "/api/v1/session", "/api/v1/openapi.json"}
    checked = 0
    with httpx.Client(base_url=api.server.url, trust_env=False) as stranger:
        for path, calls in schema["paths"].items():
            if path in open_to_all or not path.startswith("/api/"):
                continue
            address = re.sub(r"\{[^}]+\}", "1", path).replace("/logs/1", "/logs/stdout")
            for method in calls:
                for headers in ({}, {"Authorization": "Bearer un_api_wrong"}):
                    answer = stranger.request(method, address, headers=headers, json={})
                    # A body that is wrong in itself may be told before the caller is asked.
                    assert answer.status_code in (401, 422), (method, path, answer.text)
                    checked += 1
    assert checked >= 40


def test_openapi_has_examples(api: Api) -> None:
    """The description can be read without a token, and shows what each call takes and gives."""
    with api.server.client(None) as stranger:
        schema = stranger.get("/openapi.json").json()
    assert "/api/v1/jobs/{job_id}/cancel" in schema["paths"]
    schemas = schema["components"]["schemas"]

    def shown(part: object) -> bool:
        text = json.dumps(part)
        return '"example' in text or any(
            shown(schemas[name]) for name in re.findall(r"#/components/schemas/(\w+)", text)
        )

    for path, calls in schema["paths"].items():
        for method, call in calls.items():
            parts = [call.get("requestBody", {})]
            parts += [body for code, body in call["responses"].items() if code.startswith("2")]
            for part in parts:
                if "application/json" in part.get("content", {}):
                    assert shown(part), f"no example: {method} {path}"


def test_health_needs_no_token(api: Api) -> None:
    """Liveness, readiness and version are for anyone."""
    with httpx.Client(base_url=api.server.url, trust_env=False) as stranger:
        assert stranger.get("/healthz").json() == {"status": "ok"}
        assert stranger.get("/readyz").json() == {"status": "ready"}
        assert stranger.get("/api/v1/version").json()["agent_protocol"] == "unisono-agent.1"


# --- jobs -------------------------------------------------------------------------------


def test_an_idempotency_key_starts_one_job(api: Api) -> None:
    """The same key and body give the same job, also at once; another body is refused."""
    key = {"Idempotency-Key": uuid.uuid4().hex}
    body = {"script": "a.py", "on": {"w9": 1}}

    def post(_: int) -> httpx.Response:
        return api.http.post("/jobs", json=body, headers=key)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(post, range(8)))
    assert {answer.status_code for answer in answers} == {201}
    ids = {answer.json()["id"] for answer in answers}
    assert len(ids) == 1
    replays = [answer.headers.get("idempotency-replayed") for answer in answers]
    assert replays.count(None) == 1
    other = api.http.post("/jobs", json=body | {"args": ["x"]}, headers=key)
    problem(other, 409, "idempotency-key-reused")
    api.http.post(f"/jobs/{ids.pop()}/cancel").raise_for_status()


def test_pages_are_stable_while_jobs_arrive(api: Api) -> None:
    """Paging through a list that grows meanwhile shows each older job exactly once."""
    ids = [api.start(name=f"page {number}", on={"w9": 1})["id"] for number in range(9)]
    seen: list[str] = []
    cursor = None
    while True:
        query = {"limit": 2, "state": "queued"} | ({"cursor": cursor} if cursor else {})
        page = api.http.get("/jobs", params=query).raise_for_status().json()
        assert len(page["items"]) <= 2
        seen += [job["id"] for job in page["items"]]
        ids.append(api.start(on={"w9": 1})["id"])
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert [job for job in seen if job in ids[:9]] == list(reversed(ids[:9]))
    assert len(seen) == len(set(seen))
    for job in ids:
        api.http.post(f"/jobs/{job}/cancel").raise_for_status()


def test_markup_stays_text_and_control_characters_are_refused(api: Api) -> None:
    """Names with markup come back unchanged; what cannot be shown is refused by name."""
    for name in ("<img src=x onerror=alert(1)>", "a'b\"c", "javascript:alert(1)", "${7*7}"):
        job = api.start(name=name, on={"w9": 1})
        assert job["name"] == name
        api.http.post(f"/jobs/{job['id']}/cancel").raise_for_status()
    for name in ("a\u202eb", "a\nb", "x" * 10_000, " "):
        answer = api.http.post("/jobs", json={"script": "a", "name": name})
        assert problem(answer, 422, "input-invalid")["fields"][0]["field"] == "name"


# --- tokens and logins ------------------------------------------------------------------


def test_tokens_have_roles_and_can_be_revoked(api: Api) -> None:
    """A viewer looks and does not touch; an operator makes no operators; revoked is revoked."""
    made = api.http.post("/tokens", json={"name": "wall", "role": "viewer"}).json()
    with api.server.client(None) as viewer:
        viewer.headers["Authorization"] = f"Bearer {made['token']}"
        assert viewer.get("/jobs").status_code == 200
        problem(viewer.post("/jobs", json={"script": "a"}), 403, "role-missing")
        problem(viewer.get("/tokens"), 403, "role-missing")
        with viewer.stream("GET", "/events") as stream:
            events = read_events(stream)
            assert next(events)["event"] == "snapshot"
            assert api.http.delete(f"/tokens/{made['id']}").status_code == 204
            last = [event for event in events if event["event"] != "beat"][-1]
        assert last["data"]["reason"] == "login-over"
        problem(viewer.get("/jobs"), 401, "not-authenticated")
    answer = api.http.post("/tokens", json={"name": "x", "role": "admin"})
    problem(answer, 403, "role-missing")
    with api.server.client("admin") as admin:
        made = admin.post("/tokens", json={"name": "x", "role": "operator", "ttl": 60}).json()
        assert made["expires_at"] - made["created_at"] == pytest.approx(60)
        listed = admin.get("/tokens").json()["items"]
        assert made["id"] in {token["id"] for token in listed}
        assert made["token"] not in str(listed)


def test_a_login_code_works_once(api: Api) -> None:
    """A code becomes a session with a guarded cookie, and is dead afterwards."""
    made = api.http.post("/login-codes").json()
    assert made["url"] == f"{api.server.url}/login#code={made['code']}"
    with api.server.client(None) as browser:
        answer = browser.post("/session", json={"code": made["code"]})
        assert answer.status_code == 201
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=lax" in cookie
        problem(browser.post("/session", json={"code": made["code"]}), 401, "code-invalid")
        who = browser.get("/session").json()
        assert who["role"] == "operator" and who["csrf_token"] == answer.json()["csrf_token"]
        assert browser.get("/jobs").status_code == 200
        job = {"script": "a", "on": {"w9": 1}}
        problem(browser.post("/jobs", json=job), 403, "csrf-token-wrong")
        guard = {"X-CSRF-Token": who["csrf_token"]}
        elsewhere = guard | {"Origin": "http://evil.example"}
        problem(browser.post("/jobs", json=job, headers=elsewhere), 403, "origin-refused")
        started = browser.post("/jobs", json=job, headers=guard | {"Origin": api.server.url})
        assert started.status_code == 201
        cancel = f"/jobs/{started.json()['id']}/cancel"
        assert browser.post(cancel, headers=guard).status_code == 202
        session = browser.cookies["unisono_session"]
        assert browser.request("DELETE", "/session", headers=guard).status_code == 204
        browser.cookies.set("unisono_session", session)
        problem(browser.get("/jobs"), 401, "not-authenticated")


def test_first_start_prints_a_login_link_and_a_join_command(
    make_server: Callable[..., ControlPlane],
) -> None:
    """What the first start prints lets a browser and a node in; the second prints no code."""
    server = make_server()
    said = server.log()
    link = re.search(r"(http://127\.0\.0\.1:\d+)/login#code=(\S+)", said)
    assert link is not None and link[1] == server.url
    assert f"worker join {server.url} --token-file {server.data_dir}/join.token" in said
    for name in ("operator", "admin", "join"):
        path = server.data_dir / f"{name}.token"
        assert path.stat().st_mode & 0o777 == 0o600
        assert server.token(name) not in said
    with server.client(None) as browser:
        answer = browser.post("/session", json={"code": link[2]})
        assert answer.json()["role"] == "admin"
    second = ControlPlane(server.data_dir, port=server.port)
    with pytest.raises(AssertionError, match="another server uses the data folder"):
        second.start()
    elsewhere = ControlPlane(server.data_dir.with_name("other"), port=server.port)
    with pytest.raises(AssertionError, match=f"cannot listen on 127.0.0.1 port {server.port}"):
        elsewhere.start()
    tokens = [server.token(name) for name in ("operator", "join")]
    assert server.stop() == 0
    server.start()
    assert tokens == [server.token(name) for name in ("operator", "join")]
    assert server.log().count("login#code=") == 1


def test_no_token_is_ever_logged(make_server: Callable[..., ControlPlane]) -> None:
    """Neither good nor wrong tokens show up in the server's own log at its most talkative."""
    server = make_server(log_level="debug")
    wrong = "un_api_" + uuid.uuid4().hex
    with server.client(None) as client:
        client.headers["Authorization"] = f"Bearer {wrong}"
        client.get("/jobs")
        client.post("/session", json={"code": wrong})
        answer = client.post("/session", json={"code": {"x": wrong}})
        assert wrong not in answer.text
    with server.client() as client:
        client.get("/jobs").raise_for_status()
    server.stop()
    assert wrong not in server.log()
    assert server.token() not in server.log()


# --- nodes ------------------------------------------------------------------------------


def test_a_taken_name_is_refused(api: Api, make_agent: MakeAgent) -> None:
    """Another agent cannot take a node's name; the same agent may join again."""
    agent = make_agent(api.server, "w1")
    body = {"agent_id": uuid.uuid4().hex, "name": "w1", "hostname": "other"}
    with api.server.client("join") as client:
        problem(client.post("/join", json=body), 409, "name-taken")
        answer = client.post("/join", json=body | {"agent_id": agent.agent_id})
    assert answer.status_code == 201
    with pytest.raises(InvalidStatus, match="401"):
        agent.open()
    agent.credential = answer.json()["credential"]
    assert agent.connect().name == "w1"
    for token in ("operator", None):
        with api.server.client(token) as client:
            problem(client.post("/join", json=body), 401, "not-authenticated")


def test_an_older_start_of_an_agent_is_fenced_off(api: Api, make_agent: MakeAgent) -> None:
    """A newer start takes over; the older one is told to stop, also when it comes back."""
    old = make_agent(api.server, "w1")
    new = make_agent(api.server, "w2", connected=False)
    new.agent_id, new.credential, new.name = old.agent_id, old.credential, "w1"
    new.connect()
    assert "newer start" in old.expect(Fenced).reason
    old.open()
    old.send(old.hello())
    assert "newer start" in old.expect(Fenced).reason
    new.beat()
    assert api.node("w1")["connected"]


def test_a_removed_node_is_out(api: Api, make_agent: MakeAgent) -> None:
    """A drained node gets no job; a removed one is told so, and its credential is dead."""
    agent = make_agent(api.server, "w1")
    assert api.http.post("/nodes/w1/drain").json()["draining"]
    job = api.start()
    assert "w1: draining" in eventually(lambda: api.job(job["id"])["waiting_for"])
    assert not api.http.post("/nodes/w1/resume").json()["draining"]
    agent.prepare()
    problem(api.http.delete("/nodes/w1"), 409, "node-busy")
    assert api.http.delete("/nodes/w1", params={"force": True}).status_code == 204
    assert "removed" in agent.expect(Fenced).reason
    with pytest.raises(ConnectionClosed):
        agent.receive()
    with pytest.raises(InvalidStatus, match="401"):
        agent.open()
    problem(api.http.get("/nodes/w1"), 404, "node-unknown")
    assert api.until(job["id"], "lost")["cause"]["node"] == "w1"
    replacement = make_agent(api.server, "w1")
    assert replacement.connect().name == "w1"


def test_a_revoked_credential_closes_the_channel(api: Api, make_agent: MakeAgent) -> None:
    """Revoking a node's credential ends its connection at once."""
    agent = make_agent(api.server, "w1")
    with api.server.client("admin") as admin:
        tokens = admin.get("/tokens").json()["items"]
        mine = next(t for t in tokens if t["kind"] == "node" and not t["revoked_at"])
        assert admin.delete(f"/tokens/{mine['id']}").status_code == 204
    assert "revoked" in agent.expect(Fenced).reason
    with pytest.raises(InvalidStatus, match="401"):
        agent.open()


def test_a_bad_message_closes_the_channel(api: Api, make_agent: MakeAgent) -> None:
    """What is no message of the protocol is answered with a close that says why."""
    agent = make_agent(api.server, "w1")
    assert agent.socket is not None
    agent.socket.send('{"type": "heartbeat", "at": "soon"}')
    with pytest.raises(ConnectionClosed, match="expected float, got 'soon'"):
        agent.receive()
    assert agent.connect().name == "w1"


# --- bundles ----------------------------------------------------------------------------


def archive(*members: tarfile.TarInfo, data: bytes = b"print(1)\n") -> bytes:
    """A `.tar.gz` of members, the plain files with some data."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for member in members:
            if member.isfile():
                member.size = len(data)
            tar.addfile(member, io.BytesIO(data) if member.isfile() else None)
    return out.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    """A member of an archive."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def test_a_bundle_is_stored_by_its_digest(api: Api, make_agent: MakeAgent) -> None:
    """An upload can be named by a job and fetched by a node, unchanged."""
    body = archive(member("train.py"), member("lib", tarfile.DIRTYPE))
    stored = api.http.post("/bundles", content=body)
    assert stored.status_code == 201 and stored.json()["size"] == len(body)
    digest = stored.json()["digest"]
    assert api.http.post("/bundles", content=body).json()["digest"] == digest
    agent = make_agent(api.server, "w1")
    with api.server.client(None) as node:
        node.headers["Authorization"] = f"Bearer {agent.credential}"
        assert node.get(f"/bundles/{digest}").content == body
        problem(node.get(f"/bundles/{'0' * 64}"), 404, "bundle-unknown")
        problem(node.get("/jobs"), 403, "role-missing")
    unknown = api.http.post("/jobs", json={"script": "a", "bundle": "0" * 64})
    problem(unknown, 422, "bundle-unknown")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"no archive", "no .tar.gz"),
        (gzip.compress(b"x" * 2000), "no .tar.gz"),
        (archive(member("a"))[:-20], "no .tar.gz"),
        (archive(), "is empty"),
        (archive(member("../a")), "outside the bundle"),
        (archive(member("/a")), "outside the bundle"),
        (archive(member("a/b", tarfile.SYMTYPE, "../../c")), "link 'a/b'"),
        (archive(member("a", tarfile.FIFOTYPE)), "neither a file"),
    ],
    # archives hold the time: where two processes collect, the names would differ
    ids=["text", "other", "cut", "empty", "above", "absolute", "link", "pipe"],
)
def test_a_bundle_that_must_not_be_unpacked_is_refused(api: Api, body: bytes, words: str) -> None:
    """Archives that are damaged or reach outside their folder are not kept."""
    refusal = problem(api.http.post("/bundles", content=body), 422, "bundle-invalid")
    assert words in refusal["detail"]
    assert not list((api.server.data_dir / "bundles").glob("*.part"))


# --- logs, steps, events ----------------------------------------------------------------


def test_logs_are_read_in_ranges_and_followed(
    api: Api, running: tuple[str, str, ScriptedAgent]
) -> None:
    """Any range of the output can be read, and following it ends with the job."""
    job, attempt, agent = running
    path = f"/jobs/{job}/ranks/0/logs/stdout"
    offset = agent.say(attempt, 0, "žluť\n<script>\n", 0)
    agent.synchronise()
    whole = api.http.get(path)
    assert whole.headers["content-type"] == "text/plain; charset=utf-8"
    assert whole.text == "žluť\n<script>\n"
    assert whole.headers["unisono-size"] == whole.headers["unisono-next-offset"] == str(offset)
    part = api.http.get(path, params={"offset": -9, "limit": 4})
    assert part.content == b"<scr" and part.headers["unisono-offset"] == str(offset - 9)
    assert api.http.get(path, params={"offset": 10**9}).content == b""
    problem(api.http.get(f"/jobs/{job}/ranks/7/logs/stdout"), 404, "rank-unknown")
    with api.http.stream("GET", path, params={"follow": True, "offset": -9}) as following:
        chunks = following.iter_bytes()
        assert next(chunks) == b"<script>\n"
        agent.say(attempt, 0, "more\n", offset)
        assert next(chunks) == b"more\n"
        for rank in (0, 1):
            agent.exit(attempt, rank)
        agent.over(attempt)
        assert list(chunks) == []
    api.until(job, "completed")


def test_output_beyond_its_limit_is_cut_in_the_middle(
    make_server: Callable[..., ControlPlane], make_agent: MakeAgent
) -> None:
    """A rank that writes without end fills no disk: start and end stay, with a mark between."""
    server = make_server(log_limit=64 << 10)
    api, agent = Api(server), make_agent(server, "w1")
    job = api.start()["id"]
    agent.prepare()
    attempt = agent.launch().attempt
    offset = 0
    for block in range(20):
        text = "".join(f"line {block * 1000 + line:08d}\n" for line in range(1000))
        offset = agent.say(attempt, 0, text, offset)
    agent.synchronise()
    path = f"/jobs/{job}/ranks/0/logs/stdout"
    kept = sum(file.stat().st_size for file in (server.data_dir / "logs").rglob("0.stdout.*"))
    assert kept <= 64 << 10
    text = api.http.get(path).text
    assert text.startswith("line 00000000\n") and text.endswith("line 00019999\n")
    assert text.count("bytes were cut here") == 1
    assert api.http.get(path, params={"offset": -14}).text == "line 00019999\n"
    api.close()


def test_a_full_disk_stops_no_reader_and_no_cancel(
    make_server: Callable[..., ControlPlane], make_agent: MakeAgent
) -> None:
    """While nothing can be written jobs are refused, shown and cancelled; later all is stored."""
    server = make_server(node_timeout=20)
    api, agent = Api(server), make_agent(server, "w1")
    job = api.start()["id"]
    agent.prepare()
    attempt = agent.launch().attempt
    api.until(job, "running")
    agent.synchronise()
    assert server.process is not None
    limits = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)
    # No file of the server can be written any more, as on a full disk.
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (0, limits[1]))
    problem(api.http.post("/jobs", json={"script": "a"}), 507, "storage-full")
    body = archive(member("a"))
    problem(api.http.post("/bundles", content=body), 507, "storage-full")
    agent.say(attempt, 0, "kept\n", 0)
    assert api.job(job)["state"] == "running"
    assert api.http.post(f"/jobs/{job}/cancel").json()["state"] == "cancelling"
    assert agent.end().attempt == attempt
    assert api.job(job)["state"] == "cancelling"
    agent.held[attempt] = "running"
    agent.connect()
    agent.exit(attempt, 0, None, 15)
    agent.over(attempt)
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, limits)
    agent.synchronise()
    api.until(job, "cancelled")
    assert api.http.get(f"/jobs/{job}/ranks/0/logs/stdout").text == "kept\n"
    api.close()


def test_thousands_of_jobs_are_listed_in_small_pages(
    tmp_path: Path, make_server: Callable[..., ControlPlane]
) -> None:
    """A full store is read page by page, each bounded, without a job missing or doubled."""
    folder = tmp_path / "data0"
    folder.mkdir()
    engine = open_engine(f"sqlite:///{folder / 'unisono.db'}")
    migrations.upgrade(engine)
    rows = [
        {
            "id": f"j-{number}",
            "name": f"job {number}",
            "state": "queued" if number % 2 else "completed",
            "created_at": float(number),
            "spec": {"script": "a", "args": ["x" * 10_000], "on": {"w9": 1}},
            "nodes": [],
            "consequences": [],
            "created_by": "me",
        }
        for number in range(5000)
    ]
    with engine.begin() as connection:
        connection.execute(insert(models.Job), rows)
    engine.dispose()
    api = Api(make_server())
    seen: list[str] = []
    cursor: str | None = None
    while cursor is not None or not seen:
        query = {"limit": "200"} | ({"cursor": cursor} if cursor else {})
        answer = api.http.get("/jobs", params=query).raise_for_status()
        assert len(answer.content) < 1_000_000
        seen += [job["id"] for job in answer.json()["items"]]
        cursor = answer.json()["next_cursor"]
    assert seen == [f"j-{number}" for number in reversed(range(5000))]
    page = api.http.get("/jobs", params={"state": "completed"}).json()["items"]
    assert {job["state"] for job in page} == {"completed"}
    api.close()


def test_steps_come_in_columns(api: Api, running: tuple[str, str, ScriptedAgent]) -> None:
    """Steps can be read from a number on, the last ones, and of one rank only."""
    job, attempt, agent = running
    for rank in (0, 1):
        for first in (1, 11, 21):
            agent.steps(attempt, rank, first, 10)
    agent.synchronise()

    def steps(**query: Any) -> Any:
        return api.http.get(f"/jobs/{job}/steps", params=query).raise_for_status().json()

    page = steps(from_step=8, limit=5)
    assert [entry["step"] for entry in page["ranks"]] == [[8, 9, 10, 11, 12]] * 2
    assert page["next_step"] == 13
    assert steps(from_step=-3, rank=1)["ranks"][0]["step"] == [28, 29, 30]
    last = steps(from_step=25)
    assert last["next_step"] is None and len(last["ranks"][0]["total"]) == 6
    assert {len(column) for name, column in last["ranks"][0].items() if name != "rank"} == {6}
    assert [rank["step"] for rank in api.ranks(job)] == [30, 30]


def test_events_tell_what_happens_and_replay_what_was_missed(
    api: Api, running: tuple[str, str, ScriptedAgent]
) -> None:
    """A job's stream starts with all, goes on with changes, and can be taken up again."""
    job, attempt, agent = running
    agent.say(attempt, 0, "first\n", 0)
    agent.synchronise()
    path = f"/jobs/{job}/events"
    with api.http.stream("GET", path) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        events = read_events(stream)
        snapshot = next(events)
        assert snapshot["event"] == "snapshot"
        assert snapshot["data"]["job"]["state"] == "running"
        assert [rank["rank"] for rank in snapshot["data"]["ranks"]] == [0, 1]
        assert snapshot["data"]["logs"][0]["text"] == "first\n"
        agent.steps(attempt, 1, 1, 2)
        update = next(event for event in events if "steps" in event["data"])
        assert update["data"]["steps"][0]["step"] == [1, 2]
    agent.say(attempt, 0, "missed\n", 6)
    agent.synchronise()
    with api.http.stream("GET", path, headers={"Last-Event-ID": update["id"]}) as stream:
        events = read_events(stream)
        missed = next(event for event in events if "logs" in event["data"])
        assert missed["event"] == "update"
        expected = {"rank": 0, "stream": "stdout", "offset": 6, "next_offset": 13}
        assert missed["data"]["logs"] == [expected | {"text": "missed\n"}]
        for rank in (0, 1):
            agent.exit(attempt, rank)
        agent.over(attempt)
        rest = list(events)
    assert rest[-1]["event"] == "end" and rest[-1]["data"]["reason"] == "job-over"
    jobs = [event["data"]["job"] for event in rest if "job" in event["data"]]
    assert jobs[-1]["state"] == "completed"
    with api.http.stream("GET", path, headers={"Last-Event-ID": "other-1"}) as stream:
        names = [event["event"] for event in read_events(stream)]
    assert names == ["snapshot", "end"]


def test_cluster_events_tell_of_nodes_and_jobs(api: Api, make_agent: MakeAgent) -> None:
    """The cluster's stream shows nodes that come and go, and jobs as they change."""
    with api.http.stream("GET", "/events") as stream:
        events = read_events(stream)
        assert next(events)["event"] == "snapshot"
        make_agent(api.server, "w1")
        seen = next(e for e in events if e["data"].get("nodes"))["data"]["nodes"]
        assert seen[-1]["name"] == "w1"
        job = api.start(on={"w9": 1})["id"]
        shown = next(e for e in events if e["data"].get("jobs"))["data"]["jobs"]
        assert shown[0]["id"] == job
        api.http.post(f"/jobs/{job}/cancel").raise_for_status()
        api.http.delete("/nodes/w1").raise_for_status()
        gone = next(e for e in events if e["data"].get("nodes_removed"))["data"]
        assert gone["nodes_removed"] == ["w1"]


# --- rendezvous -------------------------------------------------------------------------


def meet(api: Api, group: str, node: str, port: int, **more: Any) -> httpx.Response:
    """One program comes to a meeting."""
    body = {"world_size": 2, "rank": None, "addresses": ["10.0.0.5"], "port": port, "node": node}
    body |= {"participant": f"participant-{port}"} | more
    return api.http.post(f"/rendezvous/{group}", json=body)


def test_programs_meet(api: Api) -> None:
    """Each program gets its rank and all members; every meeting is a new epoch and secret."""
    group = uuid.uuid4().hex
    secrets = set()
    for epoch in (1, 2):
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            first = pool.submit(meet, api, group, "b", 10 * epoch)
            second = pool.submit(meet, api, group, "a", 10 * epoch + 1, rank=0)
            answers = [first.result().raise_for_status(), second.result().raise_for_status()]
        one, two = (answer.json() for answer in answers)
        assert (one.pop("rank"), two.pop("rank")) == (1, 0)
        assert one == two and one["epoch"] == epoch
        assert [member["node"] for member in one["members"]] == ["a", "b"]
        secrets.add(one["secret"])
        again = meet(api, group, "b", 10 * epoch).json()
        assert again["rank"] == 1 and again["secret"] == one["secret"]
    assert len(secrets) == 2


def test_a_meeting_that_does_not_fill_says_how_many_came(
    make_server: Callable[..., ControlPlane],
) -> None:
    """Programs that wait alone are told so, and contradictions are refused at once."""
    api = Api(make_server(rendezvous_timeout=0.5))
    for second, code in ({"rank": 0}, "rank-taken"), ({"world_size": 3}, "world-size-differs"):
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            calls = [pool.submit(meet, api, code, "a", 1, rank=0)]
            calls.append(pool.submit(meet, api, code, "b", 2, **second))
            alone, other = sorted((c.result() for c in calls), key=lambda c: c.status_code)
        assert "1 of " in problem(alone, 408, "rendezvous-timeout")["detail"]
        problem(other, 409, code)
    api.close()
