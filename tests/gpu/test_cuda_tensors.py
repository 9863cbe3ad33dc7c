"""CUDA tensors: from device to device and through host memory, with the CPU's results."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import device_jobs as jobs
import pytest
import torch
import torch_jobs
from ranks import RankPool, python_path
from thread_ranks import ThreadRanks

import collective
from collective import device_copies, device_kernel
from collective.strategies import parse

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

#: seconds; the first call of each kernel compiles it
LONG = 200.0
NAMES = [str(dtype).removeprefix("torch.") for dtype in jobs.OPS]


@pytest.fixture(scope="module", params=[2, 4])
def processes(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Ranks that are processes, on one GPU."""
    here = os.pathsep.join([str(Path(__file__).parent), python_path()])
    with RankPool(request.param, {"PYTHONPATH": here}) as pool:
        pool.run(torch_jobs.start, "unisono", None, LONG)
        yield pool
        assert set(pool.close()) == {0}


@pytest.fixture(scope="module", params=[2, 4])
def threads(request: pytest.FixtureRequest) -> Iterator[ThreadRanks]:
    """Ranks that are threads of this process, on one GPU."""
    groups = collective.local_group(["cuda"] * request.param, timeout=LONG)
    with ThreadRanks(request.param, groups=groups) as ranks:
        yield ranks


@pytest.mark.parametrize("name", NAMES)
def test_threads_get_the_cpus_bits(threads: ThreadRanks, name: str) -> None:
    """Every reduction of every dtype, folded in the order of ranks, rounded once."""
    threads.run(jobs.reductions, "cuda", name, timeout=LONG)
    assert threads.run(jobs.stays_on_device) == [True] * threads.size


@pytest.mark.parametrize("name", NAMES)
def test_processes_get_the_cpus_bits(processes: RankPool, name: str) -> None:
    """The same between processes; from device to device where CuPy is installed."""
    processes.run(jobs.on_default_group, "reductions", "cuda", name, timeout=LONG)
    there = device_kernel.cupy() is not None
    assert processes.run(jobs.is_open) == [there] * processes.size


@pytest.mark.parametrize("strategy", ["auto", "ring"])
@pytest.mark.parametrize("what", ["other_operations", "streams"])
def test_threads_on_devices_and_through_host_memory(
    threads: ThreadRanks, what: str, strategy: str
) -> None:
    """Other operations and strided tensors; writes before and reads after, without waiting."""
    threads.run(getattr(jobs, what), "cuda", strategy, timeout=LONG)


@pytest.mark.parametrize("strategy", ["auto", "ring"])
@pytest.mark.parametrize("what", ["other_operations", "streams"])
def test_processes_on_devices_and_through_host_memory(
    processes: RankPool, what: str, strategy: str
) -> None:
    """The same between processes."""
    processes.run(jobs.on_default_group, what, "cuda", strategy, timeout=LONG)


def test_the_gradient_of_ddp_is_the_full_batchs(processes: RankPool) -> None:
    """Buckets on the device are averaged right, behind the backward that writes them."""
    for difference in processes.run(jobs.ddp_gradients, "cuda", timeout=LONG):
        assert difference < 1e-12


def test_pinned_memory_comes_back(threads: ThreadRanks) -> None:
    """Nothing counts as pinned once its operation is over, and no more than the bound before."""

    def reduce(group: Any) -> None:
        group.strategy = parse("ring")
        for _ in range(20):
            tensor = torch.ones(1 << 20, device="cuda")
            group.all_reduce(tensor, async_op=False)
            assert device_copies._pinned <= device_copies.PINNED

    threads.run(reduce, timeout=LONG)
    assert device_copies._pinned == 0
