"""The parent of one rank: starts it, passes its output on, and ends its whole tree.

A separate process that starts in a few milliseconds: it is run by path, isolated, and imports
nothing but the standard library.  It is a subreaper, so that every descendant of the rank, also
one that called ``setsid`` or lost its parent, becomes its child in the end: when the kernel says
that it has no children, no process of the rank is left.

It speaks over one socket whose other end only the agent holds.  From the agent come lines of
JSON: first the configuration, later ``{"end": GRACE}``.  To the agent go frames: one byte of
kind, four bytes of length, and

- ``E``: an event as JSON: ``started``, ``not-started``, ``exited``, ``over``;
- ``1`` and ``2``: output: eight bytes of offset in the stream, eight bytes that count what was
  dropped just before it, and the bytes.

End of file on the socket means that the agent is gone: the tree is ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

FRAME = struct.Struct("!cI")
OUTPUT = struct.Struct("!QQ")
#: at most this much output waits for the agent
BUFFER_BYTES = 8 << 20
#: an agent that takes nothing for this long costs output, not the rank's time; seconds
STALL = 1.0
READ_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


# --- finding and ending processes; the agent uses these too ----------------------------------


def marked_processes(marker: Mapping[str, str]) -> list[int]:
    """Ids of the live processes whose environment at their start holds every entry of `marker`."""
    wanted = {f"{name}={value}".encode() for name, value in marker.items()}
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                environment = file.read()
        except OSError:  # it ended meanwhile, or belongs to somebody else
            continue
        if wanted <= set(environment.split(b"\0")):
            found.append(int(entry))
    return found


def descendants(root: int) -> list[int]:
    """Ids of the live processes below `root`, zombies left out."""
    children: dict[int, list[tuple[int, str]]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                status = file.read()
        except OSError:
            continue
        # the name in parentheses may hold anything, also spaces and parentheses
        letter, parent = status.rpartition(b")")[2].split()[:2]
        children.setdefault(int(parent), []).append((int(entry), letter.decode()))
    found, queue = [], [root]
    while queue:
        for child, state in children.get(queue.pop(), []):
            queue.append(child)
            if state != "Z":
                found.append(child)
    return found


def send_signal(number: int, find: Callable[[], list[int]]) -> int:
    """Send a signal to every process that `find` names, and count them.

    Each is held by a descriptor and looked for again before the signal leaves, so that a
    process that took over the number of an ended one is never hit.
    """
    with contextlib.ExitStack() as held:
        descriptors = {}
        for pid in find():
            with contextlib.suppress(ProcessLookupError):
                descriptors[pid] = os.pidfd_open(pid)
                held.callback(os.close, descriptors[pid])
        still = set(find()) & descriptors.keys()
        for pid in still:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(descriptors[pid], number)
    return len(still)


def end_marked(marker: Mapping[str, str], grace: float, killing: float = 10.0) -> list[int]:
    """End all processes that carry `marker`: SIGTERM, `grace` seconds, SIGKILL.

    Returns:
        The ids that are still there `killing` seconds after the first SIGKILL: none, unless a
        process hangs in the kernel.
    """

    def find() -> list[int]:
        return marked_processes(marker)

    send_signal(signal.SIGTERM, find)
    _wait_gone(find, time.monotonic() + grace)
    deadline = time.monotonic() + killing
    while (left := find()) and time.monotonic() < deadline:
        send_signal(signal.SIGKILL, find)
        _wait_gone(find, min(deadline, time.monotonic() + 1.0))
    return left


def _wait_gone(find: Callable[[], list[int]], deadline: float) -> None:
    """Wait until no process is found, woken by each one's end."""
    while pids := find():
        left = deadline - time.monotonic()
        if left <= 0:
            return
        with contextlib.ExitStack() as held:
            poll = select.poll()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    descriptor = os.pidfd_open(pid)
                    held.callback(os.close, descriptor)
                    poll.register(descriptor, select.POLLIN)
            poll.poll(left * 1000)


# --- the supervisor ---------------------------------------------------------------------------


class _Stream:
    """One of the rank's two output pipes."""

    def __init__(self, kind: bytes, descriptor: int) -> None:
        self.kind = kind
        self.descriptor = descriptor
        self.offset = 0
        self.dropped = 0
        os.set_blocking(descriptor, False)


class Supervisor:
    """Runs one rank from start to the end of its last process."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._commands = bytearray()
        self._outgoing: deque[memoryview] = deque()
        self._waiting_bytes = 0
        #: when the agent last took something, or had nothing to take
        self._progress = time.monotonic()
        self._agent_alive = True
        self._streams: list[_Stream] = []
        self._selector = selectors.DefaultSelector()
        self._rank: int | None = None
        self._exited = False
        self._children = True
        self._said_over = False
        self._asked_to_end = False
        self._term_sent = False
        self._kill_at: float | None = None
        self._grace = 15.0
        self._orphan_grace = 4.0
        self._marker: dict[str, str] = {}

    def run(self) -> int:
        """Until no process of the rank is left and the agent has taken all output."""
        configuration = self._read_configuration()
        if configuration is None:
            return 1
        self._grace = float(configuration["grace"])
        self._orphan_grace = float(configuration["orphan_grace"])
        self._marker = dict(configuration["marker"])
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        wake_read, wake_write = socket.socketpair()
        wake_read.setblocking(False)
        wake_write.setblocking(False)
        signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        self._control.setblocking(False)
        self._selector.register(wake_read, selectors.EVENT_READ, "wake")
        self._selector.register(self._control, selectors.EVENT_READ, "control")
        if not self._start(configuration):
            self._children = False
        self._obey()  # an order may have come right behind the configuration
        while True:
            self._reap()
            if not self._children and not self._said_over:
                self._finish()
            if self._said_over and not (self._outgoing and self._agent_alive):
                return 0
            self._watch_streams()
            for key, events in self._selector.select(self._timeout()):
                if key.data == "wake":
                    with contextlib.suppress(BlockingIOError):
                        wake_read.recv(4096)
                elif key.data == "control":
                    if events & selectors.EVENT_READ:
                        self._read_control()
                    if events & selectors.EVENT_WRITE and self._agent_alive:
                        self._write_control()
                elif key.data in self._streams:
                    self._read_stream(key.data)
            if self._asked_to_end:
                self._begin_end(self._grace)
            if self._kill_at is not None and time.monotonic() >= self._kill_at and self._children:
                send_signal(signal.SIGKILL, self._tree)
                # children that were being forked meanwhile get theirs in the next round
                self._kill_at = time.monotonic() + 0.2

    def _on_signal(self, number: int, frame: object) -> None:
        self._asked_to_end = True

    # -- start

    def _read_configuration(self) -> dict[str, Any] | None:
        while b"\n" not in self._commands:
            data = self._control.recv(1 << 16)
            if not data:
                return None
            self._commands += data
        line, _, rest = bytes(self._commands).partition(b"\n")
        self._commands = bytearray(rest)
        return json.loads(line)  # type: ignore[no-any-return]

    def _start(self, configuration: Mapping[str, Any]) -> bool:
        parent = os.getpid()

        def in_child() -> None:
            # The kernel ends the rank if this supervisor is killed; its own children are found
            # by their marker then.
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(127)

        try:
            process = subprocess.Popen(
                configuration["argv"],
                cwd=configuration["cwd"],
                env=configuration["env"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=in_child,
                bufsize=0,
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            reason = str(error)
            if isinstance(error, OSError) and error.errno == errno.E2BIG:
                reason = f"{reason}: one argument or all together are longer than Linux allows"
            self._event({"event": "not-started", "message": reason})
            return False
        assert process.stdout is not None and process.stderr is not None
        self._rank = process.pid
        # The kernel's status is collected by _reap; subprocess must not do it behind its back.
        process.returncode = 0
        self._streams = [
            _Stream(b"1", os.dup(process.stdout.fileno())),
            _Stream(b"2", os.dup(process.stderr.fileno())),
        ]
        process.stdout.close()
        process.stderr.close()
        self._event({"event": "started", "pid": process.pid})
        return True

    # -- the end

    def _begin_end(self, grace: float) -> None:
        now = time.monotonic()
        if not self._term_sent:
            self._term_sent = True
            self._kill_at = now + grace
            send_signal(signal.SIGTERM, self._tree)
        elif self._kill_at is not None:
            self._kill_at = min(self._kill_at, now + grace)

    def _tree(self) -> list[int]:
        found = dict.fromkeys(descendants(os.getpid()))
        found.update(dict.fromkeys(marked_processes(self._marker)))
        return list(found)

    def _reap(self) -> None:
        """Collect every ended child; the rank's own status is told as the kernel gives it."""
        while self._children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self._children = False
                return
            if pid == 0:
                return
            if pid == self._rank and not self._exited:
                self._exited = True
                for stream in self._streams:
                    self._drain(stream)
                code, number = None, None
                if os.WIFSIGNALED(status):
                    number = os.WTERMSIG(status)
                else:
                    code = os.WEXITSTATUS(status)
                self._event({"event": "exited", "exit_code": code, "signal": number})
                # Whatever the rank left running has no purpose any more.
                self._begin_end(self._grace)

    def _finish(self) -> None:
        """No child is left: what escaped by marker, the rest of the output, and the last event."""
        self._said_over = True
        if self._exited and marked_processes(self._marker):
            end_marked(self._marker, 0.0)
        for stream in list(self._streams):
            self._drain(stream)
            self._close_stream(stream)
        self._event({"event": "over"})

    # -- output

    def _full(self) -> bool:
        return self._agent_alive and self._waiting_bytes >= BUFFER_BYTES

    def _stalled(self) -> bool:
        return time.monotonic() - self._progress >= STALL

    def _timeout(self) -> float | None:
        moments = []
        if self._kill_at is not None and self._children:
            moments.append(self._kill_at)
        if self._full() and not self._stalled():
            moments.append(self._progress + STALL)
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def _watch_streams(self) -> None:
        """Read the pipes, except while a busy agent still has to take what was read."""
        reading = not self._full() or self._stalled()
        for stream in self._streams:
            registered = stream.descriptor in self._selector.get_map()
            if reading and not registered:
                self._selector.register(stream.descriptor, selectors.EVENT_READ, stream)
            elif not reading and registered:
                self._selector.unregister(stream.descriptor)

    def _read_stream(self, stream: _Stream) -> None:
        try:
            data = os.read(stream.descriptor, READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._close_stream(stream)
        elif not self._agent_alive or self._full():
            stream.dropped += len(data)
            stream.offset += len(data)
        else:
            self._pass_on(stream, data)

    def _drain(self, stream: _Stream) -> None:
        """Pass on what is in the pipe at this moment; others may go on writing to it."""
        left = int.from_bytes(
            fcntl.ioctl(stream.descriptor, termios.FIONREAD, bytes(4)), sys.byteorder
        )
        while left > 0:
            data = os.read(stream.descriptor, min(left, READ_BYTES))
            self._pass_on(stream, data)
            left -= len(data)

    def _pass_on(self, stream: _Stream, data: bytes) -> None:
        self._frame(stream.kind, OUTPUT.pack(stream.offset, stream.dropped) + data)
        stream.dropped = 0
        stream.offset += len(data)

    def _close_stream(self, stream: _Stream) -> None:
        if stream.descriptor in self._selector.get_map():
            self._selector.unregister(stream.descriptor)
        os.close(stream.descriptor)
        self._streams.remove(stream)
        if stream.dropped:
            self._frame(stream.kind, OUTPUT.pack(stream.offset, stream.dropped))

    # -- the agent

    def _event(self, event: Mapping[str, object]) -> None:
        self._frame(b"E", json.dumps(event).encode())

    def _frame(self, kind: bytes, payload: bytes) -> None:
        if not self._agent_alive:
            return
        if not self._outgoing:
            self._progress = time.monotonic()
        self._outgoing.append(memoryview(FRAME.pack(kind, len(payload)) + payload))
        self._waiting_bytes += len(payload) + FRAME.size
        self._write_control()

    def _write_control(self) -> None:
        while self._outgoing:
            try:
                sent = self._control.send(self._outgoing[0])
            except BlockingIOError:
                break
            except OSError:
                self._agent_gone()
                return
            self._progress = time.monotonic()
            self._waiting_bytes -= sent
            if sent == len(self._outgoing[0]):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = self._outgoing[0][sent:]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
        self._selector.modify(self._control, wanted, "control")

    def _read_control(self) -> None:
        try:
            data = self._control.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._agent_gone()
            return
        self._commands += data
        self._obey()

    def _obey(self) -> None:
        while b"\n" in self._commands:
            line, _, rest = bytes(self._commands).partition(b"\n")
            self._commands = bytearray(rest)
            self._begin_end(float(json.loads(line)["end"]))

    def _agent_gone(self) -> None:
        if not self._agent_alive:
            return
        self._agent_alive = False
        self._outgoing.clear()
        self._waiting_bytes = 0
        self._selector.unregister(self._control)
        self._begin_end(min(self._grace, self._orphan_grace))


def main() -> int:
    """Entry: ``supervisor.py DESCRIPTOR``, the number of the socket to the agent."""
    control = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(control.fileno(), False)
    return Supervisor(control).run()


if __name__ == "__main__":
    sys.exit(main())
