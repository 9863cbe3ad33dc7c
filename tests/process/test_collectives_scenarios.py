"""Small whole scenarios: known values on few peers, uneven sizes and nodes, a peer that is late."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from thread_ranks import Ranks, ThreadRanks
from waiting import eventually

from collective.errors import CollectiveError
from collective.group import Group

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    kept = Ranks()
    yield kept
    kept.close()


@pytest.mark.parametrize(
    ("n", "count", "strategy"),
    [(4, 4, "centralized"), (4, 4, "tree:2"), (4, 4, "tree:5"), (3, 3, "ring"), (4, 3, "ring"),
     (4, 3, "tree:2"), (4, 5, "ring"), (4, 6, "ring"), (4, 9, "ring"), (4, 9, "halving_doubling")],
)  # fmt: skip
def test_known_values(ranks: Ranks, n: int, count: int, strategy: str) -> None:
    """Sum and mean of few values on few peers, also where the count does not divide."""

    def work(group: Group) -> None:
        for op, divisor in (("sum", 1), ("mean", n)):
            tensor = torch.arange(count, dtype=torch.float32) + 10 * group.rank
            group.all_reduce(tensor, op)
            right = [(n * i + 10 * n * (n - 1) / 2) / divisor for i in range(count)]
            assert tensor.tolist() == right

    ranks.get(n, strategy).run(work)


@pytest.mark.parametrize(
    "strategy",
    ["local=tree:2,between=tree:2", "local=tree:2,between=ring",
     "local=centralized,between=centralized", "local=ring,between=ring"],
)  # fmt: skip
@pytest.mark.parametrize("nodes", ["aaaabbbbccccdddd", "abbbb"], ids=["four by four", "1 and 4"])
def test_the_mean_of_nodes_of_threads(strategy: str, nodes: str) -> None:
    """Two levels divide by all ranks, for a tensor of three dimensions, ten times in a row."""
    n = len(nodes)
    with ThreadRanks(n, list(nodes), strategy=strategy) as ranks:

        def work(group: Group) -> None:
            for index in range(10 if n == 5 else 2):
                tensor = torch.full((4, 64, 512), float(group.rank + index))
                group.all_reduce(tensor, "mean")
                assert bool((tensor == (n - 1) / 2 + index).all())

        ranks.run(work)


@pytest.mark.parametrize("strategy", ["centralized", "tree:2", "ring"])
def test_a_late_peer_hears_of_a_mismatch(strategy: str) -> None:
    """A peer that comes when the others have disagreed raises their error and does not wait."""
    with ThreadRanks(4, strategy=strategy) as ranks:
        ranks.run(lambda group: group.barrier())
        over = threading.Event()

        def work(group: Group) -> None:
            if group.rank == 3:
                assert over.wait(20)
            group.all_reduce(torch.ones(4 if group.rank else 5))

        def watch() -> None:
            eventually(lambda: all(g.error is not None for g in ranks.groups[:3]), 15)
            over.set()

        watcher = threading.Thread(target=watch)
        watcher.start()
        outcomes = ranks.outcomes(work)
        watcher.join()
        for outcome in outcomes:
            assert isinstance(outcome.error, CollectiveError)
            assert "[4]" in str(outcome.error) and "[5]" in str(outcome.error)
