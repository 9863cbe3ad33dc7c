"""Training loops with known sleeps, for the tests of step timing; ranks run them."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class SlowBackward(torch.autograd.Function):
    """Passes a tensor on; its backward sleeps."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, seconds: float) -> torch.Tensor:
        context.seconds = seconds
        return tensor.clone()

    #: when the last backward reached this place
    reached = 0.0

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        SlowBackward.reached = time.monotonic()
        time.sleep(context.seconds)
        return gradient, None


class Network(nn.Module):
    """Three layers; sleeps in its forward, and between the layers' backwards."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(3)])
        self.forward_sleep = 0.0
        self.backward_sleep = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.forward_sleep:
            time.sleep(self.forward_sleep)
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 1 and self.backward_sleep:
                x = SlowBackward.apply(x, self.backward_sleep)
        return x


class SlowOptimizer(torch.optim.SGD):
    """Sleeps in its step."""

    sleep = 0.0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        if self.sleep:
            time.sleep(self.sleep)
        return super().step(closure)


def start(backend: str | None = "unisono") -> dict[str, str]:
    """Make the default group; what torch says it is."""
    dist.init_process_group(backend)
    return {"backend": dist.get_backend(), "type": type(dist.group.WORLD).__name__}


def stop() -> None:
    """Destroy all groups."""
    dist.destroy_process_group()


def train(
    steps: int,
    data: float = 0.0,
    forward: float = 0.0,
    optimizer_sleep: float = 0.0,
    slow_rank: int | None = None,
    backward: float = 0.0,
) -> int:
    """DDP over several buckets with sleeps of known length; returns the number of steps."""
    network = Network()
    wrapped = DDP(network, bucket_cap_mb=0.01)
    optimizer = SlowOptimizer(wrapped.parameters(), 0.01)
    optimizer.sleep = optimizer_sleep
    network.forward_sleep = forward
    if dist.get_rank() == slow_rank:
        network.backward_sleep = backward
    batch = torch.ones(4, 64)
    for _ in range(steps):
        time.sleep(data)
        optimizer.zero_grad()
        wrapped(batch).sum().backward()
        optimizer.step()
    return steps


def overlap() -> float:
    """Seconds of a backward up to behind its first bucket; rank 1 comes 0.5 s late."""
    network = Network()
    wrapped = DDP(network, bucket_cap_mb=0.01)
    network.backward_sleep = 0.001
    batch = torch.ones(4, 64)
    start = 0.0
    for _ in range(3):
        loss = wrapped(batch).sum()
        if dist.get_rank() == 1:
            time.sleep(0.5)
        start = time.monotonic()
        loss.backward()
    return SlowBackward.reached - start


def train_and_evaluate(told: bool) -> None:
    """Two steps, an evaluation of 0.3 s, two steps; rank 0 evaluates, the others go on."""
    import collective

    network = Network()
    wrapped = DDP(network)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.01)
    batch = torch.ones(4, 64)

    def step() -> None:
        optimizer.zero_grad()
        wrapped(batch).sum().backward()
        optimizer.step()

    step()
    step()
    if dist.get_rank() == 0:
        if told:
            with collective.phase("save"):
                time.sleep(0.3)
        else:
            network.eval()
            with torch.no_grad():
                for _ in range(3):
                    network(batch)
                    time.sleep(0.1)
            network.train()
    step()
    step()


def log_values() -> None:
    """Values at a step, with a tensor among them."""
    import collective

    collective.log(loss=torch.tensor(0.5), samples=64, note="a <b>")
    collective.log(step=12, accuracy=0.9)
    with pytest.raises(TypeError, match="bad"):
        collective.log(bad=[1, 2])


def explicit_steps(count: int) -> None:
    """Steps of a loop without an optimizer, told by `collective.step`."""
    import collective

    collective.step()
    for _ in range(count):
        dist.all_reduce(torch.ones(10))
        collective.step()


def subgroup_backend(backend: str | None = None) -> tuple[str, str, float]:
    """A new group inside the job: its backend, its class, and a sum over it."""
    group = dist.new_group(list(range(dist.get_world_size())), backend=backend)
    value = torch.ones(())
    dist.all_reduce(value, group=group)
    return dist.get_backend(group), type(group).__name__, value.item()


def step_cost(steps: int, collectives: int) -> float:
    """Seconds per step that the clock and its hooks take, measured on an empty loop."""
    from collective import timing

    session = timing._session
    assert session is not None
    network = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(network.parameters(), 0.0)
    batch = torch.ones(1, 1)
    value = torch.ones(1)

    def loop() -> float:
        start = time.thread_time()
        for _ in range(steps):
            network(batch)
            for _ in range(collectives):
                dist.all_reduce(value, group=alone)
            optimizer.step()
        return (time.thread_time() - start) / steps

    from collective import timing_observer

    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    loop()
    timed = min(loop() for _ in range(5))
    session.hooks.remove()
    timing_observer.current = None
    plain = min(loop() for _ in range(5))
    return timed - plain
