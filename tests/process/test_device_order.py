"""What orders the work of devices: the host runs ahead, and every order that events allow is right.

A device is modelled here: its streams take work and waits at once, and do them much later, in any
order that the waits leave open.  Threads, tokens, exchanges and pipelines are the real ones.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import local
from typing import Any

import pytest
import torch
from thread_ranks import ThreadRanks

from collective import device_calls, device_exchange, device_kernel
from collective.device_calls import Pipeline
from collective.device_exchange import Exchange, Meeting, Stage
from collective.device_issuing import DeviceIssuing
from collective.group import Group

pytestmark = pytest.mark.timeout(60)

N = 3
_here = local()


class Stream:
    """Work and waits, in order; `ready` says whether the first of them can be done now."""

    def __init__(self) -> None:
        self.work: deque[tuple[Callable[[], bool], Callable[[], object]]] = deque()
        #: of operations, not done yet
        self.steps = 0

    def wait_event(self, event: Event) -> None:
        done = event.record_now
        self.work.append((lambda: done[0], lambda: None))

    def put(self, what: Callable[[], object]) -> None:
        self.work.append((lambda: True, what))

    def put_step(self, step: Callable[[], object]) -> None:
        def take() -> None:
            step()
            self.steps -= 1

        self.steps += 1
        self.put(take)


class Event:
    """Remembers the last record when it is waited for, as CUDA's do."""

    def __init__(self) -> None:
        self.record_now = [True]

    def record(self, stream: Any) -> None:
        done = [False]
        self.record_now = done
        stream.put(lambda: done.__setitem__(0, True))

    def synchronize(self) -> None:
        """CUDA makes a context on a thread's device where it has none: not on one of no stream."""
        assert _here.stream is not None


class Lost(Event):
    """Of a process that has ended: CUDA does not define what its use does."""

    @property
    def record_now(self) -> list[bool]:  # type: ignore[override]
        raise AssertionError("an event of a process that has ended")

    @record_now.setter
    def record_now(self, _: list[bool]) -> None:
        pass


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    _here.stream = stream
    yield


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """The streams of all exchanges, on which steps of pipelines wait to be done."""
    made: list[Stream] = []
    meet = device_exchange.Lobby.meet

    def meet_on_device(lobby: Any, *arguments: Any) -> Meeting:
        meeting = meet(lobby, *arguments)
        exchange = meeting.exchange
        stage = Stage(exchange._stages[exchange.rank].memory, Event())  # type: ignore[arg-type]
        lobby._stages[arguments[0], exchange.rank] = exchange._stages[exchange.rank] = stage
        exchange.stream = Stream()  # type: ignore[assignment]
        made.append(exchange.stream)  # type: ignore[arg-type]
        return meeting

    def exchange(group: Any, tensors: Sequence[torch.Tensor], nbytes: int) -> Exchange:
        group._meeting = group._meeting or group._meet(tensors[0].device)
        found: Exchange = group._meeting.exchange
        return found

    def later(step: Callable[[int], None]) -> Callable[[int], None]:
        return lambda piece: _here.stream.put_step(lambda: step(piece))

    begin = Pipeline.__init__

    def begin_later(line: Pipeline, group: Exchange, pieces: int, steps: Any, *rest: Any) -> None:
        begin(line, group, pieces, [later(step) for step in steps], *rest)

    monkeypatch.setattr(device_exchange.Lobby, "meet", meet_on_device)
    monkeypatch.setattr(DeviceIssuing, "_exchange", exchange)
    monkeypatch.setattr(Pipeline, "__init__", begin_later)
    monkeypatch.setattr(
        Exchange, "_know", lambda self, rank, stage: self._stages.update({rank: stage})
    )
    monkeypatch.setattr(Exchange, "begin", lambda self, tensors: [])
    monkeypatch.setattr(Exchange, "settle", lambda self, tensors: None)
    monkeypatch.setattr(device_exchange, "on_stream", on_stream)
    monkeypatch.setattr(device_kernel, "cupy", lambda: None)
    for module in (device_exchange, device_calls):
        monkeypatch.setattr(module, "SLOT", 4096)
    return made


@pytest.mark.parametrize("seed", range(8))
def test_every_order_that_events_allow_is_right(streams: list[Stream], seed: int) -> None:
    """All hosts have finished five operations before any device begins the first."""
    count = 5000

    def call(group: Group) -> Callable[[], None]:
        rank = group.rank
        ramp = torch.arange(count, dtype=torch.float64)
        tensors = [ramp * (rank + index) for index in range(3)]
        gathered, output = torch.zeros(N * count).double(), torch.zeros(count).double()
        group.all_reduce(tensors[0])
        group.broadcast(tensors[1], 1)
        group.all_gather(gathered, ramp + rank)
        group.reduce_scatter(output, torch.cat([ramp * (rank + part) for part in range(N)]))
        group.all_reduce(tensors[2])

        def check() -> None:
            assert torch.equal(tensors[0], ramp * sum(range(N)))
            assert torch.equal(tensors[1], ramp * 2)
            assert torch.equal(gathered, torch.cat([ramp + other for other in range(N)]))
            assert torch.equal(output, ramp * sum(other + rank for other in range(N)))
            assert torch.equal(tensors[2], ramp * sum(other + 2 for other in range(N)))

        return check

    with ThreadRanks(N) as ranks:
        checks = ranks.run(call)
    carry_out(streams, seed)
    for check in checks:
        check()


@pytest.mark.parametrize("seed", range(4))
def test_a_stage_that_is_given_back_is_read_by_nobody(streams: list[Stream], seed: int) -> None:
    """Who has seen the last operation end waits for the peers' devices, though they have left."""

    def call(group: Group) -> Exchange:
        for _ in range(2):
            group.all_reduce(torch.ones(3000))
        assert isinstance(group._meeting, Meeting)
        return group._meeting.exchange

    with ThreadRanks(N) as ranks:
        exchanges = ranks.run(call)
    at_the_end: list[int] = []
    for exchange in exchanges:
        for rank in set(range(N)) - {exchange.rank}:
            exchange._stages[rank] = Stage(exchange._stages[rank].memory, Lost())  # type: ignore[arg-type]
        assert exchange.finish()
        exchange.stream.put(  # type: ignore[union-attr]
            lambda: at_the_end.append(sum(stream.steps for stream in streams))
        )
    carry_out(streams, seed)
    assert at_the_end == [0] * N


def carry_out(streams: list[Stream], seed: int) -> None:
    """Do all work in an order that the waits allow; one stream runs far ahead where it can."""
    choose = random.Random(seed)
    favourites = choose.sample(streams, N)
    while any(stream.work for stream in streams):
        able = [stream for stream in favourites if stream.work and stream.work[0][0]()]
        assert able, "the devices wait for each other"
        stream = able[0] if choose.random() < 0.9 else choose.choice(able)
        stream.work.popleft()[1]()
