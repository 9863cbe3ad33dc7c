"""What nodes are told about an attempt, and the attempt itself as it is fixed and stored."""

from __future__ import annotations

import secrets
import time
from dataclasses import asdict
from typing import Any

from sqlalchemy.orm import Session

from api import models
from api.attempt import AttemptState, Part, RankInfo, members_of
from api.cluster import NodeState
from api.jobs import JobState, store
from api.placement import Placement
from collective.addresses import meeting_address, reachable_hosts
from collective.messages import End, Host, JobSpec, Launch, Plan, Prepare


def new_attempt(job: JobState, placement: Placement, nodes: dict[str, NodeState]) -> AttemptState:
    """An attempt of a job on the devices that were found for it."""
    attempt_id = f"a-{secrets.token_hex(6)}"
    members = members_of(placement.devices)
    hosts = [
        Host(
            node=name,
            addresses=nodes[name].addresses,
            data_port=nodes[name].data_port,
            core_set=nodes[name].core_set,
        )
        for name in placement.devices
    ]
    plan = Plan(
        job=job.id,
        attempt=attempt_id,
        epoch=1,
        secret=secrets.token_hex(16),
        strategy=job.spec.get("strategy", "auto"),
        engine=job.spec.get("engine", "unisono"),
        members=members,
        hosts=reachable_hosts(hosts),
    )
    devices = {
        (name, device.index): asdict(device)
        for name in placement.devices
        for device in nodes[name].devices
    }
    ranks = {
        member.rank: RankInfo(member, devices[member.node, member.device]) for member in members
    }
    parts = [Part(nodes[name].id, name) for name in placement.devices]
    return AttemptState(attempt_id, job.id, plan, parts, ranks)


def store_attempt(session: Session, attempt: AttemptState, job: dict[str, Any]) -> None:
    """Write a new attempt and its job's columns, within a transaction."""
    session.add(
        models.Attempt(
            id=attempt.id,
            job_id=attempt.job,
            created_at=time.time(),
            phase=attempt.phase,
            plan=asdict(attempt.plan),
        )
    )
    session.flush()
    for position, part in enumerate(attempt.parts):
        session.add(
            models.AttemptNode(
                attempt_id=attempt.id,
                node_id=part.node_id,
                position=position,
                state=part.state,
                versions={},
            )
        )
    for rank, info in attempt.ranks.items():
        session.add(
            models.Rank(
                attempt_id=attempt.id,
                rank=rank,
                node=info.member.node,
                local_rank=info.member.local_rank,
                device=info.device,
                state=info.state,
                report={},
            )
        )
    store(session, attempt.job, job)


def prepare_message(
    job: JobState, attempt: AttemptState, part: Part, default_grace: float
) -> Prepare:
    """Tells one node to prepare its ranks."""
    spec = job.spec
    grace = spec.get("grace")
    return Prepare(
        spec=JobSpec(
            job=job.id,
            attempt=attempt.id,
            name=job.name,
            command=spec.get("command"),
            script=spec.get("script"),
            args=spec.get("args", []),
            bundle=spec.get("bundle"),
            workdir=spec.get("workdir"),
            python=spec.get("python"),
            env_name=spec.get("env_name"),
            environment=spec.get("set", {}),
            engine=spec.get("engine", "unisono"),
            replace_backend=spec.get("replace_backend", False),
            grace=default_grace if grace is None else float(grace),
            hosts_store=part is attempt.parts[0],
        ),
        ranks=attempt.members_on(part.name),
    )


def launch_message(attempt: AttemptState) -> Launch:
    """Tells the nodes to start their ranks."""
    return Launch(
        attempt=attempt.id,
        plan=attempt.plan,
        master_address=meeting_address(attempt.plan.hosts),
        master_port=attempt.parts[0].store_port or 0,
    )


def end_message(attempt: AttemptState) -> End:
    """Tells the nodes to end their ranks."""
    return End(attempt=attempt.id, reason=attempt.end_reason or "it is over")
