"""Measures shared memory between two processes of this machine; run as a module, the other end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

from collective.errors import RendezvousFailed
from collective.figures import Sample
from collective.links import shared_handshake
from collective.links.link import EndOfLink
from collective.links.probe import measure, serve
from collective.links.shared_memory import SharedInlet, SharedOutlet

#: seconds for the other process to start
_START = 30.0


def within(limit: float) -> Sample:
    """What a link in shared memory takes here.

    Args:
        limit: seconds that it should take, beside starting another process.

    Raises:
        RendezvousFailed: the other process did not start, or said nothing.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    # -P: nothing in the folder that the user is in takes the place of a module
    command = [sys.executable, "-P", "-m", "collective.links.probe_here", str(theirs.fileno())]
    other = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    theirs.close()
    deadline = time.monotonic() + _START
    try:
        memory = shared_handshake.offer(ours, bell)
        inlet = SharedInlet(ours, memory, shared_handshake.take_bell(ours, deadline))
        try:
            return measure(inlet, 1, limit, deadline, "the other process", bell)
        finally:
            inlet.close()
    except EndOfLink as error:
        raise RendezvousFailed(f"the process that was to be measured with ended: {error}") from None
    finally:
        ours.close()
        os.close(bell)
        other.kill()
        other.wait()


def main(descriptor: int) -> None:
    """The sending end, on a connected Unix socket."""
    deadline = time.monotonic() + _START
    bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    sock = socket.socket(fileno=descriptor)
    memory, peer_bell = shared_handshake.take(sock, bell, deadline)
    outlet = SharedOutlet(sock, memory, peer_bell)
    serve(outlet, 1, deadline, "the process that measures", bell)
    outlet.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
