"""What a schedule takes: the simulation, against times that can be worked out by hand."""

from __future__ import annotations

import itertools

import pytest
from schedule_interpreter import flat_cases

from collective.cost import Link, Machine, Timing, Topology, slot_sizes, uniform
from collective.schedule import Act, Kind, Move, Schedule, Span
from collective.simulation import simulate
from collective.strategies import build

#: one segment per chunk
WHOLE = 1 << 62
LINK = Link(50e-6, 1e9)


def run(
    strategy: str,
    topology: Topology,
    nbytes: int,
    kind: Kind = Kind.ALL_REDUCE,
    segment: int = WHOLE,
) -> Timing:
    schedule = build(strategy, kind, topology.ranks, nodes=topology.nodes)
    return simulate(schedule, topology, slot_sizes(kind, schedule, nbytes), segment)


def flat(ranks: int, link: Link = LINK, machine: Machine | None = None) -> Topology:
    return uniform(ranks, 1, link, link, machine)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8])
def test_a_ring_takes_as_long_as_the_books_say(ranks: int) -> None:
    """2(n-1)(α + βS/n)."""
    nbytes = ranks * 10**6
    expected = 2 * (ranks - 1) * (LINK.latency + nbytes / ranks / LINK.bandwidth)
    assert run("ring", flat(ranks), nbytes).seconds == pytest.approx(expected)


@pytest.mark.parametrize(
    ("strategy", "hops", "shares"),
    [
        # on 8 ranks: (hops of latency, transfers of the whole tensor one after the other)
        ("halving_doubling", 6, 2 * 7 / 8),
        ("bruck", 6, 2 * 7 / 8),
        ("scatter_allgather", 2, 2 * 7 / 8),
        ("direct", 1, 7),
        ("chain", 14, 14),
        ("centralized", 2, 14),
    ],
)
def test_times_of_other_strategies_in_one_piece(strategy: str, hops: int, shares: float) -> None:
    """Latency counts hops, and the busiest way counts bytes."""
    nbytes = 8 * 10**6
    expected = hops * LINK.latency + shares * nbytes / LINK.bandwidth
    # where a doubling rank gets several slots at once, the first of them goes on ahead
    slack = 0.15 if strategy in ("halving_doubling", "bruck") else 1e-9
    assert run(strategy, flat(8), nbytes).seconds == pytest.approx(expected, rel=slack)


def test_eight_ranks_of_fast_links_need_a_twentieth_of_a_second() -> None:
    """14 GB at 450 GB/s on 8 ranks: 0.05 s."""
    fast = Link(0.0, 450e9)
    seconds = run("ring", uniform(1, 8, fast, fast), 14 * 10**9).seconds
    assert seconds == pytest.approx(2 * 7 / 8 * 14e9 / 450e9)
    assert round(seconds, 2) == 0.05


def test_sixty_four_ranks_need_half_a_second() -> None:
    """14 GB at 50 GB/s on 64 ranks: 0.55 s."""
    seconds = run("ring", flat(64, Link(0.0, 50e9)), 14 * 10**9).seconds
    assert seconds == pytest.approx(0.55125)


@pytest.mark.parametrize("strategy", ["ring", "halving_doubling", "bruck", "scatter_allgather"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_rank_sends_the_least_that_is_possible(strategy: str, ranks: int) -> None:
    """2(n-1)/n of the tensor."""
    sent = run(strategy, flat(ranks), 1200).sent
    assert sent == (2 * (ranks - 1) * 1200 // ranks,) * ranks


def test_segments_make_a_pipeline_of_a_chain() -> None:
    """With k segments a chain of n ranks takes k + n - 2 transfers of one instead of k·(n - 1)."""
    link = Link(0.0, 1e9)
    schedule = Schedule(
        "chain", 4, 1, 0,
        tuple((Move(r, r + 1, Span(0), Span(0), Act.COPY),) for r in range(3)),
    )  # fmt: skip
    seconds = simulate(schedule, flat(4, link), (10**9,), 10**8).seconds
    assert seconds == pytest.approx((10 + 4 - 2) * 0.1)


def test_ranks_of_a_node_share_its_card() -> None:
    """Two ranks that send to another node take twice as long as one; within a node they do not."""
    moves = tuple(Move(r, r + 2, Span(0), Span(0), Act.COPY) for r in (0, 1))
    schedule = Schedule("pairs", 4, 1, 0, (moves,))
    apart = simulate(schedule, Topology(((0, 1), (2, 3)), LINK, LINK), (10**6,), WHOLE)
    together = simulate(schedule, Topology(((0, 1, 2, 3),), LINK, LINK), (10**6,), WHOLE)
    assert apart.seconds == pytest.approx(LINK.latency + 2e-3)
    assert apart.busy["card 0 out"] == apart.busy["card 1 in"] == pytest.approx(2e-3)
    assert together.seconds == pytest.approx(LINK.latency + 1e-3)
    # half of the traffic does not leave the nodes: two levels take the card half as long
    nodes = uniform(2, 4, Link(0.0, 100e9), Link(0.0, 1e9))
    two, one = (
        run(s, nodes, 8 * 10**6).busy["card 0 out"]
        for s in ("local=ring,between=ring", "local=centralized,between=centralized")
    )
    assert two == pytest.approx(8e-3)
    assert one == pytest.approx(8e-3)
    assert run("bruck", nodes, 8 * 10**6).busy["card 0 out"] > 2 * two


def test_cores_are_shared_by_the_ranks_of_a_node() -> None:
    """Eight ranks on two cores: a star, which has fewer messages, beats doubling and the ring."""
    link = Link(10e-6, 1e9)
    topology = uniform(1, 8, link, link, Machine(2, per_segment=30e-6))
    star, *others = (
        run(strategy, topology, 8).seconds
        for strategy in ("centralized", "halving_doubling", "ring")
    )
    assert star < min(others)
    busy = run("centralized", uniform(1, 8, link, link, Machine(2, 30e-6)), 8).busy
    # 14 messages, each sent and received
    assert busy["cores 0"] == pytest.approx(28 * 30e-6 / 2)


def test_folding_takes_time() -> None:
    """What lands costs its bytes' time at the receiver."""
    schedule = Schedule("one", 2, 1, 0, ((Move(0, 1, Span(0), Span(0), Act.FOLD),),))
    timing = simulate(schedule, flat(2, LINK, Machine(1, 5e-6, 1e-9)), (10**6,), WHOLE)
    assert timing.seconds == pytest.approx(5e-6 + LINK.latency + 1e-3 + 5e-6 + 1e-3)
    assert timing.done == pytest.approx((5e-6 + 1e-3, timing.seconds))


def test_every_schedule_can_be_timed() -> None:
    """All operations of all strategies come to an end, in pieces too, also with local moves."""
    machine = Machine(2, 1e-6, 1e-10)
    for (schedule, kind, root), segment in itertools.product(flat_cases(range(1, 6)), (WHOLE, 700)):
        sizes = slot_sizes(kind, schedule, 5000)
        for topology in (flat(schedule.ranks), flat(schedule.ranks, LINK, machine)):
            timing = simulate(schedule, topology, sizes, segment)
            assert (timing.seconds > 0) == (schedule.ranks > 1), (schedule.name, root)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Link(-1.0, 1.0), "latency of 0 s or more"),
        (lambda: Link(0.0, 0.0), "bandwidth above 0"),
        (lambda: Machine(0), "at least one core"),
        (lambda: Machine(1, -1.0), "0 s or more"),
        (lambda: Topology(((0, 2),), LINK, LINK), "every rank from 0 on"),
        (lambda: Topology(((0,), ()), LINK, LINK), "at least one rank"),
        (lambda: simulate(build("ring", Kind.ALL_REDUCE, 2), flat(3), (1, 1)), "2 ranks, .* 3"),
        (lambda: simulate(build("ring", Kind.ALL_REDUCE, 2), flat(2), (1, 1), 0), "1 byte, not 0"),
    ],
)
def test_impossible_figures_are_refused(make, named: str) -> None:
    """A figure that no link or machine has is named."""
    with pytest.raises(ValueError, match=named):
        make()
