"""Messages between processes: every field is checked, and an error names field and value."""

from __future__ import annotations

import json

import pytest

from collective.messages import (
    BadMessage,
    Device,
    Heartbeat,
    LogChunk,
    Metrics,
    Spooled,
    Steps,
    decode,
    encode,
    from_plain,
)

STEPS = Steps(
    attempt="a", rank=0, step=[1, 2], at=[1.5, 2.0], total=[0.1, 0.2], data=[0.0, 0.0],
    compute=[0.1, 0.1], exposed=[0.0, 0.0], optimizer=[0.0, 0.0], communication=[0.0, 0.0],
    waited=[0.0, float("inf")], sent=[1 << 40, 0], label=["step", "eval"],
)  # fmt: skip


def test_a_message_comes_back_as_it_was() -> None:
    """Nested parts, long numbers, infinities and absent parts survive the way through JSON."""
    for part in (
        {"steps": STEPS},
        {"metrics": Metrics(attempt="a", rank=1, step=None, values={"n": 3, "x": 0.5, "s": "t"})},
        {"log": LogChunk(attempt="a", rank=0, stream="stderr", offset=0, text="ž\n", size=3)},
    ):
        message = Spooled(number=7, at=1.5, **part)  # type: ignore[arg-type]
        assert decode(encode(message)) == message


def test_whole_numbers_stand_for_floats_only_where_floats_are_meant() -> None:
    """An integer in a column of floats becomes a float; in a metric it stays what it was."""
    body = json.loads(encode(Spooled(number=1, at=2.0, steps=STEPS)))
    body["at"], body["steps"]["total"] = 2, [1, 0.5]
    found = decode(json.dumps(body))
    assert isinstance(found, Spooled) and found.steps is not None
    assert type(found.at) is float and [type(v) for v in found.steps.total] == [float, float]
    metrics = from_plain(Metrics, {"attempt": "a", "rank": 0, "values": {"n": 64, "on": True}})
    assert type(metrics.values["n"]) is int and metrics.values["on"] is True
    assert metrics.step is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": [1, "2"]}, r"Spooled.steps.step\[1\]: expected int, got '2'"),
        ({"step": [True, 2]}, r"Spooled.steps.step\[0\]: expected int, got True"),
        ({"step": 3}, "Spooled.steps.step: expected a list, got 3"),
        ({"at": [None, 1.0]}, r"Spooled.steps.at\[0\]: expected float, got None"),
        ({"rank": 1.0}, "Spooled.steps.rank: expected int, got 1.0"),
    ],
)
def test_a_wrong_part_is_refused(change: dict[str, object], words: str) -> None:
    """Wherever the wrong value is, the message is refused as a whole."""
    body = json.loads(encode(Spooled(number=1, at=2.0, steps=STEPS)))
    body["steps"] |= change
    with pytest.raises(BadMessage, match=r"Spooled\.steps: .* is none of"):
        decode(json.dumps(body))
    with pytest.raises(BadMessage, match=words):
        from_plain(Steps, body["steps"], "Spooled.steps")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[]", "a message is a JSON object"),
        ('{"type": "nothing"}', "unknown message type 'nothing'"),
        ('{"type": "heartbeat"}', "Heartbeat.at is missing"),
        ('{"type": "heartbeat", "at": "now"}', "Heartbeat.at: expected float, got 'now'"),
    ],
)
def test_what_is_no_message_is_refused(text: str, words: str) -> None:
    """Each refusal says what is wrong."""
    with pytest.raises(BadMessage, match=words):
        decode(text)


def test_unknown_fields_are_ignored_and_literals_are_not() -> None:
    """A newer sender's further fields do no harm; a value outside a list of words does."""
    assert decode('{"type": "heartbeat", "at": 1.0, "new": 2}') == Heartbeat(at=1.0)
    with pytest.raises(BadMessage, match=r"Device.kind: 'tpu' is none of \('cuda', 'cpu'\)"):
        from_plain(Device, {"index": 0, "kind": "tpu", "name": "x"})
