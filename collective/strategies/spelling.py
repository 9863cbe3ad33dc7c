"""How strategies are written: `ring`, `tree:2`, `auto`, `local=ring,between=tree:2`.

A node with a local strategy of its own is named: `local=ring,local@w2=tree:2,between=ring`.  In its
name the signs that part the text (`,`, `=` and `%`) are written as in a URL: `%2C`, `%3D`, `%25`.
A level, or the whole, may be handed to another library: `local=ring,between=gloo`, `gloo`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import unquote

#: names of flat strategies, each with an example of its spelling
SPELLINGS = {
    "centralized": "centralized",
    "tree": "tree:2",
    "ring": "ring",
    "double_tree": "double_tree",
    "halving_doubling": "halving_doubling",
    "recursive_doubling": "recursive_doubling",
    "direct": "direct",
    "chain": "chain",
    "bruck": "bruck",
    "scatter_allgather": "scatter_allgather",
    "binomial": "binomial",
}
#: libraries that a level can be handed to; there is no schedule of what they do
ENGINES = ("gloo", "nccl")
#: a tree with more children per rank than any group has ranks is a slip of the pen
MAX_ARITY = 1024
#: bytes of a strategy's text in JSON: it stands in the first frame of every operation
MAX_TEXT = 8192

_ACCEPTED = (
    f"accepted are {', '.join(SPELLINGS.values())}, auto, the libraries {', '.join(ENGINES)}, "
    f"and for two levels local=ring,between=tree:2"
)


@dataclass(frozen=True)
class Flat:
    """One strategy for all ranks of a group: `Flat("ring")`, `Flat("tree", 2)`, `Flat("tree:2")`.

    `arity` belongs to `tree` and to no other.
    """

    name: str
    arity: int | None = None

    def __post_init__(self) -> None:
        if self.arity is None and isinstance(self.name, str) and ":" in self.name:
            name, arity = _flat_parts(self.name)
            object.__setattr__(self, "name", name)
            object.__setattr__(self, "arity", arity)
        if self.name not in SPELLINGS and self.name not in ENGINES:
            raise ValueError(f"there is no strategy {self.name!r:.60}; {_ACCEPTED}")
        if self.name == "tree":
            if type(self.arity) is not int or not 1 <= self.arity <= MAX_ARITY:
                raise ValueError(
                    f"a tree's arity, its children per rank, is a whole number from 1 to "
                    f"{MAX_ARITY}, such as tree:2, not {self.arity}"
                )
        elif self.arity is not None:
            raise ValueError(f"only a tree has an arity; write {self.name}, not {self}")

    def __str__(self) -> str:
        return self.name if self.arity is None else f"{self.name}:{self.arity}"


@dataclass(frozen=True)
class Auto:
    """The best strategy for each call, by the cost model; see `collective.choosing`."""

    def __str__(self) -> str:
        return "auto"


@dataclass(frozen=True, init=False)
class TwoLevel:
    """One strategy among the ranks of a node and one between nodes.

    `TwoLevel(local="ring", between="tree:2", on={"w2": "centralized"})`

    Attributes:
        local: within every node that `on` does not name.
        between: between nodes.
        on: nodes with a local strategy of their own, in order of their names.
    """

    local: Flat
    between: Flat
    on: tuple[tuple[str, Flat], ...]

    def __init__(
        self, local: Flat | str, between: Flat | str, on: Mapping[str, Flat | str] | None = None
    ) -> None:
        """Strategies are given as such or as text.

        Raises:
            ValueError: a level has no such strategy, or a node has no name.
        """
        inside = _level("local", local)
        own = {name: _level(f"local@{name}", flat) for name, flat in (on or {}).items()}
        if not all(name and isinstance(name, str) for name in own):
            raise ValueError(f"a node with a strategy of its own needs a name: {on}")
        object.__setattr__(self, "local", inside)
        object.__setattr__(self, "between", _level("between", between))
        engines = [flat.name for flat in (inside, *own.values()) if flat.name in ENGINES]
        if own and engines:
            raise ValueError(
                f"{engines[0]} runs within all nodes or within none: leave local@… out, or "
                f"{engines[0]} as the local level"
            )
        # what says nothing is left out: equal strategies are equal texts
        differing = ((name, flat) for name, flat in sorted(own.items()) if flat != inside)
        object.__setattr__(self, "on", tuple(differing))
        if (length := len(json.dumps(str(self)))) > MAX_TEXT:
            raise ValueError(
                f"a strategy of {length} bytes for {len(self.on)} nodes, at most are {MAX_TEXT}: "
                f"make that of most nodes the one for all"
            )

    def within(self, names: Sequence[str]) -> tuple[Flat, ...]:
        """The local strategy of each node of these names."""
        own = dict(self.on)
        return tuple(own.get(name, self.local) for name in names)

    def __str__(self) -> str:
        own = "".join(f"local@{_quoted(name)}={flat}," for name, flat in self.on)
        return f"local={self.local},{own}between={self.between}"


Strategy = Flat | TwoLevel | Auto


@lru_cache(maxsize=256)
def parse(text: str | Strategy) -> Strategy:
    """The strategy that a text names, or that is given; `str` of it is its one text.

    Raises:
        ValueError: the text names none; says what is accepted.
    """
    if isinstance(text, Strategy):
        return text
    if not isinstance(text, str):
        raise ValueError(f"a strategy is a text, Flat or TwoLevel, not {text!r}; {_ACCEPTED}")
    if text == "auto":
        return Auto()
    if "=" in text or "," in text:
        return _two_level(text)
    return Flat(*_flat_parts(text))


def _flat_parts(text: str) -> tuple[str, int | None]:
    name, colon, arity = text.partition(":")
    if name not in SPELLINGS and name not in ENGINES:
        raise ValueError(f"there is no strategy {text!r:.60}; {_ACCEPTED}")
    if name != "tree":
        if colon:
            raise ValueError(f"only a tree has an arity; write {name}, not {text!r}")
        return name, None
    # one spelling per strategy, so that equal strategies are equal texts: no sign, no leading zero
    if not re.fullmatch(r"[1-9][0-9]{0,3}", arity, re.ASCII):
        raise ValueError(
            f"a tree's arity, its children per rank, is a whole number from 1 to {MAX_ARITY}, "
            f"such as tree:2, not {text!r}"
        )
    return name, int(arity)


def _level(level: str, strategy: Flat | str) -> Flat:
    if isinstance(strategy, Flat):
        return strategy
    if strategy == "auto":
        raise ValueError(f"a level cannot be auto, as {level!r} here; write auto for the whole")
    if not isinstance(strategy, str):
        raise ValueError(
            f"the strategy of level {level!r} is a text or Flat, not {strategy!r}; {_ACCEPTED}"
        )
    return Flat(*_flat_parts(strategy))


def _two_level(text: str) -> TwoLevel:
    levels: dict[str, str] = {}
    own: dict[str, Flat | str] = {}
    for part in text.split(","):
        level, equals, strategy = part.partition("=")
        kind, at, quoted = level.partition("@")
        name = unquote(quoted) if at else ""
        node = kind == "local" and at == "@"
        if node and quoted != _quoted(name):
            raise ValueError(
                f"the node's name in {part!r} is written {_quoted(name)!r}: only the signs , = % "
                f"are replaced, by %2C %3D %25"
            )
        known = (node and name not in own) or (
            level in ("local", "between") and level not in levels
        )
        if not equals or not known:
            raise ValueError(
                f"two levels are written local=ring,between=tree:2, each level once, and a node's "
                f"own strategy local@NAME=tree:2, not {text!r}"
            )
        if node:
            own[name] = strategy
        else:
            levels[level] = strategy
    for level in ("local", "between"):
        if level not in levels:
            raise ValueError(
                f"{text!r} does not say the strategy of {level!r}; "
                f"two levels are written local=ring,between=tree:2"
            )
    return TwoLevel(levels["local"], levels["between"], own)


def _quoted(name: str) -> str:
    """A node's name as it stands in a text, in one way only."""
    return name.replace("%", "%25").replace(",", "%2C").replace("=", "%3D")
