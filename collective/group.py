"""Groups: what programs call.

Every call works in place on torch tensors and is the same on all ranks of the group, in the same
order.  Calls are synchronous by default; with ``async_op=True``, and on the peers of
`collective.local_group`, they return at once.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from collective import timing_observer
from collective.arguments import check_members
from collective.calls import Calls
from collective.choosing import Chooser
from collective.communicator import Communicator
from collective.diagnosis import UNHARMED
from collective.environment import seconds
from collective.errors import CollectiveError, GroupClosed, Refused
from collective.init_arguments import check_timeout
from collective.leaving import part
from collective.links.handshake import valid_name
from collective.links.link import Outlet
from collective.operation import Operation, again
from collective.reduction import ReduceOp
from collective.schedule import Kind, Schedule
from collective.strategies import (
    Flat,
    Staged,
    Strategy,
    build,
    check_levels,
    engines,
    hand_over,
    nodes_of,
    parse,
    resolve,
)
from collective.tensor_service import TensorService
from collective.watch import Bells
from collective.wiring import Wiring
from collective.work import Work

if TYPE_CHECKING:
    from collective.libraries import Libraries

_log = logging.getLogger("unisono.collective")
#: called with each finished `Work` of every group; see `collective.timing`
observers: list[Callable[[Work], object]] = []

#: seconds
DEFAULT_TIMEOUT = 300.0
#: a rank that ends with an exception waits so long for its peers to read why
_LAST_WORDS = 0.2
#: schedules that a group keeps at hand, each for calls of one size
_SCHEDULES = 1024
_Call = tuple[Kind, int, int, bool, tuple[ReduceOp, torch.dtype] | None]
_STALL = seconds("UNISONO_STALL_SECONDS", 1)

#: the interpreter is ending
_ending = False
_open_groups: weakref.WeakSet[Group] = weakref.WeakSet()


class Group(Calls, TensorService):
    """An ordered set of ranks that run collectives together.

    Attributes:
        rank, size: this process's rank in the group, and the number of ranks.
        ranks: the members as ranks of the world.
        name, epoch: which group, and which membership of it.
        nodes: the node's name of each rank.
        timeout: seconds that an operation may take when a call names none.
        strategy: the setting that all operations follow: ``auto``, or a strategy.
        device: of a peer of `collective.local_group`, its device; None elsewhere.
        asynchronous: whether a call that does not say `async_op` returns at once.
    """

    def __init__(
        self,
        wiring: Wiring,
        name: str,
        ranks: Sequence[int],
        rank: int,
        nodes: Sequence[str],
        *,
        epoch: int = 1,
        timeout: float = DEFAULT_TIMEOUT,
        strategy: Strategy | str = "auto",
        connect: bool = True,
        device: torch.device | None = None,
        asynchronous: bool = False,
    ) -> None:
        """Make a group; its links are made now, or with ``connect=False`` at its first use.

        Raises:
            RendezvousFailed: members did not come or cannot be reached.
            ValueError: the strategy does not exist, names a node that has no rank here, or hands
                a level to a library that this process does not have.
        """
        self.strategy = parse(strategy)
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(rank)
        self.size = len(self.ranks)
        self.name = name
        self.epoch = epoch
        self.timeout = timeout
        self.device = device
        self.asynchronous = asynchronous
        self._wiring = wiring
        self._children: list[Group] = []
        self._parent: Group | None = None
        self._connecting = threading.Lock()
        self._communicator: Communicator | None = None
        self._bells = Bells()
        self._closed = False
        self._pid = os.getpid()
        self._place(nodes)
        self._libraries: Libraries | None = None
        check_levels(self.strategy, self._node_names)
        if engines(self.strategy):
            self._other_libraries()
        if resolve(self.strategy, Kind.ALL_REDUCE, self._node_names) is not None:
            self._schedule(Kind.ALL_REDUCE, 0)  # one that does not exist is refused now
        wiring.serve_tensors(name, self.ranks)
        _open_groups.add(self)
        if connect:
            self._connected()

    def _place(self, nodes: Sequence[str]) -> None:
        """Learn on which node each rank is."""
        self.nodes = tuple(nodes)
        self._node_sets = nodes_of(self.nodes)
        self._node_names = tuple(dict.fromkeys(self.nodes))
        self._chooser: Chooser | None = None
        #: by call, while the strategy is still the one beside it
        self._schedules: dict[_Call, tuple[Schedule | Staged, str]] = {}
        self._scheduled = self.strategy

    # -- state --------------------------------------------------------------------------------

    @property
    def error(self) -> BaseException | None:
        """What poisoned the group, or None while it can be used."""
        return self._communicator.error if self._communicator is not None else None

    @property
    def unreachable(self) -> dict[int, str]:
        """The members that this rank cannot dial, and what each of their addresses said.

        They dial this rank instead and mask what they send, which is slower.
        """
        found = self._wiring.unreachable
        return {rank: found[world] for rank, world in enumerate(self.ranks) if world in found}

    @property
    def slow_links(self) -> str:
        """Links between nodes that were measured far below the best of them, in words."""
        return self._wiring.surroundings.slow_links()

    def _connected(self) -> Communicator:
        communicator = self._communicator
        if communicator is not None:
            return communicator
        with self._connecting:
            self._check_open()
            if self._communicator is None:
                made = self._wiring.connect(
                    self.name, self.ranks, self.timeout, _STALL, self._known_links()
                )
                made.bells = self._bells
                self._communicator = made
                self._attend_links()
            return self._communicator

    def _link_beside(self) -> None:
        """Another member links the group: so does this rank, whatever its program does now."""
        thread = threading.Thread(target=self._link, name="unisono-linking", daemon=True)
        thread.start()

    def _link(self) -> None:
        try:
            self._connected()
        except CollectiveError as error:
            # the program's own first use tries again
            _log.info("group %s could not be linked when another rank did: %s", self.name, error)

    @property
    def chooser(self) -> Chooser:
        """What chooses strategies for `auto`, once the links of the group of all are made."""
        if self._chooser is None:
            self._chooser = self._wiring.surroundings.chooser(self.ranks, self.nodes)
        return self._chooser

    def _known_links(self) -> dict[int, Outlet]:
        """By rank of this group: links of the group that it is a part of."""
        parent = self._parent
        if parent is None or parent._communicator is None:
            return {}
        outlets = parent._communicator.outlets
        return {
            rank: outlets[there]
            for rank, member in enumerate(self.ranks)
            if (there := parent.ranks.index(member)) in outlets
        }

    def _check_open(self) -> None:
        if self._closed:
            raise GroupClosed(f"group {self.name} is closed")
        if self._pid != os.getpid():
            raise GroupClosed(
                f"group {self.name} was made before os.fork() and belongs to process {self._pid}: "
                "make a group of its own in the child, or start children with 'spawn'"
            )

    def _usable(self) -> Communicator:
        self._check_open()
        communicator = self._connected()
        if communicator.error is not None:
            raise again(communicator.error)
        return communicator

    def _check_usable(self) -> None:
        self._check_open()
        if self.error is not None:
            raise again(self.error)

    def _peer_ended(self, peer: int) -> bool:
        self._check_open()
        communicator = self._communicator
        links = self._known_links() if communicator is None else communicator.outlets
        return peer in links and links[peer].ended()

    def _attend(self, bell: int) -> None:
        self._bells.add(bell)
        self._attend_links()

    def _attend_links(self) -> None:
        """Have the engine read what peers say of the group's end, if somebody waits for that."""
        if self._bells and self._communicator is not None:
            self._wiring.engine.post(lambda: None)

    def _ignore(self, bell: int) -> None:
        self._bells.discard(bell)

    def close(self) -> None:
        """Leave the group in order: peers learn after which operation; harmless when repeated.

        Where an exception is on its way out of the program, or of the block that closes the
        group, the peers learn of that instead: it is why they cannot go on.
        """
        if self._closed or self._pid != os.getpid():
            return
        for child in list(self._children):
            child.close()
        self._closed = True
        self._bells.ring()
        _open_groups.discard(self)
        self._wiring.give_up(self.name, GroupClosed(f"group {self.name} is closed"))
        with self._connecting:
            communicator = self._communicator
        linger = self._wiring.linger
        if communicator is None:
            self._wiring.forget(self.name)  # which may expose tensors without links
        else:
            reason = _on_its_way_out()
            if reason is not None and communicator.error is None:
                linger = min(linger, _LAST_WORDS)
                self._wiring.engine.call(lambda: communicator.give_up(reason))
            else:
                self._wiring.engine.call(lambda: self._end_operations(communicator))
            links = self._wiring.engine.remove(communicator)
            if self._libraries is not None:
                self._libraries.close(healthy=communicator.error is None)
            self._wiring.forget(self.name)
            part(communicator, links, linger)
        if self._parent is None:
            self._wiring.close()
        else:
            self._parent._children.remove(self)
        self._end_meeting(healthy=communicator is not None and communicator.error is None)

    def _end_operations(self, communicator: Communicator) -> None:
        """On the thread that drives, where every operation that was issued has been taken."""
        if communicator.busy:
            communicator.fail(
                GroupClosed(
                    f"rank {self.rank} closed group {self.name} during operations",
                    rank=self.rank,
                    node=self.nodes[self.rank],
                )
            )

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def subgroup(
        self, ranks: Sequence[int], name: str | None = None, *, timeout: float | None = None,
        strategy: Strategy | str | None = None,
    ) -> Group:  # fmt: skip
        """A group of some ranks of this one; called by its members only, linked at its first use.

        The first call, also an asynchronous one, waits until every member has made the group; they
        are linked then, whatever else they do.

        Args:
            ranks: members as ranks of this group, in the order of their new ranks.
            name: tells groups of the same members apart; the same on all of them.
            timeout, strategy: as in the group, unless given.

        Raises:
            ValueError: members that do not exist or are named twice, this rank not among them, no
                such time or strategy, or a name that is taken or cannot be sent.
        """
        self._check_open()
        if timeout is not None:
            check_timeout(timeout)
        ranks = check_members(self, ranks)
        members = [self.ranks[rank] for rank in ranks]
        # begins like the group of all, by which links that an agent hands over are sorted
        text = f"{self.name.partition('/')[0]}:{name or 'sub'}/{','.join(map(str, members))}"
        if not valid_name(text):
            raise ValueError(
                f"a subgroup's name has letters, digits and any of ._:/,- only, not {name!r}"
            )
        if any(child.name == text for child in self._children):
            raise ValueError(
                f"there is a group {text} already: close it, or give the new one another name"
            )
        child = Group(
            self._wiring,
            text,
            members,
            self.ranks[self.rank],
            [self.nodes[rank] for rank in ranks],
            epoch=self.epoch,
            timeout=self.timeout if timeout is None else timeout,
            strategy=self.strategy if strategy is None else strategy,
            connect=False,
            device=self.device,
            asynchronous=self.asynchronous,
        )
        child._parent = self
        self._children.append(child)
        self._wiring.expect(text, child._link_beside)
        return child

    # -- issuing ------------------------------------------------------------------------------

    def refuse(self, error: Refused, name: str) -> Refused:
        """Tell the other ranks, who may have issued the operation, that it does not take place.

        Returns:
            The error, which now knows the operation and this rank.
        """
        error.operation = name
        error.rank = self.rank
        error.node = self.nodes[self.rank]
        error.args = (f"{error}; {UNHARMED}",)
        if self.size > 1:
            told = Refused(
                f"rank {self.rank} on node {error.node} refused {name}: {error}",
                rank=self.rank, node=error.node, operation=name,
            )  # fmt: skip
            self._wiring.engine.refuse(self._connected(), told)
            error.sequence = told.sequence
        return error

    def _carry_out(self, operation: Operation, work: Work) -> None:
        if observers:
            operation.on_finish_inline = lambda: _observe(work)
        clock = timing_observer.current
        if clock is not None:
            clock.issued(operation)
        self._wiring.engine.run(operation, wait=not work.asynchronous)
        if not work.asynchronous:
            if clock is not None:
                clock.blocked(operation.issued, operation.done_at)
            operation.raise_error()
            work.settle()

    def _other_libraries(self) -> Libraries:
        from collective.libraries import Libraries

        if self._libraries is None:
            self._libraries = Libraries(self, engines(self.strategy))
        return self._libraries

    def _schedule(
        self,
        kind: Kind,
        nbytes: int,
        root: int = 0,
        *,
        originals: bool = False,
        reduction: tuple[ReduceOp, torch.dtype] | None = None,
    ) -> tuple[Schedule | Staged, str]:
        if self._scheduled is not self.strategy or len(self._schedules) > _SCHEDULES:
            self._schedules.clear()
            self._scheduled = self.strategy
        key = (kind, nbytes, root, originals, reduction)
        found = self._schedules.get(key)
        if found is None:
            found = self._schedules[key] = self._find_schedule(*key)
        return found

    def _find_schedule(
        self,
        kind: Kind,
        nbytes: int,
        root: int,
        originals: bool,
        reduction: tuple[ReduceOp, torch.dtype] | None,
    ) -> tuple[Schedule | Staged, str]:
        choice = resolve(self.strategy, kind, self._node_names)
        members, names = self._node_sets, self._node_names
        if choice is not None and engines(choice):
            if reduction is None or self._other_libraries().carry(*reduction):
                return hand_over(choice, kind, members, root, names), str(choice)
            choice = None
        if choice is None:
            choice = self.chooser.choose(kind, nbytes, originals=originals)
        if isinstance(choice, Flat):
            return build(choice, kind, self.size, root), str(choice)
        return build(choice, kind, self.size, root, nodes=members, names=names), str(choice)


def _observe(work: Work) -> None:
    for observer in observers:
        observer(work)


def _on_its_way_out() -> BaseException | None:
    """The exception that ends this program or block, if one does; a chosen exit is none."""
    error = sys.exc_info()[1]
    if error is None and _ending and not hasattr(sys, "ps1"):
        # in an interactive session these are of some earlier input
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return error if isinstance(error, BaseException) and not isinstance(error, SystemExit) else None


@atexit.register
def _leave_all() -> None:
    """A process that ends says so in each of its groups."""
    global _ending
    _ending = True
    for group in list(_open_groups):
        if group._parent is None:
            try:
                group.close()
            except CollectiveError:
                continue  # closed or poisoned already: nothing is left to say
