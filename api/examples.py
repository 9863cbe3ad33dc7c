"""Answers as examples, for the OpenAPI document."""

from __future__ import annotations

from typing import Any

_AT = 1_764_400_000.0

JOB: dict[str, Any] = {
    "id": "j-887a74e7d7ac",
    "name": "digits",
    "state": "running",
    "reason": None,
    "waiting_for": None,
    "created_at": _AT,
    "started_at": _AT + 1.5,
    "ended_at": None,
    "spec": {
        "script": "digits_ddp.py",
        "args": ["--epochs", "5"],
        "nodes": 2,
        "ranks_per_node": 2,
    },
    "attempt": "a-24a0946d00bc",
    "nodes": ["w1", "w2"],
    "world_size": 4,
    "strategy": "auto",
    "engine": "unisono",
    "cause": None,
    "consequences": [],
    "progress": {
        "step": 120,
        "steps_total": 450,
        "steps_per_second": 9.1,
        "loss": 0.31,
        "samples_per_second": 2300.0,
        "exposed_share": 0.12,
        "slowest_rank": 3,
        "held_back_by": "communication",
        "accuracy": None,
        "replicas_identical": None,
    },
    "created_by": "operator",
}

NODE: dict[str, Any] = {
    "id": "n-2ee4389bb500",
    "name": "w1",
    "hostname": "host1",
    "state": "online",
    "connected": True,
    "draining": False,
    "addresses": ["10.0.0.5"],
    "data_port": 8701,
    "version": "0.1.0",
    "cores": 16,
    "memory_bytes": 68_719_476_736,
    "envs": ["train"],
    "last_seen_at": _AT,
    "joined_at": _AT,
    "devices": [{"index": 0, "kind": "cpu", "name": "CPU slot", "job": "j-887a74e7d7ac"}],
}

RANK: dict[str, Any] = {
    "rank": 2,
    "node": "w2",
    "local_rank": 0,
    "device": {"index": 0, "kind": "cpu", "name": "CPU slot"},
    "state": "running",
    "pid": 4711,
    "exit_code": None,
    "signal": None,
    "message": None,
    "started_at": _AT + 1.5,
    "ended_at": None,
    "step": 120,
    "report": {"torch": "2.13.0"},
    "logs": {"stdout": 18231, "stderr": 0},
}

TOKEN: dict[str, Any] = {
    "id": "t-e1c1a45b7b36",
    "name": "grafana",
    "role": "viewer",
    "kind": "api",
    "created_at": _AT,
    "expires_at": _AT + 86_400,
    "revoked_at": None,
    "last_used_at": None,
}

STEPS: dict[str, Any] = {
    "ranks": [
        {
            "rank": 0,
            "step": [7],
            "at": [_AT],
            "total": [0.11],
            "data": [0.01],
            "compute": [0.07],
            "exposed": [0.02],
            "optimizer": [0.01],
            "communication": [0.05],
            "waited": [0.012],
            "sent": [204_800],
            "label": [""],
        }
    ],
    "next_step": None,
}

METRICS: dict[str, Any] = {
    "items": [{"id": 12, "rank": 0, "step": 7, "at": _AT, "values": {"loss": 0.31}}],
    "next_after": None,
}

SESSION: dict[str, Any] = {
    "name": "admin",
    "role": "admin",
    "csrf_token": "4b1c…",
    "expires_at": _AT + 604_800,
}

NEW_SESSION = {key: value for key, value in SESSION.items() if key != "name"}

LOGIN_CODE: dict[str, Any] = {
    "code": "un_code_4Zr…",
    "url": "http://10.0.0.1:8700/login#code=un_code_4Zr…",
    "expires_at": _AT + 3600,
}

BUNDLE: dict[str, Any] = {"digest": "9f86d081884c7d65" * 4, "size": 1843, "files": 2}

VERSION: dict[str, Any] = {"version": "0.1.0", "api": "v1", "agent_protocol": "unisono-agent.1"}

MEETING: dict[str, Any] = {
    "rank": 0,
    "epoch": 1,
    "secret": "9f0a…",
    "strategy": "auto",
    "members": [{"rank": 0, "node": "w1", "addresses": ["10.0.0.5"], "port": 41234}],
}


def answer(example: Any, status: int = 200) -> dict[int | str, dict[str, Any]]:
    """What a route gives as its `responses`, so that the document shows this answer."""
    return {status: {"content": {"application/json": {"example": example}}}}
