"""What a training program can say about itself, and the start of its step timing.

`log`, `step` and `phase` may stand in any program: outside a job they do nothing.  Inside one they
need no call to work: steps are timed by themselves (`collective.timing_clock` defines what is
measured), these functions only add what cannot be seen from outside.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from collective import job
from collective.errors import RendezvousFailed
from collective.messages import Metrics, RankFacts, RankMetrics, RankReport
from collective.timing_clock import StepClock
from collective.timing_report import StepReporter

__all__ = ["log", "phase", "start", "step"]

#: names of phases that mean the ordinary course of training
_ORDINARY = ("step", "train")


class _Session:
    """The timing of this process."""

    def __init__(self, here: job.Job, warmup: int) -> None:
        from collective import timing_observer
        from collective.timing_hooks import StepHooks

        self.job = here
        self.reporter = StepReporter(
            here.attempt, here.rank, here.channel.send, idle=lambda age: self.clock.idle(age)
        )
        self.clock = StepClock(self.reporter.emit, warmup=warmup)
        self.clock.stir = self.reporter.stir
        observer = timing_observer.Observer(self.clock)
        timing_observer.current = observer
        self.hooks = StepHooks(observer)
        atexit.register(self.reporter.close)


_session: _Session | None = None
_agent_missing = False
_lock = threading.Lock()


def _here() -> job.Job | None:
    """The job of this process; without its agent a program goes on, and says so once."""
    global _agent_missing
    if _agent_missing:
        return None
    try:
        return job.current()
    except RendezvousFailed as error:
        _agent_missing = True
        print(f"unisono: nothing of this rank is reported: {error}", file=sys.stderr)
        return None


def start() -> bool:
    """Time the steps of this process from now on; whether it is a rank of a job.

    Harmless when repeated.

    Raises:
        RendezvousFailed: the agent that the environment names does not answer.
        ValueError: ``UNISONO_WARMUP_STEPS`` is not a number.
    """
    global _session
    with _lock:
        if _session is not None:
            return True
        here = job.current()
        if here is None:
            return False
        text = os.environ.get("UNISONO_WARMUP_STEPS", "5")
        if not text.isdecimal():
            raise ValueError(f"UNISONO_WARMUP_STEPS is {text!r}; give a number of steps, such as 5")
        _session = _Session(here, int(text))
        return True


def facts(**values: float | int | str | bool) -> None:
    """Tell the agent facts about this rank, such as the backend that it uses."""
    here = job.current()
    if here is not None:
        report = RankReport(attempt=here.attempt, rank=here.rank, values=dict(values))
        here.channel.send(RankFacts(report=report))


def log(**values: Any) -> None:
    """Report values of the current step, such as ``log(loss=0.4, samples=64)``.

    The same as a line ``::unisono {"loss": 0.4, "samples": 64}`` on standard output.  A value
    ``step`` numbers the step; otherwise it is the number of optimizer steps so far.

    Raises:
        TypeError: a value is not a number, text, bool or a tensor with one element.
    """
    plain = {name: _plain(name, value) for name, value in values.items()}
    here = _here()
    if here is None or not plain:
        return
    number = plain.pop("step", None)
    if number is None and _session is not None:
        number = _session.clock.current or None
    metrics = Metrics(
        attempt=here.attempt,
        rank=here.rank,
        step=None if number is None else int(number),
        values=plain,
    )
    here.channel.send(RankMetrics(metrics=metrics))


def _plain(name: str, value: Any) -> float | int | str | bool:
    if isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "item"):
        try:
            value = value.item()
        except (RuntimeError, ValueError) as error:
            raise TypeError(f"log({name}=…): {error}") from None
        if isinstance(value, bool | int | float | str):
            return value
    raise TypeError(
        f"log({name}=…) takes a number, text, bool or a tensor with one element, "
        f"not {type(value).__name__}"
    )


def step() -> None:
    """End the current step here.

    Needed only where optimizer steps do not tell: a loop without an optimizer, or with several
    that step in turn.  From the first call on, only these calls end a step.
    """
    if _here() is not None and start():
        assert _session is not None
        _session.clock.step()
        _session.hooks.arm()


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Mark what is no training step: ``with phase("eval"): …``.

    The time inside is cut out of the step around it and shown under its name, so that a rank that
    evaluates or saves alone is not taken for a slow one.  ``phase("train")`` means ordinary steps.

    Raises:
        ValueError: the name is empty or longer than 64 characters.
    """
    if not name or len(name) > 64:
        raise ValueError(f"a phase needs a name of 1 to 64 characters, got {name!r}")
    if name in _ORDINARY or _here() is None or not start():
        yield
        return
    assert _session is not None
    clock = _session.clock
    before = clock.enter(name)
    try:
        yield
    finally:
        clock.leave(before)


def _forget() -> None:
    """A forked child, such as a data-loader worker, is no rank."""
    global _session, _lock
    _lock = threading.Lock()
    session, _session = _session, None
    if session is not None:
        session.hooks.remove()
        atexit.unregister(session.reporter.close)


os.register_at_fork(after_in_child=_forget)
