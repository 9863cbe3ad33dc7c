"""The tensors of a list as an operation's memory: each where it is, or one behind the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from collective.arguments import Tensors
from collective.compiled import in_a_row, listed, runs_of
from collective.program import Program
from collective.reduction import Array, Buffer, fill, pour, room_for
from collective.schedule import Schedule
from collective.staged import StagedProgram
from collective.strategies.handed import Staged


class Slots:
    """One tensor per rank.

    Attributes:
        arrays: what the operation works in.
        views: each tensor's part of that, flat.
    """

    def __init__(
        self,
        parts: Sequence[torch.Tensor],
        given: Tensors,
        *,
        together: bool,
        blank: bool = False,
    ) -> None:
        """Make memory of `parts`, which are those of `given`.

        Args:
            parts: a tensor for each rank, all of one type.
            given: them as a list, or as one flat tensor.
            together: in a row, so that small ones can travel in one segment.
            blank: their values are not needed, only replaced.
        """
        self._parts = parts
        self._sizes = tuple(part.numel() for part in parts)
        self._together = together
        self._buffers: list[Buffer] = []
        self.arrays: list[Array]
        if not together:
            self._buffers = [Buffer(part, blank=blank) for part in parts]
            self.arrays = self.views = [buffer.array for buffer in self._buffers]
            return
        if isinstance(given, torch.Tensor):
            self._buffers = [Buffer(given, blank=blank)]
            row = self._buffers[0].array
        else:
            row = room_for(sum(self._sizes), parts[0].dtype)
        self.arrays = [row]
        self.views = [row[run.start : run.stop] for run in runs_of(self._sizes)]

    def program(self, schedule: Schedule | Staged, rank: int) -> Program | StagedProgram:
        """What `rank` does in this memory."""
        compiled = in_a_row if self._together else listed
        return compiled(schedule, rank, self._sizes, self.views[rank].itemsize)

    def load(self) -> None:
        """Bring the tensors' values in."""
        if not self._buffers:
            for view, part in zip(self.views, self._parts, strict=True):
                fill(view, part)

    def commit(self) -> None:
        """Write what lies here into the tensors."""
        for buffer in self._buffers:
            buffer.commit()
        if not self._buffers:
            for view, part in zip(self.views, self._parts, strict=True):
                pour(view, part)
