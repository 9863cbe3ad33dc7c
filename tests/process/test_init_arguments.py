"""What `collective.init` is given and cannot use is named, before it waits for anybody."""

from __future__ import annotations

import re
import socket
from typing import Any

import pytest
import torch
from resources import descriptors, threads

import collective
from collective.rendezvous import own_addresses

TWO = ["127.0.0.1:29650", "127.0.0.1:29651"]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"addresses": "127.0.0.1:29650"}, "addresses is a list, one HOST:PORT per rank, not the"),
        ({"addresses": ["127.0.0.1", TWO[1]]}, "address '127.0.0.1' names no port"),
        ({"addresses": ["::1:80", TWO[1]]}, "'::1:80' names no port; write [ADDRESS]:PORT"),
        ({"addresses": [29650, TWO[1]]}, "addresses is a list of texts, HOST:PORT of each rank"),
        ({"addresses": ["127.0.0.1:0", TWO[1]]}, "'127.0.0.1:0' has port 0"),
        ({"addresses": [TWO[0]] * 2}, "ranks 0 and 1 have the same address 127.0.0.1:29650"),
        ({"rank": None}, "static addresses need rank and secret"),
        ({"rank": "0"}, "rank is a whole number, not '0'"),
        ({"rank": 2}, "rank is 2, but there are 2 addresses"),
        ({"world_size": 3}, "world_size is 3, but there are 2 addresses"),
        ({"secret": None}, "static addresses need rank and secret"),
        ({"secret": ""}, "it is not empty"),
        ({"secret": b"s"}, "secret is a text"),
        ({"epoch": 0}, "an epoch is a whole number from 1 to 999999999, not 0"),
        ({"timeout": "5"}, "timeout is '5'; it is a number of seconds above 0"),
        (
            {"timeout": 1e12},
            "it is a number of seconds above 0, at most 1e+09",
        ),
        ({"timeout": -1}, "timeout is -1; it is a number of seconds above 0"),
        ({"strategy": "rign"}, "there is no strategy 'rign'"),
        (
            {"addresses": None, "url": "10.0.0.1:8700", "group": "g", "world_size": 2},
            "the control plane's address is '10.0.0.1:8700'; write http://HOST:8700",
        ),
        (
            {"addresses": None, "url": "http://h:1", "group": "a b", "world_size": 2},
            "a group's name has letters, digits and any of ._:,- only, not 'a b'",
        ),
        (
            {"addresses": None, "url": "http://h:1", "group": "g", "world_size": 2, "token": None},
            "no token: set UNISONO_TOKEN_FILE",
        ),
    ],
)
def test_an_argument_that_cannot_be_used_is_named(changed: dict[str, Any], words: str) -> None:
    """Each is refused at once with its value, and leaves no thread and no socket."""
    before = descriptors(), threads()
    given = {"rank": 0, "addresses": TWO, "secret": "s", "token": "t", "timeout": 20} | changed
    with pytest.raises(ValueError, match=re.escape(words)):
        collective.init(**given)
    assert (descriptors(), threads()) == before


@pytest.mark.parametrize(
    ("variable", "text", "words"),
    [
        ("UNISONO_LINGER_SECONDS", "soon", "'soon'; it is a number of seconds, 0 or more"),
        ("UNISONO_LINGER_SECONDS", "-1", "'-1'; it is a number of seconds, 0 or more"),
        ("UNISONO_CONNECTIONS", "99", "'99'; it is auto, or a number from 1 to 32"),
        ("UNISONO_LINKS", "tcp", "'tcp'; there are auto and websocket"),
        ("UNISONO_CALIBRATION", "no", "'no'; there are auto and off"),
    ],
)
def test_a_setting_without_meaning_is_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, words: str
) -> None:
    """A variable with a value that means nothing ends `init` before it waits for other ranks."""
    monkeypatch.setenv(variable, text)
    before = descriptors(), threads()
    with pytest.raises(ValueError, match=f"{variable} is {re.escape(words)}"):
        collective.init(0, addresses=TWO, secret="s", timeout=20)
    assert (descriptors(), threads()) == before


def test_a_strategy_of_the_control_plane_that_does_not_exist_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What another version of the control plane may say ends `init` with everything closed."""
    answer = {"rank": 0, "members": [], "secret": "s", "epoch": 1, "strategy": "rign"}
    monkeypatch.setattr("collective.rendezvous.announce", lambda *_: answer)
    before = descriptors(), threads()
    with pytest.raises(ValueError, match="there is no strategy 'rign'"):
        collective.init(url="http://h:1", token="t", group="g", world_size=1)
    assert (descriptors(), threads()) == before


def test_an_address_that_is_taken_or_elsewhere_is_named_with_the_way_out() -> None:
    """Who cannot listen says at which address, why, and what to do."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            collective.RendezvousFailed,
            match=f"listen on 127.0.0.1, port {port}: Address already in use; another program",
        ):
            collective.init(0, addresses=[f"127.0.0.1:{port}"], secret="s")
    with pytest.raises(collective.RendezvousFailed, match="must be an address of this machine"):
        collective.init(0, addresses=["203.0.113.1:29650"], secret="s")


def test_an_address_that_nobody_answers_at_is_named_as_it_is_written() -> None:
    """Also one of IPv6, where a port that follows without brackets would be a part of it."""
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        mine = taken.getsockname()[1]
    with pytest.raises(collective.RendezvousFailed, match=r"\[::1\]:1: .*refused"):
        collective.init(0, addresses=[f"[::1]:{mine}", "[::1]:1"], secret="s", timeout=0.3)


def test_several_addresses_can_be_advertised(monkeypatch: pytest.MonkeyPatch) -> None:
    """What others are told to dial is each address of the list, not the list as one."""
    monkeypatch.setenv("UNISONO_ADVERTISE", "10.0.0.5, fd00::5")
    assert own_addresses("http://127.0.0.1:8700") == ["10.0.0.5", "fd00::5"]
    monkeypatch.setenv("UNISONO_ADVERTISE", "w1, lo")
    assert own_addresses("http://127.0.0.1:8700")[:2] == ["w1", "127.0.0.1"]
    for part, words in (("10.0.0.5:9000", "leave the port out"), ("a b", "is not an address")):
        monkeypatch.setenv("UNISONO_ADVERTISE", f"w1,{part}")
        with pytest.raises(ValueError, match=f"UNISONO_ADVERTISE is 'w1,{part}': .*{words}"):
            own_addresses("http://127.0.0.1:8700")


def test_a_closed_group_makes_no_subgroup() -> None:
    """A group that is closed refuses to make a part of itself."""
    (group,) = collective.local_group(1)
    group.close()
    with pytest.raises(collective.GroupClosed, match="group default is closed"):
        group.subgroup([0])


def test_groups_and_handles_say_what_they_are() -> None:
    """A group prints as its name and rank, a handle as its operation and state."""
    with collective.local_group(2) as peers:
        assert repr(peers[1]) == "<Group default: rank 1 of 2>"
        handles = [peer.all_reduce(torch.ones(2)) for peer in peers]
        for handle in handles:
            handle.resolve()
        assert repr(handles[0]) == "<Work all_reduce of group default: done>"
