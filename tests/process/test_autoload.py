"""What a user's program meets at ``import torch``: nothing that can hurt it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore

pytestmark = pytest.mark.timeout(120)

TRAIN = """
import api, web, worker, os, sys
import torch
import torch.distributed as dist
assert api.mine and web.mine and worker.mine
assert "collective" not in sys.modules
dist.init_process_group("unisono")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
model(torch.ones(1, 2)).sum().backward()
assert api.mine and sys.modules["api"].__file__.startswith(os.getcwd())
print("trained", dist.get_world_size())
dist.destroy_process_group()
"""


def run(
    folder: Path, code: str, *options: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program in a folder, as one rank of one."""
    (folder / "train.py").write_text(code)
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    return subprocess.run(
        [sys.executable, *options, "train.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env={
            **os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True", **environment,
        },
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A project with packages of its own that are called like ours."""
    for name in ("api", "web", "worker"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("mine = True\n")
    return tmp_path


def test_a_project_with_its_own_api_web_and_worker_trains(folder: Path) -> None:
    """Only `collective` and `unisono.autoload` are loaded, and only when a group is made."""
    ended = run(folder, TRAIN)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "trained 1\n"


def test_the_one_name_that_cannot_be_used_is_told(folder: Path) -> None:
    """Beside a `collective.py` torch imports and gloo works; making a group says what to rename."""
    (folder / "collective.py").write_text("mine = True\n")
    ended = run(
        folder,
        """
import collective, torch
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
print("gloo works", collective.mine, flush=True)
dist.init_process_group("unisono")
""",
    )
    assert ended.returncode == 1
    assert ended.stdout == "gloo works True\n"
    assert "collective.py" in ended.stderr and "Rename it" in ended.stderr
    assert "ImportError" in ended.stderr


def test_a_job_on_gloo_beside_such_a_file_trains_without_timings(folder: Path) -> None:
    """Where our library cannot be loaded, a job on gloo still trains, and says so once."""
    (folder / "collective.py").write_text("")
    ended = run(
        folder,
        "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n"
        "dist.destroy_process_group()\nprint('trained')\n",
        UNISONO_AGENT_SOCKET="/nowhere",
        UNISONO_ATTEMPT="a-1",
        UNISONO_RANK_TOKEN="t",
    )
    assert ended.returncode == 0 and ended.stdout == "trained\n"
    assert ended.stderr.count("no timings of this rank") == 1


def test_a_job_whose_agent_is_gone_trains_on_gloo(folder: Path) -> None:
    """An agent that does not answer costs the timings, not the training."""
    ended = run(
        folder,
        "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n"
        "print('trained')\ndist.destroy_process_group()\n",
        UNISONO_AGENT_SOCKET=str(folder / "nobody"),
        UNISONO_ATTEMPT="a-1",
        UNISONO_RANK_TOKEN="t",
    )
    assert ended.returncode == 0 and ended.stdout == "trained\n"
    assert "the agent of this node does not answer" in ended.stderr


def test_warnings_as_errors_do_not_break_the_import(tmp_path: Path) -> None:
    """Registering the backend warns of nothing."""
    ended = run(
        tmp_path,
        "import torch.distributed as dist\nprint(dist.Backend.UNISONO)\n",
        "-W", "error::UserWarning",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "unisono\n"


def test_an_unfinished_address_of_a_meeting_is_explained(tmp_path: Path) -> None:
    """unisono:// without a world size, or without a control plane, says what is missing."""
    code = (
        "import torch.distributed as dist, sys\n"
        "dist.init_process_group('unisono', init_method=sys.stdin.readline().strip())\n"
    )
    for address, words in (
        ("unisono://g", "world_size=N"),
        ("unisono://g?world_size=2", "UNISONO_URL"),
    ):
        text = code.replace("sys.stdin.readline().strip()", repr(address))
        ended = run(tmp_path, text, WORLD_SIZE="", UNISONO_URL="")
        assert ended.returncode == 1 and words in ended.stderr, ended.stderr


def test_reporting_without_an_agent_costs_one_line(tmp_path: Path) -> None:
    """log, step and phase do nothing outside a job, and complain once where the agent is gone."""
    code = (
        "import collective\n"
        "for _ in range(3):\n"
        "    collective.log(loss=0.5)\n"
        "    collective.step()\n"
        "    with collective.phase('eval'):\n"
        "        print('on')\n"
    )
    outside = run(tmp_path, code)
    assert (outside.returncode, outside.stdout, outside.stderr) == (0, "on\n" * 3, "")
    gone = run(
        tmp_path,
        code,
        UNISONO_AGENT_SOCKET=str(tmp_path / "nobody"),
        UNISONO_ATTEMPT="a-1",
        UNISONO_RANK_TOKEN="t",
    )
    assert (gone.returncode, gone.stdout) == (0, "on\n" * 3)
    assert gone.stderr.count("nothing of this rank is reported") == 1
