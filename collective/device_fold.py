"""One run of elements of all ranks folded into one, in the order of the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from collective import device_kernel
from collective.reduction import ReduceOp, is_widened

_COMBINE: dict[ReduceOp, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.MEAN: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


def fold(
    out: torch.Tensor,
    sources: Sequence[torch.Tensor],
    op: ReduceOp,
    factor: float | None,
    stream: torch.cuda.Stream | None,
) -> None:
    """Fold `sources` into `out`, which may be one of them.

    Args:
        out, sources: flat and contiguous, of one dtype and length.
        op: how; the mean divides by the number of sources.
        factor: for each contribution, if there is one.
        stream: of the device of `out`, and the current one; None on the CPU.
    """
    if not out.numel():
        return
    here = [source.to(out.device) for source in sources]
    if stream is not None and device_kernel.cupy() is not None:
        device_kernel.launch(out, here, op, factor, stream)
        return
    total = _ready(here[0], factor)
    for source in here[1:]:
        total = _COMBINE[op](total, _ready(source, factor))
    if op is ReduceOp.MEAN:
        total = total / len(here)
    out.copy_(total)


def _ready(values: torch.Tensor, factor: float | None) -> torch.Tensor:
    """Values in the type in which they are folded, times the factor."""
    if is_widened(values.dtype):
        values = values.to(torch.float32)
    return values if factor is None else values * factor
