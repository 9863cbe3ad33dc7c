"""Settings that come from the environment, refused by name where they have no meaning. Pure."""

from __future__ import annotations

import math
import os
from numbers import Real

__all__ = ["LONGEST_TIMEOUT", "LONGEST_WAIT", "is_time", "seconds"]

#: seconds that a time may have that somebody gives, 31 years; Python's own limit is 292 of them
LONGEST_TIMEOUT = 1e9
#: seconds that are waited for at once: poll and epoll take milliseconds in 31 bits, which are 24
#: days, and after so many the time that is left is looked at again
LONGEST_WAIT = 1e6


def is_time(value: float) -> bool:
    """Whether `value` is a number of seconds, 0 or more, that can be waited for."""
    plain = isinstance(value, Real) and not isinstance(value, bool)
    return plain and 0 <= value <= LONGEST_TIMEOUT


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
    if not is_time(value):
        raise ValueError(
            f"{name} is {text!r}; it is a number of seconds, 0 or more, at most {LONGEST_TIMEOUT:g}"
        )
    return value
