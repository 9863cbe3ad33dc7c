"""What ranks run that form their group anew under another epoch."""

from __future__ import annotations

import logging
import os
import signal
import threading

import torch
from resources import descriptors, threads

import collective
from collective.group import Group

SECRET = "of-these-epochs"
_groups: list[Group] = []
_before = descriptors(), threads()


def form(where: list[str], mine: str, epoch: int, timeout: float = 20.0) -> int:
    """Leave the group of this process, if there is one, and form that of an epoch."""
    global _before
    if _groups:
        _groups.pop().close()
    else:
        _before = descriptors(), threads()
    group = collective.init(
        where.index(mine), addresses=where, secret=SECRET, epoch=epoch, timeout=timeout
    )
    _groups.append(group)
    return group.epoch


def total(value: float) -> tuple[float, int]:
    """The sum over the ranks of a group, and how many those are."""
    tensor = torch.full((70_001,), value)
    _groups[0].all_reduce(tensor)
    return float(tensor[-1]), _groups[0].size


def half(value: float) -> float:
    """The sum in a subgroup of the first two ranks."""
    tensor = torch.full((3,), value)
    with _groups[0].subgroup([0, 1]) as sub:
        sub.all_reduce(tensor)
    return float(tensor[-1])


def die_in_the_middle() -> None:
    """Take part in two operations and die in the third."""
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        total(1.0)


def until_lost() -> int | None:
    """Operations until one fails; the rank that is named."""
    while True:
        try:
            total(1.0)
        except collective.PeerLost as lost:
            return lost.rank


class _Seen(logging.Handler):
    """Keeps what is logged, and tells when a text comes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.come = threading.Event()
        self._text = text

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if self._text in self.lines[-1]:
            self.come.set()


def form_when_asked(where: list[str], mine: str, epoch: int) -> int:
    """Stay in the earlier epoch until somebody of the next one has been turned away."""
    seen = _Seen(f"425 the group is at epoch {epoch - 1}, the dialler at {epoch}")
    logging.getLogger("unisono.collective").addHandler(seen)
    try:
        assert seen.come.wait(20), seen.lines
    finally:
        logging.getLogger("unisono.collective").removeHandler(seen)
    return form(where, mine, epoch)


def total_while_knocked_at(value: float, text: str) -> tuple[float, int]:
    """A sum after somebody has been refused with `text` in the log."""
    seen = _Seen(text)
    logging.getLogger("unisono.collective").addHandler(seen)
    try:
        assert seen.come.wait(20), seen.lines
    finally:
        logging.getLogger("unisono.collective").removeHandler(seen)
    return total(value)


def leave() -> bool:
    """Close; whether descriptors and threads are what they were before the first epoch."""
    if _groups:
        _groups.pop().close()
    return (descriptors(), threads()) == _before
