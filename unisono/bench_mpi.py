"""MPI beside us in ``unisono bench``: whether it is there, and how ranks start that are also its.

MPICH only: it can treat ranks of one machine as if they were on several nodes, so that both
libraries exchange over the same kinds of links.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from unisono.bench_layout import Layout

__all__ = ["command", "environment", "why_not"]

_INSTALL = "install both with: pip install 'unisono[mpi]'"


def why_not(layout: Layout) -> str | None:
    """Why ranks of this layout cannot use MPI, or None if they can."""
    try:
        import mpi4py

        # this process is no rank, and need not become one to ask
        mpi4py.rc.initialize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        return f"mpi4py or an MPI library is missing ({error}); {_INSTALL}"
    vendor, _ = MPI.get_vendor()
    if vendor != "MPICH":
        return f"mpi4py is made for {vendor}, only MPICH can be measured; {_INSTALL}"
    if _mpiexec() is None:
        return f"there is no mpiexec beside {sys.executable} or in PATH; {_INSTALL}"
    if not layout.equal:
        return (
            f"MPICH can only be told of nodes of equal size, not of --topology {layout.text}: "
            "leave it out of --against"
        )
    return None


def _mpiexec() -> str | None:
    """The one of this Python's environment first: it fits mpi4py there."""
    own = str(Path(sys.executable).parent)
    return shutil.which("mpiexec", path=os.pathsep.join([own, os.environ.get("PATH", "")]))


def environment(layout: Layout, interface: str) -> dict[str, str]:
    """Settings by which MPICH exchanges as our ranks do: between nodes by TCP over `interface`.

    Those that are set already are left alone.
    """
    settings = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": interface}
    if layout.link == "websocket":
        settings["MPIR_CVAR_NOLOCAL"] = "1"
    else:
        settings["MPIR_CVAR_NUM_CLIQUES"] = str(len(layout.nodes))
        settings["MPIR_CVAR_CLIQUES_BY_BLOCK"] = "1"
    return {name: value for name, value in settings.items() if name not in os.environ}


def command(ranks: Sequence[tuple[Sequence[str], Mapping[str, str]]]) -> list[str]:
    """One command that starts all ranks, each a command line and what its environment adds."""
    found = [_mpiexec() or "mpiexec"]
    for number, (line, added) in enumerate(ranks):
        found += [":"] if number else []
        found += ["-n", "1"]
        for name, value in added.items():
            found += ["-env", name, value]
        found += line
    return found
