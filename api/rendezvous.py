"""Programs started by hand meet here: each group waits until all its ranks have come."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy.orm import Session

from api.errors import Problem
from api.models import RendezvousEpoch
from api.schemas import RendezvousRequest
from api.storage import Storage


@dataclass
class _Meeting:
    world_size: int
    came: dict[str, RendezvousRequest] = field(default_factory=dict)
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    full: asyncio.Event = field(default_factory=asyncio.Event)


class Rendezvous:
    """All groups that are meeting, and for a while those that have met."""

    def __init__(self, storage: Storage, timeout: float) -> None:
        self._storage = storage
        self._timeout = timeout
        self._meetings: dict[str, _Meeting] = {}
        self._met: dict[tuple[str, str], dict[str, Any]] = {}

    async def join(
        self, group: str, request: RendezvousRequest, gone: asyncio.Event
    ) -> dict[str, Any]:
        """The answer for one participant, once its group is complete.

        Args:
            group: the group's name.
            request: who comes.
            gone: set when the participant's connection ends while it waits.

        Raises:
            Problem: another world size or a rank that is taken; or not all came in time.
        """
        answered = self._met.get((group, request.participant))
        if answered is not None:
            # The answer was lost on its way; the same program asks again.
            return answered
        meeting = self._meetings.setdefault(group, _Meeting(request.world_size))
        self._check(group, meeting, request)
        meeting.came[request.participant] = request
        if len(meeting.came) == meeting.world_size:
            del self._meetings[group]
            await self._complete(group, meeting)
        else:
            await self._wait(group, meeting, request, gone)
        return meeting.answers[request.participant]

    def _check(self, group: str, meeting: _Meeting, request: RendezvousRequest) -> None:
        if meeting.world_size != request.world_size:
            raise Problem(
                409,
                "world-size-differs",
                f"group {group!r} is meeting with a world size of {meeting.world_size}, not "
                f"{request.world_size}: give all its programs the same, or another group name",
            )
        for participant, other in meeting.came.items():
            if participant == request.participant:
                continue
            if request.rank is not None and other.rank == request.rank:
                raise Problem(
                    409,
                    "rank-taken",
                    f"rank {request.rank} of group {group!r} is taken by a program on node "
                    f"{other.node}",
                )

    async def _wait(
        self, group: str, meeting: _Meeting, request: RendezvousRequest, gone: asyncio.Event
    ) -> None:
        full = asyncio.ensure_future(meeting.full.wait())
        left = asyncio.ensure_future(gone.wait())
        try:
            await asyncio.wait(
                {full, left}, timeout=self._timeout, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            full.cancel()
            left.cancel()
            came = len(meeting.came)
            # It may have come again on a new connection, and then that one speaks for it.
            if not meeting.answers and meeting.came.get(request.participant) is request:
                del meeting.came[request.participant]
                if not meeting.came and self._meetings.get(group) is meeting:
                    del self._meetings[group]
        if request.participant not in meeting.answers:
            raise Problem(
                408,
                "rendezvous-timeout",
                f"{came} of {meeting.world_size} programs of group {group!r} came within "
                f"{self._timeout:g} s",
            )

    async def _complete(self, group: str, meeting: _Meeting) -> None:
        def work(session: Session) -> int:
            row = session.get(RendezvousEpoch, group)
            if row is None:
                row = RendezvousEpoch(group=group, epoch=0)
                session.add(row)
            row.epoch += 1
            return row.epoch

        epoch = await self._storage.write(work)
        ranks = assign_ranks(list(meeting.came.values()), meeting.world_size)
        members = [
            {"rank": rank, "node": who.node, "addresses": who.addresses, "port": who.port}
            for rank, who in sorted(ranks.items())
        ]
        lowest = ranks[0]
        shared = {
            "epoch": epoch,
            "secret": secrets.token_hex(16),
            "strategy": lowest.strategy,
            "members": members,
        }
        for rank, who in ranks.items():
            answer = {"rank": rank} | shared
            meeting.answers[who.participant] = answer
            self._met[group, who.participant] = answer
        asyncio.get_running_loop().call_later(
            self._timeout, self._forget, group, list(meeting.came)
        )
        meeting.full.set()

    def _forget(self, group: str, participants: list[str]) -> None:
        for participant in participants:
            self._met.pop((group, participant), None)


def assign_ranks(
    requests: list[RendezvousRequest], world_size: int
) -> dict[int, RendezvousRequest]:
    """Ranks as asked for; the others get the free ones, node by node."""
    ranks = {request.rank: request for request in requests if request.rank is not None}
    free = (rank for rank in range(world_size) if rank not in ranks)
    rest = [request for request in requests if request.rank is None]
    first = {request.node: index for index, request in reversed(list(enumerate(rest)))}
    rest.sort(key=lambda request: first[request.node])
    return ranks | dict(zip(free, rest, strict=False))
