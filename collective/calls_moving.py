"""Calls in which data only travels, and the barrier."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from collective import device_calls
from collective.arguments import (
    Tensors,
    check_exchange,
    check_rank,
    cut,
    overlap,
    parts_of,
    rooted_parts,
)
from collective.compiled import alone, chunked, listed
from collective.cost import lie_together
from collective.device_issuing import DeviceIssuing
from collective.issuing import common_shape
from collective.program import Program
from collective.reduction import Buffer, check_tensor, fill
from collective.schedule import Kind, Schedule
from collective.slots import Slots
from collective.staged import StagedProgram
from collective.strategies import Flat
from collective.strategies.registry import build_flat
from collective.work import Result, Work


class MovingCalls(DeviceIssuing):
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
        with self._checking(Kind.BROADCAST, timeout):
            src = check_rank(self, src, "src")
            check_tensor(tensor, "the tensor", written=self.rank != src)
        exchange = self._exchange([tensor], tensor.nbytes)
        if exchange is not None:
            return self._issue_line(
                Kind.BROADCAST, device_calls.broadcast(exchange, tensor, src), tensor,
                tensor.nbytes, async_op, timeout, dtype=tensor.dtype, shape=tuple(tensor.shape),
                root=src,
            )  # fmt: skip
        buffer = Buffer(tensor, blank=self.rank != src)
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
        with self._checking(Kind.ALL_GATHER, timeout):
            check_tensor(input, "input", written=False)
            parts = parts_of(self, outputs, "outputs", input, written=True, equal=False)
        total = sum(part.nbytes for part in parts)
        shape = common_shape(parts, input)
        exchange = self._exchange([input, *parts], total)
        if exchange is not None:
            return self._issue_line(
                Kind.ALL_GATHER, device_calls.all_gather(exchange, parts, input), _result(outputs),
                total, async_op, timeout, dtype=input.dtype, shape=shape,
            )  # fmt: skip
        schedule, strategy = self._schedule(Kind.ALL_GATHER, total)
        together = lie_together(Kind.ALL_GATHER, self.size, total)
        if isinstance(schedule, Schedule) and not schedule.joins:
            # slots that travel one by one need not be copied into a row
            together = together and isinstance(outputs, torch.Tensor)
        slots = Slots(parts, outputs, together=together, blank=True)
        fill(slots.views[self.rank], input)
        program = slots.program(schedule, self.rank)
        return self._issue(
            Kind.ALL_GATHER, strategy, program, slots.arrays, _result(outputs), total,
            async_op, timeout, dtype=input.dtype, shape=shape, epilogue=slots.commit,
        )  # fmt: skip

    def gather(
        self,
        input: torch.Tensor,
        outputs: Tensors | None,
        dst: int,
        *,
        uneven: bool = False,
        async_op: bool | None = None,
        timeout: float | None = None,
    ) -> Work:
        """Collect `input` of every rank in `outputs` of rank `dst`; None on the other ranks.

        Args:
            input: this rank's part.
            outputs: one tensor per rank, or one tensor of size × the elements of `input`.
            dst: the rank that gets them.
            uneven: parts may differ in size; the same on all ranks.
        """
        with self._checking(Kind.GATHER, timeout):
            dst = check_rank(self, dst, "dst")
            check_tensor(input, "input", written=False)
            parts = rooted_parts(
                self, outputs, "outputs", input, dst, written=True, equal=not uneven
            )
        own = Buffer(input).array
        total = own.nbytes * self.size
        schedule, strategy = self._rooted(Kind.GATHER, total, dst, uneven)
        arrays, epilogue = [own], None
        program: Program | StagedProgram
        if parts is None or outputs is None:
            program = alone(schedule, self.rank, own.size, own.itemsize)
        else:
            slots = Slots(parts, outputs, together=schedule.even, blank=True)
            fill(slots.views[self.rank], input)
            program = slots.program(schedule, self.rank)
            arrays, epilogue = slots.arrays, slots.commit
        return self._issue(
            Kind.GATHER, strategy, program, arrays, _result(outputs), total, async_op, timeout,
            dtype=input.dtype, shape=None if uneven else tuple(input.shape), root=dst,
            epilogue=epilogue,
        )  # fmt: skip

    def scatter(
        self,
        output: torch.Tensor,
        inputs: Tensors | None,
        src: int,
        *,
        uneven: bool = False,
        async_op: bool | None = None,
        timeout: float | None = None,
    ) -> Work:
        """Give `inputs[r]` of rank `src` to rank r in `output`; None on the other ranks.

        Args:
            output: this rank's part.
            inputs: one tensor per rank, or one tensor of size × the elements of `output`.
            src: the rank that has them.
            uneven: parts may differ in size; the same on all ranks.
        """
        with self._checking(Kind.SCATTER, timeout):
            src = check_rank(self, src, "src")
            check_tensor(output, "output", written=True)
            parts = rooted_parts(
                self, inputs, "inputs", output, src, written=False, equal=not uneven
            )
        if parts is not None and overlap([output], parts):
            parts = inputs = [part.clone() for part in parts]
        target = Buffer(output, blank=True)
        own = target.array
        total = own.nbytes * self.size
        schedule, strategy = self._rooted(Kind.SCATTER, total, src, uneven)
        arrays = [own]
        program: Program | StagedProgram
        if parts is None or inputs is None:
            program = alone(schedule, self.rank, own.size, own.itemsize)
        else:
            slots = Slots(parts, inputs, together=schedule.even)
            slots.load()
            own[...] = slots.views[self.rank]
            program = slots.program(schedule, self.rank)
            arrays = slots.arrays
        return self._issue(
            Kind.SCATTER, strategy, program, arrays, output, total, async_op, timeout,
            dtype=output.dtype, shape=None if uneven else tuple(output.shape), root=src,
            epilogue=target.commit,
        )  # fmt: skip

    def _rooted(self, kind: Kind, nbytes: int, root: int, uneven: bool) -> tuple[Schedule, str]:
        """A gather's or scatter's schedule, which no other library takes over."""
        if uneven:  # nobody but the root knows the sizes, so nobody can pass parts on
            star = Flat("centralized")
            return build_flat(star, kind, self.size, root), str(star)
        schedule, strategy = self._schedule(kind, nbytes, root)
        assert isinstance(schedule, Schedule)
        return schedule, strategy

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
        with self._checking(Kind.ALL_TO_ALL, timeout):
            outputs = cut(self, outputs, "outputs", written=True)
            inputs = cut(self, inputs, "inputs", written=False)
            check_exchange(self, outputs, inputs)
        if overlap(outputs, inputs):  # what comes in would be sent on
            inputs = [tensor.clone() for tensor in inputs]
        targets = [Buffer(tensor, blank=True) for tensor in outputs]
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
        with self._checking(Kind.BARRIER, timeout):
            pass
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
