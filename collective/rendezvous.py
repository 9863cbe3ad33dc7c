"""How ranks find each other: static addresses, a job's plan, or the control plane by hand.

Each way ends in `assemble`: the members with their addresses, a secret, and who accepts.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from collective import job
from collective.addresses import parse_address
from collective.errors import RendezvousFailed
from collective.group import DEFAULT_TIMEOUT, Group
from collective.init_arguments import check_timeout, static_members
from collective.interfaces import advertised
from collective.links.doorman import Doorman
from collective.links.handshake import valid_name
from collective.links.listener import Admission, Listener, listen, listen_as
from collective.membership import listed
from collective.messages import Plan
from collective.reaching import Peer
from collective.strategies import Auto, Strategy, check_names, parse
from collective.world import World

#: the default group's name
DEFAULT_GROUP = "default"


def init(
    rank: int | None = None,
    world_size: int | None = None,
    *,
    addresses: Sequence[str] | None = None,
    secret: str | None = None,
    epoch: int | None = None,
    url: str | None = None,
    token: str | None = None,
    group: str | None = None,
    node: str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    strategy: Strategy | str | None = None,
) -> Group:
    """The group of all ranks, made in the first of these ways that its arguments allow.

    - ``init(rank, world_size, addresses=["10.0.0.1:9000", …], secret=…)``: every rank listens at
      its own address and dials the others; nothing else is needed.  ``epoch=2`` forms it anew.
    - ``init(url=…, token=…, group="name", world_size=n)``: ranks meet through a control plane;
      the ranks are given in the order of arrival unless ``rank`` is given.  ``UNISONO_URL``,
      ``UNISONO_TOKEN`` or ``UNISONO_TOKEN_FILE``, ``UNISONO_GROUP`` and ``WORLD_SIZE`` stand in.
    - ``init()`` in a job: the plan comes from the node's agent.

    Args:
        rank, world_size: this rank and the number of ranks.
        addresses: ``host:port`` of each rank, in order.
        secret: known to all ranks of the group and to nobody else.
        epoch: with static addresses, which membership of the group this is, from 1 (as by default)
            to 999,999,999.  Ranks that form it anew, after a loss, say, close the old group and
            name a higher one, all the same; ranks of older epochs are refused.
        url, token, group: the control plane, a token of role operator or node, a meeting's name.
        node: this machine's name for the control plane; the host name by default.  With static
            addresses a node is named by its host in them.
        timeout: seconds for connecting, and for each operation that names no other.
        strategy: ``auto``, a strategy's text, `Flat` or `TwoLevel`; ``UNISONO_STRATEGY`` by
            default.

    Raises:
        ValueError: arguments that do not belong together, or no such strategy.
        RendezvousFailed: someone did not come, cannot be reached, refused the secret, or has
            other addresses or the same rank.
        PeerLost: a rank ended while the ranks met.
        OperationAborted: another exception ended this on another rank.
    """
    strategy = parse(strategy or os.environ.get("UNISONO_STRATEGY") or "auto")
    node = node or os.environ.get("UNISONO_NODE") or socket.gethostname()
    check_timeout(timeout)
    if addresses is not None:
        epoch = 1 if epoch is None else epoch
        number, secret, members = static_members(rank, world_size, addresses, secret, epoch)
        return _static(number, members, secret, epoch, timeout, strategy)
    if epoch is not None:
        raise ValueError(
            f"epoch={epoch} goes with addresses=[…]; elsewhere the control plane counts epochs"
        )
    here = None if url is not None else job.current()
    if here is not None:
        return from_plan(here, here.channel.plan(timeout), timeout=timeout, strategy=strategy)
    url = url or os.environ.get("UNISONO_URL")
    group = group or os.environ.get("UNISONO_GROUP")
    size = world_size or int(os.environ.get("WORLD_SIZE", "0"))
    if not url or not group or not size:
        raise ValueError(
            "outside a job, init() needs addresses=[…] with rank and secret, or url=…, group=… and "
            "world_size=… (or UNISONO_URL, UNISONO_GROUP and WORLD_SIZE)"
        )
    meeting = Meeting(url, token or token_from_environment(), group, size, rank, node, timeout)
    return meeting.group(timeout=timeout, strategy=strategy)


def assemble(
    rank: int,
    peers: Sequence[Peer],
    admission: Admission,
    doorman: Doorman,
    listener: Listener | None,
    *,
    timeout: float,
    strategy: Strategy | str,
    name: str = DEFAULT_GROUP,
) -> Group:
    """The group of all `peers`, linked; takes over `doorman` and `listener`.

    Raises:
        RendezvousFailed, PeerLost, OperationAborted: as `init`.
        ValueError: the strategy does not exist, or names a node that has no rank.
    """
    try:
        strategy = parse(strategy)
        world = World(
            rank, peers, admission, doorman, listener, name, calibrates=isinstance(strategy, Auto)
        )
    except BaseException:
        if listener is not None:
            listener.close()
        doorman.close()
        raise
    nodes = [peer.node for peer in peers]
    try:
        check_names(strategy, nodes)
        return Group(
            world,
            name,
            range(len(peers)),
            rank,
            nodes,
            epoch=admission.epoch,
            timeout=timeout,
            strategy=strategy,
        )
    except BaseException:
        world.close()
        raise


def _static(
    rank: int,
    members: Sequence[tuple[str, int]],
    secret: str,
    epoch: int,
    timeout: float,
    strategy: Strategy,
) -> Group:
    admission = Admission("-", "-", epoch, secret, listed(members))
    doorman = Doorman()
    listener = Listener(
        admission, doorman, listen_as(rank, *members[rank], admission, DEFAULT_GROUP), rank
    )
    # named by what all ranks know alike: strategies of two levels go by the nodes' names
    peers = [Peer(host, ((host, port),)) for host, port in members]
    return assemble(rank, peers, admission, doorman, listener, timeout=timeout, strategy=strategy)


def from_plan(
    here: job.Job,
    plan: Plan,
    *,
    timeout: float = DEFAULT_TIMEOUT,
    strategy: Strategy | str | None = None,
    name: str = DEFAULT_GROUP,
) -> Group:
    """The group of a job's attempt: agents accept for their ranks, at one port per node."""
    hosts = {host.node: host for host in plan.hosts}
    peers = []
    for member in sorted(plan.members, key=lambda member: member.rank):
        host = hosts[member.node]
        addresses = tuple((address, host.data_port) for address in host.addresses)
        peers.append(Peer(member.node, addresses, place=member.node))
    admission = Admission(plan.job, plan.attempt, plan.epoch, plan.secret)
    name = here.fresh(name)
    return assemble(
        here.rank, peers, admission, here.reception.doorman(name), None,
        timeout=timeout, strategy=strategy or plan.strategy, name=name,
    )  # fmt: skip


class Meeting:
    """A meeting of programs that were started by hand, arranged by the control plane."""

    def __init__(
        self,
        url: str,
        token: str,
        group: str,
        world_size: int,
        rank: int | None,
        node: str,
        timeout: float,
    ) -> None:
        """Listen, announce this rank, and wait for the others.

        Raises:
            RendezvousFailed: the control plane cannot be reached or refuses, or not all came.
        """
        self._sockets = listen()
        port = self._sockets[0].getsockname()[1]
        try:
            answer = announce(url, token, group, world_size, rank, node, port, timeout)
        except BaseException:
            for sock in self._sockets:
                sock.close()
            raise
        self.rank = int(answer["rank"])
        self.members: list[dict[str, Any]] = sorted(answer["members"], key=lambda m: int(m["rank"]))
        self.secret = str(answer["secret"])
        self.epoch = int(answer["epoch"])
        self.strategy = str(answer.get("strategy") or "auto")
        self.name = group

    def group(self, *, timeout: float, strategy: Strategy) -> Group:
        """The group of all who met."""
        admission = Admission(self.name, "-", self.epoch, self.secret)
        doorman = Doorman()
        listener = Listener(admission, doorman, self._sockets, self.rank)
        peers = [
            Peer(str(m["node"]), tuple((str(a), int(m["port"])) for a in m["addresses"]))
            for m in self.members
        ]
        chosen = self.strategy if isinstance(strategy, Auto) else strategy
        return assemble(
            self.rank, peers, admission, doorman, listener, timeout=timeout, strategy=chosen
        )


def announce(
    url: str,
    token: str,
    group: str,
    world_size: int,
    rank: int | None,
    node: str,
    port: int,
    timeout: float,
) -> dict[str, Any]:
    """Say at the control plane that this rank has come and listens at `port`; wait for all.

    Returns:
        Its ``rank``, and ``epoch``, ``secret``, ``strategy`` and ``members`` of the meeting.

    Raises:
        ValueError: `url` or `group` cannot be one.
        RendezvousFailed: the control plane cannot be reached or refuses, or not all came.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"the control plane's address is {url!r}; write http://HOST:8700")
    if not valid_name(group) or "/" in group:
        raise ValueError(f"a group's name has letters, digits and any of ._:,- only, not {group!r}")
    try:
        return _post(
            f"{url.rstrip('/')}/api/v1/rendezvous/{group}",
            token,
            {
                "world_size": world_size,
                "rank": rank,
                "addresses": own_addresses(url),
                "port": port,
                "node": node,
                "participant": secrets.token_hex(16),
            },
            timeout,
        )
    except TimeoutError:
        raise RendezvousFailed(
            f"group {group!r} was not complete within {timeout:g} s: not all {world_size} programs "
            f"came to {url}"
        ) from None


def token_from_environment() -> str:
    """The token that `UNISONO_TOKEN` holds or `UNISONO_TOKEN_FILE` names.

    Raises:
        ValueError: neither is set, or the file cannot be read.
    """
    token = os.environ.get("UNISONO_TOKEN")
    if token:
        return token.strip()
    path = os.environ.get("UNISONO_TOKEN_FILE")
    if not path:
        raise ValueError(
            "no token: set UNISONO_TOKEN_FILE to a file that holds one, or pass token=… to init"
        )
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise ValueError(f"UNISONO_TOKEN_FILE names {path}: {error.strerror}") from None


def own_addresses(url: str) -> list[str]:
    """Where others should dial: as advertised, or the own address towards `url`."""
    host, port = parse_address(url.partition("://")[2].partition("/")[0], default_port=8700)
    return advertised() or [address_towards(host, port or 8700)]


def address_towards(host: str, port: int) -> str:
    """The own address that packets to `host` carry.

    Raises:
        RendezvousFailed: the name does not resolve, or no route leads there.
    """
    try:
        family, kind, proto, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(target)  # a datagram socket: chooses the route, sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RendezvousFailed(f"no way to {host}:{port}: {error}") from error


def _post(url: str, token: str, body: dict[str, Any], timeout: float) -> dict[str, Any]:
    request = urllib.request.Request(
        url,
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {token}"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout) as response:
            answer: dict[str, Any] = json.load(response)
            return answer
    except urllib.error.HTTPError as error:
        try:
            detail = json.load(error).get("detail", "")
        except ValueError:
            detail = error.reason
        raise RendezvousFailed(f"the control plane refused ({error.code}): {detail}") from None
    except TimeoutError:
        raise  # it was reached, else this were a URLError
    except OSError as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise RendezvousFailed(f"cannot reach the control plane at {url}: {reason}") from error
