"""What ranks run in which one ends while the links of the group of all are made."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import fault_jobs
import torch
from resources import descriptors, threads

from collective import calibration, world
from collective.links import shared_handshake
from collective.links.doorman import Doorman
from collective.links.link import Inlet

#: by step of the victim: before which call of a function it ends
STEPS: dict[str, tuple[Any, str, int]] = {
    "is dialled by all": (Doorman, "deposit", 3),
    "has dialled all": (Doorman, "claim", 1),
    "offers memory": (shared_handshake, "offer", 1),
    "takes memory": (shared_handshake, "take", 1),
    "has links": (calibration, "own_facts", 1),
    "greets the second": (Inlet, "say", 2),
    "has greeted": (world, "await_greetings", 1),
    "is greeted": (calibration, "calibrate", 1),
}


def meet(how: tuple[Any, ...], victim: int, step: str, raises: bool) -> float:
    """Make a group, in which the victim ends at a step, and sum."""
    with ExitStack() as stack:
        if int(os.environ["RANK"]) == victim:
            owner, name, at = STEPS[step]
            ending = _ending(getattr(owner, name), at, raises)
            stack.enter_context(mock.patch.object(owner, name, ending))
        fault_jobs.join(*how)
    tensor = torch.ones(3)
    with fault_jobs.group() as group:
        group.all_reduce(tensor)
    return float(tensor[0])


def held() -> tuple[dict[int, str], list[str]]:
    """What this process has open, and its threads."""
    return descriptors(), threads()


def _ending(function: Callable[..., Any], at: int, raises: bool) -> Callable[..., Any]:
    """A function that ends the process, or raises, in the call of a number."""
    calls = 0

    def call(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            if raises:
                raise OSError("the disk is full")
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **named)

    return call
