"""Jobs on scripted agents: placed, run, failed, cancelled, lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from control_plane import Api, ControlPlane
from scripted_agent import ScriptedAgent
from waiting import eventually

from collective.messages import Problem

pytestmark = pytest.mark.timeout(60)
MakeAgent = Callable[..., ScriptedAgent]
Pair = tuple[ScriptedAgent, ScriptedAgent]


@pytest.fixture
def pair(api: Api, make_agent: Callable[..., ScriptedAgent]) -> Pair:
    """Two nodes with two slots each on the shared control plane."""
    return make_agent(api.server, "w1"), make_agent(api.server, "w2")


def run(api: Api, pair: Pair, **job: Any) -> tuple[dict[str, Any], str]:
    """A job of four ranks that runs on both nodes; it and its attempt."""
    started = api.start(nodes=2, ranks_per_node=2, **job)
    for agent in pair:
        agent.prepare()
    launches = [agent.launch() for agent in pair]
    assert launches[0].plan == launches[1].plan
    return api.until(started["id"], "running"), launches[0].attempt


def test_a_job_runs_to_completion(api: Api, pair: Pair) -> None:
    """A job of two nodes is prepared, launched, timed, and completed when all ranks exit 0."""
    job, attempt = run(api, pair, name="digits", args=["--epochs", "5"], set={"A": "b"})
    assert job["nodes"] == ["w1", "w2"] and job["world_size"] == 4
    for rank in range(4):
        agent = pair[rank // 2]
        agent.steps(attempt, rank, 1, 20, total=0.1, exposed=0.05 if rank != 3 else 0.01)
        agent.report(attempt, rank, 20, samples=16, parameters_sha256="ab")
        agent.report(attempt, rank, 10, samples=16)
    pair[0].report(attempt, 0, 20, loss=0.25, accuracy=0.9, steps_total=20)
    for rank in range(4):
        pair[rank // 2].exit(attempt, rank)
    for agent in pair:
        agent.over(attempt)
    done = api.until(job["id"], "completed")
    assert done["cause"] is None and done["consequences"] == []
    progress = done["progress"]
    assert progress["step"] == 20 and progress["steps_total"] == 20
    assert progress["slowest_rank"] == 3
    assert progress["replicas_identical"] is True
    assert progress["loss"] == 0.25 and progress["accuracy"] == 0.9
    assert progress["steps_per_second"] == pytest.approx(10.0)
    assert [rank["exit_code"] for rank in api.ranks(job["id"])] == [0, 0, 0, 0]
    assert all(device["job"] is None for device in api.node("w1")["devices"])


def test_prepare_carries_the_request_unchanged(api: Api, pair: Pair) -> None:
    """Arguments, environment and placement reach the agents exactly as they were given."""
    arguments = ["I'm", "", '{"a": "b c"}', "*", "$HOME;echo x", "模型 žluť 🐎", "--", "a\nb"]
    job = api.start(args=arguments, set={"X": "1 2"}, on={"w2": 2, "w1": 1}, grace=7)
    first, second = pair[1].prepare(), pair[0].prepare()
    assert first.spec.args == arguments and first.spec.environment == {"X": "1 2"}
    assert first.spec.grace == 7.0
    assert [member.rank for member in first.ranks] == [0, 1]
    assert [member.rank for member in second.ranks] == [2]
    assert first.spec.hosts_store and not second.spec.hosts_store
    launch = pair[0].launch()
    assert launch.master_port == 29500 and len(launch.plan.secret) == 32
    api.http.post(f"/jobs/{job['id']}/cancel").raise_for_status()


def test_a_problem_on_one_node_fails_the_job(api: Api, pair: Pair) -> None:
    """A script that is missing on one node fails the job with that node's words."""
    job = api.start(nodes=2)
    problem = Problem(code="script-missing", message="/home/b/train.py does not exist")
    prepared = pair[0].prepare()
    pair[1].prepare(problem)
    for agent in pair:
        assert agent.end().attempt == prepared.spec.attempt
        agent.over(prepared.spec.attempt)
    failed = api.until(job["id"], "failed")
    assert failed["cause"]["node"] == "w2" and failed["cause"]["kind"] == "script-missing"
    assert "/home/b/train.py" in failed["reason"]
    assert [rank["state"] for rank in api.ranks(job["id"])] == ["not-started"] * 2


def test_a_job_is_placed_anew_when_its_node_is_leaving(api: Api, pair: Pair) -> None:
    """A job that a stopping agent refuses has not failed: it goes to a node that stays."""
    job = api.start(nodes=1)
    first = pair[0].prepare(Problem(code="agent-stopped", message="the agent is ending"))
    pair[0].over(pair[0].end().attempt)
    second = pair[1].prepare()
    assert second.spec.job == job["id"] and second.spec.attempt != first.spec.attempt
    pair[1].launch()
    pair[1].exit(second.spec.attempt, 0)
    pair[1].over(second.spec.attempt)
    assert api.until(job["id"], "completed")["nodes"] == ["w2"]


def test_versions_that_differ_are_refused(api: Api, pair: Pair) -> None:
    """Nodes whose jobs would run on different torch versions are told so, and nothing starts."""
    from collective.messages import Prepare, Prepared

    job = api.start(nodes=2)
    for agent, torch in zip(pair, ("2.13.0", "2.6.1"), strict=True):
        attempt = agent.expect(Prepare).spec.attempt
        agent.send(Prepared(attempt=attempt, problems=[], torch_version=torch))
    for agent in pair:
        agent.end()
        agent.over(attempt)
    failed = api.until(job["id"], "failed")
    assert failed["cause"]["kind"] == "versions-differ"
    assert "2.13 on w1" in failed["reason"] and "2.6 on w2" in failed["reason"]


def test_the_real_exception_is_the_cause(api: Api, pair: Pair) -> None:
    """An exception is the cause even when the errors that it caused arrive before it."""
    job, attempt = run(api, pair)
    w1, w2 = pair
    w1.fail(attempt, 0, "PeerLost", "rank 2 on node w2 went away", culprit=2)
    w2.fail(attempt, 2, "ValueError", "bad sample 17")
    w2.exit(attempt, 2, 1)
    for agent in pair:
        agent.end()
    w1.exit(attempt, 0, 1)
    w1.exit(attempt, 1, None, 15)
    w2.exit(attempt, 3, None, 15)
    for agent in pair:
        agent.over(attempt)
    failed = api.until(job["id"], "failed")
    cause = failed["cause"]
    assert (cause["rank"], cause["node"], cause["kind"]) == (2, "w2", "ValueError")
    assert "bad sample 17" in cause["traceback"] and cause["exit_code"] == 1
    assert {entry["rank"] for entry in failed["consequences"]} == {0, 1, 3}
    ranks = api.ranks(job["id"])
    assert ranks[1]["signal"] == 15 and ranks[2]["exit_code"] == 1


def test_clocks_that_differ_change_no_verdict(api: Api, make_agent: MakeAgent) -> None:
    """What a node says happened is put on one clock, so that an hour's difference is none."""
    ahead = make_agent(api.server, "w1", connected=False)
    behind = make_agent(api.server, "w2", connected=False)
    ahead.clock, behind.clock = 3600.0, -3600.0
    for agent in (ahead, behind):
        agent.connect()
    job, attempt = run(api, (ahead, behind))
    ahead.fail(attempt, 0, "ValueError", "bad sample 17")
    ahead.exit(attempt, 0, 1)
    for agent in (ahead, behind):
        agent.end()
    # Told to end, a rank fails in its own way: that is no cause, whatever its clock says.
    behind.fail(attempt, 2, "RuntimeError", "worker was terminated")
    behind.exit(attempt, 2, 1)
    for agent in (ahead, behind):
        agent.over(attempt)
    cause = api.until(job["id"], "failed")["cause"]
    assert (cause["rank"], cause["kind"]) == (0, "ValueError")
    assert abs(cause["at"] - time.time()) < 60


@pytest.mark.parametrize(
    ("code", "signal", "words"),
    [(3, None, "exited with code 3"), (None, 9, "killed by signal 9 (SIGKILL)")],
)
def test_a_bad_end_fails_the_job(
    api: Api, pair: Pair, code: int | None, signal: int | None, words: str
) -> None:
    """A rank that exits with a code or dies by a signal fails the job and is named."""
    job, attempt = run(api, pair)
    pair[1].exit(attempt, 3, code, signal)
    for agent in pair:
        agent.end()
        agent.over(attempt)
    cause = api.until(job["id"], "failed")["cause"]
    assert cause["rank"] == 3 and words in cause["message"]
    assert (cause["exit_code"], cause["signal"]) == (code, signal)


def test_a_rank_that_leaves_early_is_the_cause(api: Api, pair: Pair) -> None:
    """A rank that exits with 0 while others need it is named, and the job is not completed."""
    job, attempt = run(api, pair)
    pair[0].exit(attempt, 1, 0)
    pair[0].fail(attempt, 0, "PeerLost", "rank 1 left before operation 1", culprit=1)
    pair[0].exit(attempt, 0, 1)
    for agent in pair:
        agent.end()
        agent.over(attempt)
    cause = api.until(job["id"], "failed")["cause"]
    assert cause["rank"] == 1 and cause["kind"] == "LeftEarly"


def test_cancel_waits_for_the_nodes(api: Api, pair: Pair) -> None:
    """A cancelled job is cancelling until every node has said that nothing is left."""
    job, attempt = run(api, pair)
    other = api.start(nodes=1)
    for _ in range(2):
        answer = api.http.post(f"/jobs/{job['id']}/cancel")
        assert answer.status_code == 202 and answer.json()["state"] == "cancelling"
    assert pair[0].end().attempt == attempt
    for rank in (0, 1):
        pair[0].exit(attempt, rank, None, 15)
    pair[0].over(attempt)
    pair[0].synchronise()
    assert api.job(job["id"])["state"] == "cancelling"
    pair[1].end()
    pair[1].over(attempt)
    done = api.until(job["id"], "cancelled")
    assert done["reason"] == "cancelled by operator"
    assert api.http.post(f"/jobs/{job['id']}/cancel").json()["state"] == "cancelled"
    pair[0].prepare()
    api.http.post(f"/jobs/{other['id']}/cancel")
    pair[0].over(pair[0].end().attempt)
    api.until(other["id"], "cancelled")


def test_a_queued_job_says_what_it_waits_for_and_can_be_cancelled(api: Api, pair: Pair) -> None:
    """A job that does not fit names what is missing, and cancelling it needs no node."""
    job = api.start(nodes=2, ranks_per_node=8)
    waiting = eventually(lambda: api.job(job["id"])["waiting_for"])
    assert "2 nodes with 8 free devices" in waiting and "w1: 2 of 2 free" in waiting
    missing = api.start(on={"w9": 1})
    assert "node w9 to join" in eventually(lambda: api.job(missing["id"])["waiting_for"])
    for entry in (job, missing):
        answer = api.http.post(f"/jobs/{entry['id']}/cancel")
        assert answer.json()["state"] == "cancelled"


def test_an_agent_that_falls_silent_loses_the_job(api: Api, pair: Pair) -> None:
    """A node without a message for its timeout is offline, and its job is lost by its fault."""
    job, attempt = run(api, pair)
    w1, w2 = pair
    w2.close()
    w1.fail(attempt, 0, "PeerLost", "rank 2 on node w2 went away", culprit=2)
    w1.end()
    for rank in (0, 1):
        w1.exit(attempt, rank, 1)
    w1.over(attempt)
    lost = api.until(job["id"], "lost")
    assert lost["cause"]["node"] == "w2" and lost["cause"]["kind"] == "NodeLost"
    assert [entry["rank"] for entry in lost["consequences"]] == [0, 1]
    assert api.node("w2")["state"] == "offline"
    assert [rank["state"] for rank in api.ranks(job["id"])] == ["exited"] * 2 + ["lost"] * 2
    w2.held[attempt] = "running"
    assert w2.connect().end == [attempt]
    assert api.node("w2")["state"] == "online"


def test_jobs_wait_their_turn(api: Api, pair: Pair) -> None:
    """A small job does not overtake a larger one that waits for running ones to end."""
    first = api.start(on={"w1": 1})
    attempt = pair[0].prepare().spec.attempt
    large = api.start(nodes=2, ranks_per_node=2)
    small = api.start(nodes=1)
    waiting = eventually(lambda: api.job(small["id"])["waiting_for"])
    assert large["id"] in waiting
    pair[0].launch()
    pair[0].exit(attempt, 0)
    pair[0].over(attempt)
    api.until(first["id"], "completed")
    following = [agent.prepare().spec.attempt for agent in pair]
    assert following[0] == following[1]
    for job in (small, large):
        api.http.post(f"/jobs/{job['id']}/cancel").raise_for_status()
    for agent in pair:
        agent.over(agent.end().attempt)
    api.until(large["id"], "cancelled")


def test_a_start_that_takes_too_long_fails(
    make_server: Callable[..., ControlPlane], make_agent: Callable[..., ScriptedAgent]
) -> None:
    """A node that does not prepare in time is named as the cause."""
    server = make_server(start_timeout=0.5)
    agent = make_agent(server, "w1")
    api = Api(server)
    job = api.start()
    attempt = agent.end().attempt
    agent.over(attempt)
    failed = api.until(job["id"], "failed")
    api.close()
    assert failed["cause"]["kind"] == "StartTimeout" and failed["cause"]["node"] == "w1"
