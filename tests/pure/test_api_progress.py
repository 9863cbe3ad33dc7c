"""Progress and step blobs."""

from __future__ import annotations

import math

import pytest

from api.progress import Progress, plain
from api.steps import COLUMNS, Columns, UnevenColumns, columns_of, cut, merge, pack, unpack
from collective.messages import Steps


def columns(first: int, total: list[float], exposed: float = 0.0, label: str = "step") -> Columns:
    count = len(total)
    body: Columns = {name: [0.0] * count for name in COLUMNS}
    body |= {"step": list(range(first, first + count)), "total": total, "sent": [1 << 40] * count}
    return body | {"exposed": [exposed] * count, "label": [label] * count}


def test_steps_survive_their_blob() -> None:
    """A blob gives back what was packed, also NaN, large integers and labels."""
    some = columns(7, [0.1, 0.2, math.inf], label="évaluation")
    assert unpack(pack(some)) == some
    assert unpack(pack(columns(0, []))) == columns(0, [])
    with pytest.raises(ValueError, match="version 9"):
        unpack(b"\x09" + pack(some)[1:])


def test_columns_can_be_joined_and_cut() -> None:
    """Merging appends every column, cutting takes the same part of each."""
    some: Columns = {}
    merge(some, columns(1, [0.1, 0.2]))
    merge(some, columns(3, [0.3]))
    assert cut(some, 1, 3)["step"] == [2, 3] and cut(some, 1, 3)["total"] == [0.2, 0.3]


def test_uneven_columns_are_refused() -> None:
    """Columns of different length are an error that tells the lengths."""
    lists: dict[str, list[float]] = {name: [] for name in COLUMNS if name != "total"}
    steps = Steps(attempt="a", rank=0, total=[1.0], label=[], **lists)  # type: ignore[arg-type]
    with pytest.raises(UnevenColumns, match="'total': 1"):
        columns_of(steps)


def test_the_slowest_rank_is_by_its_own_time() -> None:
    """Communication and warm-up do not make a rank slow; its own median does."""
    progress = Progress(3)
    progress.add_steps(0, columns(0, [9.0], label="warmup"))
    progress.add_steps(0, columns(1, [0.5] * 5, exposed=0.4))
    progress.add_steps(1, columns(1, [0.5] * 5, exposed=0.2))
    progress.add_steps(2, columns(1, [0.5, 9.0, 0.5, 0.5, 0.5], exposed=0.35))
    assert progress.slowest() == 1
    shown = progress.snapshot()
    assert shown["step"] == 5 and shown["steps_per_second"] == pytest.approx(2.0)
    assert progress.step_of(0) == 5 and progress.step_of(7) is None


@pytest.mark.parametrize(
    ("own", "exposed", "blamed"),
    [
        ([0.1, 0.1, 0.11], [0.5, 0.5, 0.49], "communication"),  # all wait alike
        ([0.1, 0.6, 0.1], [0.51, 0.01, 0.51], "rank 1"),  # the others wait for one
        ([0.1, 0.3, 0.1], [0.6, 0.4, 0.6], "communication"),  # one is slow, the link slower
        ([0.5, 0.51, 0.5], [0.02, 0.01, 0.02], None),  # nothing is to be gained
    ],
)
def test_a_slow_link_is_told_from_a_slow_rank(
    own: list[float], exposed: list[float], blamed: str | None
) -> None:
    """A rank is blamed for what the others wait for it, and for nothing that it waits for too."""
    progress = Progress(3)
    for rank, (busy, waits) in enumerate(zip(own, exposed, strict=True)):
        progress.add_steps(rank, columns(1, [busy + waits] * 5, exposed=waits))
    assert progress.snapshot()["held_back_by"] == blamed


def test_one_rank_alone_is_not_slow() -> None:
    """A single rank has nobody to be slower than."""
    progress = Progress(1)
    progress.add_steps(0, columns(1, [0.5]))
    assert progress.slowest() is None


def test_samples_count_the_steps_that_a_report_covers() -> None:
    """Samples per second are the same whether reported each step or every tenth."""
    often, seldom = Progress(1), Progress(1)
    for progress in (often, seldom):
        progress.add_steps(0, columns(1, [0.1] * 100))
    for step in range(1, 101):
        often.add_metrics(0, step, {"samples": 32})
    for step in range(10, 101, 10):
        seldom.add_metrics(0, step, {"samples": 320})
    assert often.snapshot()["samples_per_second"] == pytest.approx(320.0)
    assert seldom.snapshot()["samples_per_second"] == pytest.approx(320.0)


def test_replicas_are_compared_at_the_same_step() -> None:
    """Only reports of all ranks for one step are compared; the latest such step counts."""
    progress = Progress(2)
    progress.add_metrics(0, 10, {"parameters_sha256": "aa"})
    assert progress.snapshot()["replicas_identical"] is None
    progress.add_metrics(1, 10, {"parameters_sha256": "aa"})
    progress.add_metrics(0, 20, {"parameters_sha256": "bb"})
    assert progress.snapshot()["replicas_identical"] is True
    progress.add_metrics(1, 20, {"parameters_sha256": "bc"})
    assert progress.snapshot()["replicas_identical"] is False


def test_the_lowest_rank_speaks_for_a_metric() -> None:
    """A value that several ranks report is the lowest rank's; NaN is shown as text."""
    progress = Progress(2)
    progress.add_metrics(1, 1, {"loss": 5.0, "accuracy": 0.5, "flag": True})
    progress.add_metrics(0, 1, {"loss": math.nan})
    progress.add_metrics(1, 2, {"loss": 4.0})
    shown = progress.snapshot()
    assert shown["loss"] == "NaN" and shown["accuracy"] == 0.5 and shown["step"] == 2
    assert plain({"a": [math.inf, -math.inf]}) == {"a": ["Infinity", "-Infinity"]}
