"""Libraries that ``unisono bench`` times in turn: ours, and others between the same ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from collective.benchmark_case import Case

# torch 2.13 has other names for what it calls deprecated
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Peer(Protocol):
    """A library that carries out collectives between all ranks."""

    name: str

    def barrier(self) -> None:
        """Return when all ranks have come."""

    def call(self, case: Case) -> Callable[[], object]:
        """What carries out the operation of a case once."""


class TorchPeer:
    """A process group of torch.distributed; None is the default group, ours."""

    def __init__(self, name: str, group: Any = None) -> None:
        self.name = name
        self.group = group

    def barrier(self) -> None:
        dist.barrier(group=self.group)

    def call(self, case: Case) -> Callable[[], object]:
        tensor, part, group = case.tensor, case.part, self.group
        match case.operation:
            case "all_reduce":
                return lambda: dist.all_reduce(tensor, group=group)
            case "broadcast":
                return lambda: dist.broadcast(tensor, 0, group=group)
            case "reduce":
                return lambda: dist.reduce(tensor, 0, group=group)
            case "all_gather":
                return lambda: _all_gather(tensor, part, group=group)
            case _:
                return lambda: _reduce_scatter(part, tensor, group=group)


class MpiPeer:
    """MPI's world communicator, called directly: torch has no MPI unless it is built for it."""

    name = "mpi"

    def __init__(self) -> None:
        """Start MPI.

        Raises:
            RuntimeError: MPI has another number of ranks, so these were not started by its mpiexec.
        """
        from mpi4py import MPI

        self._mpi = MPI
        self._world = MPI.COMM_WORLD
        if (self._world.rank, self._world.size) != (dist.get_rank(), dist.get_world_size()):
            raise RuntimeError(
                f"rank {dist.get_rank()} of {dist.get_world_size()} is rank {self._world.rank} of "
                f"{self._world.size} to {MPI.Get_library_version().strip()}: the mpiexec that was "
                "found belongs to another MPI than mpi4py"
            )

    def barrier(self) -> None:
        self._world.Barrier()

    def call(self, case: Case) -> Callable[[], object]:
        world, in_place = self._world, self._mpi.IN_PLACE
        tensor, part = _array(case.tensor), _array(case.part)
        match case.operation:
            case "all_reduce":
                return lambda: world.Allreduce(in_place, tensor)
            case "broadcast":
                return lambda: world.Bcast(tensor)
            case "reduce" if world.rank == 0:
                return lambda: world.Reduce(in_place, tensor)
            case "reduce":
                return lambda: world.Reduce(tensor, None)
            case "all_gather":
                return lambda: world.Allgather(part, tensor)
            case _:
                return lambda: world.Reduce_scatter_block(tensor, part)


def _array(tensor: torch.Tensor) -> Any:
    """The tensor's memory, as mpi4py takes it."""
    return tensor.numpy()


def connect(names: Sequence[str]) -> list[Peer]:
    """The libraries of these names, between all ranks of the default group."""
    return [
        MpiPeer() if name == "mpi" else TorchPeer(name, dist.new_group(backend=name))
        for name in names
    ]
