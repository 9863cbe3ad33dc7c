"""Calls in which the values of the ranks are combined."""

from __future__ import annotations

import torch

from collective import device_calls
from collective.arguments import Tensors, check_rank, parts_of
from collective.compiled import chunked, in_a_row, owned, runs_of
from collective.device_issuing import DeviceIssuing
from collective.issuing import common_shape
from collective.program import Program
from collective.reduction import (
    Buffer,
    Narrow,
    ReduceOp,
    check_reduction,
    check_tensor,
    divide,
    fill,
    fold_of,
    is_widened,
    pour,
    room_for,
    scale,
)
from collective.schedule import Kind
from collective.strategies import ORIGINALS
from collective.work import Work

#: bytes of an element in a sum of sixteen-bit floats: by these, segments are cut
SUMMED = 4


class ReducingCalls(DeviceIssuing):
    """All-reduce, reduce and reduce-scatter."""

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: ReduceOp | str = ReduceOp.SUM,
        prescale: float | None = None,
        *,
        async_op: bool | None = None,
        timeout: float | None = None,
    ) -> Work:
        """Combine `tensor` of all ranks; every rank gets the same bytes.

        Args:
            tensor: any shape, dense, any strides without overlap; replaced by the result.
            op: how the values are combined; the mean divides by the number of ranks.
            prescale: a factor for each contribution before it is combined, in the dtype in which
                they are combined (float32 for sixteen-bit floats); the same on all ranks.
            async_op: return before the result is final; by default as the group does.
            timeout: seconds; the group's by default.

        Raises:
            Refused: dtype, reduction or layout has no right answer, on this rank (nothing was
                changed) or on another (what has up to 64 KiB is as it was, more is undefined).
            CollectiveError: the operation failed; the group cannot be used any more.
        """
        with self._checking(Kind.ALL_REDUCE, timeout):
            op = ReduceOp.of(op)
            check_tensor(tensor, "the tensor", written=True)
            check_reduction(op, tensor.dtype, prescale)
        exchange = self._exchange([tensor], tensor.nbytes)
        if exchange is not None:
            return self._issue_line(
                Kind.ALL_REDUCE, device_calls.all_reduce(exchange, tensor, op, prescale), tensor,
                tensor.nbytes, async_op, timeout, dtype=tensor.dtype, shape=tuple(tensor.shape),
                reduction=op.value, prescale=prescale,
            )  # fmt: skip
        short = is_widened(tensor.dtype) and prescale is None
        schedule, strategy = self._schedule(
            Kind.ALL_REDUCE, tensor.nbytes, originals=short, reduction=(op, tensor.dtype)
        )
        short = short and strategy in ORIGINALS
        buffer = Buffer(tensor, widen=not short)
        array, undo = buffer.array, buffer.undo()
        program = chunked(schedule, self.rank, array.size, SUMMED if short else array.itemsize)
        narrow = None
        if short and isinstance(program, Program):
            (own,) = owned(program)
            narrow = Narrow(array, tensor.dtype, own, self.size if op is ReduceOp.MEAN else 1)
        scale(array, prescale)

        def epilogue() -> None:
            if narrow is not None:
                narrow.finish_all()
            elif op is ReduceOp.MEAN:
                divide(array, self.size)
            buffer.commit()

        return self._issue(
            Kind.ALL_REDUCE, strategy, program, (array,), tensor, tensor.nbytes, async_op, timeout,
            dtype=tensor.dtype, shape=tuple(tensor.shape), reduction=op.value, prescale=prescale,
            fold=fold_of(op, tensor.dtype), narrow=narrow, epilogue=epilogue, undo=undo,
        )  # fmt: skip

    def reduce(
        self,
        tensor: torch.Tensor,
        dst: int,
        op: ReduceOp | str = ReduceOp.SUM,
        prescale: float | None = None,
        *,
        async_op: bool | None = None,
        timeout: float | None = None,
    ) -> Work:
        """Combine `tensor` of all ranks into that of rank `dst`; the others keep theirs.

        `op` and `prescale` are those of `all_reduce`.
        """
        with self._checking(Kind.REDUCE, timeout):
            op = ReduceOp.of(op)
            dst = check_rank(self, dst, "dst")
            check_tensor(tensor, "the tensor", written=self.rank == dst)
            check_reduction(op, tensor.dtype, prescale)
        here = self.rank == dst
        schedule, strategy = self._schedule(
            Kind.REDUCE, tensor.nbytes, dst, reduction=(op, tensor.dtype)
        )
        folds = any(
            move.dst == self.rank and move.read.count for _, move in schedule.program(self.rank)
        )
        buffer = Buffer(tensor, widen=True, private=(folds or prescale is not None) and not here)
        array, undo = buffer.array, buffer.undo() if here else None
        program = chunked(schedule, self.rank, array.size, array.itemsize)
        scale(array, prescale)

        def epilogue() -> None:
            if op is ReduceOp.MEAN:
                divide(array, self.size)
            buffer.commit()

        return self._issue(
            Kind.REDUCE, strategy, program, (array,), tensor, tensor.nbytes, async_op, timeout,
            dtype=tensor.dtype, shape=tuple(tensor.shape), root=dst, reduction=op.value,
            prescale=prescale, fold=fold_of(op, tensor.dtype), epilogue=epilogue if here else None,
            undo=undo,
        )  # fmt: skip

    def reduce_scatter(
        self,
        output: torch.Tensor,
        inputs: Tensors,
        op: ReduceOp | str = ReduceOp.SUM,
        prescale: float | None = None,
        *,
        async_op: bool | None = None,
        timeout: float | None = None,
    ) -> Work:
        """Combine `inputs` of all ranks; rank r gets the result of part r in `output`.

        Args:
            output: this rank's part.
            inputs: one tensor per rank, whose sizes may differ, or one tensor of size × the
                elements of `output`.
            op, prescale: those of `all_reduce`.
        """
        with self._checking(Kind.REDUCE_SCATTER, timeout):
            op = ReduceOp.of(op)
            check_tensor(output, "output", written=True)
            check_reduction(op, output.dtype, prescale)
            parts = parts_of(self, inputs, "inputs", output, written=False, equal=False)
        total = sum(part.nbytes for part in parts)
        shape = common_shape(parts, output)
        exchange = self._exchange([output, *parts], total)
        if exchange is not None:
            line = device_calls.reduce_scatter(exchange, output, parts, op, prescale)
            return self._issue_line(
                Kind.REDUCE_SCATTER, line, output, total, async_op, timeout, dtype=output.dtype,
                shape=shape, reduction=op.value, prescale=prescale,
            )  # fmt: skip
        short = is_widened(output.dtype) and prescale is None
        schedule, strategy = self._schedule(
            Kind.REDUCE_SCATTER, total, originals=short, reduction=(op, output.dtype)
        )
        short = short and strategy in ORIGINALS
        sizes = tuple(part.numel() for part in parts)
        row = room_for(sum(sizes), output.dtype, widen=not short)
        runs = runs_of(sizes)
        if isinstance(inputs, torch.Tensor):
            fill(row, inputs.view(-1))
        else:
            for run, part in zip(runs, parts, strict=True):
                fill(row[run.start : run.stop], part)
        program = in_a_row(schedule, self.rank, sizes, SUMMED if short else row.itemsize)
        scale(row, prescale)
        own = runs[self.rank]
        narrow = Narrow(row, output.dtype, (own.start, own.stop), 1) if short else None
        mine = row[own.start : own.stop] if narrow is None else narrow.wide

        def epilogue() -> None:
            if op is ReduceOp.MEAN:
                divide(mine, self.size)
            pour(mine, output)

        return self._issue(
            Kind.REDUCE_SCATTER, strategy, program, (row,), output, total, async_op, timeout,
            dtype=output.dtype, shape=shape, reduction=op.value, prescale=prescale,
            fold=fold_of(op, output.dtype), narrow=narrow, epilogue=epilogue,
        )  # fmt: skip
