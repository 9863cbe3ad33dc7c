"""Calls between two ranks."""

from __future__ import annotations

import torch

from collective.arguments import check_rank
from collective.communicator import Communicator
from collective.descriptor import describe
from collective.issuing import Issuing, name_of
from collective.messaging import Message
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
        """Send `tensor` to rank `dst`, which receives it under the same tag."""
        communicator = self._usable()
        check_rank(self, dst, "dst", other=True)
        check_tensor(tensor, "the tensor", written=False)
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
        """Receive into `tensor` from rank `src`, or from any rank; see `Work.source_rank`."""
        communicator = self._usable()
        check_tensor(tensor, "the tensor", written=True)
        limit = self.timeout if timeout is None else timeout
        if src is None:
            for peer in range(self.size):
                if peer != self.rank:
                    self._wiring.dial_messages(communicator, peer, limit)
        else:
            check_rank(self, src, "src", other=True)
            self._wiring.dial_messages(communicator, src, limit)
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

    def _issue_message(
        self, message: Message, tensor: torch.Tensor, array: Array, async_op: bool | None
    ) -> Work:
        later = self.asynchronous if async_op is None else async_op
        work = Work(self, message.kind, message, tensor, array.nbytes, later)
        self._carry_out(message, work)
        return work
