"""Times and bounds of an agent, each also an environment variable ``UNISONO_WORKER_…``."""

from __future__ import annotations

from pydantic import ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from worker.errors import LocalProblem

__all__ = ["Settings"]


class Settings(BaseSettings):
    """Times in seconds, sizes in bytes."""

    model_config = SettingsConfigDict(env_prefix="UNISONO_WORKER_", extra="ignore", frozen=True)

    #: first and longest wait between two tries to reach the control plane; jitter halves it;
    #: the longest stays well under the time after which a silent node counts as lost
    reconnect_first: float = 0.5
    reconnect_longest: float = 5.0
    #: for one try to connect, over all addresses of the control plane
    connect_timeout: float = 10.0
    #: the control plane's machine does not acknowledge what was sent: the connection is dead
    unacknowledged_timeout: float = 30.0
    #: a node's disk never holds more than this of what was not acknowledged yet
    spool_bytes: int = 256 << 20
    #: entries that may be under way without an acknowledgement
    window_entries: int = 512
    window_bytes: int = 8 << 20
    #: output waits this long for more, so that lines travel together
    output_delay: float = 0.15
    #: ranks whose agent was killed get this long between SIGTERM and SIGKILL
    orphan_grace: float = 4.0
    #: the same for processes that an earlier incarnation left behind
    leftover_grace: float = 3.0
    #: a data connection to a rank that has not said hello yet waits this long
    link_wait: float = 60.0
    #: for a dialler to send its whole handshake
    handshake_timeout: float = 10.0
    #: after a rank's exit its last messages on the socket are waited for
    last_words: float = 1.0
    #: for the answer of a job's Python about itself
    probe_timeout: float = 20.0
    #: for torch's store to come up
    store_timeout: float = 60.0
    #: an unused store host ends after this long
    store_idle: float = 600.0
    #: for the download of a bundle
    bundle_timeout: float = 300.0
    #: how often the devices are looked at again
    device_interval: float = 10.0
    #: at the end, for ranks beyond their own grace, and then for the last acknowledgements
    leave_timeout: float = 10.0

    @classmethod
    def read(cls) -> Settings:
        """The settings of the environment.

        Raises:
            LocalProblem: a variable has no meaning; names it.
        """
        try:
            return cls()
        except ValidationError as error:
            first = error.errors()[0]
            variable = f"UNISONO_WORKER_{str(first['loc'][0]).upper()}"
            raise LocalProblem(f"{variable}={first['input']!r}: {first['msg']}") from None
