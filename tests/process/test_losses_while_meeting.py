"""A rank that ends while the ranks of a group meet is named by all others, soon."""

from __future__ import annotations

import socket
from concurrent.futures import Future, ThreadPoolExecutor

import meeting_jobs as jobs
import pytest
from faults_cluster import SOON, Cluster
from ranks import Outcome
from test_link_handshake import SECRET, listens, raw_request
from thread_ranks import accepted, addresses
from waiting import eventually

import collective

pytestmark = pytest.mark.timeout(60)

CASES = [
    *(("sockets", step) for step in jobs.STEPS if "memory" not in step),
    *(("shared memory", step) for step in jobs.STEPS if "second" not in step),
    ("masked", "has links"),
    ("masked", "has greeted"),
    ("three connections", "has links"),
]


def meet(
    cluster: Cluster, link: str, victim: int, step: str, *, raises: bool = False
) -> list[tuple[int, Outcome]]:
    """What the others see of a victim that ends at a step, each with its rank."""
    cluster.epoch += 1
    shared = link.startswith("shared")
    how = (cluster.where, cluster.epoch, "auto", shared, None, False, link)
    found = cluster.ranks.outcomes(jobs.meet, how, victim, step, raises, timeout=30)
    others = [(rank, each) for rank, each in enumerate(found) if each and rank != victim]
    assert len(others) == 3
    assert raises or found[victim] is None, "it was to die"
    return others


@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize(("link", "step"), CASES)
def test_a_rank_that_is_killed_is_named(
    cluster: Cluster, link: str, step: str, victim: int
) -> None:
    """Whichever step a rank dies in, all others raise with its name."""
    for rank, outcome in meet(cluster, link, victim, step):
        assert (outcome.kind, outcome.rank) == ("PeerLost", victim), (rank, outcome)
        assert f"rank {victim} on node n{victim // 2}" in outcome.message
        assert outcome.seconds < SOON, (rank, outcome)
    cluster.ranks.revive(victim)


@pytest.mark.parametrize("link", ["sockets", "shared memory"])
@pytest.mark.parametrize("step", ["has dialled all", "has links", "has greeted"])
def test_an_exception_is_told_to_all(cluster: Cluster, link: str, step: str) -> None:
    """Whatever else ends a rank while the others wait for it is quoted by them."""
    for rank, outcome in meet(cluster, link, 1, step, raises=True):
        assert (outcome.kind, outcome.rank) == ("OperationAborted", 1), (rank, outcome)
        assert "rank 1 on node n0 gave up" in outcome.message
        assert "OSError: the disk is full" in outcome.message
        assert outcome.seconds < SOON, (rank, outcome)


@pytest.fixture(autouse=True)
def nobody_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of this process do not wait for those that will not come."""
    monkeypatch.setenv("UNISONO_LINGER_SECONDS", "0")


def failing(rank: int, where: list[str], pool: ThreadPoolExecutor) -> Future[BaseException]:
    """The error of a rank that begins to meet now."""

    def fail() -> BaseException:
        with pytest.raises(collective.CollectiveError) as caught:
            collective.init(rank, addresses=where, secret=SECRET, timeout=20)
        return caught.value

    return pool.submit(fail)


def linked(address: str) -> socket.socket:
    """A connection of rank 1, which is good as far as the rank at an address can tell."""
    host, _, port = address.partition(":")
    sock = socket.create_connection((host, int(port)), timeout=5)
    sock.sendall(raw_request())
    assert sock.recv(4096).startswith(b"HTTP/1.1 101 ")
    return sock


def test_who_knows_tells_those_who_have_not_met_the_lost_rank() -> None:
    """Rank 1 has been at rank 0 only, and rank 3 is yet to come: ranks 0 and 2 name rank 1."""
    where = addresses(4)
    with ThreadPoolExecutor(2) as pool:
        first = failing(0, where, pool)
        eventually(lambda: listens(where[0]), what="rank 0 listens")
        with linked(where[0]):
            second = failing(2, where, pool)
            eventually(lambda: accepted(where[0]) == 2 and accepted(where[2]) == 1, what="all met")
        for future in (first, second):
            error = future.result(timeout=SOON)
            assert isinstance(error, collective.PeerLost) and error.rank == 1, error
            assert "lost rank 1 on node 127." in str(error)
        assert "(reported by rank 0)" in str(second.result())


def test_a_rank_that_does_not_answer_keeps_nobody() -> None:
    """Who is dialling a rank that is stopped, say, hears of the loss of another all the same."""
    where = addresses(3)
    host, _, port = where[2].partition(":")
    with ThreadPoolExecutor(1) as pool, socket.create_server((host, int(port))) as silent:
        waiting = failing(0, where, pool)
        with silent.accept()[0]:
            linked(where[0]).close()
            error = waiting.result(timeout=SOON)
            assert isinstance(error, collective.PeerLost) and error.rank == 1, error


def test_a_rank_that_gave_up_one_try_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who dials again at once, because the first answer was late, say, is waited for as before."""
    monkeypatch.setattr("collective.attendance._AGAIN", 0.5)
    where = addresses(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = failing(0, where, pool)
        eventually(lambda: listens(where[0]), what="rank 0 listens")
        linked(where[0]).close()
        with linked(where[0]), pytest.raises(TimeoutError):
            waiting.result(timeout=1)
        assert isinstance(waiting.result(timeout=SOON), collective.PeerLost)
