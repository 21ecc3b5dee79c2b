"""Optimizers within wrappers of frameworks: what is attached is inside."""

import torch
import torch.nn.functional as F
from torch import nn

import accordion_bench as ab
from accordion_bench.attaching.users_optimizer import stepping_optimizer
from tests.kit.by_hand import joined
from tests.kit.processes import together


class Wrapped(torch.optim.Optimizer):
    """As a framework's: it is an optimizer by name only, has no hooks, and hands everything on."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list:
        return self.optimizer.param_groups

    def step(self, closure=None):
        self.optimizer.step(closure)


def test_the_innermost_optimizer_steps():
    inner = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    assert stepping_optimizer(inner) is inner
    assert stepping_optimizer(Wrapped(Wrapped(inner))) is inner


def _train(rank: int, door: str, wrapped: bool) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    used = Wrapped(optimizer) if wrapped else optimizer
    options = {"sync": "local_sgd", "period": 2} if door == "local" else {"density": 0.2}
    torch.manual_seed(rank)
    with getattr(ab, door)(model, used, compressor="topk" if door == "attach" else "none", **options) as comm:
        for _ in range(4):
            F.mse_loss(model(torch.randn(16, 8)), torch.randn(16, 4)).backward()
            used.step()
            optimizer.zero_grad()
        assert comm.position.step == 4
    return model.weight.detach()


def _both(rank: int, store: str) -> None:
    joined(rank, store)
    for door in ("attach", "local"):
        assert torch.equal(_train(rank, door, False), _train(rank, door, True))


def test_wrapped_or_not_the_training_is_the_same(tmp_path):
    together(2, _both, str(tmp_path / "store"))
