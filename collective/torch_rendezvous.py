"""How the ranks of a torch process group find each other.

Three ways lead to the same group.  Inside a job the plan of the node's agent names all ranks,
where they are and the secret, and links come in through the agent's data port.  Otherwise each
rank listens by itself and says where through the store that torch was given; the secret is
``UNISONO_SECRET``, or one that rank 0 puts into the store.  With
``init_method="unisono://GROUP?world_size=2"`` the control plane brings the ranks together
(`meet`) and hands out the secret; rank 0's address in the answer is where its store listens.

The default group links its ranks when it is made; subgroups do so at their first use.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from collective import job
from collective.addresses import is_loopback
from collective.environment import LONGEST_TIMEOUT
from collective.errors import RendezvousFailed
from collective.group import Group
from collective.interfaces import advertised
from collective.links.doorman import Doorman
from collective.links.listener import Admission, Listener, listen
from collective.reaching import Peer
from collective.rendezvous import (
    address_towards,
    announce,
    assemble,
    from_plan,
    token_from_environment,
)
from collective.strategies import Strategy, parse

_lock = threading.Lock()
_made: dict[str, int] = {}
#: the control plane's answer to `meet`, for the default group that torch makes next
_met: dict[str, Any] | None = None


def join(options: Any, backend_options: Any) -> Callable[[], Group]:
    """What makes the `Group` of a process group that torch asks for.

    Args:
        options: torch's ``_DistributedBackendOptions``.
        backend_options: ``pg_options``: None, a strategy (text, `Flat` or `TwoLevel`), or something
            with a ``strategy``.

    Raises:
        ValueError: no such strategy.
    """
    strategy = strategy_of(backend_options)
    timeout = min(options.timeout.total_seconds(), LONGEST_TIMEOUT)
    ranks = list(options.global_ranks_in_group)
    name = _fresh("torch" if not ranks else f"g{options.group_id}")
    if not ranks:
        return lambda: _everyone(options, name, timeout, strategy)

    def subgroup() -> Group:
        from collective.torch_backend import UnisonoProcessGroup

        world = dist.group.WORLD
        if isinstance(world, UnisonoProcessGroup):
            return world.group.subgroup(ranks, name, timeout=timeout, strategy=strategy)
        # a subgroup beside a default group of another backend links its members by itself
        return _by_store(options, name, timeout, strategy)

    return subgroup


def strategy_of(backend_options: Any) -> str | None:
    """The strategy that ``pg_options`` name, or ``UNISONO_STRATEGY``, or None.

    Raises:
        ValueError: no such strategy.
    """
    if isinstance(backend_options, str | Strategy):
        strategy: Any = backend_options
    elif isinstance(backend_options, Mapping):
        strategy = backend_options.get("strategy")
    else:
        strategy = getattr(backend_options, "strategy", None)
    strategy = strategy or os.environ.get("UNISONO_STRATEGY") or None
    return None if strategy is None else str(parse(strategy))


def _fresh(name: str) -> str:
    """A name that no earlier group of this process had; ranks make their groups in one order."""
    with _lock:
        number = _made[name] = _made.get(name, 0) + 1
    return name if number == 1 else f"{name}.{number}"


def _everyone(options: Any, name: str, timeout: float, strategy: str | None) -> Group:
    global _met
    met, _met = _met, None
    if met is not None:
        strategy = strategy or str(met.get("strategy") or "auto")
        return _by_store(options, name, timeout, strategy, str(met["secret"]), int(met["epoch"]))
    here = job.current()
    if here is not None:
        plan = here.channel.plan(timeout)
        if len(plan.members) == options.group_size:
            return from_plan(here, plan, timeout=timeout, strategy=strategy, name=name)
    return _by_store(options, name, timeout, strategy)


def _by_store(
    options: Any,
    name: str,
    timeout: float,
    strategy: str | None,
    secret: str | None = None,
    epoch: int = 1,
) -> Group:
    """Meet through torch's store, which all ranks can read and write.

    Raises:
        RendezvousFailed: a rank did not come, cannot be reached, or wants another strategy.
    """
    rank, size, store = options.group_rank, options.group_size, options.store
    given = secret or os.environ.get("UNISONO_SECRET") or None
    mine: dict[str, Any] = {
        "node": os.environ.get("UNISONO_NODE") or socket.gethostname(),
        "machine": _machine(),
        "strategy": strategy or "auto",
        "world_size": size,
        "secret_given": given is not None,
    }
    if rank == 0 and given is None:
        mine["secret"] = secrets.token_hex(32)
    sockets = listen()
    try:
        mine["port"] = sockets[0].getsockname()[1]
        mine["addresses"] = _own_addresses()
        store.set(f"unisono/{name}/{rank}", json.dumps(mine))
        members: list[dict[str, Any]] = []
        for peer in range(size):
            members.append(_member(store, name, peer, size, timeout))
            if members[peer]["world_size"] != size:  # now: one that waits for more ranks would wait
                raise RendezvousFailed(
                    f"rank {peer} was given a world size of {members[peer]['world_size']}, rank "
                    f"{rank} one of {size}: give all ranks the same",
                    rank=peer,
                )
        _agree(members)
    except BaseException:
        for one in sockets:
            one.close()
        raise
    admission = Admission("-", "-", epoch, given or str(members[0]["secret"]))
    doorman = Doorman()
    listener = Listener(admission, doorman, sockets, rank)
    peers = [
        Peer(
            str(member["node"]),
            _ways(member, mine["machine"]),
            f"{member['machine']}/{member['node']}",
        )
        for member in members
    ]
    return assemble(
        rank, peers, admission, doorman, listener,
        timeout=timeout, strategy=strategy or "auto", name=name,
    )  # fmt: skip


def _member(store: Store, name: str, rank: int, size: int, timeout: float) -> dict[str, Any]:
    try:
        store.wait([f"unisono/{name}/{rank}"], timedelta(seconds=timeout))
        found: dict[str, Any] = json.loads(store.get(f"unisono/{name}/{rank}"))
    except RuntimeError as error:
        raise RendezvousFailed(
            f"rank {rank} of {size} did not come to group {name} within {timeout:g} s: {error}",
            rank=rank,
        ) from error
    return found


def _agree(members: list[dict[str, Any]]) -> None:
    """Check that all members want the same.

    Raises:
        RendezvousFailed: naming the first that differs from rank 0, and what to do.
    """
    first = members[0]
    for rank, member in enumerate(members):
        if member["strategy"] != first["strategy"]:
            raise RendezvousFailed(
                f"rank {rank} asks for the strategy {member['strategy']!r}, rank 0 for "
                f"{first['strategy']!r}: set UNISONO_STRATEGY or pg_options alike on all ranks",
                rank=rank,
            )
        if member["secret_given"] != first["secret_given"]:
            raise RendezvousFailed(
                f"UNISONO_SECRET is set on rank {rank if member['secret_given'] else 0}, but not "
                f"on rank {0 if member['secret_given'] else rank}: set it on all ranks or on none",
                rank=rank,
            )


def _ways(member: dict[str, Any], machine: str) -> tuple[tuple[str, int], ...]:
    """Where a member is dialled: by loopback on the same machine, by its addresses elsewhere."""
    port = int(member["port"])
    if member["machine"] == machine:
        return (("127.0.0.1", port),)
    return tuple((str(address), port) for address in member["addresses"])


def _machine() -> str:
    """The same text for processes that share a loopback interface: boot and network namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


def _own_addresses() -> list[str]:
    """The addresses at which other machines may dial this rank, the best first.

    ``UNISONO_ADVERTISE`` replaces them.  Loopback means another machine to another machine, so
    it is never among them.
    """
    found = advertised()
    if found:
        return found
    master = os.environ.get("MASTER_ADDR")
    # the route to the ranks' store, then the default routes; nothing is sent
    for host in (*([master] if master else []), "192.0.2.1", "2001:db8::1"):
        try:
            address = address_towards(host, int(os.environ.get("MASTER_PORT") or 29500))
        except RendezvousFailed:
            continue
        if address not in found and not is_loopback(address):
            found.append(address)
    return found


def meet(url: str, **settings: Any) -> Iterator[tuple[Store, int, int]]:
    """The rendezvous handler of ``unisono://GROUP?world_size=2``, for programs started by hand.

    ``UNISONO_URL`` is the control plane, ``UNISONO_TOKEN`` or ``UNISONO_TOKEN_FILE`` the token.
    Every participant offers a store, and the one of rank 0 is used.

    Raises:
        ValueError: the URL or the environment is incomplete.
        RendezvousFailed: the control plane refused, or not all came in time.
    """
    global _met
    parsed = urlparse(url)
    query = {name: values[-1] for name, values in parse_qs(parsed.query).items()}
    size = query.get("world_size") or os.environ.get("WORLD_SIZE", "")
    rank = query.get("rank") or os.environ.get("RANK")
    control = os.environ.get("UNISONO_URL")
    if not parsed.netloc or not size.isdecimal() or int(size) < 1:
        raise ValueError(
            f"init_method {url!r}: write unisono://GROUP?world_size=N, with N ranks in all"
        )
    if not control:
        raise ValueError(
            f"init_method {url!r} needs UNISONO_URL, the address of the control plane, such as "
            "http://10.0.0.1:8700"
        )
    timeout = settings.get("timeout") or timedelta(minutes=30)
    store = TCPStore("0.0.0.0", 0, None, True, timeout, wait_for_workers=False)
    answer = announce(
        control,
        token_from_environment(),
        parsed.netloc,
        int(size),
        None if rank is None else int(rank),
        os.environ.get("UNISONO_NODE") or socket.gethostname(),
        store.port,
        timeout.total_seconds(),
    )
    mine = int(answer["rank"])
    if mine != 0:
        (first,) = [member for member in answer["members"] if member["rank"] == 0]
        store = TCPStore(
            str(first["addresses"][0]), int(first["port"]), None, False, timeout,
            wait_for_workers=False,
        )  # fmt: skip
    _met = answer
    yield store, mine, int(size)
