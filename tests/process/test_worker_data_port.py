"""The data port and the ranks' socket: who gets in, and that bytes reach the rank they are for."""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import select
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from waiting import eventually

from collective.agent_channel import AgentChannel
from collective.errors import RendezvousFailed
from collective.links import handshake
from collective.links.handshake import ClientHandshake
from collective.messages import (
    BadMessage,
    Host,
    LinkRequest,
    Member,
    Message,
    Metrics,
    Plan,
    RankHello,
    RankMetrics,
    RankPlan,
)
from worker.data_port import DataPort, Target, global_rank, listen
from worker.errors import LocalProblem, Refused
from worker.probing import ProbeServer, measure_peer
from worker.rank_socket import RankConnection, RankSocket

pytestmark = pytest.mark.timeout(30)

PLAN = Plan(
    job="j-1",
    attempt="a-1",
    epoch=3,
    secret="5ec7e7",
    strategy="auto",
    engine="unisono",
    members=[
        Member(rank=rank, node="w1" if rank < 2 else "w2", local_rank=rank % 2, device=rank % 2)
        for rank in range(4)
    ],
    hosts=[Host(node="w1", addresses=["127.0.0.1"], data_port=8701)],
)
REQUEST = LinkRequest(
    job="j-1", attempt="a-1", group="default", epoch=3, dialler=2, target=1, channel="collective"
)


class Node:
    """An attempt of which ranks 0 and 1 run here, with its real sockets."""

    token = "t0ken"

    def __init__(self, folder: Path, link_wait: float, handshake_timeout: float = 30.0) -> None:
        self.connections: dict[int, RankConnection] = {}
        self.messages: queue.Queue[tuple[int, Message]] = queue.Queue()
        self.left: queue.Queue[int] = queue.Queue()
        self.rank_socket = RankSocket(folder / "agent.sock", welcome=self.welcome)
        self.probes = ProbeServer()
        self.data_port = DataPort(
            listen("127.0.0.1", 0),
            probes=self.probes,
            find=lambda attempt: self.target if attempt == "a-1" else None,
            handshake_timeout=handshake_timeout,
            link_wait=link_wait,
        )

    @property
    def target(self) -> Target:
        return Target(plan=PLAN, live_ranks=frozenset({0, 1}), connections=dict(self.connections))

    def welcome(self, hello: RankHello) -> tuple[Node, RankPlan] | None:
        return (self, RankPlan(plan=PLAN)) if hello.rank in (0, 1) else None

    def connected(self, connection: RankConnection) -> None:
        self.connections[connection.rank] = connection
        self.data_port.ranks_changed()

    def received(self, connection: RankConnection, message: Message) -> None:
        if not isinstance(message, RankMetrics):
            raise BadMessage("only metrics in this test")
        self.messages.put((connection.rank, message))

    def disconnected(self, connection: RankConnection) -> None:
        self.left.put(connection.rank)

    def channel(self, rank: int, token: str = token) -> AgentChannel:
        return AgentChannel(str(self.rank_socket.path), "a-1", rank, token)

    def dial(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.data_port.port), 10)

    def close(self) -> None:
        self.data_port.close()
        self.probes.close()
        self.rank_socket.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    before = len(os.listdir("/proc/self/fd"))
    node = Node(tmp_path, 10.0)
    yield node
    node.close()
    assert len(os.listdir("/proc/self/fd")) == before


def shake(connection: socket.socket, request: LinkRequest, secret: str = PLAN.secret) -> int | None:
    """Send the handshake; None when the link is open, else the status of the refusal."""
    client = ClientHandshake("127.0.0.1", 1, request, secret)
    connection.sendall(client.hello)
    while not client.done:
        try:
            client.feed(connection.recv(4096))
        except RendezvousFailed:
            return client.status
    return None


def test_a_link_reaches_its_rank_with_all_bytes(node: Node) -> None:
    """The rank gets the dialler's own socket; bytes flow both ways."""
    channel = node.channel(1)
    links: queue.Queue[tuple[LinkRequest, socket.socket, bytes]] = queue.Queue()
    assert channel.plan(5) == PLAN
    channel.on_link(lambda *link: links.put(link))
    with node.dial() as dialler:
        assert shake(dialler, REQUEST) is None
        request, link, unread = links.get(timeout=10)
        assert (request, unread) == (REQUEST, b"")
        with link:
            dialler.sendall(b"hello")
            assert link.recv(5) == b"hello"
            link.sendall(b"data")
            assert dialler.recv(4) == b"data"
        assert dialler.recv(1) == b""
    channel.close()


def test_a_link_waits_for_its_rank(node: Node) -> None:
    """Who dials before the rank has said hello is answered when it has; many at a time."""
    answered: list[int | None] = []

    def dial(number: int) -> None:
        with node.dial() as connection:
            answered.append(shake(connection, replace(REQUEST, dialler=number)))

    diallers = [threading.Thread(target=dial, args=(number,)) for number in (0, 2, 3)]
    for dialler in diallers:
        dialler.start()
    eventually(lambda: sum(p.waits_for is not None for p in node.data_port._pending) == 3)
    assert answered == []
    channel = node.channel(1)
    for dialler in diallers:
        dialler.join(5)
    assert answered == [None, None, None]
    # They came before anybody asked for them, and are delivered to whoever does.
    found: queue.Queue[tuple[LinkRequest, socket.socket, bytes]] = queue.Queue()
    channel.on_link(lambda *link: found.put(link))
    links = [found.get(timeout=5) for _ in range(3)]
    assert {request.dialler for request, _, _ in links} == {0, 2, 3}
    for _, link, _ in links:
        link.close()
    channel.close()


@pytest.mark.parametrize(
    ("request_", "secret", "status"),
    [
        (REQUEST, "wrong", 401),
        (REQUEST, "", 401),
        (replace(REQUEST, attempt="a-2"), PLAN.secret, 404),
        (replace(REQUEST, job="j-2"), PLAN.secret, 404),
        (replace(REQUEST, epoch=2), PLAN.secret, 409),
        (replace(REQUEST, target=3), PLAN.secret, 404),
        (replace(REQUEST, group="sub/1,0,3", target=2), PLAN.secret, 404),
        (replace(REQUEST, group="sub/1,0", target=2), PLAN.secret, 404),
        (replace(REQUEST, group="sub/one", target=0), PLAN.secret, 404),
    ],
)
def test_strangers_are_refused_and_logged(
    node: Node, caplog: pytest.LogCaptureFixture, request_: LinkRequest, secret: str, status: int
) -> None:
    """A wrong secret, job, attempt, epoch or rank is refused, and logged without any secret."""
    channel = node.channel(1)
    with caplog.at_level(logging.INFO, "worker"), node.dial() as connection:
        assert shake(connection, request_, secret) == status
    assert f"refused ({status}" in caplog.text
    assert PLAN.secret not in caplog.text and "wrong\n" not in caplog.text
    channel.close()


def test_other_programs_at_the_port_are_sent_away(node: Node) -> None:
    """What is not a handshake of a data link is closed and hurts nobody."""
    with node.dial() as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 4")
    with node.dial() as connection:
        connection.sendall(b"\x16\x03\x01\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400")
    channel = node.channel(0)
    with node.dial() as connection:
        assert shake(connection, replace(REQUEST, target=0)) is None
    channel.close()


def test_who_says_nothing_is_sent_away(tmp_path: Path) -> None:
    """A connection without a handshake is closed when its time is up."""
    node = Node(tmp_path, 10.0, handshake_timeout=0.2)
    with node.dial() as silent:
        assert silent.recv(100) == b""
    node.close()


def test_a_rank_that_never_comes_is_told(tmp_path: Path) -> None:
    """A held connection is refused when its time is up."""
    node = Node(tmp_path, 0.2)
    with node.dial() as connection:
        assert shake(connection, REQUEST) == 404
    node.close()


def test_the_members_of_a_subgroup_are_in_its_name() -> None:
    """The rank a request is for follows from the group's name and the rank in the group."""
    assert global_rank(REQUEST) == 1
    assert global_rank(replace(REQUEST, group="default:dp/3,1", target=0)) == 3


def test_a_taken_port_is_refused_with_the_way_out() -> None:
    """Another program on the data port is an error that names the port and the option."""
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LocalProblem, match=f"taken.*127.0.0.1:{port}.*--data-port"):
            listen("127.0.0.1", port)


def test_all_families_are_served() -> None:
    """Without an address the port is open for IPv4, and for IPv6 where there is any."""
    with listen(None, 0) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), 5):
            pass
        if listener.family == socket.AF_INET6:
            with socket.create_connection(("::1", port), 5):
                pass


def test_wrong_tokens_and_ranks_get_no_plan(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    """A process without the attempt's token, or for a rank that is not here, is let in nowhere."""
    for rank, token in ((1, "other"), (3, Node.token)):
        channel = node.channel(rank, token)
        with pytest.raises(RendezvousFailed, match="no plan from the agent"):
            channel.plan(5)
        channel.close()
    assert "wrong token for rank 1" in caplog.text
    assert "other" not in caplog.text.replace("another", "")
    with pytest.raises(RendezvousFailed, match="does not answer"):
        AgentChannel("/nowhere/agent.sock", "a-1", 0, "")
    assert AgentChannel.from_environment({}) is None
    with pytest.raises(RendezvousFailed, match="incomplete"):
        AgentChannel.from_environment({"UNISONO_AGENT_SOCKET": "/x"})


def metrics(step: int, size: int = 1) -> RankMetrics:
    return RankMetrics(
        metrics=Metrics(attempt="a-1", rank=1, step=step, values={"text": "m" * size})
    )


def test_what_is_queued_is_flushed_at_close(node: Node) -> None:
    """Messages arrive in order, also those that were queued just before the end."""
    channel = node.channel(1)
    assert all(channel.send(metrics(step)) for step in range(100))
    channel.close(5)
    steps = []
    for _ in range(100):
        rank, message = node.messages.get(timeout=5)
        assert rank == 1 and isinstance(message, RankMetrics)
        steps.append(message.metrics.step)
    assert steps == list(range(100))
    assert node.left.get(timeout=5) == 1
    assert not channel.send(metrics(0))


def test_an_agent_that_does_not_read_never_blocks_its_rank(tmp_path: Path) -> None:
    """The queue is bounded: what does not fit is dropped and counted."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "agent.sock"))
        listener.listen()
        channel = AgentChannel(str(tmp_path / "agent.sock"), "a-1", 1, "t")
        taken = sum(channel.send(metrics(step, 100_000)) for step in range(200))
        assert 0 < taken < 200 and channel.dropped == 200 - taken
        channel.close(0.1)


def test_a_descriptor_may_come_in_pieces(tmp_path: Path) -> None:
    """Links are told apart however the kernel cuts the stream."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "agent.sock"))
        listener.listen()
        channel = AgentChannel(str(tmp_path / "agent.sock"), "a-1", 1, "t")
        links: queue.Queue[tuple[LinkRequest, socket.socket, bytes]] = queue.Queue()
        channel.on_link(lambda *link: links.put(link))
        agent, _ = listener.accept()
        with agent:
            pairs = [socket.socketpair() for _ in range(3)]
            for number, (_, theirs) in enumerate(pairs):
                body = (
                    '{"type":"rank_link","unread":"\\u00ff","request":{"job":"j","attempt":"a",'
                    f'"group":"g","epoch":1,"dialler":{number},"target":1,"channel":"p2p"}}}}'
                ).encode()
                frame = struct.pack("!I", len(body)) + body
                socket.send_fds(agent, [frame[:3]], [theirs.fileno()])
                agent.sendall(frame[3:])
                theirs.close()
            for number, (ours, _) in enumerate(pairs):
                request, link, unread = links.get(timeout=10)
                assert (request.dialler, unread) == (number, b"\xff")
                with ours, link:
                    ours.sendall(bytes([number]))
                    assert link.recv(1) == bytes([number])
        channel.close()


def _in_child(channel: AgentChannel, answer: multiprocessing.connection.Connection) -> None:
    answer.send((channel.send(metrics(1)), channel._socket.fileno()))


def test_a_forked_child_holds_no_channel(node: Node) -> None:
    """A child that was forked from a rank neither speaks to the agent nor keeps its socket."""
    channel = node.channel(1)
    channel.plan(5)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_in_child, args=(channel, theirs))
    child.start()
    assert ours.recv() == (False, -1)
    child.join(5)
    assert channel.send(metrics(2))
    channel.close()
    assert node.left.get(timeout=5) == 1
    for pipe in (ours, theirs):
        pipe.close()
    child.close()


def test_another_node_measures_its_link(node: Node) -> None:
    """Whoever shows the cluster's secret gets figures; whoever does not, is told what to do."""
    port = node.data_port.port
    with pytest.raises(LocalProblem, match="503 this node has not been welcomed"):
        measure_peer("127.0.0.1", port, "right")
    node.probes.admit("right")
    found = measure_peer("127.0.0.1", port, "right")
    assert (found.here, found.there) == ("127.0.0.1", "127.0.0.1")
    assert 0 < found.sample.round_trip < 1
    assert found.sample.rate > 1e6
    with pytest.raises(Refused, match=r"belongs to another cluster.*\(401\)"):
        measure_peer("127.0.0.1", port, "wrong")
    eventually(lambda: not node.probes._open, 5, "the measurement ends on this side")


def test_a_broken_measurement_holds_up_no_end() -> None:
    """An agent that leaves does so, also while another node breaks its measurement off."""
    probes = ProbeServer()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours, theirs = socket.create_connection(listener.getsockname()), listener.accept()[0]
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    theirs.close()  # a reset
    eventually(lambda: select.select([ours], [], [], 0)[0])
    probes._open.add(ours)  # as until its thread has run
    probes.close()
    ours.close()


def test_a_node_that_cannot_be_measured_is_named(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent of an older version says that it does not know the channel; or nobody listens."""
    monkeypatch.setattr(handshake, "CHANNELS", ("collective",))
    with pytest.raises(Refused, match="too old to be measured"):
        measure_peer("127.0.0.1", node.data_port.port, "right")
    monkeypatch.setattr("worker.probing._LONGEST", 0.2)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # so nobody else listens there meanwhile
        port = bound.getsockname()[1]
        with pytest.raises(
            LocalProblem, match=r"cannot reach the agent at 127\.0\.0\.1.*is the agent"
        ):
            measure_peer("127.0.0.1", port, "right")
