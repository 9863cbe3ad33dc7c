"""Ranks that exchange tensors through their agents' data ports."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from waiting import eventually

from collective.errors import RendezvousFailed
from collective.links.handshake import ClientHandshake
from collective.messages import LinkRequest

pytestmark = pytest.mark.timeout(120)

OVER = ("completed", "failed", "cancelled", "lost")

# Sums a value on all ranks again and again; rank 1 holds its interpreter in C code meanwhile.
SUMS = """
import json, os, re, sys
import torch
import torch.distributed as dist
dist.init_process_group("unisono")
value, hold = float(sys.argv[1]), int(sys.argv[2])
found = set()
for number in range(500):
    tensor = torch.full((17,), value)
    dist.all_reduce(tensor)
    found.update(tensor.tolist())
    if number == 250:
        print("half", flush=True)
        if dist.get_rank() == 1 and hold:
            re.match("(a|a)*$", "a" * hold + "b")
group = dist.new_group([1, 0])
tensor = torch.full((3,), value)
dist.all_reduce(tensor, group=group)
found.update(tensor.tolist())
print(json.dumps(sorted(found)))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("links"))
    for number, name in enumerate(("w1", "w2")):
        cluster.add(name, 2, "--bind", f"127.0.0.{number + 2}")
    yield cluster
    cluster.close()


def test_a_node_that_cannot_be_dialled_dials_by_itself(cluster: Cluster) -> None:
    """A node advertises an address that leads nowhere, as behind a NAT: its ranks dial the others'
    data port and mask what they send, in subgroups too; page and log of the others say so."""
    script = cluster.folder / "sums.py"
    script.write_text(SUMS)
    cluster.add("hidden", 1, "--bind", "127.0.0.4", "--advertise", "127.0.0.5")
    job = cluster.api.start(script=str(script), args=["3", "0"], on={"w1": 1, "hidden": 1})
    ended = cluster.api.until(job["id"], *OVER, timeout=60.0)
    assert ended["state"] == "completed", ended["cause"]
    for rank in (0, 1):
        assert json.loads(cluster.log(job["id"], rank).splitlines()[-1]) == [6.0]
    ranks = cluster.api.http.get(f"/jobs/{job['id']}/ranks").raise_for_status().json()["items"]
    assert [rank["node"] for rank in ranks] == ["w1", "hidden"]
    assert ranks[0]["report"]["unreachable"].startswith("rank 1 on node hidden (127.0.0.5:")
    assert "unreachable" not in ranks[1]["report"]
    said = cluster.log(job["id"], 0, "stderr")
    assert said.count("cannot reach rank 1 on node hidden (127.0.0.5:") == 1


def test_two_jobs_share_two_nodes_and_no_link(cluster: Cluster) -> None:
    """Two jobs at once on the same nodes, one with gloo between them, never see each other's
    numbers; a rank that holds its interpreter for seconds loses no link, and no node is called
    dead. The other one's strategy names a node."""
    own = "local=ring,local@w2=tree:2,between=ring"
    script = cluster.folder / "sums.py"
    script.write_text(SUMS)
    jobs = {
        value: cluster.api.start(
            script=str(script), args=[value, hold], on={"w1": 1, "w2": 1}, strategy=strategy
        )
        for value, hold, strategy in (("1", "24", own), ("7", "0", "local=ring,between=gloo"))
    }
    seen: set[str] = set()

    def over() -> bool:
        seen.update(cluster.api.node(name)["state"] for name in cluster.agents)
        return all(cluster.api.job(job["id"])["state"] in OVER for job in jobs.values())

    eventually(over, 90.0)
    for value, job in jobs.items():
        found = cluster.api.job(job["id"])
        assert found["state"] == "completed", (found, cluster.log(job["id"], 0, "stderr"))
        for rank in range(2):
            last = cluster.log(job["id"], rank).splitlines()[-1]
            assert json.loads(last) == [2 * float(value)]
    assert cluster.api.job(jobs["1"]["id"])["strategy"] == own
    assert seen == {"online"}


# Rank 1 goes away, in the way its argument says, while rank 0 needs it.
LEAVER = """
import os, sys
import torch
import torch.distributed as dist
dist.init_process_group("unisono")
tensor = torch.ones(1 << 20)
if sys.argv[1] == "left" and dist.get_rank() == 1:
    sys.exit(0)
for number in range(10**6):
    dist.all_reduce(tensor)
    if number == 5:
        print("busy", os.getpid(), flush=True)
"""


def test_a_rank_that_goes_away_is_named_as_the_cause(cluster: Cluster) -> None:
    """Killed or gone with exit code 0: the job fails with that rank first, and nothing is left."""
    script = cluster.folder / "leaver.py"
    script.write_text(LEAVER)
    left, killed = (
        cluster.api.start(script=str(script), args=[way], nodes=2, ranks_per_node=1)
        for way in ("left", "killed")
    )
    eventually(lambda: "busy" in cluster.log(killed["id"], 1), 60.0)
    os.kill(cluster.api.ranks(killed["id"])[1]["pid"], signal.SIGKILL)
    found = cluster.api.until(killed["id"], *OVER, timeout=10.0)
    assert (found["state"], found["cause"]["rank"], found["cause"]["signal"]) == ("failed", 1, 9)
    (consequence,) = found["consequences"]
    # rank 0 is ended as soon as the cause is known, which may be before it can say what it saw
    assert consequence["kind"] == "Ended" or (
        consequence["kind"] == "PeerLost" and "rank 1 on node w2" in consequence["message"]
    )
    found = cluster.api.until(left["id"], *OVER, timeout=60.0)
    assert (found["state"], found["cause"]["rank"]) == ("failed", 1)
    assert cluster.processes(left) == [] == cluster.processes(killed)


def test_a_stranger_at_the_data_port_is_refused_and_logged(cluster: Cluster) -> None:
    """A connection for another attempt, as a leftover rank of an old job makes it, is refused."""
    node = cluster.api.node("w1")
    assert node["addresses"] == ["127.0.0.2"]
    request = LinkRequest(
        job="j-old", attempt="a-old", group="default", epoch=1, dialler=0, target=1,
        channel="collective",
    )  # fmt: skip
    client = ClientHandshake("127.0.0.2", node["data_port"], request, "5ec7e7")
    with socket.create_connection(("127.0.0.2", node["data_port"]), 5) as connection:
        connection.sendall(client.hello)
        answer = b""
        while part := connection.recv(4096):
            answer += part
    with pytest.raises(RendezvousFailed, match="no attempt a-old"):
        client.feed(answer)
    agent = cluster.agents["w1"]
    eventually(lambda: "refused (404" in agent.log())
    assert "attempt a-old" in agent.log() and "5ec7e7" not in agent.log()


def test_a_nodes_links_are_measured_by_its_command(cluster: Cluster) -> None:
    """`worker probe --peer` shows the link to another agent and keeps it; nobody else may ask."""
    port = cluster.api.node("w2")["data_port"]
    environment = {**os.environ, "UNISONO_CACHE_DIR": str(cluster.folder / "measured")}

    def probe(state: Path, *options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "worker.cli", "probe", "--peer", f"127.0.0.3:{port}"]
        command += ["--state-dir", str(state), *options]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    done = probe(cluster.agents["w1"].state, "--json")
    assert done.returncode == 0, done.stderr
    links = json.loads(done.stdout)["links"]
    assert [(link["kind"], link["from"]) for link in links] == [
        ("websocket", "127.0.0.3"), ("shm", socket.gethostname()),
    ]  # fmt: skip
    assert all(0 < link["round_trip"] < 1 and link["rate"] > 1e6 for link in links)
    kept = json.loads((cluster.folder / "measured" / "links.json").read_text())
    assert {entry["rate"] for entry in kept.values()} == {link["rate"] for link in links}
    stranger = cluster.folder / "stranger"
    stranger.mkdir()
    done = probe(stranger)
    assert done.returncode == 4
    assert "is this the state folder of an agent that has joined?" in done.stderr
    (stranger / "probe-secret").write_text("no secret of this cluster\n")
    done = probe(stranger)
    assert done.returncode == 3
    assert "belongs to another cluster" in done.stderr


def test_a_node_that_cannot_keep_the_secret_joins_all_the_same(cluster: Cluster) -> None:
    """Where the secret of measurements cannot be stored, as on a full disk, only they suffer."""
    agent = cluster.add("full", 1, start=False)
    (agent.state / "probe-secret" / "in its place").mkdir(parents=True)
    agent.start()
    assert "worker probe --peer" in agent.log()
    assert cluster.api.node("full")["state"] == "online"
    assert agent.stop() == 0
    assert [path.name for path in agent.state.glob("probe-secret*")] == ["probe-secret"]
