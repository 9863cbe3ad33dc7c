"""What `collective.init` checks before it listens anywhere. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

from collective.addresses import format_address, parse_address
from collective.environment import LONGEST_TIMEOUT, is_time

__all__ = ["check_timeout", "static_members"]

#: nine digits in the handshake
MAX_EPOCH = 999_999_999


def check_timeout(timeout: float) -> None:
    """Refuse what is no time to wait.

    Raises:
        ValueError: it is no number above 0.
    """
    if not is_time(timeout) or timeout == 0:
        raise ValueError(
            f"timeout is {timeout!r}; it is a number of seconds above 0, "
            f"at most {LONGEST_TIMEOUT:g}"
        )


def static_members(
    rank: int | None,
    world_size: int | None,
    addresses: Sequence[str],
    secret: str | None,
    epoch: int,
) -> tuple[int, str, list[tuple[str, int]]]:
    """This rank, the secret, and host and port of every rank.

    Raises:
        ValueError: naming the argument that has no meaning, or does not go with the others.
    """
    if isinstance(addresses, str):
        raise ValueError(f"addresses is a list, one HOST:PORT per rank, not the text {addresses!r}")
    if rank is None or secret is None:
        raise ValueError("static addresses need rank and secret as well")
    if not isinstance(secret, str) or not secret:
        raise ValueError("secret is a text that only the ranks of the group know; it is not empty")
    if world_size not in (None, len(addresses)):
        raise ValueError(f"world_size is {world_size}, but there are {len(addresses)} addresses")
    if type(epoch) is not int or not 1 <= epoch <= MAX_EPOCH:
        raise ValueError(f"an epoch is a whole number from 1 to {MAX_EPOCH}, not {epoch!r}")
    try:
        number = index(rank)
    except TypeError:
        raise ValueError(f"rank is a whole number, not {rank!r}") from None
    if not 0 <= number < len(addresses):
        raise ValueError(
            f"rank is {rank}, but there are {len(addresses)} addresses: the first rank is 0"
        )
    members: list[tuple[str, int]] = []
    for text in addresses:
        if not isinstance(text, str):
            raise ValueError(f"addresses is a list of texts, HOST:PORT of each rank, not {text!r}")
        host, port = parse_address(text)
        if port is None:
            way = "[ADDRESS]:PORT" if ":" in text else "HOST:PORT"
            raise ValueError(f"address {text!r} names no port; write {way}")
        if not port and len(addresses) > 1:
            raise ValueError(f"address {text!r} has port 0: others cannot know which that becomes")
        if (host, port) in members:
            raise ValueError(
                f"ranks {members.index((host, port))} and {len(members)} have the same address "
                f"{format_address(host, port)}; each rank needs a port of its own on its host"
            )
        members.append((host, port))
    return number, secret, members
