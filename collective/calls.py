"""The calls of a group: each checks its arguments, describes itself, and issues an operation.

Every call works in place on torch tensors and is the same on all ranks of the group, in the same
order.  Calls are synchronous by default; with ``async_op=True``, and on the peers of
`collective.local_group`, they return at once.
"""

from __future__ import annotations

from collective.calls_messages import MessageCalls
from collective.calls_moving import MovingCalls
from collective.calls_reducing import ReducingCalls


class Calls(ReducingCalls, MovingCalls, MessageCalls):
    """What `collective.group.Group` can be asked to do."""
