"""What ranks run in which one of them kills itself: after so many frames, or in the middle of one.

Ranks 0 and 1 are of one node, 2 and 3 of another, and so on: each group has links of both kinds
unless it is asked for sockets alone.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import segments
import soon_full
import torch
from link_kinds import NOWHERE
from resources import descriptors, highest_resident, resident, threads

import collective
from collective import transfer
from collective.errors import CollectiveError
from collective.group import Group
from collective.links.doorman import Doorman
from collective.links.endpoint import SocketEndpoint
from collective.links.link import Outlet
from collective.links.listener import Admission, Listener, listen
from collective.links.shared_memory import SharedOutlet
from collective.links.wire import FrameKind
from collective.reaching import Peer
from collective.rendezvous import assemble
from collective.transfer import CollectiveOperation

_group: Group | None = None
_lent_from = transfer.LENT_FROM
_lent = False


def group() -> Group:
    assert _group is not None
    return _group


def join(
    where: list[str], epoch: int, strategy: str = "auto", shared: bool = True,
    segment: int | None = None, lent: bool = False, way: str = "",
) -> None:  # fmt: skip
    """Make the group of an epoch; with a length of segments in bytes, of all ranks alike.

    With `lent`, tensors are in shared memory, and are read there however small.  Links between
    nodes are plain, or the `way` is "three connections" or "masked".
    """
    global _group, _lent
    _lent = lent
    transfer.LENT_FROM = 1 if lent else _lent_from
    segments.use(segment)
    os.environ["UNISONO_CONNECTIONS"] = "3" if way == "three connections" else "1"
    SocketEndpoint.fills_up_at = soon_full.fills_up  # type: ignore[method-assign]
    rank = int(os.environ["RANK"])
    peers = []
    for number, text in enumerate(where):
        host, _, port = text.partition(":")
        node = f"n{number // 2}"
        peers.append(Peer(node, ((host, int(port)),), place=node if shared else ""))
    admission = Admission("faults", "-", epoch, f"of-{where[0]}")  # others may test beside
    doorman = Doorman()
    ((host, port),) = peers[rank].addresses
    listener = Listener(admission, doorman, listen(host, port), rank)
    if way == "masked":  # a rank cannot reach those behind it, which mask what they send it
        peers[rank + 1 :] = [replace(peer, addresses=NOWHERE) for peer in peers[rank + 1 :]]
    _group = assemble(rank, peers, admission, doorman, listener, timeout=20, strategy=strategy)


def leave() -> None:
    global _group
    group().close()
    _group = None


# -- the injector ---------------------------------------------------------------------------------


class Injector:
    """Counts the frames of collectives that this process sends or receives, and kills it at one.

    Args:
        event: ``sent`` (in the middle of the frame, where its link can be left so) or ``received``
            (when its header is here, before its payload has landed).
        at: which frame, from 1; None to count only.
    """

    def __init__(self, event: str, at: int | None) -> None:
        self.count = 0
        self._at = at
        self._patched: list[tuple[type, str, Any]] = []
        if event == "sent":
            for link in (Outlet, SharedOutlet):
                self._patch(link, "begin", self._sending)
            self._patch(SharedOutlet, "lend", lambda *_: self._count())
        else:
            self._patch(CollectiveOperation, "_check", lambda *_: self._count())

    def _patch(self, owner: type, name: str, before: Callable[..., None]) -> None:
        original = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            before(*arguments)
            return original(*arguments)

        self._patched.append((owner, name, original))
        setattr(owner, name, call)

    def _sending(self, link: Outlet, head: bytes, payload: memoryview | None) -> None:
        if self.count + 1 == self._at and type(link) is Outlet:
            if link._masker is not None:
                head, payload = link._masker.frame(head, payload)
            with suppress(OSError):  # full, or its peer is gone: then none of the frame leaves
                link.endpoint.send([head, (payload or memoryview(b""))[: len(payload or b"") // 2]])
        self._count()

    def _count(self) -> None:
        self.count += 1
        if self.count == self._at:
            os.kill(os.getpid(), signal.SIGKILL)

    def remove(self) -> None:
        for owner, name, original in self._patched:
            setattr(owner, name, original)


@dataclass
class Seen:
    """What a rank saw: its operations that ended well, and the error that ended the group."""

    right: int = 0
    wrong: list[str] = field(default_factory=list)
    kind: str = ""
    culprit: int | None = None
    text: str = ""
    #: seconds from the start, of random operations of the last one, to the error
    seconds: float = 0.0
    #: frames that the injector counted in the first operation
    frames: int = 0


def reduce_and_meet(culprit: int, event: str, at: int | None, count: int) -> Seen:
    """An all-reduce in which the culprit dies at a frame, and a barrier that nobody survives."""
    seen = Seen()
    start = time.monotonic()
    here = group()
    injector = Injector(event, at) if here.rank == culprit else None
    tensor = _own(torch.arange(count, dtype=torch.float64) * (here.rank + 1))
    try:
        here.all_reduce(tensor)
        n = here.size
        if torch.equal(tensor, torch.arange(count, dtype=torch.float64) * (n * (n + 1) // 2)):
            seen.right += 1
        else:
            seen.wrong.append("all_reduce")
        if injector is not None:
            seen.frames = injector.count
            injector.remove()
        here.barrier()
        seen.right += 1
    except CollectiveError as error:
        _note(seen, error, start)
    return seen


def _note(seen: Seen, error: CollectiveError, start: float) -> None:
    seen.kind, seen.culprit, seen.text = type(error).__name__, error.rank, str(error)
    seen.seconds = time.monotonic() - start
    try:
        group().barrier()
    except CollectiveError as again:
        if type(again) is not type(error) or again.rank != error.rank:
            seen.wrong.append(f"{again!r} after {error!r}")
    else:
        seen.wrong.append(f"a barrier after {error!r}")


def disagree() -> Seen:
    """Rank 0 calls something else than the others."""
    seen = Seen()
    start = time.monotonic()
    try:
        group().barrier() if group().rank == 0 else group().all_reduce(torch.ones(5))
    except CollectiveError as error:
        _note(seen, error, start)
    return seen


def send_rubbish(culprit: int, kind: FrameKind | None, body: bytes) -> Seen:
    """The culprit sends rank 0 what makes no sense, as control or as no frame; then all meet, until
    rank 0 reads it: control may come behind the frames of a barrier."""
    seen = Seen()
    start = time.monotonic()
    here = group()._communicator
    if group().rank == culprit:
        assert here is not None
        if kind is None:
            here.outlets[0].endpoint.send([body])
        else:
            here.inlets[0].say(kind, here.epoch, 0, body)
    try:
        for _ in range(1000):
            group().barrier()
    except CollectiveError as error:
        _note(seen, error, start)
    return seen


def reduce_within(seconds: float) -> Seen:
    """An all-reduce of several segments that must be over after so many seconds."""
    seen = Seen()
    start = time.monotonic()
    try:
        group().all_reduce(torch.ones(500_000), timeout=seconds)
    except CollectiveError as error:
        _note(seen, error, start)
    return seen


def reduce_and_broadcast(count: int) -> tuple[int, list[str]]:
    """Sum and broadcast so many bytes: how far memory rose above the tensor, and what is wrong."""
    here = group()
    here.all_reduce(torch.ones(1000, dtype=torch.uint8))
    spots = [0, 1, count // 2, 2**31 - 1, 2**31, 2**31 + 1, count - 2, count - 1]
    tensor = torch.full((count,), here.rank + 1, dtype=torch.uint8)
    for number, spot in enumerate(spots):
        tensor[spot] = 10 * number + here.rank
    before = resident()
    here.all_reduce(tensor)
    rise = highest_resident() - before
    wrong = [f"sum at {spot}" for n, spot in enumerate(spots) if tensor[spot] != 20 * n + 1]
    if _others(tensor, 3) != len(spots):
        wrong.append("sum elsewhere")
    here.broadcast(tensor.fill_(here.rank + 7), 1)
    if _others(tensor, 8):
        wrong.append("broadcast")
    return rise, wrong


def _others(tensor: torch.Tensor, value: int) -> int:
    """How many elements have another value, counted in pieces that fit a cache."""
    return sum(int((piece != value).sum()) for piece in tensor.split(1 << 20))


def wait_for_a_tensor() -> Seen:
    """Rank 0 waits for a tensor that rank 1 exposes after a barrier."""
    here, seen = group(), Seen()
    start = time.monotonic()
    try:
        if here.rank == 0:
            here.download(1, "weights")
        else:
            here.barrier()
            here.expose(torch.ones(3), "weights")
    except CollectiveError as error:
        _note(seen, error, start)
    return seen


# -- random operations ----------------------------------------------------------------------------


def random_operations(seed: int, rounds: int, victim: int | None) -> Seen:
    """The same random operations on all ranks; the victim dies in one of them, somewhere."""
    here = group()
    own = random.Random(f"{seed} {here.rank}")
    injector = None
    if here.rank == victim:
        injector = Injector(own.choice(["sent", "received"]), own.randint(1, 40))
    seen = Seen()
    start = time.monotonic()
    shared = random.Random(seed)
    try:
        for index in range(rounds):
            start = time.monotonic()
            name = shared.choice([*_OPERATIONS])
            count = shared.choice([0, 1, here.size + 1, 1000, 70_001])
            if not _OPERATIONS[name](here, count, index):
                seen.wrong.append(f"{name} of {count}")
            seen.right += 1
        here.barrier()
    except CollectiveError as error:
        _note(seen, error, start)
    finally:
        if injector is not None:
            injector.remove()
    return seen


def _own(values: torch.Tensor) -> torch.Tensor:
    """The same values, where the group's tensors are to be."""
    return collective.empty(values.shape, values.dtype).copy_(values) if _lent else values


def _values(rank: int, count: int, index: int) -> torch.Tensor:
    return _own((torch.arange(count, dtype=torch.float64) + index) * (rank + 1))


def _total(here: Group, count: int, index: int) -> torch.Tensor:
    return _values(0, count, index) * (here.size * (here.size + 1) // 2)


def _all_reduce(here: Group, count: int, index: int) -> bool:
    tensors = [_values(here.rank, count, index + each) for each in range(3)]
    for work in [here.all_reduce(tensor, async_op=True) for tensor in tensors]:
        work.wait()
    return all(torch.equal(t, _total(here, count, index + e)) for e, t in enumerate(tensors))


def _broadcast(here: Group, count: int, index: int) -> bool:
    tensor = _values(here.rank, count, index)
    here.broadcast(tensor, index % here.size)
    return torch.equal(tensor, _values(index % here.size, count, index))


def _reduce_scatter(here: Group, count: int, index: int) -> bool:
    output = torch.zeros(count, dtype=torch.float64)
    here.reduce_scatter(output, [_values(here.rank, count, index) for _ in range(here.size)])
    return torch.equal(output, _total(here, count, index))


def _all_gather(here: Group, count: int, index: int) -> bool:
    outputs = [torch.zeros(count, dtype=torch.float64) for _ in range(here.size)]
    here.all_gather(outputs, _values(here.rank, count, index))
    return all(torch.equal(o, _values(r, count, index)) for r, o in enumerate(outputs))


def _messages(here: Group, count: int, index: int) -> bool:
    before, behind = (here.rank - 1) % here.size, (here.rank + 1) % here.size
    tensor = torch.zeros(count, dtype=torch.float64)
    works = [
        here.recv(tensor, before, tag=index, async_op=True),
        here.send(_values(here.rank, count, index), behind, tag=index, async_op=True),
    ]
    for work in works:
        work.wait()
    return torch.equal(tensor, _values(before, count, index))


def _subgroup(here: Group, count: int, index: int) -> bool:
    with here.subgroup(range(here.size), f"s{index}") as sub:
        return _all_reduce(sub, count, index)


def _tensors(here: Group, count: int, index: int) -> bool:
    here.expose(_values(here.rank, count, index), f"t{index}", downloads=1)
    before = (here.rank - 1) % here.size
    return torch.equal(here.download(before, f"t{index}"), _values(before, count, index))


_OPERATIONS: dict[str, Callable[[Group, int, int], bool]] = {
    "all_reduce": _all_reduce, "broadcast": _broadcast, "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather, "messages": _messages, "subgroup": _subgroup, "tensors": _tensors,
}  # fmt: skip


@dataclass
class Held:
    """What a rank holds while it has no group."""

    descriptors: list[str]
    threads: list[str]
    maps: int
    memory: int


def held() -> Held:
    collective.empty(1)  # whose file stays open, in each process that ever made one
    with open("/proc/self/maps") as file:
        maps = sum("memfd:unisono" in line for line in file) - 1
    kinds = sorted(what.partition(":")[0] for what in descriptors().values())
    return Held(kinds, threads(), maps, resident())
