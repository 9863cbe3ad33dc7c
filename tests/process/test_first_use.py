"""Subgroups link at their first use, whichever member that is of, and in whatever order."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from link_kinds import KINDS
from thread_ranks import ThreadRanks

from collective.errors import GroupClosed
from collective.group import Group

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module", params=KINDS)
def ranks(request: pytest.FixtureRequest) -> Iterator[ThreadRanks]:
    with ThreadRanks(3, kind=request.param, timeout=5) as made:
        yield made


def test_several_groups_in_another_order_on_each_rank(ranks: ThreadRanks) -> None:
    """One thread per rank issues the first operation of each; none waits for the others' order."""

    def work(group: Group) -> None:
        made = [group.subgroup(range(group.size), f"order{number}") for number in range(4)]
        order = made[group.rank :] + made[: group.rank]
        sums = [torch.full((3,), float(group.rank + 1)) for _ in order]
        works = [sub.all_reduce(sum_, async_op=True) for sub, sum_ in zip(order, sums, strict=True)]
        for handle in works:
            handle.wait(4)
        assert all(sum_.tolist() == [6.0] * 3 for sum_ in sums)
        for sub in made:
            sub.close()

    ranks.run(work)


def test_a_group_is_linked_while_its_members_do_something_else(ranks: ThreadRanks) -> None:
    """The first call returns when the group is linked, not when others call, too."""
    issued = threading.Event()

    def work(group: Group) -> None:
        sub = group.subgroup(range(group.size), "else")
        group.barrier()
        tensor = torch.ones(2)
        if group.rank == 0:
            handle = sub.all_reduce(tensor, async_op=True)
            issued.set()
            handle.wait(4)
        else:
            assert issued.wait(4)
            sub.all_reduce(tensor)
        assert tensor.tolist() == [3.0] * 2
        sub.close()

    ranks.run(work)


def test_a_group_that_is_closed_while_it_links_says_so_at_once(ranks: ThreadRanks) -> None:
    """Rank 2 never makes the group: who waits for it, and whose group that is, go on."""

    def work(group: Group) -> None:
        if group.rank < 2:
            sub = group.subgroup(range(group.size), "closed")
            start = time.monotonic()
            if group.rank == 0:
                timer = threading.Timer(0.2, sub.close)
                timer.start()
                with pytest.raises(GroupClosed, match="closed"):
                    sub.barrier()
                timer.join()
            sub.close()
            assert time.monotonic() - start < 3
        group.barrier()

    ranks.run(work)
