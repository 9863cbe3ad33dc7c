"""The control plane's parts, made and joined together."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from api.auth import Tokens
from api.bundles import BundleFiles
from api.cluster import Cluster
from api.events import Channel, Hub
from api.ingest import Arrived, Ingest
from api.jobs import FINAL, JobState
from api.logs import LogFiles
from api.orchestrator import Orchestrator
from api.recovery import recover
from api.rendezvous import Rendezvous
from api.retention import Retention
from api.storage import Storage

if TYPE_CHECKING:
    from api.settings import Settings


class Control:
    """All that requests and agents' messages work on; one per application."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.storage = Storage(settings.url)
        self.hub = Hub(settings.stream_interval, settings.stream_beat, settings.stream_replay)
        self.tokens = Tokens(self.storage)
        self.files = LogFiles(settings.data_dir / "logs", settings.log_limit)
        self.bundles = BundleFiles(settings, self.storage)
        self.cluster = Cluster(settings, self.storage, self.hub)
        self.orchestrator = Orchestrator(settings, self.storage, self.cluster, self.hub)
        self.ingest = Ingest(settings, self.storage, self.files, self._stored)
        self.retention = Retention(settings, self.storage, self.ingest.forget)
        self.rendezvous = Rendezvous(self.storage, settings.rendezvous_timeout)
        self.tokens.on_revoked += [self.hub.end_principal, self.cluster.end_credential]
        self.orchestrator.on_turn = self._turned
        #: by attempt (or job, before it has one), rank and stream: set at the next news
        self.log_news: dict[tuple[str, int, str], asyncio.Event] = {}
        self.ready = False
        self.closing = asyncio.Event()

    async def start(self) -> None:
        """Read back what was going on, and begin."""
        await self.cluster.load()
        await recover(self.storage, self.cluster, self.orchestrator)
        self.ingest.start()
        self.cluster.start()
        self.orchestrator.start()
        self.retention.start()
        self.ready = True

    def end_streams(self) -> None:
        """End event streams and followed logs, which would hold up the server's end."""
        self.ready = False
        self.closing.set()
        self.hub.close()
        for event in self.log_news.values():
            event.set()

    async def stop(self) -> None:
        """End everything; what agents hold comes again at the next start."""
        self.end_streams()
        await self.retention.stop()
        await self.cluster.stop()
        await self.ingest.stop()
        await self.orchestrator.stop()
        self.storage.close()

    def channel_of(self, job_id: str) -> Channel:
        """The event channel of a job; of one that is over, a channel that only says so."""
        job = self.orchestrator.jobs.get(job_id)
        if job is not None:
            return job.live.channel
        channel = Channel(self.hub, lambda: None)
        channel.over = "job-over"
        return channel

    def _stored(self, arrived: Arrived) -> None:
        entry = arrived.entry
        self.orchestrator.take(arrived)
        if entry.log is not None:
            self._news(entry.log.attempt, entry.log.rank, entry.log.stream)

    def _turned(self, job: JobState) -> None:
        """A job got its attempt, or is over: followers of its output look again."""
        for key in [key for key in self.log_news if key[0] in (job.id, job.attempt)]:
            self._news(*key)
        if job.state in FINAL:
            self.retention.job_over()

    def _news(self, attempt: str, rank: int, stream: str) -> None:
        event = self.log_news.pop((attempt, rank, stream), None)
        if event is not None:
            event.set()

    def follow(self, attempt: str, rank: int, stream: str) -> asyncio.Event:
        """Set at the next news of one output stream."""
        return self.log_news.setdefault((attempt, rank, stream), asyncio.Event())
