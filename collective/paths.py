"""How long the shapes of which strategies consist take: swaps, rings, trees, shares.

Each is followed along its longest path: hops one after the other, and of tensors with many segments
the resource that each segment holds the longest.  See `collective.estimate`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from collective.cost import Link, Machine
from collective.program import SEGMENT
from collective.schedule import Kind


@dataclass(frozen=True)
class Cost:
    """Seconds along the longest path, and seconds of a core of all ranks together."""

    path: float = 0.0
    work: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.path + other.path, self.work + other.work)


class Message:
    """A message of `nbytes`, in `slots` places that do not lie together, on one link."""

    __slots__ = ("again", "count", "held", "hop", "receive", "send", "wire")

    def __init__(self, link: Link, machine: Machine, nbytes: float, slots: float = 1) -> None:
        #: segments
        self.count = slots * max(1, ceil(nbytes / slots / SEGMENT))
        segment = nbytes / self.count
        #: of each: seconds of the sender's core, of the receiver's, and of the link
        self.send = machine.per_segment + segment * machine.per_byte_sent
        self.receive = machine.per_segment + segment * machine.per_byte
        self.wire = link.seconds(segment)
        #: of its receiver's core, to put it into its place out of a place beside it
        self.again = segment * machine.per_byte
        #: segments that need no such place, since they wait on the link
        self.held = link.held
        #: from the send of one segment to its landing
        self.hop = self.send + link.latency + self.wire + self.receive

    def rest(self, sent: float, received: float) -> float:
        """After the first one, for a rank that sends and receives so many messages at a time."""
        return (self.count - 1) * self.each(sent, received)

    def each(self, sent: float, received: float) -> float:
        """What holds such a segment up the longest: a way of the card, or the rank's thread."""
        thread = sent * self.send + received * self.receive
        return max(max(sent, received) * self.wire, thread)

    def crowd(self, messages: int) -> float:
        """A rank sends so many messages and receives as many, all of them at once."""
        segments = messages * self.count
        between = max(self.wire, self.send, self.receive)
        # the last one to be sent has still to come
        away = self.hop - self.send - self.receive
        thread = segments * (self.send + self.receive) + away
        return max(self.hop + (segments - 1) * between, thread)

    def swap(self) -> float:
        """Two ranks sum each other's whole tensors, each in its own place.

        What comes waits beside it until the own segment has left, but where that is the only one,
        or the link holds it so long.
        """
        beside = max(0, self.count - self.held) if self.count > 1 else 0
        return self.crowd(1) + beside * self.again

    def work(self, messages: float) -> float:
        """Of both ends, for so many messages."""
        return messages * self.count * (self.send + self.receive)


#: makes messages of a number of bytes, in a number of slots
Maker = Callable[..., Message]


def swaps(message: Maker, ranks: int, steps: list[tuple[float, int]]) -> Cost:
    """Steps in which everyone sends and receives as much (bytes, slots)."""
    total = Cost()
    for nbytes, slots in steps:
        one = message(nbytes, slots)
        total += Cost(one.crowd(1), one.work(ranks))
    return total


def everyone(one: Message, ranks: int, own: int = 0) -> Cost:
    """Everyone sends a message to each other rank, and moves `own` such ones in memory."""
    if ranks < 2:
        return Cost()
    path = one.crowd(ranks - 1) + own * one.count * one.receive
    return Cost(path, one.work(ranks * (ranks - 1)))


def ring(message: Maker, ranks: int, nbytes: float, rounds: int) -> Cost:
    steps = rounds * (ranks - 1)
    one = message(nbytes / ranks)
    step = max(one.hop, one.count * one.each(1, 1))
    return Cost((steps - 1) * step + one.hop + one.rest(1, 1), one.work(ranks * steps))


def one_tree(message: Maker, ranks: int, arity: int, nbytes: float, ways: str) -> Cost:
    """Up, down, or both behind each other, along one tree (`strategies.tree`)."""
    arity = max(1, min(arity, ranks - 1))
    one = message(nbytes)
    up, down = "up" in ways, "down" in ways
    path = up * _up(one, ranks, arity) + down * _down(one, ranks, arity)
    # the inner ranks have a parent beside their children
    parent = int(ranks > arity + 1)
    path += one.rest(arity * down + parent * up, arity * up + parent * down)
    return Cost(path, one.work((ranks - 1) * (up + down)))


def binomial(message: Maker, ranks: int, share: float, ways: str) -> Cost:
    """A gather or a scatter: messages of 1, 2, 4 … shares, and one in memory at who passes on."""
    total = Cost()
    distance = 1
    while distance < ranks:
        one = message(share * min(distance, ranks - distance))
        at_once = ranks // (2 * distance) + int(ranks % (2 * distance) > distance)
        total += Cost(one.hop + one.rest("down" in ways, "up" in ways), one.work(at_once))
        distance *= 2
    if ranks > 2:
        own = message(share)
        total += Cost(own.count * own.receive, own.count * own.receive * (ranks // 2 - 1))
    return total


def _up(one: Message, ranks: int, arity: int) -> float:
    """Until the first segment of all is at the root of a tree."""
    free = [0.0] * ranks  # the way into each place
    ready = [0.0] * ranks
    away = one.hop - one.send - one.wire - one.receive
    for place in range(ranks - 1, 0, -1):
        parent = (place - 1) // arity
        free[parent] = max(ready[place] + one.send + away, free[parent]) + one.wire
        ready[parent] = max(free[parent], ready[parent]) + one.receive
    return ready[0]


def _down(one: Message, ranks: int, arity: int) -> float:
    """Until the first segment of the root is everywhere."""
    ready = [0.0] * ranks
    free = [0.0] * ranks  # the way out of each place
    away = one.hop - one.send - one.wire
    for place in range(1, ranks):
        parent, number = divmod(place - 1, arity)
        free[parent] = max(ready[parent] + (number + 1) * one.send, free[parent]) + one.wire
        ready[place] = free[parent] + away
    return max(ready)


def two_trees(message: Maker, ranks: int, nbytes: float, ways: str) -> Cost:
    """Each rank is an inner one of one tree and a leaf of the other; half of the tensor each."""
    one = message(nbytes / 2)
    both = ("up" in ways) + ("down" in ways)
    # binary trees in order of places, below a root of one child
    depth = (ranks - 1).bit_length()
    path = both * (depth * one.hop + (depth - 1) * max(one.wire, one.send, one.receive))
    if ranks > 2:
        path += one.rest(2 * both, 2 * both)
    else:  # both halves between the same two
        path += one.wire + (one.count - 1) * max(2 * one.wire, one.each(both, both))
    return Cost(path, one.work(2 * (ranks - 1) * both))


def _pairs(
    message: Maker, ranks: int, inwards: tuple[float, int], swaps: list[tuple[float, int]],
    outwards: tuple[float, int], *, whole: bool = False,
) -> Cost:  # fmt: skip
    """Swaps at distance 1, 2, 4 … (bytes, slots) among a power of two of ranks.

    The ranks beyond it fold in before, each to another speaker, and get the result after.
    """
    power = 1 << (ranks.bit_length() - 1)
    more = ranks - power
    into, out = message(*inwards), message(*outwards)
    # when each speaker has what it has to swap next: those that stand alone need not wait
    ready = [into.hop + into.rest(1, 0) if place < more else 0.0 for place in range(power)]
    work = more * (into.work(1) + out.work(1))
    distance = 1
    for nbytes, slots in swaps:
        one = message(nbytes, slots)
        takes = one.swap() if whole else one.crowd(1)
        ready = [max(ready[place], ready[place ^ distance]) + takes for place in range(power)]
        work += one.work(power)
        distance = distance * 2 if distance * 2 < power else 1
    path = max(ready)
    if more:
        path = max(path, max(ready[:more]) + out.hop + out.rest(1, 0))
    return Cost(path, work)


def halving(message: Maker, ranks: int, nbytes: float, rounds: int, joined: bool) -> Cost:
    power = 1 << (ranks.bit_length() - 1)
    steps = []
    distance = 1
    while distance < power:
        slots = 1 if joined else distance * ranks // power
        steps.append((nbytes * distance / power, slots))
        distance *= 2
    if rounds == 2:
        return _pairs(message, ranks, (nbytes, 1), steps[::-1] + steps, (nbytes, 1))
    share = nbytes / ranks
    # what is handed out lies before and behind the slot of who gets it
    others = min(ranks - 1, 2) if joined else ranks - 1
    return _pairs(message, ranks, (share, 1), steps, (nbytes - share, others))


def doubling(message: Maker, ranks: int, nbytes: float) -> Cost:
    whole = (nbytes, 1)
    return _pairs(message, ranks, whole, [whole] * (ranks.bit_length() - 1), whole, whole=True)


def bruck(message: Maker, ranks: int, nbytes: float, rounds: int, joined: bool) -> Cost:
    total = Cost()
    distance = 1
    while distance < ranks:
        count = min(distance, ranks - distance)
        # about half of the ranks hold slots that go around the end: they lie in two places
        apart = 1.5 if count > 1 else 1
        one = message(nbytes * count / ranks, apart if joined else count)
        path = one.crowd(1)
        if 2 * count <= distance:
            # the last step hands on what was there before the step before it: both go at once
            path = one.count * max(one.wire, one.send + one.receive)
        total += Cost(rounds * path, rounds * one.work(ranks))
        distance *= 2
    return total


def tokens(message: Maker, ranks: int, arity: int, confirm: bool) -> Cost:
    return one_tree(message, ranks, arity, 0, "up down" if confirm else "down")


def in_shares(kind: Kind, ranks: int, message: Maker, nbytes: float) -> Cost:
    """A reduce or a broadcast in shares, of all ranks or of all but the root."""
    owners = ranks if kind is Kind.REDUCE else ranks - 1
    one = message(nbytes / owners)
    first = message(nbytes / owners / one.count)
    others = ranks - 1
    around = everyone(first, owners, own=int(kind is Kind.REDUCE and ranks > 2))
    work = one.work(others + owners * (owners - 1))
    if kind is Kind.REDUCE:
        path = around.path + first.hop + (others - 1) * max(one.wire, one.receive)
        return Cost(path + one.rest(others, 2 * others), work)
    path = around.path + first.hop + (others - 1) * max(one.wire, one.send)
    path += (one.count - 1) * max(others * one.wire, one.each(others - 1, others))
    token = message(0)
    path += token.hop + (others - 1) * token.receive
    return Cost(path, work + token.work(others))
