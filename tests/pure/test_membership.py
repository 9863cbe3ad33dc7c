"""How ranks find out in what their lists of addresses differ."""

from __future__ import annotations

import pytest

from collective.membership import difference, listed

THREE = [("10.0.0.1", 9000), ("10.0.0.1", 9001), ("fd00::2", 9000)]
ALIKE = ": give all ranks the same list of addresses, in the same order"


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
            [*THREE[:2], ("fd00::3", 9000)],
            "to rank 5, rank 2 is at [fd00::3]:9000, to rank 1 at [fd00::2]:9000",
        ),
        (
            THREE,
            [THREE[1], THREE[0], THREE[2]],
            "to rank 5, rank 0 is at 10.0.0.1:9001, to rank 1 at 10.0.0.1:9000",
        ),
        (
            [("h" * 60, port) for port in range(1000)],
            [("g" * 60, port) for port in range(1000)],
            "rank 5 and rank 1 list different addresses",
        ),
        ([("größe", 1)] * 2, [("groesse", 1)] * 2, "rank 5 and rank 1 list different addresses"),
    ],
)
def test_a_difference_names_both_sides(
    ours: list[tuple[str, int]], theirs: list[tuple[str, int]], words: str | None
) -> None:
    """What each rank says is named, with the way out; who says nothing is not compared."""
    own, other = (listed(each) if each else "" for each in (ours, theirs))
    assert difference(1, own, 5, other) == (None if words is None else words + ALIKE)
    for text in (own, other):
        assert text.isascii() and len(text) < 6100


@pytest.mark.parametrize("theirs", ["3 ", "3 a:1,b:2", "3 x", "3 a:1,b:2,c:3,d:4", "x y"])
def test_what_is_no_list_differs(theirs: str) -> None:
    """A header that makes no sense is a difference like any other."""
    assert difference(0, "3 a:1,b:2,c:3", 1, theirs) is not None
