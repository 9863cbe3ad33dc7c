"""How ranks find out in what their lists of addresses differ."""

from __future__ import annotations

import pytest

from collective.membership import difference, listed

THREE = [("10.0.0.1", 9000), ("10.0.0.1", 9001), ("fd00::2", 9000)]
ALIKE = ": give all ranks the same list of addresses, in the same order"
HOST = ": spell a host alike for all ranks that are on it"
ORDER = ": give all ranks the addresses in the same order"


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (THREE, THREE, None),
        (THREE, [], None),
        ([], THREE, None),
        (THREE, THREE[:2], "rank 5 lists 2 addresses, rank 1 lists 3"),
        (THREE[:1], THREE, "rank 5 lists 3 addresses, rank 1 lists 1"),
        (
            THREE,
            [THREE[1], THREE[0], THREE[2]],
            "to rank 5, 10.0.0.1:9000 is rank 1, to rank 1 it is rank 0",
        ),
        (
            THREE,
            [THREE[0], ("localhost", 9001), THREE[2]],
            "to rank 1, ranks 0 and 1 have one host, to rank 5 they have not",
        ),
        (
            THREE,
            [*THREE[:2], ("10.0.0.1", 9002)],
            "to rank 5, ranks 0 and 2 have one host, to rank 1 they have not",
        ),
        (THREE, [*THREE[:2], ("192.168.1.2", 9000)], None),
        ([("h" * 60, port) for port in range(1000)], [("g" * 60, 1)] * 1000, None),
        ([("größe", 1)] * 2, [("groesse", 1)] * 2, None),
    ],
)
def test_a_difference_names_both_sides(
    ours: list[tuple[str, int]], theirs: list[tuple[str, int]], words: str | None
) -> None:
    """What each rank says is named, with the way out; who says nothing is not compared, and one
    rank may have several addresses."""
    own, other = (listed(each) if each else "" for each in (ours, theirs))
    way_out = {"lists": ALIKE, "it is": ORDER, "host": HOST}
    expected = words and words + next(way_out[word] for word in way_out if word in words)
    assert difference(1, own, 5, other) == expected
    for text in (own, other):
        assert text.isascii() and len(text) < 6100


@pytest.mark.parametrize("theirs", ["2 a:1,b:2", "x y", "a:1,b:2,c:3"])
def test_what_is_no_list_differs(theirs: str) -> None:
    """A header that makes no sense is a difference like any other."""
    assert difference(0, "3 a:1,b:2,c:3", 1, theirs) is not None
