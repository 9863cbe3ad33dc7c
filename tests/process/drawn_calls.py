"""Collective calls drawn by hypothesis, run on a rank, and compared with values computed here.

Values are whole numbers that every dtype holds, so results are exact whatever the order of sums;
only a mean is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from collective.group import Group
from collective.work import Work

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16,
            torch.uint32, torch.uint64]  # fmt: skip
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = [*FLOATS, *INTEGERS, *COMPLEX, torch.bool]
FLAT = ["auto", "centralized", "ring", "tree:1", "tree:2", "tree:3", "double_tree", "chain",
        "halving_doubling", "recursive_doubling", "bruck", "direct",
        "scatter_allgather"]  # fmt: skip
LAYOUTS = ["plain", "every second", "turned", "odd start"]
UNEVEN = ["all_gather", "reduce_scatter", "all_to_all"]
REDUCING = ["all_reduce", "reduce", "reduce_scatter"]
CALLS = [*REDUCING, "broadcast", "gather", "scatter", "all_gather", "all_to_all", "barrier",
         "messages", "any source"]  # fmt: skip


@dataclass(frozen=True)
class Call:
    """One call, the same on all ranks.

    Attributes:
        count: elements of a rank's tensor; of part r, in an uneven call, some more or fewer.
        flat: parts are one tensor instead of a list.
    """

    name: str
    count: int
    dtype: torch.dtype
    op: str
    prescale: float | None
    root: int
    layout: str
    uneven: bool
    flat: bool
    async_op: bool
    seed: int


@st.composite
def calls(draw: st.DrawFn, size: int) -> Call:
    """Any call on `size` ranks that has a right answer."""
    name = draw(st.sampled_from(CALLS))
    dtype = draw(st.sampled_from(DTYPES))
    ops, prescale = ["sum", "product"], None
    if dtype in FLOATS or dtype in COMPLEX:
        ops.append("mean")
        prescale = draw(st.sampled_from([None, None, 0.5, -2.0]))
    else:
        ops += ["band", "bor", "bxor"]
    if dtype not in COMPLEX:
        ops += ["min", "max"]
    near = [size - 1, size, size + 1]
    return Call(
        name=name,
        count=draw(st.one_of(st.sampled_from([0, 1, *near]), st.integers(0, 10_000))),
        dtype=dtype,
        op=draw(st.sampled_from(ops)),
        prescale=prescale,
        root=draw(st.integers(0, size - 1)),
        layout=draw(st.sampled_from(LAYOUTS)),
        uneven=name in UNEVEN and draw(st.booleans()),
        flat=draw(st.booleans()),
        async_op=draw(st.booleans()),
        seed=draw(st.integers(0, 1 << 16)),
    )


def nodes(size: int) -> st.SearchStrategy[list[str] | None]:
    """Names of the ranks' nodes, any number of ranks on each, in any order; None for one level."""
    return st.none() | st.lists(st.sampled_from("abc"), min_size=size, max_size=size)


@st.composite
def strategies(draw: st.DrawFn, levels: bool) -> str:
    """The spelling of a strategy."""
    if not levels:
        return draw(st.sampled_from(FLAT))
    local, between = draw(st.sampled_from(FLAT[1:])), draw(st.sampled_from(FLAT[1:]))
    return draw(st.sampled_from(["auto", f"local={local},between={between}"]))


def values(call: Call, rank: int, part: int = 0, count: int | None = None) -> torch.Tensor:
    """What `rank` contributes, as `part` of several."""
    generator = torch.Generator().manual_seed(call.seed * 100 + rank * 10 + part)
    most = 2 if call.op == "product" else 8
    shape = (call.count if count is None else count,)
    drawn = torch.randint(-most, most + 1, shape, generator=generator)
    if call.dtype is torch.bool:
        return drawn > 0
    if not call.dtype.is_signed:
        drawn = drawn.abs()
    made = drawn.to(call.dtype)
    return made * (1 + 1j) if call.dtype in COMPLEX else made


def combined(call: Call, parts: list[torch.Tensor]) -> torch.Tensor:
    """The right result of a reduction, in 64 bits."""
    if call.dtype is torch.bool:
        stack = torch.stack(parts)
        if call.op == "bxor":
            return stack.sum(0) % 2 == 1
        return stack.all(0) if call.op in ("product", "min", "band") else stack.any(0)
    wide = (
        torch.complex128 if call.dtype in COMPLEX
        else torch.float64 if call.dtype in FLOATS else torch.int64
    )  # fmt: skip
    stack = torch.stack([part.to(wide) for part in parts])
    if call.prescale is not None:
        stack = stack * call.prescale
    if call.op in ("band", "bor", "bxor"):
        result = stack[0]
        for other in stack[1:]:
            result = getattr(torch, f"bitwise_{call.op.removeprefix('b')}")(result, other)
    else:
        result = {
            "sum": lambda: stack.sum(0), "mean": lambda: stack.sum(0) / len(parts),
            "product": lambda: stack.prod(0), "min": lambda: stack.amin(0),
            "max": lambda: stack.amax(0),
        }[call.op]()  # fmt: skip
    return result.to(call.dtype)


class Laid:
    """A tensor laid out in some way, and whether what lies around it stays as it was."""

    def __init__(self, content: torch.Tensor, layout: str) -> None:
        count, dtype = content.numel(), content.dtype
        self.tensor = content.clone()
        self._around = self._before = torch.empty(0)
        if layout == "every second":
            room = torch.ones(2 * count, dtype=dtype)
            self.tensor, self._around = room[::2], room[1::2]
        elif layout == "odd start":
            room = torch.ones(count + 2, dtype=dtype)
            self.tensor, self._around = room[1:-1], room[:: count + 1]
        elif layout == "turned" and count and count % 2 == 0:
            self.tensor = torch.empty((count // 2, 2), dtype=dtype).t()
        self.tensor.copy_(content.view(self.tensor.shape))
        self._before = self._around.clone()

    @property
    def values(self) -> torch.Tensor:
        """The elements in order."""
        return self.tensor.reshape(-1)

    @property
    def alone(self) -> bool:
        """Whether the neighbours are untouched."""
        return torch.equal(self._around, self._before)


#: gives what is wrong with the results of a call that is over
Check = Callable[[], list[str]]


def issue(group: Group, call: Call, tag: int) -> tuple[list[Work], Check]:
    """Make a call on this rank, with its own tag for messages."""
    return _Issue(group, call, tag).issue()


class _Issue:
    def __init__(self, group: Group, call: Call, tag: int) -> None:
        self.group, self.call, self.tag = group, call, tag
        self.me, self.n = group.rank, group.size
        self.wants: list[tuple[Laid, torch.Tensor]] = []

    def laid(
        self, content: torch.Tensor, want: torch.Tensor, layout: str | None = None
    ) -> torch.Tensor:
        """A tensor for the call that must hold `want` in the end."""
        made = Laid(content, layout or self.call.layout)
        self.wants.append((made, want))
        return made.tensor

    def kept(self, content: torch.Tensor) -> torch.Tensor:
        return self.laid(content, content)

    def filled(self, want: torch.Tensor) -> torch.Tensor:
        """A tensor that the call fills."""
        return self.laid(torch.zeros_like(want), want)

    def several(self, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        return [self.laid(content, want) for content, want in parts]

    def check(self) -> list[str]:
        found = []
        for number, (laid, want) in enumerate(self.wants):
            if not laid.alone:
                found.append(f"rank {self.me}: neighbours of tensor {number} of {self.call}")
            if self.call.op == "mean" and self.call.name in REDUCING:
                right = torch.allclose(laid.values, want, rtol=1e-2, atol=1e-2)
            else:
                right = torch.equal(laid.values, want)
            if not right:
                found.append(f"rank {self.me}: {laid.values} is not {want} in {self.call}")
        return found

    def count(self, rank: int) -> int:
        """Elements of part `rank`."""
        return math.ceil(self.call.count * rank / self.n) if self.call.uneven else self.call.count

    def joined(
        self, parts: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor | list[torch.Tensor]:
        """Parts as the call takes them: one tensor, which must be contiguous, or a list."""
        if not self.call.flat or self.call.uneven:
            return self.several(parts)
        content, want = (torch.cat(side) for side in zip(*parts, strict=True))
        return self.laid(content, want, "plain")

    def issue(self) -> tuple[list[Work], Check]:
        works = getattr(self, "_" + self.call.name.replace(" ", "_"))()
        return works if isinstance(works, list) else [works], self.check

    def _reduction(self) -> dict[str, object]:
        return {"op": self.call.op, "prescale": self.call.prescale, "async_op": self.call.async_op}

    def _all_reduce(self) -> Work:
        parts = [values(self.call, rank) for rank in range(self.n)]
        tensor = self.laid(parts[self.me], combined(self.call, parts))
        return self.group.all_reduce(tensor, **self._reduction())  # type: ignore[arg-type]

    def _reduce(self) -> Work:
        parts = [values(self.call, rank) for rank in range(self.n)]
        want = combined(self.call, parts) if self.me == self.call.root else parts[self.me]
        tensor = self.laid(parts[self.me], want)
        return self.group.reduce(tensor, self.call.root, **self._reduction())  # type: ignore[arg-type]

    def _reduce_scatter(self) -> Work:
        call, me = self.call, self.me
        mine = [values(call, me, part, self.count(part)) for part in range(self.n)]
        parts = [values(call, rank, me, self.count(me)) for rank in range(self.n)]
        inputs = self.joined([(part, part) for part in mine])
        output = self.filled(combined(call, parts))
        return self.group.reduce_scatter(output, inputs, **self._reduction())  # type: ignore[arg-type]

    def _broadcast(self) -> Work:
        tensor = self.laid(values(self.call, self.me), values(self.call, self.call.root))
        return self.group.broadcast(tensor, self.call.root, async_op=self.call.async_op)

    def _all_gather(self) -> Work:
        parts = [values(self.call, rank, 0, self.count(rank)) for rank in range(self.n)]
        outputs = self.joined([(torch.zeros_like(part), part) for part in parts])
        return self.group.all_gather(
            outputs, self.kept(parts[self.me]), async_op=self.call.async_op
        )

    def _gather(self) -> Work:
        parts = [values(self.call, rank) for rank in range(self.n)]
        outputs = None
        if self.me == self.call.root:
            outputs = self.joined([(torch.zeros_like(part), part) for part in parts])
        return self.group.gather(
            self.kept(parts[self.me]), outputs, self.call.root, async_op=self.call.async_op
        )

    def _scatter(self) -> Work:
        parts = [values(self.call, self.call.root, part) for part in range(self.n)]
        here = self.me == self.call.root
        inputs = self.joined([(part, part) for part in parts]) if here else None
        return self.group.scatter(
            self.filled(parts[self.me]), inputs, self.call.root, async_op=self.call.async_op
        )

    def _all_to_all(self) -> Work:
        call, me = self.call, self.me

        def exchanged(source: int, target: int) -> torch.Tensor:
            # as many as both together have
            return values(call, source, target, (self.count(source) + self.count(target)) // 2)

        outputs = [exchanged(rank, me) for rank in range(self.n)]
        inputs = [exchanged(me, rank) for rank in range(self.n)]
        return self.group.all_to_all(
            self.joined([(torch.zeros_like(part), part) for part in outputs]),
            self.joined([(part, part) for part in inputs]),
            async_op=call.async_op,
        )

    def _barrier(self) -> Work:
        return self.group.barrier(async_op=self.call.async_op)

    def _messages(self, source: int | None = -1) -> list[Work]:
        """Each rank sends to the next one, in rings; alone, it has nobody to send to."""
        if self.n == 1:
            return []
        before, behind = (self.me - 1) % self.n, (self.me + 1) % self.n
        output = self.filled(values(self.call, before))
        works = [
            self.group.recv(output, before if source == -1 else source, self.tag, async_op=True),
            self.group.send(self.kept(values(self.call, self.me)), behind, self.tag, async_op=True),
        ]
        if not self.call.async_op:
            for work in works:
                work.wait()
        return works

    def _any_source(self) -> list[Work]:
        return self._messages(None)
