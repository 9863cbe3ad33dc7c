"""The backend "unisono" of torch.distributed: torch's calls, carried out by a `collective.Group`.

``dist.init_process_group("unisono")`` is enough; everything that is built on torch.distributed
then works on it: DDP, FSDP, samplers, checkpoints, object collectives, subgroups.

Synchronous calls and ``Work.wait`` raise this library's typed errors.  Inside a backward, where
only C++ code listens, an error arrives as a ``RuntimeError`` that starts with the type's name;
`UnisonoProcessGroup.error` keeps the typed one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from collective.environment import LONGEST_TIMEOUT
from collective.errors import Refused
from collective.group import Group
from collective.torch_arguments import (
    Call,
    one_tensor,
    operation_of,
    pairs,
    plain,
    prescale_of,
    root_of,
    split_rows,
    tensors_of,
)
from collective.torch_identity import Identity
from collective.torch_work import FailedWork, FinishedWork, TorchWork, seconds
from collective.work import Work


def create(options: Any, backend_options: Any) -> dist.ProcessGroup:
    """Make the process group that torch asked for; torch calls it through `unisono.autoload`.

    `backend_options` is ``pg_options`` of ``init_process_group``: None, a strategy's name, or a
    mapping or object with a ``strategy``.  Inside a job whose engine is gloo or nccl the group
    forwards to that library.
    """
    engine = os.environ.get("UNISONO_BACKEND", "unisono")
    if engine in ("gloo", "nccl"):
        from collective.torch_forward import create_forwarding

        return create_forwarding(options, engine, shown_as="unisono")
    if engine != "unisono":
        raise ValueError(f"UNISONO_BACKEND is {engine!r}; it can be unisono, gloo or nccl")
    from collective.torch_rendezvous import join

    meeting = join(options, backend_options)
    return UnisonoProcessGroup(
        options.store,
        options.group_rank,
        options.group_size,
        list(options.global_ranks_in_group),
        meeting,
    )


class UnisonoProcessGroup(Identity):
    """A `torch.distributed.ProcessGroup` over a `collective.Group`.

    Args:
        meeting: makes the group; called at once for the default group (without `global_ranks`),
            at the first operation for others.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        global_ranks: list[int],
        meeting: Callable[[], Group],
    ) -> None:
        super().__init__(store, rank, size, global_ranks, "unisono")
        self._meeting: Callable[[], Group] | None = meeting
        self._group: Group | None = None
        self._timeout: float | None = None
        self._lock = threading.Lock()
        self._together: list[TorchWork] | None = None
        if not global_ranks:
            self.group  # noqa: B018 - meets

    @property
    def group(self) -> Group:
        """The `collective.Group` underneath."""
        group = self._group
        if group is None:
            with self._lock:
                if self._group is None:
                    if self._meeting is None:
                        raise Refused(f"the process group {self._name!r} was destroyed")
                    self._group = self._meeting()
                    if self._timeout is not None:
                        self._group.timeout = self._timeout
                group = self._group
        return group

    @property
    def error(self) -> BaseException | None:
        return None if self._group is None else self._group.error

    # --- how calls are carried out -----------------------------------------------------------

    def _run(self, name: str, options: Any, build: Callable[[], Call]) -> TorchWork:
        """Carry out one call of torch.

        Args:
            name: the group's method.
            options: torch's, with ``timeout`` and ``asyncOp``.
            build: returns the tensors that will hold the results, and the arguments of each call
                of the method; what it refuses is refused on all ranks.
        """
        self._sequence += 1
        timeout = seconds(getattr(options, "timeout", None))
        synchronous = not getattr(options, "asyncOp", True) and self._together is None
        works: list[Work] = []
        tensors: list[torch.Tensor] = []
        try:
            group = self.group
            try:
                tensors, calls = build()
            except Refused as error:
                if name not in ("send", "recv"):
                    group.refuse(error, name)
                raise
            for arguments in calls:
                work = getattr(group, name)(*arguments, async_op=not synchronous, timeout=timeout)
                works.append(work)
        except Exception as error:
            if torch._C._current_graph_task_id() == -1:
                raise
            # in a backward C++ code listens
            return FailedWork(error, tensors)
        if synchronous:
            return FinishedWork(tensors)
        handle = TorchWork(works, tensors)
        if self._together is not None:
            self._together.append(handle)
        return handle

    def _start_coalescing(self, device: torch.device) -> None:
        self._together = []

    def _end_coalescing(self, device: torch.device) -> TorchWork:
        together, self._together = self._together or [], None
        return TorchWork(
            [work for one in together for work in one._works],
            [tensor for one in together for tensor in one._tensors],
        )

    # --- reductions ----------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> TorchWork:  # type: ignore[override]
        def build() -> Call:
            found, op = tensors_of(tensors), operation_of(opts)
            factor = prescale_of(opts)
            return found, [(plain(one, op), op, factor) for one in found]

        return self._run("all_reduce", opts, build)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> TorchWork:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Any, opts: Any = None) -> TorchWork:  # type: ignore[override]
        def build() -> Call:
            tensor, op = one_tensor(tensors), operation_of(opts)
            factor = prescale_of(opts)
            return [tensor], [(plain(tensor, op), root_of(opts), op, factor)]

        return self._run("reduce", opts, build)

    def reduce_scatter(  # type: ignore[override]
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> TorchWork:
        def build() -> Call:
            found, op = tensors_of(outputs), operation_of(opts)
            factor = prescale_of(opts)
            lists = [inputs] if isinstance(inputs[0], torch.Tensor) else inputs
            return found, [
                (plain(out, op), [plain(part, op) for part in parts], op, factor)
                for out, parts in pairs(found, lists)
            ]

        return self._run("reduce_scatter", opts, build)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> TorchWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> TorchWork:
        def build() -> Call:
            found, op = tensors_of(outputs), operation_of(opts)
            factor = prescale_of(opts)
            return found, [
                (plain(out, op), plain(whole, op), op, factor)
                for out, whole in pairs(found, inputs)
            ]

        return self._run("reduce_scatter", opts, build)

    # --- data that only travels ----------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None) -> TorchWork:  # type: ignore[override]
        def build() -> Call:
            found, root = tensors_of(tensors), root_of(opts)
            return found, [(plain(one), root) for one in found]

        return self._run("broadcast", opts, build)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> TorchWork:
        def build() -> Call:
            lists = [outputs] if isinstance(outputs[0], torch.Tensor) else outputs
            return [part for parts in lists for part in parts], [
                ([plain(part) for part in parts], plain(one))
                for parts, one in pairs(lists, tensors_of(inputs))
            ]

        return self._run("all_gather", opts, build)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> TorchWork:
        return self.allgather(outputs, inputs, opts)

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> TorchWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> TorchWork:
        def build() -> Call:
            found = tensors_of(outputs)
            return found, [(plain(whole), plain(one)) for whole, one in pairs(found, inputs)]

        return self._run("all_gather", opts, build)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> TorchWork:  # type: ignore[override]
        def build() -> Call:
            tensor, root = one_tensor(inputs), root_of(opts)
            parts = list(outputs[0]) if self._rank == root else []
            places = [plain(part) for part in parts] if self._rank == root else None
            return parts, [(plain(tensor), places, root)]

        return self._run("gather", opts, build)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> TorchWork:  # type: ignore[override]
        def build() -> Call:
            tensor, root = one_tensor(outputs), root_of(opts)
            parts = [plain(part) for part in inputs[0]] if self._rank == root else None
            return [tensor], [(plain(tensor), parts, root)]

        return self._run("scatter", opts, build)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> TorchWork:
        def build() -> Call:
            found = tensors_of(outputs)
            parts = [plain(part) for part in tensors_of(inputs)]
            return found, [([plain(one) for one in found], parts)]

        return self._run("all_to_all", opts, build)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> TorchWork:
        def build() -> Call:
            outputs = split_rows(plain(output), output_splits, self._size, "output")
            inputs = split_rows(plain(input), input_splits, self._size, "input")
            return [output], [(outputs, inputs)]

        return self._run("all_to_all", opts, build)

    def barrier(self, opts: Any = None) -> TorchWork:
        return self._run("barrier", opts, lambda: ([], [()]))

    # --- point to point ------------------------------------------------------------------------

    def send(self, tensors: Any, peer: int, tag: int = 0) -> TorchWork:
        return self._message("send", tensors, peer, tag)

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> TorchWork:
        return self._message("recv", tensors, peer, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> TorchWork:
        return self._message("recv", tensors, None, tag)

    def _message(self, name: str, tensors: Any, peer: int | None, tag: int) -> TorchWork:
        def build() -> Call:
            tensor = one_tensor(tensors)
            return [tensor], [(plain(tensor), peer, tag)]

        return self._run(name, None, build)

    # names before torch 2.13
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]

    # --- life ----------------------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = min(timeout.total_seconds(), LONGEST_TIMEOUT)
        if self._group is not None:
            self._group.timeout = self._timeout

    def shutdown(self) -> None:
        with self._lock:
            self._meeting = None
            if self._group is not None:
                self._group.close()

    abort = shutdown
