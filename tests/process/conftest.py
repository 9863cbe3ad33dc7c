"""Rank processes that tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch_jobs
from faults_cluster import Cluster
from ranks import RankPool


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    """Two ranks whose default group is on "unisono"; for tests that leave it usable."""
    with RankPool(2) as pool:
        pool.run(torch_jobs.start)
        yield pool
        assert set(pool.close()) == {0}


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    """Four ranks whose default group is on "unisono"; for tests that leave it usable."""
    with RankPool(4) as pool:
        pool.run(torch_jobs.start)
        yield pool
        assert set(pool.close()) == {0}


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Four ranks on two nodes whose groups come and go, also by being killed."""
    made = Cluster()
    yield made
    made.ranks.close()
