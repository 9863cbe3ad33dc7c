"""Process groups whose bytes go through gloo or NCCL, while Unisono times their collectives.

`ForwardingGroup` hands every call to a process group of torch's own.  It serves two cases: a job
whose engine is gloo or nccl, in which the backend "unisono" means that library; and a job whose
script names gloo itself, where the group that torch made is put behind a forwarding one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    PrefixStore,
    Store,
    _register_process_group,
    _unregister_process_group,
)

from collective import timing_observer
from collective.torch_identity import Identity
from collective.torch_work import Future

_KINDS = {
    "gloo": dist.ProcessGroup.BackendType.GLOO,
    "nccl": dist.ProcessGroup.BackendType.NCCL,
}


class ForwardedTiming:
    """When an operation of another library was issued and done; what else there is is unknown."""

    started: float | None = None
    waited = 0.0
    sent = 0

    def __init__(self, issued: float, now: Callable[[], float]) -> None:
        self.issued = issued
        self.done: float | None = None
        self._now = now

    def finish(self) -> None:
        """The operation is done, if it was not yet."""
        if self.done is None:
            self.done = self._now()


class ForwardedWork(dist.Work):
    """A `Work` of another library, and its timing."""

    def __init__(self, work: dist.Work, timing: ForwardedTiming) -> None:
        super().__init__()
        self._work = work
        self._timing = timing
        self._future: Future | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        observer = timing_observer.current
        start = 0.0 if observer is None else observer.clock.now()
        try:
            return self._work.wait(timeout)
        finally:
            self._timing.finish()
            if observer is not None:
                observer.blocked(start, observer.clock.now())

    def get_future(self) -> Future:
        with self._lock:
            if self._future is None:
                observer = timing_observer.current
                if observer is not None:
                    observer.awaited(self._timing)
                self._future = self._work.get_future().then(self._finished)
            return self._future

    def _finished(self, future: Future) -> Any:
        self._timing.finish()
        return future.value()

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> Any:
        return self._work.exception()

    def synchronize(self) -> None:
        self._work.synchronize()

    def result(self) -> list[torch.Tensor]:
        return self._work.result()

    def source_rank(self) -> int:
        return self._work._source_rank()

    _source_rank = source_rank


class ForwardingGroup(Identity):
    """Every operation of torch's surface, handed to `inner`."""

    def __init__(
        self, inner: dist.ProcessGroup, store: Store, global_ranks: list[int], backend: str
    ) -> None:
        super().__init__(store, inner.rank(), inner.size(), global_ranks, backend)
        #: the process group that carries the bytes
        self.inner = inner
        # DDP's logger asks a group that is called "gloo" for its gloo backend
        for device in inner._device_types:
            library = inner._get_backend(device)
            self._register_backend(device, _KINDS[library.name()], library)

    @property
    def supports_splitting(self) -> bool:  # type: ignore[override]
        return False

    def _forward(
        self, name: str, arguments: Sequence[Any], keywords: Mapping[str, Any]
    ) -> dist.Work:
        call = getattr(self.inner, name)
        observer = timing_observer.current
        if observer is None:
            return call(*arguments, **keywords)  # type: ignore[no-any-return]
        timing = ForwardedTiming(observer.clock.now(), observer.clock.now)
        work = call(*arguments, **keywords)
        observer.issued(timing)
        return ForwardedWork(work, timing)

    def set_timeout(self, timeout: timedelta) -> None:
        for device in self.inner._device_types:
            self.inner._get_backend(device)._set_default_timeout(timeout)

    def monitored_barrier(self, *arguments: Any, **keywords: Any) -> None:
        self.inner.monitored_barrier(*arguments, **keywords)  # type: ignore[attr-defined]

    def _get_sequence_number_for_group(self) -> int:
        return int(self.inner._get_sequence_number_for_group())  # type: ignore[attr-defined]

    def shutdown(self) -> None:
        self.inner.shutdown()

    def abort(self) -> None:
        self.inner.abort()


def _forwarded(name: str) -> Callable[..., dist.Work]:
    def call(self: ForwardingGroup, *arguments: Any, **keywords: Any) -> dist.Work:
        return self._forward(name, arguments, keywords)

    call.__name__ = name
    call.__qualname__ = f"ForwardingGroup.{name}"
    call.__doc__ = f"`{name}` of the inner group."
    return call


for _name in (
    "allgather", "allgather_coalesced", "allreduce", "allreduce_coalesced", "alltoall", "barrier",
    "broadcast", "gather", "recv", "recv_anysource", "reduce", "reduce_scatter", "scatter", "send",
):  # fmt: skip
    setattr(ForwardingGroup, _name, _forwarded(_name))
#: names since torch 2.13, and before
for _name, _older in (
    ("all_gather_single", "_allgather_base"),
    ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
    ("reduce_scatter_single", "_reduce_scatter_base"),
    ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
    ("all_to_all_single", "alltoall_base"),
):
    _call = _forwarded(_name if hasattr(dist.ProcessGroup, _name) else _older)
    setattr(ForwardingGroup, _name, _call)
    setattr(ForwardingGroup, _older, _call)


def create_forwarding(options: Any, engine: str, *, shown_as: str) -> ForwardingGroup:
    """A group over gloo, or over NCCL for CUDA tensors and gloo for those on the CPU.

    Raises:
        RuntimeError: this torch has no NCCL, or the node no GPU for it.
    """
    rank, size = options.group_rank, options.group_size
    inner = dist.ProcessGroup(options.store, rank, size)
    gloo = dist.ProcessGroupGloo(
        PrefixStore("gloo/", options.store), rank, size, timeout=options.timeout
    )
    gloo._set_sequence_number_for_group()
    kinds = dist.ProcessGroup.BackendType
    if engine == "gloo":
        inner._set_default_backend(kinds.GLOO)
        for kind in ("cpu", "cuda"):
            inner._register_backend(torch.device(kind), kinds.GLOO, gloo)
    else:
        if not dist.is_nccl_available() or not torch.cuda.is_available():
            raise RuntimeError(
                "the job's engine is nccl, but this node's torch "
                f"{torch.__version__} has no NCCL or no GPU; choose the engine unisono or gloo"
            )
        settings = dist.ProcessGroupNCCL.Options()
        settings._timeout = options.timeout
        nccl = dist.ProcessGroupNCCL(PrefixStore("nccl/", options.store), rank, size, settings)
        nccl._set_sequence_number_for_group()
        inner._set_default_backend(kinds.NCCL)
        inner._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
        inner._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
    return ForwardingGroup(inner, options.store, list(options.global_ranks_in_group), shown_as)


def put_behind(inner: dist.ProcessGroup) -> ForwardingGroup:
    """Replace a group that torch made by a forwarding one, in all of torch's registers.

    The caller makes sure that `inner` is registered.  Its name, backend and store stay the same,
    so that a program sees no difference.
    """
    import torch.distributed.distributed_c10d as c10d

    world = c10d._world
    backend, store = world.pg_map[inner]
    name = world.pg_names[inner]
    ranks = list(world.pg_group_ranks[inner])
    default = world.default_pg is inner
    group = ForwardingGroup(inner, store, ranks, str(backend))
    group.setGroupName(name)
    group.setGroupDesc(inner.group_desc)
    registers: tuple[dict[Any, Any], ...] = (
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.pg_to_tag,
    )
    for register in registers:
        if inner in register:
            register[group] = register.pop(inner)
    for groups in world.tags_to_pg.values():
        groups[:] = [group if one is inner else one for one in groups]
    _unregister_process_group(name)
    _register_process_group(name, group)
    if default:
        c10d._update_default_pg(group)
    return group
