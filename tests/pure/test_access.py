"""Where the commands look for the control plane's address and a token."""

from __future__ import annotations

from pathlib import Path

import pytest

from unisono.access import OPERATOR_TOKEN, AccessError, locate


def test_the_default_is_this_machine(tmp_path: Path) -> None:
    """Without settings the data folder's own operator token speaks to the local control plane."""
    (tmp_path / OPERATOR_TOKEN).write_text("secret-1\n")
    access = locate({"UNISONO_DATA_DIR": str(tmp_path)})
    assert (access.url, access.token) == ("http://127.0.0.1:8700", "secret-1")


def test_a_token_file_wins(tmp_path: Path) -> None:
    """A named file is used, and a trailing slash of the address does no harm."""
    (tmp_path / "t").write_text("secret-2")
    env = {"UNISONO_URL": "https://head.example/", "UNISONO_TOKEN_FILE": str(tmp_path / "t")}
    access = locate(env)
    assert (access.url, access.token) == ("https://head.example", "secret-2")


def test_a_token_is_not_shown(tmp_path: Path) -> None:
    """The token stays out of what a traceback or a log line would show."""
    (tmp_path / "t").write_text("secret-3")
    assert "secret-3" not in repr(locate({"UNISONO_TOKEN_FILE": str(tmp_path / "t")}))


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"UNISONO_URL": "head:8700"}, "UNISONO_URL is 'head:8700'"),
        ({"UNISONO_URL": "http://u:p@head:8700"}, "holds a user or password"),
        ({"UNISONO_URL": "http://head:8700"}, "set UNISONO_TOKEN_FILE"),
        ({"UNISONO_DATA_DIR": "/nowhere"}, "/nowhere/operator.token does not exist"),
        ({"UNISONO_TOKEN_FILE": "/nowhere/t"}, "there is no file /nowhere/t"),
    ],
)
def test_what_is_missing_is_named(env: dict[str, str], message: str) -> None:
    """The message names the setting, the value and the way out."""
    with pytest.raises(AccessError) as caught:
        locate(env)
    assert message in str(caught.value)


def test_a_file_with_something_else_is_refused(tmp_path: Path) -> None:
    """A file that holds two words is no token, and its content is not shown."""
    (tmp_path / "t").write_text("not a-token")
    with pytest.raises(AccessError, match="does not hold exactly one token") as caught:
        locate({"UNISONO_TOKEN_FILE": str(tmp_path / "t")})
    assert "a-token" not in str(caught.value)
