"""Names of this machine's network interfaces, where an address is asked for."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path

from collective.addresses import AddressError, parse_address

__all__ = ["addresses_of", "advertised"]

#: Linux' ioctl for an interface's IPv4 address, and where that stands in its struct ifreq
_SIOCGIFADDR, _ADDRESS = 0x8915, 20


def addresses_of(text: str) -> list[str]:
    """The addresses that `text` means: those of the interface of that name, or `text` itself.

    Of an interface, IPv4 comes first; addresses that hold on one link only are left out.

    Raises:
        AddressError: the interface has no address.
    """
    if text not in (name for _, name in socket.if_nameindex()):
        return [text]
    found = _ipv4(text) + _ipv6(text)
    if not found:
        raise AddressError(
            f"the interface {text} has no address; give it one, or name another interface or "
            "an address"
        )
    return found


def advertised() -> list[str]:
    """The addresses that ``UNISONO_ADVERTISE`` says, the best first; none where it is not set.

    Raises:
        AddressError: an interface that it names has no address, or a part is no host alone.
    """
    given = os.environ.get("UNISONO_ADVERTISE", "")
    parts = [part.strip() for part in given.split(",") if part.strip()]
    try:
        return [_host(address) for part in parts for address in addresses_of(part)]
    except AddressError as error:
        raise AddressError(f"UNISONO_ADVERTISE is {given!r}: {error}") from None


def _host(text: str) -> str:
    host, port = parse_address(text)
    if port is not None:
        raise AddressError(f"leave the port out of {text!r}: each rank takes a free one")
    return host


def _ipv4(name: str) -> list[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            found = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()))
        except OSError:
            return []  # it has none of this family
    return [socket.inet_ntoa(found[_ADDRESS : _ADDRESS + 4])]


def _ipv6(name: str) -> list[str]:
    table = Path("/proc/net/if_inet6")
    rows = [line.split() for line in table.read_text().splitlines()] if table.exists() else []
    found = [ipaddress.IPv6Address(bytes.fromhex(row[0])) for row in rows if row[-1] == name]
    return [str(address) for address in found if not address.is_link_local]
