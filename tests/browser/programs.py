"""Small programs that run as jobs: they wait for files, so that tests say when they go on."""

from __future__ import annotations

import sys
from pathlib import Path

#: says its arguments, reports steps, waits for a file, and ends
_STEPS = """
import json, os, sys, time
gate, arguments = sys.argv[1], sys.argv[2:]
print(json.dumps(arguments), flush=True)
for step in range(1, 21):
    print('::unisono ' + json.dumps({"step": step, "loss": 1 / step, "steps_total": 40}))
print(f"rank {os.environ['RANK']} waits", flush=True)
while not os.path.exists(gate):
    time.sleep(0.02)
for step in range(21, 41):
    print('::unisono ' + json.dumps({"step": step, "loss": 1 / step, "steps_total": 40}))
print("goes on", flush=True)
"""

#: reports the loss of more steps than one answer of the API holds
_LONG = """
import json
for step in range(1, 4001):
    print('::unisono ' + json.dumps({"step": step, "loss": 1 / step}))
"""

#: rank 1 raises once the file is there, the others wait to be ended
_FAILS = """
import os, sys, time
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
if os.environ["RANK"] == "1":
    raise ValueError("bad batch <b>17</b>" + "x" * 200)
while True:
    time.sleep(1)
"""

#: on SIGTERM it says so and cleans up until the file is there
_CLEANS = """
import os, signal, sys, time
def clean(*_):
    print("cleans up", flush=True)
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.02)
    sys.exit(0)
signal.signal(signal.SIGTERM, clean)
print("ready", flush=True)
while True:
    signal.pause()
"""


def steps(gate: Path, *arguments: str) -> list[str]:
    """A command that reports 20 steps, waits for `gate`, and reports 20 more."""
    return [sys.executable, "-S", "-c", _STEPS, str(gate), *arguments]


def fails(gate: Path) -> list[str]:
    """A command whose rank 1 raises once `gate` is there."""
    return [sys.executable, "-S", "-c", _FAILS, str(gate)]


def cleans(gate: Path) -> list[str]:
    """A command that takes until `gate` is there to end after SIGTERM."""
    return [sys.executable, "-S", "-c", _CLEANS, str(gate)]


def long_loss() -> list[str]:
    """A command that reports the loss of 4,000 steps."""
    return [sys.executable, "-S", "-c", _LONG]
