"""The first group over several nodes measures the links between them; all ranks know the same."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import native_jobs
import pytest
import torch
from ranks import RankPool
from thread_ranks import addresses

from collective.errors import ProtocolError, RendezvousFailed
from collective.links.endpoint import memory_pair
from collective.links.link import EndOfLink, Inlet, Outlet
from collective.links.probe import measure, serve
from collective.links.probe_here import within
from collective.links.wire import FrameKind
from collective.schedule import Kind

SIZES = (8, 64 << 10, 1 << 20, 25 << 20)


@pytest.fixture
def pool(four_ranks: RankPool, tmp_path: Path) -> Iterator[RankPool]:
    """Four ranks, each with a cache of its own."""
    four_ranks.run(keep_apart, str(tmp_path))
    yield four_ranks
    four_ranks.run(keep_as_others, os.environ["UNISONO_CACHE_DIR"])


def keep_apart(folder: str) -> None:
    """Keep this rank's figures in a folder of its own."""
    os.environ["UNISONO_CACHE_DIR"] = f"{folder}/{native_jobs.rank_of()}"


def keep_as_others(folder: str) -> None:
    """Measure and keep figures as in other tests."""
    os.environ["UNISONO_CACHE_DIR"] = folder
    os.environ.pop("UNISONO_CALIBRATION", None)


def known() -> tuple[dict[tuple[str, str], Any], list[str]]:
    """What a rank knows of the links between nodes, and what it would choose."""
    group = native_jobs._group
    assert group is not None
    tensor = torch.full((1000,), 1.0)
    group.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((1000,), float(group.size)))
    chosen = [str(group.chooser.choose(kind, size)) for kind in Kind for size in SIZES]
    return dict(group._wiring.surroundings.samples), chosen


def forget(*ranks: int) -> None:
    """The caches of these ranks are lost."""
    if native_jobs.rank_of() in ranks:
        (Path(os.environ["UNISONO_CACHE_DIR"]) / "links.json").unlink(missing_ok=True)


def switch_off(rank: int) -> None:
    """This rank wants nothing to be measured."""
    if native_jobs.rank_of() == rank:
        os.environ["UNISONO_CALIBRATION"] = "off"


def met(pool: RankPool, where: list[str]) -> Any:
    """What all ranks know alike after a group has been made and left."""
    pool.run(native_jobs.join, where)
    found = pool.run(known)
    assert all(pool.run(native_jobs.leave))
    assert all(one == found[0] for one in found)
    return found[0]


def test_links_are_measured_once_and_known_alike(pool: RankPool) -> None:
    """Three nodes measure three links; later groups use what any of both ends has kept."""
    hosts = [addresses(4) for _ in range(3)]
    # ranks 0 and 1 share a node
    where = [hosts[0][0], hosts[0][1], hosts[1][2], hosts[2][3]]
    nodes = [host[0].partition(":")[0] for host in hosts]
    samples, chosen = met(pool, where)
    assert set(samples) == {(nodes[0], nodes[1]), (nodes[0], nodes[2]), (nodes[1], nodes[2])}
    pool.run(forget, 2)
    assert met(pool, where) == (samples, chosen)
    pool.run(forget, *range(4))
    pool.run(switch_off, 1)
    assert met(pool, where)[0] == {}


def test_a_link_that_ends_or_is_silent_is_an_error() -> None:
    """Measuring ends in time with the peer's name, and neither end trusts the other's numbers."""
    near, far = memory_pair()
    with pytest.raises(RendezvousFailed, match="rank 1 did not answer"):
        measure(Inlet(near), 1, 0.1, time.monotonic() + 0.05, "rank 1")
    Inlet(near).say(FrameKind.PROBE, 1, 1 << 40)
    outlet = Outlet(far)
    with pytest.raises(ProtocolError, match="rank 0 asks for 1099511627776 bytes"):
        serve(outlet, 1, time.monotonic() + 5, "rank 0")
    far.end()
    with pytest.raises(EndOfLink):
        measure(Inlet(near), 1, 0.1, time.monotonic() + 5, "rank 1")
    for end in (near, far):
        end.close()


def test_a_link_is_measured_by_its_two_ends() -> None:
    """What comes out are positive figures, and what else was said meanwhile is not lost."""
    near, far = memory_pair()
    inlet, outlet = Inlet(near), Outlet(far)
    until = time.monotonic() + 30
    other = Thread(target=serve, args=(outlet, 1, until, "rank 0"))
    other.start()
    inlet.say(FrameKind.STATUS, 1, 7)
    sample = measure(inlet, 1, 0.1, until, "rank 1")
    other.join(timeout=30)
    assert 0 < sample.round_trip < 10
    assert sample.rate > 1e6
    outlet.readable = True
    assert [header.sequence for header, _ in outlet.control()] == [7]
    for end in (near, far):
        end.close()


def test_shared_memory_is_measured_whatever_the_folder_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's own collective.py is not what the other process imports."""
    (tmp_path / "collective.py").write_text("raise SystemExit('a module of the user')\n")
    monkeypatch.chdir(tmp_path)
    assert within(0.05).rate > 1e6
