"""The tables.

Logs are files (`api.logs`); here is only how far they are stored.  Steps are columnar blobs
(`api.steps`).  Times are Unix seconds.
"""

from __future__ import annotations

from typing import Any, ClassVar

from sqlalchemy import (
    JSON,
    BigInteger,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    Text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

#: SQLite numbers rows by itself only in a column of type INTEGER
Key = BigInteger().with_variant(Integer, "sqlite")


class Base(DeclarativeBase):
    """Base of all tables."""

    type_annotation_map: ClassVar[dict[Any, Any]] = {
        float: Double,
        int: BigInteger,
        dict[str, Any]: JSON,
        list[Any]: JSON,
    }


class Token(Base):
    """Anything secret that lets somebody in; only its SHA-256 is kept."""

    __tablename__ = "tokens"
    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    kind: Mapped[str] = mapped_column(String(16))  # api, join, node, code, session
    role: Mapped[str] = mapped_column(String(16))  # viewer, operator, admin, node
    name: Mapped[str] = mapped_column(String(200))
    digest: Mapped[str] = mapped_column(String(64), unique=True)
    node_id: Mapped[str | None] = mapped_column(String(32), index=True)
    created_at: Mapped[float]
    expires_at: Mapped[float]
    revoked_at: Mapped[float | None]
    last_used_at: Mapped[float | None]


class Node(Base):
    """A machine that joined; removed ones stay, so that the past keeps their names."""

    __tablename__ = "nodes"
    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    agent_id: Mapped[str] = mapped_column(String(128), index=True)
    name: Mapped[str] = mapped_column(String(100), index=True)
    hostname: Mapped[str] = mapped_column(String(255))
    joined_at: Mapped[float]
    removed_at: Mapped[float | None]
    draining: Mapped[bool] = mapped_column(default=False)
    last_seen_at: Mapped[float | None]
    incarnation: Mapped[str | None] = mapped_column(String(128))
    #: highest spool number that is stored
    acknowledged: Mapped[int] = mapped_column(default=0)
    #: what its last `AgentHello` said
    facts: Mapped[dict[str, Any]] = mapped_column(default=dict)


class Job(Base):
    """What a user started."""

    __tablename__ = "jobs"
    number: Mapped[int] = mapped_column(Key, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(32), unique=True)
    name: Mapped[str] = mapped_column(String(200))
    state: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str | None] = mapped_column(Text)
    created_at: Mapped[float]
    started_at: Mapped[float | None]
    ended_at: Mapped[float | None]
    spec: Mapped[dict[str, Any]]
    attempt: Mapped[str | None] = mapped_column(String(32))
    nodes: Mapped[list[Any]] = mapped_column(default=list)
    world_size: Mapped[int | None] = mapped_column(Integer)
    cause: Mapped[dict[str, Any] | None]
    consequences: Mapped[list[Any]] = mapped_column(default=list)
    progress: Mapped[dict[str, Any] | None]
    created_by: Mapped[str] = mapped_column(String(200))
    __table_args__ = (Index("jobs_by_state", "state", "number"),)


class Idempotency(Base):
    """Which job an `Idempotency-Key` started."""

    __tablename__ = "idempotency"
    owner: Mapped[str] = mapped_column(String(32), primary_key=True)
    key: Mapped[str] = mapped_column(String(200), primary_key=True)
    digest: Mapped[str] = mapped_column(String(64))
    job_id: Mapped[str] = mapped_column(String(32))


class Attempt(Base):
    """One try of a job on a fixed set of nodes; complete enough to go on after a restart."""

    __tablename__ = "attempts"
    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    job_id: Mapped[str] = mapped_column(String(32), index=True)
    created_at: Mapped[float]
    phase: Mapped[str] = mapped_column(String(16))  # preparing, launched, ending, over
    #: `collective.messages.Plan`
    plan: Mapped[dict[str, Any]]
    #: when `End` was first sent, and why
    end_at: Mapped[float | None]
    end_reason: Mapped[str | None] = mapped_column(Text)


class AttemptNode(Base):
    """How far one node is with an attempt."""

    __tablename__ = "attempt_nodes"
    attempt_id: Mapped[str] = mapped_column(ForeignKey("attempts.id"), primary_key=True)
    node_id: Mapped[str] = mapped_column(String(32), primary_key=True)
    position: Mapped[int] = mapped_column(Integer)
    #: waiting, prepared, over, lost
    state: Mapped[str] = mapped_column(String(16))
    store_port: Mapped[int | None] = mapped_column(Integer)
    versions: Mapped[dict[str, Any]] = mapped_column(default=dict)
    #: why it is lost, and when it was last heard of
    lost_at: Mapped[float | None]
    lost_reason: Mapped[str | None] = mapped_column(Text)


class Rank(Base):
    """One rank of an attempt."""

    __tablename__ = "ranks"
    attempt_id: Mapped[str] = mapped_column(ForeignKey("attempts.id"), primary_key=True)
    rank: Mapped[int] = mapped_column(Integer, primary_key=True)
    node: Mapped[str] = mapped_column(String(100))
    local_rank: Mapped[int] = mapped_column(Integer)
    device: Mapped[dict[str, Any]]
    state: Mapped[str] = mapped_column(String(16))
    pid: Mapped[int | None]
    exit_code: Mapped[int | None]
    signal: Mapped[int | None] = mapped_column(Integer)
    message: Mapped[str | None] = mapped_column(Text)
    started_at: Mapped[float | None]
    ended_at: Mapped[float | None]
    report: Mapped[dict[str, Any]] = mapped_column(default=dict)


class Failure(Base):
    """An exception that ended a rank, as its agent told it."""

    __tablename__ = "failures"
    id: Mapped[int] = mapped_column(Key, primary_key=True, autoincrement=True)
    attempt_id: Mapped[str] = mapped_column(ForeignKey("attempts.id"), index=True)
    rank: Mapped[int] = mapped_column(Integer)
    kind: Mapped[str] = mapped_column(String(200))
    message: Mapped[str] = mapped_column(Text)
    traceback: Mapped[str] = mapped_column(Text)
    culprit: Mapped[int | None] = mapped_column(Integer)
    at: Mapped[float]


class StepChunk(Base):
    """Steps of one rank that came in one message; `data` as in `api.steps`."""

    __tablename__ = "step_chunks"
    id: Mapped[int] = mapped_column(Key, primary_key=True, autoincrement=True)
    attempt_id: Mapped[str] = mapped_column(String(32))
    rank: Mapped[int] = mapped_column(Integer)
    first_step: Mapped[int]
    last_step: Mapped[int]
    data: Mapped[bytes] = mapped_column(LargeBinary)
    __table_args__ = (Index("step_chunks_by_rank", "attempt_id", "rank", "last_step"),)


class Metric(Base):
    """What the program reported at one step of one rank; `values` is JSON that may hold NaN."""

    __tablename__ = "metrics"
    id: Mapped[int] = mapped_column(Key, primary_key=True, autoincrement=True)
    attempt_id: Mapped[str] = mapped_column(String(32))
    rank: Mapped[int] = mapped_column(Integer)
    step: Mapped[int | None]
    at: Mapped[float]
    values: Mapped[str] = mapped_column(Text)
    __table_args__ = (Index("metrics_by_attempt", "attempt_id", "id"),)


class LogStream(Base):
    """How far a rank's output is stored: the source's offset and the stored length."""

    __tablename__ = "log_streams"
    attempt_id: Mapped[str] = mapped_column(String(32), primary_key=True)
    rank: Mapped[int] = mapped_column(Integer, primary_key=True)
    stream: Mapped[str] = mapped_column(String(8), primary_key=True)
    next_offset: Mapped[int] = mapped_column(default=0)
    size: Mapped[int] = mapped_column(default=0)


class Bundle(Base):
    """A job's code, stored as a file named by its SHA-256."""

    __tablename__ = "bundles"
    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    size: Mapped[int]
    files: Mapped[int]
    created_at: Mapped[float]


class Leftover(Base):
    """A file or folder below the data folder that is to be deleted, since its rows are."""

    __tablename__ = "leftovers"
    path: Mapped[str] = mapped_column(String(200), primary_key=True)


class RendezvousEpoch(Base):
    """The last epoch of a group of programs started by hand."""

    __tablename__ = "rendezvous_epochs"
    group: Mapped[str] = mapped_column(String(200), primary_key=True)
    epoch: Mapped[int]
