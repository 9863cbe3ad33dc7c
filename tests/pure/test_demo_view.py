"""What the demo shows of a job, from the job's own JSON."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from unisono.demo import KEYS, summary
from unisono.demo_view import View, facts, time_left

JOB = {
    "id": "j-1",
    "state": "running",
    "nodes": ["w1", "w2"],
    "world_size": 4,
    "progress": {
        "step": 120,
        "steps_total": 450,
        "steps_per_second": 11.0,
        "loss": 0.31,
        "samples_per_second": 2300.0,
        "exposed_share": 0.12,
        "slowest_rank": 3,
        "accuracy": None,
        "replicas_identical": None,
    },
}


def test_all_figures_are_there() -> None:
    """Nodes, ranks, steps, rate, loss, exposed communication and the time left."""
    assert facts(JOB) == {
        "nodes": "w1 w2",
        "ranks": "4",
        "step": "120/450",
        "steps/s": "11.0",
        "loss": "0.3100",
        "exposed communication": "12%",
        "time left": "30 s",
    }


@pytest.mark.parametrize("rate", [None, 0, "NaN", "Infinity"])
def test_no_time_is_promised_without_a_rate(rate: object) -> None:
    """A rate that is unknown or no number gives a dash."""
    assert time_left({"step": 1, "steps_total": 5, "steps_per_second": rate}) == "–"


def test_a_loss_that_is_no_number_is_shown_as_such() -> None:
    """NaN arrives as text and stays text."""
    job = JOB | {"progress": {"loss": "NaN"}}
    assert facts(job)["loss"] == "NaN"


def test_the_summary_has_exactly_its_keys() -> None:
    """Also before there is a job, and from a job without progress."""
    assert tuple(summary(None)) == KEYS
    assert set(summary(None).values()) == {None}
    assert tuple(summary(JOB | {"progress": None})) == KEYS
    assert summary(JOB)["nodes"] == 2
    assert summary(JOB)["steps"] == 120


def test_a_terminal_gets_a_live_table_and_a_pipe_gets_lines() -> None:
    """Without a terminal there is one plain line at a time, and no control codes."""
    out = io.StringIO()
    view = View(Console(file=out, force_terminal=True, width=80))
    view.show(JOB)
    view.close()
    assert "exposed communication" in out.getvalue() and "\x1b[" in out.getvalue()
    out = io.StringIO()
    view = View(Console(file=out, width=40))
    view.show(JOB)
    view.close()
    assert out.getvalue().count("\n") == 1
    assert "time left 30 s" in out.getvalue() and "\x1b" not in out.getvalue()
