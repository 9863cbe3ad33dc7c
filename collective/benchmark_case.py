"""One operation on tensors of one size, as ``unisono bench`` has it carried out and checked."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from collective.shared_tensors import empty

#: operations, and bus over algorithm bandwidth by ranks (NVIDIA/nccl-tests, PERFORMANCE.md)
BUS_FACTOR: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
}
#: operations between each rank's part and the whole tensor
_SHARED_OUT = ("all_gather", "reduce_scatter")


class Case:
    """The float32 tensors of one operation on one rank.

    Attributes:
        operation: a key of `BUS_FACTOR`.
        tensor: flat; what the operation works on in place, or the whole of what ranks share out.
        part: this rank's part of an all-gather or a reduce-scatter, else empty.
    """

    def __init__(
        self,
        operation: str,
        nbytes: int,
        rank: int,
        size: int,
        *,
        shared: bool = False,
        device: str = "cpu",
    ) -> None:
        """Make the tensors; `shared` ones are `collective.empty`, which others read in place."""
        make = empty if shared else partial(torch.empty, device=device)
        count = max(1, nbytes // 4)
        share = (count + size - 1) // size if operation in _SHARED_OUT else 0
        self.operation = operation
        self.nbytes = count * 4
        self.tensor = make(share * size or count, dtype=torch.float32)
        self.part = make(share, dtype=torch.float32)
        self._rank = rank
        self._size = size
        self._ramp = (torch.arange(self.tensor.numel(), dtype=torch.int32) % 1000).float()

    def fill(self) -> None:
        """Put in values that float32 adds exactly, other ones on each rank."""
        self.tensor.copy_(self._ramp)
        self.tensor.mul_(self._rank + 1)
        self.part.fill_(self._rank + 1)

    def finish(self) -> None:
        """Return when what was called is done on the tensors' device too."""
        if self.tensor.is_cuda:
            torch.cuda.current_stream(self.tensor.device).synchronize()

    def clear(self) -> None:
        """Put in zeros: their sums stay zeros, however often they are added."""
        self.tensor.zero_()
        self.part.zero_()

    def right(self) -> bool:
        """Whether this rank has what the operation makes of `fill`'s values."""
        rank, size, ramp = self._rank, self._size, self._ramp
        tensor = self.tensor.cpu()
        total = size * (size + 1) // 2
        match self.operation:
            case "all_reduce":
                return torch.equal(tensor, ramp * total)
            case "broadcast":
                return torch.equal(tensor, ramp)
            case "reduce":
                return rank != 0 or torch.equal(tensor, ramp * total)
            case "all_gather":
                blocks = torch.arange(1, size + 1).repeat_interleave(self.part.numel())
                return torch.equal(tensor, blocks.float())
            case _:
                start = rank * self.part.numel()
                own = ramp[start : start + self.part.numel()] * total
                return torch.equal(self.part.cpu(), own)
