"""What the tests of native groups run in rank processes."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from typing import Any

import torch
from link_kinds import group_by_list
from resources import descriptors, highest_resident, resident, threads

import collective
from collective.errors import CollectiveError
from collective.group import Group

_group: Group | None = None
_subgroups: dict[tuple[int, str], Group] = {}
_before: Any = None


def rank_of() -> int:
    return int(os.environ["RANK"])


def join(where: list[str], timeout: float = 30.0, strategy: str = "auto") -> None:
    """Make the group of all ranks, over sockets."""
    global _group, _before
    _before = descriptors(), threads()
    _group = collective.init(
        rank_of(), addresses=where, secret="of-this-test", timeout=timeout, strategy=strategy
    )


def join_some(where: dict[int, str], epoch: int, timeout: float, connections: str = "auto") -> None:
    """Make a group of some ranks of the pool, by their numbers in it; another one is left."""
    global _group, _before
    if _group is not None:
        _group.close()
    _subgroups.clear()
    _before = descriptors(), threads()
    os.environ["UNISONO_CONNECTIONS"] = connections
    _group = collective.init(
        list(where).index(rank_of()), addresses=list(where.values()), secret="of-this-test",
        epoch=epoch, timeout=timeout,
    )  # fmt: skip


def join_from(lists: list[list[str]], epoch: int, connections: str = "1") -> dict[int, str]:
    """Make the group of all ranks, each with its own list of addresses; whom it cannot dial."""
    global _group, _before
    if _group is not None:
        _group.close()
    _subgroups.clear()
    _before = descriptors(), threads()
    os.environ["UNISONO_CONNECTIONS"] = connections
    _group = group_by_list(rank_of(), lists[rank_of()], epoch=epoch, timeout=20.0)
    return _group.unreachable


def unreachable() -> dict[int, str]:
    """Whom this rank cannot dial, and why."""
    assert _group is not None
    return _group.unreachable


def host() -> str:
    """The address at which the ranks listen."""
    assert _group is not None
    return _group.nodes[0]


def leave() -> bool:
    """Close the group; whether descriptors and threads are what they were before it."""
    global _group
    assert _group is not None
    _group.close()
    _group = None
    _subgroups.clear()
    return bool((descriptors(), threads()) == _before)


def group_of(size: int, strategy: str) -> Group | None:
    """The first `size` ranks under a strategy, made at first use; None elsewhere."""
    assert _group is not None
    if rank_of() >= size:
        return None
    key = (size, strategy)
    if key not in _subgroups:
        _subgroups[key] = _group.subgroup(
            range(size), strategy.replace(":", "-"), strategy=strategy
        )
    return _subgroups[key]


def all_reduces(size: int, strategy: str, sizes: list[int], dtypes: list[torch.dtype]) -> None:
    """Exact sums of arange(numel)·(rank + 1)."""
    group = group_of(size, strategy)
    if group is None:
        return
    for numel in sizes:
        for dtype in dtypes:
            tensor = torch.arange(numel, dtype=dtype) * (group.rank + 1)
            group.all_reduce(tensor)
            right = torch.arange(numel, dtype=dtype) * (size * (size + 1) // 2)
            assert torch.equal(tensor, right), (size, strategy, numel, dtype)


def hundred(strategy: str) -> None:
    group = group_of(4, strategy)
    assert group is not None
    for index in range(100):
        tensor = torch.full((997,), float(group.rank + index))
        group.all_reduce(tensor)
        assert torch.equal(tensor, torch.full((997,), 6.0 + 4 * index))


def random_bytes(strategy: str) -> bytes:
    """The bytes of a sum of random floats."""
    group = group_of(4, strategy)
    assert group is not None
    generator = torch.Generator().manual_seed(group.rank)
    tensor = torch.randn(100_003, generator=generator)
    group.all_reduce(tensor, "mean")
    return tensor.numpy().tobytes()


def other_operations(strategy: str) -> None:
    group = group_of(3, strategy)
    if group is None:
        return
    n, me = 3, group.rank
    for root in range(n):
        tensor = torch.full((70_001,), me + 1.0)
        group.broadcast(tensor, root)
        assert torch.equal(tensor, torch.full((70_001,), root + 1.0))
        tensor = torch.full((70_001,), me + 1.0)
        group.reduce(tensor, root)
        assert tensor[-1] == (6.0 if me == root else me + 1.0)
        outputs = [torch.zeros(5) for _ in range(n)]
        group.gather(torch.full((5,), float(me)), outputs if me == root else None, root)
        if me == root:
            assert [output[0].item() for output in outputs] == [0.0, 1.0, 2.0]
        output = torch.zeros(5)
        inputs = [torch.full((5,), 10.0 * r) for r in range(n)] if me == root else None
        group.scatter(output, inputs, root)
        assert output.tolist() == [10.0 * me] * 5
    flat = torch.zeros(n * 1000)
    group.all_gather(flat, torch.full((1000,), float(me)))
    assert flat.sum() == 3000.0
    output = torch.zeros(1000)
    group.reduce_scatter(output, torch.arange(3000.0))
    assert torch.equal(output, 3 * torch.arange(3000.0)[1000 * me : 1000 * me + 1000])
    outputs = [torch.zeros(7) for _ in range(n)]
    group.all_to_all(outputs, [torch.full((7,), 10.0 * me + r) for r in range(n)])
    assert [output[0].item() for output in outputs] == [10.0 * r + me for r in range(n)]
    group.barrier()


def every_pair(count: int) -> None:
    """Messages and downloads from each rank to each other one; what was given is not changed."""
    assert _group is not None
    own = torch.arange(count, dtype=torch.float32) + _group.rank
    given = own.clone()
    others = [peer for peer in range(_group.size) if peer != _group.rank]
    rooms = {peer: torch.empty(count) for peer in others}
    works = [_group.recv(rooms[peer], peer, 7, async_op=True) for peer in others]
    works += [_group.send(given, peer, 7, async_op=True) for peer in others]
    for work in works:
        work.wait()
    _group.expose(given, f"values-{count}")
    for peer in others:
        right = torch.arange(count, dtype=torch.float32) + peer
        assert torch.equal(rooms[peer], right)
        for _ in range(2):
            assert torch.equal(_group.download(peer, f"values-{count}"), right)
    gathered = [torch.empty(count) for _ in range(_group.size)]
    _group.all_gather(gathered, given)
    assert torch.equal(gathered[others[0]], rooms[others[0]])
    assert torch.equal(given, own)
    _group.barrier()
    _group.unexpose(f"values-{count}")


def sum_of(size: int) -> list[float]:
    """An all-reduce of so many values, of which ranks may have different numbers."""
    assert _group is not None
    tensor = torch.ones(size)
    _group.all_reduce(tensor)
    return tensor.tolist()


def two_nodes(strategy: str) -> None:
    """Four ranks whose names say that they are on two nodes."""
    assert _group is not None
    names = _group.nodes
    try:
        _group.nodes = ("a", "a", "b", "b")
        name = "two-" + strategy.translate(dict.fromkeys(map(ord, "=,@"), "-"))
        group = _group.subgroup(range(4), name, strategy=strategy)
    finally:
        _group.nodes = names
    for numel in (0, 1, 3, 4, 5, 73, 300_001):
        tensor = torch.arange(numel, dtype=torch.float64) * (group.rank + 1)
        group.all_reduce(tensor)
        assert torch.equal(tensor, torch.arange(numel, dtype=torch.float64) * 10)
    group.close()


# -- failures -------------------------------------------------------------------------------------


def die_when_called() -> None:
    """From now on, this rank is killed as soon as another asks it to dial."""
    assert _group is not None
    lines = _group._wiring._reach.lines  # type: ignore[attr-defined]
    lines._answer = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


def get_from(peer: int, operation: str) -> None:
    """Wait for a tensor or a message of `peer`."""
    assert _group is not None
    if operation == "download":
        _group.download(peer, "never", timeout=15)
    else:
        _group.recv(torch.zeros(1), peer, timeout=15)


def loop() -> None:
    """All-reduces of 16 MB until something happens."""
    assert _group is not None
    tensor = torch.ones(4_000_000)
    while True:
        _group.all_reduce(tensor)


def first_of_a_subgroup(members: list[int]) -> None:
    assert _group is not None
    sub = _group.subgroup(members, "late")
    sub.all_reduce(torch.ones(10))


def once(timeout: float | None = None, size: int = 10) -> float:
    assert _group is not None
    tensor = torch.ones(size)
    _group.all_reduce(tensor, timeout=timeout)
    return float(tensor[-1])


def both() -> list[float]:
    """Two sums; what another rank does in between is its own business."""
    return [once(), once()]


def interrupted_in_the_middle() -> str:
    """SIGINT comes while this rank waits for others in an all-reduce."""
    assert _group is not None
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        _group.all_reduce(torch.ones(100))
    except KeyboardInterrupt:
        try:
            _group.barrier()
        except CollectiveError as error:
            return str(error)
    return "not interrupted"


def hold_the_interpreter(seconds: int) -> float:
    """A C call that does not let go of the interpreter, between two all-reduces."""
    values = [once()]
    start = time.monotonic()
    ctypes.PyDLL(None).sleep(seconds)
    assert time.monotonic() - start >= seconds - 1
    values.append(once())
    assert values[0] == values[1]
    return values[1]


def _use_after_fork(pipe: Any) -> None:
    assert _group is not None
    held = [what for what in descriptors().values() if what.startswith("socket:")]
    errors = []
    for call in (_group.barrier, lambda: _group.all_reduce(torch.ones(1))):
        try:
            call()
        except CollectiveError as error:
            errors.append(f"{type(error).__name__}: {error}")
    pipe.send((held, errors))
    pipe.close()
    signal.pause()


_children: list[Any] = []


def fork_a_child() -> tuple[list[str], list[str]]:
    """A forked child that lives on; its sockets, and what using the group there raises."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)  # a pipe, not sockets
    child = context.Process(target=_use_after_fork, args=(theirs,), daemon=True)
    child.start()
    _children.append(child)
    found: tuple[list[str], list[str]] = ours.recv()
    return found


def child_pid() -> int:
    return int(_children[-1].pid)


def stream(count: int) -> tuple[float, int]:
    """Send 100 MB to rank 1; how much memory that took."""
    assert _group is not None
    tensor = torch.ones(count)
    before = highest_resident()
    _group.send(tensor, 1)
    return float(tensor[-1]), highest_resident() - before


def receive(count: int, timeout: float) -> float:
    """Wait, in this thread, for data of rank 0."""
    assert _group is not None
    tensor = torch.zeros(count)
    _group.recv(tensor, 0, timeout=timeout)
    return float(tensor.sum())


def stop_while_it_comes(count: int) -> float:
    """Ask rank 0 for its data, then stand still until somebody lets this process go on."""
    assert _group is not None
    tensor = torch.zeros(count)
    work = _group.recv(tensor, 0, async_op=True)
    _group._wiring.engine.call(lambda: None)  # the request is on its way
    os.kill(os.getpid(), signal.SIGSTOP)
    work.wait()
    return float(tensor.sum(dtype=torch.float64))


def memory_of_an_all_reduce(count: int) -> int:
    """How far memory rises above what the tensor itself takes."""
    assert _group is not None
    _group.all_reduce(torch.ones(1000))
    tensor = torch.ones(count)
    before = resident()
    _group.all_reduce(tensor)
    assert float(tensor[-1]) == _group.size
    return highest_resident() - before
