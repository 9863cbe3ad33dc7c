"""What the demo shows: its phases, a live table where there is a terminal, and a summary."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

__all__ = ["View", "facts", "time_left"]

#: seconds between two lines of progress where there is no terminal
LINE_INTERVAL = 2.0


class View:
    """Writes to standard error, so that standard output is free for the result."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self.live: Live | None = None
        self._last_line = 0.0

    def phase(self, text: str) -> None:
        """Announce what comes next."""
        self.console.print(Text.assemble(("demo: ", "bold"), text), soft_wrap=True)

    def address(self, url: str, login: str) -> None:
        """Where the dashboard is, and the link that logs in once."""
        self.console.print(Text(f"  dashboard: {url}"), soft_wrap=True)
        self.console.print(Text(f"  log in, once: {login}"), soft_wrap=True)

    def show(self, job: dict[str, Any]) -> None:
        """Show a running job as it stands."""
        if job["state"] != "running":
            return
        if self.console.is_terminal:
            if self.live is None:
                self.live = Live(console=self.console, auto_refresh=False)
                self.live.start()
            self.live.update(_table(job), refresh=True)
            return
        now = time.monotonic()
        if now - self._last_line >= LINE_INTERVAL and (job.get("progress") or {}).get("step"):
            self._last_line = now
            line = ", ".join(f"{name} {value}" for name, value in facts(job).items())
            self.console.print(Text(f"  {line}"), soft_wrap=True)

    def close(self) -> None:
        """Leave the live table as it stands."""
        if self.live is not None:
            self.live.stop()
            self.live = None

    def summary(self, job: dict[str, Any] | None) -> None:
        """How the job ended, in a few lines."""
        progress = (job or {}).get("progress") or {}
        identical = progress.get("replicas_identical")
        facts = {
            "held-out accuracy": _number(progress.get("accuracy"), "{:.2%}"),
            "samples per second": _number(progress.get("samples_per_second"), "{:,.0f}"),
            "all replicas identical": "unknown"
            if identical is None
            else "yes"
            if identical
            else "NO",
            "slowest rank": _number(progress.get("slowest_rank"), "{}"),
        }
        for name, value in facts.items():
            self.console.print(Text(f"  {name}: {value}"))


def facts(job: dict[str, Any]) -> dict[str, str]:
    """The figures of a running job, as they are shown."""
    progress = job.get("progress") or {}
    total = progress.get("steps_total")
    return {
        "nodes": " ".join(job.get("nodes") or []),
        "ranks": str(job.get("world_size")),
        "step": f"{progress.get('step') or 0}" + (f"/{total}" if total else ""),
        "steps/s": _number(progress.get("steps_per_second"), "{:.1f}"),
        "loss": _number(progress.get("loss"), "{:.4f}"),
        "exposed communication": _number(progress.get("exposed_share"), "{:.0%}"),
        "time left": time_left(progress),
    }


def time_left(progress: dict[str, Any]) -> str:
    """Seconds that the remaining steps take at the present rate; a dash where unknown."""
    rate, total = progress.get("steps_per_second"), progress.get("steps_total")
    # NaN and infinity are text over JSON
    if not (isinstance(rate, int | float) and isinstance(total, int | float)) or rate <= 0:
        return "–"
    return f"{max(0.0, total - (progress.get('step') or 0)) / rate:.0f} s"


def _number(value: Any, form: str) -> str:
    """A figure in its format; text, such as NaN over JSON, and nothing as they are."""
    if value is None:
        return "–"
    return str(value) if isinstance(value, str) else form.format(value)


def _table(job: dict[str, Any]) -> Table:
    progress = job.get("progress") or {}
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", justify="right")
    grid.add_column()
    for name, value in facts(job).items():
        grid.add_row(name, Text(value))
    total = progress.get("steps_total")
    if total:
        bar = ProgressBar(total=float(total), completed=float(progress.get("step") or 0), width=40)
        grid.add_row("", bar)
    return grid
