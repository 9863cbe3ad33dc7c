"""What a Python on this node has: its version, torch and Unisono, asked without importing torch."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from dataclasses import dataclass

from worker.errors import LocalProblem

__all__ = ["Interpreter", "Interpreters"]

# Reads what is installed from its metadata: importing torch takes seconds.
_PROBE = """
import importlib.metadata, importlib.util, json, sys, sysconfig
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
print(json.dumps({
    "python": ".".join(map(str, sys.version_info[:3])),
    "torch": version("torch") if importlib.util.find_spec("torch") else None,
    "unisono": version("unisono"),
    "site": sysconfig.get_paths()["purelib"],
}))
"""


@dataclass(frozen=True)
class Interpreter:
    """A Python and what of interest is installed in it; None where it is not."""

    path: str
    python: str
    torch: str | None
    unisono: str | None


class Interpreters:
    """Answers are kept until the interpreter or its site-packages folder changes."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._known: dict[str, tuple[Interpreter, dict[str, int]]] = {}
        self._lock = threading.Lock()

    def ask(self, path: str) -> Interpreter:
        """What the Python at `path` has.

        Raises:
            LocalProblem: it cannot be run, or is no Python.
        """
        with self._lock:
            known = self._known.get(path)
            if known is not None and all(_mtime(file) == at for file, at in known[1].items()):
                return known[0]
            answer = self._run(path)
            found = Interpreter(path, answer["python"], answer["torch"], answer["unisono"])
            self._known[path] = (
                found,
                {file: _mtime(file) for file in (path, answer["site"])},
            )
            return found

    def _run(self, path: str) -> dict[str, str]:
        try:
            done = subprocess.run(
                [path, "-c", _PROBE],
                cwd="/",
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=self._timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise LocalProblem(f"{path} did not answer within {self._timeout:g} s") from None
        except OSError as error:
            raise LocalProblem(f"{path} cannot be run: {error.strerror}") from None
        try:
            return dict(json.loads(done.stdout.splitlines()[-1]))
        except (ValueError, IndexError):
            said = done.stderr.decode(errors="replace").strip()[-400:]
            raise LocalProblem(f"{path} is no usable Python: {said or 'no answer'}") from None


def _mtime(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0
