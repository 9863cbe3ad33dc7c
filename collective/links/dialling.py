"""Dialling a peer: the first of its addresses that works, for as long as there is time."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Sequence

from collective.addresses import format_address
from collective.environment import seconds
from collective.errors import RendezvousFailed
from collective.links.handshake import CHANNELS, TOO_EARLY, ClientHandshake
from collective.messages import LinkRequest

#: seconds for one attempt to connect to one address
_CONNECT = seconds("UNISONO_CONNECT_SECONDS", 3)
#: seconds for the whole handshake on a connection
_HANDSHAKE = 10.0
#: seconds for an answer that is a help and no more
_ASK = 1.0


class Unreachable(RendezvousFailed):
    """None of the addresses of a peer that is there leads to it; the text is what each said."""


def dial(
    addresses: Sequence[tuple[str, int]],
    request: LinkRequest,
    secret: str,
    deadline: float,
    label: str,
    check: Callable[[], None] = lambda: None,
    is_there: Callable[[], bool] = lambda: False,
) -> socket.socket:
    """Connect to a peer at the first of its addresses that works, trying until `deadline`.

    Args:
        check: called before each round of attempts; may raise to end them.
        is_there: whether the peer is known to listen, so that a round without success tells that
            it cannot be reached.

    Raises:
        RendezvousFailed: refused by the peer, or not reached in time; names every address tried.
        Unreachable: a round failed that began when the peer was there.
    """
    pause = 0.01
    begun = time.monotonic()
    problems: list[str] = []
    while True:
        check()
        there = is_there()
        left = deadline - time.monotonic()
        if left <= 0:
            raise RendezvousFailed(
                f"cannot reach {label} within {deadline - begun:.3g} s: "
                f"{'; '.join(problems) or 'no time left'}",
                rank=request.target,
            )
        problems = []
        refusals = 0
        for host, port in addresses:
            left = max(0.001, deadline - time.monotonic())
            try:
                return _dial_one(host, port, request, secret, left)
            except OSError as error:
                near = host.startswith("\0")
                where = "shared memory" if near else format_address(host, port)
                problems.append(f"{where}: {error}")
            except RendezvousFailed as error:
                refusals += 1  # perhaps another machine that has this address: try the next one
                problems.append(str(error))
        if there:
            raise Unreachable("; ".join(problems), rank=request.target)
        if refusals == len(addresses):
            # final, unlike a peer that cannot be reached, or has not left its earlier epoch: it
            # may only not listen yet
            raise RendezvousFailed(
                f"cannot reach {label}: {'; '.join(problems)}", rank=request.target
            )
        # nobody tells when the peer begins to listen: look again, less and less often
        time.sleep(max(0.0, min(deadline - time.monotonic(), pause * random.uniform(0.5, 1.0))))
        pause = min(pause * 1.7, 0.5)


def refusal(address: tuple[str, int], request: LinkRequest, secret: str) -> str:
    """What a rank answers at once to a request that it must refuse; empty if there is none."""
    try:
        _dial_one(*address, request, secret, _ASK).close()
    except RendezvousFailed as error:
        return f" ({error})"
    except OSError:
        pass  # nobody is there, or it is no rank
    return ""


def _dial_one(
    host: str, port: int, request: LinkRequest, secret: str, timeout: float
) -> socket.socket:
    assert request.channel in CHANNELS
    near = host.startswith("\0")
    if near:
        host, sock = "localhost", _connect_unix(host, min(_CONNECT, timeout))
    else:
        sock = socket.create_connection((host, port), timeout=min(_CONNECT, timeout))
    try:
        if not near and sock.getsockname() == sock.getpeername():
            # nobody listens, and the kernel chose this very port as the source
            raise ConnectionRefusedError("nobody listens there")
        handshake = ClientHandshake(host, port, request, secret)
        sock.settimeout(min(_HANDSHAKE, timeout))
        sock.sendall(handshake.hello)
        seen = b""
        while not handshake.done:
            data = sock.recv(4096, socket.MSG_PEEK)
            if not data and handshake.status is None:
                raise ConnectionResetError("closed during the handshake")
            # what follows the answer's head is not the handshake's, unless it is a refusal
            end = (seen + data).find(b"\r\n\r\n")
            rest = end + 4 - len(seen) if end >= 0 else 0
            data = sock.recv(rest if rest > 0 else 4096) if data else data
            seen += data
            try:
                handshake.feed(data)
            except RendezvousFailed as error:
                if handshake.status == TOO_EARLY:
                    raise ConnectionRefusedError(str(error)) from None
                raise
    except BaseException:
        sock.close()
        raise
    return sock


def _connect_unix(address: str, timeout: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout)
        sock.connect(address)
    except BaseException:
        sock.close()
        raise
    return sock
