"""Folders that hold secrets keep themselves out of what a job's code is packed from."""

from __future__ import annotations

from pathlib import Path

from unisono.bundle import pack
from unisono.serve import _data_folder
from worker.state import StateFolder


def test_a_bundle_leaves_data_and_state_folders_out(tmp_path: Path) -> None:
    """A server or an agent that runs inside a project's folder gives nothing away with a job."""
    script = tmp_path / "train.py"
    script.write_text("print(1)\n")
    alone = pack(script)
    with _data_folder(tmp_path / "data"):
        (tmp_path / "data" / "operator.token").write_text("secret")
        StateFolder(tmp_path / "state")
        assert pack(script).digest == alone.digest
