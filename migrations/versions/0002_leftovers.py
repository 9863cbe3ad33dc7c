"""Files that are to be deleted; and the end of ranks that were never started."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table, and end what was left waiting."""
    op.create_table(
        "leftovers",
        sa.Column("path", sa.String(length=200), nullable=False),
        sa.PrimaryKeyConstraint("path"),
    )
    op.execute(
        "UPDATE ranks SET state = 'not-started' WHERE state = 'waiting' AND attempt_id IN "
        "(SELECT id FROM attempts WHERE phase = 'over')"
    )


def downgrade() -> None:
    """Drop the table, and leave what was ended to wait again."""
    op.execute("UPDATE ranks SET state = 'waiting' WHERE state = 'not-started'")
    op.drop_table("leftovers")
