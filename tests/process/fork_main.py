"""The process that `forked_ranks.ForkedRanks` forks its ranks from."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from multiprocessing.connection import Connection

import fault_jobs  # noqa: F401 - so that the ranks need not import it, and torch
import rank_main


def serve(rank: int, pipe: Connection) -> None:
    """What a rank does: what it is told, until nobody is there to tell it."""
    os.environ["RANK"] = str(rank)
    while True:
        try:
            request = pipe.recv_bytes()
        except EOFError:
            return
        pipe.send(rank_main.call(request))


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel takes the dead away
    control = socket.socket(fileno=int(sys.argv[1]))
    gc.freeze()
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 64, 1)
        if not data:
            return
        pid = os.fork()
        if not pid:
            control.close()
            serve(int(data), Connection(descriptors[0]))
            return
        os.close(descriptors[0])
        control.send(str(pid).encode())


if __name__ == "__main__":
    main()
