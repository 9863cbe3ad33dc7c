"""What agent and control plane, and rank and agent, say to each other: pure data and its JSON.

Both conversations carry JSON objects with a ``type``.  Between agent and control plane each
object is one WebSocket text message (subprotocol ``unisono-agent.1``); between rank and agent it
follows a length of four bytes, big-endian, on a Unix socket (`RANK_PROTOCOL`).

A receiver ignores fields that it does not know and refuses a type that it does not know.
Times are Unix seconds where they are called ``at``, and monotonic seconds everywhere else.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

AGENT_PROTOCOL = "unisono-agent.1"
RANK_PROTOCOL = 1
#: largest JSON message in either conversation; larger data is cut into several
MAX_MESSAGE = 1 << 20


class BadMessage(ValueError):
    """A message is not what the protocol allows; says which field and why."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """Base of all messages; `TYPE` names it on the wire."""

    TYPE: ClassVar[str] = ""


# --- shared parts ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU of a node, or one CPU slot."""

    index: int
    kind: Literal["cuda", "cpu"]
    name: str
    uuid: str = ""
    memory_bytes: int = 0
    #: None when free for jobs; otherwise why not, such as "python (pid 4711), 3.1 GiB"
    busy: str | None = None


@dataclass(frozen=True, kw_only=True)
class Member:
    """One rank of an attempt and where it runs."""

    rank: int
    node: str
    local_rank: int
    #: indexes of the node's devices that this rank uses
    device: int


@dataclass(frozen=True, kw_only=True)
class Host:
    """How a node is reached by the ranks of other nodes."""

    node: str
    #: in order of preference; IPv6 without brackets
    addresses: list[str]
    data_port: int
    #: nodes with the same one share their cores
    core_set: str = ""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a group of ranks needs to meet: members, addresses, strategy of each level, epoch."""

    job: str
    attempt: str
    epoch: int
    #: shared by the ranks of this attempt and epoch, and checked by agents at the data port
    secret: str
    #: "auto", "ring", "tree:2", … or "local=ring,between=tree:2"
    strategy: str
    engine: Literal["unisono", "gloo", "nccl"]
    members: list[Member]
    hosts: list[Host]


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """What a node needs to know to run its ranks of a job."""

    job: str
    attempt: str
    name: str
    #: a command, run without a shell; or None with `script`
    command: list[str] | None = None
    script: str | None = None
    args: list[str] = field(default_factory=list)
    #: SHA-256 (hex) of the bundle that holds the code; None: paths are the nodes' own
    bundle: str | None = None
    workdir: str | None = None
    python: str | None = None
    env_name: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    engine: Literal["unisono", "gloo", "nccl"] = "unisono"
    replace_backend: bool = False
    #: seconds between SIGTERM and SIGKILL
    grace: float = 15.0
    #: hosts the store of torch (MASTER_ADDR, MASTER_PORT) for all nodes
    hosts_store: bool = False


# --- agent → control plane ------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AttemptStatus:
    """What an agent still holds of an attempt when it (re)connects."""

    attempt: str
    state: Literal["prepared", "running", "ended"]


@dataclass(frozen=True, kw_only=True)
class AgentHello(Message):
    """First message of an agent on a new connection."""

    TYPE: ClassVar[str] = "agent_hello"
    agent_id: str
    #: random per start of the agent; an older one is fenced off
    incarnation: str
    name: str
    hostname: str
    addresses: list[str]
    data_port: int
    devices: list[Device]
    #: names of Python environments that jobs may ask for
    envs: list[str]
    version: str
    cores: int
    memory_bytes: int
    #: the same for agents that share their cores: several on one machine
    core_set: str = ""
    attempts: list[AttemptStatus] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Heartbeat(Message):
    """The agent lives; sent every `Welcome.heartbeat` seconds."""

    TYPE: ClassVar[str] = "heartbeat"
    at: float


@dataclass(frozen=True, kw_only=True)
class DevicesChanged(Message):
    """The node's devices, or who sits on them, changed."""

    TYPE: ClassVar[str] = "devices_changed"
    devices: list[Device]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Why a node cannot run its part of a job, and the way out."""

    #: such as "script-missing", "workdir-missing", "python-missing", "bundle-unavailable"
    code: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Prepared(Message):
    """Answer to `Prepare`: the node can, or cannot, run its ranks."""

    TYPE: ClassVar[str] = "prepared"
    attempt: str
    problems: list[Problem]
    #: of the job's Python; None where it was not found
    python_version: str | None = None
    torch_version: str | None = None
    unisono_version: str | None = None
    #: port of torch's store, where this node hosts it
    store_port: int | None = None


@dataclass(frozen=True, kw_only=True)
class Spooled(Message):
    """One entry of the agent's spool: kept on the node's disk until it is acknowledged.

    Exactly one of the parts is given.  The control plane stores an entry at most once, by
    (agent_id, number), answers with `Ack` after its commit, and takes entries in order.
    """

    TYPE: ClassVar[str] = "spooled"
    number: int
    at: float
    log: LogChunk | None = None
    steps: Steps | None = None
    metrics: Metrics | None = None
    rank: RankState | None = None
    failure: Failure | None = None
    report: RankReport | None = None
    attempt_over: AttemptOver | None = None


@dataclass(frozen=True, kw_only=True)
class LogChunk:
    """Bytes of a rank's output, whole lines unless a line is longer than the chunk."""

    attempt: str
    rank: int
    stream: Literal["stdout", "stderr"]
    #: where in the stream it starts, in bytes
    offset: int
    #: the bytes as UTF-8, what is not UTF-8 replaced
    text: str
    #: length in bytes before decoding: the next chunk starts at offset + size
    size: int
    #: bytes that were dropped before this chunk, because the spool or the log was full
    cut: int = 0


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Timings of consecutive steps of one rank, one entry per step in every column; seconds."""

    attempt: str
    rank: int
    step: list[int]
    #: Unix time of the step's end
    at: list[float]
    total: list[float]
    #: waiting for the next batch: from the end of the last step to the first forward
    data: list[float]
    #: forward and backward without communication that nothing hides
    compute: list[float]
    #: exposed communication: last collective done − last collective ready, and synchronous calls
    exposed: list[float]
    optimizer: list[float]
    #: communication in all, hidden or not
    communication: list[float]
    #: how long this rank waited for the others to arrive, part of `exposed`
    waited: list[float]
    #: bytes sent on links
    sent: list[int]
    #: "step", "warmup", or the name of a phase such as "eval"
    label: list[str]


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """What the program reported at one step, by a line on stdout or by `collective.log`."""

    attempt: str
    rank: int
    step: int | None
    values: dict[str, int | float | str | bool]


@dataclass(frozen=True, kw_only=True)
class RankState:
    """A rank started or ended."""

    attempt: str
    rank: int
    state: Literal["running", "exited", "failed-to-start"]
    pid: int | None = None
    exit_code: int | None = None
    #: number of the signal that ended it
    signal: int | None = None
    message: str | None = None


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An exception that ended a rank, or an error of a collective."""

    attempt: str
    rank: int
    kind: str
    message: str
    traceback: str
    #: the rank that the error names, when it is another one: then this is a consequence
    culprit: int | None = None


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """Facts a rank tells once: what it runs, and why it has no timings if it has none."""

    attempt: str
    rank: int
    values: dict[str, int | float | str | bool]


@dataclass(frozen=True, kw_only=True)
class AttemptOver:
    """No process of this attempt is left on the node, and all it wrote is in the spool."""

    attempt: str


# --- control plane → agent ------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Welcome(Message):
    """Answer to `AgentHello`."""

    TYPE: ClassVar[str] = "welcome"
    node_id: str
    name: str
    heartbeat: float
    #: highest spool number that is stored
    acknowledged: int
    #: attempts that the agent holds but that are over for the control plane: to be ended
    end: list[str] = field(default_factory=list)
    #: what nodes show each other to measure the link between them
    probe_secret: str = ""


@dataclass(frozen=True, kw_only=True)
class Fenced(Message):
    """Another incarnation of this agent is connected, or the node was removed: stop for good."""

    TYPE: ClassVar[str] = "fenced"
    reason: str


@dataclass(frozen=True, kw_only=True)
class Prepare(Message):
    """Fetch the code, check paths and Python; answer with `Prepared`; start nothing yet."""

    TYPE: ClassVar[str] = "prepare"
    spec: JobSpec
    ranks: list[Member]


@dataclass(frozen=True, kw_only=True)
class Launch(Message):
    """Start this node's ranks of a prepared attempt."""

    TYPE: ClassVar[str] = "launch"
    attempt: str
    plan: Plan
    master_address: str
    master_port: int


@dataclass(frozen=True, kw_only=True)
class End(Message):
    """End this node's ranks of an attempt: SIGTERM, grace, SIGKILL; harmless when repeated."""

    TYPE: ClassVar[str] = "end"
    attempt: str
    reason: str
    #: None: the job's own
    grace: float | None = None


@dataclass(frozen=True, kw_only=True)
class Ack(Message):
    """All spool entries up to `number` are stored."""

    TYPE: ClassVar[str] = "ack"
    number: int


# --- rank → agent ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RankHello(Message):
    """First message of a rank on its agent's socket."""

    TYPE: ClassVar[str] = "rank_hello"
    protocol: int
    attempt: str
    rank: int
    token: str
    pid: int


@dataclass(frozen=True, kw_only=True)
class RankSteps(Message):
    TYPE: ClassVar[str] = "rank_steps"
    steps: Steps


@dataclass(frozen=True, kw_only=True)
class RankMetrics(Message):
    TYPE: ClassVar[str] = "rank_metrics"
    metrics: Metrics


@dataclass(frozen=True, kw_only=True)
class RankFailure(Message):
    TYPE: ClassVar[str] = "rank_failure"
    failure: Failure


@dataclass(frozen=True, kw_only=True)
class RankFacts(Message):
    TYPE: ClassVar[str] = "rank_facts"
    report: RankReport


# --- agent → rank ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RankPlan(Message):
    """The plan of the rank's attempt; sent at once after a good `RankHello`."""

    TYPE: ClassVar[str] = "rank_plan"
    plan: Plan


@dataclass(frozen=True, kw_only=True)
class LinkRequest:
    """Who dials whom on a data port: the headers of the handshake, without the secret."""

    job: str
    attempt: str
    group: str
    epoch: int
    #: the rank that dials, and receives the data unless it `sends`
    dialler: int
    #: the rank that is dialled, and sends the data unless the dialler `sends`
    target: int
    #: one of `collective.links.handshake.CHANNELS`
    channel: str
    #: whether the dialler sends the data, since the target cannot dial it
    sends: bool = False
    #: the addresses that the dialler was given by hand, as `collective.membership` says them
    addresses: str = ""


@dataclass(frozen=True, kw_only=True)
class RankLink(Message):
    """A connected data socket for the rank; its descriptor travels with the message."""

    TYPE: ClassVar[str] = "rank_link"
    request: LinkRequest
    #: bytes that were already read behind the handshake, as latin-1 text
    unread: str = ""


def _subclasses() -> dict[str, type[Message]]:
    return {cls.TYPE: cls for cls in Message.__subclasses__()}


def encode(message: Message) -> str:
    """The JSON text of a message; parts that are None are left out."""
    body: dict[str, Any] = {"type": message.TYPE}
    for entry in dataclasses.fields(message):
        value = getattr(message, entry.name)
        if value is not None:
            body[entry.name] = _plain(value)
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False, allow_nan=True)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            entry.name: _plain(part)
            for entry in dataclasses.fields(value)
            if (part := getattr(value, entry.name)) is not None
        }
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def decode(text: str | bytes) -> Message:
    """The message that a JSON text holds.

    Raises:
        BadMessage: not JSON, an unknown type, or a field that is missing or of the wrong type.
    """
    try:
        body = json.loads(text)
    except ValueError as error:
        raise BadMessage(f"not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadMessage("a message is a JSON object")
    cls = _subclasses().get(str(body.get("type")))
    if cls is None:
        raise BadMessage(f"unknown message type {body.get('type')!r}")
    return typing.cast(Message, from_plain(cls, body))


Check = Callable[[Any, str], Any]


def from_plain(cls: type, body: Any, where: str = "") -> Any:
    """An instance of a dataclass of this module from decoded JSON, every field checked."""
    if not isinstance(body, dict):
        raise BadMessage(f"{where or cls.__name__}: expected an object, got {body!r:.80}")
    prefix = where or cls.__name__
    values = {}
    for name, check, optional, nullable in _fields(cls):
        if name in body:
            values[name] = check(body[name], f"{prefix}.{name}")
        elif not optional:
            if not nullable:
                raise BadMessage(f"{prefix}.{name} is missing")
            values[name] = None
    return cls(**values)


@functools.cache
def _fields(cls: type) -> list[tuple[str, Check, bool, bool]]:
    """Name, check, whether it may be missing and whether None may stand for it, of each field."""
    hints = typing.get_type_hints(cls)
    missing = dataclasses.MISSING
    return [
        (
            entry.name,
            _check(hints[entry.name]),
            entry.default is not missing or entry.default_factory is not missing,
            type(None) in typing.get_args(hints[entry.name]),
        )
        for entry in dataclasses.fields(cls)
    ]


@functools.cache
def _check(hint: Any) -> Check:
    """The function that checks a value against a type: made once, called for each message."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _check_union(hint, arguments)
    if origin is Literal:
        return _check_literal(arguments)
    if origin is list:
        return _check_list(arguments[0])
    if origin is dict:
        return _check_dict(arguments[1])
    if dataclasses.is_dataclass(hint):
        return lambda value, path: from_plain(typing.cast(type, hint), value, path)
    return _check_plain(hint)


def _check_union(hint: Any, arguments: tuple[Any, ...]) -> Check:
    options = [_check(option) for option in arguments]

    def check(value: Any, path: str) -> Any:
        if type(value) in arguments:
            return value  # 64 stays an integer where a float would do as well
        for option in options:
            try:
                return option(value, path)
            except BadMessage:
                continue
        raise BadMessage(f"{path}: {value!r:.80} is none of {hint}")

    return check


def _check_literal(allowed: tuple[Any, ...]) -> Check:
    def check(value: Any, path: str) -> Any:
        if value not in allowed:
            raise BadMessage(f"{path}: {value!r:.80} is none of {allowed}")
        return value

    return check


def _check_list(item: Any) -> Check:
    check_item = _check(item)

    def check(value: Any, path: str) -> Any:
        if not isinstance(value, list):
            raise BadMessage(f"{path}: expected a list, got {value!r:.80}")
        # the columns of a rank's steps: most of what a control plane decodes
        if item in (int, float, str) and all(type(part) is item for part in value):
            return value
        return [check_item(part, f"{path}[{index}]") for index, part in enumerate(value)]

    return check


def _check_dict(item: Any) -> Check:
    check_item = _check(item)

    def check(value: Any, path: str) -> Any:
        if not isinstance(value, dict):
            raise BadMessage(f"{path}: expected an object, got {value!r:.80}")
        return {str(key): check_item(part, f"{path}.{key}") for key, part in value.items()}

    return check


def _check_plain(hint: Any) -> Check:
    def check(value: Any, path: str) -> Any:
        if hint is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if hint is type(None):
            if value is None:
                return None
        elif isinstance(value, hint) and not (isinstance(value, bool) and hint is not bool):
            return value
        raise BadMessage(f"{path}: expected {getattr(hint, '__name__', hint)}, got {value!r:.80}")

    return check
