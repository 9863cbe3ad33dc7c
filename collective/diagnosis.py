"""What is said when an operation cannot go on: which rank, on which node, in what, and why.

Pure functions from the state of a `Communicator` to an error, and from errors to the JSON of an
abort frame and back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from collective import errors
from collective.descriptor import Descriptor, readable
from collective.errors import (
    CollectiveError,
    DeadlineExceeded,
    Mismatch,
    OperationAborted,
    PeerLost,
    ProtocolError,
)
from collective.operation import Operation, again

if TYPE_CHECKING:
    from collective.communicator import Communicator

#: what follows for the group from a mismatch, and from a refusal
POISONED = "the group cannot be used any more: close it, and make a new one"
UNHARMED = "the group can still be used"
#: longest text of an error that travels in an abort frame
_TEXT = 4000  # 48 kB at most as JSON, and a control frame holds 64
_REPORTED = re.compile(r" \(reported by rank \d+\)$")


@dataclass
class Heard:
    """What is known of one peer.

    Attributes:
        sequence: the latest operation in which it was seen.
        at: monotonic time at which it last sent data or answered.
    """

    sequence: int = 0
    at: float = 0.0


def in_words(error: BaseException) -> str:
    """The type of an exception, and its text if it has one, as a traceback ends."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def named(operation: Operation | None) -> str:
    """An operation in words."""
    if operation is None:
        return "the group"
    return f"{operation.descriptor.operation} (operation {operation.sequence})"


def left_early(here: Communicator, peer: int, last: int, operation: Operation) -> PeerLost:
    """`peer` left in order after operation `last`, and a later one needs it."""
    return PeerLost(
        f"{here.label(peer)} left the group in order after operation {last}, but "
        f"{operation.descriptor.operation} is operation {operation.sequence}",
        rank=peer,
        node=here.nodes[peer],
        operation=operation.descriptor.operation,
        sequence=operation.sequence,
    )


def lost(here: Communicator, peer: int, reason: str, operation: Operation | None) -> PeerLost:
    """The connection of `peer` ended without a word."""
    phase = operation.phase() if operation is not None else None
    where = f" during {named(operation)}" if operation else ""
    return PeerLost(
        f"lost {here.label(peer)}{where}{f', {phase}' if phase else ''}: "
        f"its connection ended ({reason})",
        rank=peer,
        node=here.nodes[peer],
        operation=operation.descriptor.operation if operation else None,
        sequence=operation.sequence if operation else None,
        phase=phase,
    )


def absent(here: Communicator, peer: int) -> BaseException:
    """Why `peer`, whose connection has ended, cannot be asked for a message."""
    if here.error is not None:
        return again(here.error)
    if peer in here.left:
        how = f"{here.label(peer)} left the group in order after operation {here.left[peer]}"
    else:
        how = f"lost {here.label(peer)}: its connection ended"
    return PeerLost(
        f"{how}, before it was asked for a message",
        rank=peer,
        node=here.nodes[peer],
        operation="recv",
    )


def nonsense(here: Communicator, peer: int, error: ProtocolError) -> ProtocolError:
    """What `peer` sent cannot be understood; a link does not know whose it is."""
    if error.rank is not None:
        return error
    return ProtocolError(
        f"{here.label(peer)} sent what this rank does not understand: {error}",
        rank=peer,
        node=here.nodes[peer],
    )


def gave_up(
    here: Communicator, error: BaseException, operation: Operation | None
) -> OperationAborted:
    """An exception of this rank ended `operation`."""
    wrapped = OperationAborted(
        f"{here.label(here.rank)} gave up {named(operation)}: {in_words(error)}",
        rank=here.rank,
        node=here.nodes[here.rank],
        operation=operation.descriptor.operation if operation else None,
        sequence=operation.sequence if operation else None,
    )
    wrapped.__cause__ = error
    return wrapped


def ended(here: Communicator, reason: BaseException) -> OperationAborted:
    """This rank's program ends with an exception."""
    return OperationAborted(
        f"{here.label(here.rank)} ended after operation {here.completed} with {in_words(reason)}",
        rank=here.rank,
        node=here.nodes[here.rank],
    )


def mismatch(
    here: Communicator,
    operation: Operation,
    peer: int,
    sequence: int,
    theirs: bytes,
    ours: Descriptor | None = None,
) -> Mismatch:
    """`peer` runs something else under its number `sequence`; `theirs` is its descriptor.

    `ours` is that of the operation, or what is compared on the link to this peer.
    """
    at = f"operation {operation.sequence} of group {here.name}"
    if sequence != operation.sequence:
        at += f" (operation {sequence} on rank {peer})"
    called = readable((ours or operation.descriptor).data)
    return Mismatch(
        f"ranks disagree on {at}: {here.label(here.rank)} called "
        f"{called}, {here.label(peer)} called {readable(theirs)}; "
        f"{POISONED}",
        rank=peer,
        node=here.nodes[peer],
        operation=operation.descriptor.operation,
        sequence=operation.sequence,
    )


def overdue(
    here: Communicator, operation: Operation, heard: Mapping[int, Heard], asked_at: float
) -> DeadlineExceeded:
    """`operation` ran out of time; names who has not entered it, or stopped answering in it."""
    behind = [peer for peer in sorted(heard) if heard[peer].sequence < operation.sequence]
    waiting = operation.missing()
    silent = [peer for peer in behind if heard[peer].at < asked_at] or [
        peer for peer in waiting if heard[peer].at < asked_at
    ]
    text = f"{named(operation)} of group {here.name} did not finish within {operation.timeout:g} s"
    culprit: int | None = None
    if silent and silent[0] in behind:
        culprit = silent[0]
        text += (
            f": {here.label(culprit)} has not entered it (last known: operation "
            f"{heard[culprit].sequence}) and does not answer"
        )
    elif behind:
        culprit = behind[0]
        text += f": {here.label(culprit)} is still at operation {heard[culprit].sequence}"
    elif silent:
        culprit = silent[0]
        text += f": {here.label(culprit)} entered it but does not answer any more"
    elif waiting and (len(waiting) == 1 or not operation.blind):
        culprit = waiting[0]
        text += f": waiting for data from {here.label(culprit)}"
    return DeadlineExceeded(
        f"{text} ({operation.phase()})",
        rank=culprit,
        node=here.nodes[culprit] if culprit is not None else None,
        operation=operation.descriptor.operation,
        sequence=operation.sequence,
        phase=operation.phase(),
    )


def to_content(error: BaseException, reporter: object) -> dict[str, object]:
    """What an abort frame says of `error`, which rank `reporter` met first."""
    content: dict[str, object] = {
        "type": type(error).__name__,
        "message": str(error)[:_TEXT],
        "reporter": reporter,
    }
    if isinstance(error, CollectiveError):
        content.update(rank=error.rank, operation=error.operation, phase=error.phase)
    return content


def from_content(
    nodes: Sequence[str], peer: int, sequence: int, content: dict[str, object]
) -> CollectiveError:
    """The error of which an abort frame of `peer` tells, in a group on these nodes."""
    cls = getattr(errors, str(content.get("type")), OperationAborted)
    if not (isinstance(cls, type) and issubclass(cls, CollectiveError)):
        cls = OperationAborted
    rank, operation, phase = (content.get(name) for name in ("rank", "operation", "phase"))
    text = str(content.get("message"))
    reporter = content.get("reporter", peer)
    if reporter != rank and not _REPORTED.search(text):
        text += f" (reported by rank {reporter})"
    return cls(
        text,
        rank=rank if isinstance(rank, int) else None,
        node=nodes[rank] if isinstance(rank, int) and 0 <= rank < len(nodes) else None,
        operation=None if operation is None else str(operation),
        sequence=sequence or None,
        phase=None if phase is None else str(phase),
    )
