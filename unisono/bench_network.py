"""The network on which ``unisono bench`` runs its ranks: loopback, shaped links, or long ways."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from collective.units import parse_rate, parse_time
from unisono.namespaces import Host, Network, NetworkError, why_not
from unisono.packet_relay import MTU, relayed

__all__ = ["Host", "NetworkError", "asked", "laboratory", "payload_rate", "why_not"]

#: bytes: IPv4's header, TCP's with its time stamps, and Ethernet's
_HEADERS = 20 + 32
_ETHERNET, _ETHERNET_MTU = 14, 1500


def asked(bandwidth: str | None, delay: str | None) -> dict[str, float | None]:
    """The part of a work that names its network: bits per second, and seconds there and back.

    Raises:
        ValueError: not a rate, or not a time; shows the accepted forms.
    """
    return {
        "bandwidth": None if bandwidth is None else parse_rate(bandwidth) * 8,
        "delay": None if delay is None else parse_time(delay),
    }


@contextmanager
def laboratory(work: dict[str, Any], nodes: int) -> Iterator[tuple[Host, ...]]:
    """A host for each node if the work asks for a bandwidth or a delay, else none.

    Raises:
        NetworkError: the machine does not allow it.
    """
    bandwidth, delay = work.get("bandwidth"), work.get("delay")
    if delay:
        with relayed(nodes, delay=delay, rate=bandwidth) as network:
            yield network.hosts
    elif bandwidth:
        with Network(nodes, rate=bandwidth) as network:
            yield network.hosts
    else:
        yield ()


def payload_rate(work: dict[str, Any]) -> float | None:
    """Bytes per second of TCP payload that a link of the work's bandwidth can carry."""
    bandwidth = work.get("bandwidth")
    if not bandwidth:
        return None
    # the relay counts packets from their IP header on
    mtu, outside = (MTU, 0) if work.get("delay") else (_ETHERNET_MTU, _ETHERNET)
    return float(bandwidth) / 8 * (mtu - _HEADERS) / (mtu + outside)
