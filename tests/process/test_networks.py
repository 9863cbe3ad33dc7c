"""Ranks on hosts of a network of their own, which can be cut, and names that resolve badly."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import native_jobs
import pytest
import torch
from network_lab import network, set_names
from ranks import RankPool
from waiting import eventually

from unisono import namespaces
from unisono.namespaces import Host, Network

pytestmark = pytest.mark.timeout(60)

PORT = 9000
THREE = [0, 1, 2]
#: a rank may still be leaving its last group when others have begun to form the next one
EPOCHS = itertools.count(1)

# Serves one data link's handshake at the address of the first argument, and reaches it by name:
# as an agent does, as a program that talks HTTP does, and as a rank does.
BY_NAME = """
import sys, time
import httpx
from collective.links.dialling import dial
from collective.links.doorman import Doorman
from collective.links.listener import Admission, Listener, listen
from collective.messages import LinkRequest
from worker.control import ControlPlane

where, name = sys.argv[1:]
doorman = Doorman()
listener = Listener(Admission("-", "-", 1, "secret"), doorman, listen(where, 0), 0)
request = LinkRequest(
    job="-", attempt="-", group="default", epoch=1, dialler=1, target=0, channel="collective"
)
dial(((name, listener.port),), request, "secret", time.monotonic() + 5, "rank 0").close()
ControlPlane.parse(f"http://{name}:{listener.port}").connect(5).close()
answer = httpx.get(f"http://{name}:{listener.port}/", trust_env=False)
assert answer.status_code == 426, answer
listener.close()
doorman.close()
"""


@pytest.fixture(scope="module")
def net() -> Iterator[Network]:
    """Two hosts of both families on links of 400 Mbit/s, one of IPv4 only, one of IPv6 only."""
    with network(4, rate=400e6, families=("46", "46", "4", "6")) as net:
        yield net


@pytest.fixture(scope="module")
def pool(net: Network) -> Iterator[RankPool]:
    """A rank on each host; each test makes a group of some of them."""
    prefixes = [host.command() for host in net.hosts]
    with RankPool(len(prefixes), {"UNISONO_PEER_SILENCE": "2"}, prefixes) as pool:
        yield pool
        pool.kill()


def join(
    pool: RankPool, where: dict[int, str], timeout: float = 20.0, connections: str = "auto"
) -> None:
    ask(pool, list(where), native_jobs.join_some, where, next(EPOCHS), timeout, connections)


def ask(pool: RankPool, ranks: list[int], function: Callable[..., Any], *arguments: Any) -> None:
    for outcome in pool.outcomes(function, *arguments, ranks=ranks):
        assert outcome is not None and outcome.kind is None, outcome


def values(pool: RankPool, ranks: list[int]) -> list[float | None]:
    outcomes = pool.outcomes(native_jobs.once, ranks=ranks)
    return [outcome and outcome.value for outcome in outcomes]


def at(host: Host, family: int = 4) -> str:
    return f"{host.ipv4}:{PORT}" if family == 4 else f"[{host.ipv6}]:{PORT}"


def test_families_meet(net: Network, pool: RankPool) -> None:
    """Ranks exchange over IPv4 where IPv6 is switched off, over IPv6 where there is nothing else,
    and a host of both families speaks to each of them in its own."""
    both, _, old, new = net.hosts
    for where in ({0: at(both), 2: at(old)}, {0: at(both, 6), 3: at(new, 6)}):
        join(pool, where)
        assert values(pool, list(where)) == [2.0, 2.0]


@pytest.mark.parametrize("served", ["127.0.0.1", "::1"])
def test_a_name_of_both_families_is_tried_in_both(net: Network, served: str) -> None:
    """`localhost` leads to a server that listens in one family only, whichever stands first."""
    host = net.hosts[0]
    for order in (("::1", "127.0.0.1"), ("127.0.0.1", "::1")):
        set_names(host, dict.fromkeys(order, "localhost"))
        done = subprocess.run(
            host.command(sys.executable, "-c", BY_NAME, served, "localhost"),
            capture_output=True, text=True, timeout=30,
        )  # fmt: skip
        assert done.returncode == 0, (order, done.stderr)


def test_links_of_several_connections(net: Network, pool: RankPool) -> None:
    """Frames that travel by turns on three connections arrive in order, whole, and by slow links
    too; after the group all connections are closed."""
    join(pool, {rank: at(host) for rank, host in enumerate(net.hosts[:3])}, connections="3")
    for strategy in ("ring", "tree:2", "direct"):
        sizes = [1, 300_001, 1_300_000]
        ask(pool, THREE, native_jobs.all_reduces, 3, strategy, sizes, [torch.float32])
    assert [
        outcome and outcome.value for outcome in pool.outcomes(native_jobs.leave, ranks=THREE)
    ] == [True] * 3


def test_a_host_that_cannot_be_reached_dials_instead(net: Network, pool: RankPool) -> None:
    """Rank 1 listens at an address to which there is no way from the others, as behind a NAT: it
    dials, and all goes on, messages and downloads too."""
    hosts = net.hosts[:3]
    hidden = "192.168.7.7"
    net.add_address(hosts[1], "lo", f"{hidden}/32")
    join(pool, {0: at(hosts[0]), 1: f"{hidden}:{PORT}", 2: at(hosts[2])}, connections="3")
    for rank, wanted in enumerate([[1], [], [1]]):
        (outcome,) = pool.outcomes(native_jobs.unreachable, ranks=[rank])
        assert outcome is not None and list(outcome.value) == wanted, outcome
        for reason in outcome.value.values():
            assert f"{hidden}:{PORT}: " in reason and "unreachable" in reason
    ask(pool, THREE, native_jobs.all_reduces, 3, "ring", [1, 1_300_000], [torch.float32])
    ask(pool, THREE, native_jobs.every_pair, 300_001)
    before = net.carried(hosts[1])
    pool.start(native_jobs.loop, ranks=THREE)
    eventually(lambda: net.carried(hosts[1]) > before + 10_000_000)
    net.cut(hosts[1])
    try:
        outcomes = pool.collect(THREE, 30.0)
    finally:
        net.mend(hosts[1])
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome is not None and (outcome.kind, outcome.rank) == ("PeerLost", 1), outcome


def test_a_host_that_vanishes_in_the_middle_is_named(net: Network, pool: RankPool) -> None:
    """Packets stop both ways in the middle of an all-reduce: the survivors raise long before their
    own timeout, naming the rank and its node, and so does the lost one."""
    hosts = net.hosts[:3]
    join(pool, {rank: at(host) for rank, host in enumerate(hosts)}, 50.0)
    pool.start(native_jobs.loop, ranks=THREE)
    before = net.carried(hosts[2])
    eventually(lambda: net.carried(hosts[2]) > before + 30_000_000)
    net.cut(hosts[2])
    try:
        outcomes = pool.collect(THREE, 30.0)
    finally:
        net.mend(hosts[2])
    for outcome in outcomes[:2]:
        assert outcome is not None and outcome.kind == "PeerLost", outcome
        assert outcome.rank == 2
        assert f"rank 2 on node {hosts[2].ipv4}" in outcome.message
        assert "all_reduce" in outcome.message
    assert outcomes[2] is not None and outcomes[2].kind == "PeerLost"


def test_a_host_that_vanished_while_idle_is_named(net: Network, pool: RankPool) -> None:
    """Packets stop between two operations: the next one names who is missing, at the latest at its
    deadline, and nothing is lost when the link comes back in time."""
    one, other, _, new = net.hosts
    ranks = [0, 1, 3]
    join(pool, {0: at(one, 6), 1: at(other, 6), 3: at(new, 6)})
    net.cut(other)
    try:
        pool.start(native_jobs.once, ranks=ranks)
    finally:
        net.mend(other)
    outcomes = pool.collect(ranks)
    assert [outcome and outcome.value for outcome in outcomes] == [3.0] * 3
    net.cut(other)
    try:
        outcomes = pool.outcomes(native_jobs.once, 2.0, ranks=ranks)
    finally:
        net.mend(other)
    for rank in (0, 2):
        outcome = outcomes[rank]
        assert outcome is not None and outcome.kind in ("DeadlineExceeded", "PeerLost"), outcome
        assert outcome.rank == 1 and "rank 1 on node" in outcome.message


def test_a_rank_stopped_in_the_middle_of_its_data_is_named(net: Network, pool: RankPool) -> None:
    """SIGSTOP while segments are under way: at the deadline the survivors say who does not answer,
    and no kernel takes the stopped process for a lost machine."""
    hosts = net.hosts[:3]
    join(pool, {rank: at(host) for rank, host in enumerate(hosts)}, 4.0)
    pool.start(native_jobs.loop, ranks=THREE)
    before = net.carried(hosts[1])
    eventually(lambda: net.carried(hosts[1]) > before + 30_000_000)
    pool.processes[1].send_signal(signal.SIGSTOP)
    try:
        outcomes = pool.collect([0, 2], 20.0)
    finally:
        pool.processes[1].send_signal(signal.SIGCONT)
    pool.collect([1])
    for outcome in outcomes:
        assert outcome is not None
        assert outcome.kind == "DeadlineExceeded" and outcome.rank == 1, outcome.message
        assert "does not answer" in outcome.message


def test_leftovers_are_removed_by_whoever_comes_first(
    net: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a killed process left is removed before the next network is made; no harm is done where
    another process removes it in the same moment."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    name = f"unisono-{gone.pid}-0-1"
    run = namespaces._run
    run("ip", "netns", "add", name)

    def beaten(*command: str) -> None:
        if command[:3] == ("ip", "netns", "delete"):
            run(*command)
        run(*command)

    monkeypatch.setattr(namespaces, "_run", beaten)
    namespaces._remove_leftovers()
    assert not Path("/run/netns", name).exists()
    assert Path("/run/netns", net.hosts[0].namespace).exists()
