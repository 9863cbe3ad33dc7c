"""The tensor service: one rank exposes a tensor under an id, others download it when they need it.

Both sides are free of each other's order: a download waits for what is not exposed yet, and the
owner's main thread has no part in it.  Errors of the service leave the group as it was.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TypedDict

import torch

from collective.arguments import check_rank, check_timeout
from collective.environment import LONGEST_WAIT
from collective.errors import DeadlineExceeded, PeerLost, ProtocolError, Refused, RendezvousFailed
from collective.links.link import EDGE, EndOfLink, Inlet, note
from collective.links.wire import FrameKind, Header
from collective.program import SEGMENT
from collective.tensor_format import (
    MAX_JSON,
    Capability,
    Description,
    check_id,
    parse_json,
    serialise,
)
from collective.units import format_size, parse_size
from collective.wiring import Wiring

#: the largest tensor that a download takes, in bytes, unless it or the environment says otherwise
DEFAULT_LIMIT = 64 << 30
#: seconds between two tries after a connection that brought nothing; doubled up to the second
_PAUSES = 0.02, 0.5


class TensorService(ABC):
    """What `collective.group.Group` offers beside collectives."""

    rank: int
    size: int
    name: str
    epoch: int
    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    timeout: float
    _wiring: Wiring

    @abstractmethod
    def _check_usable(self) -> None:
        """Raise if the group is closed or poisoned; links need not be there yet."""

    @abstractmethod
    def _peer_ended(self, peer: int) -> bool:
        """Whether a link that this rank has to `peer` has ended."""

    @abstractmethod
    def _attend(self, bell: int) -> None:
        """Ring `bell`, an eventfd, when the group is poisoned or closed, until `_ignore`."""

    @abstractmethod
    def _ignore(self, bell: int) -> None:
        """Do not ring `bell` any more."""

    def expose(
        self,
        tensor: torch.Tensor,
        id: str,
        *,
        downloads: int | None = None,
        ttl: float | None = None,
        peers: Sequence[int] | None = None,
    ) -> None:
        """Offer `tensor` to the other ranks of the group under `id`; returns at once.

        A contiguous tensor on the cpu is sent from its own memory, so it must stay as it is until
        the downloads are over (a change is noticed by the downloader); any other tensor is copied
        once, here.

        Args:
            tensor: dense, of any dtype but the quantized ones, any strides, on the cpu or CUDA.
            id: its name in this group at this rank, of at most 200 characters; take a new one for
                each version, since whoever comes late is told that the old one has ended.
            downloads: how many times it can be downloaded; any number by default.
            ttl: seconds after which no further download begins; no end by default.
            peers: the ranks that may download it; all by default.

        Raises:
            Refused: the id is in use, or an argument has no meaning.
        """
        self._check_usable()
        if peers is not None:
            if not isinstance(peers, Iterable):
                raise Refused(f"peers is a list of ranks, or None for all, not {peers!r}")
            peers = [check_rank(self, peer, "peers") for peer in peers]
        description, data = serialise(tensor)
        self._wiring.tensors.expose(self.name, id, description, data, downloads, ttl, peers)

    def unexpose(self, id: str) -> bool:
        """Offer `id` no more; its downloads end.  Returns whether it was still offered."""
        return self._wiring.tensors.unexpose(self.name, id)

    def download(
        self,
        peer: int,
        id: str,
        *,
        timeout: float | None = None,
        limit: int | None = None,
    ) -> torch.Tensor:
        """The tensor that rank `peer` exposes under `id`, waiting until it does.

        A connection that is cut is made again, and the download goes on where it was.

        Args:
            peer: rank of the group; this very rank is allowed.
            id: as in `expose`.
            timeout: seconds for waiting and for the transfer; the group's by default.
            limit: the most bytes to take; by default ``UNISONO_DOWNLOAD_LIMIT``, else 64 GiB.

        Returns:
            A new contiguous tensor on the cpu.

        Raises:
            DeadlineExceeded: not exposed, or not all here, in time.
            Refused: it has ended (expired, withdrawn, downloads used up), is for other ranks, or
                is larger than `limit`.
            PeerLost: the peer is gone.
            ProtocolError: what came contradicts itself, or changed on the way.
        """
        self._check_usable()
        check_timeout(timeout)
        peer = check_rank(self, peer, "peer")
        check_id(id)
        if limit is None:
            limit = _limit_of_environment()
        elif type(limit) is not int or limit < 0:
            raise Refused(f"limit is {limit!r}; it is a number of bytes, 0 or more")
        limited = self.timeout if timeout is None else timeout
        download = _Download(self, peer, id, limit, limited)
        try:
            self._attend(download.bell)
            return self._fetch(download)
        finally:
            self._ignore(download.bell)
            os.close(download.bell)

    def _fetch(self, download: _Download) -> torch.Tensor:
        pause, most = _PAUSES
        while True:
            download.check()
            try:
                inlet = self._wiring.dial_tensors(
                    self.name,
                    self.ranks,
                    download.peer,
                    download.deadline,
                    download.label,
                    download.check,
                )
            except RendezvousFailed as error:
                download.check()
                if time.monotonic() >= download.deadline:
                    raise download.late() from error
                raise
            before = download.offset
            try:
                return download.run(inlet)
            except EndOfLink as end:
                download.reason = str(end)
            finally:
                inlet.close()
            if download.offset > before:
                pause = _PAUSES[0]
            else:
                # nobody tells when a peer that cuts at once will be well again, or is gone
                time.sleep(pause)
                pause = min(2 * pause, most)


def _limit_of_environment() -> int:
    text = os.environ.get("UNISONO_DOWNLOAD_LIMIT")
    if not text:
        return DEFAULT_LIMIT
    try:
        return parse_size(text)
    except ValueError as error:
        raise Refused(f"UNISONO_DOWNLOAD_LIMIT: {error}") from None


class _About(TypedDict):
    """What every error of a download tells beside its text."""

    rank: int
    node: str
    operation: str


class _Download:
    """One download, over as many connections as it takes."""

    def __init__(
        self, group: TensorService, peer: int, identifier: str, limit: int, timeout: float
    ) -> None:
        self.deadline = time.monotonic() + timeout
        self.label = f"rank {peer} on node {group.nodes[peer]}"
        #: how the last connection ended
        self.reason = ""
        #: bytes that are here, in whole frames
        self.offset = 0
        self._group = group
        self.peer = peer
        self._id = identifier
        self._limit = limit
        self._timeout = timeout
        self._number = secrets.token_hex(8)
        capability = Capability(group.name, group.epoch, peer, group.rank, identifier)
        self._token = capability.token(group._wiring.secret)
        self._description: Description | None = None
        self._tensor = torch.empty(0)
        self._bytes = memoryview(b"")
        self._checksum = 0
        #: rung when the group is over
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def check(self) -> None:
        """Raise if the peer is gone, the time is over, or nothing has come and the group is over.

        What is on its way still comes: others have no part in it.
        """
        if self._group._peer_ended(self.peer):
            raise PeerLost(
                f"lost {self.label} during the download of {self._id!r} ({self._progress()}): "
                f"its connection ended{f' ({self.reason})' if self.reason else ''}",
                **self._about(),
            )
        if time.monotonic() >= self.deadline:
            raise self.late()
        if self._description is None:
            self._group._check_usable()

    def late(self) -> DeadlineExceeded:
        """The error for a deadline that has passed."""
        if self._description is not None:
            text = f"the download of {self._id!r} from {self.label} did not finish within"
        else:
            text = f"{self.label} has not exposed {self._id!r}, or has no download left, within"
        again = f"; the last connection ended: {self.reason}" if self.reason else ""
        return DeadlineExceeded(
            f"{text} {self._timeout:g} s ({self._progress()}{again})", **self._about()
        )

    def _about(self) -> _About:
        return _About(rank=self.peer, node=self._group.nodes[self.peer], operation="download")

    def _progress(self) -> str:
        if self._description is None:
            return "nothing has come"
        return f"{format_size(self.offset)} of {format_size(self._description.nbytes)} have come"

    def run(self, inlet: Inlet) -> torch.Tensor:
        """Ask for what is missing on a fresh connection; the tensor when all is here.

        Raises:
            EndOfLink: the connection ended before.
        """
        epoch = self._group.epoch
        request: dict[str, object] = {
            "id": self._id, "download": self._number, "offset": self.offset, "token": self._token,
        }  # fmt: skip
        described = False
        with select.epoll() as poll:
            poll.register(inlet.endpoint.fileno(), EDGE)
            poll.register(self.bell, select.EPOLLIN | select.EPOLLET)
            inlet.say(FrameKind.FETCH, epoch, 0, json.dumps(request).encode())
            while True:
                header = self._header(inlet, poll)
                if header.epoch != epoch:
                    raise self._wrong(f"it speaks of epoch {header.epoch}, not {epoch}")
                if header.kind == FrameKind.REFUSAL:
                    reason = parse_json(self._small(inlet, poll, header)).get("reason")
                    raise Refused(
                        f"{self.label} does not give {self._id!r}: {reason}", **self._about()
                    )
                if not described:
                    if header.kind != FrameKind.TENSOR:
                        raise self._wrong(f"it sent a frame of kind {header.kind}")
                    self._describe(self._small(inlet, poll, header))
                    described = True
                else:
                    self._chunk(inlet, poll, header)
                assert self._description is not None
                if self.offset == self._description.nbytes:
                    return self._finish(inlet, poll)

    def _describe(self, data: bytes) -> None:
        try:
            description = Description.decode(data)
        except ProtocolError as error:
            raise self._wrong(f"it described {error}") from None
        if self._description is None:
            if description.nbytes > self._limit:
                raise Refused(
                    f"{self._id!r} of {self.label} has {description.nbytes} bytes, more than the "
                    f"limit of {self._limit}: pass limit=…, or set UNISONO_DOWNLOAD_LIMIT",
                    **self._about(),
                )
            self._tensor, self._bytes = description.empty()
            self._description = description
        elif self._description != description:
            raise self._wrong("it exposed another tensor under this id meanwhile")

    def _chunk(self, inlet: Inlet, poll: select.epoll, header: Header) -> None:
        rest = len(self._bytes) - self.offset
        good = header.kind == FrameKind.DATA and header.offset == self.offset
        if not good or not 0 < header.length <= min(SEGMENT, rest):
            raise self._wrong(
                f"it sent {header.length} bytes at {header.offset} in a frame of kind "
                f"{header.kind}; {rest} bytes are missing at {self.offset}"
            )
        place = self._bytes[self.offset : self.offset + header.length]
        while not inlet.read_into(place):
            self._wait(inlet, poll)
        self._checksum = zlib.crc32(place, self._checksum)
        self.offset += header.length

    def _finish(self, inlet: Inlet, poll: select.epoll) -> torch.Tensor:
        assert self._description is not None
        if self._checksum != self._description.checksum:
            raise self._wrong(
                "its checksum is wrong: it was changed while it was exposed, or damaged on the way"
            )
        inlet.say(FrameKind.DONE, self._group.epoch)
        while not inlet.flush():
            self._wait(inlet, poll)
        inlet.end()
        return self._tensor

    def _wrong(self, what: str) -> ProtocolError:
        return ProtocolError(
            f"the download of {self._id!r} from {self.label} failed: {what}", **self._about()
        )

    # -- waiting ------------------------------------------------------------------------------

    def _header(self, inlet: Inlet, poll: select.epoll) -> Header:
        while True:
            header = inlet.header()
            if header is not None:
                return header
            self._wait(inlet, poll)

    def _small(self, inlet: Inlet, poll: select.epoll, header: Header) -> bytes:
        if header.length > MAX_JSON:
            raise self._wrong(f"it sent a message of {header.length} bytes")
        room = bytearray(header.length)
        while not inlet.read_into(memoryview(room)):
            self._wait(inlet, poll)
        return bytes(room)

    def _wait(self, inlet: Inlet, poll: select.epoll) -> None:
        events = poll.poll(min(max(0.0, self.deadline - time.monotonic()), LONGEST_WAIT))
        if not events and time.monotonic() >= self.deadline:
            raise self.late()
        for descriptor, mask in events:
            if descriptor == self.bell:
                self.check()
                continue
            note(inlet, mask)
            if mask & select.EPOLLOUT:
                inlet.flush()
