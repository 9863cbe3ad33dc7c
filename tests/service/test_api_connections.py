"""Requests of watchers and agents that are answered, or refused, before anything is done."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
from control_plane import Api
from scripted_agent import ScriptedAgent
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from collective.messages import AGENT_PROTOCOL, Fenced

pytestmark = pytest.mark.timeout(60)
MakeAgent = Callable[..., ScriptedAgent]


@pytest.mark.parametrize("path", ["/healthz", "/login", "/api/v1/jobs", "/nowhere", "/static/x"])
def test_head_is_get_without_its_body(api: Api, path: str) -> None:
    """HEAD has the status and headers of GET, for whoever watches the service, and no body."""
    with httpx.Client(base_url=api.server.url, trust_env=False) as stranger:
        head, get = stranger.head(path), stranger.get(path)
    assert int(head.headers["content-length"]) > 0
    for answer in (head, get):
        # pages carry the time at which they were made
        del answer.headers["date"], answer.headers["content-length"]
    assert (head.status_code, head.headers) == (get.status_code, get.headers)
    assert head.content == b"" != get.content


def test_head_of_a_stream_ends(api: Api) -> None:
    """HEAD of an event stream is answered at once, and its connection serves the next request."""
    answer = api.http.head("/events")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert api.http.get("/nodes").status_code == 200


def test_a_refused_agent_is_one_line_in_the_log(api: Api, make_agent: MakeAgent) -> None:
    """A wrong credential, a removed node's and another version: each one line with the reason."""
    gone, other = make_agent(api.server, "w1"), make_agent(api.server, "w2", connected=False)
    api.http.delete("/nodes/w1").raise_for_status()
    gone.expect(Fenced)
    before = len(api.server.log())
    for credential, protocol, status in (
        ("un_node_wrong", AGENT_PROTOCOL, 401),
        (gone.credential, AGENT_PROTOCOL, 401),
        (other.credential, "unisono-agent.0", 426),
    ):
        with pytest.raises(InvalidStatus, match=str(status)):
            connect(
                f"ws{api.server.url.removeprefix('http')}/api/v1/agent",
                additional_headers={"Authorization": f"Bearer {credential}"},
                subprotocols=[Subprotocol(protocol)],
                proxy=None,
            )
    told = api.server.log()[before:].splitlines()
    assert len(told) == 3, told
    for line, words in zip(told, ("credential", "credential", "unisono-agent.0"), strict=True):
        assert "WARNING unisono.agents: an agent at 127.0.0.1 was refused" in line
        assert words in line and "un_node" not in line
