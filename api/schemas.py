"""What REST takes and gives; every model says its own examples."""

from __future__ import annotations

import posixpath
import re
import unicodedata
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from api import examples
from collective.strategies import check_levels, check_names, parse
from collective.strategies.spelling import MAX_TEXT

Role = Literal["viewer", "operator", "admin", "node"]
Engine = Literal["unisono", "gloo", "nccl"]

#: set by Unisono for every rank, so that a job cannot set them
RESERVED_VARIABLES = frozenset(
    (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_USE_AGENT_STORE",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_RUN_ID",
        "UNISONO_JOB",
        "UNISONO_ATTEMPT",
        "UNISONO_AGENT",
        "UNISONO_NODE",
        "UNISONO_AGENT_SOCKET",
        "UNISONO_RANK_TOKEN",
        "UNISONO_RUN_DIR",
        "UNISONO_BACKEND",
        "UNISONO_STRATEGY",
        "CUDA_VISIBLE_DEVICES",
    )
)
_VARIABLE = re.compile(r"[^=\x00]+")


def shown(text: str) -> str:
    """A name as it can be shown anywhere: no control, format or separator characters."""
    for char in text:
        if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
            raise ValueError(f"contains the character U+{ord(char):04X}, which cannot be shown")
    if not text.strip() or text != text.strip():
        raise ValueError("is empty, or begins or ends with a space")
    return text


def node_name(text: str) -> str:
    """A node's name: shown, and usable as one part of a URL's path."""
    if "/" in text or "\\" in text or text.startswith("."):
        raise ValueError("must not contain a slash or begin with a dot: it is part of addresses")
    return shown(text)


def without_nul(text: str) -> str:
    """Text that can be an argument of a process."""
    if "\x00" in text:
        raise ValueError("contains a NUL character, which no argument or path can hold")
    return text


def strategy_spelling(text: str) -> str:
    """A strategy for both levels, or `local=…,local@NODE=…,between=…`; the one text of it."""
    strategy = parse(text)
    check_levels(strategy)
    return str(strategy)


Shown = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(shown)]
NodeName = Annotated[str, Field(min_length=1, max_length=100), AfterValidator(node_name)]
Argument = Annotated[str, Field(max_length=1 << 20), AfterValidator(without_nul)]
PathText = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(without_nul)]
Strategy = Annotated[str, Field(max_length=MAX_TEXT), AfterValidator(strategy_spelling)]
Count = Annotated[int, Field(ge=1, le=4096, strict=True)]


def _joined(folder: str, path: str | None) -> str:
    """A path that is relative to a folder, unless it begins with / or ~."""
    path = path or ""
    return path if path.startswith("~") else posixpath.join(folder, path)


class Input(BaseModel):
    """Base of all request bodies: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")


class JobRequest(Input):
    """A job to start: what to run, with which code, where, and how its ranks exchange."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "name": "digits",
                    "script": "digits_ddp.py",
                    "args": ["--epochs", "5"],
                    "nodes": 2,
                    "ranks_per_node": 2,
                },
                {"command": ["python", "-m", "train"], "on": {"w1": 4, "w2": 1}},
            ]
        },
    )
    name: Shown | None = Field(
        default=None, description="shown; by default the script's or command's name"
    )
    command: list[Argument] | None = Field(default=None, max_length=10_000)
    script: PathText | None = None
    args: list[Argument] = Field(default_factory=list, max_length=10_000)
    bundle: str | None = Field(
        default=None, pattern="^[0-9a-f]{64}$", description="digest of the code"
    )
    workdir: PathText | None = None
    python: PathText | None = None
    env_name: Shown | None = Field(default=None, description="an environment that the nodes name")
    nodes: Count | None = Field(default=None, description="how many nodes; 1 unless said otherwise")
    ranks_per_node: Count | None = None
    on: dict[NodeName, Count] | None = Field(default=None, description="ranks on each named node")
    all_free: bool = Field(default=False, description="every free device of every node")
    set: dict[str, Argument] = Field(default_factory=dict, description="environment variables")
    strategy: Strategy = "auto"
    engine: Engine = "unisono"
    replace_backend: bool = False
    grace: float | None = Field(
        default=None, ge=0, le=3600, description="seconds from SIGTERM to SIGKILL"
    )

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.command is None) == (self.script is None):
            raise ValueError("give either command (a list) or script, with its args")
        if self.command is not None and (not self.command or not self.command[0]):
            raise ValueError("command is empty: its first entry is the program")
        if self.command is not None and self.args:
            raise ValueError("args go with script; a command holds its own arguments")
        if self.command is not None and len(self.command) == 1 and " " in self.command[0].strip():
            words = self.command[0].split()
            raise ValueError(
                f"command is the one word {self.command[0]!r:.80}, and no shell splits it: "
                f"give a list such as {words!r:.120}"
            )
        ways = [self.on is not None, self.all_free, bool(self.nodes or self.ranks_per_node)]
        if sum(ways) > 1:
            raise ValueError("give one of: nodes and ranks_per_node, on, all_free")
        if self.on is not None and not self.on:
            raise ValueError("on names no node")
        if self.on is not None:
            check_names(parse(self.strategy), list(self.on))
        if self.python is not None and self.env_name is not None:
            raise ValueError("give either python (a path) or env_name")
        if self.bundle is not None:
            workdir = self.workdir or ""
            for name, path in (("workdir", workdir), ("script", _joined(workdir, self.script))):
                if not path.startswith("~") and posixpath.normpath(path).split("/")[0] == "..":
                    raise ValueError(
                        f"{name}: {path!r:.200} leads out of the bundle; give a path inside it, or "
                        "one of the nodes, which begins with / or ~"
                    )
        for name in self.set:
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"set: {name!r:.60} cannot be the name of a variable")
            if name in RESERVED_VARIABLES:
                raise ValueError(f"set: {name} is set by Unisono for every rank")
        return self

    def title(self) -> str:
        """The job's name, given or derived."""
        if self.name is not None:
            return self.name
        path = self.script or (self.command or [""])[0]
        text = path.rstrip("/").rsplit("/", 1)[-1]
        clean = "".join(c if unicodedata.category(c)[0] != "C" else "?" for c in text).strip()
        return clean[:200] or "job"


class JoinRequest(Input):
    """A node that wants to belong to the cluster."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"agent_id": "5c1d0a7e93b24f6d", "name": "w1", "hostname": "host1"}]
        },
    )
    agent_id: str = Field(min_length=8, max_length=128, pattern="^[A-Za-z0-9._-]+$")
    name: NodeName
    hostname: Annotated[str, Field(max_length=255), AfterValidator(without_nul)]


class JoinAnswer(BaseModel):
    """The node's own credential, shown this once."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"node_id": "n-2ee4389bb500", "name": "w1", "credential": "un_node_7Qd…"}]
        }
    )
    node_id: str
    name: str
    credential: str


class TokenRequest(Input):
    """A token to make."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"name": "grafana", "role": "viewer", "ttl": 86400}]},
    )
    name: Shown
    role: Role
    ttl: float | None = Field(default=None, gt=0, le=20 * 365 * 86_400, description="seconds")


class CodeRequest(Input):
    """A one-time login code."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"code": "un_code_4Zr…"}]}
    )
    code: str = Field(min_length=1, max_length=200)


class RendezvousRequest(Input):
    """One program that was started by hand and wants to meet its group."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "world_size": 2,
                    "rank": None,
                    "addresses": ["10.0.0.5"],
                    "port": 41234,
                    "node": "w1",
                    "participant": "5f0c…",
                }
            ]
        },
    )
    world_size: Count
    rank: int | None = Field(default=None, ge=0)
    addresses: list[Annotated[str, Field(min_length=1, max_length=255)]] = Field(
        min_length=1, max_length=64
    )
    port: int = Field(ge=1, le=65535)
    node: Shown
    participant: str = Field(min_length=8, max_length=128, description="random, per program")
    strategy: Strategy = "auto"

    @model_validator(mode="after")
    def _in_range(self) -> Self:
        if self.rank is not None and self.rank >= self.world_size:
            raise ValueError(f"rank {self.rank} is outside a world of {self.world_size}")
        return self


class Cause(BaseModel):
    """Why a job ended other than well."""

    rank: int | None = None
    node: str | None = None
    kind: str
    message: str
    traceback: str | None = None
    exit_code: int | None = None
    signal: int | None = None
    at: float | None = None
    #: the rank whose error named this one, where this one said nothing itself
    reported_by: int | None = None


class Job(BaseModel):
    """A job and how far it is."""

    model_config = ConfigDict(json_schema_extra={"examples": [examples.JOB]})
    id: str
    name: str
    state: Literal[
        "queued", "starting", "running", "cancelling", "completed", "failed", "cancelled", "lost"
    ]
    reason: str | None
    waiting_for: str | None
    created_at: float
    started_at: float | None
    ended_at: float | None
    spec: dict[str, Any]
    attempt: str | None
    nodes: list[str]
    world_size: int | None
    strategy: str
    engine: str
    cause: Cause | None
    consequences: list[dict[str, Any]]
    progress: dict[str, Any] | None
    created_by: str


class Device(BaseModel):
    """One GPU or CPU slot of a node; `job` holds it, or `busy` says who else does."""

    index: int
    kind: Literal["cuda", "cpu"]
    name: str
    uuid: str = ""
    memory_bytes: int = 0
    busy: str | None = None
    job: str | None = None


class Node(BaseModel):
    """A machine that joined."""

    model_config = ConfigDict(json_schema_extra={"examples": [examples.NODE]})
    id: str
    name: str
    hostname: str
    state: Literal["online", "offline"]
    connected: bool
    draining: bool
    addresses: list[str]
    data_port: int
    version: str
    cores: int
    memory_bytes: int
    envs: list[str]
    last_seen_at: float | None
    joined_at: float
    devices: list[Device]


class Rank(BaseModel):
    """One rank of a job's attempt."""

    model_config = ConfigDict(json_schema_extra={"examples": [examples.RANK]})
    rank: int
    node: str
    local_rank: int
    device: dict[str, Any]
    state: Literal["waiting", "running", "exited", "failed-to-start", "not-started", "lost"]
    pid: int | None
    exit_code: int | None
    signal: int | None
    message: str | None
    started_at: float | None
    ended_at: float | None
    step: int | None
    report: dict[str, Any]
    logs: dict[str, int]


class Token(BaseModel):
    """A token without its secret."""

    model_config = ConfigDict(json_schema_extra={"examples": [examples.TOKEN]})
    id: str
    name: str
    role: Role
    kind: Literal["api", "join", "node", "code", "session"]
    created_at: float
    expires_at: float
    revoked_at: float | None
    last_used_at: float | None


class NewToken(Token):
    """A token that has just been made, with its secret, which is shown this once."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [examples.TOKEN | {"token": "un_api_Spw…"}]}
    )
    token: str


class Page(BaseModel):
    """A page of a list; the same call with `cursor=next_cursor` gives the next one."""

    next_cursor: str | None


class JobPage(Page):
    """Jobs, newest first, without what may be long."""

    items: list[Job]


class RankPage(Page):
    """Ranks by number."""

    items: list[Rank]


class NodePage(Page):
    """Nodes in the order in which they joined."""

    items: list[Node]


class TokenPage(Page):
    """Tokens, newest first."""

    items: list[Token]
