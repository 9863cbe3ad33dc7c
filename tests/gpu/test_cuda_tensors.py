"""CUDA tensors go through host memory and come back to their device, with the CPU's result."""

from __future__ import annotations

import threading

import pytest
import torch

import collective

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_cuda_tensors_get_the_cpus_result(dtype: torch.dtype) -> None:
    """An all-reduce and a broadcast of CUDA tensors leave the bytes that CPU tensors get."""
    values = [torch.arange(10_007).remainder(97).to(dtype) * (rank + 1) for rank in range(3)]
    groups = collective.local_group(3, timeout=60)
    results: dict[tuple[int, str], torch.Tensor] = {}

    def work(rank: int) -> None:
        for device in ("cpu", "cuda"):
            tensor = values[rank].to(device)
            groups[rank].all_reduce(tensor, async_op=False)
            groups[rank].broadcast(tensor, 1, async_op=False)
            assert tensor.device.type == device
            results[rank, device] = tensor.cpu()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for group in groups:
        group.close()
    assert len(results) == 6
    for rank in range(3):
        assert torch.equal(results[rank, "cuda"], results[rank, "cpu"])
        assert torch.equal(results[rank, "cuda"], results[0, "cuda"])
