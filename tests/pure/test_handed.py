"""What a level that is handed to another library comes to, in calls of that library."""

from __future__ import annotations

import itertools

import pytest
from schedule_interpreter import Memory, expected, run

from collective.cost import Link, uniform
from collective.prediction import predict
from collective.schedule import Kind, Schedule
from collective.strategies import build, engines, hand_over, parse, resolve
from collective.strategies.handed import Call, Staged
from collective.strategies.spelling import Flat, TwoLevel

NODES = ((0, 1), (2, 3))
UNEVEN = ((0,), (1, 2, 3, 4), (5, 6))
HANDED = ["local=ring,between=gloo", "local=centralized,between=nccl", "local=gloo,between=ring",
          "local=nccl,between=tree:2", "local=gloo,between=gloo", "gloo"]  # fmt: skip
KINDS = [Kind.ALL_REDUCE, Kind.REDUCE, Kind.BROADCAST, Kind.ALL_GATHER, Kind.REDUCE_SCATTER,
         Kind.BARRIER]  # fmt: skip


def staged(text: str, kind: Kind, nodes: tuple[tuple[int, ...], ...], root: int = 0) -> Staged:
    strategy = resolve(parse(text), kind)
    assert strategy is not None and engines(strategy)
    return hand_over(strategy, kind, nodes, root)


def carry_out(call: Call, memory: Memory) -> None:
    """What the library does, on whole numbers; a reduce spoils what the others hold."""
    for slot in call.slots:
        values = [memory[rank][slot] for rank in call.members]
        for rank in call.members:
            match call.kind:
                case Kind.ALL_REDUCE:
                    memory[rank][slot] = sum(values)
                case Kind.REDUCE:
                    memory[rank][slot] = sum(values) if rank == call.root else -(10**9)
                case _:
                    memory[rank][slot] = values[call.members.index(call.root)]


@pytest.mark.parametrize("nodes", [NODES, UNEVEN, ((0, 1, 2),), ((0,),), ((1, 3), (0, 2))])
@pytest.mark.parametrize("text", HANDED)
def test_stages_compute_the_collective(text: str, nodes: tuple[tuple[int, ...], ...]) -> None:
    """Schedules and calls in their order leave on all ranks what the operation means."""
    ranks = sum(map(len, nodes))
    for kind, root in itertools.product(KINDS, range(ranks)):
        strategy = parse(text)
        assert isinstance(strategy, Flat | TwoLevel)
        found = hand_over(strategy, kind, nodes, root)
        slots = found.stand_in.slots
        start = [[100 * rank + slot + 1 for slot in range(slots)] for rank in range(ranks)]
        memory = [list(row) for row in start]
        for stage in found.stages:
            if isinstance(stage, Schedule):
                memory = run(stage, memory, int.__add__)
            else:
                for call in stage:
                    carry_out(call, memory)
        right = expected(kind, root, start, found.stand_in.chunks)
        assert {place: memory[place[0]][place[1]] for place in right} == right, (kind, root)


def test_ranks_of_a_place_reduce_between_nodes_together() -> None:
    """A ring on each of two nodes, and between them one all-reduce of each half."""
    _, calls, _ = staged("local=ring,between=gloo", Kind.ALL_REDUCE, NODES).stages
    assert calls == (
        Call("gloo", "between", Kind.ALL_REDUCE, (0, 2), 0, (0,)),
        Call("gloo", "between", Kind.ALL_REDUCE, (1, 3), 1, (1,)),
    )


def test_a_library_keeps_its_level_where_the_other_has_no_such_strategy() -> None:
    """There is no broadcast by a ring: a star takes its place within nodes, gloo stays between."""
    _, calls, *_ = staged("local=ring,between=gloo", Kind.BROADCAST, NODES, root=3).stages
    assert calls == (Call("gloo", "between", Kind.BROADCAST, (0, 3), 3, (0,)),)


def test_a_library_within_nodes_reduces_shares_and_spreads_them() -> None:
    """Each rank of a node gets the sum of its share, and gives it to its neighbours at the end."""
    _, up, _, down = staged("local=nccl,between=ring", Kind.ALL_REDUCE, NODES).stages
    assert isinstance(up, tuple) and isinstance(down, tuple)
    assert {(call.kind, call.members, call.root, len(call.slots)) for call in up} == {
        (Kind.REDUCE, node, rank, 2) for node in NODES for rank in node
    }
    assert {(call.kind, call.members, call.root, len(call.slots)) for call in down} == {
        (Kind.BROADCAST, node, rank, 2) for node in NODES for rank in node
    }


@pytest.mark.parametrize("text", HANDED)
def test_all_ranks_meet_before_the_library_is_called(text: str) -> None:
    """Whichever rank is silent in the first stage, none of the others gets through it."""
    for kind in KINDS:
        strategy = parse(text)
        assert isinstance(strategy, Flat | TwoLevel)
        first = staged(text, kind, UNEVEN).stages[0]
        assert isinstance(first, Schedule)
        reached = [{rank} for rank in range(7)]
        for step in first.steps:
            before = [set(known) for known in reached]
            for move in step:
                reached[move.dst] |= before[move.src]
        assert reached == [set(range(7))] * 7


@pytest.mark.parametrize("kind", [Kind.GATHER, Kind.SCATTER, Kind.ALL_TO_ALL])
def test_other_operations_are_refused_and_run_as_under_auto(kind: Kind) -> None:
    """A library is asked for operations of two levels only; a group does the others by itself."""
    strategy = parse("local=ring,between=gloo")
    assert isinstance(strategy, TwoLevel)
    with pytest.raises(ValueError, match=f"does not do {kind.value}, only all_reduce"):
        hand_over(strategy, kind, NODES, 0)
    assert resolve(strategy, kind) is None


def test_there_is_no_schedule_of_another_library() -> None:
    """What would prove, time or draw it is told so."""
    with pytest.raises(ValueError, match="hands a level to gloo: there is no schedule"):
        build("local=ring,between=gloo", Kind.ALL_REDUCE, 4, nodes=NODES)
    with pytest.raises(ValueError, match="hands a level to nccl"):
        build("nccl", Kind.ALL_REDUCE, 4)
    topology = uniform(2, 2, Link(0.0, 1e10), Link(1e-4, 1e9))
    for text in ("local=nccl,between=ring", "gloo"):
        with pytest.raises(ValueError, match="there is no schedule of what another library does"):
            predict(text, Kind.ALL_REDUCE, topology, 1 << 20)


def test_a_library_runs_within_all_nodes_or_none() -> None:
    """A node of its own kind cannot leave, or join, what a library does within nodes."""
    assert parse("local=ring,local@w2=direct,between=gloo")
    for text in ("local=ring,local@w2=nccl,between=ring", "local=nccl,local@w2=ring,between=ring"):
        with pytest.raises(ValueError, match="nccl runs within all nodes or within none"):
            parse(text)
