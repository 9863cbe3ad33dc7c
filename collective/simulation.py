"""Runs a schedule's dataflow over the links and machines of a topology, event by event.

When a segment may leave and when it may land is what `compile_program` says, to the engine as to
the simulation.  Lanes that share a way take turns, segment by segment.  What is not modelled:
headers, and senders that stop because their receiver's buffers are full.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import accumulate, count
from typing import Any

from collective.cost import Link, Timing, Topology
from collective.program import SEGMENT, Part, Place, compile_program
from collective.schedule import Schedule


def simulate(
    schedule: Schedule,
    topology: Topology,
    sizes: tuple[int, ...],
    segment: int = SEGMENT,
    *,
    joined: bool = False,
) -> Timing:
    """Run `schedule` on `topology`.

    Args:
        schedule: of as many ranks as the topology has.
        topology: where its ranks are.
        sizes: bytes of each of the user's slots (see `slot_sizes`).
        segment: bytes per segment.
        joined: slots lie one behind the other (see `compile_program`).
    """
    if schedule.ranks != topology.ranks:
        raise ValueError(
            f"{schedule.name!r} is for {schedule.ranks} ranks, the topology has {topology.ranks}"
        )
    if segment < 1:
        raise ValueError(f"a segment has at least 1 byte, not {segment}")
    return _Simulation(schedule, topology, sizes, segment, joined).run()


class _Way:
    """A resource that serves one segment after the other, in order of their coming."""

    __slots__ = ("busy", "free_at", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.free_at = 0.0
        self.busy = 0.0

    def take(self, now: float, seconds: float) -> float:
        """When the way is taken, from `now` on, for `seconds`."""
        start = max(now, self.free_at)
        self.free_at = start + seconds
        self.busy += seconds
        return start


class _Thread:
    """The one thread of a rank: what it has to do, in order; sends before receives.

    A rank takes in no more than its buffers hold before it sends again, so what it has to send
    never waits for all that others have sent already.
    """

    __slots__ = ("busy", "landings", "sends", "working")

    def __init__(self) -> None:
        self.sends: deque[_Job] = deque()
        self.landings: deque[_Job] = deque()
        self.working = False
        self.busy = 0.0


class _Cores:
    """The cores of a node, for which its threads queue."""

    __slots__ = ("busy", "free", "number", "queue")

    def __init__(self, number: int) -> None:
        self.number = self.free = number
        self.queue: deque[_Thread] = deque()
        self.busy = 0.0


class _Lane:
    """What one rank sends to another, in order."""

    __slots__ = ("arrived", "blocked", "dst", "into", "link", "out", "parts", "place", "receives",
                 "segment", "sending", "src", "to_land", "to_land_segment")  # fmt: skip

    def __init__(
        self, src: int, dst: int, link: Link | None, out: _Way, into: _Way, parts: list[Part],
        receives: list[Part],
    ) -> None:  # fmt: skip
        self.src = src
        self.dst = dst
        #: None for local moves
        self.link = link
        self.out = out
        self.into = into
        self.parts = parts
        self.receives = receives
        # the next segment to send, and the next one to land
        self.place = self.segment = 0
        self.to_land = self.to_land_segment = 0
        #: segments that have come and have not landed
        self.arrived = 0
        #: a segment is being made ready or queues for the way out: lanes take turns
        self.sending = False
        #: the next segment to land is in some list of waiting ones
        self.blocked = False


#: what may go on now, and at which lane
_Waiting = tuple[Callable[[_Lane], None], _Lane]
#: seconds on a core, and what happens then
_Job = tuple[float, Callable[[], None]]


class _Simulation:
    def __init__(
        self,
        schedule: Schedule,
        topology: Topology,
        sizes: tuple[int, ...],
        segment: int,
        joined: bool,
    ) -> None:
        self._now = 0.0
        self._topology = topology
        self._machine = topology.machine
        self._programs = [
            compile_program(schedule, rank, _places(schedule, rank, sizes), segment, joined)
            for rank in range(schedule.ranks)
        ]
        self._left = [[0] * len(program.sends) for program in self._programs]
        self._landed = [[0] * len(program.receives) for program in self._programs]
        #: per rank, by number of a send or a receive: who waits for a segment of it
        self._for_left: list[dict[int, list[_Waiting]]] = [{} for _ in self._programs]
        self._for_landed: list[dict[int, list[_Waiting]]] = [{} for _ in self._programs]
        self._begun = [not self._machine.per_call] * schedule.ranks
        self._done = [0.0] * schedule.ranks
        self._sent = [0] * schedule.ranks
        self._ways: dict[str, _Way] = {}
        self._threads = [_Thread() for _ in range(schedule.ranks)]
        self._cores = [_Cores(self._machine.cores or len(node)) for node in topology.nodes]
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()
        self._awake: list[_Waiting] = []
        self._lanes = [
            self._lane(rank, peer, order)
            for rank, program in enumerate(self._programs)
            for peer, order in program.outgoing.items()
        ]

    def _lane(self, rank: int, peer: int, order: list[int]) -> _Lane:
        node, other = self._topology.node_of[rank], self._topology.node_of[peer]
        link: Link | None
        if rank == peer:
            link, names = None, (f"memory {rank}", f"memory {rank}")
        elif node == other:
            link, names = self._topology.local, (f"device {rank} out", f"device {peer} in")
        else:
            link, names = self._topology.between, (f"card {node} out", f"card {other} in")
        out, into = (self._ways.setdefault(name, _Way(name)) for name in names)
        parts = [self._programs[rank].sends[index] for index in order]
        receiver = self._programs[peer]
        receives = [receiver.receives[index] for index in receiver.incoming[rank]]
        return _Lane(rank, peer, link, out, into, parts, receives)

    def run(self) -> Timing:
        if self._machine.per_call:
            for rank in range(len(self._programs)):
                self._handle(rank, (self._machine.per_call, partial(self._begin, rank)))
        else:
            self._awake = [(self._send, lane) for lane in reversed(self._lanes)]
        self._go_on()
        while self._events:
            self._now, _, event, arguments = heapq.heappop(self._events)
            event(*arguments)
            self._go_on()
        for lane in self._lanes:
            if lane.to_land < len(lane.receives):
                raise ValueError(
                    f"rank {lane.dst} waits for rank {lane.src} for ever: prove the schedule"
                )
        busy = {way.name: way.busy for way in self._ways.values() if way.busy}
        busy |= {f"thread {r}": t.busy for r, t in enumerate(self._threads) if t.busy}
        busy |= {f"cores {n}": c.busy / c.number for n, c in enumerate(self._cores) if c.busy}
        return Timing(max(self._done), tuple(self._done), tuple(self._sent), busy)

    def _begin(self, rank: int) -> None:
        """The rank has made its call."""
        self._done[rank] = self._now
        self._begun[rank] = True
        self._awake += [(self._send, lane) for lane in reversed(self._lanes) if lane.src == rank]

    def _go_on(self) -> None:
        while self._awake:
            step, lane = self._awake.pop()
            step(lane)

    def _at(self, time: float, event: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (time, next(self._order), event, arguments))

    # -- threads and cores --------------------------------------------------------------------

    def _handle(self, rank: int, job: _Job, *, sends: bool = False) -> None:
        """Have the rank's thread do something after all of its kind that it has to do already."""
        thread, cores = self._threads[rank], self._cores[self._topology.node_of[rank]]
        (thread.sends if sends else thread.landings).append(job)
        if not thread.working:
            thread.working = True
            cores.queue.append(thread)
            self._employ(cores)

    def _employ(self, cores: _Cores) -> None:
        while cores.free and cores.queue:
            thread = cores.queue.popleft()
            seconds, event = (thread.sends or thread.landings).popleft()
            cores.free -= 1
            cores.busy += seconds
            thread.busy += seconds
            self._at(self._now + seconds, self._has_done, thread, cores, event)

    def _has_done(self, thread: _Thread, cores: _Cores, event: Callable[[], None]) -> None:
        cores.free += 1
        thread.working = bool(thread.sends or thread.landings)
        if thread.working:
            cores.queue.append(thread)
        self._employ(cores)
        event()

    # -- sending ------------------------------------------------------------------------------

    def _send(self, lane: _Lane) -> None:
        """Send the lane's next segment if it may leave."""
        if lane.sending or lane.place == len(lane.parts) or not self._begun[lane.src]:
            return
        part, segment, rank = lane.parts[lane.place], lane.segment, lane.src
        landed = self._landed[rank]
        for index in part.after:
            if landed[index] <= segment:
                self._for_landed[rank].setdefault(index, []).append((self._send, lane))
                return
        receives = self._programs[rank].receives
        for index in part.after_all:
            if landed[index] < len(receives[index].segments):
                self._for_landed[rank].setdefault(index, []).append((self._send, lane))
                return
        lane.sending = True
        machine = self._machine
        if lane.link is not None and (machine.per_segment or machine.per_byte_sent):
            start, stop = part.segments[segment]
            seconds = machine.per_segment + machine.per_byte_sent * (stop - start)
            self._handle(rank, (seconds, partial(self._goes_out, lane, part)), sends=True)
        else:
            self._goes_out(lane, part)

    def _goes_out(self, lane: _Lane, part: Part) -> None:
        start, stop = part.segments[lane.segment]
        lane.segment += 1
        if lane.segment == len(part.segments):
            lane.place, lane.segment = lane.place + 1, 0
        if lane.link is None:  # costs what its landing costs
            self._at(self._now, self._has_left, lane, part)
            self._at(self._now, self._has_come, lane)
            self._at(self._now, self._turn_over, lane)
            return
        self._sent[lane.src] += stop - start
        seconds = lane.link.seconds(stop - start)
        begun = lane.out.take(self._now, seconds)
        # the next one is made ready while this one is on its way
        self._at(begun, self._turn_over, lane)
        self._at(begun + seconds, self._has_left, lane, part)
        self._at(begun + lane.link.latency, self._comes, lane, seconds)

    def _turn_over(self, lane: _Lane) -> None:
        lane.sending = False
        self._awake.append((self._send, lane))

    def _has_left(self, lane: _Lane, part: Part) -> None:
        """What waited for the segment's place may land."""
        rank = lane.src
        self._left[rank][part.index] += 1
        self._done[rank] = max(self._done[rank], self._now)
        self._awake += self._for_left[rank].pop(part.index, ())

    # -- receiving ----------------------------------------------------------------------------

    def _comes(self, lane: _Lane, seconds: float) -> None:
        """The segment's first byte is at the receiver's way in, which it takes for `seconds`."""
        self._at(lane.into.take(self._now, seconds) + seconds, self._has_come, lane)

    def _has_come(self, lane: _Lane) -> None:
        lane.arrived += 1
        if not lane.blocked:
            self._land(lane)

    def _land(self, lane: _Lane) -> None:
        """Put what has come into its place, as far as the place is free."""
        lane.blocked = False
        rank = lane.dst
        landed, left = self._landed[rank], self._left[rank]
        while lane.arrived:
            part, segment = lane.receives[lane.to_land], lane.to_land_segment
            for index in part.after:
                if landed[index] <= segment:
                    self._for_landed[rank].setdefault(index, []).append((self._land, lane))
                    lane.blocked = True
                    return
            for index in part.after_sends:
                if left[index] <= segment:
                    self._for_left[rank].setdefault(index, []).append((self._land, lane))
                    lane.blocked = True
                    return
            lane.arrived -= 1
            lane.to_land_segment += 1
            if lane.to_land_segment == len(part.segments):
                lane.to_land, lane.to_land_segment = lane.to_land + 1, 0
            if self._machine.free:
                self._has_landed(lane, part)
            else:
                start, stop = part.segments[segment]
                seconds = self._machine.per_segment + self._machine.per_byte * (stop - start)
                self._handle(rank, (seconds, partial(self._has_landed, lane, part)))

    def _has_landed(self, lane: _Lane, part: Part) -> None:
        rank = lane.dst
        self._landed[rank][part.index] += 1
        self._done[rank] = max(self._done[rank], self._now)
        self._awake += self._for_landed[rank].pop(part.index, ())


def _places(schedule: Schedule, rank: int, sizes: tuple[int, ...]) -> list[Place | None]:
    ends = [*accumulate(sizes, initial=0)]
    places: list[Place | None] = [
        Place(0, start, size) for start, size in zip(ends[:-1], sizes, strict=True)
    ]
    start = 0
    for like in schedule.scratch_like(rank):
        places.append(None if like is None else Place(1, start, sizes[like]))
        start += 0 if like is None else sizes[like]
    return places
