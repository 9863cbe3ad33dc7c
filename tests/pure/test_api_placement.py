"""Where ranks go."""

from __future__ import annotations

from api.placement import Offer, Wish, place


def offer(name: str, cuda: int = 0, cpu: int = 0, held: int = 0, **more: object) -> Offer:
    free = {"cuda": list(range(held, cuda)), "cpu": list(range(cuda + held, cuda + cpu))}
    return Offer(name, free, cuda + cpu, **more)  # type: ignore[arg-type]


def test_nodes_that_fit_tightest_are_taken_in_their_order() -> None:
    """Larger nodes stay whole, and ranks follow the order in which nodes joined."""
    offers = [offer("a", cuda=8), offer("b", cuda=2), offer("c", cuda=2)]
    assert place(Wish(nodes=2, ranks_per_node=2), offers).devices == {"b": [0, 1], "c": [0, 1]}
    assert list(place(Wish(nodes=3, ranks_per_node=2), offers).devices) == ["a", "b", "c"]


def test_kinds_of_devices_are_not_mixed() -> None:
    """A job gets GPUs everywhere, or CPU slots everywhere."""
    offers = [offer("gpu", cuda=1), offer("cpu", cpu=4)]
    found = place(Wish(nodes=2), offers)
    assert not found.devices and "one kind" in (found.waiting_for or "")
    assert place(Wish(nodes=1), offers).devices == {"gpu": [0]}
    assert place(Wish(nodes=1, ranks_per_node=3), offers).devices == {"cpu": [0, 1, 2]}


def test_named_nodes_keep_their_order() -> None:
    """`on` numbers ranks in the order in which it names nodes."""
    offers = [offer("a", cpu=4), offer("b", cpu=4)]
    found = place(Wish(on=(("b", 1), ("a", 2))), offers)
    assert list(found.devices.items()) == [("b", [0]), ("a", [0, 1])]


def test_what_is_missing_is_said() -> None:
    """Closed nodes, missing environments and held devices are named."""
    offers = [
        offer("a", cpu=2, held=1),
        offer("b", cpu=2, closed="draining"),
        offer("c", cpu=2, closed="offline"),
    ]
    text = place(Wish(on=(("a", 2), ("b", 1), ("d", 1))), offers).waiting_for or ""
    assert "2 free devices on node a (1 of 2 are free)" in text
    assert "node b, which is draining" in text and "node d to join" in text
    text = place(Wish(nodes=2), offers).waiting_for or ""
    assert "a: 1 of 2 free, b: draining, c: offline" in text
    text = place(Wish(env_name="train"), offers[:1]).waiting_for or ""
    assert "a: no environment train" in text
    assert "no node has joined" in (place(Wish(), []).waiting_for or "")


def test_only_jobs_that_can_fit_hold_others_back() -> None:
    """A job that waits for running ones is not overtaken; one that waits for nodes is."""
    offers = [offer("a", cpu=2, held=2), offer("b", cpu=2)]
    assert place(Wish(nodes=2, ranks_per_node=2), offers).holds_back
    assert not place(Wish(nodes=3), offers).holds_back
    assert not place(Wish(nodes=1, ranks_per_node=9), offers).holds_back


def test_all_free_takes_every_free_device() -> None:
    """`all_free` takes what is free now, on every node that takes jobs."""
    offers = [offer("a", cpu=3, held=1), offer("b", cpu=2), offer("c", cpu=2, closed="offline")]
    assert place(Wish(all_free=True), offers).devices == {"a": [1, 2], "b": [0, 1]}
