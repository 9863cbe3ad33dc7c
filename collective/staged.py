"""An operation in stages, some of which another library carries out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from collective.descriptor import Descriptor
from collective.errors import CollectiveError
from collective.operation import Operation
from collective.program import Place, Program
from collective.reduction import Array, Fold
from collective.strategies.handed import Call
from collective.transfer import CollectiveOperation

if TYPE_CHECKING:
    from collective.communicator import Communicator

#: seconds that peers get to say why another library failed, before its own words have to do
_GRACE = 1.0


@dataclass(frozen=True)
class LocalCall:
    """A call as one of its members makes it: on these elements [start, stop) of these buffers."""

    call: Call
    places: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class StagedProgram:
    """What one rank does in each stage."""

    stages: tuple[Program | tuple[LocalCall, ...], ...]


@dataclass(frozen=True)
class Assignment:
    """What another library is to do now, and whom to tell.

    Attributes:
        calls: in this order.
        arrays: the buffers that they work in.
        fold: how values are combined.
        deadline: monotonic time.
        where: level, operation and rank, for messages.
        done: called, on any thread, with what failed or None.
    """

    calls: tuple[LocalCall, ...]
    arrays: Sequence[Array]
    fold: Fold | None
    deadline: float
    where: str
    done: Callable[[CollectiveError | None], None]


class Libraries(Protocol):
    """What makes the calls of other libraries; see `collective.libraries`."""

    def submit(self, assignment: Assignment) -> None:
        """Carry out later, behind what was submitted before."""

    def abandon(self) -> None:
        """Nothing more will come, and what is under way is of no use any more."""


def local_calls(calls: Sequence[Call], rank: int, places: Sequence[Place]) -> tuple[LocalCall, ...]:
    """The calls of `rank`; neighbouring slots of one buffer are taken together."""
    found = []
    for call in calls:
        if rank not in call.members:
            continue
        runs: list[tuple[int, int, int]] = []
        for slot in call.slots:
            place = places[slot]
            start, stop = place.start, place.start + place.count
            if runs and runs[-1][0] == place.buffer and runs[-1][2] == start:
                start = runs.pop()[1]
            runs.append((place.buffer, start, stop))
        found.append(LocalCall(call, tuple(runs)))
    return tuple(found)


class StagedOperation(Operation):
    """Runs stages one after the other; the first makes sure that all ranks are of one mind."""

    def __init__(
        self,
        communicator: Communicator,
        descriptor: Descriptor,
        timeout: float,
        program: StagedProgram,
        arrays: Sequence[Array],
        fold: Fold | None,
        libraries: Libraries,
    ) -> None:
        super().__init__(communicator, descriptor, timeout)
        self._stages = program.stages
        self._arrays = arrays
        self._fold = fold
        self._libraries = libraries
        self._at = -1
        self._transfer: CollectiveOperation | None = None
        self._answered = False

    def start(self) -> None:
        super().start()
        self._enter_next()

    def _enter_next(self) -> None:
        self._at += 1
        self._transfer = None
        self._answered = False
        if self.complete:
            return
        stage = self._stages[self._at]
        if isinstance(stage, Program):
            self._transfer = CollectiveOperation(
                self.communicator, self.descriptor, self.timeout, stage, self._arrays, self._fold
            )
            self._transfer.sequence = self.sequence
            self._transfer.start()
        elif stage:
            here, at = self.communicator, self._at
            where = f"{self.descriptor.operation} (operation {self.sequence})"
            self._libraries.submit(
                Assignment(
                    stage, self._arrays, self._fold, self.deadline,
                    f"{where} of group {here.name} at {here.label(here.rank)}",
                    lambda error: here.engine.post(lambda: self._answer(at, error)),
                )
            )  # fmt: skip
        else:
            self._answered = True

    def _answer(self, stage: int, error: CollectiveError | None) -> None:
        """On the thread that drives: the library is done with a stage."""
        if self.finished or stage != self._at:
            return
        if error is None:
            self._answered = True
            return
        # it sees a lost peer as early as the links do, but knows no more than an address
        self.failure = error
        self.deadline = min(self.deadline, time.monotonic() + _GRACE)

    @property
    def complete(self) -> bool:
        return self._at == len(self._stages)

    def advance(self) -> bool:
        moved = False
        while not self.complete:
            transfer = self._transfer
            if transfer is None:
                if not self._answered:
                    return moved
            else:
                before = transfer.sent
                moved = transfer.advance() or moved
                self.sent += transfer.sent - before
                if not transfer.complete:
                    return moved
                self.heard = self.heard or transfer.heard
            self._enter_next()
            moved = True
        return moved

    def _calls(self) -> list[Call]:
        """What another library has in hand."""
        stage = self._stages[self._at] if 0 <= self._at < len(self._stages) else ()
        return [] if isinstance(stage, Program) else [local.call for local in stage]

    @property
    def blind(self) -> bool:
        return self._transfer is None

    def missing(self) -> list[int]:
        if self._transfer is not None:
            return self._transfer.missing()
        members = {rank for call in self._calls() for rank in call.members}
        return sorted(members - {self.communicator.rank})

    def phase(self) -> str:
        if self._transfer is not None:
            return self._transfer.phase()
        calls = self._calls()
        return f"{calls[0].level} level by {calls[0].engine}" if calls else "done"

    def release(self) -> None:
        if self._transfer is not None:
            self._transfer.release()
        elif self._calls():
            self._libraries.abandon()
