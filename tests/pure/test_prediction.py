"""What a strategy takes on a cluster: short cuts against the simulation, and the order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from collective import prediction, shortcuts
from collective.cost import Link, Machine, Topology, slot_sizes, uniform
from collective.estimate import estimate
from collective.prediction import TooLarge, predict, ranked
from collective.program import SEGMENT
from collective.schedule import Kind
from collective.shortcuts import ring
from collective.simulation import simulate
from collective.strategies import BUILDERS, Flat, available, build

LINK = Link(20e-6, 10e9)
FAST = Link(2e-6, 200e9)
MIB = 1 << 20


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Simulations may have few events only, so that short cuts are taken."""
    monkeypatch.setattr(prediction, "_EVENTS", 500)
    monkeypatch.setattr(shortcuts, "_RING_EVENTS", 100)
    prediction._flat.cache_clear()
    yield
    prediction._flat.cache_clear()


def simulated(text: str, kind: Kind, topology: Topology, nbytes: int, segment: int) -> float:
    schedule = build(text, kind, topology.ranks, nodes=topology.nodes)
    return simulate(schedule, topology, slot_sizes(kind, schedule, nbytes), segment).seconds


@pytest.mark.parametrize("kind", [Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER])
@pytest.mark.parametrize(("nodes", "devices"), [(1, 2), (1, 7), (5, 1), (2, 3), (4, 4)])
@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("latency", [0.0, 1e-6, 1e-3])
def test_one_node_of_a_ring_stands_for_all(
    kind: Kind, nodes: int, devices: int, pieces: int, latency: float
) -> None:
    """The ring that is simulated on one node takes as long as the ring of all ranks."""
    topology = uniform(nodes, devices, FAST, Link(latency, 10e9))
    nbytes = topology.ranks * 3 * 1000
    found = ring(kind, topology, nbytes, 3000 // pieces)
    right = simulated("ring", kind, topology, nbytes, 3000 // pieces)
    assert found.seconds == pytest.approx(right)
    assert found.method == "simulated"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, name)
        for kind, builders in BUILDERS.items()
        for name in builders
        if name in prediction._QUADRATIC and name != "ring" and kind is not Kind.BARRIER
    ],
)
@pytest.mark.parametrize("ranks", [4, 9, 24, 32])
def test_formulas_agree_with_the_simulation(kind: Kind, name: str, ranks: int) -> None:
    """Where nothing but links costs time, an estimate is about what the simulation says."""
    topology = uniform(ranks, 1, LINK, LINK)
    for nbytes in (0, ranks * (ranks - 1) * 40_000):
        found = estimate(Flat(name), kind, topology, nbytes)
        right = simulated(name, kind, topology, nbytes, SEGMENT)
        if name in ("halving_doubling", "bruck"):
            # the slots of one message go on one by one: each takes only the steps that it needs,
            # but those of several steps share the way
            assert 0.65 < right / found < (1.35 if nbytes else 1.0001)
        else:
            assert found == pytest.approx(right, rel=0.1 if nbytes else 1e-9)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "strategy", ["tree:2", "chain", "double_tree", "centralized", "halving_doubling", "bruck",
                 "ring", "direct", "scatter_allgather"]
)  # fmt: skip
def test_few_large_segments_tell_how_long_many_small_ones_take(strategy: str) -> None:
    """The time of 64 segments, from runs with a few, is within five per cent."""
    topology = uniform(8, 1, LINK, LINK)
    found = predict(strategy, Kind.ALL_REDUCE, topology, 64 * MIB, MIB)
    assert found.method == "extrapolated"
    right = simulated(strategy, Kind.ALL_REDUCE, topology, 64 * MIB, MIB)
    assert found.seconds == pytest.approx(right, rel=0.05)


@pytest.mark.usefixtures("small")
def test_the_cost_of_segments_is_kept_where_there_are_fewer() -> None:
    """A coarse run charges each large segment what all that it stands for cost."""
    topology = uniform(1, 4, LINK, LINK, Machine(2, per_segment=100e-6))
    found = predict("chain", Kind.BROADCAST, topology, 512 * MIB, MIB)
    assert found.method == "extrapolated"
    right = simulated("chain", Kind.BROADCAST, topology, 512 * MIB, MIB)
    assert found.seconds == pytest.approx(right, rel=0.1)


@pytest.mark.parametrize(
    ("nodes", "devices", "bandwidth", "figure"),
    [(64, 1, 50e9, 0.55), (1024, 1, 50e9, 0.56), (1, 8, 450e9, 0.05)],
)
def test_fourteen_gigabytes_by_a_ring(
    nodes: int, devices: int, bandwidth: float, figure: float
) -> None:
    """14 GB take 0.55 s on 64 ranks, 0.56 s on 1,024, and 0.05 s on 8 with fast links."""
    link = Link(0.0, bandwidth)
    found = predict("ring", Kind.ALL_REDUCE, uniform(nodes, devices, link, link), 14 * 10**9)
    assert round(found.seconds, 2) == figure
    ranks = nodes * devices
    assert found.sent == round(2 * (ranks - 1) / ranks * 14e9)


def test_two_levels_give_the_time_of_each() -> None:
    """The levels by themselves add up to about the whole, which overlaps them."""
    topology = uniform(4, 4, FAST, LINK)
    for kind in (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.BROADCAST,
                 Kind.REDUCE, Kind.BARRIER):  # fmt: skip
        for local in ("ring", "tree:2", "double_tree"):
            strategy = f"local={local},between={'bruck' if local == 'ring' else 'tree:2'}"
            try:
                build(strategy, kind, 16, nodes=topology.nodes)
            except ValueError:
                continue
            found = predict(strategy, kind, topology, 16 * MIB)
            assert set(found.levels) == {"local", "between"}
            assert 0.5 < found.seconds / sum(found.levels.values()) < 1.5, (kind, strategy)


@pytest.mark.usefixtures("small")
def test_levels_are_added_up_where_the_whole_is_too_large() -> None:
    """So two levels of a large cluster have a time, near that of the simulation."""
    topology = uniform(8, 4, FAST, LINK)
    found = predict("local=ring,between=ring", Kind.ALL_REDUCE, topology, 32 * MIB)
    assert found.method == "by level"
    assert found.seconds == sum(found.levels.values())
    right = simulated("local=ring,between=ring", Kind.ALL_REDUCE, topology, 32 * MIB, 1 << 19)
    assert found.seconds == pytest.approx(right, rel=0.25)


def test_all_strategies_in_order() -> None:
    """The fastest comes first; small messages take few hops, large ones few bytes."""
    topology = uniform(6, 1, LINK, LINK)
    small, skipped = ranked(Kind.ALL_REDUCE, topology, 64)
    assert [found.strategy for found in small][:1] == ["direct"]
    assert {found.strategy for found in small} == set(available(Kind.ALL_REDUCE))
    assert not skipped
    large, _ = ranked(Kind.ALL_REDUCE, topology, 64 * MIB)
    assert large[0].strategy in ("ring", "bruck", "scatter_allgather")
    assert [found.seconds for found in large] == sorted(found.seconds for found in large)


def test_two_levels_beat_one_where_devices_share_a_card() -> None:
    """Between two nodes of four devices, traffic that stays on the nodes is the cheaper one."""
    found, _ = ranked(Kind.ALL_REDUCE, uniform(2, 4, FAST, LINK), 16 * MIB)
    assert found[0].strategy.startswith("local=")


def test_what_is_too_large_is_said() -> None:
    """Where neither simulation nor formula helps, the way out is named, and lists go on without."""
    topology = uniform(64, 8, FAST, LINK)
    with pytest.raises(TooLarge, match=r"all_reduce by bruck on 512 ranks .* two levels, or fewer"):
        predict("bruck", Kind.ALL_REDUCE, topology, MIB)
    with pytest.raises(ValueError, match="auto is no strategy by itself"):
        predict("auto", Kind.ALL_REDUCE, topology, MIB)
    with pytest.raises(ValueError, match="no broadcast by ring"):
        predict("ring", Kind.BROADCAST, topology, MIB)
    with pytest.raises(ValueError, match="no local level by ring for broadcast"):
        predict("local=ring,between=ring", Kind.BROADCAST, topology, MIB)
