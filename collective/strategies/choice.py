"""What was measured to be fastest among ranks that share too few cores.

Where a machine has fewer cores than ranks, the strategy with the least work in all is the fastest:
few messages for small tensors, whoever has to wait for them.  How the ranks take turns on a core
counts more there than what the cost model knows, so this table stands in for it.  It was measured
on two cores, with 2, 4 and 8 ranks, on shared memory and WebSocket (`unisono bench collectives
--strategy all`); where the two differ little it follows shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from collective.schedule import Kind
from collective.strategies.spelling import Flat


@dataclass(frozen=True)
class Rule:
    """`strategy` is chosen for `kind` within these limits.

    Attributes:
        ranks: at most so many.
        nbytes: below so many bytes.
        share: below so many bytes of the tensor per rank.
        power: only for a number of ranks that is a power of two.
        memory: only through shared memory.
    """

    kind: Kind
    strategy: Flat
    ranks: int | None = None
    nbytes: int | None = None
    share: int | None = None
    power: bool = False
    memory: bool = False

    def fits(self, kind: Kind, ranks: int, nbytes: int, memory: bool) -> bool:
        return (
            kind is self.kind
            and (self.ranks is None or ranks <= self.ranks)
            and (self.nbytes is None or nbytes < self.nbytes)
            and (self.share is None or nbytes < self.share * ranks)
            and (not self.power or ranks & (ranks - 1) == 0)
            and (not self.memory or memory)
        )


_KIB, _MIB = 1 << 10, 1 << 20
_STAR, _TREE, _TREES = Flat("centralized"), Flat("tree", 2), Flat("double_tree")
_RING = Flat("ring")
_DIRECT, _BRUCK = Flat("direct"), Flat("bruck")
_SHARES = Flat("scatter_allgather")
_DOUBLING, _HALVING = Flat("recursive_doubling"), Flat("halving_doubling")

#: the first rule that fits counts, the last one of each kind fits always
TABLE = (
    # two ranks: a swap is one hop, a ring two hops of half the bytes each
    Rule(Kind.ALL_REDUCE, _DIRECT, ranks=2, nbytes=_MIB),
    Rule(Kind.ALL_REDUCE, _RING, ranks=2),
    Rule(Kind.ALL_REDUCE, _STAR, ranks=4, nbytes=2 * _MIB),
    Rule(Kind.ALL_REDUCE, _BRUCK, ranks=4, nbytes=3 * _MIB),
    Rule(Kind.ALL_REDUCE, _HALVING, ranks=4, nbytes=8 * _MIB, power=True),
    Rule(Kind.ALL_REDUCE, _BRUCK, ranks=4, nbytes=8 * _MIB),
    Rule(Kind.ALL_REDUCE, _RING, ranks=4),
    Rule(Kind.ALL_REDUCE, _STAR, ranks=8, nbytes=_MIB),
    Rule(Kind.ALL_REDUCE, _TREE, ranks=8, nbytes=8 * _MIB),
    Rule(Kind.ALL_REDUCE, _DOUBLING, nbytes=64 * _KIB),
    Rule(Kind.ALL_REDUCE, _HALVING, share=_MIB, power=True),
    Rule(Kind.ALL_REDUCE, _BRUCK, share=_MIB),
    Rule(Kind.ALL_REDUCE, _RING),
    Rule(Kind.BROADCAST, _STAR, ranks=8, nbytes=2 * _MIB),
    Rule(Kind.BROADCAST, _TREE, ranks=8, memory=True),
    Rule(Kind.BROADCAST, _SHARES, ranks=8),
    Rule(Kind.BROADCAST, _TREES),
    # who passes sums on needs memory for them
    Rule(Kind.REDUCE, _STAR, ranks=8),
    Rule(Kind.REDUCE, _TREES),
    Rule(Kind.BARRIER, _STAR, ranks=8),
    Rule(Kind.BARRIER, _BRUCK),
    Rule(Kind.REDUCE_SCATTER, _HALVING, share=2 * _MIB, power=True),
    Rule(Kind.REDUCE_SCATTER, _BRUCK, share=_MIB),
    Rule(Kind.REDUCE_SCATTER, _RING),
    Rule(Kind.ALL_GATHER, _HALVING, nbytes=_MIB, power=True),
    Rule(Kind.ALL_GATHER, _DIRECT, ranks=4, nbytes=2 * _MIB),
    Rule(Kind.ALL_GATHER, _DIRECT, ranks=8, nbytes=256 * _KIB),
    Rule(Kind.ALL_GATHER, _BRUCK, share=4 * _MIB),
    Rule(Kind.ALL_GATHER, _RING),
    Rule(Kind.GATHER, _STAR),
    Rule(Kind.SCATTER, _STAR),
    Rule(Kind.ALL_TO_ALL, _DIRECT),
)

#: strategies of reductions in which only originals and final results travel, no partial sums
ORIGINALS = ("direct", "scatter_allgather")


def measured_choice(kind: Kind, ranks: int, nbytes: int, *, memory: bool) -> Flat:
    """The strategy for an operation of `nbytes` (the whole tensor) on ranks that share cores.

    `memory` says that their links go through it.
    """
    return next(rule.strategy for rule in TABLE if rule.fits(kind, ranks, nbytes, memory))
