"""Tensors of a list as one row in memory, so that small ones can travel in one segment."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from collective.arguments import Tensors
from collective.compiled import runs_of
from collective.reduction import Buffer, room_for


class Row:
    """Host memory in which tensors of one type follow each other.

    Attributes:
        array: all of them, in one dimension.
        runs: each.
    """

    def __init__(self, parts: Sequence[torch.Tensor], given: Tensors) -> None:
        """Make room for `parts`: the memory of `given` itself where that is one flat tensor."""
        self._parts = parts
        self._whole = Buffer(given) if isinstance(given, torch.Tensor) else None
        sizes = [part.numel() for part in parts]
        self.array = (
            room_for(sum(sizes), parts[0].dtype) if self._whole is None else self._whole.array
        )
        self.runs = [self.array[run.start : run.stop] for run in runs_of(sizes)]

    def commit(self) -> None:
        """Write all of them back into the tensors."""
        if self._whole is not None:
            self._whole.commit()
            return
        for run, part in zip(self.runs, self._parts, strict=True):
            target = Buffer(part)
            target.array[...] = run
            target.commit()
