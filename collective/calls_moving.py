"""Calls in which data only travels, and the barrier."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from collective.arguments import Tensors, check_exchange, check_rank, cut, parts_of, rooted_parts
from collective.compiled import chunked, in_a_row, listed
from collective.cost import lie_together
from collective.errors import Refused
from collective.issuing import Issuing, common_shape
from collective.reduction import Buffer, check_tensor, fill
from collective.row import Row
from collective.schedule import Kind
from collective.work import Result, Work


class MovingCalls(Issuing):
    """Broadcast, all-gather, gather, scatter, all-to-all and barrier."""

    def broadcast(
        self,
        tensor: torch.Tensor,
        src: int,
        *,
        async_op: bool | None = None,
        timeout: float | None = None,
    ) -> Work:
        """Give `tensor` of rank `src` to all ranks; done when all have it."""
        with self._checking(Kind.BROADCAST):
            check_rank(self, src, "src")
            check_tensor(tensor, "the tensor", written=self.rank != src)
        buffer = Buffer(tensor)
        array = buffer.array
        schedule, strategy = self._schedule(Kind.BROADCAST, array.nbytes, src)
        program = chunked(schedule, self.rank, array.size, array.itemsize)
        return self._issue(
            Kind.BROADCAST, strategy, program, (array,), tensor, array.nbytes, async_op, timeout,
            dtype=tensor.dtype, shape=tuple(tensor.shape), root=src,
            epilogue=buffer.commit if self.rank != src else None,
        )  # fmt: skip

    def all_gather(
        self,
        outputs: Tensors,
        input: torch.Tensor,
        *,
        async_op: bool | None = None,
        timeout: float | None = None,
    ) -> Work:
        """Give `input` of every rank to all ranks.

        Args:
            outputs: one tensor per rank, whose sizes may differ, or one tensor of size × the
                elements of `input`.
            input: this rank's contribution.
        """
        with self._checking(Kind.ALL_GATHER):
            check_tensor(input, "input", written=False)
            parts = parts_of(self, outputs, "outputs", input, written=True, equal=False)
            if parts[self.rank].numel() != input.numel():
                raise Refused(
                    f"outputs[{self.rank}] has {parts[self.rank].numel()} elements, "
                    f"but input has {input.numel()}"
                )
        sizes = tuple(part.numel() for part in parts)
        total = sum(part.nbytes for part in parts)
        schedule, strategy = self._schedule(Kind.ALL_GATHER, total)
        shape = common_shape(schedule, parts, input)
        if lie_together(Kind.ALL_GATHER, self.size, total):
            row = Row(parts, outputs)
            fill(row.runs[self.rank], input)
            program = in_a_row(schedule, self.rank, sizes, row.array.itemsize)
            arrays, commit = [row.array], row.commit
        else:
            buffers = [Buffer(part) for part in parts]
            arrays, commit = [buffer.array for buffer in buffers], _commit_all(buffers)
            arrays[self.rank][...] = Buffer(input).array
            program = listed(schedule, self.rank, sizes, arrays[0].itemsize)
        return self._issue(
            Kind.ALL_GATHER, strategy, program, arrays, _result(outputs), total, async_op, timeout,
            dtype=input.dtype, shape=shape, epilogue=commit,
        )  # fmt: skip

    def gather(
        self,
        input: torch.Tensor,
        outputs: Tensors | None,
        dst: int,
        *,
        async_op: bool | None = None,
        timeout: float | None = None,
    ) -> Work:
        """Collect `input` of every rank in `outputs` of rank `dst`; None on the other ranks."""
        with self._checking(Kind.GATHER):
            check_rank(self, dst, "dst")
            check_tensor(input, "input", written=False)
            parts = rooted_parts(self, outputs, "outputs", input, dst, written=True)
        source = Buffer(input).array
        buffers = [Buffer(part) for part in parts or ()]
        arrays = [buffer.array for buffer in buffers] or [source] * self.size
        if parts is not None:
            arrays[self.rank][...] = source
        total = source.nbytes * self.size
        schedule, strategy = self._schedule(Kind.GATHER, total, dst)
        sizes = tuple(array.size for array in arrays)
        program = listed(schedule, self.rank, sizes, source.itemsize)
        return self._issue(
            Kind.GATHER, strategy, program, arrays, _result(outputs), total, async_op, timeout,
            dtype=input.dtype, shape=tuple(input.shape), root=dst, epilogue=_commit_all(buffers),
        )  # fmt: skip

    def scatter(
        self,
        output: torch.Tensor,
        inputs: Tensors | None,
        src: int,
        *,
        async_op: bool | None = None,
        timeout: float | None = None,
    ) -> Work:
        """Give `inputs[r]` of rank `src` to rank r in `output`; None on the other ranks."""
        with self._checking(Kind.SCATTER):
            check_rank(self, src, "src")
            check_tensor(output, "output", written=True)
            parts = rooted_parts(self, inputs, "inputs", output, src, written=False)
        target = Buffer(output)
        arrays = [Buffer(part).array for part in parts or ()] or [target.array] * self.size
        if parts is not None:
            target.array[...] = arrays[self.rank]
        total = target.array.nbytes * self.size
        schedule, strategy = self._schedule(Kind.SCATTER, total, src)
        sizes = tuple(array.size for array in arrays)
        program = listed(schedule, self.rank, sizes, target.array.itemsize)
        return self._issue(
            Kind.SCATTER, strategy, program, arrays, output, total, async_op, timeout,
            dtype=output.dtype, shape=tuple(output.shape), root=src, epilogue=target.commit,
        )  # fmt: skip

    def all_to_all(
        self,
        outputs: Tensors,
        inputs: Tensors,
        *,
        async_op: bool | None = None,
        timeout: float | None = None,
    ) -> Work:
        """Send `inputs[r]` to rank r and receive `outputs[r]` from it.

        Args:
            outputs, inputs: one tensor per rank, whose sizes may differ, or one tensor that is cut
                into equal parts.
        """
        given = outputs
        with self._checking(Kind.ALL_TO_ALL):
            outputs = cut(self, outputs, "outputs", written=True)
            inputs = cut(self, inputs, "inputs", written=False)
            check_exchange(self, outputs, inputs)
        targets = [Buffer(tensor) for tensor in outputs]
        sources = [Buffer(tensor).array for tensor in inputs]
        targets[self.rank].array[...] = sources[self.rank]
        arrays = [*sources, *(target.array for target in targets)]
        # the choice of a strategy must not depend on sizes that differ between ranks
        schedule, strategy = self._schedule(Kind.ALL_TO_ALL, 0)
        sizes = tuple(array.size for array in arrays)
        program = listed(schedule, self.rank, sizes, arrays[0].itemsize)
        total = sum(array.nbytes for array in sources)
        return self._issue(
            Kind.ALL_TO_ALL, strategy, program, arrays, _result(given), total, async_op, timeout,
            dtype=inputs[0].dtype, epilogue=_commit_all(targets),
        )  # fmt: skip

    def barrier(self, *, async_op: bool | None = None, timeout: float | None = None) -> Work:
        """Return when all ranks have called it."""
        schedule, strategy = self._schedule(Kind.BARRIER, 0)
        program = chunked(schedule, self.rank, 0, 1)
        return self._issue(Kind.BARRIER, strategy, program, (), None, 0, async_op, timeout)


def _commit_all(buffers: Sequence[Buffer]) -> Callable[[], None]:
    def commit() -> None:
        for buffer in buffers:
            buffer.commit()

    return commit


def _result(tensors: Tensors | None) -> Result:
    if tensors is None or isinstance(tensors, torch.Tensor):
        return tensors
    return list(tensors)
