"""The package: what the wheel carries, what starts, and what must not be imported."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def run(*words: str | Path, timeout: float = 120.0, **options: object) -> str:
    """What a command writes to stdout; it must end with 0."""
    done = subprocess.run(
        [str(word) for word in words],
        capture_output=True,
        text=True,
        timeout=timeout,
        **options,  # type: ignore[call-overload]
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return str(done.stdout)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built from what an image copies: a clean folder without caches and tests."""
    source = tmp_path_factory.mktemp("source")
    run("git", "clone", "-q", "--no-hardlinks", ROOT, source / "project")
    out = tmp_path_factory.mktemp("wheel")
    # hatchling is installed, so the build needs no network.
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", out,
        cwd=source / "project")  # fmt: skip
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python in which the wheel is installed, beside the packages that this one has."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    (ours,) = (BIN.parent / "lib").glob("python*/site-packages")
    # Only its packages: .pth files in it, such as that of an editable install, do not count.
    (packages / "beside.pth").write_text(f"{ours}\n")
    return folder / "bin/python"


def test_the_wheel_carries_what_runs(wheel: Path) -> None:
    """Templates, static files, migrations and the demo's script are in it; tests are not."""
    names = zipfile.ZipFile(wheel).namelist()
    for pattern in (
        r"unisono/_examples/digits_ddp\.py",
        r"web/templates/.+\.html",
        r"web/static/.+\.css",
        r"web/static/.+\.js",
        r"migrations/versions/.+\.py",
        r"api/app\.py",
        r"worker/cli\.py",
        r"collective/py\.typed",
        r"unisono-.+\.dist-info/licenses/LICENSE",
    ):
        assert any(re.fullmatch(pattern, name) for name in names), pattern
    tops = {name.split("/")[0] for name in names}
    packages = {"api", "collective", "migrations", "unisono", "web", "worker"}
    assert {top for top in tops if not top.endswith(".dist-info")} == packages
    assert not [name for name in names if "__pycache__" in name or name.startswith("tests")]


def test_the_wheel_names_commands_and_backend(wheel: Path) -> None:
    """Both commands and the entry point of torch are declared."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith("entry_points.txt")]
        text = archive.read(name).decode()
    assert "unisono = unisono.cli:main" in text
    assert "worker = worker.cli:main" in text
    assert "[torch.backends]\nunisono = unisono.autoload:register" in text


def test_an_installed_package_runs_by_itself(installed: Path, tmp_path: Path) -> None:
    """Away from the checkout the packages come from the installation, and the demo's script too."""
    code = (
        "import api.app, worker.cli, web, collective, migrations, unisono.cli, unisono.demo as d;"
        "print(d.example_script()); print(api.__file__)"
    )
    lines = run(installed, "-c", code, cwd=tmp_path).splitlines()
    assert lines[0].endswith("site-packages/unisono/_examples/digits_ddp.py")
    assert str(installed.parents[1]) in lines[1]


@pytest.mark.parametrize("command", ["unisono", "worker"])
def test_commands_start(command: str) -> None:
    """The console scripts are there and print their help."""
    assert "Usage" in run(BIN / command, "--help")


def test_small_commands_start_fast_by_importing_little() -> None:
    """Help needs neither torch nor the server's libraries."""
    code = (
        "import sys; import unisono.cli;"
        "heavy = {'torch', 'numpy', 'fastapi', 'sqlalchemy', 'httpx', 'uvicorn'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert run(sys.executable, "-c", code).strip() == "[]"


BLOCK_TORCH = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "numpy", "cupy", "sklearn", "pynvml"):
            raise ModuleNotFoundError(f"{name} is blocked in this test", name=name)

sys.meta_path.insert(0, Blocked())
"""


def test_the_control_plane_starts_without_torch(tmp_path: Path) -> None:
    """In a Python that cannot import torch or numpy the server starts, answers, and ends well."""
    code = BLOCK_TORCH + (
        "import os, threading, urllib.request, json, signal\n"
        "from pathlib import Path\n"
        "from api.settings import Settings\n"
        "from unisono.serve import serve\n"
        "reading, writing = os.pipe()\n"
        "def ask():\n"
        "    with os.fdopen(reading) as announced:\n"
        "        url = json.loads(announced.readline())['url']\n"
        "    for path in ('/readyz', '/version', '/login', '/api/v1/openapi.json'):\n"
        "        try:\n"
        "            print(path, urllib.request.urlopen(url + path, timeout=20).status)\n"
        "        except urllib.error.HTTPError as error:\n"
        "            print(path, error.code)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "asking = threading.Thread(target=ask)\n"
        "asking.start()\n"
        "where = dict(host='127.0.0.1', port=0, data_dir=Path('data'), announce_fd=writing)\n"
        "settings = Settings(**where)\n"
        "code = serve(settings)\n"
        "asking.join()\n"
        "print('torch' in sys.modules, code)\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("UNISONO_")}
    out = run(sys.executable, "-c", code, cwd=tmp_path, env=environment)
    assert "/readyz 200" in out
    assert "/version 200" in out
    assert "/login 200" in out
    assert out.splitlines()[-1] == "False 0"


def test_the_arrows_between_packages_hold() -> None:
    """The import contracts of pyproject.toml are kept."""
    assert "0 broken" in run(BIN / "lint-imports", cwd=ROOT)


def image(name: str, folder: Path) -> tuple[str, Path]:
    """A Dockerfile with its lines joined, and a folder that holds exactly what it copies."""
    text = re.sub(r"\\\n\s*", " ", (ROOT / f"docker/{name}.Dockerfile").read_text())
    context = folder / "context"
    run("git", "clone", "-q", "--no-hardlinks", ROOT, folder / "clone")
    context.mkdir()
    for sources in re.findall(r"^COPY (.+)$", text, re.MULTILINE):
        *names, target = shlex.split(sources)
        (context / target).mkdir(exist_ok=True)
        for each in names:
            place = folder / "clone" / each
            wanted = context / target if place.is_dir() else context / target / each
            run("cp", "-rT", place, wanted)
    return text, context


def test_the_steps_of_the_workers_image_work(tmp_path: Path) -> None:
    """What its Dockerfile copies installs with its command, and offers a machine as a node.

    The packages that it depends on are those of this environment: torch is not fetched again.
    """
    text, context = image("worker", tmp_path)
    defaults = dict(re.findall(r"^ARG (\w+)=\"?([^\"\n]*)\"?$", text, re.MULTILINE))
    (install,) = re.findall(r"/opt/venv/bin/(pip install .+)$", text, re.MULTILINE)
    words = shlex.split(install.replace("${EXTRAS}", defaults["EXTRAS"]))
    assert words[-1] == ".[demo]" and words[-3:-1] == ["-c", "constraints.txt"]
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    (packages,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    (ours,) = (BIN.parent / "lib").glob("python*/site-packages")
    (packages / "beside.pth").write_text(f"{ours}\n")
    words = [word for word in words if word != "${PIP_ARGS}"]
    run(tmp_path / "venv/bin/python", "-m", *words[:-1], "--no-deps", "--no-build-isolation",
        "--ignore-installed", words[-1], cwd=context)  # fmt: skip
    code = (
        "import collective, torch.distributed as dist, unisono.demo\n"
        "print(collective.__file__, dist.is_backend_available('unisono'))"
    )
    place, available = run(tmp_path / "venv/bin/python", "-c", code, cwd=tmp_path).split()
    assert Path(place).is_relative_to(tmp_path) and available == "True"
    assert "torch" in run(tmp_path / "venv/bin/worker", "probe", cwd=tmp_path)


@pytest.mark.slow
def test_the_steps_of_the_control_planes_image_work(tmp_path: Path) -> None:
    """What its Dockerfile copies installs into an empty environment, without torch, and runs."""
    text, context = image("control-plane", tmp_path)
    (install,) = re.findall(r"^RUN (pip install .+)$", text, re.MULTILINE)
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    run(tmp_path / "venv/bin/python", "-m", *shlex.split(install), cwd=context, timeout=280)
    missing = "import importlib.util as u; print(u.find_spec('torch'), u.find_spec('numpy'))"
    assert run(tmp_path / "venv/bin/python", "-c", missing).strip() == "None None"
    ready = (
        "import json, os, subprocess, sys, urllib.request as u\n"
        "r, w = os.pipe()\n"
        "p = subprocess.Popen(['unisono', 'serve', '--host', '127.0.0.1', '--port', '0',\n"
        "                      '--announce-fd', str(w)], pass_fds=[w])\n"
        "os.close(w)\n"
        "url = json.loads(os.fdopen(r).readline())['url']\n"
        "print(u.urlopen(url + '/readyz', timeout=20).status)\n"
        "p.terminate()\n"
        "print(p.wait(20))\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("UNISONO_")}
    environment |= {"PATH": f"{tmp_path}/venv/bin:{os.environ['PATH']}"}
    environment |= {"UNISONO_DATA_DIR": str(tmp_path / "data")}
    out = run(tmp_path / "venv/bin/python", "-c", ready, cwd=tmp_path, env=environment)
    lines = out.splitlines()
    assert "200" in lines
    assert lines[-1] == "0"
