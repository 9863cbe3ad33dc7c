"""What ranks run in the test of a level by NCCL."""

from __future__ import annotations

import torch
import torch.distributed as dist


def start(strategy: str) -> None:
    dist.init_process_group("unisono", pg_options=strategy)


def stop() -> None:
    dist.destroy_process_group()


def values() -> bool:
    """Exact values of whole numbers; whether NCCL carried them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for device in ("cpu", "cuda"):
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64):
            for count in (0, 1, 5, 10_007):
                ramp = torch.arange(count).remainder(17)
                tensor = (ramp * (rank + 1)).to(device, dtype)
                dist.all_reduce(tensor)
                assert torch.equal(tensor.cpu(), (ramp * (size * (size + 1) // 2)).to(dtype))
                tensor = (ramp + rank).to(device, dtype)
                dist.broadcast(tensor, size - 1)
                assert torch.equal(tensor.cpu(), (ramp + size - 1).to(dtype))
        parts = [torch.zeros(3 + each, device=device) for each in range(size)]
        dist.all_gather(parts, torch.full((3 + rank,), float(rank), device=device))
        assert all(bool((part == each).all()) for each, part in enumerate(parts))
        mean = torch.full((5,), float(rank), device=device)
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        assert mean.tolist() == [(size - 1) / 2] * 5
        smallest = torch.tensor([float("nan") if rank else 1.0], device=device)
        dist.all_reduce(smallest, dist.ReduceOp.MIN)
        assert smallest.isnan().all()
        dist.barrier()
    world = dist.group.WORLD
    libraries = world.group._libraries  # type: ignore[union-attr]
    return any(engine == "nccl" for engine, _ in libraries._groups)
