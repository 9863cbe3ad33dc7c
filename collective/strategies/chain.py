"""Chain: from rank to rank in one line, the engine's segments one behind the other.

For a large tensor the whole takes hardly longer than one transfer: what a rank has received of it
is on its way to the next one already.
"""

from __future__ import annotations

from collective.schedule import Schedule, then
from collective.strategies import tree


def copy_down(ranks: int, root: int) -> Schedule:
    """The root's tensor goes from rank to rank. Part of larger schedules."""
    return tree.copy_down(ranks, root, 1)


def sum_up(ranks: int, root: int) -> Schedule:
    """From the last rank to the root each adds its own. Part of larger schedules."""
    return tree.sum_up(ranks, root, 1)


def all_reduce(ranks: int, root: int) -> Schedule:
    """The sum goes along the chain to the root and back."""
    return then(sum_up(ranks, root), copy_down(ranks, root))


def reduce(ranks: int, root: int) -> Schedule:
    """From the last rank to the root each adds its own."""
    return then(sum_up(ranks, root), tree.tokens(ranks, root, chunks=1, confirm=False))


def broadcast(ranks: int, root: int) -> Schedule:
    """The root's tensor goes from rank to rank."""
    return then(copy_down(ranks, root), tree.tokens(ranks, root, chunks=1, confirm=True))
