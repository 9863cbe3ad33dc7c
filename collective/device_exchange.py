"""Memory through which the ranks of a node exchange tensors on their devices, turn by turn.

Each rank has a stage, which the others read, and an event.  In a turn a rank puts work on its
stream behind what every peer has recorded so far, and records its own event behind that.  When a
peer's token of a turn has come, its event of that turn has been recorded: so who takes the next
turn may read what the peers wrote in the last one, and write what they read in it, and the host
waits for no device.  A wait sees only what was recorded before it, and a rank records after its
waits, so no two ranks can wait for each other.  Behind its last turn an operation waits for all
peers once more: what it leaves behind needs no event of a peer, whose process may end then.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from collective.device_copies import on_stream
from collective.errors import GroupClosed

#: a stage is so many slots of so many bytes: what three steps of a pipeline have in hand
SLOTS = 3
SLOT = 8 << 20
#: seconds that who leaves waits for what its peers still read
_LINGER = 2.0


@dataclass(frozen=True)
class Stage:
    """A rank's part of an exchange.

    Attributes:
        memory: `SLOTS` × `SLOT` bytes on its device.
        event: what its work so far is recorded in; None on the CPU, where work is done at once.
    """

    memory: torch.Tensor
    event: torch.cuda.Event | None


class Exchange:
    """One rank's view of the stages of its group.

    Args:
        device: of this rank; the CPU does as well, for threads of one process.
        own: this rank's stage.
        find: another rank's stage; asked once it has taken its first turn.
    """

    def __init__(
        self, device: torch.device, rank: int, size: int, own: Stage, find: Callable[[int], Stage]
    ) -> None:
        self.device = device
        self.rank = rank
        self.size = size
        #: of this group alone: it may wait for ever for a process that is gone
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        #: on the peers' devices: torch puts a copy between two devices on the source's stream
        self._sources: dict[torch.device, torch.cuda.Stream] = {}
        self._find = find
        self._stages: dict[int, Stage] = {}
        self._know(rank, own)

    def _know(self, rank: int, stage: Stage) -> None:
        self._stages[rank] = stage
        if self.stream is not None:
            stage.memory.record_stream(self.stream)
            there = stage.memory.device
            if there != self.device and there not in self._sources:
                self._sources[there] = torch.cuda.Stream(there)  # type: ignore[no-untyped-call]

    def slot(self, rank: int, piece: int, dtype: torch.dtype) -> torch.Tensor:
        """The elements of a rank's slot for a piece; another rank's from the second turn on."""
        start = piece % SLOTS * SLOT
        return self._stages[rank].memory[start : start + SLOT].view(dtype)

    def begin(self, tensors: list[torch.Tensor]) -> list[torch.cuda.Event]:
        """In the thread of the call: what the first turn must come behind.

        It is not waited for here: operations that are under way would wait too.
        """
        if self.stream is None:
            return []
        for tensor in tensors:
            tensor.record_stream(self.stream)
        devices = {tensor.device for tensor in tensors}
        return [torch.cuda.current_stream(device).record_event() for device in devices]

    @contextmanager
    def turn(self, number: int, behind: list[torch.cuda.Event]) -> Iterator[None]:
        """What is done inside comes behind all that the peers' tokens have told of.

        Args:
            number: of the turn in its operation.
            behind: what `begin` gave; the first turn comes behind it.
        """
        for rank in range(self.size) if number else ():
            if rank not in self._stages:
                self._know(rank, self._find(rank))
        if self.stream is None:
            yield
            return
        own = self._stages[self.rank].event
        assert own is not None
        if number:
            self.follow()
        else:
            for event in behind:
                self.stream.wait_event(event)
        with ExitStack() as streams:
            for stream in (*self._sources.values(), self.stream):
                streams.enter_context(on_stream(stream))
            yield
            own.record(self.stream)

    def follow(self) -> None:
        """Have this rank's stream wait for all that the peers have recorded."""
        for rank, stage in self._stages.items():
            if rank != self.rank and stage.event is not None and self.stream is not None:
                self.stream.wait_event(stage.event)

    def settle(self, tensors: list[torch.Tensor]) -> None:
        """Have this thread's current streams wait for the turns that were taken."""
        event = self._stages[self.rank].event
        if event is not None:
            for device in {tensor.device for tensor in tensors}:
                torch.cuda.current_stream(device).wait_event(event)

    def finish(self) -> bool:
        """Whether no peer reads this rank's stage any more; all operations must have ended well.

        False where that cannot be waited for: a peer may be gone before its device was done.
        """
        event, stream = self._stages[self.rank].event, self.stream
        if event is None or stream is None:
            return True
        event.record(stream)
        over = threading.Event()

        def wait() -> None:
            with on_stream(stream):
                event.synchronize()
            over.set()

        # CUDA has no wait with a time limit
        threading.Thread(target=wait, name="unisono-finish", daemon=True).start()
        return over.wait(_LINGER)


class Meeting(ABC):
    """An exchange while its group is open."""

    exchange: Exchange

    @abstractmethod
    def close(self, *, healthy: bool) -> None:
        """Let the stages go; `healthy` says that every operation has ended well."""


class Lobby:
    """Where ranks that are threads of one process find each other's stages."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stages: dict[tuple[str, int], Stage] = {}

    def meet(self, group: str, rank: int, size: int, device: torch.device) -> Meeting:
        """A rank's exchange with the others of a group, each on a device of this process."""
        memory = torch.empty(SLOTS * SLOT, dtype=torch.uint8, device=device)
        # made on a device where it is recorded first
        event = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        own = Stage(memory, event)
        with self._lock:
            self._stages[group, rank] = own
        exchange = Exchange(device, rank, size, own, lambda other: self._find(group, other))
        return _LobbyMeeting(self, group, exchange)

    def _find(self, group: str, rank: int) -> Stage:
        with self._lock:
            stage = self._stages.get((group, rank))
        if stage is None:  # it took its first turn, so that its own word of this is on the way
            raise GroupClosed(f"rank {rank} closed group {group} during operations", rank=rank)
        return stage

    def leave(self, group: str, rank: int) -> None:
        """The rank's stage is used no more."""
        with self._lock:
            self._stages.pop((group, rank), None)


class _LobbyMeeting(Meeting):
    def __init__(self, lobby: Lobby, group: str, exchange: Exchange) -> None:
        self.exchange = exchange
        self._lobby = lobby
        self._group = group

    def close(self, *, healthy: bool) -> None:
        self._lobby.leave(self._group, self.exchange.rank)
