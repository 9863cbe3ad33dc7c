"""What `auto` chooses.

Ranks of one node share its cores, so that the strategy with the least work in all is the fastest:
few messages for small tensors, whoever has to wait for them.  Between nodes each has cores and a
card of its own: what counts there is how many hops follow each other, and what the busiest card
carries.  The first table was measured on two cores; the second follows the cost model of
`collective.prediction` for links of 1 to 25 Gbit/s, within a tenth or two of the best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from collective.schedule import Kind
from collective.strategies.spelling import Flat, TwoLevel


@dataclass(frozen=True)
class Rule:
    """`strategy` is chosen for `kind` within these limits.

    Attributes:
        ranks: at most so many.
        nbytes: below so many bytes.
        share: below so many bytes of the tensor per rank.
        power: only for a number of ranks that is a power of two.
    """

    kind: Kind
    strategy: Flat
    ranks: int | None = None
    nbytes: int | None = None
    share: int | None = None
    power: bool = False

    def fits(self, kind: Kind, ranks: int, nbytes: int) -> bool:
        return (
            kind is self.kind
            and (self.ranks is None or ranks <= self.ranks)
            and (self.nbytes is None or nbytes < self.nbytes)
            and (self.share is None or nbytes < self.share * ranks)
            and (not self.power or ranks & (ranks - 1) == 0)
        )


_KIB, _MIB = 1 << 10, 1 << 20
_STAR, _RING, _TREES = Flat("centralized"), Flat("ring"), Flat("double_tree")
_CHAIN, _DIRECT, _BRUCK = Flat("chain"), Flat("direct"), Flat("bruck")
_SHARES = Flat("scatter_allgather")
_DOUBLING, _HALVING = Flat("recursive_doubling"), Flat("halving_doubling")
#: schedules whose moves grow with the square of the ranks are written out up to so many
_MANY = 64

_ONLY = (
    Rule(Kind.GATHER, _STAR),
    Rule(Kind.SCATTER, _STAR),
    Rule(Kind.ALL_TO_ALL, _DIRECT),
)

#: for ranks of one node; the first rule that fits counts, the last one of each kind fits always
WITHIN = (
    # two ranks: a swap is one hop, a ring two hops of half the bytes each
    Rule(Kind.ALL_REDUCE, _DIRECT, ranks=2, nbytes=_MIB),
    Rule(Kind.ALL_REDUCE, _RING, ranks=2),
    Rule(Kind.ALL_REDUCE, _STAR, ranks=4, nbytes=2 * _MIB),
    Rule(Kind.ALL_REDUCE, _STAR, ranks=8, nbytes=_MIB),
    Rule(Kind.ALL_REDUCE, _TREES, ranks=8, share=_MIB),
    Rule(Kind.ALL_REDUCE, _DOUBLING, nbytes=64 * _KIB),
    Rule(Kind.ALL_REDUCE, _HALVING, share=_MIB, power=True),
    Rule(Kind.ALL_REDUCE, _BRUCK, share=_MIB),
    Rule(Kind.ALL_REDUCE, _RING),
    Rule(Kind.BROADCAST, _STAR, ranks=8, nbytes=2 * _MIB),
    Rule(Kind.BROADCAST, _SHARES, ranks=8),
    Rule(Kind.BROADCAST, _TREES),
    Rule(Kind.REDUCE, _STAR, ranks=8, nbytes=2 * _MIB),
    Rule(Kind.REDUCE, _CHAIN, ranks=4),
    Rule(Kind.REDUCE, _TREES),
    Rule(Kind.BARRIER, _STAR, ranks=8),
    Rule(Kind.BARRIER, _BRUCK),
    Rule(Kind.REDUCE_SCATTER, _BRUCK, share=_MIB),
    Rule(Kind.REDUCE_SCATTER, _RING),
    Rule(Kind.ALL_GATHER, _DIRECT, ranks=8, nbytes=256 * _KIB),
    Rule(Kind.ALL_GATHER, _BRUCK, share=4 * _MIB),
    Rule(Kind.ALL_GATHER, _RING),
    *_ONLY,
)

#: the same between nodes of one rank each
BETWEEN = (
    Rule(Kind.ALL_REDUCE, _DIRECT, ranks=2, nbytes=_MIB),
    Rule(Kind.ALL_REDUCE, _RING, ranks=2),
    Rule(Kind.ALL_REDUCE, _DIRECT, ranks=3, nbytes=64 * _KIB),
    Rule(Kind.ALL_REDUCE, _DOUBLING, nbytes=128 * _KIB, power=True),
    Rule(Kind.ALL_REDUCE, _DOUBLING, nbytes=32 * _KIB),
    # shares below 1 MiB have no segments to pipeline: hops count more than a ring's even load
    Rule(Kind.ALL_REDUCE, _HALVING, share=_MIB, power=True),
    Rule(Kind.ALL_REDUCE, _BRUCK, share=_MIB),
    Rule(Kind.ALL_REDUCE, _RING),
    Rule(Kind.BROADCAST, _SHARES, ranks=2),
    Rule(Kind.BROADCAST, _STAR, ranks=8, nbytes=16 * _KIB),
    Rule(Kind.BROADCAST, _TREES, nbytes=16 * _KIB),
    Rule(Kind.BROADCAST, _SHARES, ranks=_MANY, nbytes=4 * _MIB),
    Rule(Kind.BROADCAST, _TREES),
    Rule(Kind.REDUCE, _STAR, ranks=2),
    Rule(Kind.REDUCE, _STAR, ranks=8, nbytes=16 * _KIB),
    Rule(Kind.REDUCE, _TREES, nbytes=16 * _KIB),
    Rule(Kind.REDUCE, _SHARES, ranks=_MANY, nbytes=4 * _MIB),
    Rule(Kind.REDUCE, _TREES),
    Rule(Kind.BARRIER, _BRUCK),
    Rule(Kind.REDUCE_SCATTER, _DIRECT, ranks=_MANY, nbytes=64 * _KIB),
    Rule(Kind.REDUCE_SCATTER, _BRUCK, share=_MIB),
    Rule(Kind.REDUCE_SCATTER, _RING),
    Rule(Kind.ALL_GATHER, _DIRECT, ranks=_MANY, share=_MIB),
    Rule(Kind.ALL_GATHER, _BRUCK, share=_MIB),
    Rule(Kind.ALL_GATHER, _RING),
    *_ONLY,
)

#: operations that two levels exist for, and what is done on a node beside `BETWEEN` between nodes
_LOCAL = {
    Kind.ALL_REDUCE: _DIRECT,
    Kind.REDUCE: _STAR,
    Kind.BROADCAST: _STAR,
    Kind.REDUCE_SCATTER: _DIRECT,
    Kind.ALL_GATHER: _DIRECT,
    Kind.BARRIER: _STAR,
}
#: below this, one rank of a node speaks for all of them
_LEADERS = 32 * _KIB


def choose(kind: Kind, ranks: int, nbytes: int, nodes: int | None = None) -> Flat | TwoLevel:
    """The strategy of `auto` for one call.

    Args:
        kind: the operation.
        ranks: ranks of the group.
        nbytes: bytes of the whole tensor (the same on all ranks, so all choose alike).
        nodes: nodes that they are on; as many as ranks by default.
    """
    if nodes == 1:
        return _first(WITHIN, kind, ranks, nbytes)
    if nodes is None or nodes == ranks or kind not in _LOCAL:
        return _first(BETWEEN, kind, ranks, nbytes)
    local = _STAR if kind is Kind.ALL_REDUCE and nbytes < _LEADERS else _LOCAL[kind]
    return TwoLevel(local, _first(BETWEEN, kind, nodes, nbytes))


def _first(rules: Sequence[Rule], kind: Kind, ranks: int, nbytes: int) -> Flat:
    return next(rule.strategy for rule in rules if rule.fits(kind, ranks, nbytes))


#: strategies of reductions in which only originals and final results travel, no partial sums
ORIGINALS = ("direct", "scatter_allgather")


def choose_originals(
    kind: Kind, ranks: int, nbytes: int, nodes: int | None = None
) -> Flat | TwoLevel:
    """The strategy of `auto` for sixteen-bit floats, which then travel as they are.

    Partial sums would have to travel in float32; so tensors go directly to who folds them, whole
    when they are small and there are few ranks.
    """
    if kind is Kind.REDUCE_SCATTER:
        return _DIRECT
    if kind is Kind.ALL_REDUCE:
        return _DIRECT if nbytes < 64 * _KIB and ranks <= 8 else _SHARES
    return choose(kind, ranks, nbytes, nodes)
