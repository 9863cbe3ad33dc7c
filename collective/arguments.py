"""What the calls of a group check before anything is sent, each with an error that names it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from operator import index
from typing import Protocol

import torch

from collective.environment import LONGEST_TIMEOUT, is_time
from collective.errors import Refused
from collective.reduction import check_tensor

Tensors = torch.Tensor | Sequence[torch.Tensor]


class Member(Protocol):
    """Who calls: a rank of a group of so many."""

    rank: int
    size: int


def check_rank(group: Member, rank: int, name: str, *, other: bool = False) -> int:
    """A rank as a plain number; refuses what is none of the group's, with `other` this one too."""
    try:
        number = index(rank)
    except TypeError:
        raise Refused(f"{name} is a rank, a whole number, not {rank!r}") from None
    if isinstance(rank, bool):
        raise Refused(f"{name} is a rank, a whole number, not {rank!r}")
    if not 0 <= number < group.size:
        raise Refused(f"{name} is {rank}, but the group has ranks 0 to {group.size - 1}")
    if other and number == group.rank:
        raise Refused(f"{name} is {rank}, this very rank; copy the tensor instead")
    return number


def check_members(group: Member, ranks: Sequence[int]) -> list[int]:
    """Members of a subgroup as plain numbers.

    Raises:
        ValueError: they are no list of different ranks of the group, or lack this one.
    """
    try:
        numbers = [index(rank) for rank in ranks]
    except TypeError:
        raise ValueError(f"a subgroup is given as a list of ranks, not {ranks!r}") from None
    if len(set(numbers)) != len(numbers) or not all(0 <= rank < group.size for rank in numbers):
        raise ValueError(
            f"a subgroup has different ranks from 0 to {group.size - 1}, not {numbers}"
        )
    if group.rank not in numbers:
        raise ValueError(f"rank {group.rank} is not a member of the subgroup {numbers}")
    return numbers


def check_tag(tag: int) -> int:
    """A message's tag as a plain number; refuses what is none."""
    try:
        return index(tag)
    except TypeError:
        raise Refused(f"tag is a whole number, not {tag!r}") from None


def check_timeout(timeout: float | None) -> None:
    """Refuse what is no time to wait."""
    if timeout is not None and not is_time(timeout):
        raise Refused(
            f"timeout is {timeout!r}; it is a number of seconds, 0 or more, "
            f"at most {LONGEST_TIMEOUT:g}"
        )


def _check_list(tensors: object, name: str) -> None:
    if not isinstance(tensors, Sequence):
        raise Refused(
            f"{name} must be a list with a tensor for each rank, or one tensor for all of them, "
            f"not {type(tensors).__name__}"
        )


def parts_of(
    group: Member, tensors: Tensors, name: str, like: torch.Tensor, *, written: bool, equal: bool
) -> list[torch.Tensor]:
    """One tensor per rank of the type of `like`; with `equal`, of its number of elements too.

    This rank's own has as many in any case: its values come from `like`, or go there.  One flat
    tensor for all ranks is cut into parts of the size of `like`.
    """
    if isinstance(tensors, torch.Tensor):
        check_tensor(tensors, name, written=written)
        if tensors.numel() != group.size * like.numel():
            raise Refused(
                f"{name} has {tensors.numel()} elements; "
                f"{group.size} ranks × {like.numel()} are {group.size * like.numel()}"
            )
        if not tensors.is_contiguous():
            raise Refused(f"{name} must be contiguous when it is one tensor for all ranks")
        if tensors.dtype != like.dtype:
            raise Refused(f"{name} is {tensors.dtype}, the other tensor {like.dtype}")
        flat = tensors.detach().reshape(-1)
        return list(torch.split(flat, like.numel())) if like.numel() else [flat] * group.size
    _check_list(tensors, name)
    parts = list(tensors)
    if len(parts) != group.size:
        raise Refused(f"{name} has {len(parts)} tensors, the group {group.size} ranks")
    for number, tensor in enumerate(parts):
        check_tensor(tensor, f"{name}[{number}]", written=written)
        if tensor.dtype != like.dtype:
            raise Refused(f"{name}[{number}] is {tensor.dtype}, the other tensor {like.dtype}")
        if (equal or number == group.rank) and tensor.numel() != like.numel():
            raise Refused(
                f"{name}[{number}] has {tensor.numel()} elements, the other tensor {like.numel()}"
            )
    if written:
        check_apart(parts, name)
    return parts


def check_apart(tensors: Sequence[torch.Tensor], name: str) -> None:
    """Refuse a list that cannot hold results because two of its tensors share memory for certain:
    they begin at one place, or are contiguous and overlap."""
    reaches = sorted(
        (*_reach(tensor), tensor.is_contiguous(), number)
        for number, tensor in enumerate(tensors)
        if tensor.numel()
    )
    without_gaps = [reach for reach in reaches if reach[2]]
    pairs = (*pairwise(reaches), *pairwise(without_gaps))
    for (begin, end, plain, one), (start, _, also, other) in pairs:
        if start == begin or (plain and also and start < end):
            first, second = sorted((one, other))
            raise Refused(f"{name}[{first}] and {name}[{second}] share memory; give each its own")


def overlap(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether a tensor of one list may share memory with one of the other."""
    reaches = [(*_reach(tensor), 0) for tensor in some]
    reaches += [(*_reach(tensor), 1) for tensor in others]
    ends = [0, 0]
    for start, end, side in sorted(reaches):
        if start < end and start < ends[1 - side]:
            return True
        ends[side] = max(ends[side], end)
    return False


def _reach(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses from the first byte of a tensor to behind its last."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return start, start + (last + 1) * tensor.element_size()


def cut(group: Member, tensors: Tensors, name: str, *, written: bool) -> Sequence[torch.Tensor]:
    """One tensor in equal parts, one per rank; a list stays what it is."""
    if not isinstance(tensors, torch.Tensor):
        _check_list(tensors, name)
        return tensors
    count, rest = divmod(tensors.numel(), group.size)
    if rest:
        raise Refused(f"{name} has {tensors.numel()} elements, which do not divide by {group.size}")
    return parts_of(group, tensors, name, tensors.new_empty(count), written=written, equal=True)


def rooted_parts(
    group: Member,
    tensors: Tensors | None,
    name: str,
    like: torch.Tensor,
    root: int,
    *,
    written: bool,
    equal: bool,
) -> list[torch.Tensor] | None:
    """The root's tensors, one per rank, as `parts_of` takes them; None on the other ranks."""
    if tensors is not None and not isinstance(tensors, torch.Tensor):
        _check_list(tensors, name)
    if group.rank != root:
        if tensors is not None and len(tensors):
            raise Refused(f"{name} must be None on rank {group.rank}; rank {root} has them")
        return None
    if tensors is None:
        raise Refused(f"{name} is None, but this is rank {root}, which needs them")
    return parts_of(group, tensors, name, like, written=written, equal=equal)


def check_exchange(
    group: Member, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> None:
    """Refuse what cannot be exchanged by all with all."""
    for name, tensors in (("outputs", outputs), ("inputs", inputs)):
        if len(tensors) != group.size:
            raise Refused(f"{name} has {len(tensors)} tensors, the group {group.size} ranks")
        for number, tensor in enumerate(tensors):
            check_tensor(tensor, f"{name}[{number}]", written=name == "outputs")
            if tensor.dtype != inputs[0].dtype:
                raise Refused(
                    f"{name}[{number}] is {tensor.dtype}, but inputs[0] {inputs[0].dtype}"
                )
    check_apart(outputs, "outputs")
    if inputs[group.rank].numel() != outputs[group.rank].numel():
        raise Refused(
            f"inputs[{group.rank}] has {inputs[group.rank].numel()} elements, "
            f"outputs[{group.rank}] {outputs[group.rank].numel()}"
        )
