"""How a group finds out whether an operation can stay on its ranks' devices, and issues it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from collective import device_ipc
from collective.arguments import Tensors
from collective.descriptor import Shape
from collective.device_calls import DeviceOperation, Pipeline
from collective.device_exchange import Exchange, Meeting
from collective.device_kernel import kernels_for
from collective.issuing import Issuing, described
from collective.schedule import Kind
from collective.strategies import Auto, Strategy
from collective.work import Result, Work

#: bytes from which on tensors stay on their devices: each turn costs tokens between all ranks
_FROM = 64 << 10


class DeviceIssuing(Issuing):
    """A rank of a group whose tensors may be on devices that the others can read.

    Attributes:
        strategy: any but ``auto`` sends tensors through host memory, as it says.
    """

    name: str
    ranks: tuple[int, ...]
    strategy: Strategy
    #: made at the first use, by all ranks at the same operation; False if it cannot be
    _meeting: Meeting | bool | None = None

    @property
    def on_devices(self) -> bool:
        """Whether ranks have opened their devices to each other."""
        return isinstance(self._meeting, Meeting)

    def _exchange(self, tensors: Sequence[torch.Tensor], nbytes: int) -> Exchange | None:
        """With the other ranks' devices, or None if the tensors go through host memory.

        All ranks decide alike, unless some of them have tensors on the CPU: they get a `Mismatch`.

        Args:
            tensors: all of the call, of one dtype.
            nbytes: of the operation, the same on all ranks.
        """
        if not tensors[0].is_cuda or nbytes < _FROM or self.size == 1:
            return None
        if not isinstance(self.strategy, Auto) or len(set(self.nodes)) > 1:
            return None
        if not kernels_for(tensors[0].dtype) or not all(tensor.is_cuda for tensor in tensors):
            return None
        if self._meeting is None:
            self._meeting = self._meet(tensors[0].device) or False
        return self._meeting.exchange if isinstance(self._meeting, Meeting) else None

    def _meet(self, device: torch.device) -> Meeting | None:
        """Open the devices of a node's ranks to each other."""
        if self._wiring.lobby is not None:
            return self._wiring.lobby.meet(self.name, self.rank, self.size, device)
        return device_ipc.meet(self, device) if self._wiring.near(self.ranks) else None

    def _end_meeting(self, *, healthy: bool) -> None:
        if isinstance(self._meeting, Meeting):
            self._meeting.close(healthy=healthy)

    @abstractmethod
    def all_gather(
        self,
        outputs: Tensors,
        input: torch.Tensor,
        *,
        async_op: bool | None = None,
        timeout: float | None = None,
    ) -> Work:
        """Give `input` of every rank to all ranks."""

    def _issue_line(
        self,
        kind: Kind,
        line: Pipeline,
        result: Result,
        nbytes: int,
        async_op: bool | None,
        timeout: float | None,
        *,
        dtype: torch.dtype,
        shape: Shape | None,
        root: int | None = None,
        reduction: str = "",
        prescale: float | None = None,
    ) -> Work:
        """Issue a collective that stays on the devices; the arguments are those of `_issue`."""
        descriptor = described(kind, "device", dtype, shape, root, reduction, prescale)
        limit = self.timeout if timeout is None else timeout
        operation = DeviceOperation(self._usable(), descriptor, limit, line)
        return self._hand_in(kind, operation, result, nbytes, async_op)
