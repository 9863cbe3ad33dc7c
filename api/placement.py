"""Where a job's ranks go: a pure function of what is free, and words for what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Offer:
    """What one node could give now: indexes of devices by kind."""

    node: str
    #: devices that no job holds and no foreign process uses, by kind
    free: dict[str, list[int]]
    #: number of all its devices
    total: int
    envs: Sequence[str] = ()
    #: why it takes no job: "offline", "draining"; None when it does
    closed: str | None = None

    def count(self) -> int:
        """Free devices of all kinds."""
        return sum(len(devices) for devices in self.free.values())


@dataclass(frozen=True)
class Wish:
    """What a job asks for; exactly one of `nodes`, `on` and `all_free`."""

    nodes: int | None = None
    ranks_per_node: int = 1
    on: tuple[tuple[str, int], ...] | None = None
    all_free: bool = False
    env_name: str | None = None


@dataclass(frozen=True)
class Placement:
    """Nodes in rank order and the devices used on each; or why not yet."""

    devices: dict[str, list[int]] = field(default_factory=dict)
    waiting_for: str | None = None
    #: the job would fit once running jobs end: those behind it must not overtake
    holds_back: bool = False


def _first(offer: Offer, count: int) -> list[int]:
    """Devices of one kind where they suffice, GPUs before CPU slots."""
    for kind in ("cuda", "cpu"):
        devices = offer.free.get(kind, [])
        if len(devices) >= count:
            return sorted(devices)[:count]
    mixed = [index for kind in ("cuda", "cpu") for index in sorted(offer.free.get(kind, []))]
    return mixed[:count]


def place(wish: Wish, offers: Sequence[Offer]) -> Placement:
    """Devices for a job, or what it waits for."""
    if wish.on is not None:
        return _place_on(wish, wish.on, offers)
    able = [offer for offer in offers if offer.closed is None and _has_env(wish, offer)]
    if wish.all_free:
        chosen = {offer.node: _first(offer, offer.count()) for offer in able if offer.count()}
        if chosen:
            return Placement(chosen)
        return Placement(waiting_for=f"a free device; {_state(wish, offers)}")
    return _place_count(wish, wish.nodes or 1, able, offers)


def _place_count(
    wish: Wish, count: int, able: Sequence[Offer], offers: Sequence[Offer]
) -> Placement:
    per_node = wish.ranks_per_node
    for kind in ("cuda", "cpu"):
        fitting = [offer for offer in able if len(offer.free.get(kind, [])) >= per_node]
        if len(fitting) >= count:
            # The tightest fit first, so that larger nodes stay whole for larger jobs.
            fitting.sort(key=lambda offer: len(offer.free[kind]))
            names = {offer.node for offer in fitting[:count]}
            return Placement(
                {
                    offer.node: sorted(offer.free[kind])[:per_node]
                    for offer in able
                    if offer.node in names
                }
            )
    large = sum(1 for offer in able if offer.total >= per_node)
    text = (
        f"{count} node{'s' * (count > 1)} with {per_node} free device{'s' * (per_node > 1)} of "
        f"one kind{' each' * (count > 1)}; {_state(wish, offers)}"
    )
    return Placement(waiting_for=text, holds_back=large >= count)


def _place_on(wish: Wish, on: tuple[tuple[str, int], ...], offers: Sequence[Offer]) -> Placement:
    by_name = {offer.node: offer for offer in offers}
    missing, chosen, possible = [], {}, True
    for name, count in on:
        offer = by_name.get(name)
        if offer is None:
            missing.append(f"node {name} to join")
            possible = False
        elif offer.closed is not None:
            missing.append(f"node {name}, which is {offer.closed}")
            possible = False
        elif not _has_env(wish, offer):
            missing.append(f"environment {wish.env_name} on node {name}")
            possible = False
        elif offer.count() < count:
            missing.append(
                f"{count} free devices on node {name} ({offer.count()} of {offer.total} are free)"
            )
            possible = possible and offer.total >= count
        else:
            chosen[name] = _first(offer, count)
    if missing:
        return Placement(waiting_for=", ".join(missing), holds_back=possible)
    return Placement(chosen)


def _has_env(wish: Wish, offer: Offer) -> bool:
    return wish.env_name is None or wish.env_name in offer.envs


def _state(wish: Wish, offers: Sequence[Offer], most: int = 8) -> str:
    if not offers:
        return "no node has joined"
    words = []
    for offer in offers[:most]:
        if offer.closed is not None:
            words.append(f"{offer.node}: {offer.closed}")
        elif not _has_env(wish, offer):
            words.append(f"{offer.node}: no environment {wish.env_name}")
        else:
            words.append(f"{offer.node}: {offer.count()} of {offer.total} free")
    if len(offers) > most:
        words.append(f"and {len(offers) - most} more")
    return ", ".join(words)
