"""All settings of the control plane; each can come from the environment as ``UNISONO_<NAME>``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Where the control plane listens and keeps its state, and every time and limit it uses.

    Times are seconds, sizes bytes.
    """

    model_config = SettingsConfigDict(env_prefix="UNISONO_", extra="ignore", frozen=True)

    data_dir: Path = Field(
        default=Path("unisono-data"), description="state: database, logs, bundles"
    )
    database_url: str | None = Field(
        default=None, description="SQLAlchemy URL; SQLite in the data folder when unset"
    )
    host: str = Field(default="0.0.0.0", description="address to listen on")
    port: int = Field(
        default=8700, ge=0, le=65535, description="port to listen on; 0 for any free one"
    )
    public_url: str | None = Field(
        default=None, description="how nodes and browsers reach this server, for printed links"
    )
    tls_certificate: Path | None = Field(
        default=None, description="PEM file; switches to https and wss"
    )
    tls_key: Path | None = Field(default=None, description="PEM file of the certificate's key")
    announce_fd: int | None = Field(
        default=None, description="descriptor that gets one line of JSON once the server is ready"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="warning", description="of the server's own log on stderr"
    )
    shutdown_grace: int = Field(
        default=3, ge=0, description="for open requests when the server ends"
    )

    heartbeat: float = Field(default=2.0, gt=0, description="between an agent's heartbeats")
    node_timeout: float = Field(
        default=15.0, gt=0, description="without a message after which a node is offline"
    )
    start_timeout: float = Field(
        default=180.0, gt=0, description="from a job's placement until all its ranks run"
    )
    settle: float = Field(
        default=3.0,
        ge=0,
        description="waited for ranks to end by themselves when one told of a failure",
    )
    grace: float = Field(
        default=15.0, ge=0, description="between SIGTERM and SIGKILL, unless a job says"
    )
    rendezvous_timeout: float = Field(default=120.0, gt=0, description="for a group to be complete")

    keep_jobs: int = Field(
        default=0, ge=0, description="so many jobs that are over are kept; 0 for any number"
    )
    keep_jobs_for: float = Field(
        default=90 * 86_400.0, ge=0, description="jobs that are over are kept so long; 0 for ever"
    )
    log_limit: int = Field(
        default=256 << 20, ge=1 << 12, description="kept of one output stream of one rank"
    )
    bundle_limit: int = Field(default=256 << 20, gt=0, description="size of an uploaded bundle")
    bundle_unpacked_limit: int = Field(
        default=1 << 30, gt=0, description="size of its files together"
    )
    bundle_files_limit: int = Field(default=20_000, gt=0, description="number of its files")
    body_limit: int = Field(default=4 << 20, gt=0, description="size of any other request body")
    spool_window: int = Field(
        default=1024, gt=0, description="entries of one agent that may wait to be stored"
    )
    page_limit: int = Field(default=200, gt=0, description="most items of one page")
    step_limit: int = Field(
        default=5_000, gt=0, description="most steps of each rank in one answer"
    )

    join_ttl: float = Field(default=86_400.0, gt=0, description="life of a join token")
    login_code_ttl: float = Field(default=3_600.0, gt=0, description="life of a login code")
    session_ttl: float = Field(default=7 * 86_400.0, gt=0, description="life of a browser session")
    token_ttl: float = Field(default=365 * 86_400.0, gt=0, description="life of other tokens")
    node_credential_ttl: float = Field(
        default=10 * 365 * 86_400.0, gt=0, description="life of a node's own credential"
    )

    stream_interval: float = Field(
        default=0.25, gt=0, description="least time between two event frames"
    )
    stream_beat: float = Field(default=5.0, gt=0, description="most time between two event frames")
    stream_replay: int = Field(
        default=4 << 20, gt=0, description="bytes of frames kept for replay, per stream"
    )

    @property
    def url(self) -> str:
        """The database's URL."""
        if self.database_url is None:
            return f"sqlite:///{self.data_dir.resolve() / 'unisono.db'}"
        # SQLAlchemy's default driver for these is psycopg2, which is not what the extra installs.
        for prefix in ("postgres://", "postgresql://"):
            if self.database_url.startswith(prefix):
                return "postgresql+psycopg://" + self.database_url.removeprefix(prefix)
        return self.database_url
