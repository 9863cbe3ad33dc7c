"""What all commands share: running against the control plane, printing, and one way to fail."""

from __future__ import annotations

import asyncio
import datetime
import json
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import typer

if TYPE_CHECKING:
    from unisono.client import ApiError, ControlPlane

__all__ = ["EXIT_ERROR", "fail", "note", "print_json", "run", "table", "when"]

T = TypeVar("T")

#: the command itself failed: no answer, or a refusal (1, 3 and 4 are states of a job, 2 is usage)
EXIT_ERROR = 5


def note(text: str) -> None:
    """Say something to the person, beside the output proper."""
    print(text, file=sys.stderr, flush=True)


def fail(message: str, code: int = EXIT_ERROR) -> NoReturn:
    """End the command with an error."""
    note(f"error: {message}")
    raise typer.Exit(code)


def run(work: Callable[[ControlPlane], Coroutine[Any, Any, T]]) -> T:
    """Run one piece of work with a client; errors end the command with their own words."""
    from unisono.access import AccessError, locate
    from unisono.client import ApiError, ControlPlane, Unreachable

    async def with_client() -> T:
        async with ControlPlane(locate()) as control_plane:
            return await work(control_plane)

    try:
        return asyncio.run(with_client())
    except ApiError as error:
        fail(describe(error))
    except (AccessError, Unreachable) as error:
        fail(str(error))


def describe(error: ApiError) -> str:
    """The problem document in the words of the control plane, one line per further field."""
    fields = [f"{name}: {message}" if name else message for name, message in error.fields]
    head = f"{error.detail} [{error.code}]"
    return "\n  ".join([head, *(line for line in fields if line != error.detail)])


def print_json(value: Any) -> None:
    """One line of JSON on stdout."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table on stdout; text from elsewhere is shown as text, never as markup."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, title in enumerate(head):
        # The first column is what other commands take: it must be whole.
        shown.add_column(title, no_wrap=index == 0, min_width=_widest(rows) if index == 0 else None)
    for row in rows:
        shown.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    # A pipe has no width to respect: cut nothing there.
    console = Console() if sys.stdout.isatty() else Console(width=400)
    console.print(shown)


def _widest(rows: Sequence[Sequence[object]]) -> int | None:
    return max((len(str(row[0])) for row in rows), default=None)


def when(at: float | None) -> str:
    """A Unix time as local date and time; empty without one."""
    if at is None:
        return ""
    return datetime.datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S")
