"""What the tests of the tensor service run in rank processes, on the group of `native_jobs`."""

from __future__ import annotations

import native_jobs as jobs
import torch
from resources import highest_resident, resident

from collective.group import Group


def group() -> Group:
    assert jobs._group is not None
    return jobs._group


def expose(id: str, count: int, downloads: int | None = None) -> None:
    group().expose(torch.arange(count, dtype=torch.float32), id, downloads=downloads)


def unexpose(id: str) -> bool:
    return group().unexpose(id)


def download(peer: int, id: str, timeout: float = 30.0) -> bool:
    """Whether it is what `expose` offers."""
    tensor = group().download(peer, id, timeout=timeout)
    return torch.equal(tensor, torch.arange(tensor.numel(), dtype=torch.float32))


def download_twenty(peer: int, id: str) -> bool:
    return all(download(peer, id) for _ in range(20))


def hundred_with(members: list[int]) -> bool:
    """A hundred all-reduces in a subgroup, all of them right."""
    with group().subgroup(members, "beside") as sub:
        for index in range(100):
            tensor = torch.full((10_000,), float(index))
            sub.all_reduce(tensor)
            if not torch.equal(tensor, torch.full((10_000,), 2.0 * index)):
                return False
    return True


def memory() -> tuple[int, int]:
    return resident(), highest_resident()
