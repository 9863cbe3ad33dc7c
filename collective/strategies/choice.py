"""What `auto` chooses, and what a strategy means for the operations that it does not know."""

from __future__ import annotations

from dataclasses import dataclass

from collective.schedule import Kind
from collective.strategies.spelling import Flat


@dataclass(frozen=True)
class Rule:
    """`strategy` is chosen for `kind` on at most `ranks` ranks and below `nbytes` bytes."""

    kind: Kind
    strategy: Flat
    ranks: int | None = None
    nbytes: int | None = None

    def fits(self, kind: Kind, ranks: int, nbytes: int) -> bool:
        return (
            kind is self.kind
            and (self.ranks is None or ranks <= self.ranks)
            and (self.nbytes is None or nbytes < self.nbytes)
        )


_KIB = 1024
_STAR, _RING, _TREE, _SWAP = Flat("centralized"), Flat("ring"), Flat("tree", 2), Flat("direct")

#: the first rule that fits counts; the last one of each kind fits always
RULES = (
    # two ranks: a swap is one hop, a ring two hops of half the bytes each
    Rule(Kind.ALL_REDUCE, _SWAP, ranks=2, nbytes=256 * _KIB),
    Rule(Kind.ALL_REDUCE, _RING, ranks=2),
    Rule(Kind.ALL_REDUCE, _STAR, ranks=4, nbytes=128 * _KIB),
    Rule(Kind.ALL_REDUCE, _STAR, nbytes=16 * _KIB),
    Rule(Kind.ALL_REDUCE, _RING),
    Rule(Kind.BROADCAST, _STAR, ranks=4),
    Rule(Kind.BROADCAST, _TREE),
    Rule(Kind.REDUCE, _STAR, ranks=4),
    Rule(Kind.REDUCE, _TREE),
    Rule(Kind.BARRIER, _STAR, ranks=8),
    Rule(Kind.BARRIER, _TREE),
    Rule(Kind.REDUCE_SCATTER, _RING),
    Rule(Kind.ALL_GATHER, _RING),
    Rule(Kind.GATHER, _STAR),
    Rule(Kind.SCATTER, _STAR),
    Rule(Kind.ALL_TO_ALL, Flat("direct")),
)


def choose(kind: Kind, ranks: int, nbytes: int) -> Flat:
    """The strategy of `auto` for one call.

    Args:
        kind: the operation.
        ranks: ranks of the group.
        nbytes: bytes of the whole tensor (the same on all ranks, so all choose alike).
    """
    return next(rule.strategy for rule in RULES if rule.fits(kind, ranks, nbytes))


#: strategies of reductions in which only originals and final results travel, no partial sums
ORIGINALS = ("direct", "scatter_allgather")


def choose_originals(kind: Kind, ranks: int, nbytes: int) -> Flat:
    """The strategy of `auto` for sixteen-bit floats, which then travel as they are.

    Partial sums would have to travel in float32; so tensors go directly to who folds them, whole
    when they are small and there are few ranks.
    """
    if kind is Kind.REDUCE_SCATTER:
        return Flat("direct")
    if kind is Kind.ALL_REDUCE:
        small = nbytes < 64 * _KIB and ranks <= 8
        return Flat("direct") if small else Flat("scatter_allgather")
    return choose(kind, ranks, nbytes)
