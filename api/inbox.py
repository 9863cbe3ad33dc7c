"""One task that handles one thing after the other, in order of arrival."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

log = logging.getLogger("unisono.jobs")
T = TypeVar("T")
Handler = Callable[[], Awaitable[None]]


class Inbox:
    """Handlers that wait, and the task that runs them."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Handler] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to handle."""
        self._task = asyncio.create_task(self._run(), name="inbox")

    async def stop(self) -> None:
        """Stop after the handler that runs now is interrupted."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def post(self, handler: Handler) -> None:
        """Have something handled, after all that came before."""
        self._queue.put_nowait(handler)

    def later(self, seconds: float, handler: Handler) -> asyncio.TimerHandle:
        """Have something handled some time later."""
        return asyncio.get_running_loop().call_later(seconds, self.post, handler)

    async def ask(self, handler: Callable[[], Awaitable[T]]) -> T:
        """Have something handled and wait for its result."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        async def run() -> None:
            try:
                result = await handler()
            except Exception as error:
                if not done.done():
                    done.set_exception(error)
                    return
                raise
            if not done.done():
                done.set_result(result)

        self.post(run)
        return await done

    async def _run(self) -> None:
        while True:
            handler = await self._queue.get()
            try:
                await handler()
            except Exception:
                # Other jobs must go on whatever is wrong with this one.
                log.exception("an event could not be handled")
