"""Measured figures of this machine's links, kept between runs, for the cost model.

They lie in ``$XDG_CACHE_HOME/unisono/links.json``, one entry per kind of link, pair of hosts and
version.  `collective.benchmark_links` measures them.
"""

from __future__ import annotations

import json
import math
import os
import socket
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from collective.cost import Link, Machine, Nodes, Topology

#: kinds of links that can be measured
KINDS = ("websocket", "shm")

#: where nothing was measured: shared memory, a network of 10 Gbit/s, and a core of today
LOCAL = Link(15e-6, 8e9)
BETWEEN = Link(40e-6, 1.25e9)
MACHINE = Machine(None, 20e-6, 1.5e-10, 1.5e-10, 60e-6)


def guessed(nodes: Nodes) -> Topology:
    """The topology of ranks of which nothing is known but their nodes."""
    return Topology(nodes, LOCAL, BETWEEN, MACHINE)


@dataclass(frozen=True)
class Figures:
    """What a kind of link costs between two hosts.

    Attributes:
        kind: one of `KINDS`.
        latency: seconds from one rank's send to another's receipt, beyond the work of both.
        bandwidth: bytes per second and direction, beyond the work of both.
        per_call, per_segment, per_byte, per_byte_sent: of a core; see `collective.cost.Machine`.
        cores: of the host.
        round_trip: seconds for a small message there and back, as measured.
        rate: bytes per second of a large tensor in one direction, as measured.
    """

    kind: str
    latency: float
    bandwidth: float
    per_call: float
    per_segment: float
    per_byte: float
    per_byte_sent: float
    cores: int
    round_trip: float
    rate: float

    def __post_init__(self) -> None:
        for name, least in (("bandwidth", 1.0), ("rate", 1.0), ("cores", 1), ("latency", 0.0)):
            value = getattr(self, name)
            if not least <= value < math.inf:
                raise ValueError(f"measured {name} is {value!r}, not {least} or more")

    @property
    def link(self) -> Link:
        """Of the cost model."""
        return Link(self.latency, self.bandwidth)

    @property
    def machine(self) -> Machine:
        """Of the cost model."""
        return Machine(
            self.cores, self.per_segment, self.per_byte, self.per_byte_sent, self.per_call
        )


def path() -> Path:
    """Where figures are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "unisono" / "links.json"


def _key(kind: str) -> str:
    host = socket.gethostname()
    try:
        release = version("unisono")
    except PackageNotFoundError:
        release = "unknown"
    return f"{kind} {host} {host} {release}"


def load(kind: str) -> Figures | None:
    """What was measured for a kind of link within this host; None if nothing was.

    Raises:
        ValueError: the file is no longer what `store` wrote; names it.
    """
    entry = _read().get(_key(kind))
    if entry is None:
        return None
    try:
        return Figures(**entry)
    except (TypeError, ValueError) as error:
        names = ", ".join(field.name for field in fields(Figures))
        raise ValueError(
            f"{path()} does not hold the figures {names}: {error}; remove it and measure again"
        ) from None


def store(figures: Figures) -> None:
    """Keep figures in place of earlier ones of the same kind, hosts and version."""
    entries = _read() | {_key(figures.kind): asdict(figures)}
    where = path()
    where.parent.mkdir(parents=True, exist_ok=True)
    fresh = where.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps(entries, indent=1) + "\n")
    fresh.replace(where)


def _read() -> dict[str, Any]:
    try:
        found = json.loads(path().read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{path()} is no JSON: {error}; remove it and measure again") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path()} is no JSON object; remove it and measure again")
    return found
