"""The one parser and formatter of sizes and rates."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collective.units import (
    format_rate,
    format_size,
    format_time,
    parse_rate,
    parse_size,
    parse_time,
    spell_size,
)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("8", 8),
        ("8B", 8),
        ("64Ki", 65536),
        ("64KiB", 65536),
        ("25Mi", 26214400),
        (" 25 MiB ", 26214400),
        ("14GB", 14 * 10**9),
        ("1.5Gi", 3 << 29),
        ("1.5k", 1500),
        ("2T", 2 * 10**12),
        ("1Gbit", 125_000_000),
        ("8bit", 1),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    """K is a thousand, Ki 1024, and a size counts bytes unless it says bit."""
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("1Gbit", 125e6),
        ("1 Gbit/s", 125e6),
        ("2.5Gbit/s", 312.5e6),
        ("50GB/s", 50e9),
        ("100MiB/s", 100 * 2**20),
        ("1bit", 0.125),
    ],
)
def test_rates(text: str, rate: float) -> None:
    """A rate in bits or bytes per second is bytes per second."""
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "-1",
        "1.",
        ".5",
        "1e3",
        "1 2",
        "64ki",
        "64kiB",
        "1gb",
        "64KB/s",
        "0.5",
        "1bit",
        "٣",
        "1,5G",
    ],
)
def test_what_is_no_size_shows_the_accepted_forms(text: str) -> None:
    """A wrong size is refused with the text and examples."""
    with pytest.raises(ValueError, match=r"64Ki, 25Mi, 14GB or 1Gbit; prefixes are K") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["", "1G", "1Gb", "1Gbps", "0bit", "-1bit", "1 GB / s"])
def test_what_is_no_rate_shows_the_accepted_forms(text: str) -> None:
    """A rate that does not say bit or B is refused: 1G may be either."""
    with pytest.raises(ValueError, match=r"says bit or B, such as 1Gbit") as caught:
        parse_rate(text)
    assert repr(text) in str(caught.value)


@given(st.one_of(st.integers(0, 1 << 60), st.integers(0, 5000).map(lambda n: n << 20)))
def test_a_spelled_size_is_read_back(nbytes: int) -> None:
    """The short spelling of a size is exact."""
    assert parse_size(spell_size(nbytes)) == nbytes


@given(st.text(max_size=8))
def test_any_text_is_a_size_or_a_value_error(text: str) -> None:
    """No text makes the parser fail in another way."""
    try:
        assert parse_size(text) >= 0
    except ValueError:
        pass


@pytest.mark.parametrize(
    ("nbytes", "spelled", "shown"),
    [
        (0, "0", "0 B"),
        (8, "8", "8 B"),
        (1000, "1K", "1000 B"),
        (1024, "1Ki", "1 KiB"),
        (65536, "64Ki", "64 KiB"),
        (26214400, "25Mi", "25 MiB"),
        (14 * 10**9, "14G", "13 GiB"),
        ((1 << 30) - 1, "1073741823", "1 GiB"),
        (3350 * 10**6, "3350M", "3.12 GiB"),
    ],
)
def test_sizes_are_spelled_and_shown(nbytes: int, spelled: str, shown: str) -> None:
    """One spelling is exact and short, the other is for people, in three digits."""
    assert (spell_size(nbytes), format_size(nbytes)) == (spelled, shown)


def test_rates_are_shown() -> None:
    """Rates are shown in decimal prefixes, in bytes or bits."""
    assert format_rate(1.25e9) == "1.25 GB/s"
    assert format_rate(125e6, "bit") == "1 Gbit/s"
    assert format_rate(0) == "0 B/s"
    with pytest.raises(ValueError, match="'B' or 'bit'"):
        format_rate(1, "b")


@given(st.floats(1, 1e15))
def test_shown_figures_are_near_and_read_back(amount: float) -> None:
    """What is shown is within half a percent, and the parser understands it."""
    assert parse_rate(format_rate(amount)) == pytest.approx(amount, rel=6e-3)
    assert parse_rate(format_rate(amount, "bit")) == pytest.approx(amount, rel=6e-3)


def test_a_negative_size_is_refused() -> None:
    """There are no fewer than 0 bytes."""
    with pytest.raises(ValueError, match="not -1"):
        spell_size(-1)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0", 0.0), ("50us", 50e-6), ("50 µs", 50e-6), ("50μs", 50e-6), ("1.5ms", 1.5e-3),
     ("2s", 2.0), (" 7ns ", 7e-9), ("0.0", 0.0)],
)  # fmt: skip
def test_times(text: str, seconds: float) -> None:
    """A time says its unit; 0 needs none; either sign for micro will do."""
    assert parse_time(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "5", "us", "-1s", "1m", "1 h", "1e3s", "١s", "5 us s"])
def test_what_is_no_time_says_what_would_be(text: str) -> None:
    """Without a unit, or with an unknown one, the accepted forms are shown."""
    with pytest.raises(ValueError, match="is no time: a time is 0 or says its unit, such as 50us"):
        parse_time(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 µs"), (96.04e-6, "96 µs"), (1.2549e-3, "1.25 ms"), (0.9996, "1 s"), (14.26, "14.3 s"),
     (3e-8, "0.03 µs"), (1432.2, "1432 s")],
)  # fmt: skip
def test_times_for_people(seconds: float, text: str) -> None:
    """Three digits, in the unit that fits."""
    assert format_time(seconds) == text
