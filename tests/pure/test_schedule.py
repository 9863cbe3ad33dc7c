"""The data of schedules: what constructors refuse, and composition."""

import pytest

from collective.schedule import (
    Act,
    Collective,
    Kind,
    Move,
    Schedule,
    Span,
    beside,
    embed,
    mirrored,
    then,
    token,
)


def copy(src: int, dst: int, read: Span, write: Span | None = None) -> Move:
    return Move(src, dst, read, write or read, Act.COPY, "test")


def test_span_iterates_over_its_slots() -> None:
    """A span counts its slots from its start."""
    assert list(Span(3, 2)) == [3, 4]
    assert list(Span(3, 0)) == []


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Span(-1), "starts at 0"),
        (lambda: Span(0, -1), "counts 0 or more"),
        (lambda: copy(1, 1, Span(0, 2), Span(1, 2)), "a local move reads and writes different"),
        (lambda: token(1, 1, "end"), "from rank 1 to itself"),
        (lambda: copy(-1, 1, Span(0)), "count from 0"),
        (lambda: copy(0, 1, Span(0, 2), Span(0, 1)), "differ in length, 2 and 1"),
        (lambda: Move(0, 1, Span(0, 0), Span(0, 0), Act.FOLD), "a token"),
        (lambda: Move(0, 1, Span(1, 0), Span(0, 0), Act.COPY), "a token"),
    ],
)
def test_half_right_moves_cannot_be_made(make, named) -> None:
    """A span or move that no reading could make sense of is refused with what is wrong."""
    with pytest.raises(ValueError, match=named):
        make()


@pytest.mark.parametrize(
    ("move", "named"),
    [
        (copy(0, 2, Span(0)), "step 1, rank 0 → rank 2.*no rank 2, only 0…1"),
        (copy(0, 1, Span(1, 2)), "no slot 2, only 2"),
        (copy(0, 1, Span(0), Span(7)), "no slot 7"),
    ],
)
def test_schedule_refuses_moves_outside_of_it(move: Move, named: str) -> None:
    """A move to a rank or slot that does not exist is named with its step."""
    with pytest.raises(ValueError, match=named):
        Schedule("test", 2, 1, 1, ((), (move,)))


def test_schedule_refuses_impossible_shapes() -> None:
    """A schedule has at least one rank and no negative number of slots."""
    for shape in [(0, 1, 0), (1, -1, 0), (1, 1, -1)]:
        with pytest.raises(ValueError, match="it needs at least"):
            Schedule("test", *shape, ())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((Kind.BROADCAST, 0, 1, 0), "at least 1 rank"),
        ((Kind.BROADCAST, 2, 1, 2), "root 2 of broadcast is none of the ranks 0…1"),
        ((Kind.REDUCE, 2, 0, 0), "at least 1 chunk"),
        ((Kind.GATHER, 3, 1, 0), "gather of 3 ranks has 3 chunk slots, not 1"),
        ((Kind.ALL_TO_ALL, 3, 3, 0), "has 6 chunk slots, not 3"),
        ((Kind.BARRIER, 3, 1, 0), "has 0 chunk slots"),
    ],
)
def test_collective_refuses_impossible_shapes(arguments, named) -> None:
    """A collective's ranks, root and chunks must fit its kind."""
    with pytest.raises(ValueError, match=named):
        Collective(*arguments)


def test_program_holds_the_moves_of_one_rank_in_order() -> None:
    """The program of a rank has its sends and receives, with their steps."""
    first, second, third = copy(0, 1, Span(0)), copy(1, 2, Span(0)), token(2, 0, "end")
    schedule = Schedule("test", 3, 1, 0, ((first,), (second,), (third,)))
    assert schedule.program(0) == ((0, first), (2, third))
    assert schedule.program(1) == ((0, first), (1, second))
    local = copy(1, 1, Span(0), Span(1))
    assert Schedule("test", 2, 1, 1, ((local,),)).program(1) == ((0, local),)


def test_embed_renames_ranks_and_widens_slots() -> None:
    """One slot of a part may become several of the whole; a torn span becomes several moves."""
    part = Schedule("part", 2, 2, 1, ((copy(0, 1, Span(0, 3)), token(1, 0, "end")),))
    slots = [Span(4, 2), Span(6, 1), Span(0, 2)]
    whole = embed(part, [5, 3], slots, ranks=6, chunks=6, scratch=1)
    assert whole.steps == ((copy(5, 3, Span(4, 3)), copy(5, 3, Span(0, 2)), token(3, 5, "end")),)
    assert (whole.ranks, whole.chunks, whole.scratch) == (6, 6, 1)
    with pytest.raises(ValueError, match="no slot 6"):
        embed(part, [5, 3], slots, ranks=6, chunks=6)


def test_embed_tears_a_slot_over_any_places() -> None:
    """One slot of a part may become slots of the whole that do not stand side by side."""
    part = Schedule("part", 2, 1, 0, ((copy(0, 1, Span(0)),),))
    whole = embed(part, [0, 1], [(1, 2, 5)], ranks=2, chunks=6)
    assert whole.steps == ((copy(0, 1, Span(1, 2)), copy(0, 1, Span(5))),)


def test_mirrored_folds_what_was_copied_the_way_back() -> None:
    """Steps run backwards; what would fold into one place at once takes turns."""
    down = Schedule("down", 3, 1, 0, ((copy(0, 1, Span(0)), copy(0, 2, Span(0))),))
    up = [Move(rank, 0, Span(0), Span(0), Act.FOLD, "reduce") for rank in (1, 2)]
    assert mirrored(down).steps == ((up[0],), (up[1],))


@pytest.mark.parametrize(
    ("members", "slots", "named"),
    [
        ([0], [Span(0)], "needs 2 different members"),
        ([1, 1], [Span(0)], "needs 2 different members"),
        ([0, 1], [], "has 2 slots, but 0 are mapped"),
        ([0, 1], [Span(0, 2), Span(1)], "would share a place"),
        ([0, 1], [Span(0), Span(1, 0)], "would have no place"),
        ([0, 1], [Span(0), Span(1, 2)], "become 1 and 2 slots"),
    ],
)
def test_embed_refuses_what_does_not_fit(members, slots, named) -> None:
    """Members and slots must be as many as the part has, different, and of equal length."""
    part = Schedule("part", 2, 2, 0, ((copy(0, 1, Span(0), Span(1)),),))
    with pytest.raises(ValueError, match=named):
        embed(part, members, slots, ranks=4, chunks=4)


def test_beside_joins_steps_and_then_appends_them() -> None:
    """Parts run at the same time or one after the other."""
    one = Schedule("one", 4, 1, 0, ((copy(0, 1, Span(0)),), (copy(1, 0, Span(0)),)))
    two = Schedule("two", 4, 1, 2, ((copy(2, 3, Span(0)),),))
    both = beside(one, two)
    assert both.steps == ((*one.steps[0], *two.steps[0]), one.steps[1])
    assert (both.name, both.scratch) == ("one | two", 2)
    assert then(one, two, name="x").steps == one.steps + two.steps


def test_only_schedules_of_one_shape_compose() -> None:
    """Parts of different size are named, and nothing cannot be composed."""
    one, two = Schedule("one", 4, 1, 0, ()), Schedule("two", 4, 2, 0, ())
    with pytest.raises(ValueError, match="'one' has 4 ranks and 1 chunks, 'two' has 4 ranks and 2"):
        then(one, two)
    with pytest.raises(ValueError, match="at least one"):
        beside()
