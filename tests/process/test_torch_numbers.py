"""Numbers of collectives through torch.distributed, on every strategy."""

from __future__ import annotations

import pytest
import torch_jobs
import torch_numbers
from ranks import RankPool

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("strategy", ["centralized", "tree:2", "ring", "auto", "gloo"])
def test_every_rule_holds_on_every_strategy(four_ranks: RankPool, strategy: str) -> None:
    """Uneven counts, means, sixteen-bit floats, NaN, bool and strided views, on 2 to 4 ranks."""
    four_ranks.run(torch_numbers.check, strategy)


def test_a_member_that_dies_before_a_subgroups_first_call_is_named() -> None:
    """The survivors of a subgroup that was never used raise within seconds."""
    pool = RankPool(3)
    try:
        pool.run(torch_jobs.start)
        first, second, gone = pool.outcomes(torch_numbers.dead_member, timeout=30)
        assert gone is None
        for outcome in (first, second):
            assert outcome is not None and "rank 2" in outcome.value, outcome
            assert outcome.seconds < 20
    finally:
        pool.kill()
