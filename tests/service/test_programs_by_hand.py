"""Programs that people start by hand on each node meet through the control plane and train."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from control_plane import ControlPlane

import collective
from collective.errors import RendezvousFailed

pytestmark = pytest.mark.timeout(120)

TRAIN = """
import hashlib, json
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("unisono", init_method="unisono://hand?world_size=2")
torch.manual_seed(dist.get_rank())
model = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(5):
    optimizer.zero_grad()
    model(torch.ones(3, 4) * (dist.get_rank() + 1)).square().sum().backward()
    optimizer.step()
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
group = dist.group.WORLD.group
print(json.dumps({"rank": dist.get_rank(), "nodes": list(group.nodes), "epoch": group.epoch,
                  "sha256": digest.hexdigest()}))
dist.destroy_process_group()
"""

NATIVE = """
import json, sys
import torch
import collective

with collective.init(group="native", world_size=2, timeout=60) as group:
    value = torch.tensor([float(group.rank + 1)])
    group.all_reduce(value)
    print(json.dumps({"rank": group.rank, "value": value.item()}))
"""


def environment(server: ControlPlane, node: str, token: str = "operator") -> dict[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("UNISONO_")},
        "UNISONO_URL": server.url,
        "UNISONO_TOKEN_FILE": str(server.data_dir / f"{token}.token"),
        "UNISONO_NODE": node,
        "OMP_NUM_THREADS": "1",
    }


def run(server: ControlPlane, folder: Path, code: str) -> list[dict[str, object]]:
    """Run a program on two nodes; the JSON lines that they print, by rank."""
    script = folder / "hand.py"
    script.write_text(code)
    programs = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=environment(server, node),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in ("left", "right")
    ]
    try:
        ended = [program.communicate(timeout=90) for program in programs]
    finally:
        for program in programs:
            program.kill()
            program.wait()
    for program, (_, errors) in zip(programs, ended, strict=True):
        assert program.returncode == 0, errors
    return sorted((json.loads(output) for output, _ in ended), key=lambda line: line["rank"])


def test_two_programs_meet_and_train(server: ControlPlane, tmp_path: Path) -> None:
    """DDP over unisono:// ends with equal parameters, twice, at a new epoch each time."""
    first = run(server, tmp_path, TRAIN)
    assert [line["rank"] for line in first] == [0, 1]
    assert sorted(first[0]["nodes"]) == ["left", "right"]  # type: ignore[call-overload]
    assert first[0]["sha256"] == first[1]["sha256"]
    second = run(server, tmp_path, TRAIN)
    assert second[0]["epoch"] == second[1]["epoch"] == first[0]["epoch"] + 1  # type: ignore[operator]


def test_the_native_call_meets_as_well(server: ControlPlane, tmp_path: Path) -> None:
    """`collective.init(group=…, world_size=…)` gives two programs one group."""
    lines = run(server, tmp_path, NATIVE)
    assert lines == [{"rank": 0, "value": 3.0}, {"rank": 1, "value": 3.0}]


def test_a_program_that_comes_alone_is_told_so(server: ControlPlane) -> None:
    """Who waits in vain for the others learns that, and not that nobody answered."""
    token = (server.data_dir / "operator.token").read_text().strip()
    with pytest.raises(
        RendezvousFailed, match=r"group 'alone' was not complete within 0\.5 s: not all 2 programs"
    ):
        collective.init(url=server.url, token=token, group="alone", world_size=2, timeout=0.5)


def test_a_wrong_token_is_refused(server: ControlPlane, tmp_path: Path) -> None:
    """Without a token that the control plane knows nobody gets a secret."""
    script = tmp_path / "hand.py"
    script.write_text(TRAIN)
    (tmp_path / "wrong").write_text("not-a-token")
    ended = subprocess.run(
        [sys.executable, str(script)],
        env={**environment(server, "left"), "UNISONO_TOKEN_FILE": str(tmp_path / "wrong")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert "RendezvousFailed" in ended.stderr and "401" in ended.stderr
    assert "not-a-token" not in ended.stderr
