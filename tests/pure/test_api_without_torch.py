"""The control plane runs on a machine without torch."""

from __future__ import annotations

import subprocess
import sys

BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "numpy", "psutil", "pynvml", "cupy", "sklearn"):
            raise ModuleNotFoundError(f"{name} is not installed", name=name)

sys.meta_path.insert(0, Blocked())
import unisono.serve
import web.pages
"""


def test_the_control_plane_needs_none_of_the_workers_packages() -> None:
    """Server and pages are imported where torch, NumPy and what else workers need are missing."""
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
