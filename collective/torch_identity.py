"""What torch asks of any process group that is written in Python: who it is, and old names."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

#: the groups of this process that are in use, for reports about errors
groups: weakref.WeakSet[Identity] = weakref.WeakSet()


class Identity(dist.ProcessGroup):
    """Rank, size, names and devices of a group; the operations are its subclasses'.

    C++ code asks for these by the names in camel case, Python code by the others.
    """

    supports_coalescing = False
    supports_splitting = False
    supports_time_estimate = False
    supports_tensor_alloc = False

    def __init__(
        self, store: Store, rank: int, size: int, global_ranks: list[int], backend: str
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._store = store
        self._rank = rank
        self._size = size
        self._backend_name = backend
        self._name = ""
        self._description = "undefined"
        self._sequence = 0
        #: rank in the default group of each rank of this one
        self.global_ranks = global_ranks or list(range(size))
        groups.add(self)

    def getBackendName(self) -> str:
        return self._backend_name

    def getRank(self) -> int:
        return self._rank

    def getSize(self) -> int:
        return self._size

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, desc: str) -> None:
        self._description = desc

    def getGroupDesc(self) -> str:
        return self._description

    # shadow the C++ attributes of the same names, which a Python subclass has not got
    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        return [torch.device(kind) for kind in kinds]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _get_backend_name(self) -> str:
        return self._backend_name

    def get_group_store(self) -> Store:
        return self._store

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        """Numbers start at 0 on every rank: there is nothing to agree on."""

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        """Only groups with completion hooks have something to wait for."""

    @property
    def error(self) -> BaseException | None:
        """The error that ended the group, or None."""
        return None

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self._name or self._description!r} "
            f"rank {self._rank} of {self._size}>"
        )
