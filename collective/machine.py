"""What a process sees of the machine that it runs on."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def core_set() -> str:
    """Which cores `cores` counts: the same for two processes that run on the same ones."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return hashlib.sha256(f"{boot} {sorted(os.sched_getaffinity(0))}".encode()).hexdigest()[:16]
