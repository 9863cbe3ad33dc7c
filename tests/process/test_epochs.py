"""Ranks that form their group anew: survivors of a loss, newcomers, and those of older epochs."""

from __future__ import annotations

from collections.abc import Iterator

import epoch_jobs as jobs
import pytest
from forked_ranks import ForkedRanks
from ranks import Outcome
from thread_ranks import addresses

import collective

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
def ranks() -> Iterator[ForkedRanks]:
    """Four processes without a group, which do not wait long for those that do not leave."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNISONO_LINGER_SECONDS", "0.3")
        made = ForkedRanks(4)
    yield made
    assert made.run(jobs.leave, timeout=20) == [True] * 4
    made.close()


def form(ranks: ForkedRanks, members: list[int], where: list[str], epoch: int) -> None:
    """The group of some processes; process r listens at address r."""
    list_ = [where[rank] for rank in members]
    for rank in members:
        ranks.start(jobs.form, list_, where[rank], epoch, ranks=[rank])
    assert values(ranks.collect(members, timeout=30)) == [epoch] * len(members)


def values(outcomes: list[Outcome | None]) -> list[object]:
    assert all(each is not None and not each.kinds for each in outcomes), outcomes
    return [each.value for each in outcomes if each is not None]


def totals(ranks: ForkedRanks, members: list[int]) -> list[object]:
    return values(ranks.outcomes(jobs.total, 1.5, ranks=members, timeout=20))


def test_survivors_go_on_and_a_newcomer_joins_them(ranks: ForkedRanks) -> None:
    """After a kill the others form the group again, twice: smaller, and with a new process."""
    where = addresses(4)
    form(ranks, [0, 1, 2, 3], where, 1)
    assert totals(ranks, [0, 1, 2, 3]) == [(6.0, 4)] * 4
    ranks.start(jobs.die_in_the_middle, ranks=[1])
    assert values(ranks.outcomes(jobs.until_lost, ranks=[0, 2, 3], timeout=20)) == [1] * 3
    assert ranks.collect([1]) == [None]
    form(ranks, [0, 2, 3], where, 2)
    assert totals(ranks, [0, 2, 3]) == [(4.5, 3)] * 3
    ranks.revive(1)
    form(ranks, [0, 1, 2, 3], where, 3)
    assert totals(ranks, [0, 1, 2, 3]) == [(6.0, 4)] * 4
    assert values(ranks.outcomes(jobs.half, 2.0, ranks=[0, 1], timeout=20)) == [4.0] * 2


def test_one_that_is_behind_is_waited_for(ranks: ForkedRanks) -> None:
    """Who forms the next epoch first is turned away by those in the old one, and tries again."""
    where = addresses(2)
    form(ranks, [0, 1], where, 6)
    ranks.start(jobs.form_when_asked, where, where[1], 7, ranks=[1])
    ranks.start(jobs.form, where, where[0], 7, ranks=[0])
    assert values(ranks.collect([0, 1], timeout=30)) == [7, 7]
    assert totals(ranks, [0, 1]) == [(3.0, 2)] * 2


def test_an_older_epoch_is_refused_and_logged(ranks: ForkedRanks) -> None:
    """One that wakes up in an old epoch is told so at once, and the others' group goes on."""
    where = addresses(3)
    form(ranks, [0, 1], where, 5)
    text = "409 the group is at epoch 5, the dialler at 4"
    ranks.start(jobs.total_while_knocked_at, 2.0, text, ranks=[0])
    ranks.start(jobs.form, [where[0], where[2]], where[2], 4, ranks=[2])
    (stale,) = ranks.collect([2], timeout=20)
    assert stale is not None and stale.kind == "RendezvousFailed" and stale.seconds < 5
    assert "refused the link: 409 the group is at epoch 5, the dialler at 4" in stale.message
    ranks.start(jobs.total, 1.0, ranks=[1])
    assert values(ranks.collect([0, 1], timeout=20)) == [(3.0, 2)] * 2


@pytest.mark.parametrize("epoch", [0, -1, 1 << 31, True, "2", 1.0])
def test_what_is_no_epoch_is_refused(epoch: object) -> None:
    """Whole numbers from 1 on, and only where the ranks count epochs themselves."""
    with pytest.raises(ValueError, match=r"whole number from 1 to 999999999, not"):
        collective.init(0, addresses=["127.0.0.1:1"], secret="s", epoch=epoch)  # type: ignore
    with pytest.raises(ValueError, match=r"goes with addresses"):
        collective.init(url="http://127.0.0.1:1", group="g", world_size=1, token="t", epoch=2)
