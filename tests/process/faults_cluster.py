"""Ranks on two nodes that can be killed and replaced, and meet again under a new epoch."""

from __future__ import annotations

import fault_jobs as jobs
from forked_ranks import ForkedRanks
from thread_ranks import addresses


class Cluster:
    """Four ranks that meet again under a new epoch after each loss."""

    def __init__(self) -> None:
        self.ranks = ForkedRanks(4)
        self.epoch = 0
        self._where = addresses(4)

    def join(
        self, strategy: str = "auto", *, shared: bool = True, segment: int = 0, lent: bool = False
    ) -> None:
        self.epoch += 1
        how = (self._where, self.epoch, strategy, shared, segment, lent)
        self.ranks.run(jobs.join, *how, timeout=30)

    def leave(self, dead: int | None = None) -> None:
        """Close the group on all ranks that live, and replace the one that does not."""
        living = [rank for rank in range(4) if rank != dead]
        outcomes = self.ranks.outcomes(jobs.leave, ranks=living, timeout=20)
        assert all(outcome is not None and not outcome.kinds for outcome in outcomes), outcomes
        if dead is not None:
            self.ranks.revive(dead)
