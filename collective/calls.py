"""The calls of a group: each checks its arguments, describes itself, and issues an operation.

Every call works in place on torch tensors and is the same on all ranks of the group, in the same
order.  Calls are synchronous by default; with ``async_op=True`` they return at once.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from collective.arguments import Tensors, check_rank, cut, parts_of, rooted_parts
from collective.communicator import Communicator
from collective.compiled import chunked, listed, owned
from collective.descriptor import Descriptor, describe
from collective.errors import Refused
from collective.messaging import Message
from collective.operation import Operation
from collective.program import Program
from collective.reduction import (
    Array,
    Buffer,
    Fold,
    Narrow,
    ReduceOp,
    check_reduction,
    check_tensor,
    divide,
    fold_of,
    is_widened,
    scale,
)
from collective.schedule import Kind, Schedule
from collective.strategies import ORIGINALS
from collective.transfer import CollectiveOperation
from collective.wiring import Wiring
from collective.work import Work

_CALL_SITES = os.environ.get("UNISONO_CHECK_CALL_SITES", "") not in ("", "0")


class Calls(ABC):
    """What `collective.group.Group` can be asked to do."""

    rank: int
    size: int
    nodes: tuple[str, ...]
    timeout: float
    _wiring: Wiring

    @abstractmethod
    def _usable(self) -> Communicator:
        """The group's links, unless it is closed or poisoned."""

    @abstractmethod
    def _schedule(
        self, kind: Kind, nbytes: int, root: int = 0, *, originals: bool = False
    ) -> tuple[Schedule, str]:
        """The schedule that the group's strategy means for a call, and its name.

        With `originals`, `auto` takes one in which no partial sums travel.
        """

    @abstractmethod
    def _carry_out(self, operation: Operation, work: Work) -> None:
        """Run an operation, and wait for it unless it is asynchronous."""

    @abstractmethod
    def refuse(self, error: Refused, name: str) -> Refused:
        """Tell the other ranks that the operation `name` does not take place."""

    def _issue(
        self,
        kind: Kind,
        descriptor: Descriptor,
        program: Program,
        arrays: Sequence[Array],
        fold: Fold | None,
        epilogue: Callable[[], Any] | None,
        result: torch.Tensor | list[torch.Tensor] | None,
        nbytes: int,
        async_op: bool,
        timeout: float | None,
        narrow: Narrow | None = None,
    ) -> Work:
        communicator = self._usable()
        limit = self.timeout if timeout is None else timeout
        operation = CollectiveOperation(
            communicator, descriptor, limit, program, arrays, fold, narrow
        )
        operation.epilogue = epilogue
        work = Work(self, kind.value, operation, result, nbytes, async_op)
        self._carry_out(operation, work)
        return work

    def _site(self) -> str:
        if not _CALL_SITES:
            return ""
        frame = sys._getframe(1)
        folder = os.path.dirname(__file__)
        while frame.f_back is not None and (
            frame.f_code.co_filename.startswith(folder) or "/torch/" in frame.f_code.co_filename
        ):
            frame = frame.f_back
        return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"

    # -- collectives --------------------------------------------------------------------------

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: ReduceOp | str = ReduceOp.SUM,
        prescale: float | None = None,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work:
        """Combine `tensor` of all ranks; every rank gets the same bytes.

        Args:
            tensor: any shape, dense, any strides without overlap; replaced by the result.
            op: how the values are combined; the mean divides by the number of ranks.
            prescale: a factor for each contribution before it is combined, in the dtype in which
                they are combined (float32 for sixteen-bit floats); the same on all ranks.
            async_op: return before the result is final.
            timeout: seconds; the group's by default.

        Raises:
            Refused: dtype, reduction or layout has no right answer; nothing was changed.
            CollectiveError: the operation failed; the group cannot be used any more.
        """
        self._usable()
        try:
            op = ReduceOp.of(op)
            check_tensor(tensor, "the tensor", written=True)
            check_reduction(op, tensor.dtype, prescale)
        except Refused as error:
            raise self.refuse(error, "all_reduce") from None
        buffer = Buffer(tensor, widen=True)
        array = buffer.array
        short = is_widened(tensor.dtype) and prescale is None
        schedule, strategy = self._schedule(Kind.ALL_REDUCE, tensor.nbytes, originals=short)
        program = chunked(schedule, self.rank, array.size, array.itemsize)
        count = self.size if op is ReduceOp.MEAN else 1
        narrow = Narrow(tensor.dtype, count) if short and strategy in ORIGINALS else None
        descriptor = describe(
            "all_reduce", _name(tensor.dtype), tuple(tensor.shape), op.value, None, strategy,
            self._site(), _factor(prescale),
        )  # fmt: skip
        scale(array, prescale)

        def epilogue() -> None:
            if op is ReduceOp.MEAN:
                for start, stop in [(0, array.size)] if narrow is None else owned(program):
                    divide(array[start:stop], self.size)
            buffer.commit()

        return self._issue(
            Kind.ALL_REDUCE, descriptor, program, (array,), fold_of(op, tensor.dtype), epilogue,
            tensor, tensor.nbytes, async_op, timeout, narrow,
        )  # fmt: skip

    def reduce(
        self,
        tensor: torch.Tensor,
        dst: int,
        op: ReduceOp | str = ReduceOp.SUM,
        prescale: float | None = None,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work:
        """Combine `tensor` of all ranks into that of rank `dst`; the others keep theirs.

        `op` and `prescale` are those of `all_reduce`.
        """
        self._usable()
        try:
            op = ReduceOp.of(op)
            check_rank(self, dst, "dst")
            check_tensor(tensor, "the tensor", written=self.rank == dst)
            check_reduction(op, tensor.dtype, prescale)
        except Refused as error:
            raise self.refuse(error, "reduce") from None
        here = self.rank == dst
        schedule, strategy = self._schedule(Kind.REDUCE, tensor.nbytes, dst)
        folds = any(
            move.dst == self.rank and move.read.count for _, move in schedule.program(self.rank)
        )
        buffer = Buffer(tensor, widen=True, private=(folds or prescale is not None) and not here)
        array = buffer.array
        program = chunked(schedule, self.rank, array.size, array.itemsize)
        descriptor = describe(
            "reduce", _name(tensor.dtype), tuple(tensor.shape), op.value, dst, strategy,
            self._site(), _factor(prescale),
        )  # fmt: skip
        scale(array, prescale)

        def epilogue() -> None:
            if op is ReduceOp.MEAN:
                divide(array, self.size)
            buffer.commit()

        return self._issue(
            Kind.REDUCE, descriptor, program, (array,), fold_of(op, tensor.dtype),
            epilogue if here else None, tensor, array.nbytes, async_op, timeout,
        )  # fmt: skip

    def broadcast(
        self,
        tensor: torch.Tensor,
        src: int,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work:
        """Give `tensor` of rank `src` to all ranks; done when all have it."""
        self._usable()
        try:
            check_rank(self, src, "src")
            check_tensor(tensor, "the tensor", written=self.rank != src)
        except Refused as error:
            raise self.refuse(error, "broadcast") from None
        buffer = Buffer(tensor)
        array = buffer.array
        schedule, strategy = self._schedule(Kind.BROADCAST, array.nbytes, src)
        program = chunked(schedule, self.rank, array.size, array.itemsize)
        descriptor = describe(
            "broadcast",
            _name(tensor.dtype),
            tuple(tensor.shape),
            "",
            src,
            strategy,
            self._site(),
        )
        return self._issue(
            Kind.BROADCAST, descriptor, program, (array,), None,
            buffer.commit if self.rank != src else None, tensor, array.nbytes, async_op, timeout,
        )  # fmt: skip

    def reduce_scatter(
        self,
        output: torch.Tensor,
        inputs: Tensors,
        op: ReduceOp | str = ReduceOp.SUM,
        prescale: float | None = None,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work:
        """Combine `inputs` of all ranks; rank r gets the result of part r in `output`.

        Args:
            output: this rank's part.
            inputs: one tensor per rank, or one tensor of size × the elements of `output`.
            op, prescale: those of `all_reduce`.
        """
        self._usable()
        try:
            op = ReduceOp.of(op)
            check_tensor(output, "output", written=True)
            check_reduction(op, output.dtype, prescale)
            parts = parts_of(self, inputs, "inputs", output, written=False, equal=False)
        except Refused as error:
            raise self.refuse(error, "reduce_scatter") from None
        wide = [Buffer(part, widen=True, private=True).array for part in parts]
        total = sum(part.nbytes for part in parts)
        short = is_widened(output.dtype) and prescale is None
        schedule, strategy = self._schedule(Kind.REDUCE_SCATTER, total, originals=short)
        narrow = Narrow(output.dtype, 1) if short and strategy in ORIGINALS else None
        program = listed(schedule, self.rank, tuple(array.size for array in wide), wide[0].itemsize)
        shape = None if len({part.numel() for part in parts}) > 1 else tuple(output.shape)
        descriptor = describe(
            "reduce_scatter",
            _name(output.dtype),
            shape,
            op.value,
            None,
            strategy,
            self._site(),
            _factor(prescale),
        )
        for array in wide:
            scale(array, prescale)
        mine = wide[self.rank]

        def epilogue() -> None:
            if op is ReduceOp.MEAN:
                divide(mine, self.size)
            _store(output, mine)

        return self._issue(
            Kind.REDUCE_SCATTER, descriptor, program, wide, fold_of(op, output.dtype), epilogue,
            output, total, async_op, timeout, narrow,
        )  # fmt: skip

    def all_gather(
        self,
        outputs: Tensors,
        input: torch.Tensor,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work:
        """Give `input` of every rank to all ranks.

        Args:
            outputs: one tensor per rank, or one tensor of size × the elements of `input`.
            input: this rank's contribution.
        """
        self._usable()
        try:
            check_tensor(input, "input", written=False)
            parts = parts_of(self, outputs, "outputs", input, written=True, equal=False)
            if parts[self.rank].numel() != input.numel():
                raise Refused(
                    f"outputs[{self.rank}] has {parts[self.rank].numel()} elements, "
                    f"but input has {input.numel()}"
                )
        except Refused as error:
            raise self.refuse(error, "all_gather") from None
        buffers = [Buffer(part) for part in parts]
        own = buffers[self.rank].array
        own[...] = Buffer(input).array
        arrays = [buffer.array for buffer in buffers]
        total = sum(array.nbytes for array in arrays)
        schedule, strategy = self._schedule(Kind.ALL_GATHER, total)
        program = listed(schedule, self.rank, tuple(array.size for array in arrays), own.itemsize)
        shape = None if len({part.numel() for part in parts}) > 1 else tuple(input.shape)
        descriptor = describe(
            "all_gather", _name(input.dtype), shape, "", None, strategy, self._site()
        )
        return self._issue(
            Kind.ALL_GATHER, descriptor, program, arrays, None, _commit_all(buffers),
            _result(outputs), total, async_op, timeout,
        )  # fmt: skip

    def gather(
        self,
        input: torch.Tensor,
        outputs: Tensors | None,
        dst: int,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work:
        """Collect `input` of every rank in `outputs` of rank `dst`; None on the other ranks."""
        self._usable()
        try:
            check_rank(self, dst, "dst")
            check_tensor(input, "input", written=False)
            parts = rooted_parts(self, outputs, "outputs", input, dst, written=True)
        except Refused as error:
            raise self.refuse(error, "gather") from None
        source = Buffer(input)
        buffers: list[Buffer] = []
        arrays = [source.array] * self.size
        if parts is not None:
            buffers = [Buffer(part) for part in parts]
            arrays = [buffer.array for buffer in buffers]
            arrays[self.rank][...] = source.array
        total = source.array.nbytes * self.size
        schedule, strategy = self._schedule(Kind.GATHER, total, dst)
        sizes = tuple(array.size for array in arrays)
        program = listed(schedule, self.rank, sizes, source.array.itemsize)
        descriptor = describe(
            "gather", _name(input.dtype), tuple(input.shape), "", dst, strategy, self._site()
        )
        return self._issue(
            Kind.GATHER, descriptor, program, arrays, None, _commit_all(buffers),
            _result(outputs), total, async_op, timeout,
        )  # fmt: skip

    def scatter(
        self,
        output: torch.Tensor,
        inputs: Tensors | None,
        src: int,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work:
        """Give `inputs[r]` of rank `src` to rank r in `output`; None on the other ranks."""
        self._usable()
        try:
            check_rank(self, src, "src")
            check_tensor(output, "output", written=True)
            parts = rooted_parts(self, inputs, "inputs", output, src, written=False)
        except Refused as error:
            raise self.refuse(error, "scatter") from None
        target = Buffer(output)
        arrays = [target.array] * self.size
        if parts is not None:
            arrays = [Buffer(part).array for part in parts]
            target.array[...] = arrays[self.rank]
        total = target.array.nbytes * self.size
        schedule, strategy = self._schedule(Kind.SCATTER, total, src)
        sizes = tuple(array.size for array in arrays)
        program = listed(schedule, self.rank, sizes, target.array.itemsize)
        descriptor = describe(
            "scatter",
            _name(output.dtype),
            tuple(output.shape),
            "",
            src,
            strategy,
            self._site(),
        )
        return self._issue(
            Kind.SCATTER, descriptor, program, arrays, None, target.commit, output, total,
            async_op, timeout,
        )  # fmt: skip

    def all_to_all(
        self,
        outputs: Tensors,
        inputs: Tensors,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work:
        """Send `inputs[r]` to rank r and receive `outputs[r]` from it.

        Args:
            outputs, inputs: one tensor per rank, whose sizes may differ, or one tensor that is cut
                into equal parts.
        """
        self._usable()
        given = outputs
        try:
            outputs = cut(self, outputs, "outputs", written=True)
            inputs = cut(self, inputs, "inputs", written=False)
            for name, tensors in (("outputs", outputs), ("inputs", inputs)):
                if len(tensors) != self.size:
                    raise Refused(f"{name} has {len(tensors)} tensors, the group {self.size} ranks")
                for index, tensor in enumerate(tensors):
                    check_tensor(tensor, f"{name}[{index}]", written=name == "outputs")
                    if tensor.dtype != inputs[0].dtype:
                        raise Refused(
                            f"{name}[{index}] is {tensor.dtype}, but inputs[0] {inputs[0].dtype}"
                        )
            if inputs[self.rank].numel() != outputs[self.rank].numel():
                raise Refused(
                    f"inputs[{self.rank}] has {inputs[self.rank].numel()} elements, "
                    f"outputs[{self.rank}] {outputs[self.rank].numel()}"
                )
        except Refused as error:
            raise self.refuse(error, "all_to_all") from None
        targets = [Buffer(tensor) for tensor in outputs]
        sources = [Buffer(tensor).array for tensor in inputs]
        targets[self.rank].array[...] = sources[self.rank]
        arrays = [*sources, *(target.array for target in targets)]
        # the choice of a strategy must not depend on sizes that differ between ranks
        schedule, strategy = self._schedule(Kind.ALL_TO_ALL, 0)
        sizes = tuple(array.size for array in arrays)
        program = listed(schedule, self.rank, sizes, arrays[0].itemsize)
        descriptor = describe(
            "all_to_all", _name(inputs[0].dtype), None, "", None, strategy, self._site()
        )
        total = sum(array.nbytes for array in sources)
        return self._issue(
            Kind.ALL_TO_ALL, descriptor, program, arrays, None, _commit_all(targets),
            _result(given), total, async_op, timeout,
        )  # fmt: skip

    def barrier(self, *, async_op: bool = False, timeout: float | None = None) -> Work:
        """Return when all ranks have called it."""
        schedule, strategy = self._schedule(Kind.BARRIER, 0)
        program = chunked(schedule, self.rank, 0, 1)
        descriptor = describe("barrier", strategy=strategy, site=self._site())
        return self._issue(
            Kind.BARRIER, descriptor, program, (), None, None, None, 0, async_op, timeout
        )

    # -- point to point -----------------------------------------------------------------------

    def send(
        self,
        tensor: torch.Tensor,
        dst: int,
        tag: int = 0,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work:
        """Send `tensor` to rank `dst`, which receives it under the same tag."""
        communicator = self._usable()
        check_rank(self, dst, "dst", other=True)
        check_tensor(tensor, "the tensor", written=False)
        array = Buffer(tensor).array
        message = self._message(communicator, array, "send", dst, tag, tensor, timeout)
        return self._issue_message(message, tensor, array, async_op)

    def recv(
        self,
        tensor: torch.Tensor,
        src: int | None = None,
        tag: int = 0,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work:
        """Receive into `tensor` from rank `src`, or from any rank; see `Work.source_rank`."""
        communicator = self._usable()
        check_tensor(tensor, "the tensor", written=True)
        limit = self.timeout if timeout is None else timeout
        if src is None:
            for peer in range(self.size):
                if peer != self.rank:
                    self._wiring.dial_messages(communicator, peer, limit)
        else:
            check_rank(self, src, "src", other=True)
            self._wiring.dial_messages(communicator, src, limit)
        buffer = Buffer(tensor)
        message = self._message(communicator, buffer.array, "recv", src, tag, tensor, timeout)
        message.epilogue = buffer.commit
        return self._issue_message(message, tensor, buffer.array, async_op)

    def _message(
        self,
        communicator: Communicator,
        array: Array,
        kind: str,
        peer: int | None,
        tag: int,
        tensor: torch.Tensor,
        timeout: float | None,
    ) -> Message:
        limit = self.timeout if timeout is None else timeout
        dtype = _name(tensor.dtype)
        return Message(communicator, describe(kind), limit, array, kind, peer, tag, dtype)

    def _issue_message(
        self, message: Message, tensor: torch.Tensor, array: Array, async_op: bool
    ) -> Work:
        work = Work(self, message.kind, message, tensor, array.nbytes, async_op)
        self._carry_out(message, work)
        return work


@lru_cache(maxsize=64)
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _factor(prescale: float | None) -> float | None:
    """A factor as ranks compare it: 2 and 2.0 are one."""
    return None if prescale is None else float(prescale)


def _store(output: torch.Tensor, array: Array) -> None:
    """Write a flat working array into `output`, cast once."""
    buffer = Buffer(output, widen=True)
    buffer.array[...] = array
    buffer.commit()


def _commit_all(buffers: Sequence[Buffer]) -> Callable[[], None]:
    def commit() -> None:
        for buffer in buffers:
            buffer.commit()

    return commit


def _result(tensors: Tensors | None) -> torch.Tensor | list[torch.Tensor] | None:
    if tensors is None or isinstance(tensors, torch.Tensor):
        return tensors
    return list(tensors)
