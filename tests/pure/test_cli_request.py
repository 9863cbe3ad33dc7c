"""What `unisono job start` makes of its words and options, before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from unisono.commands import job
from unisono.commands.request import Request, UsageError, parse_on, parse_settings
from unisono.commands.token import parse_ttl

ARGUMENTS = [
    "I'm a student",
    'he said "-4C outside"',
    "",
    '{"a": "b c"}',
    "*",
    "$HOME;echo x",
    "模型 žluť 🐎",
    "-4C",
    "--",
    "--help",
    "--nodes",
    "two\nlines",
    "x" * 100_000,
]


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """The requests that commands would submit; the commands end where the network begins."""
    seen: list[Request] = []

    def take(work: Any) -> None:
        seen.extend(cell.cell_contents for cell in work.__closure__ if _is_request(cell))
        raise typer.Exit

    monkeypatch.setattr(job, "run", take)
    return seen


def _is_request(cell: Any) -> bool:
    return isinstance(cell.cell_contents, Request)


def start(*words: str) -> Any:
    return CliRunner().invoke(job.app, ["start", *words])


def test_arguments_are_never_reinterpreted(requests: list[Request]) -> None:
    """Whatever stands behind -- reaches the request as the same list, also a second --."""
    result = start("train.py", "--nodes", "2", "--", *ARGUMENTS)
    assert result.exit_code == 0, result.output
    (request,) = requests
    assert request.nodes == 2
    body = request.body(digest="d", script="train.py")
    assert body["script"] == "train.py"
    assert body["args"] == ARGUMENTS


def test_a_command_is_a_list_and_no_shell_line(requests: list[Request]) -> None:
    """With --command the words are the command, and no files are sent unless a folder is named."""
    result = start("--nodes", "1", "--command", "--", "bash", "-c", "echo $RANK; exit 3")
    assert result.exit_code == 0, result.output
    (request,) = requests
    assert not request.packs()
    body = request.body(digest=None, script=None)
    assert body == {"nodes": 1, "command": ["bash", "-c", "echo $RANK; exit 3"]}


def test_all_options_reach_the_body(requests: list[Request]) -> None:
    """Every option has its field, spelled as the REST interface spells it."""
    result = start(
        *("s.py", "--on", "w1:4,w2", "--name", "n", "--env", "train", "--strategy", "ring"),
        *("--engine", "gloo", "--replace-backend", "--workdir", "sub", "--grace", "2"),
        *("--set", "A=b=c", "--set", "EMPTY=", "--no-bundle"),
    )
    assert result.exit_code == 0, result.output
    (request,) = requests
    assert not request.packs()
    assert request.body(digest=None, script=None) == {
        "script": "s.py",
        "args": [],
        "on": {"w1": 4, "w2": 1},
        "name": "n",
        "env_name": "train",
        "strategy": "ring",
        "engine": "gloo",
        "replace_backend": True,
        "workdir": "sub",
        "grace": 2.0,
        "set": {"A": "b=c", "EMPTY": ""},
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "nothing to start: name a script"),
        (("--command",), "a command behind --"),
        (("s.py", "--on", "w1", "--nodes", "2"), "drop --nodes"),
        (("s.py", "--all-free", "--on", "w1"), "drop --nodes and --on"),
        (("s.py", "--python", "/p", "--env", "e"), "give one of them"),
        (("s.py", "--no-bundle", "--include", "."), "drop --include"),
        (("s.py", "--script-only", "--include", "."), "give one"),
        (("--command", "--bundle", "--", "ls"), "name the folder to send with --include"),
        (("s.py", "--on", "w1:x"), "'w1:x' is not NODE:RANKS"),
        (("s.py", "--on", "w1:1,w1:2"), "'w1' is named twice"),
        (("s.py", "--set", "A"), "expected KEY=VALUE"),
        (("s.py", "--set", "A=1", "--set", "A=2"), "given twice"),
        (("s.py", "--", "\udce9"), "argument 1 is not UTF-8"),
    ],
)
def test_contradictions_are_usage_errors(
    requests: list[Request], words: tuple[str, ...], message: str
) -> None:
    """The message names the options, and the exit code is that of wrong usage."""
    result = start(*words)
    assert result.exit_code == 2
    assert message in result.output
    assert requests == []


def test_on_takes_names_with_a_colon() -> None:
    """The last colon divides name and number."""
    assert parse_on("rack:1:4, w2:1") == {"rack:1": 4, "w2": 1}


@pytest.mark.parametrize("text", ["", "w1:0", "w1:-1", ":2", "w1:²", "w1:1,,w2:1"])
def test_on_refuses_what_it_cannot_read(text: str) -> None:
    """The whole text and the part at fault are in the message."""
    with pytest.raises(UsageError, match="is not NODE:RANKS"):
        parse_on(text)


def test_settings_keep_everything_behind_the_first_equals_sign() -> None:
    """A value may be empty, hold spaces, newlines and equals signs."""
    assert parse_settings(["A=", "B= x=y\n"]) == {"A": "", "B": " x=y\n"}


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30m", 1800), ("24h", 86_400), ("1.5d", 129_600)]
)
def test_durations(text: str, seconds: float) -> None:
    """A number and a unit."""
    assert parse_ttl(text) == seconds


@pytest.mark.parametrize("text", ["", "24", "h", "-1h", "0s", "1w"])
def test_durations_that_are_none(text: str) -> None:
    """Nothing is guessed."""
    with pytest.raises(ValueError, match="no duration"):
        parse_ttl(text)
