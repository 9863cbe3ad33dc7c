"""The life of jobs: placed, prepared, launched, ended; one event after the other.

Everything that happens (a request, a message of an agent, a timer) becomes an entry of one inbox,
handled in order by one task, so that no two decisions interleave.  A decision is committed before
anybody learns of it: what an agent was told can always be found in the database again.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import Any

from sqlalchemy.orm import Session

from api import models
from api.attempt import AGENT_STOPPED, AttemptState, Part, version_conflict
from api.causes import RankFailed
from api.cluster import Cluster, Connection, NodeState, status_of
from api.events import Hub
from api.inbox import Inbox
from api.ingest import Arrived
from api.jobs import JobState
from api.keeper import RETRY, Keeper
from api.live import LiveJob
from api.orders import end_message, launch_message, new_attempt, prepare_message, store_attempt
from api.placement import Placement, place
from api.progress import Progress
from api.settings import Settings
from api.storage import Storage, StorageUnavailable
from collective.messages import AgentHello, End, Prepare, Prepared, Welcome, encode


class Orchestrator:
    """All jobs that are not over."""

    def __init__(self, settings: Settings, storage: Storage, cluster: Cluster, hub: Hub) -> None:
        self._settings = settings
        #: nodes get a new one with the next welcome, so it need not outlive this process
        self._probe_secret = secrets.token_hex(16)
        self._storage = storage
        self._cluster = cluster
        self._hub = hub
        self.jobs: dict[str, JobState] = {}
        self.attempts: dict[str, AttemptState] = {}
        self._inbox = Inbox()
        self._keeper = Keeper(storage, self._inbox)
        self._scheduling = False
        #: called with a job that has just got its attempt, or is over
        self.on_turn: Callable[[JobState], None] = lambda job: None
        cluster.on_offline = lambda node: self._inbox.post(lambda: self._node_offline(node))
        cluster.on_capacity = self.schedule

    # --- life ---------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to handle what happens."""
        for attempt in self.attempts.values():
            if self.jobs[attempt.job].state == "starting":
                self._arm_start_timer(attempt)
        self._inbox.start()
        self.schedule()

    async def stop(self) -> None:
        """Stop; jobs go on, and are found again at the next start."""
        await self._inbox.stop()
        self._keeper.stop()
        for attempt in self.attempts.values():
            attempt.cancel_timers()

    def find(self, job_id: str) -> JobState | None:
        """A job of which memory knows more than the database."""
        return self.jobs.get(job_id) or self._keeper.ended.get(job_id)

    # --- requests -----------------------------------------------------------------------

    def admit(self, row: models.Job) -> JobState:
        """Take in a job that is stored and not over."""
        live = LiveJob(self._hub, row.id)
        job = JobState(row.id, row.number, row.name, row.spec, row.created_at, row.created_by, live)
        for name in job.row():
            setattr(job, name, getattr(row, name))
        live.show_job = job.shown
        live.show_rank = lambda rank: self.attempts[job.attempt or ""].shown_rank(rank)
        self.jobs[job.id] = job
        self._changed(job)
        return job

    async def cancel(self, job_id: str, who: str) -> dict[str, Any] | None:
        """Cancel a job; it as it is then, or None when it is over or unknown."""
        return await self._inbox.ask(lambda: self._cancel(job_id, who))

    async def _cancel(self, job_id: str, who: str) -> dict[str, Any] | None:
        job = self.jobs.get(job_id)
        if job is None:
            return None
        reason = f"cancelled by {who}"
        attempt = self.attempts.get(job.attempt or "")
        if attempt is None:
            job.reason = reason
            await self._close(job, "cancelled")
        elif attempt.end_at is None:
            job.state, job.reason = "cancelling", reason
            await self._end(attempt, reason)
        return job.shown()

    # --- scheduling ---------------------------------------------------------------------

    def schedule(self) -> None:
        """Look for room for queued jobs, soon; many calls make one look."""
        if not self._scheduling:
            self._scheduling = True
            self._inbox.post(self._schedule)

    async def _schedule(self) -> None:
        self._scheduling = False
        offers = self._cluster.offers()
        refused: dict[Any, Placement] = {}
        blocked_by: JobState | None = None
        for job in [job for job in self.jobs.values() if job.state == "queued"]:
            wish = job.wish()
            found = refused.get(wish)
            if found is None:
                found = place(wish, offers)
                if found.devices and blocked_by is None:
                    await self._begin(job, found)
                    offers = self._cluster.offers()
                    continue
                if not found.devices:
                    refused[wish] = found
            waiting = found.waiting_for
            if waiting is None and blocked_by is not None:
                waiting = f"job {blocked_by.id} ({blocked_by.name}), which is before it"
            elif found.holds_back and blocked_by is None:
                blocked_by = job
            if waiting != job.waiting_for:
                job.waiting_for = waiting
                self._changed(job)

    async def _begin(self, job: JobState, placement: Placement) -> None:
        """Fix an attempt on the devices found, store it, and have the nodes prepare."""
        nodes = self._cluster.named()
        attempt = new_attempt(job, placement, nodes)
        job.state, job.waiting_for = "starting", None
        job.attempt, job.nodes = attempt.id, list(placement.devices)
        job.world_size = len(attempt.ranks)
        row = job.row()
        try:
            await self._storage.write(lambda session: store_attempt(session, attempt, row))
        except StorageUnavailable as error:
            job.state, job.attempt, job.nodes, job.world_size = "queued", None, [], None
            job.waiting_for = f"the database: {error}"
            self._changed(job)
            asyncio.get_running_loop().call_later(RETRY, self.schedule)
            return
        self.attempts[attempt.id] = attempt
        job.live.progress = Progress(len(attempt.ranks))
        for name, indexes in placement.devices.items():
            self._cluster.hold(name, indexes, job.id)
        self._changed(job)
        for rank in attempt.ranks:
            job.live.rank_changed(rank)
        self.on_turn(job)
        self._arm_start_timer(attempt)
        for part in attempt.parts:
            self._cluster.send(part.node_id, self._prepare(attempt, part))

    def _arm_start_timer(self, attempt: AttemptState) -> None:
        attempt.start_timer = self._inbox.later(
            self._settings.start_timeout, lambda: self._start_expired(attempt)
        )

    def _prepare(self, attempt: AttemptState, part: Part) -> Prepare:
        return prepare_message(self.jobs[attempt.job], attempt, part, self._settings.grace)

    async def _start_expired(self, attempt: AttemptState) -> None:
        job = self.jobs.get(attempt.job)
        if job is None or job.state != "starting" or attempt.end_at is not None:
            return
        if attempt.phase == "preparing":
            late = [part.name for part in attempt.parts if part.state == "waiting"]
            what = f"node{'s' * (len(late) > 1)} {', '.join(late)} did not prepare"
        else:
            silent = [rank for rank, info in attempt.ranks.items() if info.state == "waiting"]
            late = sorted({attempt.ranks[rank].member.node for rank in silent})
            what = f"ranks {', '.join(map(str, silent[:16]))} on {', '.join(late)} did not start"
        attempt.finding = {
            "rank": None,
            "node": late[0] if late else None,
            "kind": "StartTimeout",
            "message": f"{what} within {self._settings.start_timeout:g} s",
            "at": time.time(),
        }
        await self._end(attempt, "the start took too long")

    # --- agents -------------------------------------------------------------------------

    def node_up(self, node: NodeState, connection: Connection, hello: AgentHello) -> None:
        """An agent connected: welcome it, and settle what both sides hold."""
        self._inbox.post(lambda: self._node_up(node, connection, hello))

    async def _node_up(self, node: NodeState, connection: Connection, hello: AgentHello) -> None:
        def work(session: Session) -> int:
            return session.get_one(models.Node, node.id).acknowledged

        # Through the writer's queue, behind all entries that the old connection brought.
        acknowledged = await self._storage.write(work)
        dead = []
        for status in hello.attempts:
            attempt = self.attempts.get(status.attempt)
            part = attempt.part(node.id) if attempt is not None else None
            if part is None or part.done:
                dead.append(status.attempt)
        connection.send(
            Welcome(
                node_id=node.id,
                name=node.name,
                heartbeat=self._settings.heartbeat,
                acknowledged=acknowledged,
                end=dead,
                probe_secret=self._probe_secret,
            )
        )
        for attempt in list(self.attempts.values()):
            part = attempt.part(node.id)
            if part is not None and not part.done:
                await self._settle(attempt, part, connection, hello)
        self.schedule()

    async def _settle(
        self, attempt: AttemptState, part: Part, connection: Connection, hello: AgentHello
    ) -> None:
        status = status_of(hello, attempt.id)
        if attempt.phase == "preparing":
            if part.state == "waiting" or status is None:
                connection.send(self._prepare(attempt, part))
            return
        if status is None:
            restarted = "its agent came back without them"
            await self._lose(attempt, part, f"the ranks on node {part.name} are gone: {restarted}")
        elif attempt.end_at is not None:
            connection.send(end_message(attempt))
        elif status.state == "prepared":
            connection.send(launch_message(attempt))

    def prepared(self, node: NodeState, message: Prepared) -> None:
        """A node can, or cannot, run its ranks."""
        self._inbox.post(lambda: self._prepared(node, message))

    async def _prepared(self, node: NodeState, message: Prepared) -> None:
        attempt = self.attempts.get(message.attempt)
        part = attempt.part(node.id) if attempt is not None else None
        if attempt is None or part is None:
            self._cluster.send(node.id, End(attempt=message.attempt, reason="it is over"))
            return
        if attempt.phase == "launched" or any(i.state != "waiting" for i in attempt.ranks.values()):
            return
        if message.problems:
            if any(problem.code == AGENT_STOPPED for problem in message.problems):
                self._cluster.leaving(node)
            for problem in message.problems:
                attempt.problems.append((node.name, problem.code, problem.message))
            await self._end(attempt, f"node {node.name} cannot run it")
            return
        if attempt.phase != "preparing":
            return
        part.state, part.store_port = "prepared", message.store_port
        part.versions = {
            "python": message.python_version,
            "torch": message.torch_version,
            "unisono": message.unisono_version,
        }
        await self._keeper.part(attempt, part)
        if all(other.state == "prepared" for other in attempt.parts):
            await self._launch(attempt)

    async def _launch(self, attempt: AttemptState) -> None:
        conflict = version_conflict(attempt.parts)
        if conflict is not None:
            attempt.problems.append((attempt.parts[0].name, "versions-differ", conflict))
            await self._end(attempt, "the nodes do not fit together")
            return
        attempt.phase = "launched"
        await self._keeper.phase(attempt)
        # With its plan of all ranks the message is large: its text is made once for all nodes.
        text = encode(launch_message(attempt))
        for part in attempt.parts:
            self._cluster.send(part.node_id, text)

    def take(self, arrived: Arrived) -> None:
        """A spool entry has been stored."""
        entry = arrived.entry
        if entry.steps or entry.metrics or entry.log:
            part = entry.steps or entry.metrics or entry.log
            attempt = self.attempts.get(part.attempt) if part is not None else None
            if attempt is not None:
                job = self.jobs[attempt.job]
                job.live.take(arrived)
                if entry.log is None:
                    self._cluster.touch_job(job)
            return
        self._inbox.post(lambda: self._take(arrived))

    async def _take(self, arrived: Arrived) -> None:
        entry = arrived.entry
        part = entry.rank or entry.failure or entry.report or entry.attempt_over
        attempt = self.attempts.get(part.attempt) if part is not None else None
        if attempt is None:
            return
        job = self.jobs[attempt.job]
        if entry.rank is not None:
            state = entry.rank
            info = attempt.ranks[state.rank]
            if info.ended:
                return
            info.state = state.state
            info.pid = state.pid if state.pid is not None else info.pid
            if state.state == "running":
                info.started_at = info.started_at or arrived.at
            else:
                info.ended_at, info.message = arrived.at, state.message
                info.exit_code, info.signal = state.exit_code, state.signal
            job.live.rank_changed(state.rank)
            await self._started(job, attempt)
            if info.ended and not (info.exit_code == 0 and not info.signal):
                await self._trouble(attempt)
        elif entry.failure is not None:
            failure = entry.failure
            if failure.kind == "AgentStopped":
                self._cluster.leaving(arrived.node)
            attempt.failures.append(
                RankFailed(
                    failure.rank,
                    failure.kind,
                    failure.message,
                    failure.traceback,
                    failure.culprit,
                    arrived.at,
                )
            )
            await self._trouble(attempt)
        elif entry.report is not None:
            info = attempt.ranks[entry.report.rank]
            info.report = info.report | entry.report.values
            job.live.rank_changed(entry.report.rank)
        elif entry.attempt_over is not None:
            over = attempt.part(arrived.node.id)
            if over is not None and not over.done:
                over.state = "over"
                await self._maybe_finish(attempt)

    async def _started(self, job: JobState, attempt: AttemptState) -> None:
        if job.state != "starting" or any(i.state == "waiting" for i in attempt.ranks.values()):
            return
        if attempt.start_timer is not None:
            attempt.start_timer.cancel()
        job.state, job.started_at = "running", time.time()
        await self._save(job)

    # --- failures and ends --------------------------------------------------------------

    async def _trouble(self, attempt: AttemptState) -> None:
        """Something went wrong: note the cause as known so far, and end the attempt."""
        job = self.jobs[attempt.job]
        if job.state != "cancelling":
            verdict = attempt.verdict()
            job.cause, job.consequences = verdict.cause, verdict.consequences
            self._changed(job)
        if attempt.end_at is not None:
            return
        if attempt.real_cause_known() or self._settings.settle == 0:
            await self._end(attempt, "a rank failed")
        elif attempt.settle_timer is None:
            attempt.settle_timer = self._inbox.later(
                self._settings.settle, lambda: self._end(attempt, "a rank failed")
            )

    async def _end(self, attempt: AttemptState, reason: str) -> None:
        """Tell all nodes to end an attempt."""
        job = self.jobs.get(attempt.job)
        if job is None or attempt.id not in self.attempts:
            return
        if attempt.end_at is None:
            attempt.cancel_timers()
            attempt.phase, attempt.end_at, attempt.end_reason = "ending", time.time(), reason
            if job.state != "cancelling":
                verdict = attempt.verdict()
                job.cause, job.consequences = verdict.cause, verdict.consequences
            # The ranks must end even where the disk is full and nothing can be stored.
            await self._keeper.phase(attempt)
            await self._save(job)
            for part in attempt.parts:
                if part.state != "over":
                    self._cluster.send(part.node_id, end_message(attempt))
        await self._maybe_finish(attempt)

    async def _node_offline(self, node: NodeState) -> None:
        if node.online:
            return
        for attempt in list(self.attempts.values()):
            part = attempt.part(node.id)
            if part is not None and not part.done:
                await self._lose(
                    attempt,
                    part,
                    f"node {node.name} has not been heard of for "
                    f"{self._settings.node_timeout:g} s; how its ranks ended is not known",
                    node.last_seen_at,
                )
        self.schedule()

    async def _lose(
        self, attempt: AttemptState, part: Part, reason: str, at: float | None = None
    ) -> None:
        """Count a node as lost for an attempt."""
        part.state, part.lost_at, part.lost_reason = "lost", at or time.time(), reason
        await self._keeper.part(attempt, part)
        live = self.jobs[attempt.job].live
        for member in attempt.members_on(part.name):
            info = attempt.ranks[member.rank]
            if not info.ended:
                info.state = "lost"
                live.rank_changed(member.rank)
        if attempt.all_well():
            await self._maybe_finish(attempt)
        else:
            await self._trouble(attempt)
            await self._maybe_finish(attempt)

    def resume(self, attempt: AttemptState) -> None:
        """Go on with an attempt that was read back, wherever it stood."""
        self._inbox.post(lambda: self._resume(attempt))

    async def _resume(self, attempt: AttemptState) -> None:
        job = self.jobs[attempt.job]
        cause = job.cause
        found = cause is not None and cause.get("rank") is None and cause["kind"] != "NodeLost"
        if attempt.end_at is not None and found:
            # Found by a node that could not prepare, or by this server: told by no rank.
            attempt.finding = cause
        for part in attempt.parts:
            if part.node_id not in self._cluster.by_id and not part.done:
                await self._lose(attempt, part, f"node {part.name} was removed")
        await self._started(job, attempt)
        if attempt.failures or any(not ended.well for ended in attempt.ends()):
            await self._trouble(attempt)
        if attempt.phase == "preparing" and all(p.state == "prepared" for p in attempt.parts):
            await self._launch(attempt)
        await self._maybe_finish(attempt)

    async def remove_node(self, node: NodeState) -> None:
        """Count a node that is removed by force as lost for all its attempts."""

        async def work() -> None:
            for attempt in list(self.attempts.values()):
                part = attempt.part(node.id)
                if part is not None and not part.done:
                    reason = f"node {node.name} was removed from the cluster"
                    await self._lose(attempt, part, reason)

        await self._inbox.ask(work)

    async def _maybe_finish(self, attempt: AttemptState) -> None:
        if not attempt.over or attempt.id not in self.attempts:
            return
        attempt.cancel_timers()
        job = self.jobs[attempt.job]
        if job.state != "cancelling" and attempt.only_stopped_agents():
            await self._requeue(job, attempt)
            return
        verdict = attempt.verdict()
        if job.state == "cancelling":
            state = "cancelled"
            lost = [part.name for part in attempt.parts if part.state == "lost"]
            if lost:
                job.reason = f"{job.reason}; node {', '.join(lost)} was lost meanwhile"
        elif verdict.cause is None and attempt.all_well():
            state = "completed"
            job.cause, job.consequences = None, verdict.consequences
        else:
            state = "lost" if verdict.lost else "failed"
            job.cause, job.consequences = verdict.cause, verdict.consequences
            if verdict.cause is not None:
                job.reason = f"{verdict.cause['kind']}: {verdict.cause['message']}"[:1000]
        attempt.phase = "over"
        for rank in attempt.settle_ranks():
            job.live.rank_changed(rank)
        await self._keeper.phase(attempt)
        await self._close(job, state)

    async def _requeue(self, job: JobState, attempt: AttemptState) -> None:
        """Nothing of the job has run, only its node was about to leave: place it anew."""
        attempt.phase = "over"
        await self._keeper.phase(attempt)
        job.state, job.attempt, job.nodes, job.world_size = "queued", None, [], None
        job.cause, job.consequences, job.live.progress = None, [], None
        await self._save(job)
        self.attempts.pop(attempt.id, None)
        self._cluster.release(job.id)
        self.schedule()

    async def _close(self, job: JobState, state: str) -> None:
        """A job is over."""
        job.state, job.ended_at, job.waiting_for = state, time.time(), None
        if job.live.progress is not None:
            job.progress = job.live.progress.snapshot()
        await self._save(job)
        job.live.channel.finish("job-over")
        del self.jobs[job.id]
        self._keeper.closed(job)
        self.on_turn(job)
        if job.attempt is not None:
            self.attempts.pop(job.attempt, None)
            self._cluster.release(job.id)
        self.schedule()

    def _changed(self, job: JobState) -> None:
        job.live.job_changed()
        self._cluster.touch_job(job)

    async def _save(self, job: JobState) -> None:
        await self._keeper.job(job)
        self._changed(job)
