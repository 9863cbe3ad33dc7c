"""The agent's side of one rank: starts its supervisor and turns what it says into spool entries."""

from __future__ import annotations

import json
import logging
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from collective.messages import Failure, LogChunk, Member, RankState
from worker import supervisor
from worker.output import LineCutter, culprit_of, last_traceback, last_words, metrics_of
from worker.spool import Spool

__all__ = ["RankProcess"]

logger = logging.getLogger(__name__)

_TAIL_BYTES = 64 << 10
_STREAMS = {b"1": "stdout", b"2": "stderr"}


class RankProcess:
    """One rank from its start to the end of its last process.

    Args:
        spool: gets output, metrics, the failure and the states.
        last_words: waits until the rank's messages on its socket were handled, and tells whether
            it reported a failure itself.
        over: called once, when no process is left and all output is in the spool.
    """

    def __init__(
        self,
        *,
        attempt: str,
        member: Member,
        argv: Sequence[str],
        workdir: Path,
        environment: Mapping[str, str],
        grace: float,
        orphan_grace: float,
        output_delay: float,
        spool: Spool,
        last_words: Callable[[int], bool],
        exited: Callable[[int], None],
        over: Callable[[int], None],
    ) -> None:
        self._attempt = attempt
        self.rank = member.rank
        self._spool = spool
        self._output_delay = output_delay
        self._last_words = last_words
        self._on_exit = exited
        self._on_over = over
        self._marker = {"UNISONO_ATTEMPT": attempt, "RANK": str(member.rank)}
        self._ended_because: str | None = None
        self._exited = False
        self._tail = bytearray()
        self._offsets = {"stdout": 0, "stderr": 0}
        self._cutters = {
            "stdout": LineCutter(attempt, self.rank, "stdout", self._log, self._line),
            "stderr": LineCutter(attempt, self.rank, "stderr", self._log),
        }
        configuration = {
            "argv": list(argv),
            "cwd": str(workdir),
            "env": dict(environment),
            "grace": grace,
            "orphan_grace": orphan_grace,
            "marker": self._marker,
        }
        self._control, theirs = socket.socketpair()
        self._sending = threading.Lock()
        with theirs:
            # Isolated and without site: it starts in a fraction of the usual time, and neither
            # this package's folder nor the user's environment can change what it imports.
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", "-X", "utf8"),
                    *(supervisor.__file__, str(theirs.fileno())),
                ],
                cwd="/",
                env={"PATH": "/usr/bin:/bin"},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._command(configuration)
        self._thread = threading.Thread(target=self._follow, name=f"rank-{self.rank}", daemon=True)
        self._thread.start()

    def end(self, grace: float, reason: str) -> None:
        """End the rank's whole tree: SIGTERM now, SIGKILL after `grace` seconds."""
        self._ended_because = self._ended_because or reason
        self._command({"end": grace})

    def join(self) -> None:
        """Wait until `over` was called."""
        self._thread.join()

    def _command(self, body: Mapping[str, Any]) -> None:
        with self._sending:
            try:
                self._control.sendall(json.dumps(body).encode() + b"\n")
            except OSError as error:
                # the supervisor is gone or about to be; the following thread sees its end
                logger.debug("rank %d's supervisor does not listen: %s", self.rank, error)

    # -- what the supervisor says

    def _follow(self) -> None:
        received = bytearray()
        flush_at: float | None = None
        said_over = False
        while True:
            wait = None if flush_at is None else max(0.0, flush_at - time.monotonic())
            ready, _, _ = select.select([self._control], [], [], wait)
            if ready:
                try:
                    data = self._control.recv(1 << 18)
                except OSError:
                    data = b""
                if not data:
                    break
                received += data
                said_over = self._take(received) or said_over
            waiting = any(cutter.waiting for cutter in self._cutters.values())
            if not waiting:
                flush_at = None
            elif flush_at is None:
                flush_at = time.monotonic() + self._output_delay
            elif time.monotonic() >= flush_at:
                self._flush()
                flush_at = None
        self._process.wait()
        if not said_over:
            self._supervisor_lost()
        self._flush(partial=True)
        self._control.close()
        self._on_over(self.rank)

    def _take(self, received: bytearray) -> bool:
        """Handle all whole frames; True when one of them was the last event."""
        said_over = False
        position = 0
        head = supervisor.FRAME.size
        while len(received) - position >= head:
            kind, length = supervisor.FRAME.unpack_from(received, position)
            if len(received) - position - head < length:
                break
            payload = bytes(received[position + head : position + head + length])
            position += head + length
            if kind == b"E":
                said_over = self._event(json.loads(payload)) or said_over
            else:
                self._output(_STREAMS[kind], payload)
        del received[:position]
        return said_over

    def _output(self, stream: str, payload: bytes) -> None:
        offset, cut = supervisor.OUTPUT.unpack_from(payload)
        data = payload[supervisor.OUTPUT.size :]
        self._offsets[stream] = offset + len(data)
        if stream == "stderr":
            self._tail = (self._tail + data)[-_TAIL_BYTES:]
        self._cutters[stream].feed(offset, cut, data)

    def _event(self, event: Mapping[str, Any]) -> bool:
        name = event["event"]
        if name == "started":
            self._state("running", pid=event["pid"])
        elif name == "not-started":
            self._exited = True
            self._state("failed-to-start", message=event["message"])
            self._on_exit(self.rank)
        elif name == "exited":
            self._exit(event["exit_code"], event["signal"])
        return bool(name == "over")

    def _exit(self, exit_code: int | None, number: int | None) -> None:
        self._exited = True
        self._flush(partial=True)
        reported = self._last_words(self.rank)
        stderr = self._tail.decode("utf-8", "replace")
        message = self._ended_because
        if exit_code != 0:
            found = last_traceback(stderr) if exit_code is not None else None
            if found is not None and not reported:
                self._spool.add(
                    failure=Failure(
                        attempt=self._attempt,
                        rank=self.rank,
                        kind=found.kind,
                        message=found.message,
                        traceback=found.text,
                        culprit=culprit_of(f"{found.kind}: {found.message}", self.rank),
                    )
                )
            message = message or last_words(stderr)
        self._state("exited", exit_code=exit_code, signal=number, message=message)
        self._on_exit(self.rank)

    def _supervisor_lost(self) -> None:
        """Somebody killed the supervisor: its rank dies with it, the rest is found by marker."""
        left = supervisor.end_marked(self._marker, 0.0)
        if left:
            logger.error("processes of rank %d hang in the kernel: %s", self.rank, left)
        if not self._exited:
            self._flush(partial=True)
            self._last_words(self.rank)
            self._state("exited", signal=9, message="the supervisor of this rank was killed")
            self._on_exit(self.rank)

    # -- into the spool

    def _flush(self, *, partial: bool = False) -> None:
        for stream, cutter in self._cutters.items():
            cutter.flush(partial=partial)
            if partial:
                self._spool.close_stream(self._attempt, self.rank, stream, self._offsets[stream])

    def _log(self, chunk: LogChunk) -> None:
        self._spool.add(log=chunk)

    def _line(self, line: bytes) -> None:
        metrics = metrics_of(line, self._attempt, self.rank)
        if metrics is not None:
            self._spool.add(metrics=metrics)

    def _state(self, state: Any, **values: Any) -> None:
        self._spool.add(
            rank=RankState(attempt=self._attempt, rank=self.rank, state=state, **values)
        )
