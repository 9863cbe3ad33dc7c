"""A store of torch's whose contents travel over the links of a group."""

from __future__ import annotations

import hashlib
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch._C._distributed_c10d import Store

from collective.errors import CollectiveError
from collective.strategies.handed import Call

if TYPE_CHECKING:
    from collective.group import Group


class LinkStore(Store):
    """What the members of a process group tell each other while it is made.

    Gloo's keys end with the number of the member that sets them; NCCL's are set by the first one.
    """

    def __init__(self, group: Group, call: Call, deadline: float) -> None:
        super().__init__()
        self._group = group
        self._call = call
        self._deadline = deadline
        self._known: dict[str, bytes] = {}
        members = hashlib.sha256(repr(call.members).encode()).hexdigest()[:16]
        self._prefix = f"unisono/{call.engine}/{members}"
        self.error: CollectiveError | None = None

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._known[key] = data
        others = [rank for rank in self._call.members if rank != self._group.rank]
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._group.expose(tensor, f"{self._prefix}/{key}", downloads=len(others), peers=others)

    def get(self, key: str) -> bytes:
        if key not in self._known:
            number = int(key.rpartition("/")[2]) if self._call.engine == "gloo" else 0
            left = max(0.1, self._deadline - time.monotonic())
            try:
                tensor = self._group.download(
                    self._call.members[number], f"{self._prefix}/{key}", timeout=left
                )
            except CollectiveError as error:
                self.error = error
                raise
            self._known[key] = tensor.numpy().tobytes()
        return self._known[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._known for key in keys)
