"""One contract on every kind of link: any call is right, and who disagrees or is lost is named."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import segments
import torch
from drawn_calls import Call, calls, issue, nodes, strategies
from hypothesis import given, settings
from hypothesis import strategies as st
from link_kinds import KINDS
from resources import resident
from thread_ranks import Ranks, ThreadRanks

from collective.errors import Refused
from collective.group import Group

#: bytes of a segment here, so that a few thousand elements are several
SEGMENT = 4096


@pytest.fixture(scope="module")
def small_segments() -> Iterator[None]:
    """Short segments on all ranks of this process."""

    segments.use(SEGMENT)
    yield
    segments.use(None)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of link."""
    return str(request.param)


@pytest.fixture(scope="module")
def kept(kind: str, small_segments: None) -> Iterator[Ranks]:
    """Ranks of each kind, kept between cases."""
    made = Ranks(kind)
    yield made
    made.close()


def run_all(group: Group, drawn: list[Call]) -> list[str]:
    """Issue all calls, then wait for all; what is wrong with the results."""
    issued = [issue(group, call, tag) for tag, call in enumerate(drawn)]
    for works, _ in issued:
        for work in works:
            work.wait()
    return [wrong for _, check in issued for wrong in check()]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_calls_in_a_row_are_right(kept: Ranks, data: st.DataObject) -> None:
    """Drawn calls, waited for at once or later: values in every dtype, layout, root and strategy;
    inputs and what lies around the tensors stay as they were."""
    size = data.draw(st.integers(1, 9), "ranks")
    names = data.draw(nodes(size), "nodes")
    strategy = data.draw(strategies(names is not None), "strategy")
    drawn = data.draw(st.lists(calls(size), min_size=1, max_size=3), "calls")
    for wrong in kept.get(size, strategy, names).run(run_all, drawn):
        assert not wrong, "\n".join(wrong)


def test_one_element_of_any_stride(kept: Ranks) -> None:
    """A single element far from its neighbours counts as contiguous; every call takes it."""

    def work(group: Group) -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.bool):
            room = torch.zeros(1, 2, dtype=dtype)
            tensor = room[:, 1]
            tensor.fill_(group.rank)
            group.all_reduce(tensor)
            group.broadcast(tensor, 0)
            group.expose(tensor, str(dtype))
            assert group.download(1 - group.rank, str(dtype)).item() == 1
            assert room.tolist() == [[0, 1]]

    kept.get(2).run(work)


def test_calls_in_place(kept: Ranks) -> None:
    """Inputs and outputs may lie in one tensor: nothing is overwritten before it was sent."""

    def work(group: Group) -> None:
        me, n, count = group.rank, group.size, 3 * SEGMENT // 4
        rows = torch.arange(n * n * count, dtype=torch.float32).reshape(n, n, count)
        for flat in (True, False):

            def cut(tensor: torch.Tensor, flat: bool = flat) -> torch.Tensor | list[torch.Tensor]:
                return tensor if flat else list(tensor)

            room = rows[me].clone()
            group.all_to_all(cut(room), cut(room))
            assert torch.equal(room, rows[:, me])
            room = rows[me].clone()
            group.all_gather(cut(room), room[me])
            assert torch.equal(room, torch.stack([rows[r, r] for r in range(n)]))
            room = rows[me].clone()
            group.reduce_scatter(room[me], cut(room))
            assert torch.equal(room[me], rows[:, me].sum(0))
            for root in range(n):
                room = rows[me].clone()
                group.scatter(room[0], cut(room) if me == root else None, root)
                assert torch.equal(room[0], rows[root, me])
                room = rows[me].clone()
                group.gather(room[me], cut(room) if me == root else None, root)
                assert me != root or torch.equal(room, torch.stack([rows[r, r] for r in range(n)]))

    for strategy in ("auto", "ring"):
        kept.get(4, strategy).run(work)


def test_outputs_that_share_memory_are_refused(kept: Ranks) -> None:
    """Where two results would go to one place, no rank gets a wrong one; the group goes on."""

    def work(group: Group) -> None:
        room, other = torch.zeros(group.size + 1, 2), torch.zeros(2)
        for outputs in ([other] * group.size, [room.view(-1)[r : r + 2] for r in range(3)]):
            for call in (
                lambda outputs=outputs: group.all_gather(outputs, torch.ones(2)),
                lambda outputs=outputs: group.all_to_all(outputs, list(torch.ones(3, 2))),
                lambda outputs=outputs: group.gather(
                    torch.ones(2), outputs if group.rank == 0 else None, 0, async_op=False
                ),
            ):
                with pytest.raises(Refused, match=r"share memory.*can still be used"):
                    call()
        outputs = [room[: group.size, 0], room[: group.size, 1], torch.zeros(3)]
        group.all_gather(outputs, torch.full((3,), group.rank + 1.0))
        assert room[: group.size].tolist() == [[1.0, 2.0]] * 3, "columns lie apart"
        assert not other.count_nonzero()

    kept.get(3).run(work)


def test_a_closed_group_gives_its_memory_back_at_once(kind: str) -> None:
    """Closing frees what links and engines hold; no collection of garbage is needed for it."""

    def work(group: Group) -> None:
        for _ in range(3):
            group.all_reduce(torch.ones(1_000_000))

    def make_and_close() -> None:
        with ThreadRanks(5, kind=kind) as ranks:
            ranks.run(work)

    make_and_close()
    gc.collect()
    gc.disable()
    try:
        before = resident()
        for _ in range(3):
            make_and_close()
        rise = resident() - before
    finally:
        gc.enable()
    assert rise < 120 << 20
