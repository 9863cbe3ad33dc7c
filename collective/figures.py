"""Measured figures of this machine's links, kept between runs, for the cost model.

They lie in ``links.json`` in the folder ``UNISONO_CACHE_DIR``, or else
``$XDG_CACHE_HOME/unisono``, one entry per pair of hosts and version: of links within this machine
by kind (`collective.benchmark_links` measures them), of links to other machines by the addresses of
both ends (`collective.calibration`, ``worker probe``).
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import socket
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from collective.cost import Link, Machine

#: kinds of links that can be measured
KINDS = ("websocket", "shm")
#: segments that wait in a link through memory: all its slots, and as many that go on meanwhile
HELD = 8
#: begins the keys of links between machines
_BETWEEN = "between"

#: where nothing was measured: shared memory, a network of 10 Gbit/s, and a core of today
LOCAL = Link(15e-6, 8e9)
BETWEEN = Link(40e-6, 1.25e9)
MACHINE = Machine(None, 20e-6, 1.5e-10, 1.5e-10, 60e-6)


@dataclass(frozen=True)
class Sample:
    """What was measured of a link to another machine.

    Attributes:
        round_trip: seconds of a small message there and back.
        rate: bytes per second of a large one in one direction.
    """

    round_trip: float
    rate: float

    def __post_init__(self) -> None:
        if not (0 < self.round_trip < math.inf and 0 < self.rate < math.inf):
            raise ValueError(f"a link has a round trip and a rate above 0, not {self}")


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
        least_of = {"bandwidth": 1.0, "rate": 1.0, "cores": 1}
        for name in (field.name for field in fields(self) if field.name != "kind"):
            value, least = getattr(self, name), least_of.get(name, 0.0)
            if not least <= value < math.inf:
                raise ValueError(f"measured {name} is {value!r}, not {least} or more")

    @property
    def link(self) -> Link:
        """Of the cost model."""
        return Link(self.latency, self.bandwidth, HELD if self.kind == "shm" else 0)

    @property
    def machine(self) -> Machine:
        """Of the cost model."""
        return Machine(
            self.cores, self.per_segment, self.per_byte, self.per_byte_sent, self.per_call
        )


def path() -> Path:
    """Where figures are kept."""
    folder = os.environ.get("UNISONO_CACHE_DIR")
    if folder:
        return Path(folder) / "links.json"
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "unisono" / "links.json"


def _release() -> str:
    try:
        return version("unisono")
    except PackageNotFoundError:
        return "unknown"


def _key(kind: str) -> str:
    host = socket.gethostname()
    return f"{kind} {host} {host} {_release()}"


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
    with _changed() as entries:
        entries[_key(figures.kind)] = asdict(figures)


def load_samples() -> dict[tuple[str, str], Sample]:
    """What was measured between machines, by the addresses of this one and of the other.

    Raises:
        ValueError: the file is no longer what `store_samples` wrote; names it.
    """
    found = {}
    for key, entry in _read().items():
        kind, here, there, release = (key.split(" ") + [""] * 4)[:4]
        if kind == _BETWEEN and release == _release():
            try:
                found[here, there] = Sample(**entry)
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"{path()} does not hold round trip and rate from {here} to {there}: {error}; "
                    "remove it and measure again"
                ) from None
    return found


def store_samples(samples: Mapping[tuple[str, str], Sample]) -> None:
    """Keep what was measured, in place of what was measured earlier between the same machines."""
    with _changed() as entries:
        for (here, there), sample in samples.items():
            entries[f"{_BETWEEN} {here} {there} {_release()}"] = asdict(sample)


def typical(samples: Sequence[Sample]) -> Link | None:
    """The link that stands for all of which these are samples; None without any.

    A message takes as long as on most of them; the slowest one keeps all from sending faster.
    """
    if not samples:
        return None
    return Link(
        statistics.median(one.round_trip for one in samples) / 2, min(one.rate for one in samples)
    )


def measured(kind: str) -> tuple[Link, Machine] | None:
    """What is known of a kind of link (of websocket: to other machines, if any was measured).

    Raises:
        ValueError: the file is no longer what was written; names it.
    """
    own = load(kind)
    near = (socket.gethostname(),) * 2
    link = typical(
        [one for pair, one in load_samples().items() if (pair == near) == (kind == "shm")]
    )
    if own is None:
        return None if link is None else (link, MACHINE)
    # figures of two processes here know more of shared memory than a sample does
    return (own.link if link is None or kind == "shm" else link), own.machine


@contextmanager
def _changed() -> Iterator[dict[str, Any]]:
    """The entries, written back in one step; one process at a time."""
    where = path()
    where.parent.mkdir(parents=True, exist_ok=True)
    with open(where.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        entries = _read()
        yield entries
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
