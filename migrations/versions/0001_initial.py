"""The first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

key = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Create all tables."""

    op.create_table(
        "attempts",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("phase", sa.String(length=16), nullable=False),
        sa.Column("plan", sa.JSON(), nullable=False),
        sa.Column("end_at", sa.Double(), nullable=True),
        sa.Column("end_reason", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(op.f("ix_attempts_job_id"), "attempts", ["job_id"], unique=False)
    op.create_table(
        "bundles",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("files", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("digest"),
    )
    op.create_table(
        "idempotency",
        sa.Column("owner", sa.String(length=32), nullable=False),
        sa.Column("key", sa.String(length=200), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.PrimaryKeyConstraint("owner", "key"),
    )
    op.create_table(
        "jobs",
        sa.Column("number", key, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("attempt", sa.String(length=32), nullable=True),
        sa.Column("nodes", sa.JSON(), nullable=False),
        sa.Column("world_size", sa.Integer(), nullable=True),
        sa.Column("cause", sa.JSON(), nullable=True),
        sa.Column("consequences", sa.JSON(), nullable=False),
        sa.Column("progress", sa.JSON(), nullable=True),
        sa.Column("created_by", sa.String(length=200), nullable=False),
        sa.PrimaryKeyConstraint("number"),
        sa.UniqueConstraint("id"),
    )
    op.create_index("jobs_by_state", "jobs", ["state", "number"], unique=False)
    op.create_table(
        "log_streams",
        sa.Column("attempt_id", sa.String(length=32), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("stream", sa.String(length=8), nullable=False),
        sa.Column("next_offset", sa.BigInteger(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("attempt_id", "rank", "stream"),
    )
    op.create_table(
        "metrics",
        sa.Column("id", key, autoincrement=True, nullable=False),
        sa.Column("attempt_id", sa.String(length=32), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=True),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("values", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("metrics_by_attempt", "metrics", ["attempt_id", "id"], unique=False)
    op.create_table(
        "nodes",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("agent_id", sa.String(length=128), nullable=False),
        sa.Column("name", sa.String(length=100), nullable=False),
        sa.Column("hostname", sa.String(length=255), nullable=False),
        sa.Column("joined_at", sa.Double(), nullable=False),
        sa.Column("removed_at", sa.Double(), nullable=True),
        sa.Column("draining", sa.Boolean(), nullable=False),
        sa.Column("last_seen_at", sa.Double(), nullable=True),
        sa.Column("incarnation", sa.String(length=128), nullable=True),
        sa.Column("acknowledged", sa.BigInteger(), nullable=False),
        sa.Column("facts", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(op.f("ix_nodes_agent_id"), "nodes", ["agent_id"], unique=False)
    op.create_index(op.f("ix_nodes_name"), "nodes", ["name"], unique=False)
    op.create_table(
        "rendezvous_epochs",
        sa.Column("group", sa.String(length=200), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("group"),
    )
    op.create_table(
        "step_chunks",
        sa.Column("id", key, autoincrement=True, nullable=False),
        sa.Column("attempt_id", sa.String(length=32), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("first_step", sa.BigInteger(), nullable=False),
        sa.Column("last_step", sa.BigInteger(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(
        "step_chunks_by_rank", "step_chunks", ["attempt_id", "rank", "last_step"], unique=False
    )
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("node_id", sa.String(length=32), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.Column("last_used_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("digest"),
    )
    op.create_index(op.f("ix_tokens_node_id"), "tokens", ["node_id"], unique=False)
    op.create_table(
        "attempt_nodes",
        sa.Column("attempt_id", sa.String(length=32), nullable=False),
        sa.Column("node_id", sa.String(length=32), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("store_port", sa.Integer(), nullable=True),
        sa.Column("versions", sa.JSON(), nullable=False),
        sa.Column("lost_at", sa.Double(), nullable=True),
        sa.Column("lost_reason", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["attempt_id"],
            ["attempts.id"],
        ),
        sa.PrimaryKeyConstraint("attempt_id", "node_id"),
    )
    op.create_table(
        "failures",
        sa.Column("id", key, autoincrement=True, nullable=False),
        sa.Column("attempt_id", sa.String(length=32), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=200), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("traceback", sa.Text(), nullable=False),
        sa.Column("culprit", sa.Integer(), nullable=True),
        sa.Column("at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["attempt_id"],
            ["attempts.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(op.f("ix_failures_attempt_id"), "failures", ["attempt_id"], unique=False)
    op.create_table(
        "ranks",
        sa.Column("attempt_id", sa.String(length=32), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("node", sa.String(length=100), nullable=False),
        sa.Column("local_rank", sa.Integer(), nullable=False),
        sa.Column("device", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("pid", sa.BigInteger(), nullable=True),
        sa.Column("exit_code", sa.BigInteger(), nullable=True),
        sa.Column("signal", sa.Integer(), nullable=True),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("report", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["attempt_id"],
            ["attempts.id"],
        ),
        sa.PrimaryKeyConstraint("attempt_id", "rank"),
    )


def downgrade() -> None:
    """Drop all tables."""

    op.drop_table("ranks")
    op.drop_index(op.f("ix_failures_attempt_id"), table_name="failures")
    op.drop_table("failures")
    op.drop_table("attempt_nodes")
    op.drop_index(op.f("ix_tokens_node_id"), table_name="tokens")
    op.drop_table("tokens")
    op.drop_index("step_chunks_by_rank", table_name="step_chunks")
    op.drop_table("step_chunks")
    op.drop_table("rendezvous_epochs")
    op.drop_index(op.f("ix_nodes_name"), table_name="nodes")
    op.drop_index(op.f("ix_nodes_agent_id"), table_name="nodes")
    op.drop_table("nodes")
    op.drop_index("metrics_by_attempt", table_name="metrics")
    op.drop_table("metrics")
    op.drop_table("log_streams")
    op.drop_index("jobs_by_state", table_name="jobs")
    op.drop_table("jobs")
    op.drop_table("idempotency")
    op.drop_table("bundles")
    op.drop_index(op.f("ix_attempts_job_id"), table_name="attempts")
    op.drop_table("attempts")
