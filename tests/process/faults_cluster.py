"""Ranks on two nodes that can be killed and replaced, and meet again under a new epoch."""

from __future__ import annotations

import fault_jobs as jobs
from forked_ranks import ForkedRanks
from thread_ranks import addresses

#: seconds within which survivors must know
SOON = 5.0


class Cluster:
    """Four ranks that meet again under a new epoch after each loss."""

    def __init__(self) -> None:
        self.ranks = ForkedRanks(4)
        self.epoch = 0
        self.where = addresses(4)

    def join(
        self, strategy: str = "auto", *, shared: bool = True, segment: int = 0, lent: bool = False,
        way: str = "",
    ) -> None:  # fmt: skip
        self.epoch += 1
        how = (self.where, self.epoch, strategy, shared, segment, lent, way)
        self.ranks.run(jobs.join, *how, timeout=30)

    def leave(self, dead: int | None = None) -> None:
        """Close the group on all ranks that live, and replace the one that does not."""
        living = [rank for rank in range(4) if rank != dead]
        outcomes = self.ranks.outcomes(jobs.leave, ranks=living, timeout=20)
        assert all(outcome is not None and not outcome.kinds for outcome in outcomes), outcomes
        if dead is not None:
            self.ranks.revive(dead)


def check_survivors(found: list[object], victim: int, done: int | None = None) -> int:
    """Each survivor's error names the victim, soon, and nothing was wrong before it.

    With `done`, a survivor may have had so many right operations and no more to do.
    """
    told = 0
    for rank, outcome in enumerate(found):
        if rank == victim:
            assert outcome is None, "it was to die"
            continue
        seen = outcome.value  # type: ignore[attr-defined]
        assert isinstance(seen, jobs.Seen), outcome
        if seen == jobs.Seen(right=done or -1):
            continue
        assert not seen.wrong, f"rank {rank}: {seen}"
        assert (seen.kind, seen.culprit) == ("PeerLost", victim), f"rank {rank} of {found}"
        assert f"rank {victim} on node n{victim // 2}" in seen.text
        assert seen.seconds < SOON, f"rank {rank}: {seen}"
        told += 1
    return told
