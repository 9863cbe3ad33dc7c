"""Live views: channels of coalesced frames that can be replayed, and their subscribers.

A channel's owner gathers what changed and calls `Channel.touch`; at most once per interval the
channel asks the owner for one payload and sends it as one frame.  While nobody looks, nothing is
gathered: the next subscriber starts with a snapshot.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from api.auth import Principal
from api.progress import plain

#: seconds that frames are kept for a subscriber that may come back
_LINGER = 30.0
#: milliseconds after which a browser connects again; its own default is 3 to 5 s
_RETRY = 1000
#: frames that wait for one slow subscriber before it gets a new snapshot instead
_BACKLOG = 64


@dataclass(frozen=True)
class Frame:
    """One server-sent event."""

    number: int
    event: str
    data: str


class Channel:
    """The frames of one stream."""

    def __init__(self, hub: Hub, compose: Callable[[], dict[str, Any] | None]) -> None:
        self._hub = hub
        self._compose = compose
        self._frames: deque[Frame] = deque()
        self._bytes = 0
        self._number = 0
        self._last_flush = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._left_at = float("-inf")
        self.subscribers: set[Subscription] = set()
        #: why the stream is over, once it is
        self.over: str | None = None

    @property
    def wanted(self) -> bool:
        """Whether anybody looks, or may come back and ask what was missed."""
        return bool(self.subscribers) or time.monotonic() - self._left_at < _LINGER

    def touch(self) -> None:
        """Something changed: send a frame as soon as the interval allows."""
        if self._timer is not None or self.over is not None:
            return
        if not self.wanted:
            # What happens unseen cannot be replayed, so older frames are of no use either.
            # Skipping a number makes every id that was handed out too old.
            self._frames.clear()
            self._bytes = 0
            self._number += 1
            return
        wait = max(0.0, self._last_flush + self._hub.interval - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(wait, self._flush)

    def _flush(self) -> None:
        self._timer = None
        payload = self._compose()
        if payload is None:
            return
        self._last_flush = time.monotonic()
        self._number += 1
        frame = Frame(self._number, "update", encode({"at": time.time()} | payload))
        self._frames.append(frame)
        self._bytes += len(frame.data)
        while self._bytes > self._hub.replay and len(self._frames) > 1:
            self._bytes -= len(self._frames.popleft().data)
        for subscriber in self.subscribers:
            subscriber.put(frame)

    def finish(self, reason: str) -> None:
        """Send what is left, and the end."""
        if self.over is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
        if self.wanted:
            self._flush()
        self.over = reason
        for subscriber in self.subscribers:
            subscriber.end(reason)

    def subscribe(self, principal: Principal, last_id: str | None) -> Subscription:
        """A new subscriber, given what it missed if that is still known."""
        subscription = Subscription(self, principal)
        subscription.position = self._number
        boot, _, number = (last_id or "").rpartition("-")
        if boot == self._hub.boot and number.isdecimal() and self.wanted:
            seen = int(number)
            oldest = self._frames[0].number if self._frames else self._number + 1
            if oldest <= seen + 1 <= self._number + 1:
                subscription.snapshot = False
                subscription.frames.extend(f for f in self._frames if f.number > seen)
        self.subscribers.add(subscription)
        if self.over is not None:
            subscription.end(self.over)
        return subscription

    def leave(self, subscription: Subscription) -> None:
        """A subscriber is gone."""
        self.subscribers.discard(subscription)
        self._left_at = time.monotonic()


class Subscription:
    """One open stream."""

    def __init__(self, channel: Channel, principal: Principal) -> None:
        self.channel = channel
        self.principal = principal
        self.frames: deque[Frame] = deque()
        #: whether the subscriber needs the whole picture first
        self.snapshot = True
        #: number of the last frame that the snapshot includes
        self.position = 0
        self.reason: str | None = None
        self._changed = asyncio.Event()

    def put(self, frame: Frame) -> None:
        """One more frame; a subscriber that does not read gets a snapshot instead."""
        self.frames.append(frame)
        if len(self.frames) > _BACKLOG:
            self.frames.clear()
            self.snapshot = True
            self.position = frame.number
        self._changed.set()

    def end(self, reason: str) -> None:
        """The stream is over."""
        self.reason = self.reason or reason
        self._changed.set()

    async def wait(self, seconds: float) -> None:
        """Until something changed or the time is over."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            pass
        self._changed.clear()


class Hub:
    """All channels."""

    def __init__(self, interval: float, beat: float, replay: int) -> None:
        self.interval = interval
        self.beat = beat
        self.replay = replay
        self.boot = secrets.token_hex(4)
        self._open: set[Subscription] = set()
        self._closing = False

    def end_principal(self, token_id: str) -> None:
        """End the streams of a token that is no longer valid."""
        for subscription in self._open:
            if subscription.principal.id == token_id:
                subscription.end("login-over")

    def close(self) -> None:
        """End all streams, since the server ends."""
        self._closing = True
        for subscription in self._open:
            subscription.end("shutdown")

    async def stream(
        self,
        channel: Channel,
        principal: Principal,
        last_id: str | None,
        snapshot: Callable[[], Awaitable[dict[str, Any]]],
    ) -> AsyncIterator[str]:
        """The text of one event stream."""
        subscription = channel.subscribe(principal, last_id)
        self._open.add(subscription)
        if self._closing:
            subscription.end("shutdown")
        try:
            yield f"retry: {_RETRY}\n\n"
            while True:
                if subscription.snapshot:
                    subscription.snapshot = False
                    number = subscription.position
                    found = {"at": time.time()} | await snapshot()
                    # Of many ranks it is large: the loop goes on meanwhile.
                    data = await asyncio.to_thread(encode, found)
                    yield self._text(Frame(number, "snapshot", data))
                while subscription.frames and not subscription.snapshot:
                    yield self._text(subscription.frames.popleft())
                if subscription.snapshot:
                    continue
                if subscription.reason is not None:
                    data = encode({"at": time.time(), "reason": subscription.reason})
                    yield f"event: end\ndata: {data}\n\n"
                    return
                left = principal.expires_at - time.time()
                if left <= 0:
                    subscription.end("login-over")
                    continue
                await subscription.wait(min(self.beat, left))
                if not subscription.frames and subscription.reason is None:
                    yield f"event: beat\ndata: {encode({'at': time.time()})}\n\n"
        finally:
            self._open.discard(subscription)
            channel.leave(subscription)

    def _text(self, frame: Frame) -> str:
        return f"id: {self.boot}-{frame.number}\nevent: {frame.event}\ndata: {frame.data}\n\n"


def encode(payload: dict[str, Any]) -> str:
    """JSON on one line, with numbers that JSON cannot hold as strings."""
    try:
        return json.dumps(payload, separators=(",", ":"), allow_nan=False)
    except ValueError:
        # To look for such numbers takes ten times as long, and hardly ever are there any.
        return json.dumps(plain(payload), separators=(",", ":"), allow_nan=False)
