"""The digits example under torchrun, without any cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(180)

EXAMPLE = Path(__file__).parents[2] / "examples/digits_ddp.py"
EPOCHS = 6
RANKS = 2
STEPS = EPOCHS * 23  # 1,437 images on 2 ranks, 32 a step


def train(*arguments: str, **environment: str) -> list[dict[str, Any]]:
    """All metrics that the ranks of one run reported."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    done = subprocess.run(
        [sys.executable, *words, str(EXAMPLE), "--epochs", str(EPOCHS), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr}"
    lines = [line for line in done.stdout.splitlines() if line.startswith("::unisono ")]
    return [json.loads(line.removeprefix("::unisono ")) for line in lines]


def check(metrics: list[dict[str, Any]]) -> str:
    """Every step of every rank is there, and both ends agree; the digest of the parameters."""
    steps = [each for each in metrics if "loss" in each]
    assert sorted(each["step"] for each in steps) == sorted([*range(1, STEPS + 1)] * RANKS)
    assert all(each["steps_total"] == STEPS and 0 < each["samples"] <= 32 for each in steps)
    ends = [each for each in metrics if "accuracy" in each]
    assert len(ends) == RANKS
    assert {each["accuracy"] for each in ends} == {ends[0]["accuracy"]}
    assert ends[0]["accuracy"] > 0.94
    (digest,) = {each["parameters_sha256"] for each in ends}
    return str(digest)


def test_it_runs_on_gloo() -> None:
    """With torch's own library it trains, and all replicas are the same."""
    check(train("--backend", "gloo"))


@pytest.fixture(scope="module")
def ours() -> str:
    """The parameters' digest after a run over our links, chosen by the environment."""
    return check(train(UNISONO_BACKEND="unisono"))


def test_it_runs_on_our_links(ours: str) -> None:
    """With ours it does the same."""
    assert len(ours) == 64


@pytest.mark.slow
def test_it_is_deterministic(ours: str) -> None:
    """A second run ends with the same bytes."""
    assert check(train("--backend", "unisono")) == ours
