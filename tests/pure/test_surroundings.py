"""What ranks say of themselves, what follows for all of them, and which nodes measure together."""

from __future__ import annotations

import json
from itertools import combinations

import pytest

from collective import figures
from collective.calibration import rounds
from collective.cost import Link
from collective.errors import ProtocolError
from collective.figures import Figures, Sample
from collective.surroundings import Facts, Surroundings

FIGURES = Figures("shm", 10e-6, 6e9, 50e-6, 15e-6, 2e-10, 1e-10, 8, 60e-6, 3e9)


@pytest.mark.parametrize("nodes", range(2, 9))
def test_every_two_nodes_measure_once(nodes: int) -> None:
    """Up to eight nodes, each pair has its round, and nobody is in two pairs of a round."""
    turns = list(rounds(nodes))
    pairs = [pair for turn in turns for pair in turn]
    assert sorted(pairs) == list(combinations(range(nodes), 2))
    for turn in turns:
        assert len({node for pair in turn for node in pair}) == 2 * len(turn)


def test_of_many_nodes_a_sample_measures() -> None:
    """With 64 nodes, seven rounds of 32 pairs stand for all of them."""
    turns = list(rounds(64))
    assert [len(turn) for turn in turns] == [32] * 7
    assert len({pair for turn in turns for pair in turn}) == 7 * 32


def test_what_a_rank_says_is_read_back() -> None:
    """Facts arrive as they were sent, figures to the last bit; silence means nothing special."""
    facts = Facts(8, "x", True, FIGURES, {4: Sample(1 / 3e4, 1e9 / 7)}, "shm")
    assert Facts.decode(facts.encode(), "rank 1") == facts
    assert Facts.decode(b"", "rank 1").cores == 1


@pytest.mark.parametrize(
    "body",
    [
        b"{", b"[]", b"7", b"{}",
        Facts(0, "x").encode(),
        Facts(2, "x").encode().replace(b'"samples": {}', b'"samples": {"4": [0, 1]}'),
        Facts(2, "x").encode().replace(b'"samples": {}', b'"samples": {"4": [1e-5, NaN]}'),
        Facts(2, "x").encode().replace(b'"figures": null', b'"figures": {"kind": "shm"}'),
        Facts(2, "x").encode().replace(b'"cores": 2', b'"cores": Infinity'),
        Facts(2, "x", figures=FIGURES).encode().replace(b'"per_call": 5e-05', b'"per_call": "x"'),
        Facts(2, "x", figures=FIGURES).encode().replace(b'"per_byte": 2e-10', b'"per_byte": NaN'),
        Facts(2, "x", figures=FIGURES).encode().replace(b'"per_byte": 2e-10', b'"per_byte": -1'),
    ],
)  # fmt: skip
def test_what_makes_no_sense_names_the_peer(body: bytes) -> None:
    """A greeting that is none is an error that says whose it is."""
    with pytest.raises(ProtocolError, match="rank 1 on node b"):
        Facts.decode(body, "rank 1 on node b")


def world(*nodes: tuple[str, str, int, int]) -> tuple[Surroundings, list[str]]:
    """From name, core set, cores and ranks of each node; and the name of each rank's node."""
    names = [name for name, _, _, ranks in nodes for _ in range(ranks)]
    facts = [Facts(cores, core_set) for _, core_set, cores, ranks in nodes for _ in range(ranks)]
    return Surroundings(tuple(facts)), names


@pytest.mark.parametrize(
    ("there", "cores", "together"),
    [
        ([("a", "x", 2, 4)], 2, 1),
        ([("a", "x", 2, 1), ("b", "y", 2, 1)], 2, 1),
        ([("a", "x", 4, 2), ("b", "x", 4, 2)], 4, 2),
        # the node with the fewest cores holds the others back
        ([("a", "x", 16, 2), ("b", "y", 4, 2), ("c", "y", 4, 2)], 4, 2),
        # ranks that are bound to cores of their own
        ([("a", "x", 1, 1), ("a", "y", 1, 1)], 2, 1),
    ],
)
def test_cores_are_counted_per_machine(
    there: list[tuple[str, str, int, int]], cores: int, together: int
) -> None:
    """A node has the cores of all its ranks, and perhaps shares them with other nodes."""
    surroundings, names = world(*there)
    chooser = surroundings.chooser(range(len(names)), names)
    assert chooser.topology.machine.cores == cores
    assert chooser.together == together


def test_links_follow_the_samples_between_the_members() -> None:
    """The typical latency and the lowest rate count, of the nodes that a group has ranks on."""
    there, names = world(("a", "x", 8, 2), ("b", "y", 8, 2), ("c", "z", 8, 1))
    samples = {
        ("a", "b"): Sample(100e-6, 1e9), ("a", "c"): Sample(300e-6, 2e8),
        ("b", "c"): Sample(200e-6, 5e8),
    }  # fmt: skip
    there = Surroundings(there.facts, samples)
    assert there.chooser(range(5), names).topology.between == Link(100e-6, 2e8)
    some = there.chooser([1, 2, 3], names[1:4]).topology
    assert some.nodes == ((0,), (1, 2))
    assert some.between == Link(50e-6, 1e9)
    assert there.chooser([0, 1], names[:2]).topology.between == figures.BETWEEN


def test_measured_figures_of_a_node_count() -> None:
    """Where nodes have measured their own links, the slowest of them stands for all."""
    slower = Figures("shm", 30e-6, 5e9, 70e-6, 25e-6, 1e-10, 3e-10, 4, 60e-6, 3e9)
    facts = (Facts(8, "x", figures=FIGURES), Facts(8, "y", figures=slower), Facts(8, "z"))
    topology = Surroundings(facts).chooser(range(3), ["a", "b", "c"]).topology
    assert topology.local == Link(30e-6, 5e9)
    machine = topology.machine
    found = (machine.per_call, machine.per_segment, machine.per_byte, machine.per_byte_sent)
    assert found == (70e-6, 25e-6, 2e-10, 3e-10)


def test_samples_are_kept_by_both_ends(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured between machines is read back, beside what others have kept."""
    monkeypatch.setenv("UNISONO_CACHE_DIR", f"{tmp_path}/cache")
    assert figures.load_samples() == {}
    figures.store(FIGURES)
    figures.store_samples({("10.0.0.1", "10.0.0.2"): Sample(1e-4, 1e9)})
    figures.store_samples({("10.0.0.1", "fe80::3"): Sample(2e-4, 1e8)})
    assert figures.load_samples() == {
        ("10.0.0.1", "10.0.0.2"): Sample(1e-4, 1e9), ("10.0.0.1", "fe80::3"): Sample(2e-4, 1e8),
    }  # fmt: skip
    assert figures.load("shm") == FIGURES
    spoilt = json.loads(figures.path().read_text())
    spoilt[next(key for key in spoilt if "fe80" in key)] = {"rate": 0}
    figures.path().write_text(json.dumps(spoilt))
    with pytest.raises(ValueError, match=r"links\.json .*fe80::3.*remove it and measure again"):
        figures.load_samples()
