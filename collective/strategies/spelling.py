"""How strategies are written: `ring`, `tree:2`, `auto`, `local=ring,between=tree:2`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

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
}
#: a tree with more children per rank than any group has ranks is a slip of the pen
MAX_ARITY = 1024

_ACCEPTED = (
    f"accepted are {', '.join(SPELLINGS.values())}, auto, "
    f"and for two levels local=ring,between=tree:2"
)


@dataclass(frozen=True)
class Flat:
    """One strategy for all ranks of a group; `arity` belongs to `tree` and to no other."""

    name: str
    arity: int | None = None

    def __post_init__(self) -> None:
        if self.name not in SPELLINGS:
            raise ValueError(f"there is no strategy {self.name!r}; {_ACCEPTED}")
        if self.name == "tree":
            if self.arity is None or not 1 <= self.arity <= MAX_ARITY:
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
    """The best strategy for each call, by measured thresholds."""

    def __str__(self) -> str:
        return "auto"


@dataclass(frozen=True)
class TwoLevel:
    """One strategy among the ranks of a node and one between nodes."""

    local: Flat
    between: Flat

    def __str__(self) -> str:
        return f"local={self.local},between={self.between}"


Strategy = Flat | TwoLevel | Auto


@lru_cache(maxsize=256)
def parse(text: str) -> Strategy:
    """The strategy that a text names; `str` of the result is the text again.

    Raises:
        ValueError: the text names none; says what is accepted.
    """
    if not isinstance(text, str):
        raise ValueError(f"a strategy is a text, not {text!r}; {_ACCEPTED}")
    if text == "auto":
        return Auto()
    if "=" in text or "," in text:
        return _two_level(text)
    return _flat(text)


def _flat(text: str) -> Flat:
    name, colon, arity = text.partition(":")
    if name not in SPELLINGS:
        raise ValueError(f"there is no strategy {text!r}; {_ACCEPTED}")
    if name != "tree":
        if colon:
            raise ValueError(f"only a tree has an arity; write {name}, not {text!r}")
        return Flat(name)
    # one spelling per strategy, so that equal strategies are equal texts: no sign, no leading zero
    if not re.fullmatch(r"[1-9][0-9]{0,3}", arity, re.ASCII):
        raise ValueError(
            f"a tree's arity, its children per rank, is a whole number from 1 to {MAX_ARITY}, "
            f"such as tree:2, not {text!r}"
        )
    return Flat(name, int(arity))


def _two_level(text: str) -> TwoLevel:
    parts = dict.fromkeys(("local", "between"), "")
    for part in text.split(","):
        level, equals, strategy = part.partition("=")
        if not equals or level not in parts or parts[level]:
            raise ValueError(
                f"two levels are written local=ring,between=tree:2, each level once, not {text!r}"
            )
        parts[level] = strategy or "?"
    for level, strategy in parts.items():
        if not strategy:
            raise ValueError(
                f"{text!r} does not say the strategy of {level!r}; "
                f"two levels are written local=ring,between=tree:2"
            )
        if strategy == "auto":
            raise ValueError(f"a level cannot be auto in {text!r}; write auto for the whole")
    return TwoLevel(local=_flat(parts["local"]), between=_flat(parts["between"]))
