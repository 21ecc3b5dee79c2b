"""A small network with its optimizer and data, for tests that run many short trainings."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

FEATURES, CLASSES = 8, 4


def net(wide: int = 16) -> nn.Sequential:
    """Return a network that is the same on every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, wide), nn.LayerNorm(wide), nn.ReLU(), nn.Linear(wide, CLASSES))


def sgd(model: nn.Module, momentum: float = 0.9, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, **options)


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Return a worker's samples of a step."""
    draws = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(6, FEATURES, generator=draws)
    return x, x[:, :CLASSES].argmax(1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, comm: Any, rank: int, number: int) -> None:
    """Take one step as a user writes it, with a learning rate that falls a little in each step."""
    for group in optimizer.param_groups:
        group["lr"] = 0.1 * 0.99**number
    x, y = batch(rank, number)
    loss = nn.functional.cross_entropy(model(x), y)
    comm.note(loss)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, comm: Any, rank: int, numbers: Sequence[int]) -> None:
    for number in numbers:
        step(model, optimizer, comm, rank, number)
