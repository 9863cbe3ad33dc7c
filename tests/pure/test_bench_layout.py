"""Where the benchmark puts its ranks, and what it says of arguments that mean nothing."""

from __future__ import annotations

import re
import sys

import pytest

from unisono import bench_mpi
from unisono.bench_layout import Layout, layouts


@pytest.mark.parametrize(
    ("topology", "ranks", "link", "expected"),
    [
        ("flat", None, None, [((1, 1), "websocket"), ((1, 1, 1, 1), "websocket")]),
        ("flat", "3", None, [((1, 1, 1), "websocket")]),
        ("flat", "2,3", "shm", [((2,), "shm"), ((3,), "shm")]),
        ("2x2", None, None, [((2, 2), "shm+websocket")]),
        ("2x2", None, "websocket", [((2, 2), "websocket")]),
        ("1x4", None, None, [((4,), "shm")]),
        ("4x1", None, None, [((1, 1, 1, 1), "websocket")]),
        ("1,4,2", None, None, [((1, 4, 2), "shm+websocket")]),
    ],
)
def test_topologies(
    topology: str, ranks: str | None, link: str | None, expected: list[tuple[object, str]]
) -> None:
    """Ranks of a node share memory and nodes do not, unless a kind of link is asked for."""
    found = layouts(topology, ranks, link)
    assert [(layout.nodes, layout.link) for layout in found] == expected


@pytest.mark.parametrize(
    ("topology", "ranks", "link", "said"),
    [
        ("2x0", None, None, "'2x0': at least one node, of at least one rank"),
        ("0x2", None, None, "'0x2': at least one node"),
        ("2by2", None, None, "'2by2': write flat"),
        ("-2x2", None, None, "'-2x2': write flat"),
        ("1,0", None, None, "'1,0': expected numbers from 1 on"),
        ("4", None, None, "'4': write flat"),
        ("99x99", None, None, "9801 ranks are too many"),
        ("flat", "65", None, "65 ranks are too many"),
        ("flat", "0", None, "'0': expected numbers from 1 on"),
        ("flat", "2,", None, "'2,': expected numbers from 1 on"),
        ("2x2", "4", None, "--ranks 4 beside --topology 2x2"),
        ("2x2", None, "shm", "such as 1x4"),
        ("flat", None, "websocket,shm", "'websocket,shm': it takes one of websocket, shm for all"),
        ("2x2", None, "shm+websocket", "leave it out for shared memory within nodes"),
    ],
)
def test_topologies_that_mean_nothing(
    topology: str, ranks: str | None, link: str | None, said: str
) -> None:
    """The error repeats the value and names what would do."""
    with pytest.raises(ValueError, match=re.escape(said)):
        layouts(topology, ranks, link)


def test_ranks_are_numbered_node_by_node() -> None:
    """A rank's environment has torchrun's variables, and its node's name where it shares one."""
    layout = Layout("1,3", (1, 3), "shm+websocket")
    found = [layout.environment(rank, hosts=False) for rank in range(4)]
    assert [(e["UNISONO_NODE"], e["LOCAL_RANK"], e["LOCAL_WORLD_SIZE"]) for e in found] == [
        ("node0", "0", "1"), ("node1", "0", "3"), ("node1", "1", "3"), ("node1", "2", "3"),
    ]  # fmt: skip
    assert {e["UNISONO_LINKS"] for e in found} == {"auto"}
    flat = Layout("flat", (1, 1), "websocket")
    assert "UNISONO_NODE" not in flat.environment(1, hosts=False)
    assert flat.environment(1, hosts=True)["UNISONO_NODE"] == "node1"


def test_a_missing_mpi_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without mpi4py, or without mpiexec, the answer says how to install both."""
    layout = Layout("flat", (1, 1), "websocket")
    assert bench_mpi.why_not(layout) is None
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")
    assert "no mpiexec" in str(bench_mpi.why_not(layout))
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert "pip install 'unisono[mpi]'" in str(bench_mpi.why_not(layout))


def test_mpi_knows_equal_nodes_only() -> None:
    """MPICH's own nodes on one machine are of equal size."""
    layout = Layout("1,2", (1, 2), "shm+websocket")
    assert "leave it out of --against" in str(bench_mpi.why_not(layout))
