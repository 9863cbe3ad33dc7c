"""Stages of ranks that are processes: CUDA memory and events that one process opens to others.

A stage is allocated once and kept for the next group when its group is closed: peers may have it
open for as long as they live.  Without CuPy, or where a device cannot be opened, tensors go through
host memory, and the log says why.
"""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.dlpack import from_dlpack

from collective import device_kernel
from collective.arguments import Tensors
from collective.device_exchange import SLOT, SLOTS, Exchange, Meeting, Stage
from collective.work import Work

_log = logging.getLogger("unisono.collective")
#: bytes in which a rank tells the others of its stage
_NOTE = 1024


class Member(Protocol):
    """A rank of a group, whose other ranks it can tell something."""

    name: str
    rank: int
    size: int

    def all_gather(
        self, outputs: Tensors, input: torch.Tensor, *, async_op: bool | None = None,
        timeout: float | None = None,
    ) -> Work: ...  # fmt: skip


@dataclass(frozen=True)
class _Opened:
    """A stage of this process, and what opens it in another."""

    stage: Stage
    memory: str
    event: str


@dataclass
class _Theirs:
    """A stage of another process, where it is mapped here, and how many groups use it."""

    stage: Stage
    pointer: int
    users: int = 0


_Key = tuple[str, str, torch.device]
_lock = threading.Lock()
#: all of this process: what others have open may not end before it, an event as little as memory
_made: list[_Opened] = []
_free: dict[torch.device, list[_Opened]] = {}
#: by what opens them: CUDA opens each once per process
_theirs: dict[_Key, _Theirs] = {}


class _Meeting(Meeting):
    """The stages of one group, until it is closed."""

    def __init__(self, exchange: Exchange, own: _Opened, keys: list[_Key]) -> None:
        self.exchange = exchange
        self._own = own
        self._keys = keys

    def close(self, *, healthy: bool) -> None:
        # else a peer may still read, or work wait for one that is gone: stages are left as they are
        if healthy and self.exchange.finish():
            _close(self._keys)
            _give_back(self._own)


def meet(group: Member, device: torch.device) -> Meeting | None:
    """An exchange with the other ranks of a node, all of whom call this; None if one cannot.

    Whatever CUDA or CuPy raises on a rank means, for all of them: not this way.
    """
    own: _Opened | None = None
    keys: list[_Key] = []
    try:
        own = _own_stage(device)
        note = {"memory": own.memory, "event": own.event}
    except Exception as error:  # noqa: BLE001 — told to all ranks, and logged below
        note = _no(group, error)
    met = False
    try:
        notes = _tell(group, note)
        if own is not None and not any("no" in note for note in notes):
            note = {}
            try:
                for rank, theirs in enumerate(notes):
                    if rank != group.rank:
                        keys.append(_open(theirs["memory"], theirs["event"], device))
            except Exception as error:  # noqa: BLE001 — told to all ranks, and logged below
                note = _no(group, error)
            notes = _tell(group, note)
        reasons = [note["no"] for note in notes if "no" in note]
        met = not reasons
    finally:
        if not met:
            _close(keys)
            _give_back(own)
    if own is None or reasons:
        _log.warning(
            "group %s: CUDA tensors go through host memory, since devices cannot be opened to "
            "other ranks: %s", group.name, reasons[0],
        )  # fmt: skip
        return None
    others = [rank for rank in range(group.size) if rank != group.rank]
    stages = {rank: _theirs[key].stage for rank, key in zip(others, keys, strict=True)}
    exchange = Exchange(device, group.rank, group.size, own.stage, stages.__getitem__)
    return _Meeting(exchange, own, keys)


def _no(group: Member, error: Exception) -> dict[str, str]:
    return {"no": f"rank {group.rank}: {type(error).__name__}: {str(error)[:100]}"}


def _tell(group: Member, note: dict[str, str]) -> list[dict[str, str]]:
    """What every rank says, by rank."""
    text = json.dumps(note).encode()[:_NOTE]
    mine = torch.frombuffer(bytearray(text.ljust(_NOTE)), dtype=torch.uint8)
    everyone = torch.empty(group.size * _NOTE, dtype=torch.uint8)
    group.all_gather(everyone, mine, async_op=False)
    data = everyone.numpy().tobytes()
    return [json.loads(data[at : at + _NOTE]) for at in range(0, len(data), _NOTE)]


def _own_stage(device: torch.device) -> _Opened:
    with _lock:
        if _free.get(device):
            return _free[device].pop()
    cupy = device_kernel.cupy()
    if cupy is None:
        raise RuntimeError("CuPy is not installed (the extra 'cuda')")
    runtime = cupy.cuda.runtime
    with torch.cuda.device(device), cupy.cuda.Device(device.index):
        event = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        handle = bytes(event.ipc_handle()).hex()  # type: ignore[no-untyped-call]
        # not from a pool: a handle opens a whole allocation
        pointer = runtime.malloc(SLOTS * SLOT)
        try:
            memory = bytes(runtime.ipcGetMemHandle(pointer)).hex()
        except Exception:
            runtime.free(pointer)
            raise
        made = _Opened(Stage(_as_tensor(cupy, pointer, device), event), memory, handle)
    with _lock:
        _made.append(made)
    return made


def _give_back(own: _Opened | None) -> None:
    """Keep a stage for the next group."""
    if own is not None:
        with _lock:
            _free.setdefault(own.stage.memory.device, []).append(own)


def _open(memory: str, event: str, device: torch.device) -> _Key:
    key = (memory, event, device)
    with _lock:
        if key not in _theirs:
            cupy = device_kernel.cupy()
            with torch.cuda.device(device), cupy.cuda.Device(device.index):
                theirs = torch.cuda.Event.from_ipc_handle(  # type: ignore[no-untyped-call]
                    device, bytes.fromhex(event)
                )
                pointer = cupy.cuda.runtime.ipcOpenMemHandle(bytes.fromhex(memory))
                _theirs[key] = _Theirs(Stage(_as_tensor(cupy, pointer, device), theirs), pointer)
        _theirs[key].users += 1
    return key


def _close(keys: list[_Key]) -> None:
    cupy = device_kernel.cupy()
    with _lock:
        for key in keys:
            theirs = _theirs[key]
            theirs.users -= 1
            if not theirs.users:
                del _theirs[key]
                with torch.cuda.device(key[2]), cupy.cuda.Device(key[2].index):
                    cupy.cuda.runtime.ipcCloseMemHandle(theirs.pointer)


def _as_tensor(cupy: Any, pointer: int, device: torch.device) -> torch.Tensor:
    """A stage's memory as torch sees it, on the device that reads it; nobody frees it."""
    size = SLOTS * SLOT
    memory = cupy.cuda.UnownedMemory(pointer, size, None, device.index)
    array = cupy.ndarray((size,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))
    # `torch.as_tensor` would make a copy, on the CPU or on the device where the memory lies
    return from_dlpack(array)
