"""Sizes, rates and times in words: the one parser and the one formatter.

K, M, G and T are decimal; Ki, Mi, Gi and Ti are binary.  A size counts bytes (`64Ki`, `14GB`), or
bits where it says so; a rate always says which of the two (`1Gbit`, `50GB/s`).
"""

from __future__ import annotations

import re
from fractions import Fraction

__all__ = [
    "format_rate",
    "format_size",
    "format_time",
    "parse_rate",
    "parse_size",
    "parse_time",
    "spell_size",
]

_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_FACTORS = _DECIMAL | _BINARY

_FORM = re.compile(
    r"(?P<number>\d+(\.\d+)?) ?(?P<prefix>[KMGT]i?|k)?(?P<unit>B|bit)?(?P<per>/s)?", re.ASCII
)
_PREFIXES = "prefixes are K, M, G, T (1000) and Ki, Mi, Gi, Ti (1024)"
_SIZES = f"a size is a whole number of bytes such as 8, 64Ki, 25Mi, 14GB or 1Gbit; {_PREFIXES}"
_RATES = f"a rate says bit or B, such as 1Gbit, 1Gbit/s, 50GB/s or 100MiB/s; {_PREFIXES}"

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_TIME_FORM = re.compile(r"(?P<number>[0-9]+(\.[0-9]+)?) ?(?P<unit>[mun\u00b5]?s)?")
_TIMES = "a time is 0 or says its unit, such as 50us, 1.5ms or 2s"


def parse_size(text: str) -> int:
    """Bytes of a size: `8`, `64Ki`, `25MiB`, `1.5G`, `1Gbit`.

    Raises:
        ValueError: the text is no size, or no whole number of bytes; shows the accepted forms.
    """
    match = _FORM.fullmatch(text.strip())
    if match is None or match["per"]:
        raise ValueError(f"{text!r} is no size: {_SIZES}")
    size = _bytes(match)
    if size.denominator != 1:
        raise ValueError(f"{text!r} is {float(size)} bytes: {_SIZES}")
    return int(size)


def parse_rate(text: str) -> float:
    """Bytes per second of a rate: `1Gbit`, `50 GB/s`, `2.5Gbit/s`.

    Raises:
        ValueError: the text is no rate, does not say bit or B, or is 0; shows the accepted forms.
    """
    match = _FORM.fullmatch(text.strip())
    if match is None or not match["unit"]:
        raise ValueError(f"{text!r} is no rate: {_RATES}")
    rate = float(_bytes(match))
    if not 0 < rate < float("inf"):
        raise ValueError(f"{text!r} is not above 0: {_RATES}")
    return rate


def parse_time(text: str) -> float:
    """Seconds of a time: `0`, `50us`, `50 µs`, `1.5ms`, `2s`.

    Raises:
        ValueError: the text is no time, or a number without a unit; shows the accepted forms.
    """
    match = _TIME_FORM.fullmatch(text.strip().replace("\u03bc", "\u00b5"))
    if match is None or (not match["unit"] and float(match["number"])):
        raise ValueError(f"{text!r} is no time: {_TIMES}")
    return float(match["number"]) * _SECONDS[match["unit"] or "s"]


def format_time(seconds: float) -> str:
    """A time for people, in three digits: `96 µs`, `1.25 ms`, `14.3 s`."""
    for factor, unit in ((1e-6, "µs"), (1e-3, "ms")):
        if _digits(seconds / factor) < 1000:
            return f"{_digits(seconds / factor):.10g} {unit}"
    return f"{_digits(seconds):.10g} s"


def _bytes(match: re.Match[str]) -> Fraction:
    prefix = (match["prefix"] or "").replace("k", "K")
    return Fraction(match["number"]) * _FACTORS[prefix] / (8 if match["unit"] == "bit" else 1)


def spell_size(nbytes: int) -> str:
    """The shortest exact spelling: `8`, `64Ki`, `25Mi`, `14G`; `parse_size` gives `nbytes` back."""
    if nbytes < 0:
        raise ValueError(f"a size is 0 bytes or more, not {nbytes}")
    spellings = [
        f"{nbytes // factor}{prefix}"
        for prefix, factor in _FACTORS.items()
        if nbytes % factor == 0 and (nbytes or factor == 1)
    ]
    return min(spellings, key=len)


def format_size(nbytes: float) -> str:
    """A size for people, in three digits and binary prefixes: `8 B`, `3.12 GiB`."""
    return _rounded(nbytes, {"": 1} | _BINARY) + "B"


def format_rate(bytes_per_second: float, unit: str = "B") -> str:
    """A rate for people, in three digits and decimal prefixes: `1.25 GB/s`, or in `bit`s."""
    if unit not in ("B", "bit"):
        raise ValueError(f"a rate is counted in 'B' or 'bit', not {unit!r}")
    amount = bytes_per_second * (8 if unit == "bit" else 1)
    return f"{_rounded(amount, _DECIMAL)}{unit}/s"


def _rounded(amount: float, factors: dict[str, int]) -> str:
    """Three digits and a prefix; a figure that rounds up to the next prefix takes that."""
    names = list(factors)
    index = 0
    while index + 1 < len(names) and _digits(amount / factors[names[index]]) >= (
        factors[names[index + 1]] / factors[names[index]]
    ):
        index += 1
    value = _digits(amount / factors[names[index]])
    return f"{value:.10g} {names[index]}"


def _digits(value: float) -> float:
    """`value` in three significant digits, but never fewer than the whole ones."""
    return float(f"{value:.3g}") if abs(value) < 1000 else float(round(value))
