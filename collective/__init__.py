"""The library that ranks use: collectives over WebSocket and memory, and their torch backend.

Public names load at first use, so that importing a part of the package (the control plane needs
only the pure ones) does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collective.errors import (
        CollectiveError,
        DeadlineExceeded,
        GroupClosed,
        LibraryFailed,
        Mismatch,
        OperationAborted,
        PeerLost,
        ProtocolError,
        Refused,
        RendezvousFailed,
    )
    from collective.group import Group
    from collective.peers import Peers, local_group
    from collective.reduction import ReduceOp
    from collective.rendezvous import init
    from collective.shared_tensors import empty
    from collective.strategies.spelling import Flat, TwoLevel
    from collective.tensor_service import TensorService
    from collective.timing import log, phase, step
    from collective.work import CollectiveTensor, Work

_HOMES = {
    "collective.errors": (
        "CollectiveError",
        "DeadlineExceeded",
        "GroupClosed",
        "LibraryFailed",
        "Mismatch",
        "OperationAborted",
        "PeerLost",
        "ProtocolError",
        "Refused",
        "RendezvousFailed",
    ),
    "collective.group": ("Group",),
    "collective.timing": ("log", "phase", "step"),
    "collective.reduction": ("ReduceOp",),
    "collective.peers": ("Peers", "local_group"),
    "collective.rendezvous": ("init",),
    "collective.shared_tensors": ("empty",),
    "collective.strategies.spelling": ("Flat", "TwoLevel"),
    "collective.tensor_service": ("TensorService",),
    "collective.work": ("CollectiveTensor", "Work"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "CollectiveError",
    "CollectiveTensor",
    "DeadlineExceeded",
    "Flat",
    "Group",
    "GroupClosed",
    "LibraryFailed",
    "Mismatch",
    "OperationAborted",
    "PeerLost",
    "Peers",
    "ProtocolError",
    "ReduceOp",
    "Refused",
    "RendezvousFailed",
    "TensorService",
    "TwoLevel",
    "Work",
    "empty",
    "init",
    "local_group",
    "log",
    "phase",
    "step",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'collective' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
