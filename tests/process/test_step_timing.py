"""Step timing of ranks in a job: loops with known sleeps, on Unisono's own links and on gloo."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest
import timed_jobs as jobs
import torch_jobs as surface
from job_lab import JobLab
from ranks import RankPool
from waiting import eventually

pytestmark = pytest.mark.timeout(120)

#: what a busy machine may add to a sleep of a few hundredths of a second
SLACK = 0.06


class Job:
    """Two ranks of a job, and what they report."""

    def __init__(self, folder: Path, engine: str, backend: str, **environment: str) -> None:
        self.lab = JobLab(folder, 2, engine)
        self.pool = RankPool(2, {**self.lab.environment, **environment})
        self.started = self.pool.run(jobs.start, backend)

    def close(self) -> None:
        self.pool.close()
        self.lab.close()


@pytest.fixture(scope="module", params=["unisono", "gloo"])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """A job whose script names the backend "unisono", and one whose script names "gloo"."""
    job = Job(tmp_path_factory.mktemp("job"), "unisono", request.param)
    yield job
    job.close()


@pytest.fixture(autouse=True)
def fresh(request: pytest.FixtureRequest) -> None:
    """Each test counts its own rows."""
    if "job" in request.fixturenames:
        request.getfixturevalue("job").lab.forget()


def typical(rows: list[dict[str, float]], name: str) -> float:
    """The median of a figure over the steps behind the first."""
    return median(row[name] for row in rows[2:])


def test_each_sleep_is_found_where_it_was(job: Job) -> None:
    """Data, forward and optimizer carry their own sleeps, and the parts add up to the step."""
    job.pool.run(jobs.train, 10, 0.03, 0.05, 0.02)
    for rows in job.lab.wait_for_rows(10):
        assert len(rows) == 10
        assert 0.03 <= typical(rows, "data") < 0.03 + SLACK
        assert 0.05 <= typical(rows, "compute") < 0.05 + SLACK
        assert 0.02 <= typical(rows, "optimizer") < 0.02 + SLACK
        for row in rows:
            parts = row["data"] + row["compute"] + row["exposed"] + row["optimizer"]
            assert parts == pytest.approx(row["total"], abs=1e-4)
            assert row["waited"] <= row["exposed"] + 1e-5 <= row["communication"] + 1e-3
        numbers = [row["step"] for row in rows]
        assert numbers == list(range(int(numbers[0]), int(numbers[0]) + 10))


def test_a_slow_backward_is_its_own_ranks_compute(job: Job) -> None:
    """A rank that sleeps in its backward carries it; the other waits for it in `exposed`."""
    job.pool.run(jobs.train, 10, 0.0, 0.0, 0.0, 1, 0.2)
    quick, slow = job.lab.wait_for_rows(10)
    # the totals are equal, so they tell nothing
    assert typical(quick, "total") == pytest.approx(typical(slow, "total"), rel=0.2)
    excess = typical(slow, "compute") - typical(quick, "compute")
    assert excess == pytest.approx(0.2, rel=0.2)
    assert typical(quick, "exposed") == pytest.approx(0.2, rel=0.25)
    assert typical(slow, "exposed") < 0.05
    if job.started[0]["backend"] == "unisono":
        assert typical(quick, "waited") == pytest.approx(0.2, rel=0.25)
        assert typical(quick, "sent") > 40_000
    else:
        # gloo does not tell
        assert typical(quick, "waited") == 0


@pytest.mark.parametrize("told", [True, False])
def test_an_evaluation_on_one_rank_is_no_slow_step(job: Job, told: bool) -> None:
    """What rank 0 does alone between two steps is a row of its own; its steps stay short."""
    job.pool.run(jobs.train_and_evaluate, told)
    first, second = job.lab.wait_for_rows(4, "step", "warmup")
    (pause,) = job.lab.rows(0, "save" if told else "eval")
    assert 0.3 <= pause["total"] < 0.3 + 2 * SLACK
    assert all(row["compute"] < 0.25 for row in first)
    assert max(row["exposed"] for row in second) > 0.2
    assert job.lab.rows(1, "save", "eval") == [] or not told


def test_logged_values_carry_the_step(job: Job) -> None:
    """Values of `collective.log` arrive with the step's number, or the one that was given."""
    job.pool.run(jobs.log_values)
    eventually(lambda: len(job.lab.metrics(0)) == 2)
    (step, values), given = job.lab.metrics(0)
    assert values == {"loss": 0.5, "samples": 64, "note": "a <b>"}
    assert step is None or step > 0
    assert given == (12, {"accuracy": 0.9})


def test_the_backend_looks_like_the_one_that_was_named(job: Job) -> None:
    """A timed gloo group is still called gloo; new groups are timed too and work."""
    name = job.started[0]["backend"]
    for backend, kind, value in job.pool.run(jobs.subgroup_backend):
        assert (backend, value) == (name, 2.0)
        assert kind == ("UnisonoProcessGroup" if name == "unisono" else "ForwardingGroup")


def test_groups_of_another_backend_than_the_default(job: Job) -> None:
    """A gloo group beside Unisono's, and the other way round, work and are timed."""
    other = "gloo" if job.started[0]["backend"] == "unisono" else "unisono"
    for backend, kind, value in job.pool.run(jobs.subgroup_backend, other):
        assert (backend, value) == (other, 2.0)
        assert kind == ("UnisonoProcessGroup" if other == "unisono" else "ForwardingGroup")


def test_facts_say_what_runs(tmp_path: Path) -> None:
    """Each rank tells its versions, backend, strategy, and that everything is timed."""
    job = Job(tmp_path, "gloo", "unisono")
    try:
        assert job.started[0] == {"backend": "unisono", "type": "ForwardingGroup"}
        eventually(lambda: job.lab.facts(1))
        facts = job.lab.facts(1)
        assert facts["timings"] == "full" and facts["engine"] == "gloo"
        assert facts["backend"] == "unisono" and facts["strategy"] == "none"
        assert str(facts["torch"]).count(".") >= 2
    finally:
        job.close()


def test_explicit_steps_and_a_replaced_backend(tmp_path: Path) -> None:
    """A job that replaces backends trains on Unisono; `collective.step` ends steps by itself."""
    job = Job(tmp_path, "unisono", "gloo", UNISONO_REPLACE_BACKEND="1", UNISONO_WARMUP_STEPS="2")
    try:
        assert job.started[0] == {"backend": "unisono", "type": "UnisonoProcessGroup"}
        job.pool.run(jobs.explicit_steps, 5)
        for rows in job.lab.wait_for_rows(6):
            assert [row["label"] for row in rows] == ["warmup"] * 2 + ["step"] * 4
            assert all(row["communication"] > 0 for row in rows[1:])
    finally:
        job.close()


def test_the_last_steps_arrive_when_the_program_ends(tmp_path: Path) -> None:
    """Steps younger than a batch are sent at exit, the last one too."""
    job = Job(tmp_path, "unisono", "unisono")
    job.pool.run(jobs.train, 3)
    assert job.pool.close() == [0, 0]
    for rows in job.lab.wait_for_rows(3):
        assert len(rows) == 3
    job.lab.close()


def test_timing_costs_less_than_half_a_percent_of_a_step(job: Job) -> None:
    """The CPU time of the clock and its hooks per step is below 0.5 % of 50 ms, generously."""
    assert max(job.pool.run(jobs.step_cost, 200, 5)) < 250e-6


def test_a_timed_gloo_group_carries_what_gloo_carries(job: Job, tmp_path: Path) -> None:
    """What is built on torch.distributed works on a group that is timed on its way to gloo."""
    for function, arguments in (
        (surface.objects, ()),
        (surface.asynchronous, ()),
        (surface.point_to_point, ()),
        (surface.subgroups, ()),
        (surface.functional, ()),
        (surface.uneven_join, ()),
        (surface.sharded_optimizer, ()),
        (surface.fully_sharded, ()),
        (surface.checkpoint, (str(tmp_path),)),
    ):
        job.pool.run(function, *arguments)
