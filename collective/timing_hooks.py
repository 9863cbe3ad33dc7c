"""Hooks into torch that tell a step clock where a training loop is, without a change in its code.

A hook before each module's forward costs about 3 µs per module, which is too much for a model of
a thousand; so it removes itself at the first forward of a step and is set again when an optimizer
has stepped.  During an evaluation it stays.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from collective.timing_observer import Observer


class StepHooks:
    """Global hooks of this process, feeding one observer's clock."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._clock = observer.clock
        #: modules that training steps began with, and those that they wrap
        self._trained: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self._armed: RemovableHandle | None = None
        self.arm()

    def arm(self) -> None:
        """Have the next forward noticed."""
        if self._armed is None:
            self._armed = register_module_forward_pre_hook(self._forward)

    def remove(self) -> None:
        """Take all hooks out again."""
        for handle in self._handles:
            handle.remove()
        if self._armed is not None:
            self._armed.remove()
            self._armed = None

    def _forward(self, module: torch.nn.Module, arguments: Any) -> None:
        if torch.compiler.is_compiling():
            return
        training = module.training and torch.is_grad_enabled()
        if not training:
            if module in self._trained:
                self._clock.evaluation()
                return
            if self._clock.evaluating:
                return  # a part of the module that is evaluated
        if self._clock.forward() and self._armed is not None:
            self._observer.thread = threading.get_ident()
            self._armed.remove()
            self._armed = None
            if training:
                self._trained.add(module)
                inner = getattr(module, "module", None)
                if isinstance(inner, torch.nn.Module):
                    self._trained.add(inner)

    def _before_step(self, optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
        self._observer.thread = threading.get_ident()
        self._clock.optimizer_begins(id(optimizer))

    def _after_step(self, optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
        self._clock.optimizer_ends(id(optimizer))
        self.arm()
