"""Every error that the library raises, in one tree.

::

    CollectiveError
    ├── Refused             this call was refused before its first frame; the group stays usable
    ├── Mismatch            ranks do not agree on what the operation is
    ├── PeerLost            a rank went away: killed, disconnected, or left early
    ├── DeadlineExceeded    an operation did not finish in time
    ├── OperationAborted    another rank gave up the operation, for the reason it names
    ├── GroupClosed         the group was closed, poisoned earlier, or belongs to another process
    ├── RendezvousFailed    the ranks of a group could not find or reach each other
    ├── LibraryFailed       another library, to which a level was handed, failed
    └── ProtocolError       a peer sent what this version does not understand

`Refused` leaves the group as it was, and so does what ends a download or a try to make the group's
links.  All others poison it: later calls raise the same error, which also stays in ``group.error``.
"""

from __future__ import annotations

__all__ = [
    "CollectiveError",
    "DeadlineExceeded",
    "GroupClosed",
    "LibraryFailed",
    "Mismatch",
    "OperationAborted",
    "PeerLost",
    "ProtocolError",
    "Refused",
    "RendezvousFailed",
]


class CollectiveError(RuntimeError):
    """Base of all errors; says which rank, node and operation it is about.

    Attributes:
        rank: the rank at fault, where one is known.
        node: the name of the node on which that rank runs.
        operation: the operation's name, such as ``all_reduce``.
        sequence: the operation's number in its group, counted from 1.
        phase: what the operation was doing, such as ``reduce-scatter step 2``.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        node: str | None = None,
        operation: str | None = None,
        sequence: int | None = None,
        phase: str | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.node = node
        self.operation = operation
        self.sequence = sequence
        self.phase = phase


class Refused(CollectiveError):
    """The call cannot be carried out as asked; nothing was sent and nothing was changed."""


class Mismatch(CollectiveError):
    """Two ranks issued different operations under the same sequence number."""


class PeerLost(CollectiveError):
    """A rank is gone: its process died, its connection broke, or it left before this operation."""


class DeadlineExceeded(CollectiveError, TimeoutError):
    """The operation did not finish within its timeout."""


class OperationAborted(CollectiveError):
    """Another rank gave the operation up; the message carries its reason."""


class GroupClosed(CollectiveError):
    """The group cannot be used: closed, or inherited through ``fork``."""


class RendezvousFailed(CollectiveError):
    """The ranks of a group did not find or reach each other in time."""


class LibraryFailed(CollectiveError):
    """Another library, which carried out a level of the operation, failed: in its words."""


class ProtocolError(CollectiveError):
    """A peer broke the wire format, or speaks another version of it."""
