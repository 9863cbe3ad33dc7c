"""Hosts and ports as people write them: parsing, printing, and what loopback means. Pure.

>>> parse_address("[fdaa::3]:29521")
('fdaa::3', 29521)
>>> format_address("fdaa::3", 29521)
'[fdaa::3]:29521'
"""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Iterable, Sequence

from collective.messages import Host

__all__ = [
    "AddressError",
    "choose_addresses",
    "format_address",
    "is_loopback",
    "meeting_address",
    "parse_address",
    "reachable_hosts",
]


class AddressError(ValueError):
    """A text is not an address, or an address that cannot be used; says why and the way out."""


def parse_address(text: str, *, default_port: int | None = None) -> tuple[str, int | None]:
    """Host and port of ``host``, ``host:port``, ``[::1]:port`` or a bare IPv6 address.

    A bare IPv6 address is taken as a host without a port.  One that is followed by a colon and
    a port is refused: nothing tells where the address ends.

    Args:
        text: what somebody wrote; no scheme and no path.
        default_port: the port when the text names none.

    Raises:
        AddressError: naming the text and how to write it.
    """
    value = text.strip()
    if not value or any(mark in value for mark in "/ \t\n@"):
        hint = _bracket_hint(value.split("/")[0])
        raise AddressError(f"{text!r} is not an address: expected HOST or HOST:PORT{hint}")
    if value.startswith("["):
        inside, bracket, rest = value[1:].partition("]")
        if not bracket:
            raise AddressError(f"{text!r}: the bracket is not closed; write [{inside}]:PORT")
        if not _is_ipv6(inside):
            raise AddressError(f"{text!r}: {inside!r} is not an IPv6 address")
        if not rest:
            return inside, default_port
        if not rest.startswith(":"):
            raise AddressError(f"{text!r}: expected a colon and a port behind the bracket")
        return inside, _port(rest[1:], text)
    if value.count(":") > 1:
        if _is_ipv6(value):
            return value, default_port
        raise AddressError(f"{text!r} is not an address{_bracket_hint(value)}")
    host, colon, port = value.partition(":")
    if not host:
        raise AddressError(f"{text!r}: the host is missing")
    return host, _port(port, text) if colon else default_port


def format_address(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether a host, by its text alone, is this machine's loopback."""
    name = host.strip("[]").partition("%")[0]
    if name.lower().rstrip(".") in ("localhost", "localhost.localdomain", "ip6-localhost"):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback


def choose_addresses(
    reached_by: str, others: Iterable[str] = (), advertise: Sequence[str] = ()
) -> list[str]:
    """The addresses that a node advertises, the best first.

    Args:
        reached_by: the node's own end of its connection to the control plane.
        others: addresses of the node's interfaces.
        advertise: what the operator asked for; replaces all others.

    Raises:
        AddressError: the control plane is on another machine and only loopback would be left.
    """
    remote = not is_loopback(reached_by)
    if advertise:
        chosen = [parse_address(entry)[0] for entry in advertise]
        for entry in chosen:
            if remote and is_loopback(entry):
                raise AddressError(
                    f"cannot advertise {entry}: the control plane is on another machine (reached "
                    f"from {reached_by}), and to other nodes a loopback address means themselves"
                )
        return list(dict.fromkeys(chosen))
    usable = [
        _plain(entry) for entry in others if not is_loopback(entry) and not _is_link_local(entry)
    ]
    return list(dict.fromkeys([_plain(reached_by), *usable]))


def reachable_hosts(hosts: Sequence[Host]) -> list[Host]:
    """The hosts of a plan without the loopback addresses that another machine would dial.

    Loopback stays only where every node of the plan has such an address, which is where all
    of them joined a control plane on their own machine, or where a node has no other.
    """
    if all(any(is_loopback(entry) for entry in host.addresses) for host in hosts):
        return list(hosts)
    found = []
    for host in hosts:
        others = [entry for entry in host.addresses if not is_loopback(entry)]
        found.append(dataclasses.replace(host, addresses=others or host.addresses))
    return found


def meeting_address(hosts: Sequence[Host]) -> str:
    """The first host's address that all hosts can dial: the best one of a family that all have.

    Where no family is common to all, or an address is a name, the first host's best.
    """
    first = hosts[0].addresses
    for address in first:
        family = _is_ipv6(address)
        if all(any(_is_ipv6(entry) == family for entry in host.addresses) for host in hosts):
            return address
    return first[0]


def _plain(address: str) -> str:
    """An IPv4 address that came mapped into IPv6, as IPv4."""
    return address.removeprefix("::ffff:") if "." in address else address


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _is_link_local(text: str) -> bool:
    try:
        return ipaddress.ip_address(text.partition("%")[0]).is_link_local
    except ValueError:
        return False


def _port(text: str, whole: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise AddressError(f"{whole!r}: {text!r} is not a port (0 to 65535)")
    return int(text)


def _bracket_hint(value: str) -> str:
    head, _, tail = value.rpartition(":")
    if head.count(":") > 1 and tail.isdigit():
        return f"; an IPv6 address with a port is written [{head}]:{tail}"
    return "; IPv6 addresses with a port are written [ADDRESS]:PORT" if ":" in value else ""
