"""Addresses: what people write, and which of them a node advertises."""

from __future__ import annotations

import pytest

from collective.addresses import (
    AddressError,
    choose_addresses,
    format_address,
    is_loopback,
    meeting_address,
    parse_address,
    reachable_hosts,
)
from collective.messages import Host


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("host:29521", "host", 29521),
        ("10.0.0.1", "10.0.0.1", None),
        ("10.0.0.1:8701", "10.0.0.1", 8701),
        ("[::1]:29521", "::1", 29521),
        ("[fdaa:1:2::3]", "fdaa:1:2::3", None),
        ("fdaa:1:2::3", "fdaa:1:2::3", None),
        ("fe80::1%eth0", "fe80::1%eth0", None),
        ("[fe80::1%eth0]:1", "fe80::1%eth0", 1),
    ],
)
def test_host_and_port_are_told_apart(text: str, host: str, port: int | None) -> None:
    """Names, IPv4 and IPv6, with and without port and brackets, are read as they are meant."""
    assert parse_address(text) == (host, port)
    assert parse_address(text, default_port=7) == (host, 7 if port is None else port)
    if port is not None:
        assert parse_address(format_address(host, port)) == (host, port)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fdaa:1:2::3:29521", r"\[fdaa:1:2::3\]:29521"),
        ("fdaa:1:2::3:29521/job/0", r"\[fdaa:1:2::3\]:29521"),
        ("[::1", "not closed"),
        ("[host]:1", "not an IPv6"),
        ("host:port", "not a port"),
        ("host:70000", "not a port"),
        (":1", "host is missing"),
        ("", "expected HOST"),
        ("http://host:1", "expected HOST"),
    ],
)
def test_what_is_no_address_is_refused_with_a_hint(text: str, said: str) -> None:
    """An address that cannot be read is refused, naming it and how to write it."""
    with pytest.raises(AddressError, match=said):
        parse_address(text)


def test_loopback_is_known_by_its_text() -> None:
    """All spellings of loopback count, and nothing else."""
    for host in ("127.0.0.1", "127.0.1.1", "::1", "[::1]", "localhost", "::ffff:127.0.0.1"):
        assert is_loopback(host)
    for host in ("10.0.0.1", "fe80::1%eth0", "localhost.example.com", "w1"):
        assert not is_loopback(host)


def test_the_address_that_reaches_the_control_plane_comes_first() -> None:
    """A node advertises the end of its own connection, then its others, never loopback."""
    others = ["127.0.0.1", "127.0.1.1", "::1", "192.168.1.7", "10.0.0.5", "fe80::1", "fd00::2"]
    assert choose_addresses("10.0.0.5", others) == ["10.0.0.5", "192.168.1.7", "fd00::2"]
    assert choose_addresses("::ffff:10.0.0.5", others)[0] == "10.0.0.5"


def test_loopback_is_right_on_the_machine_of_the_control_plane() -> None:
    """A node that reaches the control plane by loopback is reached by its neighbours so too."""
    assert choose_addresses("127.0.0.1", ["127.0.0.1", "10.0.0.5"]) == ["127.0.0.1", "10.0.0.5"]


def test_what_the_operator_advertises_wins() -> None:
    """`--advertise` replaces all others; loopback is refused where it would mislead."""
    assert choose_addresses("10.0.0.5", ["10.0.0.6"], ["w1.example.com"]) == ["w1.example.com"]
    assert choose_addresses("127.0.0.1", [], ["127.0.0.2"]) == ["127.0.0.2"]
    with pytest.raises(AddressError, match=r"127\.0\.1\.1.*another machine"):
        choose_addresses("10.0.0.5", [], ["127.0.1.1"])


def test_loopback_stays_in_a_plan_only_if_all_share_it() -> None:
    """A node that joined by loopback is dialled by its real address from another machine."""
    near = Host(node="w1", addresses=["127.0.0.1", "10.0.0.5"], data_port=1)
    also = Host(node="w2", addresses=["127.0.0.1"], data_port=2)
    far = Host(node="w3", addresses=["10.0.0.6"], data_port=3)
    assert reachable_hosts([near, also]) == [near, also]
    assert [host.addresses for host in reachable_hosts([near, far])] == [["10.0.0.5"], ["10.0.0.6"]]


def test_all_meet_at_an_address_of_a_family_that_all_have() -> None:
    """The first host's best address that every other can dial; its best where none is common."""
    both = Host(node="w1", addresses=["10.0.0.1", "fdaa::1"], data_port=1)
    old = Host(node="w2", addresses=["10.0.0.2"], data_port=1)
    new = Host(node="w3", addresses=["fdaa::3"], data_port=1)
    assert meeting_address([both, old]) == "10.0.0.1"
    assert meeting_address([both, new]) == "fdaa::1"
    assert meeting_address([new, both]) == "fdaa::3"
    assert meeting_address([both, old, new]) == "10.0.0.1"
