"""What all calls of a group share: refusing together, describing themselves, being issued."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

from collective.arguments import check_timeout
from collective.communicator import Communicator
from collective.descriptor import Descriptor, Shape, describe
from collective.errors import Refused
from collective.operation import Operation
from collective.program import Program
from collective.reduction import Array, Fold, Narrow, ReduceOp
from collective.schedule import Kind, Schedule
from collective.staged import Libraries, StagedOperation, StagedProgram
from collective.strategies import Staged
from collective.transfer import CollectiveOperation
from collective.wiring import Wiring
from collective.work import Result, Work

_CALL_SITES = os.environ.get("UNISONO_CHECK_CALL_SITES", "") not in ("", "0")


class Issuing(ABC):
    """A rank of a group, as its calls see it.

    Attributes:
        name: of the group.
        rank, size: this rank, and the number of ranks.
        nodes: the node's name of each rank.
        timeout: seconds that an operation may take when a call names none.
        asynchronous: whether a call that does not say `async_op` returns at once.
    """

    name: str
    rank: int
    size: int
    nodes: tuple[str, ...]
    timeout: float
    asynchronous: bool
    _wiring: Wiring

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: rank {self.rank} of {self.size}>"

    @abstractmethod
    def _usable(self) -> Communicator:
        """The group's links, unless it is closed or poisoned."""

    @abstractmethod
    def _schedule(
        self,
        kind: Kind,
        nbytes: int,
        root: int = 0,
        *,
        originals: bool = False,
        reduction: tuple[ReduceOp, torch.dtype] | None = None,
    ) -> tuple[Schedule | Staged, str]:
        """The schedule that the group's strategy means for a call, and its name.

        With `originals`, `auto` takes one in which no partial sums travel.  A level goes to another
        library only if that does the `reduction` rightly; else the call runs as under `auto`.
        """

    @abstractmethod
    def _other_libraries(self) -> Libraries:
        """What carries out the levels that are handed to other libraries."""

    @abstractmethod
    def _carry_out(self, operation: Operation, work: Work) -> None:
        """Run an operation, and wait for it unless it is asynchronous."""

    @abstractmethod
    def refuse(self, error: Refused, name: str) -> Refused:
        """Tell the other ranks that the operation `name` does not take place."""

    @contextmanager
    def _checking(self, kind: Kind, timeout: float | None) -> Iterator[None]:
        """What is refused inside, or a timeout that is none, is refused on all ranks."""
        self._usable()
        try:
            check_timeout(timeout)
            yield
        except Refused as error:
            raise self.refuse(error, kind.value) from None

    def _issue(
        self,
        kind: Kind,
        strategy: str,
        program: Program | StagedProgram,
        arrays: Sequence[Array],
        result: Result,
        nbytes: int,
        async_op: bool | None,
        timeout: float | None,
        *,
        dtype: torch.dtype | None = None,
        shape: Shape | None = None,
        root: int | None = None,
        reduction: str = "",
        prescale: float | None = None,
        fold: Fold | None = None,
        narrow: Narrow | None = None,
        epilogue: Callable[[], Any] | None = None,
        undo: Callable[[], Any] | None = None,
    ) -> Work:
        """Issue one collective.

        Args:
            kind, strategy, dtype, shape, root, reduction, prescale: what all ranks must agree on.
            program: what this rank does.
            arrays: the memory in which it does that.
            result: what the handle resolves to.
            nbytes: size of the tensor in memory.
            async_op, timeout: those of the call.
            fold, narrow: how contributions are combined, and how they travel.
            epilogue: makes the result of what lies in the arrays at the end.
            undo: makes the tensor what it was, if another rank refuses.
        """
        communicator = self._usable()
        descriptor = described(kind, strategy, dtype, shape, root, reduction, prescale)
        limit = self.timeout if timeout is None else timeout
        operation: Operation
        if isinstance(program, StagedProgram):
            operation = StagedOperation(
                communicator, descriptor, limit, program, arrays, fold, self._other_libraries()
            )
        else:
            operation = CollectiveOperation(
                communicator, descriptor, limit, program, arrays, fold, narrow
            )
        operation.epilogue = epilogue
        operation.undo = undo
        return self._hand_in(kind, operation, result, nbytes, async_op)

    def _hand_in(
        self,
        kind: Kind,
        operation: Operation,
        result: Result,
        nbytes: int,
        async_op: bool | None,
    ) -> Work:
        later = self.asynchronous if async_op is None else async_op
        work = Work(self, kind.value, operation, result, nbytes, later)
        self._carry_out(operation, work)
        return work


def described(
    kind: Kind,
    strategy: str,
    dtype: torch.dtype | None,
    shape: Shape | None,
    root: int | None,
    reduction: str,
    prescale: float | None,
) -> Descriptor:
    """What all ranks must agree on, as they compare it."""
    return describe(
        kind.value,
        "" if dtype is None else name_of(dtype),
        shape,
        reduction,
        root,
        strategy,
        _site(),
        # 2 and 2.0 are one factor
        None if prescale is None else float(prescale),
    )


def _site() -> str:
    """Where the program called, if call sites are compared."""
    if not _CALL_SITES:
        return ""
    frame = sys._getframe(1)
    folder = os.path.dirname(__file__)
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(folder) or "/torch/" in frame.f_code.co_filename
    ):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def common_shape(parts: Sequence[torch.Tensor], own: torch.Tensor) -> Shape:
    """What ranks compare of a list before data move: the parts' shape, or all sizes if they differ.

    Sizes stand in a tuple of their own: parts of 2 and of 3 elements are no parts of shape 2 × 3.

    The length of a frame would not tell: small parts travel together, and what another library or
    a device carries is in no frame of ours.
    """
    sizes = tuple(part.numel() for part in parts)
    return tuple(own.shape) if len(set(sizes)) == 1 else (sizes,)


@lru_cache(maxsize=64)
def name_of(dtype: torch.dtype) -> str:
    """Torch's name of a type, without `torch.`."""
    return str(dtype).removeprefix("torch.")
