"""What the templates show of jobs, ranks and nodes, worked out from the REST representations.

Nothing here reaches the database: each function takes the dictionaries that the API answers with.
"""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from api.cluster import natural
from web import format as fmt

#: figures of a typical step look at this many of the last ones, here and in static/steps.js
WINDOW = 50
PHASES = ("total", "data", "compute", "exposed", "optimizer")
JOB_STATES = (
    "queued",
    "starting",
    "running",
    "cancelling",
    "completed",
    "failed",
    "cancelled",
    "lost",
)

Plain = Mapping[str, Any]


def job_url(job: str) -> str:
    """The page of a job."""
    return f"/jobs/{fmt.path_part(job)}"


def node_url(name: str) -> str:
    """The page of a node."""
    return f"/nodes/{fmt.path_part(name)}"


def node_list(names: Iterable[str]) -> str:
    """The nodes of a job, the first few by name."""
    all_names = [fmt.shorten(name, 40) for name in names]
    if not all_names:
        return "no node yet"
    if len(all_names) > 4:
        return f"{', '.join(all_names[:3])} and {len(all_names) - 3} more"
    return ", ".join(all_names)


def ranks(job: Plain) -> str:
    """How many ranks a job has, or what it asked for until it has been placed."""
    world = job.get("world_size")
    if not world:
        return placement(job["spec"])
    return f"{world} {'rank' if world == 1 else 'ranks'}"


def shown_node(node: Plain) -> dict[str, Any]:
    """A node with the one state that the page shows: offline before draining before online."""
    state = node["state"]
    if state == "online" and node.get("draining"):
        state = "draining"
    return {**node, "state": state}


def shown_nodes(nodes: Iterable[Plain]) -> list[dict[str, Any]]:
    """Nodes by name, so that w2 is before w10."""
    return [shown_node(node) for node in sorted(nodes, key=lambda node: natural(node["name"]))]


def device_use(device: Plain) -> str:
    """`job`, `foreign` or `free`."""
    if device.get("job"):
        return "job"
    return "foreign" if device.get("busy") else "free"


def device_title(device: Plain) -> str:
    """A device and who uses it, in one line."""
    use = {
        "job": f"used by {device.get('job')}",
        "foreign": f"used by others: {device.get('busy')}",
        "free": "free",
    }[device_use(device)]
    return f"{device['kind']}:{device['index']} {fmt.shorten(device['name'], 80)}, {use}"


def device_count(devices: Iterable[Plain]) -> str:
    """How many devices are free, and who has the others."""
    uses = [device_use(device) for device in devices]
    if not uses:
        return "none"
    text = f"{uses.count('free')} of {len(uses)} free"
    if uses.count("foreign"):
        text += f", {uses.count('foreign')} used by others"
    return text


def free_now(nodes: Iterable[Plain]) -> str:
    """Which nodes have free devices, as a sentence for the form."""
    parts = [
        f"{fmt.shorten(node['name'], 40)}: {free}"
        for node in nodes
        if node["state"] == "online"
        and (free := sum(device_use(device) == "free" for device in node["devices"]))
    ]
    if not parts:
        return "No device is free now; the job waits until one is."
    return "Free now: " + ", ".join(parts[:20]) + (" and more." if len(parts) > 20 else ".")


def cluster_summary(nodes: Iterable[Plain], counts: Mapping[str, int]) -> dict[str, int]:
    """The figures at the top of the cluster's page; devices of nodes that are online."""
    nodes = list(nodes)
    online = [node for node in nodes if node["state"] != "offline"]
    uses = [device_use(d) for node in online for d in node["devices"]]
    usable = [device_use(d) for n in online if n["state"] == "online" for d in n["devices"]]
    return {
        "nodes": len(nodes),
        "online": len(online),
        "devices": len(uses),
        "free": usable.count("free"),
        "foreign": uses.count("foreign"),
        "running": sum(counts.get(s, 0) for s in ("starting", "running", "cancelling")),
        "waiting": counts.get("queued", 0),
    }


def share_done(job: Plain) -> float:
    """How much of its steps a job has done, from 0 to 1."""
    progress = job.get("progress") or {}
    step, total = fmt.num(progress.get("step")), fmt.num(progress.get("steps_total"))
    if step is None or not total:
        return 0.0
    return max(0.0, min(1.0, step / total))


def run_time(job: Plain, now: float) -> str:
    """How long a job has run, or ran."""
    if not job.get("started_at"):
        return "not started"
    return fmt.long(max(0.0, (job.get("ended_at") or now) - job["started_at"]))


def time_left(job: Plain) -> float | None:
    """Seconds until the last step at the present rate; None when that cannot be said."""
    progress = job.get("progress") or {}
    step, total = fmt.num(progress.get("step")), fmt.num(progress.get("steps_total"))
    rate = fmt.num(progress.get("steps_per_second"))
    if job["state"] != "running" or step is None or total is None or not rate:
        return None
    return max(0.0, total - step) / rate


def cause_where(cause: Plain) -> str:
    """`: rank 2 on w2`, as far as it is known."""
    parts = []
    if cause.get("rank") is not None:
        parts.append(f"rank {cause['rank']}")
    if cause.get("node"):
        parts.append(f"node {fmt.shorten(cause['node'], 80)}")
    return ": " + ", ".join(parts) if parts else ""


def cause_what(cause: Plain) -> str:
    """The error itself."""
    kind, message = cause.get("kind") or "", cause.get("message") or ""
    return f"{kind}: {message}" if kind and message else kind or message


def cause_exit(cause: Plain) -> str:
    """How the process ended."""
    return exit_text(cause.get("exit_code"), cause.get("signal"))


def exit_text(code: int | None, signal: int | None) -> str:
    """An exit code or a signal with its name; empty while the process runs."""
    if signal is not None:
        return fmt.signal_name(signal)
    return "" if code is None else f"exit code {code}"


def job_facts(job: Plain) -> list[tuple[str, str]]:
    """What a job runs, as names and values."""
    spec = job["spec"]
    facts: list[tuple[str, str | None]] = [
        ("Script", spec.get("script")),
        ("Command", shlex.quote(spec["command"][0]) if spec.get("command") else None),
        ("Bundle", spec.get("bundle") and f"sha256 {spec['bundle'][:16]}…"),
        ("Working directory", spec.get("workdir")),
        ("Python", spec.get("python")),
        ("Named environment", spec.get("env_name")),
        ("Placement", placement(spec)),
        ("Engine", job["engine"]),
        ("Strategy", job["strategy"]),
        ("Attempt", job.get("attempt")),
        ("Started by", job.get("created_by")),
    ]
    return [(name, str(value)) for name, value in facts if value]


def placement(spec: Plain) -> str:
    """Where a job was asked to run."""
    if spec.get("all_free"):
        return "all free devices"
    if spec.get("on"):
        return ", ".join(f"{node}: {ranks}" for node, ranks in spec["on"].items())
    nodes, ranks = spec.get("nodes") or 1, spec.get("ranks_per_node") or 1
    return (
        f"{nodes} {'node' if nodes == 1 else 'nodes'} × {ranks} {'rank' if ranks == 1 else 'ranks'}"
    )


def node_facts(node: Plain) -> list[tuple[str, str]]:
    """What a node is, as names and values."""
    return [
        ("Host name", str(node.get("hostname") or fmt.NOTHING)),
        ("Addresses", ", ".join(node.get("addresses") or []) or fmt.NOTHING),
        ("Data port", str(node.get("data_port") or fmt.NOTHING)),
        ("Cores", str(node.get("cores") or fmt.NOTHING)),
        ("Memory", fmt.bytes_(node.get("memory_bytes"))),
        ("Environments", ", ".join(node.get("envs") or []) or "only the agent's own"),
        ("Unisono", str(node.get("version") or fmt.NOTHING)),
        ("Joined", fmt.moment(node.get("joined_at"))),
    ]


def typical(columns: Plain | None) -> dict[str, float | None]:
    """The phases of a typical step of one rank, in seconds; None without steps.

    The mean over the middle half of the last ordinary steps by their total: unlike medians of
    each phase, the parts add up to the whole, and rare long steps do not count.
    """
    if not columns or not columns["step"]:
        return dict.fromkeys(PHASES)
    ordinary = [k for k, label in enumerate(columns["label"]) if label == "step"][-WINDOW:]
    chosen = ordinary or [len(columns["step"]) - 1]
    chosen.sort(key=lambda k: fmt.num(columns["total"][k]) or 0.0)
    quarter = len(chosen) // 4
    middle = chosen[quarter : len(chosen) - quarter]
    return {
        name: statistics.fmean(fmt.num(columns[name][k]) or 0.0 for k in middle) for name in PHASES
    }


def shown_rank(rank: Plain, columns: Plain | None, job: Plain) -> dict[str, Any]:
    """A rank as a row of the table, with its part in the job's end."""
    device = rank.get("device") or {}
    state = rank["state"]
    ended_well = state == "exited" and rank.get("exit_code") == 0
    return {
        **rank,
        "device_name": device_name(device),
        "shown_state": {
            "exited": "completed" if ended_well else "failed",
            "waiting": "queued",
            "not-started": "cancelled",
        }.get(state, state),
        "state_text": state.replace("-", " "),
        "exit_text": exit_text(rank.get("exit_code"), rank.get("signal")),
        "last_step": rank.get("step"),
        "phases": typical(columns),
        "role": role(rank["rank"], job),
    }


def role(rank: int, job: Plain) -> str:
    """Whether a rank is the first cause of the job's end, or a consequence of it."""
    if job.get("cause") and job["cause"].get("rank") == rank:
        return "first cause"
    if any(entry.get("rank") == rank for entry in job.get("consequences") or []):
        return "consequence"
    return ""


#: what a report's entry means
_NOTES = {
    "timings_reason": "No timings of {ranks}: ",
    "slow_links": "All ranks wait for slow links between nodes: ",
    "unreachable": "Data reach {ranks} masked, which is slower, from what cannot be dialled: ",
}


def rank_notes(ranks: Iterable[Plain]) -> list[str]:
    """What ranks reported as a reason why something is missing or slow, each once."""
    notes: dict[tuple[str, str], list[int]] = {}
    for rank in ranks:
        report = rank.get("report") or {}
        for name, text in _NOTES.items():
            if report.get(name):
                notes.setdefault((text, str(report[name])), []).append(rank["rank"])
    return [
        text.format(
            ranks=f"{'rank' if len(who) == 1 else 'ranks'} "
            f"{', '.join(map(str, who[:8]))}{' and more' if len(who) > 8 else ''}"
        )
        + reason
        for (text, reason), who in notes.items()
    ]


def device_name(device: Plain) -> str:
    """`cuda:0 NVIDIA A100`, or a dash."""
    if not device:
        return fmt.NOTHING
    name = str(device.get("name") or "")
    return f"{device['kind']}:{device['index']} {fmt.shorten(name, 60)}".strip()
