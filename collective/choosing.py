"""What `auto` chooses, per operation, size and topology: what the cost model expects to be fastest.

All ranks of a group choose from the same figures by the same arithmetic, so they choose alike.
"""

from __future__ import annotations

from itertools import product

from collective.cost import Topology
from collective.estimate import estimate
from collective.schedule import Kind
from collective.strategies import (
    BUILDERS,
    LEVELS,
    ORIGINALS,
    SPELLINGS,
    Flat,
    TwoLevel,
    measured_choice,
    parse,
)

#: schedules whose moves grow with the square of the ranks are written out up to so many
_MANY = 64
_SQUARE = ("direct", "scatter_allgather")
#: arities of the trees among which is chosen
_ARITIES = (2, 4)
#: what takes at most so many times the least is as good; then the plainest is taken
_TIE = 1.001
#: on two ranks many strategies exchange the same: those that do the least beside it come first
_PLAIN = ("direct", "scatter_allgather", "ring", "recursive_doubling", "halving_doubling")
_PLAIN_IN_MEMORY = ("direct", "centralized", *_PLAIN[1:])
#: leading bits of a size that tell its class: four classes from one power of two to the next
_BITS = 3


class Chooser:
    """The choices of one group, each made once.

    Args:
        topology: of its ranks.
        together: nodes that share the cores of one machine.
    """

    def __init__(self, topology: Topology, together: int = 1) -> None:
        self.topology = topology
        self.together = together
        self._made: dict[tuple[Kind, int, bool], Flat | TwoLevel] = {}

    def choose(self, kind: Kind, nbytes: int, *, originals: bool = False) -> Flat | TwoLevel:
        """The strategy for one call.

        Args:
            kind: the operation.
            nbytes: bytes of the whole tensor (see `cost.slot_sizes`), the same on all ranks.
            originals: only a strategy in which no partial sums travel: for sixteen-bit floats,
                whose partial sums would travel in float32.
        """
        rest = max(0, nbytes.bit_length() - _BITS)
        key = (kind, nbytes >> rest << rest, originals)
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = self._choose(*key)
        return found

    def _choose(self, kind: Kind, nbytes: int, originals: bool) -> Flat | TwoLevel:
        summing = kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER)
        candidates = self._candidates(kind)
        if originals and summing:
            candidates = [Flat(name) for name in ORIGINALS if name in BUILDERS[kind]]
        elif self._crowded:
            memory = self.topology.local.held > 0
            return measured_choice(kind, self.topology.ranks, nbytes, memory=memory)
        if len(candidates) == 1:
            return candidates[0]
        times = {
            one: estimate(one, kind, self.topology, nbytes, self.together) for one in candidates
        }
        enough = min(times.values()) * _TIE
        plain = _PLAIN_IN_MEMORY if self.topology.local.held else _PLAIN
        alike = (one for one, time in times.items() if time <= enough)
        return min(alike, key=lambda one: _plainness(one, plain))

    @property
    def _crowded(self) -> bool:
        """Whether ranks of one node share too few cores.

        Then what was measured on such nodes counts (`strategies.choice`), not the model.
        """
        cores = self.topology.machine.cores
        return len(self.topology.nodes) == 1 and cores is not None and cores < self.topology.ranks

    def _candidates(self, kind: Kind) -> list[Flat | TwoLevel]:
        nodes, ranks = self.topology.nodes, self.topology.ranks
        names = tuple(BUILDERS[kind])
        memory = self.topology.local.held > 0
        if ranks == 2 and (kind is Kind.REDUCE or (kind is Kind.BROADCAST and memory)):
            # measured: 1.2 to 1.4 times what a star takes, which the model has behind it
            names = tuple(name for name in names if name != "scatter_allgather")
        flat = _spelled(kind, names, ranks)
        if len(nodes) == 1 or len(nodes) == ranks or kind not in LEVELS:
            return [*flat]
        inside, across = LEVELS[kind]
        if kind is Kind.BARRIER:  # of a local strategy only the arity counts
            inside = ("centralized", "tree")
        devices = max(map(len, nodes))
        both: list[Flat | TwoLevel] = [
            TwoLevel(local, between)
            for local, between in product(
                _spelled(kind, inside, devices), _spelled(kind, across, len(nodes))
            )
        ]
        ring = Flat("ring")
        return [*both, ring] if ring in flat and self.topology.alike else both


def _spelled(kind: Kind, names: tuple[str, ...], ranks: int) -> list[Flat]:
    """The strategies of these names that can be written out for so many ranks."""
    found: list[Flat] = []
    for name in names:
        if name == "tree":
            found += [Flat(name, arity) for arity in _ARITIES]
        elif name in ("binomial", "double_tree") and ranks < 3:
            continue  # the messages of any other, in parts
        elif ranks <= _MANY or name not in _SQUARE or len(names) == 1:
            strategy = parse(SPELLINGS[name])
            assert isinstance(strategy, Flat)
            found.append(strategy)
    return found


def _plainness(strategy: Flat | TwoLevel, plain: tuple[str, ...]) -> tuple[tuple[int, str], ...]:
    """Sorts strategies that take equally long, in the same way on all ranks."""
    if isinstance(strategy, TwoLevel):
        return _plainness(strategy.local, plain) + _plainness(strategy.between, plain)
    place = plain.index(strategy.name) if strategy.name in plain else len(plain)
    return ((place, str(strategy)),)
