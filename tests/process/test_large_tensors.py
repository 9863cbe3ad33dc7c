"""More than 2³¹ elements in one call: right to the last byte, in bounded memory.

Takes 5 GB of memory, so it is not part of a plain run: `make soak`, which CI runs, includes it.
"""

from __future__ import annotations

import fault_jobs as jobs
import pytest
from forked_ranks import ForkedRanks
from thread_ranks import addresses

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]

#: bytes that an operation may take beyond the tensor: segments of one link each way, and scratch
ROOM = 64 << 20


@pytest.mark.parametrize("shared", [False, True], ids=["sockets", "shared memory"])
def test_more_than_two_to_the_31_elements(shared: bool) -> None:
    """An all-reduce and a broadcast of 2³¹ + 5 bytes between two ranks."""
    ranks = ForkedRanks(2)
    try:
        ranks.run(jobs.join, addresses(2), 1, "auto", shared, timeout=30)
        for found in ranks.run(jobs.reduce_and_broadcast, 2**31 + 5, timeout=200):
            rise, wrong = found
            assert not wrong
            assert rise < ROOM
        ranks.run(jobs.leave)
    finally:
        ranks.kill()
