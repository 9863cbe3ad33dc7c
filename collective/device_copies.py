"""Copies between a CUDA device and host memory, on a stream of their own.

A copy begins behind what the caller's current stream has in hand, and whoever uses the result on
another stream calls `settle` first: so no call waits for a whole device.  Host memory is pinned, up
to a bound; torch keeps pinned memory that is free for the next ones.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

#: bytes of pinned memory in use at most; what is more goes through pageable memory
PINNED = 512 << 20

#: a finalizer may come while its own thread holds it
_lock = threading.RLock()
_streams: dict[torch.device, torch.cuda.Stream] = {}
_pinned = 0


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """This process's stream for copies from and to a device."""
    with _lock:
        stream = _streams.get(device)
        if stream is None:
            stream = _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return stream


@contextmanager
def on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """Work on a stream of any device.

    `torch.cuda.stream` alone would make a CUDA context on the device of this thread, which is the
    first one in a thread that has chosen none.
    """
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy on the CPU, of the same shape and dtype; complete when this returns."""
    source = tensor.detach().resolve_conj().resolve_neg().contiguous()
    room = host_room(source)
    stream = side_stream(source.device)
    stream.wait_stream(torch.cuda.current_stream(source.device))
    with on_stream(stream):
        room.copy_(source, non_blocking=True)
        stream.record_event().synchronize()
    return room


def follow(tensors: Iterable[torch.Tensor]) -> None:
    """Have later copies to these tensors' devices wait for what this thread's streams do there."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        side_stream(device).wait_stream(torch.cuda.current_stream(device))


def to_device(values: torch.Tensor, target: torch.Tensor) -> None:
    """Start to copy a CPU tensor into one on a device, as its dtype; see `follow` and `settle`."""
    if values.dtype != target.dtype or not values.is_pinned():
        room = host_room(target)
        values = room.copy_(values)
    stream = side_stream(target.device)
    with on_stream(stream):
        target.copy_(values, non_blocking=True)
    target.record_stream(stream)


def settle(tensors: Iterable[torch.Tensor]) -> None:
    """Have this thread's current streams wait for what is under way on these tensors' devices."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).wait_stream(side_stream(device))


def host_room(like: torch.Tensor) -> torch.Tensor:
    """Host memory for the elements of a tensor, of its shape and dtype."""
    global _pinned
    size = like.nbytes
    with _lock:
        pin = _pinned + size <= PINNED
        _pinned += size if pin else 0
    room = torch.empty(like.shape, dtype=like.dtype, pin_memory=pin)
    if pin:
        weakref.finalize(room, _give_back, size).atexit = False
    return room


def _give_back(size: int) -> None:
    global _pinned
    with _lock:
        _pinned -= size
