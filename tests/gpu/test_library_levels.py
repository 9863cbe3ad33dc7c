"""A level by NCCL: the values of the CPU's fold, and errors that end no process."""

from __future__ import annotations

import nccl_jobs as jobs
import pytest
from ranks import RankPool

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


@pytest.mark.parametrize("strategy", ["nccl", "local=nccl,between=ring"])
def test_a_level_by_nccl_computes_what_ours_does(strategy: str) -> None:
    """Sums, means, broadcasts and gathers of CPU and CUDA tensors, with two ranks on one GPU."""
    # ranks that share a GPU are two hosts to NCCL, which wants a GPU for each rank of a host
    with RankPool(2, {"NCCL_HOSTID": "host{rank}"}) as pool:
        pool.run(jobs.start, strategy)
        assert pool.run(jobs.values, timeout=100) == [True, True]
        pool.run(jobs.stop)
