"""Groups whose ranks are threads of the test process, linked through memory, kept between tests."""

from __future__ import annotations

import queue
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from link_kinds import linked_groups

import collective
from collective.group import Group
from collective.strategies import parse

#: seconds after which a call that has not come back is a hang
HANG = 30.0


@dataclass
class Outcome:
    """What a function did on one rank: its value, or what it raised, and how long it took."""

    value: Any = None
    error: BaseException | None = None
    seconds: float = 0.0


class ThreadRanks:
    """`size` ranks, each with a thread of its own that runs what it is given.

    Args:
        nodes: the name of the node of each rank; all on one by default.
        kind: of link, one of `link_kinds.KINDS`.
        groups: groups to use instead of new ones.
    """

    def __init__(
        self,
        size: int,
        nodes: Sequence[str] | None = None,
        *,
        timeout: float = HANG / 2,
        strategy: str = "auto",
        kind: str = "memory",
        groups: list[Group] | None = None,
    ) -> None:
        self.size = size
        self.groups = groups or linked_groups(kind, size, nodes, timeout=timeout, strategy=strategy)
        self._calls: list[queue.SimpleQueue[Callable[[], None] | None]] = [
            queue.SimpleQueue() for _ in range(size)
        ]
        self._threads = [
            threading.Thread(target=self._work, args=(calls,), name=f"rank-{rank}", daemon=True)
            for rank, calls in enumerate(self._calls)
        ]
        for thread in self._threads:
            thread.start()

    def _work(self, calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while (call := calls.get()) is not None:
            call()

    def outcomes(
        self, function: Callable[..., Any], *arguments: Any, timeout: float = HANG
    ) -> list[Outcome]:
        """Call `function(group, *arguments)` on every rank at once."""
        results: queue.SimpleQueue[tuple[int, Outcome]] = queue.SimpleQueue()

        def call(rank: int) -> None:
            start = time.monotonic()
            outcome = Outcome()
            try:
                outcome.value = function(self.groups[rank], *arguments)
            except BaseException as error:  # noqa: BLE001 - handed to the test
                outcome.error = error
            outcome.seconds = time.monotonic() - start
            results.put((rank, outcome))

        for rank, calls in enumerate(self._calls):
            calls.put(lambda rank=rank: call(rank))  # type: ignore[misc]
        found: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout
        while len(found) < self.size:
            try:
                rank, outcome = results.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                late = sorted(set(range(self.size)) - set(found))
                raise AssertionError(f"ranks {late} did not come back in {timeout:g} s") from None
            found[rank] = outcome
        return [found[rank] for rank in range(self.size)]

    def run(
        self, function: Callable[..., Any], *arguments: Any, timeout: float = HANG
    ) -> list[Any]:
        """Like `outcomes`, for functions that must not raise: their values by rank."""
        outcomes = self.outcomes(function, *arguments, timeout=timeout)
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        return [outcome.value for outcome in outcomes]

    def close(self) -> None:
        """Leave the groups and end the threads."""
        for calls in self._calls:
            calls.put(None)
        for thread in self._threads:
            thread.join(timeout=HANG)
        # all at once: who leaves waits for the others to have read what it sent
        closing = [threading.Thread(target=group.close) for group in self.groups]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(timeout=HANG)

    def __enter__(self) -> ThreadRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def addresses(count: int) -> list[str]:
    """Addresses of this machine that nobody else uses, below the range of outgoing ports."""
    host = f"127.{random.randint(1, 250)}.{random.randint(1, 250)}.{random.randint(1, 250)}"
    return [f"{host}:{20_000 + rank}" for rank in range(count)]


def accepted(address: str) -> int:
    """Established connections of the rank that listens at an address."""
    host, _, port = address.partition(":")
    local = f"{int.from_bytes(socket.inet_aton(host), 'little'):08X}:{int(port):04X}"
    with open("/proc/net/tcp") as file:
        return sum(line.split()[1] == local and line.split()[3] == "01" for line in file)


def socket_groups(
    size: int, *, timeout: float = HANG / 2, strategy: str = "auto", secret: str = "s3cret"
) -> list[Group]:
    """Groups of `size` ranks in this process that are linked through real sockets."""
    where = addresses(size)

    def make(rank: int) -> Group:
        return collective.init(
            rank, size, addresses=where, secret=secret, timeout=timeout, strategy=strategy
        )

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(make, range(size)))


class Ranks:
    """Thread ranks by their number, made at first use and used again while they are healthy.

    Args:
        kind: of link, one of `link_kinds.KINDS`.
    """

    def __init__(self, kind: str = "memory") -> None:
        self._kind = kind
        self._kept: dict[int, ThreadRanks] = {}

    def get(
        self, size: int, strategy: str = "auto", nodes: Sequence[str] | None = None
    ) -> ThreadRanks:
        """Ranks that follow `strategy`, on nodes of these names; all on one by default."""
        kept = self._kept.get(size)
        if kept is not None and any(group.error is not None for group in kept.groups):
            self._kept.pop(size).close()
            kept = None
        if kept is None:
            kept = self._kept[size] = ThreadRanks(size, kind=self._kind)
        for group in kept.groups:
            # levels are a matter of names only, so groups need not be made for each
            group._place(nodes or ["here"] * size)
            group.strategy = parse(strategy)
        return kept

    def close(self) -> None:
        """End all of them."""
        for ranks in self._kept.values():
            ranks.close()
        self._kept.clear()
