"""Numbers, times and sizes as text, for the templates; `static/format.js` has the same rules."""

from __future__ import annotations

import math
import signal as signals
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlencode

NOTHING = "–"
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def num(value: Any) -> float | None:
    """A number from the API, where what JSON cannot hold is a string; None when it is none."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        return float(value)
    if value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    return None


def _special(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "∞" if value > 0 else "−∞"


def _round(value: float) -> int:
    """Halves go up, as in browsers."""
    return math.floor(value + 0.5)


def whole(value: Any) -> str:
    """A count, with separators."""
    number_ = num(value)
    if number_ is None:
        return NOTHING
    if not math.isfinite(number_):
        return _special(number_)
    return f"{_round(number_):,}".replace("-", "−")


def number(value: Any) -> str:
    """Four significant digits at most, without trailing zeros."""
    number_ = num(value)
    if number_ is None:
        return NOTHING
    if not math.isfinite(number_):
        return _special(number_)
    size = abs(number_)
    if size >= 1000:
        text = f"{_round(number_):,}"
    elif size and size < 1e-4:
        mantissa, exponent = f"{number_:.2e}".split("e")
        text = f"{mantissa}e{int(exponent):+d}"
    else:
        digits = 1 if size >= 100 else 2 if size >= 10 else 3 if size >= 1 else 4
        text = f"{number_:.{digits}f}".rstrip("0").rstrip(".")
    return text.replace("-", "−")


def percent(value: Any) -> str:
    """A share of one, as per cent."""
    number_ = num(value)
    if number_ is None:
        return NOTHING
    return f"{number_ * 100:.1f} %" if math.isfinite(number_) else _special(number_)


def duration(value: Any) -> str:
    """Seconds, in the unit that suits them."""
    number_ = num(value)
    if number_ is None:
        return NOTHING
    if not math.isfinite(number_):
        return _special(number_)
    if number_ < 0:
        return "−" + duration(-number_)
    if number_ == 0:
        return "0 s"
    if number_ < 1e-3:
        return f"{number_ * 1e6:.0f} µs"
    if number_ < 0.01:
        return f"{number_ * 1e3:.2f} ms"
    if number_ < 1:
        return f"{number_ * 1e3:.{1 if number_ < 0.1 else 0}f} ms"
    if number_ < 60:
        return f"{number_:.{2 if number_ < 10 else 1}f} s"
    return long(number_)


def long(seconds: float) -> str:
    """Whole seconds and above, for how long something took."""
    whole_ = int(seconds)
    if whole_ < 60:
        return f"{whole_} s"
    minutes, rest = divmod(whole_, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes:02d} min"
    return f"{hours // 24} d {hours % 24} h"


def ago(at: float, now: float) -> str:
    """How long before `now` a moment was."""
    seconds = now - at
    if seconds < 2:
        return "just now"
    for size, name in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {name} ago"
    return f"{int(seconds)} s ago"


def iso(at: float) -> str:
    """A moment for machines."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")


def moment(at: Any) -> str:
    """A moment for people, in UTC."""
    number_ = num(at)
    if number_ is None:
        return NOTHING
    return datetime.fromtimestamp(number_, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def clock(at: float) -> str:
    """The time of day, in UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S UTC")


def bytes_(value: Any) -> str:
    """A size in memory, in binary units."""
    size = num(value)
    if not size:
        return NOTHING
    power = min(int(math.log2(size)) // 10, len(_BYTES) - 1)
    return f"{size / 1024**power:.{0 if power == 0 else 1}f} {_BYTES[power]}"


def shorten(text: Any, limit: int) -> str:
    """At most `limit` characters; what is left out is marked."""
    whole_ = str(text)
    return whole_ if len(whole_) <= limit else whole_[: limit - 1] + "…"


def rank_name(value: Any) -> str:
    """`rank 3`, or a dash."""
    number_ = num(value)
    return NOTHING if number_ is None else f"rank {number_:.0f}"


def identical(value: Any) -> str:
    """Whether all replicas ended with the same parameters."""
    return {True: "identical", False: "differ"}.get(value, NOTHING)


def signal_name(number_: int) -> str:
    """`signal 9 (SIGKILL)`."""
    try:
        return f"signal {number_} ({signals.Signals(number_).name})"
    except ValueError:
        return f"signal {number_}"


def path_part(text: str) -> str:
    """Text as one part of a URL's path: nothing in it can change the path."""
    return quote(text, safe="")


def query(values: dict[str, Any]) -> str:
    """A query string of the values that are set."""
    return urlencode({key: value for key, value in values.items() if value})
