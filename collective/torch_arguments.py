"""The arguments of torch's calls as the library's groups take them, or a reason to refuse them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from collective.errors import Refused

#: tensors that will hold the results, and the arguments of each call of a group's method
Call = tuple[list[torch.Tensor], list[tuple[Any, ...]]]

OPERATIONS = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "mean"),
    (dist.ReduceOp.PRODUCT, "product"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.BAND, "band"),
    (dist.ReduceOp.BOR, "bor"),
    (dist.ReduceOp.BXOR, "bxor"),
)


def plain(tensor: torch.Tensor, op: str | None = None) -> torch.Tensor:
    """The tensor as numbers that can be sent and, with `op`, reduced: complex ones as pairs.

    Raises:
        Refused: a sparse tensor, or a complex one under an operation without a meaning for it.
    """
    if tensor.layout != torch.strided:
        raise Refused(
            f"a tensor of layout {tensor.layout} cannot be sent; pass tensor.to_dense() or parts"
        )
    if tensor.is_complex():
        if op not in (None, "sum", "mean"):
            raise Refused(f"complex numbers can be summed and averaged, but {op} is not defined")
        if tensor.is_conj():
            raise Refused("a conjugated view cannot be sent; pass tensor.resolve_conj()")
        return torch.view_as_real(tensor)
    return tensor


def tensors_of(tensors: Any) -> list[torch.Tensor]:
    """One tensor or several, as a list."""
    found = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if not found:
        raise Refused("no tensor was given")
    return found


def one_tensor(tensors: Any) -> torch.Tensor:
    """The only tensor."""
    found = tensors_of(tensors)
    if len(found) != 1:
        raise Refused(f"one tensor per call, not {len(found)}")
    return found[0]


def pairs(one: Sequence[Any], two: Any) -> list[tuple[Any, Any]]:
    """Outputs with their inputs."""
    other = [two] if isinstance(two, torch.Tensor) else list(two)
    if len(one) != len(other):
        raise Refused(f"{len(one)} outputs, but {len(other)} inputs")
    return list(zip(one, other, strict=True))


def root_of(options: Any) -> int:
    """The root's rank in the group."""
    return 0 if options is None else int(options.rootRank)


def operation_of(options: Any) -> str:
    """The library's name of a torch `ReduceOp`."""
    if options is None:
        return "sum"
    wanted = getattr(options, "reduceOp", options)
    for operation, name in OPERATIONS:
        if wanted == operation:
            return name
    kind = str(getattr(wanted, "op", wanted)).rpartition(".")[2]
    if kind == "PREMUL_SUM":
        return "sum"
    raise Refused(f"the reduction {kind} is not supported")


def prescale_of(options: Any) -> float | None:
    """The factor that a torch ``PREMUL_SUM`` carries; None for other reductions.

    Raises:
        Refused: a factor per element, or none at all.
    """
    wanted = getattr(options, "reduceOp", options)
    if options is None or wanted != dist.ReduceOp.PREMUL_SUM:
        return None
    factor: Any = None
    if isinstance(wanted, dist.ReduceOp):
        state: Any = wanted.__getstate__()
        factor = state[1]
    if isinstance(factor, torch.Tensor) and factor.numel() != 1:
        raise Refused(f"PREMUL_SUM takes one factor, not {factor.numel()}")
    if factor is None:
        raise Refused("PREMUL_SUM needs its factor: pass dist._make_nccl_premul_sum(factor)")
    return float(factor)


def split_rows(
    tensor: torch.Tensor, sizes: Sequence[int], ranks: int, which: str
) -> list[torch.Tensor]:
    """Cut along the first dimension: by sizes, or evenly where none are given."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if not sizes:
        if not tensor.dim() or rows % ranks:
            raise Refused(
                f"the {which}'s first dimension ({rows}) is not divisible by "
                f"{ranks} ranks; give {which}_split_sizes"
            )
        return cut_rows(tensor, [rows // ranks] * ranks)
    if len(sizes) != ranks or sum(sizes) != rows:
        raise Refused(
            f"{which}_split_sizes {list(sizes)} must be {ranks} numbers that "
            f"sum to {rows}, the {which}'s first dimension"
        )
    return cut_rows(tensor, sizes)


def cut_rows(tensor: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Views of consecutive rows."""
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [tensor.narrow(0, start, size) for start, size in zip(starts, sizes, strict=True)]
