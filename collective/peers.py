"""Ranks that are devices of one process: a peer each, linked through memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from collective.group import DEFAULT_TIMEOUT, Group
from collective.init_arguments import check_timeout
from collective.memory_world import NODE, MemoryHall, MemoryWorld
from collective.rendezvous import DEFAULT_GROUP
from collective.strategies import Strategy, check_names, parse


class Peers(list[Group]):
    """The peers of one process, by rank; a context manager that closes them all."""

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every peer; harmless when repeated."""
        for peer in self:
            peer.close()


def local_group(
    devices: int | Sequence[str | torch.device],
    *,
    timeout: float = DEFAULT_TIMEOUT,
    strategy: Strategy | str = "auto",
) -> Peers:
    """A group whose ranks are devices of this process, linked through memory.

    Calls of a peer return at once, so one thread can call all peers in a loop, and then resolve
    the handles; a thread for each peer does as well, and may wait in its calls with
    ``async_op=False``.

    Args:
        devices: the device of each peer, such as ``["cuda:0", "cuda:1"]`` or ``["cpu"] * 4``; one
            may stand there several times.  A number means as many peers on the CPU.
        timeout: seconds for each operation that names no other.
        strategy: ``auto``, a strategy's text, or `Flat`.

    Returns:
        One `Group` per device, in order, that knows its `device`.

    Raises:
        ValueError: no device, one that this process does not have, no such strategy or time.
    """
    check_timeout(timeout)
    if isinstance(devices, int):
        devices = ["cpu"] * devices
    if isinstance(devices, str | torch.device) or not isinstance(devices, Sequence):
        raise ValueError(
            f"devices is a list of devices or a number, such as ['cpu', 'cpu'], not {devices!r}"
        )
    found = [_device(device) for device in devices]
    if not found:
        raise ValueError("a group has at least one rank: name its devices, or a number above 0")
    check_names(parse(strategy), [NODE])
    hall = MemoryHall()
    worlds = [MemoryWorld(rank, hall) for rank in range(len(found))]
    try:
        return Peers(
            Group(
                world, DEFAULT_GROUP, range(len(found)), rank, [NODE] * len(found),
                timeout=timeout, strategy=strategy, device=found[rank], asynchronous=True,
            )
            for rank, world in enumerate(worlds)
        )  # fmt: skip
    except BaseException:
        for world in worlds:
            world.close()
        raise


def _device(device: str | torch.device) -> torch.device:
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{device!r} is no device: {error}") from None
    if found.type == "cuda":
        count = torch.cuda.device_count()
        if (found.index or 0) >= count:
            raise ValueError(f"there is no device {device}: this process sees {count} CUDA devices")
        return torch.device("cuda", found.index or 0)
    if found.type != "cpu":
        raise ValueError(f"tensors on {device} cannot be reduced; there are cpu and cuda devices")
    return torch.device("cpu")
