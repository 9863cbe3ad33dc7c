"""Links that are measured: an agent's data port answers, ``worker probe --peer`` asks."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from collective.errors import CollectiveError, RendezvousFailed
from collective.figures import Sample
from collective.links.dialling import dial
from collective.links.endpoint import SocketEndpoint
from collective.links.handshake import same_secret
from collective.links.link import EndOfLink, Inlet, Outlet
from collective.links.probe import measure, serve
from collective.messages import LinkRequest
from worker.errors import LocalProblem, Refused
from worker.state import PROBE_SECRET, default_folder

__all__ = ["ProbeServer", "measure_peer", "secret_of"]

logger = logging.getLogger(__name__)

#: seconds that one measurement takes at most, on either side
_LONGEST = 10.0
#: seconds that it should take
_LIMIT = 0.5
#: nodes that may measure their link to this one at the same time
_AT_ONCE = 4
_EPOCH = 1


class ProbeServer:
    """The answering side, for an agent."""

    def __init__(self) -> None:
        self._secret = ""
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = False

    def admit(self, secret: str) -> None:
        """From now on, whoever knows `secret` may measure."""
        self._secret = secret

    def refusal(self, secret: str | None) -> tuple[int, str] | None:
        """Status and text with which a dialler is refused, or None when it may measure."""
        if not self._secret:
            return 503, "this node has not been welcomed by its control plane yet"
        if not same_secret(secret, self._secret):
            return 401, "wrong secret"
        with self._lock:
            if len(self._open) >= _AT_ONCE:
                return 503, "others measure their links to this node; try again"
        return None

    def take(self, connection: socket.socket, unread: bytes, peer: str) -> None:
        """Answer on a connection, on a thread of its own, for some seconds at most."""
        with self._lock:
            if self._closed:
                connection.close()
                return
            self._open.add(connection)
        threading.Thread(
            target=self._serve, args=(connection, unread, peer), name="probe", daemon=True
        ).start()

    def _serve(self, connection: socket.socket, unread: bytes, peer: str) -> None:
        try:
            outlet = Outlet(SocketEndpoint(connection), unread)
            serve(outlet, _EPOCH, time.monotonic() + _LONGEST, peer)
        except (CollectiveError, EndOfLink, OSError) as error:
            logger.info("measuring with %s ended: %s", peer, error)
        finally:
            with self._lock:
                self._open.discard(connection)
                connection.close()

    def close(self) -> None:
        """Answer nobody any more."""
        with self._lock:
            self._closed = True
            for connection in self._open:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # the other node broke it off: its thread is about to see that


@dataclass(frozen=True)
class Probed:
    """What was measured between two addresses, this machine's own first."""

    here: str
    there: str
    sample: Sample


def measure_peer(host: str, port: int, secret: str) -> Probed:
    """Measure the link from the agent at `host` and `port` to here.

    Raises:
        Refused: it does not know the secret, or is too old.
        LocalProblem: it cannot be reached, or did not answer.
    """
    request = LinkRequest(
        job="-", attempt="-", group="probe", epoch=_EPOCH, dialler=0, target=0, channel="probe"
    )
    deadline = time.monotonic() + _LONGEST
    where = f"the agent at {host}, port {port}"
    try:
        sock = dial([(host, port)], request, secret, deadline, where)
    except RendezvousFailed as error:
        text = str(error)
        if "link: 401 " in text:
            raise Refused(
                f"{where} belongs to another cluster, or this node's secret is old: join the same "
                "cluster on both, and let the agent of this node run while you measure (401)"
            ) from None
        if "link: 400 " in text:
            raise Refused(f"{where} is too old to be measured; update Unisono there") from None
        raise LocalProblem(
            f"{text}; is the agent running, is this its data port, does a firewall let it in?"
        ) from None
    endpoint = SocketEndpoint(sock)
    inlet = Inlet(endpoint)
    try:
        here, there = endpoint.hosts()
        return Probed(here, there, measure(inlet, _EPOCH, _LIMIT, deadline, where))
    except (CollectiveError, EndOfLink) as error:
        raise LocalProblem(f"{where} ended the measurement: {error}") from None
    finally:
        inlet.close()


def secret_of(state_dir: Path | None) -> str:
    """The secret that the agent of this node has been given, from its state folder.

    Raises:
        LocalProblem: no agent has joined here, or several have and none is named.
    """
    if state_dir is not None:
        found = [state_dir / PROBE_SECRET]
    else:
        found = sorted(default_folder("x", 0, "x").parents[1].glob(f"*/*/{PROBE_SECRET}"))
    if not found:
        raise LocalProblem(
            "no agent has joined a cluster from here: start worker join, or name its --state-dir"
        )
    if len(found) > 1:
        listed = ", ".join(str(path.parent) for path in found)
        raise LocalProblem(f"agents of several nodes have run here; take one --state-dir: {listed}")
    try:
        return found[0].read_text().strip()
    except OSError as error:
        raise LocalProblem(
            f"{found[0]} cannot be read ({os.strerror(error.errno or 0)}): is this the state "
            "folder of an agent that has joined?"
        ) from None
