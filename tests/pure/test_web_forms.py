"""The form for a new job: what is typed becomes exactly that request, or an error at its field."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from web import forms

AWKWARD = [
    "I'm a student",
    'he said "-4C outside"',
    "",
    '{"a": "b c"}',
    "*",
    "$HOME;echo x",
    "模型 žluť 🐎",
    "-4C",
    "--",
    "two\nlines",
    "x" * 100_000,
]


def filled(**typed: str) -> forms.Values:
    values = forms.blank()
    values["script"] = "/srv/train.py"
    values.update(typed)
    return values


def test_awkward_arguments_pass_unchanged() -> None:
    """Spaces, quotes, dashes, line ends and a very long value reach the request unchanged."""
    request, errors = forms.read(forms.typed(filled(args=json.dumps(AWKWARD))))
    assert not errors
    assert request is not None
    assert request.args == AWKWARD


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))))
def test_any_list_of_text_passes(items: list[str]) -> None:
    """Every JSON list of text is taken as it is."""
    request, errors = forms.read(filled(args=json.dumps(items)))
    assert not errors
    assert request is not None
    assert request.args == items


@pytest.mark.parametrize(
    ("typed", "field", "part"),
    [
        ({"args": "--epochs 5"}, "args", '["--epochs", "5"]'),
        ({"args": '{"a": 1}'}, "args", "JSON list is needed"),
        ({"args": '["--epochs", 5]'}, "args", "Item 2 is 5"),
        ({"args": '["a\\u0000b"]'}, "args", "NUL"),
        ({"script": " "}, "script", "missing"),
        (
            {"kind": "upload", "bundle": "0" * 64, "entry": "a.py", "workdir": "../x"},
            "workdir",
            "leads out of the bundle",
        ),
        (
            {"kind": "upload", "bundle": "0" * 64, "entry": "../a.py"},
            "entry",
            "leads out of the bundle",
        ),
        ({"nodes": "two"}, "nodes", "'two' is not a whole number"),
        ({"ranks_per_node": "0"}, "ranks_per_node", "'0' is not"),
        ({"place": "on", "on": "w1"}, "on", "'w1' is not NODE:RANKS"),
        ({"place": "on", "on": "w1:1, w1:2"}, "on", "named twice"),
        ({"place": "on", "on": ""}, "on", "at least one node"),
        ({"kind": "command", "command": "[]"}, "command", "missing"),
        ({"kind": "command", "command": '["python train.py"]'}, "command", "no shell splits it"),
        ({"kind": "upload"}, "file", "Choose"),
        ({"kind": "?"}, "kind", "none of"),
        ({"set": "LR"}, "set", "Line 1 is not KEY=VALUE"),
        ({"set": '{"A": 1}'}, "set", "A is 1, not text"),
        ({"set": '{"A": "1"'}, "set", "JSON object"),
        ({"grace": "soon"}, "grace", "'soon' is not a number of seconds"),
        ({"grace": "-1"}, "grace", "greater than or equal to 0"),
        ({"grace": "nan"}, "grace", "not a number"),
        ({"set": "RANK=1"}, "set", "RANK is set by Unisono"),
        ({"strategy": "star"}, "strategy", "there is no strategy 'star'; accepted are"),
        ({"engine": "mpi"}, "engine", "unisono"),
        ({"python": "/p", "env_name": "train"}, "python", "either python"),
        ({"name": "a\u202eb"}, "name", "U+202E"),
    ],
)
def test_an_error_stands_at_its_field(typed: dict[str, str], field: str, part: str) -> None:
    """What cannot be meant is refused beside the field that says it, with the value."""
    request, errors = forms.read(filled(**typed))
    assert request is None
    assert part in errors[field]


def test_placement_and_variables() -> None:
    """Named nodes, all free devices and variables with any value are read as typed."""
    request, _ = forms.read(filled(place="on", on="w1:4, [::1]:2", set="A= b=c \nB="))
    assert request is not None
    assert request.on == {"w1": 4, "[::1]": 2}
    assert request.set == {"A": " b=c ", "B": ""}
    request, _ = forms.read(filled(place="all"))
    assert request is not None and request.all_free


@pytest.mark.parametrize(
    "spec",
    [
        {"script": "/a.py", "args": AWKWARD, "nodes": 2, "ranks_per_node": 4, "set": {"A": "1"}},
        {"command": ["python", "-m", "x y"], "on": {"w1": 2, "w2": 1}, "engine": "gloo"},
        {"script": "t.py", "args": [], "bundle": "0" * 64, "all_free": True, "strategy": "tree:2"},
        {"script": "/a", "all_free": True, "engine": "gloo", "replace_backend": True, "grace": 2.5},
        {"script": "/a", "on": {"w": 1}, "set": {"A": "two\nlines\r\n=", "B": " "}, "grace": 0.0},
    ],
)
def test_a_job_can_be_started_again(spec: dict[str, object]) -> None:
    """The form filled in from a job's spec means that spec again."""
    request, errors = forms.read(forms.of_spec("again", spec))
    assert not errors
    assert request is not None
    again = request.model_dump(exclude_defaults=True)
    wanted = {key: value for key, value in spec.items() if value not in ([], "auto")}
    assert again == {"name": "again"} | wanted
