"""With find_unused_parameters, what no worker's loss reaches is left alone, as by stock DistributedDataParallel."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import accordion_bench as ab
from tests.kit.loops import net, play, same, same_on_all


class Branching(nn.Module):
    """A layer that all use, one that rank 0 uses, one that is used in the first two steps, one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.rank0, self.early, self.never = (nn.Linear(6, 3) for _ in range(4))

    def forward(self, x: Tensor, step: int) -> Tensor:
        out = self.always(x)
        if dist.get_rank() == 0:
            out = out + self.rank0(x)
        if step < 2:
            out = out + self.early(x)
        return out


def train(module: nn.Module, optimizer: torch.optim.Optimizer, to_none: bool = True) -> list[list[bool]]:
    """Returns which gradients were there after each backward pass."""
    there = []
    for step in range(5):
        optimizer.zero_grad(set_to_none=to_none)
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        module(x, step).square().mean().backward()
        there.append([param.grad is not None for param in module.parameters()])
        optimizer.step()
    return there


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


DDP: list[dict[str, Any]] = [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 1e-4}]


def as_stock():
    for make in (sgd, adamw):
        for ddp in DDP:
            for to_none in (True, False):
                models, there = [], []
                for attaches in (True, False):
                    model = net(make=Branching)
                    module = DistributedDataParallel(model, find_unused_parameters=True, **ddp)
                    optimizer = make(model)
                    if attaches:
                        ab.attach(module, optimizer, compressor="none")
                    there.append(train(module, optimizer, to_none))
                    models.append(model)
                same(*models)
                assert there[0] == there[1]


def with_compression():
    """What nobody ever reaches stays where it was; all workers keep one model."""
    for options in (
        {"compressor": "topk", "density": 0.3},
        {"compressor": "powersgd", "rank": 1},
        {"compressor": "qsgd"},
        {"compressor": "bf16"},
        {"compressor": "fp8"},
    ):
        for ddp in DDP:
            model = net(make=Branching)
            start = model.never.weight.detach().clone()
            optimizer = adamw(model)
            module = DistributedDataParallel(model, find_unused_parameters=True, **ddp)
            ab.attach(module, optimizer, **options)
            train(module, optimizer)
            assert torch.equal(model.never.weight, start), options
            same_on_all(model)


@pytest.mark.parametrize("case", [as_stock, with_compression], ids=lambda case: case.__name__)
def test_unreached_parameters(case, tmp_path):
    play(tmp_path, [case])
