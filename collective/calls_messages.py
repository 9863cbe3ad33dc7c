"""Calls between two ranks."""

from __future__ import annotations

import torch

from collective.arguments import check_rank, check_tag, check_timeout
from collective.communicator import Communicator
from collective.descriptor import describe
from collective.errors import PeerLost, Refused
from collective.issuing import Issuing, name_of
from collective.message import Message
from collective.reduction import Array, Buffer, check_tensor
from collective.work import Work


class MessageCalls(Issuing):
    """Send, and receive from a given rank or from any."""

    def send(
        self,
        tensor: torch.Tensor,
        dst: int,
        tag: int = 0,
        *,
        async_op: bool | None = None,
        timeout: float | None = None,
    ) -> Work:
        """Send `tensor` to rank `dst`, which receives it under the same tag.

        Raises:
            Refused: this rank or the other one cannot send or receive such a tensor; nothing was
                changed, and the call counts on both sides.
            CollectiveError: the send failed; the group cannot be used any more.
        """
        communicator = self._usable()
        dst, tag = check_rank(self, dst, "dst", other=True), check_tag(tag)
        try:
            check_timeout(timeout)
            check_tensor(tensor, "the tensor", written=False)
        except Refused as error:
            raise self._refuse_message(communicator, error, "send", dst, tag) from None
        array = Buffer(tensor).array
        message = self._message(communicator, array, "send", dst, tag, tensor, timeout)
        return self._issue_message(message, tensor, array, async_op)

    def recv(
        self,
        tensor: torch.Tensor,
        src: int | None = None,
        tag: int = 0,
        *,
        async_op: bool | None = None,
        timeout: float | None = None,
    ) -> Work:
        """Receive into `tensor` from rank `src`, or from any rank; see `Work.source_rank`.

        Raises:
            Refused, CollectiveError: as `send`; of a receive from any rank only this rank knows
                that it was refused.
        """
        communicator = self._usable()
        if src is not None:
            src = check_rank(self, src, "src", other=True)
        tag = check_tag(tag)
        try:
            check_timeout(timeout)
            check_tensor(tensor, "the tensor", written=True)
        except Refused as error:
            raise self._refuse_message(communicator, error, "recv", src, tag) from None
        limit = self.timeout if timeout is None else timeout
        for peer in range(self.size) if src is None else [src]:
            if peer != self.rank:
                try:
                    self._wiring.dial_messages(communicator, peer, limit)
                except PeerLost:
                    if src is not None or peer not in communicator.left:
                        raise  # else another one may send
        buffer = Buffer(tensor)
        message = self._message(communicator, buffer.array, "recv", src, tag, tensor, timeout)
        message.epilogue = buffer.commit
        return self._issue_message(message, tensor, buffer.array, async_op)

    def _message(
        self,
        communicator: Communicator,
        array: Array,
        kind: str,
        peer: int | None,
        tag: int,
        tensor: torch.Tensor,
        timeout: float | None,
    ) -> Message:
        limit = self.timeout if timeout is None else timeout
        dtype = name_of(tensor.dtype)
        return Message(communicator, describe(kind), limit, array, kind, peer, tag, dtype)

    def _refuse_message(
        self, communicator: Communicator, error: Refused, kind: str, peer: int | None, tag: int
    ) -> Refused:
        """Tell the other side of a send or receive, if it is known, that it does not take place."""
        node = self.nodes[self.rank]
        if peer is not None:
            told = Refused(
                f"rank {self.rank} on node {node} refused {kind} "
                f"{'to' if kind == 'send' else 'from'} rank {peer}, tag {tag}: {error}",
                rank=self.rank, node=node, operation=kind,
            )  # fmt: skip
            refuse = communicator.messaging.refuse
            self._wiring.engine.call(lambda: refuse(kind, peer, tag, told))
        error.operation, error.rank, error.node = kind, self.rank, node
        return error

    def _issue_message(
        self, message: Message, tensor: torch.Tensor, array: Array, async_op: bool | None
    ) -> Work:
        later = self.asynchronous if async_op is None else async_op
        work = Work(self, message.kind, message, tensor, array.nbytes, later)
        self._carry_out(message, work)
        return work
