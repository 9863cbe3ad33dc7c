"""What auto chooses, from which figures, and how far the formulas are from the simulation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collective.choosing import Chooser
from collective.cost import Link, Machine, Topology, uniform
from collective.estimate import estimate
from collective.prediction import TooLarge, predict
from collective.schedule import Kind
from collective.strategies import available, build, measured_choice, nodes_of, parse

MIB = 1 << 20
LOCAL = Link(10e-6, 8e9)
MACHINE = Machine(None, 20e-6, 1.5e-10, 1.5e-10, 60e-6)
GIGABIT = Link(60e-6, 1.2e8)
TEN_GIGABIT = Link(40e-6, 1.25e9)
SIZES = (8, 64 << 10, MIB, 4 * MIB, 25 * MIB)


def cluster(nodes: int, devices: int = 1, between: Link = TEN_GIGABIT) -> Topology:
    return uniform(nodes, devices, LOCAL, between, MACHINE)


def one_node(ranks: int, cores: int) -> Topology:
    machine = Machine(cores, 20e-6, 1.5e-10, 1.5e-10, 60e-6)
    return uniform(1, ranks, LOCAL, TEN_GIGABIT, machine)


@pytest.mark.parametrize(
    ("topology", "kind", "nbytes", "text"),
    [
        (cluster(2), Kind.ALL_REDUCE, 8, "direct"),
        (cluster(8), Kind.ALL_REDUCE, 8, "recursive_doubling"),
        (cluster(8), Kind.ALL_REDUCE, 100 * MIB, "ring"),
        (cluster(64), Kind.BARRIER, 0, "bruck"),
        (cluster(8), Kind.BROADCAST, 100 * MIB, "double_tree"),
        (cluster(8), Kind.GATHER, 8, "centralized"),
        (cluster(4, 4), Kind.GATHER, 8, "binomial"),
        (cluster(4, 4), Kind.SCATTER, 25 * MIB, "centralized"),
        # with a core per rank the fewest hops are best, on shared cores the least work
        (one_node(8, 8), Kind.ALL_REDUCE, 8, "recursive_doubling"),
        (one_node(8, 2), Kind.ALL_REDUCE, 8, "centralized"),
    ],
)
def test_auto_follows_the_topology(topology: Topology, kind: Kind, nbytes: int, text: str) -> None:
    """Hops count for small tensors, bytes for large ones, work where cores are shared."""
    assert str(Chooser(topology).choose(kind, nbytes)) == text


def test_ranks_of_several_nodes_use_both_levels() -> None:
    """Small tensors go through one rank of each node; of large ones no byte crosses twice."""
    topology = cluster(8, 4, GIGABIT)
    small = parse(str(Chooser(topology).choose(Kind.ALL_REDUCE, 8)))
    assert str(small) == "local=centralized,between=recursive_doubling"
    large = Chooser(topology).choose(Kind.ALL_REDUCE, 100 * MIB)
    sent = predict(large, Kind.ALL_REDUCE, topology, 100 * MIB).seconds
    least = 2 * 7 / 8 * 100 * MIB / GIGABIT.bandwidth
    assert sent < 1.15 * least


def test_a_crowded_node_follows_the_measured_table() -> None:
    """Where ranks of one node share too few cores, measurement stands in for the model."""
    chooser = Chooser(one_node(4, 2))
    assert str(chooser.choose(Kind.ALL_REDUCE, 64 << 10)) == "centralized"
    assert str(chooser.choose(Kind.ALL_REDUCE, 25 * MIB)) == "ring"
    assert str(chooser.choose(Kind.BARRIER, 0)) == "centralized"


def test_nodes_on_one_machine_share_its_cores() -> None:
    """Four nodes on two cores do what is least work, as long as their links do not hold them up."""
    machine = Machine(2, 20e-6, 1.5e-10, 1.5e-10, 60e-6)
    here = uniform(8, 1, LOCAL, Link(10e-6, 5e9), machine)
    assert str(Chooser(here).choose(Kind.ALL_REDUCE, 8)) == "recursive_doubling"
    assert str(Chooser(here, together=8).choose(Kind.ALL_REDUCE, 8)) == "centralized"
    slow = uniform(4, 1, LOCAL, GIGABIT, machine)
    large = Chooser(slow, together=4).choose(Kind.ALL_REDUCE, 4 * MIB)
    assert str(large) in ("ring", "halving_doubling", "bruck", "scatter_allgather")


def test_two_ranks_swap_as_much_as_their_link_holds() -> None:
    """Through memory, what comes waits on the link until its place is free, and is copied once."""
    machine = Machine(2, 10e-6, 2.3e-11, 2e-11, 55e-6)
    for held, small in ((8, "direct"), (0, "ring")):
        chooser = Chooser(uniform(1, 2, Link(16e-6, 34e9, held), LOCAL, machine))
        assert str(chooser.choose(Kind.ALL_REDUCE, 2 * MIB)) == small
        assert str(chooser.choose(Kind.ALL_REDUCE, 25 * MIB)) == "ring"


@pytest.mark.parametrize("topology", [cluster(4), cluster(2, 2), one_node(4, 8)])
def test_sixteen_bit_floats_travel_as_they_are(topology: Topology) -> None:
    """Where partial sums would travel in float32, only strategies without them are chosen."""
    chooser = Chooser(topology)
    for nbytes in SIZES:
        for kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER):
            name = str(chooser.choose(kind, nbytes, originals=True))
            assert name in ("direct", "scatter_allgather")
    assert str(chooser.choose(Kind.ALL_REDUCE, 25 * MIB, originals=True)) == "scatter_allgather"


@given(st.sampled_from(list(Kind)), st.integers(1, 9), st.integers(1, 9), st.integers(0, 1 << 40))
def test_auto_chooses_what_exists(kind: Kind, ranks: int, nodes: int, nbytes: int) -> None:
    """Whatever auto chooses can be built, also where nodes differ and their ranks do not follow."""
    where = nodes_of([str(rank % min(nodes, ranks)) for rank in range(ranks)])
    topology = Topology(where, LOCAL, TEN_GIGABIT, MACHINE)
    for originals in (False, True):
        build(Chooser(topology).choose(kind, nbytes, originals=originals), kind, ranks, nodes=where)


@pytest.mark.parametrize("kind", list(Kind))
def test_the_measured_table_chooses_what_exists(kind: Kind) -> None:
    """It has a strategy of the operation for any number of ranks and any size."""
    for ranks in range(1, 17):
        for nbytes in (0, *(1 << bits for bits in range(3, 33))):
            for memory in (False, True):
                build(measured_choice(kind, ranks, nbytes, memory=memory), kind, ranks)


@pytest.mark.parametrize("kind", [kind for kind in Kind if len(available(kind)) > 1])
def test_auto_is_near_the_best_of_the_model(kind: Kind) -> None:
    """What the formulas choose takes hardly longer in the simulation than the best there."""
    for between in (TEN_GIGABIT, GIGABIT):
        for nodes in (2, 3, 6, 8):
            topology = cluster(nodes, between=between)
            for nbytes in SIZES:
                taken = {
                    text: predict(text, kind, topology, nbytes).seconds for text in available(kind)
                }
                chosen = str(Chooser(topology).choose(kind, nbytes))
                if chosen not in taken:
                    taken[chosen] = predict(chosen, kind, topology, nbytes).seconds
                best = min(taken, key=lambda text: taken[text])
                assert taken[chosen] <= 1.25 * taken[best], (nodes, nbytes, chosen, best)


@pytest.mark.parametrize("kind", list(Kind))
def test_formulas_follow_the_simulation(kind: Kind) -> None:
    """Of every strategy, in what it takes on a network and with a core for every two ranks."""
    for topology in (cluster(2), cluster(5), cluster(8, between=GIGABIT), one_node(8, 4)):
        for nbytes in SIZES:
            for text in available(kind):
                right = predict(text, kind, topology, nbytes).seconds
                found = estimate(parse(text), kind, topology, nbytes)
                assert 0.6 * right < found < 1.6 * right, (text, topology.ranks, nbytes)


def test_two_levels_are_estimated_like_the_simulation() -> None:
    """Levels are added up; what overlaps makes the estimate the longer one."""
    topology = cluster(4, 4)
    for text in ("local=direct,between=ring", "local=centralized,between=recursive_doubling"):
        for nbytes in SIZES:
            right = predict(text, Kind.ALL_REDUCE, topology, nbytes).seconds
            found = estimate(parse(text), Kind.ALL_REDUCE, topology, nbytes)
            assert 0.7 * right < found < 1.7 * right, (text, nbytes)


def test_choices_of_a_large_group_are_quick() -> None:
    """No candidate is written out: of 64 nodes of 8 ranks most would have too many moves."""
    chooser = Chooser(cluster(64, 8))
    for kind in Kind:
        for nbytes in SIZES:
            assert chooser.choose(kind, nbytes) is chooser.choose(kind, nbytes)
    with pytest.raises(TooLarge):
        predict("direct", Kind.ALL_REDUCE, chooser.topology, MIB)
