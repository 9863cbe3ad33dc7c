"""The proof: what it grants to every strategy, and each reason for which it refuses."""

import itertools
import random
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_interpreter import FLAT, done_without, expected, flat_cases, run

from collective.proof import ProofError, verify, verify_everyone_took_part
from collective.schedule import ROOTED, Act, Kind, Move, Schedule, Span, token
from collective.strategies import TwoLevel, build, collective_of, nodes_of
from collective.strategies.spelling import SPELLINGS
from collective.strategies.two_level import LEVELS

SUM = int.__add__
CELLS = [(kind, strategy) for kind, strategies in FLAT.items() for strategy in strategies]


def prove(schedule: Schedule, kind: Kind, root: int = 0) -> None:
    verify(schedule, collective_of(kind, schedule.ranks, schedule.chunks, root))


def refusal(schedule: Schedule, kind: Kind, root: int = 0) -> ProofError:
    with pytest.raises(ProofError) as caught:
        prove(schedule, kind, root)
    return caught.value


@pytest.mark.parametrize(("kind", "strategy"), CELLS)
def test_every_strategy_is_proved(kind: Kind, strategy: str) -> None:
    """Every operation by every strategy is right on 1 to 9 ranks with every root."""
    for ranks in range(1, 10):
        for root in range(ranks):
            schedule = build(strategy, kind, ranks, root)
            prove(schedule, kind, root)
            assert all(schedule.steps)
            assert bool(schedule.steps) == (ranks > 1)


def test_every_schedule_computes_its_operation() -> None:
    """Run on random numbers, every schedule gives what the operation asks for."""
    rng = random.Random(1)
    for schedule, kind, root in flat_cases(range(1, 10)):
        memory = [
            [rng.randrange(-1000, 1000) for _ in range(schedule.slots)]
            for _ in range(schedule.ranks)
        ]
        after = run(schedule, memory, SUM)
        for (rank, slot), value in expected(kind, root, memory, schedule.chunks).items():
            assert after[rank][slot] == value, (schedule.name, schedule.ranks, root, rank, slot)


def test_nobody_is_done_before_everyone_took_part() -> None:
    """With one rank silent, no other rank gets through any operation."""
    for schedule, _, root in flat_cases(range(2, 7)):
        for silent in range(schedule.ranks):
            assert not done_without(schedule, silent), (schedule.name, schedule.ranks, root)


def slots_sent(schedule: Schedule, rank: int) -> int:
    sent = [move for _, move in schedule.program(rank) if move.src == rank and not move.is_local]
    return sum(move.read.count for move in sent)


@pytest.mark.parametrize("strategy", ["ring", "halving_doubling", "bruck", "scatter_allgather"])
@pytest.mark.parametrize(("ranks", "values"), [(2, 1200), (4, 1800), (8, 2100)])
def test_nobody_sends_more_than_it_must(strategy: str, ranks: int, values: int) -> None:
    """Each of n ranks sends 2·(n-1)/n of 1200 values."""
    schedule = build(strategy, Kind.ALL_REDUCE, ranks)
    for rank in range(ranks):
        assert slots_sent(schedule, rank) * Fraction(1200, schedule.chunks) == values


@pytest.mark.parametrize("strategy", ["bruck", "direct", "ring"])
@pytest.mark.parametrize("kind", [Kind.ALL_GATHER, Kind.REDUCE_SCATTER])
@pytest.mark.parametrize("ranks", [3, 5, 6, 7])
def test_no_power_of_two_is_needed_to_send_the_least(kind: Kind, strategy: str, ranks: int) -> None:
    """Everyone sends n-1 slots, whatever the number of ranks."""
    schedule = build(strategy, kind, ranks)
    assert {slots_sent(schedule, rank) for rank in range(ranks)} == {ranks - 1}


@pytest.mark.parametrize(
    ("strategy", "ranks", "steps"),
    [
        ("bruck", 8, 6), ("bruck", 9, 8), ("halving_doubling", 8, 6), ("halving_doubling", 9, 8),
        ("ring", 9, 16), ("direct", 2, 1), ("recursive_doubling", 8, 3),
        ("recursive_doubling", 9, 5),
    ],
)  # fmt: skip
def test_hops_of_an_all_reduce(strategy: str, ranks: int, steps: int) -> None:
    """Strategies that double need as many hops as the number of ranks has binary digits."""
    assert len(build(strategy, Kind.ALL_REDUCE, ranks).steps) == steps


@pytest.mark.parametrize("ranks", range(2, 12))
def test_each_rank_is_a_leaf_of_one_of_two_trees(ranks: int) -> None:
    """But for the root, nobody passes on both halves of the tensor."""
    schedule = build("double_tree", Kind.BROADCAST, ranks, 1)
    for rank in range(ranks):
        passed = {
            move.read
            for _, move in schedule.program(rank)
            if move.src == rank and not move.is_token
        }
        assert len(passed) <= (2 if rank == 1 else 1)


@pytest.mark.parametrize("strategy", ["direct", "scatter_allgather"])
def test_originals_are_summed_in_rank_order(strategy: str) -> None:
    """Every element is ((a₀ + a₁) + a₂) + … wherever it is summed, on every rank."""
    for ranks in range(3, 8):
        schedule = build(strategy, Kind.ALL_REDUCE, ranks)
        memory = [[f"a{rank}"] * schedule.slots for rank in range(ranks)]

        def add(one: str, other: str) -> str:
            # an addition is commutative: name the operand with the first rank first
            return f"({' + '.join(sorted((one, other), key=lambda t: (t.strip('('), -len(t))))})"

        right = "a0"
        for rank in range(1, ranks):
            right = f"({right} + a{rank})"
        for slots in run(schedule, memory, add):
            assert slots[: schedule.chunks] == [right] * schedule.chunks


NODES = [
    [[0]],
    [[0, 1]],
    [[0], [1], [2]],
    [[0, 1], [2, 3]],
    [[0, 2], [1, 3]],
    [[0, 1, 2, 3], [4, 5, 6, 7]],
    [[0, 1, 2], [3, 4]],
    [[3], [0, 1, 2, 4], [5, 6]],
    [[0, 1, 2], [3, 4, 5], [6, 7, 8]],
]


@pytest.mark.parametrize("kind", list(LEVELS))
def test_two_levels_are_proved_against_the_flat_operation(kind: Kind) -> None:
    """Any two strategies compose to the right operation, also on nodes of different size."""
    names = [[SPELLINGS[name] for name in level] for level in LEVELS[kind]]
    for local, between in itertools.product(*names):
        strategy = f"local={local},between={between}"
        for nodes in NODES:
            ranks = sum(map(len, nodes))
            for root in range(ranks if kind in ROOTED else 1):
                schedule = build(strategy, kind, ranks, root, nodes=nodes)
                prove(schedule, kind, root)
                assert all(schedule.steps)


@pytest.mark.parametrize("kind", list(LEVELS))
def test_nodes_with_different_local_strategies_are_proved(kind: Kind) -> None:
    """Any two local strategies compose, on one node each, those that share and those that lead."""
    inside, across = ([SPELLINGS[name] for name in level] for level in LEVELS[kind])
    shapes = [[[0, 1], [2, 3, 4, 5], [6]], [[0, 4, 2], [1, 3]], [[0], [1, 2, 3, 4]]]
    for index, (one, other) in enumerate(itertools.product(inside, repeat=2)):
        for nodes in shapes:
            names = "abc"[: len(nodes)]
            ranks = sum(map(len, nodes))
            strategy = f"local={one},local@b={other},between={across[index % len(across)]}"
            for root in range(ranks if kind in ROOTED else 1):
                schedule = build(strategy, kind, ranks, root, nodes=nodes, names=names)
                prove(schedule, kind, root)
                assert all(schedule.steps)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_ranks_may_be_anywhere(data: st.DataObject) -> None:
    """Any distribution of up to nine ranks over nodes, any strategy on each, any root is right."""
    places = data.draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=9))
    nodes, names = nodes_of(places), list(dict.fromkeys(places))
    ranks = sum(map(len, nodes))
    kind = data.draw(st.sampled_from(list(LEVELS)))
    inside, across = (st.sampled_from([SPELLINGS[n] for n in level]) for level in LEVELS[kind])
    own = data.draw(st.dictionaries(st.sampled_from("abcd"), inside))
    strategy = TwoLevel(data.draw(inside), data.draw(across), own)
    root = data.draw(st.integers(0, ranks - 1)) if kind in ROOTED else 0
    schedule = build(strategy, kind, ranks, root, nodes=nodes, names=names)
    prove(schedule, kind, root)
    memory = [[random.randrange(1000) for _ in range(schedule.slots)] for _ in range(ranks)]
    after = run(schedule, memory, SUM)
    for (rank, slot), value in expected(kind, root, memory, schedule.chunks).items():
        assert after[rank][slot] == value


@pytest.mark.parametrize("kind", [Kind.ALL_GATHER, Kind.REDUCE_SCATTER])
@pytest.mark.parametrize("local", ["ring", "bruck", "tree:2", "centralized"])
def test_each_slot_goes_between_nodes_as_often_as_there_are_other_nodes(
    kind: Kind, local: str
) -> None:
    """What a node has got or summed up once does not cross to it a second time."""
    nodes = nodes_of("aaabbcccc")
    of = {rank: node for node, ranks in enumerate(nodes) for rank in ranks}
    schedule = build(f"local={local},between=ring", kind, 9, nodes=nodes)
    crossed = sum(
        move.read.count for step in schedule.steps for move in step if of[move.src] != of[move.dst]
    )
    assert crossed == 9 * 2


def test_every_local_rank_carries_its_share_between_nodes() -> None:
    """With a local ring, the traffic between nodes is spread over their ranks."""
    nodes = nodes_of(["a", "a", "b", "b"])
    assert nodes == ((0, 1), (2, 3))
    schedule = build("local=ring,between=ring", Kind.ALL_REDUCE, 4, nodes=nodes)
    for rank in range(4):
        sent = sum(
            Fraction(move.read.count, schedule.chunks)
            for _, move in schedule.program(rank)
            if move.src == rank and move.dst // 2 != rank // 2
        )
        assert sent == Fraction(1, 2)


# --- refusals -------------------------------------------------------------------------------


def fold(src: int, dst: int, slot: int = 0) -> Move:
    return Move(src, dst, Span(slot), Span(slot), Act.FOLD, "up")


def copy(src: int, dst: int, slot: int = 0) -> Move:
    return Move(src, dst, Span(slot), Span(slot), Act.COPY, "down")


def schedule_of(
    ranks: int, *steps: tuple[Move, ...], chunks: int = 1, scratch: int = 0
) -> Schedule:
    return Schedule("hand-made", ranks, chunks, scratch, steps)


def test_an_error_names_step_move_place_and_reason() -> None:
    """Who reads the error can go to the line of the strategy that is wrong."""
    move = fold(1, 0)
    error = refusal(schedule_of(2, (move,), (move,)), Kind.ALL_REDUCE)
    assert (error.step, error.move, error.rank, error.slot) == (1, move, 0, 0)
    assert error.reason == "the input from slot 0 of rank 1 would be counted twice"
    assert (
        "'hand-made', step 1, move rank 1 → rank 0, fold slots 0…0 (up), slot 0 of rank 0"
        in str(error)
    )


@pytest.mark.parametrize(
    ("steps", "kind", "reason"),
    [
        ([(fold(1, 0), fold(2, 0)), (copy(0, 1), copy(0, 2))], Kind.ALL_REDUCE, "two moves"),
        ([(fold(1, 0),), (copy(0, 1), copy(0, 2))], Kind.ALL_REDUCE, "lacks .* of rank 2"),
        ([(fold(1, 0),), (fold(2, 0),), (copy(0, 1),)], Kind.ALL_REDUCE, "lacks"),
        ([(copy(1, 2),)], Kind.BROADCAST, "read before anything has come"),
        ([(copy(0, 1),)], Kind.BROADCAST, "nothing has come into it"),
        ([(fold(0, 1),)], Kind.BROADCAST, "folded into before anything"),
        ([(copy(0, 1), copy(1, 0))], Kind.REDUCE, "lacks the input from slot 0 of rank 0"),
        ([(token(0, 1, "x"), token(0, 1, "x"))], Kind.BROADCAST, "same token is sent twice"),
        ([(copy(0, 1), copy(0, 2))], Kind.BROADCAST, "rank 0: it may be done before rank 1, 2"),
        ([(fold(1, 0),), (fold(2, 0),)], Kind.REDUCE, "rank 1: it may be done before rank 0, 2"),
    ],
)
def test_wrong_schedules_are_refused(steps, kind: Kind, reason: str) -> None:
    """Each way to be wrong is refused with a reason of its own."""
    with pytest.raises(ProofError, match=reason):
        prove(schedule_of(3, *steps), kind)


def test_a_strange_contribution_is_refused() -> None:
    """A slot that holds more than it should is named with the strange part."""
    mixed = Move(1, 0, Span(1), Span(0), Act.FOLD, "up")
    schedule = build("ring", Kind.ALL_REDUCE, 2)
    error = refusal(replace(schedule, steps=(*schedule.steps, (mixed,))), Kind.ALL_REDUCE)
    assert error.reason.startswith("it holds the input from slot 1 of rank 0")
    assert error.step is None and (error.rank, error.slot) == (0, 0)


def test_sums_in_different_order_are_refused() -> None:
    """Two ranks that add the same three numbers in another order may differ in the last bit."""
    around = [(rank, (rank + 1) % 3) for rank in range(3)]
    everyone_for_itself = schedule_of(
        3,
        tuple(Move(src, dst, Span(0), Span(1), Act.COPY, "keep") for src, dst in around),
        tuple(Move(src, dst, Span(0), Span(0), Act.FOLD, "own") for src, dst in around),
        tuple(Move(src, dst, Span(1), Span(0), Act.FOLD, "kept") for src, dst in around),
        scratch=1,
    )
    error = refusal(everyone_for_itself, Kind.ALL_REDUCE)
    assert error.reason.startswith("it was summed in another order than on rank 0")
    assert (error.step, error.rank, error.slot) == (None, 1, 0)


def test_operands_may_change_places() -> None:
    """a + b and b + a are the same bits, so two ranks may fold each other's number."""
    prove(schedule_of(2, (fold(0, 1), fold(1, 0))), Kind.ALL_REDUCE)


def test_scratch_is_rubbish_at_first() -> None:
    """What nobody wrote cannot be read, what somebody wrote can."""
    through = [
        (Move(0, 1, Span(0), Span(1), Act.COPY, "out"),),
        (Move(1, 0, Span(0), Span(0), Act.FOLD, "in"),),
        (Move(0, 1, Span(0), Span(0), Act.COPY, "out"),),
    ]
    prove(schedule_of(2, *through, scratch=1), Kind.ALL_REDUCE)
    rubbish = Move(0, 1, Span(1), Span(1), Act.COPY, "out")
    error = refusal(schedule_of(2, (rubbish,), scratch=1), Kind.ALL_REDUCE)
    assert (error.rank, error.slot) == (0, 1)


def test_a_local_move_sees_the_state_before_its_step() -> None:
    """A rank may fold between its own slots; in the same step others still get what was there."""
    local = Move(1, 1, Span(1), Span(0), Act.FOLD, "own")
    steps = [
        (Move(0, 1, Span(0), Span(1), Act.COPY, "out"),),
        (local, Move(1, 0, Span(0), Span(0), Act.FOLD, "in")),
    ]
    prove(schedule_of(2, *steps, scratch=1), Kind.ALL_REDUCE)
    error = refusal(schedule_of(2, *steps, (local,), scratch=1), Kind.ALL_REDUCE)
    assert error.reason == "the input from slot 0 of rank 0 would be counted twice"


def test_what_may_differ_in_size_does_not_share_a_place() -> None:
    """Two chunks that take turns in one scratch slot are refused: one may be an element longer."""
    out = [Move(0, 1, Span(slot), Span(2), Act.COPY, "out") for slot in range(2)]
    back = [Move(1, 1, Span(2), Span(slot), Act.COPY, "in") for slot in range(2)]
    confirm = (token(1, 0, "confirm"),)
    twice = schedule_of(
        2, *((move,) for pair in zip(out, back, strict=True) for move in pair), confirm,
        chunks=2, scratch=1,
    )  # fmt: skip
    assert twice.scratch_like(1) == (0,) and twice.scratch_like(0) == (None,)
    error = refusal(twice, Kind.BROADCAST)
    assert error.reason.startswith("it need not be as large as slot 1 of rank 0")
    assert (error.step, error.rank, error.slot) == (2, 1, 2)


def test_memory_that_a_rank_lacks_is_not_used() -> None:
    """Only the root of a gather has slots for others; a relay would need scratch."""
    schedule = build("centralized", Kind.GATHER, 3)
    relay = (copy(2, 1, 2),)
    error = refusal(replace(schedule, steps=(relay, *schedule.steps)), Kind.GATHER)
    assert error.reason == "gather gives this rank no such slot"
    assert (error.rank, error.slot) == (1, 2)


@pytest.mark.parametrize(
    ("kind", "strategy", "harm"),
    [
        (Kind.ALL_TO_ALL, "direct", Move(1, 0, Span(0), Span(1), Act.COPY)),
        (Kind.SCATTER, "centralized", Move(1, 0, Span(1), Span(2), Act.COPY)),
    ],
)
def test_the_callers_input_is_left_alone(kind: Kind, strategy: str, harm: Move) -> None:
    """Where the result has slots of its own, an input that was overwritten is refused."""
    schedule = build(strategy, kind, 3)
    assert refusal(replace(schedule, steps=(*schedule.steps, (harm,))), kind).rank == 0


def test_a_schedule_is_proved_for_its_own_size_only() -> None:
    """Another number of ranks or chunks is refused before anything is run."""
    schedule = build("ring", Kind.ALL_REDUCE, 3)
    with pytest.raises(ProofError, match=r"for 3 ranks and 3 chunks, .* for 4 and 3"):
        verify(schedule, collective_of(Kind.ALL_REDUCE, 4, 3))


def test_a_token_follows_what_came_before_it_and_data_does_not() -> None:
    """A data move leaves when what it reads is there, whatever else its sender waits for."""
    arrive = (token(1, 0, "confirm"), token(2, 0, "confirm"))
    by_token = schedule_of(3, arrive, (token(0, 1, "release"), token(0, 2, "release")))
    verify_everyone_took_part(by_token)
    by_data = schedule_of(3, arrive, (copy(0, 1), copy(0, 2)))
    with pytest.raises(ProofError, match="rank 1: it may be done before rank 2 took part"):
        verify_everyone_took_part(by_data)
