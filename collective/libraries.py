"""Other libraries, to which a strategy hands a level: torch's gloo and NCCL.

Each set of members that meets in such a level has a process group of torch's own, made when it
first meets.  Its members find each other over the links of our group: what the library would
publish in a shared store, each rank offers by the tensor service, whose connections are
authenticated.  The connections that the library then makes are its own, without any secret.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from collective.errors import CollectiveError, LibraryFailed
from collective.link_store import LinkStore
from collective.links.endpoint import SocketEndpoint
from collective.reduction import Fold, ReduceOp, fold_of
from collective.schedule import Kind
from collective.staged import Assignment, LocalCall
from collective.strategies.handed import Call

if TYPE_CHECKING:
    from collective.group import Group

#: seconds behind our own deadline at which a library gives up: the deadline names who is missing
_BEHIND = 1.0
#: seconds within which members that are all here connect; one that is lost is tried so long
_CONNECT = 10.0
#: seconds that a group which closes waits for a call that is under way, and for NCCL to end
_LINGER = 2.0

#: by the function with which ours fold
_OPS: dict[Fold, Any] = {
    fold_of(op, torch.int64): getattr(dist.ReduceOp, name)
    for op, name in (
        (ReduceOp.SUM, "SUM"), (ReduceOp.PRODUCT, "PRODUCT"),
        (ReduceOp.MIN, "MIN"), (ReduceOp.MAX, "MAX"),
    )
}  # fmt: skip
_ORDERED = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPLEX = (torch.complex64, torch.complex128)


def _carries(op: ReduceOp, dtype: torch.dtype) -> bool:
    """Whether gloo and NCCL combine such values rightly.

    Both lose NaN in the minimum and the maximum of floats; neither has all integers, nor a product
    of complex numbers, and only gloo has bit operations.
    """
    if op in (ReduceOp.SUM, ReduceOp.MEAN):
        return dtype in (*_ORDERED, *_FLOATS, *_COMPLEX)
    if op is ReduceOp.PRODUCT:
        return dtype in (*_ORDERED, *_FLOATS)
    return op in (ReduceOp.MIN, ReduceOp.MAX) and dtype in _ORDERED


def _check_available(engine: str) -> None:
    """Refuse a library that this process cannot use.

    Raises:
        ValueError: this torch does not have it, or there is no GPU for it.
    """
    if engine == "gloo" and not dist.is_gloo_available():
        raise ValueError(f"a level by gloo: torch {torch.__version__} has no gloo here")
    if engine == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()):
        raise ValueError(
            f"a level by nccl: torch {torch.__version__} has no NCCL here, or there is no GPU; "
            "take gloo, or a strategy of ours"
        )


class Libraries:
    """The process groups of one rank of a group, and the thread that makes their calls."""

    def __init__(self, group: Group, engines: Sequence[str]) -> None:
        """For a group that hands levels to these libraries.

        Raises:
            ValueError: one of them cannot be used by this process.
        """
        for engine in engines:
            _check_available(engine)
        self._group = group
        self._tasks: queue.SimpleQueue[Assignment | None] = queue.SimpleQueue()
        #: torch's process groups, which it gives no common type
        self._groups: dict[tuple[str, tuple[int, ...]], Any] = {}
        self._thread: threading.Thread | None = None
        self._abandoned = False

    def carry(self, op: ReduceOp, dtype: torch.dtype) -> bool:
        """Whether they combine such values rightly."""
        return _carries(op, dtype)

    def submit(self, assignment: Assignment) -> None:
        """Carry out on the thread of this object, behind what was submitted before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="unisono-library", daemon=True)
            self._thread.start()
        self._tasks.put(assignment)

    def abandon(self) -> None:
        """End when what is under way has ended: that ends it at the members that still wait."""
        self._abandoned = True
        self._tasks.put(None)
        for group in self._of_nccl():  # its kernels wait for a lost peer for ever
            threading.Thread(target=group.abort, name="unisono-abort", daemon=True).start()

    def close(self, *, healthy: bool) -> None:
        """End, in order if the group is `healthy`: NCCL waits for the others then.

        What is under way in a group that failed ends with the process of a lost member, else when
        the time for connecting is over, or that of the operation.
        """
        if not (healthy or self._abandoned):
            self.abandon()
        self._tasks.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_LINGER)

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            task.done(self._carry_out(task))
            del task  # its buffers are the caller's
        for group in () if self._abandoned else self._of_nccl():
            group.shutdown()  # to be dropped would abort it, whatever slower members still receive
        self._groups.clear()

    def _of_nccl(self) -> list[Any]:
        return [group for (engine, _), group in list(self._groups.items()) if engine == "nccl"]

    def _carry_out(self, task: Assignment) -> CollectiveError | None:
        level = f"{task.calls[0].call.level} level"
        engine = task.calls[0].call.engine
        try:
            works = [self._begin(task, call) for call in task.calls]
            for finish in works:
                finish()
        except CollectiveError as error:
            return error
        except Exception as error:  # noqa: BLE001 — told to all ranks
            here = self._group
            return LibraryFailed(
                f"{engine} failed in the {level} of {task.where}: {error}",
                rank=here.rank, node=here.nodes[here.rank], phase=f"{level} by {engine}",
            )  # fmt: skip
        return None

    def _begin(self, task: Assignment, local: LocalCall) -> Callable[[], None]:
        """Issue a call; returns what waits for it and puts its result into place."""
        call = local.call
        group = self._group_of(call, task.deadline)
        limit = timedelta(seconds=max(0.0, task.deadline - time.monotonic()) + _BEHIND)
        me = call.members.index(self._group.rank)
        root = call.members.index(call.root)
        if call.kind is Kind.BARRIER:
            barrier = dist.BarrierOptions()
            barrier.timeout = limit
            if call.engine == "nccl":
                barrier.device = self._device()
            return _waiting(group.barrier(barrier), limit, None)
        views = [task.arrays[buffer][start:stop] for buffer, start, stop in local.places]
        if not any(view.size for view in views):
            return lambda: None
        array = views[0] if len(views) == 1 else np.concatenate(views)
        given = array
        if call.kind is Kind.BROADCAST:
            array = array.view(np.uint8)  # any type travels
        tensor = torch.from_numpy(array)
        if call.engine == "nccl":
            tensor = tensor.to(self._device())
        if call.kind is Kind.ALL_REDUCE:
            reducing = dist.AllreduceOptions()
            reducing.reduceOp, reducing.timeout = _OPS[_fold(task)], limit
            work = group.allreduce([tensor], reducing)
        elif call.kind is Kind.REDUCE:
            if me != root and len(views) == 1 and call.engine == "gloo":
                tensor = tensor.clone()  # gloo sums in the memory of all members
            rooted = dist.ReduceOptions()
            rooted.reduceOp, rooted.timeout, rooted.rootRank = _OPS[_fold(task)], limit, root
            work = group.reduce([tensor], rooted)
        else:
            spreading = dist.BroadcastOptions()
            spreading.timeout, spreading.rootRank, spreading.rootTensor = limit, root, 0
            work = group.broadcast([tensor], spreading)
        receives = call.kind is Kind.ALL_REDUCE or (me == root) == (call.kind is Kind.REDUCE)

        def put_back() -> None:
            if not receives:
                return
            if tensor.device.type != "cpu":
                array[...] = tensor.cpu().numpy()
            start = 0
            for view in views if len(views) > 1 else ():
                view[...] = given[start : start + view.size]
                start += view.size

        return _waiting(work, limit, put_back)

    # -- process groups -----------------------------------------------------------------------

    def _group_of(self, call: Call, deadline: float) -> Any:
        key = call.engine, call.members
        if key not in self._groups:
            self._groups[key] = self._make(call, deadline)
        return self._groups[key]

    def _make(self, call: Call, deadline: float) -> Any:
        members = call.members
        me = members.index(self._group.rank)
        left = max(0.0, deadline - time.monotonic()) + _BEHIND
        store = LinkStore(self._group, call, deadline)
        try:
            if call.engine == "nccl":
                settings = dist.ProcessGroupNCCL.Options()
                settings._timeout = timedelta(seconds=left)
                with _nccl_waits():
                    return dist.ProcessGroupNCCL(store, me, len(members), settings)
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = timedelta(seconds=min(left, _CONNECT))
            options._devices = [self._interface(members)]
            return dist.ProcessGroupGloo(store, me, len(members), options)
        except RuntimeError:
            if store.error is not None:
                raise store.error from None
            raise

    def _interface(self, members: tuple[int, ...]) -> Any:
        """Where gloo listens: at the address of this rank's own links to the members."""
        named = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
        if named:
            return dist.ProcessGroupGloo.create_device(interface=named)
        found = [_own_end(self._group, rank) for rank in members if rank != self._group.rank]
        outward = [one for one in found if one is not None and not one.startswith("127.")]
        at = next(iter([*outward, *filter(None, found)]), "127.0.0.1")
        return dist.ProcessGroupGloo.create_device(hostname=at)

    def _device(self) -> torch.device:
        here = self._group
        if here.device is not None and here.device.type == "cuda":
            return here.device
        neighbours = [rank for rank, node in enumerate(here.nodes) if node == here.nodes[here.rank]]
        local_rank = int(os.environ.get("LOCAL_RANK") or neighbours.index(here.rank))
        return torch.device("cuda", local_rank % torch.cuda.device_count())


@contextmanager
def _nccl_waits() -> Iterator[None]:
    """A process group of NCCL that is made inside raises in `wait` when an operation fails.

    By default a thread of its own would end the whole process.  It reads the environment when it is
    made.
    """
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _own_end(group: Group, peer: int) -> str | None:
    """The address of this rank's link to `peer`, unless they share memory."""
    endpoint = group._connected().inlets[peer].endpoint
    return endpoint.local_address() if isinstance(endpoint, SocketEndpoint) else None


def _fold(task: Assignment) -> Fold:
    assert task.fold is not None
    return task.fold


def _waiting(work: Any, limit: timedelta, then: Callable[[], None] | None) -> Callable[[], None]:
    def finish() -> None:
        work.wait(limit)
        if then is not None:
            then()

    return finish
