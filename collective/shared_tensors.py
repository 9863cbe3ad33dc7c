"""Tensors that the other ranks of the node read where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from collective.links import arena


def empty(shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """A CPU tensor in memory that the ranks of the node share, like `torch.empty` otherwise.

    Collectives on it, on its views and on slices of it send ranks of the node no bytes, but say
    where they lie.  Between nodes it travels as any tensor does, and each rank may use one or not.

    Args:
        shape: of the tensor; contiguous.
        dtype: torch's default dtype unless given.

    Raises:
        TypeError: no dtype.
        MemoryError: the machine's memory is not enough, or the limit of virtual memory.
    """
    kind = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(kind, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype such as torch.float32, not {dtype!r}")
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    count = prod(sizes)
    if count <= 0:
        return torch.empty(sizes, dtype=kind)  # nothing to share; or torch's error
    room = arena.make_own().take(count * kind.itemsize)
    return torch.frombuffer(room, dtype=kind, count=count).view(sizes)
