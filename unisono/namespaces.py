"""A small network of this machine's own: hosts as network namespaces on a bridge, shaped, cut.

Linux and root only.  No packet of it reaches any other network: the bridge lives in a namespace
too, and nothing leads out of it.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Host", "Network", "NetworkError", "why_not"]

_PREFIX = "unisono"
_CLONE_NEWNET = 0x40000000
#: what a shaped link may send at once, and how long a packet may wait there
_BURST = "128kb"
_QUEUE = "30ms"
_numbers = itertools.count()
_libc = ctypes.CDLL(None, use_errno=True)


class NetworkError(RuntimeError):
    """The machine does not let us make a network; says what failed and why."""


def why_not() -> str | None:
    """Why this process cannot make a network, or None if it may try."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"the command {missing[0]} is missing (package iproute2)"
    return None


@dataclass(frozen=True)
class Host:
    """One namespace, with an interface `eth0`."""

    number: int
    namespace: str
    #: its addresses; an empty text where it has none of that family
    ipv4: str
    ipv6: str

    def command(self, *arguments: str) -> list[str]:
        """A command line that runs `arguments` on this host, in a process of the same id."""
        return ["ip", "netns", "exec", self.namespace, *arguments]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """This thread, and what it starts meanwhile, is on the host."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            inside = os.open(f"/run/netns/{self.namespace}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                _enter(inside)
            finally:
                os.close(inside)
            try:
                yield
            finally:
                _enter(before)
        finally:
            os.close(before)


class Network:
    """Hosts 1 to n with the addresses 10.213.0.i and fd75:6e69::i; use as a context manager.

    Args:
        hosts: how many.
        rate: bits per second of each host's link, in each direction; None for no limit.
        families: which addresses each host gets, `4` (IPv6 is switched off), `6` or `46`; `46` for
            all by default.
        bridged: False makes hosts without an interface, for a network of another kind.

    Raises:
        NetworkError: not root, or a command of iproute2 failed.
    """

    def __init__(
        self,
        hosts: int,
        *,
        rate: float | None = None,
        families: Sequence[str] = (),
        bridged: bool = True,
    ) -> None:
        reason = why_not()
        if reason is not None:
            raise NetworkError(reason)
        _remove_leftovers()
        name = f"{_PREFIX}-{os.getpid()}-{next(_numbers)}"
        self._switch = f"{name}-switch"
        self.hosts = tuple(
            Host(
                number,
                f"{name}-{number}",
                f"10.213.0.{number}" if "4" in family else "",
                f"fd75:6e69::{number:x}" if "6" in family else "",
            )
            for number, family in zip(
                range(1, hosts + 1), itertools.chain(families, itertools.repeat("46")), strict=False
            )
        )
        try:
            for host in self.hosts:
                _run("ip", "netns", "add", host.namespace)
                _run("ip", "-n", host.namespace, "link", "set", "lo", "up")
                if not host.ipv6:
                    with host.entered():
                        Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1\n")
            if bridged:
                self._bridge(rate)
        except BaseException:
            self.close()
            raise

    def _bridge(self, rate: float | None) -> None:
        switch = self._switch
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for host in self.hosts:
            port = f"port{host.number}"
            peer = ("peer", "name", "eth0", "netns", host.namespace)
            _run("ip", "-n", switch, "link", "add", port, "type", "veth", *peer)
            _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", host.namespace, "link", "set", "eth0", "up")
            self.address(host, "eth0")
            if rate is not None:
                for where, device in ((switch, port), (host.namespace, "eth0")):
                    _shape(where, device, rate)

    def address(self, host: Host, device: str) -> None:
        """Give a device of a host the host's addresses."""
        if host.ipv4:
            _run("ip", "-n", host.namespace, "address", "add", f"{host.ipv4}/24", "dev", device)
        if host.ipv6:
            # no other host can have the address: it is usable at once
            nodad = (f"{host.ipv6}/64", "dev", device, "nodad")
            _run("ip", "-n", host.namespace, "address", "add", *nodad)

    def add_address(self, host: Host, device: str, address: str) -> None:
        """Give a device of a host one more address, such as ``192.168.7.7/32``."""
        _run("ip", "-n", host.namespace, "address", "add", address, "dev", device)

    def carried(self, host: Host) -> int:
        """Bytes that have left a host so far."""
        with host.entered():
            lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
        (line,) = [line for line in lines if line.lstrip().startswith("eth0:")]
        return int(line.partition(":")[2].split()[8])

    def slow_down(self, host: Host, rate: float) -> None:
        """Let a host send so many bits per second and no more; what it receives stays as fast."""
        _shape(host.namespace, "eth0", rate)

    def speed_up(self, host: Host) -> None:
        """Undo `slow_down` on a network without a rate."""
        _run("tc", "-n", host.namespace, "qdisc", "delete", "dev", "eth0", "root")

    def cut(self, host: Host) -> None:
        """Drop every packet from and to a host, without a word to anybody."""
        _run("ip", "-n", self._switch, "link", "set", f"port{host.number}", "nomaster")

    def mend(self, host: Host) -> None:
        """Undo `cut`."""
        port = f"port{host.number}"
        _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge")

    def close(self) -> None:
        """Remove the network; what still runs on its hosts is cut off."""
        for name in (*(host.namespace for host in self.hosts), self._switch):
            _remove(name)

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _enter(descriptor: int) -> None:
    if _libc.setns(descriptor, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise NetworkError(f"cannot enter a network namespace: {os.strerror(number)}")


def _shape(namespace: str, device: str, rate: float) -> None:
    """Let a device send so many bits per second and no more."""
    tbf = ("tbf", "rate", f"{rate:.0f}bit", "burst", _BURST, "latency", _QUEUE)
    _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *tbf)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip()}")


def _remove(name: str) -> None:
    place = Path("/run/netns", name)
    if place.exists():
        try:
            _run("ip", "netns", "delete", name)
        except NetworkError:
            # Leftovers may be removed by two processes at once.
            if place.exists():
                raise


def _remove_leftovers() -> None:
    """Namespaces of processes that were killed before they could remove them."""
    folder = Path("/run/netns")
    for entry in folder.iterdir() if folder.exists() else ():
        match = re.fullmatch(rf"{_PREFIX}-(\d+)-\d+-\w+", entry.name)
        if match and not Path("/proc", match[1]).exists():
            _remove(entry.name)
