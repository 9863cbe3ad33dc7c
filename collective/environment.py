"""Settings that come from the environment, refused by name where they have no meaning. Pure."""

from __future__ import annotations

import math
import os

__all__ = ["seconds"]


def seconds(name: str, default: float) -> float:
    """The time that variable `name` says, or `default`.

    Raises:
        ValueError: it says no number of seconds.
    """
    text = os.environ.get(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} is {text!r}; it is a number of seconds, 0 or more")
    return value
