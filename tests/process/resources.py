"""What a process holds: descriptors, threads and memory, to compare before and after."""

from __future__ import annotations

import gc
import os
import threading

#: threads that end by themselves when they have been idle
_IDLE = ("unisono-completion",)


def descriptors() -> dict[int, str]:
    """The open descriptors of this process and what they are."""
    gc.collect()  # what an earlier test dropped is not this one's
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # the one that listed the folder
    return found


def threads() -> list[str]:
    """Names of the threads of this process, but for those that wait to end by themselves."""
    return sorted(
        thread.name for thread in threading.enumerate() if not thread.name.startswith(_IDLE)
    )


def resident() -> int:
    """Bytes of memory that this process has in use now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def highest_resident() -> int:
    """The most bytes of memory that this process ever had in use."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
