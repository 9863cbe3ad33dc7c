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
    """In what the lists of two ranks contradict each other, and what to do; None where they do not.

    One rank may have an address of its own for each of the others, as behind a NAT, so what counts
    is how many there are, whose each is, and which of them have one host.

    Args:
        rank, other: the ranks, as each says of itself.
        ours, theirs: what they say of their addresses; empty where one was given none.
    """
    if not ours or not theirs or ours == theirs:
        return None
    here, _, mine = ours.partition(" ")
    there, _, its = theirs.partition(" ")
    if here != there:
        text = f"rank {other} lists {there} addresses, rank {rank} lists {here}"
        return f"{text}: give all ranks the same list of addresses, in the same order"
    if "," in mine and "," in its:
        return _order(rank, mine.split(","), other, its.split(","))
    return None


def _order(rank: int, mine: list[str], other: int, its: list[str]) -> str | None:
    places = {address: place for place, address in enumerate(its)}
    hosts = [[address.rpartition(":")[0] for address in each] for each in (mine, its)]
    for place, address in enumerate(mine):
        if places.get(address, place) != place:
            return (
                f"to rank {other}, {address} is rank {places[address]}, to rank {rank} it is rank "
                f"{place}: give all ranks the addresses in the same order"
            )
        here, there = ({i for i, host in enumerate(each) if host == each[place]} for each in hosts)
        if here != there:
            apart = min(here ^ there)
            one, two = (rank, other) if apart in here else (other, rank)
            return (
                f"to rank {one}, ranks {place} and {apart} have one host, to rank {two} they have "
                "not: spell a host alike for all ranks that are on it"
            )
    return None
