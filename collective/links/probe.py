"""Measures a link by itself: its receiving end asks for bytes, its sending end gives them.

A PROBE asks for so many bytes, which come in frames of kind PROBED, of which one that asks for none
gets one; DONE ends it.  This runs before a group's first operation, or on a link of its own.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from collective.errors import ProtocolError, RendezvousFailed
from collective.figures import Sample
from collective.links.link import Inlet, Outlet, frame_head
from collective.links.wire import FrameKind, Header
from collective.program import SEGMENT

T = TypeVar("T")

#: round trips: at least, and at most
_LEAST, _MOST = 3, 20
#: bytes of the first and of the largest question about the rate
_FIRST, _LARGEST = 256 << 10, 16 << 20
#: a rate that is less than so many times the one before has stopped growing
_GROWS = 1.3
#: seconds of round trip from which on a connection takes longer to get up to speed than there is
_FAR = 0.005
#: the largest send buffer that Linux gives a connection unless told otherwise (net.ipv4.tcp_wmem)
_SEND_BUFFER = 4 << 20


def measure(
    inlet: Inlet, epoch: int, limit: float, deadline: float, label: str, bell: int | None = None
) -> Sample:
    """Measure the link of `inlet`, whose other end is in `serve`.

    Args:
        inlet: the receiving end.
        epoch: of the group.
        limit: seconds that it should take; where the network is so slow that a few round trips
            take longer, it takes as long as they do.
        deadline: monotonic time at which to give up.
        label: who the peer is, for messages.
        bell: an eventfd that the peer writes to, where the link has one.

    Raises:
        RendezvousFailed: the peer did not answer until `deadline`.
        EndOfLink: it closed the link.
        ProtocolError: it answered something else.
    """
    room = memoryview(bytearray(SEGMENT))

    def ask(nbytes: int) -> tuple[float, float]:
        """Seconds until all is here, and of them those since half of it was."""
        start = half = time.perf_counter()
        inlet.say(FrameKind.PROBE, epoch, nbytes)
        until(lambda: inlet.flush() or None, inlet, select.POLLOUT, deadline, label, bell)
        left = max(nbytes, 1)
        while left > 0:
            header = until(inlet.header, inlet, select.POLLIN, deadline, label, bell)
            if header.kind != FrameKind.PROBED or header.length > min(left, SEGMENT):
                raise ProtocolError(f"{label} answered a probe with {header}")
            read = partial(_read, inlet, room[: header.length])
            until(read, inlet, select.POLLIN, deadline, label, bell)
            left -= max(header.length, 1)
            if 0 < left <= nbytes // 2 < left + header.length:
                half = time.perf_counter()
        end = time.perf_counter()
        return end - start, end - half

    begun = time.perf_counter()
    trips: list[float] = []
    while len(trips) < _LEAST or (len(trips) < _MOST and time.perf_counter() - begun < limit / 4):
        trips.append(ask(0)[0])
    # what is slower waited for a core, which is no property of the link
    round_trip = sorted(trips)[len(trips) // 4]
    far = round_trip > _FAR

    def rate_of(nbytes: int) -> tuple[float, float]:
        taken, later = ask(nbytes)
        if far and nbytes > SEGMENT:  # in the first half the connection gets up to speed
            return nbytes / 2 / max(later, 1e-9), taken
        return nbytes / max(taken - round_trip, taken / 10), taken

    nbytes, rate = _FIRST, 0.0
    while True:
        now, taken = rate_of(nbytes)
        grows, rate = now > _GROWS * rate, now
        late = time.perf_counter() - begun + taken > limit
        if late and far and grows:  # it never got up to speed: each trip carries a send buffer
            rate = max(rate, inlet.used * _SEND_BUFFER / round_trip)
        if late:
            break
        if nbytes == _LARGEST or not grows:
            rate = max(rate, rate_of(nbytes)[0])  # what is slower waited for a core
            break
        nbytes *= 4
    inlet.say(FrameKind.DONE, epoch)
    return Sample(round_trip, rate)


def _read(inlet: Inlet, view: memoryview) -> bool | None:
    return inlet.read_into(view) or None


def serve(outlet: Outlet, epoch: int, deadline: float, label: str, bell: int | None = None) -> None:
    """Answer the questions of `measure` at the other end until it is done.

    Raises:
        RendezvousFailed: the peer asked nothing until `deadline`.
        EndOfLink: it closed the link.
        ProtocolError: it asks for too much.
    """
    zeros = memoryview(bytes(SEGMENT))
    waiting = select.POLLOUT, deadline, label, bell

    def asked() -> tuple[Header, bytes] | None:
        return outlet.hear(FrameKind.PROBE, FrameKind.DONE)

    while True:
        header, _ = until(asked, outlet, select.POLLIN, deadline, label, bell)
        if header.kind == FrameKind.DONE:
            return
        if header.sequence > _LARGEST:
            raise ProtocolError(f"{label} asks for {header.sequence} bytes to measure its link")
        for start in range(0, max(header.sequence, 1), SEGMENT):
            size = min(header.sequence - start, SEGMENT)
            until(lambda: outlet.idle or outlet.flush() or None, outlet, *waiting)
            outlet.begin(frame_head(FrameKind.PROBED, epoch, 0, 0, size, 0), zeros[:size])
        until(lambda: outlet.flush() or None, outlet, *waiting)


def until(
    step: Callable[[], T | None],
    link: Inlet | Outlet,
    events: int,
    deadline: float,
    label: str,
    bell: int | None = None,
) -> T:
    """What `step` gives, called again whenever the link is ready, as soon as it gives something.

    Raises:
        RendezvousFailed: it gave nothing until `deadline` (monotonic).
    """
    ends = (link, *link.others)
    poll = select.poll()
    for end in ends:
        # what goes through shared memory rings, and a socket that takes bytes would always wake
        poll.register(end.endpoint.fileno(), events if bell is None else select.POLLIN)
    if bell is not None:
        poll.register(bell, select.POLLIN)
    while (found := step()) is None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise RendezvousFailed(f"{label} did not answer while its link was measured")
        for descriptor, _ in poll.poll(left * 1000):
            if descriptor == bell:
                os.eventfd_read(descriptor)
        for end in ends:
            end.readable = end.writable = True
    return found
