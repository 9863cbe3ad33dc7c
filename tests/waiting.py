"""The one way in which tests wait for another process: ask again until it is so, or too late."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(condition: Callable[[], T], timeout: float = 10.0, what: str | None = None) -> T:
    """The first true value of `condition`, asked every few milliseconds for `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() >= deadline:
            raise AssertionError(f"not so within {timeout:g} s: {what or condition}")
        time.sleep(0.02)
