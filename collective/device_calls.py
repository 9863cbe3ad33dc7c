"""Collectives of tensors on devices of one node: copies and folds between the ranks' stages.

A tensor is cut into pieces of a slot.  A piece goes through two or three steps, each a turn behind
the one before, so that a turn has one step of each of up to three pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from collective.arguments import overlap
from collective.communicator import Communicator
from collective.descriptor import Descriptor
from collective.device_exchange import SLOT, Exchange
from collective.device_fold import fold
from collective.program import Part, Program, compile_program, split
from collective.reduction import ReduceOp
from collective.schedule import Schedule, token
from collective.transfer import CollectiveOperation

#: does one step of a piece
Step = Callable[[int], None]


class Pipeline:
    """What one rank does in each turn of an operation.

    Args:
        exchange: with the other ranks.
        pieces: how many there are.
        steps: of each piece, in order.
        tensors: on which it works, in the layout in which it does.
        results: (contiguous, wanted) pairs where the caller's tensor has another layout.
    """

    def __init__(
        self,
        exchange: Exchange,
        pieces: int,
        steps: Sequence[Step],
        tensors: list[torch.Tensor],
        results: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
    ) -> None:
        self.exchange = exchange
        self.turns = pieces + len(steps) - 1
        self._pieces = pieces
        self._steps = steps
        self._tensors = tensors
        self._results = results
        self._behind = exchange.begin(tensors)

    def turn(self, number: int) -> None:
        """Put the work of a turn on the device."""
        with self.exchange.turn(number, self._behind):
            for delay, step in enumerate(self._steps):
                if 0 <= number - delay < self._pieces:
                    step(number - delay)
            if number == self.turns - 1:
                for flat, tensor in self._results:
                    tensor.copy_(flat.view(tensor.shape))

    def settle(self) -> None:
        """Have this thread's current streams wait for the last turn's work."""
        self.exchange.settle(self._tensors)


class DeviceOperation(CollectiveOperation):
    """Runs a pipeline: in each turn every rank tells every other one, by a token, that it took it.

    Tokens describe the operation like all first frames, have its deadline, and end with it.
    """

    def __init__(
        self, communicator: Communicator, descriptor: Descriptor, timeout: float, line: Pipeline
    ) -> None:
        program = _turns(communicator.size, communicator.rank, line.turns)
        super().__init__(communicator, descriptor, timeout, program, (), None)
        self._line = line
        self._taken = 0
        self.epilogue = line.exchange.follow

    def _may_leave(self, part: Part, segment: int) -> bool:
        # tokens come in order: with the last of each peer, all have come
        last = part.after_all[1 - self.communicator.size :]
        if not all(self._landed[index] for index in last):
            return False
        if part.step == self._taken:
            self._line.turn(self._taken)
            self._taken += 1
        return True

    def settle(self) -> None:
        self._line.settle()


@lru_cache(maxsize=64)
def _turns(ranks: int, rank: int, turns: int) -> Program:
    step = tuple(
        token(one, other, "turn") for one in range(ranks) for other in range(ranks) if one != other
    )
    return compile_program(Schedule("device", ranks, 0, 0, (step,) * turns), rank, (), 1)


def _flat(exchange: Exchange, tensor: torch.Tensor) -> torch.Tensor:
    """The elements one behind the other: the tensor's own memory where it lies so.

    A program may use several devices: what is on another one than the rank's stage comes to it.
    """
    near = tensor.detach().to(exchange.device)
    return near.resolve_conj().resolve_neg().contiguous().view(-1)


def _back(
    flats: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs for `Pipeline`: what must be copied back."""
    pairs = zip(flats, tensors, strict=True)
    return [(one, other.detach()) for one, other in pairs if one.data_ptr() != other.data_ptr()]


def _elsewhere(tensors: Sequence[torch.Tensor], one: torch.Tensor) -> list[torch.Tensor]:
    """Those that do not begin where `one` does: of such a one each piece is read, then written."""
    return [tensor for tensor in tensors if tensor.data_ptr() != one.data_ptr()]


def _cuts(numel: int, dtype: torch.dtype, share: int = 1) -> list[slice]:
    """The pieces of so many elements, of which `share` fit into a slot beside each other."""
    most = SLOT // (dtype.itemsize * share)
    return [slice(start, min(start + most, numel)) for start in range(0, numel, most)]


def all_reduce(
    exchange: Exchange, tensor: torch.Tensor, op: ReduceOp, factor: float | None
) -> Pipeline:
    """Fill the own slot, fold one share of all slots into the own one, copy all shares."""
    flat = _flat(exchange, tensor)
    dtype, rank = flat.dtype, exchange.rank
    cuts = _cuts(flat.numel(), dtype)

    def shares(piece: int) -> list[slice]:
        runs = split(cuts[piece].stop - cuts[piece].start, exchange.size)
        return [slice(start, start + count) for start, count in runs]

    def fill(piece: int) -> None:
        values = flat[cuts[piece]]
        exchange.slot(rank, piece, dtype)[: values.numel()].copy_(values)

    def combine(piece: int) -> None:
        mine = shares(piece)[rank]
        sources = [exchange.slot(peer, piece, dtype)[mine] for peer in range(exchange.size)]
        fold(sources[rank], sources, op, factor, exchange.stream)

    def take(piece: int) -> None:
        values = flat[cuts[piece]]
        for peer, share in enumerate(shares(piece)):
            values[share].copy_(exchange.slot(peer, piece, dtype)[share])

    back = _back([flat], [tensor])
    return Pipeline(exchange, len(cuts), [fill, combine, take], [flat, tensor], back)


def broadcast(exchange: Exchange, tensor: torch.Tensor, src: int) -> Pipeline:
    """The source fills its slot, the others copy it."""
    flat = _flat(exchange, tensor)
    cuts = _cuts(flat.numel(), flat.dtype)

    def fill(piece: int) -> None:
        if exchange.rank == src:
            values = flat[cuts[piece]]
            exchange.slot(src, piece, flat.dtype)[: values.numel()].copy_(values)

    def take(piece: int) -> None:
        if exchange.rank != src:
            values = flat[cuts[piece]]
            values.copy_(exchange.slot(src, piece, flat.dtype)[: values.numel()])

    back = _back([flat], [tensor]) if exchange.rank != src else []
    return Pipeline(exchange, len(cuts), [fill, take], [flat, tensor], back)


def all_gather(
    exchange: Exchange, outputs: Sequence[torch.Tensor], tensor: torch.Tensor
) -> Pipeline:
    """Each fills its slot with its own, and copies those of all."""
    if overlap([tensor], _elsewhere(outputs, tensor)):
        tensor = tensor.clone()  # what comes in would be sent on
    source = _flat(exchange, tensor)
    flats = [_flat(exchange, output) for output in outputs]
    cuts = _cuts(max(flat.numel() for flat in flats), source.dtype)

    def fill(piece: int) -> None:
        values = source[cuts[piece]]
        exchange.slot(exchange.rank, piece, source.dtype)[: values.numel()].copy_(values)

    def take(piece: int) -> None:
        for peer, flat in enumerate(flats):
            values = flat[cuts[piece]]
            values.copy_(exchange.slot(peer, piece, source.dtype)[: values.numel()])

    tensors = [source, *flats, *outputs]
    return Pipeline(exchange, len(cuts), [fill, take], tensors, _back(flats, outputs))


def reduce_scatter(
    exchange: Exchange,
    output: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    op: ReduceOp,
    factor: float | None,
) -> Pipeline:
    """Each fills its slot with a bit of every part, and folds its own part of all slots."""
    if overlap([output], _elsewhere(inputs, output)):
        inputs = [part.clone() for part in inputs]  # results would be summed again
    flats = [_flat(exchange, part) for part in inputs]
    target = _flat(exchange, output)
    dtype, size = target.dtype, exchange.size
    cuts = _cuts(max(flat.numel() for flat in flats), dtype, share=size)
    width = SLOT // (dtype.itemsize * size)

    def fill(piece: int) -> None:
        slot = exchange.slot(exchange.rank, piece, dtype)
        for part, flat in enumerate(flats):
            values = flat[cuts[piece]]
            slot[part * width : part * width + values.numel()].copy_(values)

    def combine(piece: int) -> None:
        values = target[cuts[piece]]
        start = exchange.rank * width
        sources = [
            exchange.slot(peer, piece, dtype)[start : start + values.numel()]
            for peer in range(size)
        ]
        fold(values, sources, op, factor, exchange.stream)

    back = _back([target], [output])
    return Pipeline(exchange, len(cuts), [fill, combine], [*flats, target, output], back)
