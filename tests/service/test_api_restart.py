"""A control plane that is killed and started again goes on truthfully with every job."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest
from control_plane import Api, ControlPlane
from scripted_agent import ScriptedAgent
from waiting import eventually

from collective.messages import Problem

pytestmark = pytest.mark.timeout(90)


class Rig:
    """A control plane of a test's own with two nodes and a running job on them."""

    def __init__(self, server: ControlPlane, agents: list[ScriptedAgent]) -> None:
        self.server = server
        self.agents = agents
        self.api = Api(server)
        self.job = self.api.start(nodes=2)["id"]

    def run(self) -> str:
        """Prepare and launch; the attempt."""
        for agent in self.agents:
            agent.prepare()
        attempts = {agent.launch().attempt for agent in self.agents}
        self.api.until(self.job, "running")
        return attempts.pop()

    def crash(self) -> None:
        """SIGKILL the control plane; the agents go on without it."""
        self.server.kill()
        self.api.close()
        for agent in self.agents:
            agent.close()

    def restart(self) -> None:
        """Start the control plane on the same folder and port."""
        self.server.start()
        self.api = Api(self.server)

    def connect(self) -> None:
        """Connect all agents again."""
        for agent in self.agents:
            agent.connect()


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """The control plane that all tests of this module kill and start again."""
    plane = ControlPlane(tmp_path_factory.mktemp("restart") / "data").start()
    yield plane
    plane.close()


@pytest.fixture
def rig(plane: ControlPlane, make_agent: Callable[..., ScriptedAgent]) -> Iterator[Rig]:
    """A job of one rank on each of two nodes, queued."""
    rig = Rig(plane, [make_agent(plane, "w1", 1), make_agent(plane, "w2", 1)])
    yield rig
    rig.agents.clear()
    for name in ("w1", "w2"):
        rig.api.http.delete(f"/nodes/{name}", params={"force": True}).raise_for_status()
    rig.api.close()


def test_what_happened_meanwhile_is_told_afterwards(rig: Rig) -> None:
    """Logs, steps and exit codes of the gap are all there, each once, and the job completes."""
    attempt = rig.run()
    w1 = rig.agents[0]
    offset = w1.say(attempt, 0, "before\n", 0)
    w1.steps(attempt, 0, 1, 3)
    w1.synchronise()
    rig.crash()
    for line in range(100):
        offset = w1.say(attempt, 0, f"line {line}\n", offset)
    w1.steps(attempt, 0, 4, 3)
    for rank, agent in enumerate(rig.agents):
        agent.exit(attempt, rank)
        agent.over(attempt)
        agent.held[attempt] = "ended"
    rig.restart()
    assert rig.api.job(rig.job)["state"] == "running"
    queued = rig.api.start(nodes=2)["id"]
    rig.connect()
    assert rig.api.until(rig.job, "completed")["progress"]["step"] == 6
    log = rig.api.http.get(f"/jobs/{rig.job}/ranks/0/logs/stdout").text
    assert log == "before\n" + "".join(f"line {line}\n" for line in range(100))
    steps = rig.api.http.get(f"/jobs/{rig.job}/steps").json()["ranks"]
    assert [entry["step"] for entry in steps] == [[1, 2, 3, 4, 5, 6]]
    prepared = [agent.prepare().spec.job for agent in rig.agents]
    assert prepared == [queued, queued]


def test_nothing_is_stored_twice(rig: Rig) -> None:
    """Entries that come again after they were stored change nothing."""
    attempt = rig.run()
    w1 = rig.agents[0]
    offset = w1.say(attempt, 0, "once\n", 0)
    w1.steps(attempt, 0, 1, 5)
    w1.report(attempt, 0, 5, loss=float("nan"))
    sent = list(w1.spool)
    w1.synchronise()
    for entry in sent:
        w1.send(entry)
    w1.say(attempt, 0, "twice\n", offset)
    w1.synchronise()
    log = rig.api.http.get(f"/jobs/{rig.job}/ranks/0/logs/stdout").text
    assert log == "once\ntwice\n"
    steps = rig.api.http.get(f"/jobs/{rig.job}/steps").json()["ranks"]
    assert steps[0]["step"] == [1, 2, 3, 4, 5]
    metrics = rig.api.http.get(f"/jobs/{rig.job}/metrics").json()["items"]
    assert [row["values"] for row in metrics] == [{"loss": "NaN"}]
    assert rig.api.job(rig.job)["progress"]["loss"] == "NaN"


def test_a_failure_meanwhile_is_the_true_state(rig: Rig) -> None:
    """A job whose rank was killed while the control plane was away ends as failed by that."""
    attempt = rig.run()
    w1, w2 = rig.agents
    rig.crash()
    w2.exit(attempt, 1, None, 9)
    rig.restart()
    rig.connect()
    assert w1.end().attempt == attempt
    w1.exit(attempt, 0, None, 15)
    for agent in rig.agents:
        agent.over(attempt)
    cause = rig.api.until(rig.job, "failed")["cause"]
    assert cause["rank"] == 1 and (cause["exit_code"], cause["signal"]) == (None, 9)


def test_agents_have_a_whole_timeout_to_come_back(rig: Rig) -> None:
    """After a restart a node is lost only after one whole timeout, and then the job is lost."""
    attempt = rig.run()
    rig.crash()
    rig.restart()
    assert rig.api.node("w2")["state"] == "online"
    rig.agents[0].connect()
    assert rig.agents[0].end().attempt == attempt
    rig.agents[0].exit(attempt, 0, None, 15)
    rig.agents[0].over(attempt)
    assert rig.api.until(rig.job, "lost")["cause"]["node"] == "w2"


def test_a_job_is_prepared_again_where_the_agent_knows_nothing(rig: Rig) -> None:
    """A kill between placement and launch repeats what an agent did not get, and no more."""
    w1, w2 = rig.agents
    attempt = w1.prepare().spec.attempt
    w1.synchronise()
    eventually(lambda: rig.api.job(rig.job)["state"] == "starting")
    rig.crash()
    rig.restart()
    rig.connect()
    assert w2.prepare().spec.attempt == attempt
    assert {agent.launch().attempt for agent in rig.agents} == {attempt}
    rig.api.until(rig.job, "running")


def test_a_cancel_survives_a_restart(rig: Rig) -> None:
    """A job that was being cancelled is ended after the restart, and then is cancelled."""
    attempt = rig.run()
    rig.api.http.post(f"/jobs/{rig.job}/cancel").raise_for_status()
    rig.crash()
    rig.restart()
    assert rig.api.job(rig.job)["state"] == "cancelling"
    rig.connect()
    for agent in rig.agents:
        assert agent.end().attempt == attempt
        agent.over(attempt)
    rig.api.until(rig.job, "cancelled")


def test_a_problem_survives_a_restart(rig: Rig) -> None:
    """A job that a node refused keeps that cause when the control plane is killed meanwhile."""
    w1, w2 = rig.agents
    attempt = w1.prepare().spec.attempt
    w2.prepare(Problem(code="workdir-missing", message="/data/run does not exist"))
    w1.end()
    rig.crash()
    rig.restart()
    rig.connect()
    for agent in rig.agents:
        agent.end()
        agent.over(attempt)
    assert rig.api.until(rig.job, "failed")["cause"]["kind"] == "workdir-missing"


def test_a_restarted_agent_without_its_ranks_loses_the_job(rig: Rig) -> None:
    """An agent that comes back without the attempt has lost its ranks, and the job says so."""
    attempt = rig.run()
    w1, w2 = rig.agents
    w2.close()
    w2.held.clear()
    w2.incarnation = "another-start"
    w2.connect()
    w1.end()
    w1.exit(attempt, 0, None, 15)
    w1.over(attempt)
    lost = rig.api.until(rig.job, "lost")
    assert lost["cause"]["node"] == "w2" and "without them" in lost["cause"]["message"]


def test_a_server_that_stood_still_blames_nobody(rig: Rig) -> None:
    """After a stall longer than the node timeout every node still has a whole timeout."""
    attempt = rig.run()
    for agent in rig.agents:
        agent.synchronise()
    assert rig.server.process is not None
    rig.server.process.send_signal(signal.SIGSTOP)
    stall = 1.5 * rig.server.settings["node_timeout"]
    try:
        # Only the second agent's heartbeats go on; none of either is read meanwhile.
        with pytest.raises(AssertionError, match="nothing came"):
            rig.agents[1].receive(timeout=stall)
    finally:
        rig.server.process.send_signal(signal.SIGCONT)
    for agent in rig.agents:
        agent.beat()
    assert rig.api.job(rig.job)["state"] == "running"
    assert [rig.api.node(name)["state"] for name in ("w1", "w2")] == ["online"] * 2
    for rank, agent in enumerate(rig.agents):
        agent.exit(attempt, rank)
        agent.over(attempt)
    rig.api.until(rig.job, "completed")


def test_the_server_ends_cleanly(rig: Rig) -> None:
    """SIGTERM ends the server with code 0 although agents and event streams are open."""
    attempt = rig.run()
    with rig.server.client() as client, client.stream("GET", "/events") as stream:
        lines = stream.iter_lines()
        next(line for line in lines if line.startswith("id: "))
        assert rig.server.stop() == 0
        assert any('"reason":"shutdown"' in line for line in lines)
    rig.api.close()
    assert not (rig.server.data_dir / "ready.json").exists()
    for agent in rig.agents:
        agent.close()
    rig.restart()
    rig.connect()
    assert rig.api.job(rig.job)["state"] == "running"
    for rank, agent in enumerate(rig.agents):
        agent.exit(attempt, rank)
        agent.over(attempt)
    rig.api.until(rig.job, "completed")
