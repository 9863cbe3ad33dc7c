"""``unisono bench choices``: how near `auto` comes to the best fixed strategy, in one run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from collective.figures import KINDS
from collective.units import format_size, format_time
from unisono import bench_output
from unisono.bench_arguments import (
    Json,
    Operations,
    Repeats,
    Sizes,
    kinds_of,
    operations_of,
    places_of,
    sizes_of,
)
from unisono.bench_layout import Layout
from unisono.bench_run import run_ranks
from unisono.commands.console import fail

__all__ = ["choices"]

#: times the best fixed strategy that `auto` may take
BOUND = 1.1


@dataclass(frozen=True)
class Choice:
    """What `auto` took for one operation and size, beside the best fixed strategy.

    Attributes:
        ratio: the time under `auto` over that of the best fixed strategy.
        again: the time of the same strategy, fixed, over that of the best; None where it is not
            among them, or was too slow.  What auto does beside choosing costs less than a
            microsecond, so the two ratios differ by what the machine's noise is.
    """

    topology: str
    link: str
    ranks: int
    op: str
    bytes: int
    strategy: str
    seconds: float
    best: str
    best_seconds: float
    ratio: float
    again: float | None

    @property
    def nearest(self) -> float:
        """The lower of both ratios."""
        return min(self.ratio, self.again or self.ratio)

    @property
    def kept(self) -> bool:
        """Whether either measurement is within the bound."""
        return self.nearest <= BOUND


def choices(
    ranks: Annotated[
        str | None,
        typer.Option(metavar="N,…", help="Numbers of ranks (2,4,8).", show_default=False),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,…",
            help="Of websocket and shm (both, in turn): all pairs use it.",
            show_default=False,
        ),
    ] = None,
    topology: Annotated[
        str | None,
        typer.Option(
            metavar="NxM|A,B,…",
            help="Instead of --ranks: nodes with several ranks, such as 2x2; without --link they "
            "exchange as in collectives.",
            show_default=False,
        ),
    ] = None,
    sizes: Sizes = "8,4Ki,64Ki,256Ki,1Mi,4Mi,25Mi",
    operations: Operations = "all_reduce",
    repeats: Repeats = None,
    as_json: Json = False,
) -> None:
    """Time auto in turn with all fixed strategies, and show how near it is to the best of them."""
    if topology is not None:
        places = places_of(topology, ranks, link)
    else:
        kinds = KINDS if link is None else kinds_of(link)
        places = [one for kind in kinds for one in places_of("flat", ranks or "2,4,8", kind)]
    work = {
        "what": "collectives",
        "sizes": sizes_of(sizes),
        "operations": operations_of(operations),
        "against": [],
        "empty": False,
        "device": "cpu",
        "repeats": repeats,
    }
    found: list[Choice] = []
    where = bench_output.machine()
    if not as_json:
        print(_HEAD, flush=True)
    for place in places:
        for choice in _chosen(place, run_ranks(work, place, "all")):
            found.append(choice)
            if not as_json:
                print(_line(choice), flush=True)
    if as_json:
        print(bench_output.results("choices", where, [asdict(choice) for choice in found]))
    elif found:
        worst = max(found, key=lambda choice: choice.nearest)
        kept = sum(choice.kept for choice in found)
        print(
            f"\n{kept} of {len(found)} within {BOUND} of the best fixed strategy; the furthest: "
            f"{worst.strategy} for {worst.op} of {format_size(worst.bytes)} on {worst.ranks} "
            f"ranks, {worst.link}"
        )


def _chosen(place: Layout, rows: Iterator[dict[str, Any]]) -> Iterator[Choice]:
    """One choice per operation and size, as soon as all its rows are there."""
    case: list[dict[str, Any]] = []
    for row in rows:
        if bench_output.wrong(row):
            fail(f"{row['op']} of {row['bytes']} B by {row['strategy']} gave a wrong result")
        if row["setting"] == "auto" and case:
            yield _choice(place, case)
            case = []
        case.append(row)
    if case:
        yield _choice(place, case)


def _choice(place: Layout, rows: Sequence[dict[str, Any]]) -> Choice:
    auto, *fixed = rows
    final = [row for row in fixed if row["final"]]
    best = min(final, key=lambda row: float(row["seconds"]))
    same = [row["seconds"] for row in final if row["setting"] == auto["strategy"]]
    return Choice(
        topology=place.text,
        link=place.link,
        ranks=auto["ranks"],
        op=auto["op"],
        bytes=auto["bytes"],
        strategy=auto["strategy"],
        seconds=auto["seconds"],
        best=best["strategy"],
        best_seconds=best["seconds"],
        ratio=auto["seconds"] / best["seconds"],
        again=same[0] / best["seconds"] if same else None,
    )


_HEAD = (
    f"{'ranks':>5} {'link':<10}{'operation':<15}{'size':>9}  {'auto takes':<20}{'time':>10}  "
    f"{'best fixed':<20}{'time':>10}{'ratio':>7}{'again':>7}"
)


def _line(choice: Choice) -> str:
    again = "—" if choice.again is None else f"{choice.again:.2f}"
    return (
        f"{choice.ranks:>5} {choice.link:<10}{choice.op:<15}{format_size(choice.bytes):>9}  "
        f"{choice.strategy:<20}{format_time(choice.seconds):>10}  "
        f"{choice.best:<20}{format_time(choice.best_seconds):>10}{choice.ratio:>7.2f}{again:>7}"
        f"{'' if choice.kept else '  over ' + str(BOUND)}"
    )
