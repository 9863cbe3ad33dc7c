"""The option of CI that makes a skipped test a failure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
PLUGINS = ["-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "no:anyio"]

GPU = "@pytest.mark.gpu\n@pytest.mark.skip(reason='needs CUDA')\ndef test_gpu(): pass\n"
GOOD = "def test_good(): pass\n"
SKIPPED = "def test_skipped(): pytest.skip('no browser here')\n"
SKIPPED_MODULE = "import pytest\npytest.importorskip('no_such_module')\n"


def run(folder: Path, body: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST.read_text())
    (folder / "test_it.py").write_text("import pytest\n" + body)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs CUDA\n")
    command = [sys.executable, "-m", "pytest", *PLUGINS, *options, str(folder)]
    return subprocess.run(command, cwd=folder, text=True, capture_output=True, timeout=60)


@pytest.mark.parametrize("processes", [(), ("-n", "2", "--dist", "loadfile")], ids=["one", "two"])
def test_skips_fail_the_run_when_forbidden(tmp_path: Path, processes: tuple[str, ...]) -> None:
    """Skipped tests and modules are named with their reason, and the run ends non-zero; so it does
    where other processes run the tests, as in CI."""
    (tmp_path / "test_module.py").write_text(SKIPPED_MODULE)
    done = run(tmp_path, SKIPPED + GPU + GOOD, "--forbid-skips", *processes)
    assert done.returncode == 1, done.stdout
    behind = done.stdout.partition("skipped, but only gpu tests may be")[2]
    assert "test_it.py::test_skipped: Skipped: no browser here" in behind
    assert "test_module.py" in behind
    assert "test_gpu" not in behind


def test_gpu_tests_may_be_skipped(tmp_path: Path) -> None:
    """A skip of a test that is marked gpu does not fail the run."""
    done = run(tmp_path, GPU + GOOD, "--forbid-skips")
    assert done.returncode == 0, done.stdout
