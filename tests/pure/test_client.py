"""The pure parts of the client: event streams and problem documents."""

from __future__ import annotations

import json

import pytest

from unisono.client import ApiError, EventParser
from unisono.commands.console import describe
from unisono.commands.follow import exit_code, state_text


def frame(number: int, data: object) -> bytes:
    text = json.dumps(data, ensure_ascii=False)
    return f"id: {number}\nevent: update\ndata: {text}\n\n".encode()


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_may_be_cut_anywhere(size: int) -> None:
    """Any division of the bytes gives the same events, also inside a character."""
    data = [{"at": 1.0, "text": "žluť\u2028🐎\x85"}, {"at": 2.0}]
    stream = b": hello\n\n" + frame(7, data[0]) + frame(8, data[1])
    parser = EventParser()
    events = [
        event
        for start in range(0, len(stream), size)
        for event in parser.feed(stream[start : start + size])
    ]
    assert [event.data for event in events] == data
    assert [event.id for event in events] == ["7", "8"]


def test_half_an_event_does_not_count_as_seen() -> None:
    """The id to resume from is that of the last whole event."""
    parser = EventParser()
    parser.feed(frame(7, {}) + frame(8, {})[:-1])
    assert parser.last_id == "7"


@pytest.mark.parametrize(
    "fields",
    [[{"field": "on.w9", "message": "no such node"}], {"on.w9": "no such node"}],
)
def test_a_problem_is_told_with_its_fields(fields: object) -> None:
    """Detail, code and every field at fault are shown."""
    error = ApiError(422, {"detail": "The job is not valid.", "code": "invalid", "fields": fields})
    assert describe(error) == "The job is not valid. [invalid]\n  on.w9: no such node"


def test_an_answer_without_a_problem_document_still_has_words() -> None:
    """A proxy's own error page gives at least the status."""
    assert describe(ApiError(502, {"detail": "Bad Gateway: x"})) == "Bad Gateway: x [http-502]"


@pytest.mark.parametrize(
    ("state", "code"), [("completed", 0), ("failed", 1), ("cancelled", 3), ("lost", 4)]
)
def test_only_completed_is_success(state: str, code: int) -> None:
    """Each end of a job has its exit code, and only one of them is 0."""
    assert exit_code({"state": state}) == code


def test_the_first_cause_is_told_first() -> None:
    """A failure names rank, node, error and signal, then how many others followed."""
    job = {
        "id": "j-1",
        "state": "failed",
        "started_at": 1.0,
        "ended_at": 3.5,
        "cause": {
            "rank": 2,
            "node": "w2",
            "kind": "ValueError",
            "message": "no data",
            "exit_code": None,
            "signal": 9,
        },
        "consequences": [{"rank": 0}, {"rank": 1}],
    }
    assert state_text(job) == (
        "j-1 failed after 2.5 s: rank 2 on node w2: ValueError: no data (signal 9)\n"
        "  2 other ranks failed in consequence"
    )


def test_a_queued_job_says_what_it_waits_for() -> None:
    """The control plane's words are passed on."""
    job = {"id": "j-1", "state": "queued", "waiting_for": "2 free devices on w1"}
    assert state_text(job) == "j-1 queued: waits for 2 free devices on w1"
