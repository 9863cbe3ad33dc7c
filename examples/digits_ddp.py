"""Train a small network on handwritten digits with plain PyTorch DDP.

The data are scikit-learn's bundled digits: 1,797 real images of 8×8 pixels.  Nothing in this
program knows which library carries the gradients; it runs under any launcher that sets torchrun's
environment::

    torchrun --nproc-per-node 4 digits_ddp.py --backend gloo
    torchrun --nproc-per-node 4 digits_ddp.py --backend unisono
    unisono job start digits_ddp.py --nodes 2 --ranks-per-node 2 -- --epochs 5

Lines that begin with ``::unisono`` are metrics when the program runs as a job, and plain text
everywhere else.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CLASSES = 10


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training data")
    parser.add_argument("--batch-size", type=int, default=32, help="samples per rank and step")
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate of Adam")
    parser.add_argument("--hidden", type=int, default=128, help="width of the hidden layers")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the shuffling")
    parser.add_argument(
        "--backend",
        default=os.environ.get("UNISONO_BACKEND", "unisono"),
        help="of torch.distributed: unisono, gloo or nccl (default: $UNISONO_BACKEND or unisono)",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto takes the GPU of this local rank where there is one",
    )
    options = parser.parse_args(argv)
    for name in ("epochs", "batch_size", "hidden"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return options


def pick_device(choice: str) -> torch.device:
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if choice == "cpu" or (choice == "auto" and torch.cuda.device_count() <= local_rank):
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """1,437 images to train on and 360 that training never sees; the same split everywhere."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16.0, labels, test_size=360, stratify=labels, random_state=0)
    train_x, test_x = (torch.tensor(part, dtype=torch.float32) for part in parts[:2])
    train_y, test_y = (torch.tensor(part, dtype=torch.int64) for part in parts[2:])
    return TensorDataset(train_x, train_y), TensorDataset(test_x, test_y)


def build_model(hidden: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, CLASSES),
    )


def report(**values: float | int | str) -> None:
    """One metric line, in one write, so that lines of several ranks do not mix."""
    sys.stdout.write(f"::unisono {json.dumps(values)}\n")
    sys.stdout.flush()


def accuracy(model: nn.Module, test: TensorDataset, device: torch.device) -> float:
    """Share of the held-out images that are recognised; each rank looks at its own part of them."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    images, labels = (part[rank::world_size].to(device) for part in test.tensors)
    model.eval()
    with torch.no_grad():
        hits = (model(images).argmax(dim=1) == labels).sum()
    counts = torch.stack([hits, torch.tensor(len(labels), device=device)]).to(torch.int64)
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def parameters_sha256(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def train(options: argparse.Namespace) -> float:
    torch.manual_seed(options.seed)
    device = pick_device(options.device)
    training, test = load_data()
    sampler: DistributedSampler[object] = DistributedSampler(training, seed=options.seed)
    loader = DataLoader(training, batch_size=options.batch_size, sampler=sampler)
    model = DistributedDataParallel(build_model(options.hidden).to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    loss_of = nn.CrossEntropyLoss()

    steps_total = options.epochs * len(loader)
    step = 0
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = loss_of(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            step += 1
            report(step=step, loss=loss.item(), samples=len(labels), steps_total=steps_total)

    share = accuracy(model.module, test, device)
    report(step=step, accuracy=share, parameters_sha256=parameters_sha256(model.module))
    return share


def main() -> dist.Work:
    """Train, and return the last operation: if a thread of gloo's is the one that frees it while
    Python ends, the process aborts, so it is held until then."""
    options = parse()
    dist.init_process_group(options.backend)
    try:
        share = train(options)
        # No rank tears its links down while another still works: gloo may abort the process then.
        last: dist.Work = dist.barrier(async_op=True)
        last.wait()
        if dist.get_rank() == 0:
            print(f"held-out accuracy after {options.epochs} epochs: {share:.4f}", flush=True)
        return last
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    last = main()
