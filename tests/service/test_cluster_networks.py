"""A control plane and agents on hosts of their own: names that mislead, families, cut links."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from cluster import Agent, Cluster
from network_lab import network, set_names
from waiting import eventually

from unisono.namespaces import Host, Network

pytestmark = pytest.mark.timeout(90)

OVER = ("completed", "failed", "cancelled", "lost")

# By torch, whose store the first node serves; `loop` as argument goes on until it is ended.
SUMS = """
import json, sys
import torch
import torch.distributed as dist
dist.init_process_group("unisono")
tensor = torch.ones(100_000)
dist.all_reduce(tensor)
print(json.dumps(tensor.sum().item()), flush=True)
while sys.argv[1:] == ["loop"]:
    dist.all_reduce(torch.ones(1_000_000))
dist.destroy_process_group()
"""


# Twelve steps of a model of a quarter of a megabyte, with a computation of its own.
STEPS = """
import torch
import torch.distributed as dist
dist.init_process_group("unisono")
torch.set_num_threads(1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for _ in range(12):
    optimizer.zero_grad()
    model(torch.ones(64, 256)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


class Lab:
    """Host 1 has the control plane, the others are for agents."""

    def __init__(self, net: Network, folder: Path) -> None:
        self.net = net
        self.control = net.hosts[0]
        self.cluster = Cluster(folder, host="::")
        self.port = self.cluster.server.port
        self.cluster.server.url = f"http://{self.control.ipv4}:{self.port}"
        self.api = self.cluster.api
        self.script = folder / "sums.py"
        self.script.write_text(SUMS)

    def join(self, host: Host, *options: str, wait: bool = True, url: str | None = None) -> Agent:
        """An agent on a host, by the control plane's IPv4 address unless told otherwise."""
        agent = self.cluster.add(f"w{len(self.cluster.agents)}", 1, *options, start=False)
        agent.prefix = host.command()
        agent.url = url or self.cluster.server.url
        return agent.start(wait=wait)

    def start(self, *agents: Agent, loop: bool = False) -> dict[str, Any]:
        """The program on one slot of each agent."""
        return self.api.start(
            script=str(self.script),
            args=["loop"] if loop else [],
            on={agent.name: 1 for agent in agents},
        )

    def check(self, *agents: Agent) -> None:
        """A job on the agents ends well with the right sum on each."""
        job = self.start(*agents)
        ended = self.api.until(job["id"], *OVER, timeout=60.0)
        assert ended["state"] == "completed", ended["cause"]
        for rank in range(len(agents)):
            assert json.loads(self.cluster.log(job["id"], rank)) == 100_000.0 * len(agents)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """The tests themselves run on the control plane's host; nothing else reaches it."""
    with network(5, families=("46", "46", "4", "6", "46")) as net, net.hosts[0].entered():
        lab = Lab(net, tmp_path_factory.mktemp("networks"))
        yield lab
        lab.cluster.close()


@pytest.fixture(scope="module")
def misled(lab: Lab) -> Agent:
    """An agent on a host whose own name is 127.0.1.1, as Debian's installer writes it."""
    host = lab.net.hosts[1]
    set_names(host, {"localhost": "127.0.0.1", socket.gethostname(): "127.0.1.1"})
    return lab.join(host)


@pytest.fixture(scope="module")
def old(lab: Lab) -> Agent:
    """An agent on a host where IPv6 is switched off."""
    return lab.join(lab.net.hosts[2])


def test_an_own_name_that_means_loopback_misleads_nobody(
    lab: Lab, misled: Agent, old: Agent
) -> None:
    """The node advertises the address by which it reaches the control plane, and no loopback; a
    job with a host that knows IPv4 only runs over it, whichever of them has rank 0."""
    addresses = lab.api.node(misled.name)["addresses"]
    assert addresses[0] == lab.net.hosts[1].ipv4
    assert not [address for address in addresses if address.startswith("127.")]
    assert lab.api.node(old.name)["addresses"] == [lab.net.hosts[2].ipv4]
    lab.check(misled, old)


def test_a_host_of_ipv6_only_takes_part(lab: Lab, misled: Agent) -> None:
    """It joins by the control plane's IPv6 address, and meets a host that prefers IPv4 by the
    family that both have, torch's store included."""
    host = lab.net.hosts[3]
    new = lab.join(host, url=f"http://[{lab.control.ipv6}]:{lab.port}")
    assert lab.api.node(new.name)["addresses"] == [host.ipv6]
    lab.check(misled, new)


@pytest.mark.parametrize("option", ["--bind", "--advertise"])
def test_loopback_alone_is_refused(lab: Lab, option: str) -> None:
    """A node that could offer only loopback to a control plane elsewhere does not join, and says
    why."""
    agent = lab.join(lab.net.hosts[4], option, "127.0.0.1", wait=False)
    assert agent.wait() == 4
    assert "cannot advertise 127.0.0.1: the control plane is on another machine" in agent.log()


def test_a_slow_link_is_told_from_a_slow_rank(lab: Lab, misled: Agent, old: Agent) -> None:
    """Where one host sends slowly, each rank's own time is short and its wait is long; the job's
    page names the links that were measured to be slow, with their rates, and no rank as slow."""
    host = lab.net.hosts[4]
    agents = [misled, old, lab.join(host)]
    script = lab.script.with_name("steps.py")
    script.write_text(STEPS)
    lab.net.slow_down(host, 20e6)
    try:
        job = lab.api.start(script=str(script), on={agent.name: 1 for agent in agents})
        ended = lab.api.until(job["id"], *OVER, timeout=60.0)
    finally:
        lab.net.speed_up(host)
    assert ended["state"] == "completed", ended["cause"]
    progress = ended["progress"]
    assert progress["exposed_share"] > 0.5
    found = lab.api.http.get(f"/jobs/{job['id']}/steps").raise_for_status().json()["ranks"]
    assert len(found) == 3
    for steps in found:
        own = map(sum, zip(steps["data"], steps["compute"], steps["optimizer"], strict=True))
        assert median(own) < median(steps["exposed"]), steps
    assert progress["held_back_by"] == "communication"
    ranks = lab.api.http.get(f"/jobs/{job['id']}/ranks").raise_for_status().json()["items"]
    told = [rank["report"].get("slow_links", "") for rank in ranks]
    slow = agents[2].name
    for other in (misled.name, old.name):
        assert re.search(rf"{slow} → {other} [0-9.]+ [kM]?B/s", told[0]), told
    assert f"→ {slow}" not in told[0].partition(";")[0] and told[1:] == ["", ""]


def test_a_host_that_vanishes_ends_its_job_and_is_fenced_off(
    lab: Lab, misled: Agent, old: Agent
) -> None:
    """Packets stop both ways in a job: it ends with the host as its cause, no process of it stays
    on the other one, and what the host still holds ends when the link is back."""
    host = lab.net.hosts[2]
    job = lab.start(misled, old, loop=True)
    eventually(lambda: lab.cluster.log(job["id"], 1), 40.0)
    attempt = lab.api.job(job["id"])["attempt"]
    assert len(lab.cluster.processes(job)) == 2
    lab.net.cut(host)
    try:
        ended = lab.api.until(job["id"], *OVER, timeout=30.0)
        assert ended["state"] == "lost"
        assert ended["cause"]["node"] == old.name
        assert lab.api.node(old.name)["state"] == "offline"
        eventually(lambda: len(lab.cluster.processes(job)) == 1, what="only the lost rank is left")
    finally:
        lab.net.mend(host)
    eventually(lambda: not lab.cluster.processes(job), 30.0, "the old attempt is ended")
    eventually(lambda: lab.api.node(old.name)["state"] == "online", 30.0)
    again = lab.api.job(job["id"])
    assert (again["attempt"], again["state"]) == (attempt, "lost")
    other = lab.api.start(script=None, command=["true"], on={misled.name: 1, old.name: 1})
    assert lab.api.until(other["id"], *OVER)["state"] == "completed"


def test_an_interface_may_be_given(lab: Lab, old: Agent) -> None:
    """Its name stands for its addresses where others dial, and for the first where a node listens;
    one that has none is refused by name."""
    host = lab.net.hosts[4]
    bare = ["link", "add", "bare0", "type", "veth", "peer", "name", "bare1"]
    subprocess.run(["ip", "-n", host.namespace, *bare], check=True)
    refused = lab.join(host, "--advertise", "bare0", wait=False)
    assert refused.wait() == 2
    assert "interface bare0 has no address" in refused.log()
    new = lab.join(host, "--advertise", "eth0", "--bind", "eth0")
    assert lab.api.node(new.name)["addresses"] == [host.ipv4, host.ipv6]
    lab.check(new, old)
