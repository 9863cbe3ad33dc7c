"""Groups: what programs call.

Every call works in place on torch tensors and is the same on all ranks of the group, in the same
order.  Calls are synchronous by default; with ``async_op=True`` they return at once.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import TracebackType
from typing import Any

import torch

from collective import timing_observer
from collective.communicator import Communicator
from collective.descriptor import Descriptor, describe
from collective.errors import CollectiveError, GroupClosed, Refused
from collective.links.handshake import valid_name
from collective.links.link import Outlet
from collective.messaging import Message
from collective.operation import Operation, again
from collective.program import SEGMENT, Place, Program, compile_program, split
from collective.reduction import (
    Array,
    Buffer,
    Fold,
    ReduceOp,
    check_reduction,
    check_tensor,
    divide,
    fold_of,
)
from collective.schedule import Kind, Schedule
from collective.strategies import TwoLevel, build, nodes_of, parse, resolve
from collective.transfer import CollectiveOperation
from collective.work import Work
from collective.world import Wiring, part

Tensors = torch.Tensor | Sequence[torch.Tensor]

#: called with each finished `Work` of every group; see `collective.timing`
observers: list[Callable[[Work], object]] = []

#: seconds
DEFAULT_TIMEOUT = 300.0
#: a rank that ends with an exception waits so long for its peers to read why
_LAST_WORDS = 0.2
_STALL = float(os.environ.get("UNISONO_STALL_SECONDS", "1"))
_CALL_SITES = os.environ.get("UNISONO_CHECK_CALL_SITES", "") not in ("", "0")

_open_groups: weakref.WeakSet[Group] = weakref.WeakSet()


class Group:
    """An ordered set of ranks that run collectives together.

    Attributes:
        rank, size: this process's rank in the group, and the number of ranks.
        ranks: the members as ranks of the world.
        name, epoch: which group, and which membership of it.
        nodes: the node's name of each rank.
        timeout: seconds that an operation may take when a call names none.
        strategy: the setting that all operations follow: ``auto``, or a strategy's spelling.
    """

    def __init__(
        self,
        wiring: Wiring,
        name: str,
        ranks: Sequence[int],
        rank: int,
        nodes: Sequence[str],
        *,
        epoch: int = 1,
        timeout: float = DEFAULT_TIMEOUT,
        strategy: str = "auto",
        connect: bool = True,
    ) -> None:
        """Make a group; its links are made now, or with ``connect=False`` at its first use.

        Raises:
            RendezvousFailed: members did not come or cannot be reached.
            ValueError: the strategy does not exist.
        """
        self.strategy = parse(strategy)
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(rank)
        self.size = len(self.ranks)
        self.name = name
        self.epoch = epoch
        self.nodes = tuple(nodes)
        self.timeout = timeout
        self._wiring = wiring
        self._children: list[Group] = []
        self._parent: Group | None = None
        self._connecting = threading.Lock()
        self._communicator: Communicator | None = None
        self._closed = False
        self._pid = os.getpid()
        self._node_sets = nodes_of(self.nodes)
        self._schedule(Kind.ALL_REDUCE, 0)  # a strategy that does not exist is refused now
        _open_groups.add(self)
        if connect:
            self._connected()

    # -- state --------------------------------------------------------------------------------

    @property
    def error(self) -> BaseException | None:
        """What poisoned the group, or None while it can be used."""
        return self._communicator.error if self._communicator is not None else None

    def _connected(self) -> Communicator:
        communicator = self._communicator
        if communicator is not None:
            return communicator
        with self._connecting:
            self._check_open()
            if self._communicator is None:
                self._communicator = self._wiring.connect(
                    self.name, self.ranks, self.timeout, _STALL, self._known_links()
                )
            return self._communicator

    def _known_links(self) -> dict[int, Outlet]:
        """By rank of this group: links of the group that it is a part of."""
        parent = self._parent
        if parent is None or parent._communicator is None:
            return {}
        outlets = parent._communicator.outlets
        return {
            rank: outlets[there]
            for rank, member in enumerate(self.ranks)
            if (there := parent.ranks.index(member)) in outlets
        }

    def _check_open(self) -> None:
        if self._closed:
            raise GroupClosed(f"group {self.name} is closed")
        if self._pid != os.getpid():
            raise GroupClosed(
                f"group {self.name} was made before os.fork() and belongs to process {self._pid}: "
                "make a group of its own in the child, or start children with 'spawn'"
            )

    def _usable(self) -> Communicator:
        self._check_open()
        communicator = self._connected()
        if communicator.error is not None:
            raise again(communicator.error)
        return communicator

    def close(self) -> None:
        """Leave the group in order: peers learn after which operation; harmless when repeated.

        Where an exception is on its way out of the program, or of the block that closes the
        group, the peers learn of that instead: it is why they cannot go on.
        """
        if self._closed or self._pid != os.getpid():
            return
        for child in list(self._children):
            child.close()
        self._closed = True
        _open_groups.discard(self)
        communicator = self._communicator
        linger = self._wiring.linger
        if communicator is not None:
            reason = _on_its_way_out()
            if reason is not None and communicator.error is None:
                linger = min(linger, _LAST_WORDS)
                self._wiring.engine.call(lambda: communicator.give_up(reason))
            elif communicator.busy:
                self._wiring.engine.call(
                    lambda: communicator.fail(
                        GroupClosed(f"rank {self.rank} closed group {self.name} during operations")
                    )
                )
            links = self._wiring.engine.remove(communicator)
            self._wiring.forget(self.name)
            part(communicator, links, linger)
        if self._parent is None:
            self._wiring.close()
        else:
            self._parent._children.remove(self)

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def subgroup(
        self, ranks: Sequence[int], name: str | None = None, *, timeout: float | None = None,
        strategy: str | None = None,
    ) -> Group:  # fmt: skip
        """A group of some ranks of this one; called by its members only, linked at its first use.

        Args:
            ranks: members as ranks of this group, in the order of their new ranks.
            name: tells groups of the same members apart; the same on all of them.
            timeout, strategy: as in the group, unless given.

        Raises:
            ValueError: members that do not exist or are named twice, this rank not among them, or
                a name that is taken or cannot be sent.
        """
        if len(set(ranks)) != len(ranks) or not all(0 <= rank < self.size for rank in ranks):
            raise ValueError(
                f"a subgroup has different ranks from 0 to {self.size - 1}, not {list(ranks)}"
            )
        members = [self.ranks[rank] for rank in ranks]
        if self.ranks[self.rank] not in members:
            raise ValueError(f"rank {self.rank} is not a member of the subgroup {list(ranks)}")
        # begins like the group of all, by which links that an agent hands over are sorted
        text = f"{self.name.partition('/')[0]}:{name or 'sub'}/{','.join(map(str, members))}"
        if not valid_name(text):
            raise ValueError(
                f"a subgroup's name has letters, digits and any of ._:/,- only, not {name!r}"
            )
        if any(child.name == text for child in self._children):
            raise ValueError(
                f"there is a group {text} already: close it, or give the new one another name"
            )
        child = Group(
            self._wiring,
            text,
            members,
            self.ranks[self.rank],
            [self.nodes[rank] for rank in ranks],
            epoch=self.epoch,
            timeout=self.timeout if timeout is None else timeout,
            strategy=str(self.strategy) if strategy is None else strategy,
            connect=False,
        )
        child._parent = self
        self._children.append(child)
        return child

    # -- issuing ------------------------------------------------------------------------------

    def refuse(self, error: Refused, name: str) -> Refused:
        """Tell the other ranks, who may have issued the operation, that it does not take place.

        Returns:
            The error, which now knows the operation and this rank.
        """
        error.operation = name
        error.rank = self.rank
        error.node = self.nodes[self.rank]
        if self.size > 1:
            told = Refused(
                f"rank {self.rank} on node {error.node} refused {name}: {error}",
                rank=self.rank, node=error.node, operation=name,
            )  # fmt: skip
            self._wiring.engine.refuse(self._connected(), told)
            error.sequence = told.sequence
        return error

    def _issue(
        self,
        kind: Kind,
        descriptor: Descriptor,
        program: Program,
        arrays: Sequence[Array],
        fold: Fold | None,
        epilogue: Callable[[], Any] | None,
        result: torch.Tensor | list[torch.Tensor] | None,
        nbytes: int,
        async_op: bool,
        timeout: float | None,
    ) -> Work:
        communicator = self._usable()
        limit = self.timeout if timeout is None else timeout
        operation = CollectiveOperation(communicator, descriptor, limit, program, arrays, fold)
        operation.epilogue = epilogue
        work = Work(self, kind.value, operation, result, nbytes, async_op)
        self._carry_out(operation, work)
        return work

    def _carry_out(self, operation: Operation, work: Work) -> None:
        if observers:
            operation.on_finish_inline = lambda: _observe(work)
        clock = timing_observer.current
        if clock is not None:
            clock.issued(operation)
        self._wiring.engine.run(operation, wait=not work.asynchronous)
        if not work.asynchronous:
            if clock is not None:
                clock.blocked(operation.issued, operation.done_at)
            operation.raise_error()

    def _schedule(self, kind: Kind, nbytes: int, root: int = 0) -> tuple[Schedule, str]:
        choice = resolve(self.strategy, kind, self.size, nbytes)
        nodes = self._node_sets if isinstance(choice, TwoLevel) else None
        return build(choice, kind, self.size, root, nodes=nodes), str(choice)

    def _site(self) -> str:
        if not _CALL_SITES:
            return ""
        frame = sys._getframe(1)
        folder = os.path.dirname(__file__)
        while frame.f_back is not None and (
            frame.f_code.co_filename.startswith(folder) or "/torch/" in frame.f_code.co_filename
        ):
            frame = frame.f_back
        return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"

    # -- collectives --------------------------------------------------------------------------

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work:
        """Combine `tensor` of all ranks; every rank gets the same bytes.

        Args:
            tensor: any shape, dense, any strides without overlap; replaced by the result.
            op: how the values are combined; the mean divides by the number of ranks.
            async_op: return before the result is final.
            timeout: seconds; the group's by default.

        Raises:
            Refused: dtype, reduction or layout has no right answer; nothing was changed.
            CollectiveError: the operation failed; the group cannot be used any more.
        """
        self._usable()
        try:
            op = ReduceOp.of(op)
            check_tensor(tensor, "the tensor", written=True)
            check_reduction(op, tensor.dtype)
        except Refused as error:
            raise self.refuse(error, "all_reduce") from None
        buffer = Buffer(tensor, widen=True)
        array = buffer.array
        schedule, strategy = self._schedule(Kind.ALL_REDUCE, array.nbytes)
        program = _chunked(schedule, self.rank, array.size, array.itemsize)
        descriptor = describe(
            "all_reduce", _name(tensor.dtype), tuple(tensor.shape), op.value, None, strategy,
            self._site(),
        )  # fmt: skip

        def epilogue() -> None:
            if op is ReduceOp.MEAN:
                divide(array, self.size)
            buffer.commit()

        return self._issue(
            Kind.ALL_REDUCE, descriptor, program, (array,), fold_of(op, tensor.dtype), epilogue,
            tensor, array.nbytes, async_op, timeout,
        )  # fmt: skip

    def reduce(
        self,
        tensor: torch.Tensor,
        dst: int,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work:
        """Combine `tensor` of all ranks into that of rank `dst`; the others keep theirs."""
        self._usable()
        try:
            op = ReduceOp.of(op)
            self._check_rank(dst, "dst")
            check_tensor(tensor, "the tensor", written=self.rank == dst)
            check_reduction(op, tensor.dtype)
        except Refused as error:
            raise self.refuse(error, "reduce") from None
        here = self.rank == dst
        schedule, strategy = self._schedule(Kind.REDUCE, tensor.nbytes, dst)
        folds = any(
            move.dst == self.rank and move.read.count for _, move in schedule.program(self.rank)
        )
        buffer = Buffer(tensor, widen=True, private=folds and not here)
        array = buffer.array
        program = _chunked(schedule, self.rank, array.size, array.itemsize)
        descriptor = describe(
            "reduce", _name(tensor.dtype), tuple(tensor.shape), op.value, dst, strategy,
            self._site(),
        )  # fmt: skip

        def epilogue() -> None:
            if op is ReduceOp.MEAN:
                divide(array, self.size)
            buffer.commit()

        return self._issue(
            Kind.REDUCE, descriptor, program, (array,), fold_of(op, tensor.dtype),
            epilogue if here else None, tensor, array.nbytes, async_op, timeout,
        )  # fmt: skip

    def broadcast(
        self,
        tensor: torch.Tensor,
        src: int,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work:
        """Give `tensor` of rank `src` to all ranks; done when all have it."""
        self._usable()
        try:
            self._check_rank(src, "src")
            check_tensor(tensor, "the tensor", written=self.rank != src)
        except Refused as error:
            raise self.refuse(error, "broadcast") from None
        buffer = Buffer(tensor)
        array = buffer.array
        schedule, strategy = self._schedule(Kind.BROADCAST, array.nbytes, src)
        program = _chunked(schedule, self.rank, array.size, array.itemsize)
        descriptor = describe(
            "broadcast", _name(tensor.dtype), tuple(tensor.shape), "", src, strategy, self._site()
        )
        return self._issue(
            Kind.BROADCAST, descriptor, program, (array,), None,
            buffer.commit if self.rank != src else None, tensor, array.nbytes, async_op, timeout,
        )  # fmt: skip

    def reduce_scatter(
        self,
        output: torch.Tensor,
        inputs: Tensors,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work:
        """Combine `inputs` of all ranks; rank r gets the result of part r in `output`.

        Args:
            output: this rank's part.
            inputs: one tensor per rank, or one tensor of size × the elements of `output`.
        """
        self._usable()
        try:
            op = ReduceOp.of(op)
            check_tensor(output, "output", written=True)
            check_reduction(op, output.dtype)
            parts = self._parts(inputs, "inputs", output, written=False, equal=False)
        except Refused as error:
            raise self.refuse(error, "reduce_scatter") from None
        wide = [Buffer(part, widen=True, private=True).array for part in parts]
        total = sum(array.nbytes for array in wide)
        schedule, strategy = self._schedule(Kind.REDUCE_SCATTER, total)
        program = _listed(
            schedule, self.rank, tuple(array.size for array in wide), wide[0].itemsize
        )
        shape = None if len({part.numel() for part in parts}) > 1 else tuple(output.shape)
        descriptor = describe(
            "reduce_scatter", _name(output.dtype), shape, op.value, None, strategy, self._site()
        )
        mine = wide[self.rank]

        def epilogue() -> None:
            if op is ReduceOp.MEAN:
                divide(mine, self.size)
            _store(output, mine)

        return self._issue(
            Kind.REDUCE_SCATTER, descriptor, program, wide, fold_of(op, output.dtype), epilogue,
            output, total, async_op, timeout,
        )  # fmt: skip

    def all_gather(
        self,
        outputs: Tensors,
        input: torch.Tensor,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work:
        """Give `input` of every rank to all ranks.

        Args:
            outputs: one tensor per rank, or one tensor of size × the elements of `input`.
            input: this rank's contribution.
        """
        self._usable()
        try:
            check_tensor(input, "input", written=False)
            parts = self._parts(outputs, "outputs", input, written=True, equal=False)
            if parts[self.rank].numel() != input.numel():
                raise Refused(
                    f"outputs[{self.rank}] has {parts[self.rank].numel()} elements, "
                    f"but input has {input.numel()}"
                )
        except Refused as error:
            raise self.refuse(error, "all_gather") from None
        buffers = [Buffer(part) for part in parts]
        own = buffers[self.rank].array
        own[...] = Buffer(input).array
        arrays = [buffer.array for buffer in buffers]
        total = sum(array.nbytes for array in arrays)
        schedule, strategy = self._schedule(Kind.ALL_GATHER, total)
        program = _listed(schedule, self.rank, tuple(array.size for array in arrays), own.itemsize)
        shape = None if len({part.numel() for part in parts}) > 1 else tuple(input.shape)
        descriptor = describe(
            "all_gather", _name(input.dtype), shape, "", None, strategy, self._site()
        )
        return self._issue(
            Kind.ALL_GATHER, descriptor, program, arrays, None, _commit_all(buffers),
            _result(outputs), total, async_op, timeout,
        )  # fmt: skip

    def gather(
        self,
        input: torch.Tensor,
        outputs: Tensors | None,
        dst: int,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work:
        """Collect `input` of every rank in `outputs` of rank `dst`; None on the other ranks."""
        self._usable()
        try:
            self._check_rank(dst, "dst")
            check_tensor(input, "input", written=False)
            parts = self._rooted_parts(outputs, "outputs", input, dst, written=True)
        except Refused as error:
            raise self.refuse(error, "gather") from None
        source = Buffer(input)
        buffers: list[Buffer] = []
        arrays = [source.array] * self.size
        if parts is not None:
            buffers = [Buffer(part) for part in parts]
            arrays = [buffer.array for buffer in buffers]
            arrays[self.rank][...] = source.array
        total = source.array.nbytes * self.size
        schedule, strategy = self._schedule(Kind.GATHER, total, dst)
        sizes = tuple(array.size for array in arrays)
        program = _listed(schedule, self.rank, sizes, source.array.itemsize)
        descriptor = describe(
            "gather", _name(input.dtype), tuple(input.shape), "", dst, strategy, self._site()
        )
        return self._issue(
            Kind.GATHER, descriptor, program, arrays, None, _commit_all(buffers),
            _result(outputs), total, async_op, timeout,
        )  # fmt: skip

    def scatter(
        self,
        output: torch.Tensor,
        inputs: Tensors | None,
        src: int,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work:
        """Give `inputs[r]` of rank `src` to rank r in `output`; None on the other ranks."""
        self._usable()
        try:
            self._check_rank(src, "src")
            check_tensor(output, "output", written=True)
            parts = self._rooted_parts(inputs, "inputs", output, src, written=False)
        except Refused as error:
            raise self.refuse(error, "scatter") from None
        target = Buffer(output)
        arrays = [target.array] * self.size
        if parts is not None:
            arrays = [Buffer(part).array for part in parts]
            target.array[...] = arrays[self.rank]
        total = target.array.nbytes * self.size
        schedule, strategy = self._schedule(Kind.SCATTER, total, src)
        sizes = tuple(array.size for array in arrays)
        program = _listed(schedule, self.rank, sizes, target.array.itemsize)
        descriptor = describe(
            "scatter", _name(output.dtype), tuple(output.shape), "", src, strategy, self._site()
        )
        return self._issue(
            Kind.SCATTER, descriptor, program, arrays, None, target.commit, output, total,
            async_op, timeout,
        )  # fmt: skip

    def all_to_all(
        self,
        outputs: Tensors,
        inputs: Tensors,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work:
        """Send `inputs[r]` to rank r and receive `outputs[r]` from it.

        Args:
            outputs, inputs: one tensor per rank, whose sizes may differ, or one tensor that is cut
                into equal parts.
        """
        self._usable()
        given = outputs
        try:
            outputs = self._cut(outputs, "outputs", written=True)
            inputs = self._cut(inputs, "inputs", written=False)
            for name, tensors in (("outputs", outputs), ("inputs", inputs)):
                if len(tensors) != self.size:
                    raise Refused(f"{name} has {len(tensors)} tensors, the group {self.size} ranks")
                for index, tensor in enumerate(tensors):
                    check_tensor(tensor, f"{name}[{index}]", written=name == "outputs")
                    if tensor.dtype != inputs[0].dtype:
                        raise Refused(
                            f"{name}[{index}] is {tensor.dtype}, but inputs[0] {inputs[0].dtype}"
                        )
            if inputs[self.rank].numel() != outputs[self.rank].numel():
                raise Refused(
                    f"inputs[{self.rank}] has {inputs[self.rank].numel()} elements, "
                    f"outputs[{self.rank}] {outputs[self.rank].numel()}"
                )
        except Refused as error:
            raise self.refuse(error, "all_to_all") from None
        targets = [Buffer(tensor) for tensor in outputs]
        sources = [Buffer(tensor).array for tensor in inputs]
        targets[self.rank].array[...] = sources[self.rank]
        arrays = [*sources, *(target.array for target in targets)]
        # the choice of a strategy must not depend on sizes that differ between ranks
        schedule, strategy = self._schedule(Kind.ALL_TO_ALL, 0)
        sizes = tuple(array.size for array in arrays)
        program = _listed(schedule, self.rank, sizes, arrays[0].itemsize)
        descriptor = describe(
            "all_to_all", _name(inputs[0].dtype), None, "", None, strategy, self._site()
        )
        total = sum(array.nbytes for array in sources)
        return self._issue(
            Kind.ALL_TO_ALL, descriptor, program, arrays, None, _commit_all(targets),
            _result(given), total, async_op, timeout,
        )  # fmt: skip

    def barrier(self, *, async_op: bool = False, timeout: float | None = None) -> Work:
        """Return when all ranks have called it."""
        schedule, strategy = self._schedule(Kind.BARRIER, 0)
        program = _chunked(schedule, self.rank, 0, 1)
        descriptor = describe("barrier", strategy=strategy, site=self._site())
        return self._issue(
            Kind.BARRIER, descriptor, program, (), None, None, None, 0, async_op, timeout
        )

    # -- point to point -----------------------------------------------------------------------

    def send(
        self,
        tensor: torch.Tensor,
        dst: int,
        tag: int = 0,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work:
        """Send `tensor` to rank `dst`, which receives it under the same tag."""
        communicator = self._usable()
        self._check_rank(dst, "dst", other=True)
        check_tensor(tensor, "the tensor", written=False)
        array = Buffer(tensor).array
        message = self._message(communicator, array, "send", dst, tag, tensor, timeout)
        return self._issue_message(message, tensor, array, async_op)

    def recv(
        self,
        tensor: torch.Tensor,
        src: int | None = None,
        tag: int = 0,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work:
        """Receive into `tensor` from rank `src`, or from any rank; see `Work.source_rank`."""
        communicator = self._usable()
        check_tensor(tensor, "the tensor", written=True)
        limit = self.timeout if timeout is None else timeout
        if src is None:
            for peer in range(self.size):
                if peer != self.rank:
                    self._wiring.dial_messages(communicator, peer, limit)
        else:
            self._check_rank(src, "src", other=True)
            self._wiring.dial_messages(communicator, src, limit)
        buffer = Buffer(tensor)
        message = self._message(communicator, buffer.array, "recv", src, tag, tensor, timeout)
        message.epilogue = buffer.commit
        return self._issue_message(message, tensor, buffer.array, async_op)

    def _message(
        self,
        communicator: Communicator,
        array: Array,
        kind: str,
        peer: int | None,
        tag: int,
        tensor: torch.Tensor,
        timeout: float | None,
    ) -> Message:
        limit = self.timeout if timeout is None else timeout
        dtype = _name(tensor.dtype)
        return Message(communicator, describe(kind), limit, array, kind, peer, tag, dtype)

    def _issue_message(
        self, message: Message, tensor: torch.Tensor, array: Array, async_op: bool
    ) -> Work:
        work = Work(self, message.kind, message, tensor, array.nbytes, async_op)
        self._carry_out(message, work)
        return work

    # -- checks -------------------------------------------------------------------------------

    def _check_rank(self, rank: int, name: str, *, other: bool = False) -> None:
        if not 0 <= rank < self.size:
            raise Refused(f"{name} is {rank}, but the group has ranks 0 to {self.size - 1}")
        if other and rank == self.rank:
            raise Refused(f"{name} is {rank}, this very rank; copy the tensor instead")

    def _parts(
        self, tensors: Tensors, name: str, like: torch.Tensor, *, written: bool, equal: bool
    ) -> list[torch.Tensor]:
        if isinstance(tensors, torch.Tensor):
            check_tensor(tensors, name, written=written)
            if tensors.numel() != self.size * like.numel():
                raise Refused(
                    f"{name} has {tensors.numel()} elements; "
                    f"{self.size} ranks × {like.numel()} are {self.size * like.numel()}"
                )
            if not tensors.is_contiguous():
                raise Refused(f"{name} must be contiguous when it is one tensor for all ranks")
            if tensors.dtype != like.dtype:
                raise Refused(f"{name} is {tensors.dtype}, the other tensor {like.dtype}")
            flat = tensors.detach().reshape(-1)
            return list(torch.split(flat, like.numel())) if like.numel() else [flat] * self.size
        parts = list(tensors)
        if len(parts) != self.size:
            raise Refused(f"{name} has {len(parts)} tensors, the group {self.size} ranks")
        for index, tensor in enumerate(parts):
            check_tensor(tensor, f"{name}[{index}]", written=written)
            if tensor.dtype != like.dtype:
                raise Refused(f"{name}[{index}] is {tensor.dtype}, the other tensor {like.dtype}")
            if equal and tensor.numel() != like.numel():
                raise Refused(f"{name}[{index}] has {tensor.numel()} elements, not {like.numel()}")
        return parts

    def _cut(self, tensors: Tensors, name: str, *, written: bool) -> Sequence[torch.Tensor]:
        """One tensor in equal parts, one per rank; a list stays what it is."""
        if not isinstance(tensors, torch.Tensor):
            return tensors
        count, rest = divmod(tensors.numel(), self.size)
        if rest:
            raise Refused(
                f"{name} has {tensors.numel()} elements, which do not divide by {self.size}"
            )
        return self._parts(tensors, name, tensors.new_empty(count), written=written, equal=True)

    def _rooted_parts(
        self, tensors: Tensors | None, name: str, like: torch.Tensor, root: int, *, written: bool
    ) -> list[torch.Tensor] | None:
        if self.rank != root:
            if tensors is not None and len(tensors):
                raise Refused(f"{name} must be None on rank {self.rank}; rank {root} has them")
            return None
        if tensors is None:
            raise Refused(f"{name} is None, but this is rank {root}, which needs them")
        return self._parts(tensors, name, like, written=written, equal=True)


# -- programs, kept per schedule and sizes --------------------------------------------------------


class _ByIdentity:
    """A schedule as a cache key: `build` returns the same object for the same arguments, and
    hashing one walks all its moves."""

    __slots__ = ("schedule",)

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule

    def __hash__(self) -> int:
        return id(self.schedule)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and other.schedule is self.schedule


def _chunked(schedule: Schedule, rank: int, count: int, itemsize: int) -> Program:
    return _chunked_cached(_ByIdentity(schedule), rank, count, itemsize)


@lru_cache(maxsize=512)
def _chunked_cached(key: _ByIdentity, rank: int, count: int, itemsize: int) -> Program:
    schedule = key.schedule
    runs = split(count, schedule.chunks) if schedule.chunks else []
    places = [Place(0, start, length) for start, length in runs]
    return compile_program(schedule, rank, places, max(1, SEGMENT // itemsize))


def _listed(schedule: Schedule, rank: int, sizes: tuple[int, ...], itemsize: int) -> Program:
    return _listed_cached(_ByIdentity(schedule), rank, sizes, itemsize)


@lru_cache(maxsize=512)
def _listed_cached(key: _ByIdentity, rank: int, sizes: tuple[int, ...], itemsize: int) -> Program:
    places = [Place(slot, 0, size) for slot, size in enumerate(sizes)]
    return compile_program(key.schedule, rank, places, max(1, SEGMENT // itemsize))


@lru_cache(maxsize=64)
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _store(output: torch.Tensor, array: Array) -> None:
    """Write a flat working array into `output`, cast once."""
    buffer = Buffer(output, widen=True)
    buffer.array[...] = array
    buffer.commit()


def _commit_all(buffers: Sequence[Buffer]) -> Callable[[], None]:
    def commit() -> None:
        for buffer in buffers:
            buffer.commit()

    return commit


def _result(tensors: Tensors | None) -> torch.Tensor | list[torch.Tensor] | None:
    if tensors is None or isinstance(tensors, torch.Tensor):
        return tensors
    return list(tensors)


def _observe(work: Work) -> None:
    for observer in observers:
        observer(work)


def _on_its_way_out() -> BaseException | None:
    """The exception that ends this program or block, if one does; a chosen exit is none."""
    error = sys.exc_info()[1] or getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return error if isinstance(error, BaseException) and not isinstance(error, SystemExit) else None


@atexit.register
def _leave_all() -> None:
    """A process that ends says so in each of its groups."""
    for group in list(_open_groups):
        if group._parent is None:
            try:
                group.close()
            except CollectiveError:
                continue  # closed or poisoned already: nothing is left to say
