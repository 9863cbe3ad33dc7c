"""Connections that are soon full, so that a link of several uses all of them for a little data."""

from __future__ import annotations

import socket

from collective.links.endpoint import SocketEndpoint


def fills_up(endpoint: SocketEndpoint, nbytes: int) -> None:
    """In the place of `SocketEndpoint.fills_up_at`: as few bytes as the kernel allows."""
    endpoint._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
