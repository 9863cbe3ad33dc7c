"""Settings that come from the environment, refused by name where they have no meaning. Pure."""

from __future__ import annotations

import math
import os

__all__ = ["advertised", "seconds"]


def advertised() -> list[str]:
    """The addresses that ``UNISONO_ADVERTISE`` says, the best first; none where it is not set."""
    given = os.environ.get("UNISONO_ADVERTISE", "")
    return [part.strip() for part in given.split(",") if part.strip()]


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
