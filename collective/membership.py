"""What ranks that were given addresses say of them to each other, and how they differ. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from collective.addresses import format_address

__all__ = ["difference", "listed"]

#: characters of a list in the handshake; a header line has at most 8 KiB
_LONGEST = 6000


def listed(members: Sequence[tuple[str, int]]) -> str:
    """The number of ranks and the address of each, as a rank says it; of very many a digest."""
    text = ",".join(format_address(host, port) for host, port in members)
    if len(text) > _LONGEST or not text.isascii():
        text = hashlib.sha256(text.encode()).hexdigest()
    return f"{len(members)} {text}"


def difference(rank: int, ours: str, other: int, theirs: str) -> str | None:
    """In what the lists of two ranks differ, and what to do; None where they do not.

    Args:
        rank, other: the ranks, as each says of itself.
        ours, theirs: what they say of their addresses; empty where one was given none.
    """
    if not ours or not theirs or ours == theirs:
        return None
    here, _, mine = ours.partition(" ")
    there, _, its = theirs.partition(" ")
    text = f"rank {other} and rank {rank} list different addresses"
    if here != there:
        text = f"rank {other} lists {there} addresses, rank {rank} lists {here}"
    elif "," in mine and "," in its:
        for place, (one, two) in enumerate(zip(its.split(","), mine.split(","), strict=False)):
            if one != two:
                text = f"to rank {other}, rank {place} is at {one}, to rank {rank} at {two}"
                break
    return f"{text}: give all ranks the same list of addresses, in the same order"
