"""Ranks whose lists of addresses differ, or that have one number, say so at once, all of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from resources import descriptors, threads
from test_link_handshake import listens
from thread_ranks import accepted, addresses
from torch.distributed import TCPStore
from waiting import eventually

import collective
from collective import torch_rendezvous

pytestmark = pytest.mark.timeout(60)

#: seconds within which all that are there must know
SOON = 3.0


@pytest.fixture(scope="module")
def stores() -> list[TCPStore]:
    """A store as torchrun hosts one, for each of three ranks: a call keeps out all others."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    others = [TCPStore("127.0.0.1", store.port, None, False) for _ in range(2)]
    return [store, *others]


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads and descriptors are what they were before; nobody stays for who will not come."""
    monkeypatch.setenv("UNISONO_LINGER_SECONDS", "0")
    before = descriptors(), threads()
    yield
    eventually(lambda: (descriptors(), threads()) == before, what="nothing is left")


def fail(rank: int, where: list[str]) -> str:
    """What a rank raises."""
    with pytest.raises(collective.RendezvousFailed) as caught:
        collective.init(rank, addresses=where, secret="s", timeout=20)
    return str(caught.value)


def errors_of(where: list[str], first: list[int], odd: int, other: list[str]) -> list[str]:
    """What ranks raise, some of which have met by `where`, when `odd` comes with `other`."""
    with ThreadPoolExecutor(len(first) + 1) as pool:
        waiting = [pool.submit(fail, rank, where) for rank in first]
        for rank in first:
            eventually(lambda rank=rank: listens(where[rank]), what="it listens")
            met = len(first) - 1
            eventually(lambda rank=rank, met=met: accepted(where[rank]) >= met, what="they met")
        start = time.monotonic()
        last = pool.submit(fail, odd, other)
        found = [each.result(timeout=SOON) for each in (*waiting, last)]
        assert time.monotonic() - start < SOON
    return found


@pytest.mark.parametrize("first", [[0], [2], [0, 2]], ids=str)
def test_lists_of_different_length_are_named_by_all(first: list[int]) -> None:
    """Rank 1 has forgotten an address: who meets it, or meets somebody who did, says so at once."""
    where = addresses(3)
    for text in errors_of(where, first, 1, where[:2]):
        assert "rank 1 lists 2 addresses, rank " in text or (
            " lists 3 addresses, rank 1 lists 2" in text
        )
        assert "give all ranks the same list of addresses, in the same order" in text


@pytest.mark.parametrize("of", [0, 1, 2])
def test_another_order_is_named_by_all(of: int) -> None:
    """Also where the rank in question is the one that differs, or has not come yet."""
    where = addresses(4)
    other = [*where]
    other[of], other[3] = where[3], where[of]
    for text in errors_of(where, [0, 2], 1, other):
        assert f"is rank {of}" in text and "is rank 3" in text
        assert where[of] in text or where[3] in text
        assert "give all ranks the addresses in the same order" in text


def test_a_rank_may_have_another_address_for_each() -> None:
    """Behind a NAT, say: rank 1 knows no way to rank 0, which knows one to rank 1."""
    where = addresses(2)
    with ThreadPoolExecutor(2) as pool:
        lists = [where, [f"{where[0].partition(':')[0]}:9", where[1]]]
        groups = list(
            pool.map(
                lambda rank: collective.init(rank, addresses=lists[rank], secret="s", timeout=20),
                range(2),
            )
        )
        tensors = [torch.ones(3), torch.ones(3)]
        works = [
            group.all_reduce(tensor, async_op=True)
            for group, tensor in zip(groups, tensors, strict=True)
        ]
        assert [work.resolve().tolist() for work in works] == [[2.0] * 3] * 2
        list(pool.map(lambda group: group.close(), groups))


def test_who_comes_a_moment_later_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Programs do not start at one moment: who knows stays a little for one yet to come."""
    monkeypatch.setenv("UNISONO_LINGER_SECONDS", "60")
    monkeypatch.setattr("collective.world._STAY", 60.0)
    where = addresses(3)
    with ThreadPoolExecutor(3) as pool:
        first = [pool.submit(fail, 0, where), pool.submit(fail, 1, where[:2])]
        eventually(lambda: "refused rank" in caplog.text, what="ranks 0 and 1 have met")
        last = pool.submit(fail, 2, where)
        for each in (*first, last):
            text = each.result(timeout=SOON)
            assert "rank 1 lists 2" in text and " lists 3" in text


def test_two_programs_with_one_rank_are_told_and_all_others() -> None:
    """The second cannot listen; it asks who does, so that the first and all it has met know."""
    where = addresses(3)
    for text in errors_of(where, [0, 1], 1, where):
        assert "there are two programs with rank 1: give each a rank of its own" in text


def test_a_complete_group_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Who comes to it with another list, or as a rank of it, is refused and logged, no more."""
    where = addresses(3)
    with ThreadPoolExecutor(2) as pool, ExitStack() as stack:
        groups = list(
            pool.map(lambda rank: collective.init(rank, addresses=where[:2], secret="s"), range(2))
        )
        for group in groups:
            stack.callback(pool.submit, group.close)
        for rank, list_ in ((2, where), (0, where[:2]), (0, where)):
            with pytest.raises(collective.RendezvousFailed, match="409") as caught:
                collective.init(rank, addresses=list_, secret="s", timeout=20)
            assert "lists 3 addresses" in str(caught.value) or "two programs" in str(caught.value)
        assert len([each for each in caplog.records if each.levelno == logging.WARNING]) >= 3
        tensors = [torch.ones(3), torch.ones(3)]
        works = [
            group.all_reduce(tensor, async_op=True)
            for group, tensor in zip(groups, tensors, strict=True)
        ]
        assert [work.resolve().tolist() for work in works] == [[2.0] * 3] * 2


def test_the_right_list_makes_a_group_after_a_wrong_one() -> None:
    """A group that failed for a wrong list can be made at once, at the same addresses and epoch."""
    where = addresses(2)
    errors_of(where, [0], 1, [*where, "127.0.0.9:20000"])
    with ThreadPoolExecutor(2) as pool:
        groups = list(
            pool.map(lambda rank: collective.init(rank, addresses=where, secret="s"), range(2))
        )
        list(pool.map(lambda group: group.close(), groups))


def test_different_world_sizes_are_named_at_a_store(stores: list[TCPStore]) -> None:
    """Ranks that meet by torch's store and were given different sizes do not wait for more."""

    def fail(rank: int, size: int) -> str:
        options = SimpleNamespace(group_rank=rank, group_size=size, store=stores[rank])
        with pytest.raises(collective.RendezvousFailed) as caught:
            torch_rendezvous._by_store(options, "sizes", 20.0, None)
        return str(caught.value)

    start = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        texts = list(pool.map(fail, range(3), (3, 2, 3)))
    assert time.monotonic() - start < SOON
    right = "rank 1 was given a world size of 2, rank {} one of 3: give all ranks the same"
    assert (texts[0], texts[2]) == (right.format(0), right.format(2))
    assert "rank 0 was given a world size of 3, rank 1 one of 2" in texts[1]
