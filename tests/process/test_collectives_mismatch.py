"""Ranks that do not agree: every rank is told who called what, soon, and no data is mixed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from link_kinds import KINDS
from thread_ranks import ThreadRanks

from collective.diagnosis import POISONED
from collective.errors import CollectiveError, DeadlineExceeded, Mismatch, PeerLost
from collective.group import Group
from collective.program import SEGMENT
from collective.strategies import parse

STRATEGIES = ["ring", "tree:2", "centralized", "auto"]
TWO_LEVELS = "local=ring,between=tree:2"
#: (kind of link, strategy, nodes of the ranks): every strategy on one kind, and both numbers of
#: levels on each
SETTINGS = [
    *(("memory", strategy, "aaa") for strategy in STRATEGIES),
    *((kind, "auto", "aa") for kind in KINDS),
    *((kind, TWO_LEVELS, "aabb") for kind in KINDS),
]
#: seconds within which everybody has to know; a second of silence, and room for a busy machine
SOON = 3.0


@pytest.fixture(autouse=True)
def _impatient(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that wait in silence compare what they do sooner than by default, and who leaves waits
    less for those that read on."""
    if "default_stall" not in request.fixturenames:
        monkeypatch.setattr("collective.group._STALL", 0.2)
    monkeypatch.setenv("UNISONO_LINGER_SECONDS", "0.3")


@pytest.fixture
def default_stall() -> None:
    """Asks for the product's own time of silence."""


Call = Callable[[Group, torch.Tensor], Any]


def reduced(tensor: torch.Tensor, op: str = "sum") -> Callable[[Group], Any]:
    return lambda group: group.all_reduce(tensor.clone(), op)


def broadcast(tensor: torch.Tensor, src: int) -> Callable[[Group], Any]:
    return lambda group: group.broadcast(tensor.clone(), src)


def disagree(
    n: int,
    strategy: str,
    calls: Callable[[int], Callable[[Group], Any]],
    words: list[str],
    *,
    kind: str = "memory",
    nodes: str = "",
) -> list[BaseException]:
    """Run `calls(rank)` on every rank; each must raise soon, name `words`, and say what follows."""
    with ThreadRanks(n, list(nodes) or None, strategy=strategy, timeout=20, kind=kind) as ranks:
        ranks.run(lambda group: group.barrier())
        outcomes = ranks.outcomes(lambda group: calls(group.rank)(group))
        errors = [outcome.error for outcome in outcomes]
        for rank, outcome in enumerate(outcomes):
            error = outcome.error
            assert isinstance(error, CollectiveError), f"rank {rank}: {error!r}"
            assert not isinstance(error, DeadlineExceeded), error
            assert outcome.seconds < SOON, f"rank {rank} knew after {outcome.seconds:.1f} s"
            for word in [*words, POISONED]:
                assert word in str(error), f"rank {rank}: {error}"
            assert ranks.groups[rank].error is not None
    return errors  # type: ignore[return-value]


def under(strategy: str) -> Callable[[Group], Any]:
    def work(group: Group) -> None:
        group.strategy = parse(strategy)
        group.all_reduce(torch.ones(100_000))

    return work


def gathered(sizes: list[int]) -> Callable[[Group], Any]:
    """An all-gather of parts of these sizes, and of one element from each rank behind them."""

    def work(group: Group) -> None:
        every = [*sizes, *[1] * group.size][: group.size]
        group.all_gather([torch.zeros(size) for size in every], torch.ones(every[group.rank]))

    return work


def gathered_whole(group: Group) -> None:
    """An all-gather of parts that all have 2 × 3 × 1 × … elements."""
    shape = (2, 3, *[1] * group.size)[: group.size]
    group.all_gather([torch.zeros(shape) for _ in range(group.size)], torch.ones(shape))


def too_much(name: str) -> Callable[[Group], Any]:
    """Rank 1 has a whole segment more for rank 0 than that expects; a barrier comes behind."""
    fits = SEGMENT // 4

    def work(group: Group) -> None:
        own = [torch.ones(1) for _ in range(group.size)]
        if name == "gather":
            outputs = [torch.zeros(fits if rank == 1 else 1) for rank in range(group.size)]
            group.gather(
                torch.ones(2 * fits if group.rank == 1 else 1),
                outputs if group.rank == 0 else None, 0, uneven=True,
            )  # fmt: skip
        else:
            outputs = [torch.zeros(1) for _ in range(group.size)]
            if group.rank == 0:
                outputs[1] = torch.zeros(fits)
            elif group.rank == 1:
                own[0] = torch.ones(2 * fits)
            group.all_to_all(outputs, own)
        group.barrier()

    return work


def in_a_row(*calls: Callable[[Group], Any]) -> Callable[[Group], Any]:
    def work(group: Group) -> None:
        for call in calls:
            call(group)

    return work


def barrier(group: Group) -> None:
    group.barrier()


CASES: dict[str, tuple[Callable[[int], Callable[[Group], Any]], list[str]]] = {
    "count": (lambda r: reduced(torch.ones(8 if r else 4)), ["[4]", "[8]"]),
    "much larger": (
        lambda r: reduced(torch.ones((200 if r else 100, 2560))), ["[100, 2560]", "[200, 2560]"]
    ),
    "shape": (lambda r: reduced(torch.ones((3, 2) if r else (2, 3))), ["[2, 3]", "[3, 2]"]),
    "int64 and float32": (
        lambda r: reduced(torch.tensor(1.0) if r else torch.tensor(1)), ["int64", "float32"]
    ),
    "int32 and float32": (
        lambda r: reduced(torch.tensor([1.0, 2.0]) if r else torch.tensor([1, 2]).int()),
        ["int32", "float32"],
    ),
    "bfloat16 and float32": (
        lambda r: reduced(torch.full((5,), 0.1, dtype=torch.float32 if r else torch.bfloat16)),
        ["bfloat16", "float32"],
    ),
    "sizes of parts": (lambda r: gathered([4] if r else [3]), ["[3, 1", "[4, 1"]),
    "sizes of parts and a shape of the same numbers": (
        lambda r: gathered_whole if r else gathered([2, 3]),
        ["float32 in parts of [2, 3", "float32 [2, 3"],
    ),
    "a part of a gather": (lambda r: too_much("gather"), [" 131072 elements", " 262144 elements"]),
    "a part of an all-to-all": (
        lambda r: too_much("all_to_all"), [" 131072 elements", " 262144 elements"]
    ),
    "reduction": (lambda r: reduced(torch.ones(3), "max" if r else "sum"), ["sum", "max"]),
    "factor": (
        lambda r: lambda group: group.all_reduce(torch.ones(3), prescale=0.25 if r else 0.5),
        ["times 0.5", "times 0.25"],
    ),
    "operation": (
        lambda r: broadcast(torch.ones(3), 0) if r else reduced(torch.ones(3)),
        ["broadcast", "all_reduce"],
    ),
    "root, each waits for the other": (
        lambda r: broadcast(torch.ones(3), 0 if r else 1), ["root 0", "root 1"]
    ),
    "root, each sends": (
        lambda r: broadcast(torch.ones(300_000), 1 if r else 0), ["root 0", "root 1"]
    ),
    "barrier against all-reduce": (
        lambda r: barrier if r else reduced(torch.ones(3)), ["barrier", "all_reduce"]
    ),
    "strategy": (lambda r: under("tree:2" if r else "ring"), ["ring", "tree:2"]),
    "order": (
        lambda r: in_a_row(*(reduced(torch.ones(n)) for n in ((60, 40) if r else (40, 60)))),
        ["[40]", "[60]"],
    ),
    "one skips a call": (
        lambda r: barrier if r == 1 else in_a_row(reduced(torch.full((5,), r + 1.0)), barrier),
        ["barrier", "all_reduce"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "strategy", "nodes"), SETTINGS)
@pytest.mark.parametrize("case", CASES)
def test_a_difference_is_an_error_on_every_rank(
    case: str, kind: str, strategy: str, nodes: str
) -> None:
    """Every rank raises within seconds, names the operation's number and both sides, and says that
    the group is over."""
    calls, words = CASES[case]
    errors = disagree(len(nodes), strategy, calls, ["operation 2", *words], kind=kind, nodes=nodes)
    assert any(isinstance(error, Mismatch) for error in errors)


@pytest.mark.parametrize("strategy", ["bruck", "halving_doubling"])
def test_sizes_of_which_only_the_sum_is_right_are_noticed(strategy: str) -> None:
    """Small parts travel together, in a frame as long as their sum, and would be cut wrongly."""
    words = ["[3, 1, 1, 1]", "[2, 2, 1, 1]"]
    disagree(4, strategy, lambda r: gathered([2, 2] if r == 2 else [3, 1]), words)


@pytest.mark.parametrize("kind", KINDS)
def test_who_waits_in_silence_is_told_in_time_too(default_stall: None, kind: str) -> None:
    """Ranks of which each waits for the other compare what they do after the default second."""
    calls, words = CASES["root, each waits for the other"]
    disagree(2, "auto", calls, words, kind=kind)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_rank_is_a_backward_behind(strategy: str) -> None:
    """A rank that skips one of two sums of different size is noticed before data is mixed."""

    def call(rank: int) -> Callable[[Group], Any]:
        def work(group: Group) -> None:
            for step in range(10):
                for bucket in (40, 60):
                    if (rank, step, bucket) != (1, 4, 40):
                        tensor = torch.full((bucket,), float(step))
                        group.all_reduce(tensor)
                        assert torch.equal(tensor, torch.full((bucket,), 2.0 * step))

        return work

    disagree(2, strategy, call, ["operation 10", "[40]", "[60]"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_leaves_early_is_named(kind: str) -> None:
    """Who ends in order after fewer operations is named with the last one that it took part in."""
    n = 3
    with ThreadRanks(n, timeout=20, kind=kind) as ranks:

        def work(group: Group) -> None:
            for index in range(3 if group.rank == n - 1 else 5):
                tensor = torch.ones(1000)
                group.all_reduce(tensor)
                assert tensor[0] == n, index
            if group.rank == n - 1:
                group.close()

        outcomes = ranks.outcomes(work)
        assert outcomes[n - 1].error is None
        for outcome in outcomes[:-1]:
            assert isinstance(outcome.error, PeerLost)
            assert outcome.error.rank == n - 1
            assert "left the group in order after operation 3" in str(outcome.error)
            assert outcome.error.sequence == 4
            assert outcome.seconds < SOON


def test_a_rank_that_never_enters_is_named_at_the_deadline() -> None:
    """The deadline's error names who has not come, how far it got, and the operation."""
    with ThreadRanks(3) as ranks:
        ranks.run(lambda group: group.barrier())

        def work(group: Group) -> None:
            if group.rank != 1:
                group.all_reduce(torch.ones(100_000), timeout=1.5)

        outcomes = ranks.outcomes(work)
        for rank in (0, 2):
            error = outcomes[rank].error
            assert isinstance(error, DeadlineExceeded)
            assert isinstance(error, TimeoutError)
            assert error.rank == 1
            assert "rank 1 on node here" in str(error)
            assert "all_reduce (operation 2)" in str(error)
            assert outcomes[rank].seconds < 1.5 + SOON


def test_swapped_calls_of_one_shape_are_caught_where_call_sites_are_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With call sites compared, a before b against b before a is an error on both ranks."""
    monkeypatch.setattr("collective.issuing._CALL_SITES", True)

    def call(rank: int) -> Callable[[Group], Any]:
        def first(group: Group) -> None:
            group.all_reduce(torch.ones(1))

        def second(group: Group) -> None:
            group.all_reduce(torch.ones(1))

        def work(group: Group) -> None:
            for step in (first, second) if rank else (second, first):
                step(group)

        return work

    disagree(2, "auto", call, [f"at {__file__.rsplit('/', 1)[1]}:"])
