"""How a rank of a job ends, as its agent hears it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from job_lab import JobLab
from torch.distributed import TCPStore
from waiting import eventually

pytestmark = pytest.mark.timeout(120)

FAILS = """
import torch.distributed as dist, torch, os
dist.init_process_group(os.environ["TRY_BACKEND"])
dist.barrier()
if dist.get_rank() == 1:
    raise ValueError("bad sample 17")
while True:
    dist.all_reduce(torch.ones(1000))
"""

FAILS_EARLY = """
import torch
raise KeyError("no such data set")
"""


FAILS_IN_STEP = """
import torch.distributed as dist, torch
dist.init_process_group("unisono")
everyone = dist.new_group([1, 0], sort_ranks=False)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4), process_group=everyone)
for step in range(1000):
    loss = model(torch.ones(2, 4)).sum()
    if step == 3 and dist.get_rank() == 1:
        raise ValueError("bad sample 17")
    loss.backward()
"""


def run(lab: JobLab, code: str, folder: Path, **environment: str) -> list[tuple[int, str]]:
    """Run a program as two ranks of the lab's attempt; exit codes and standard errors."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    (folder / "train.py").write_text(code)
    ranks = [
        subprocess.Popen(
            [sys.executable, "train.py"],
            cwd=folder,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ, **lab.environment, **environment,
                "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1",
            },
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        texts = [rank.communicate(timeout=90)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [(rank.returncode, text) for rank, text in zip(ranks, texts, strict=True)]


@pytest.mark.parametrize("backend", ["unisono", "gloo"])
def test_the_cause_and_its_consequence_are_told_apart(tmp_path: Path, backend: str) -> None:
    """The rank that raised reports its exception; the other reports whom it lost."""
    lab = JobLab(tmp_path, 2)
    try:
        ended = run(lab, FAILS, tmp_path, TRY_BACKEND=backend)
        assert [code for code, _ in ended] == [1, 1]
        assert "bad sample 17" in ended[1][1]
        eventually(lambda: len(lab.failures()) == 2)
        failures = {failure.rank: failure for failure in lab.failures()}
        cause = failures[1]
        assert (cause.kind, cause.message, cause.culprit) == ("ValueError", "bad sample 17", None)
        assert "Traceback" in cause.traceback and "train.py" in cause.traceback
        if backend == "unisono":
            assert failures[0].culprit == 1
            assert failures[0].kind == "OperationAborted" and "ValueError" in failures[0].message
    finally:
        lab.close()


def test_an_error_out_of_a_backward_names_its_culprit(tmp_path: Path) -> None:
    """The rank is named as it is called in the job, though torch has changed the error's type."""
    lab = JobLab(tmp_path, 2)
    try:
        ended = run(lab, FAILS_IN_STEP, tmp_path)
        assert [code for code, _ in ended] == [1, 1]
        eventually(lambda: len(lab.failures()) == 2)
        failures = {failure.rank: failure for failure in lab.failures()}
        assert failures[1].kind == "ValueError" and failures[1].culprit is None
        assert failures[0].culprit == 1
        assert failures[0].kind == "RuntimeError" and "OperationAborted" in failures[0].message
    finally:
        lab.close()


def test_an_error_before_any_group_is_reported(tmp_path: Path) -> None:
    """A program that fails before it makes a group still says why; a program it starts does not."""
    lab = JobLab(tmp_path, 2)
    try:
        ended = run(lab, FAILS_EARLY, tmp_path)
        assert all(code == 1 and "no such data set" in text for code, text in ended)
        eventually(lambda: len(lab.failures()) == 2)
        assert {failure.kind for failure in lab.failures()} == {"KeyError"}
        call = f"subprocess.run([sys.executable, '-c', {FAILS_EARLY!r}])"
        child = f"import torch, subprocess, sys; {call}"
        assert [code for code, _ in run(lab, child, tmp_path)] == [0, 0]
        assert len(lab.failures()) == 2
    finally:
        lab.close()
