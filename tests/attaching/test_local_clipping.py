"""Gradients of local steps go nowhere, so that a loop may clip them when it likes."""

import torch
import torch.nn.functional as F
from torch import nn

import accordion_bench as ab
from tests.kit.by_hand import joined
from tests.kit.processes import together


def _train(rank: int, clip: float | None, joins: bool, closure: bool) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(rank)
    with ab.local(model, optimizer, sync="local_sgd", period=2) as comm:
        for _ in range(5):
            x, y = torch.randn(16, 8), torch.randn(16, 4)

            def compute(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                if joins:
                    comm.join()
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                return loss

            if closure:
                optimizer.step(compute)
            else:
                compute()
                optimizer.step()
    return model.weight.detach()


def _all(rank: int, store: str) -> None:
    joined(rank, store)
    clipped = [_train(rank, 0.1, joins, closure) for joins in (True, False) for closure in (True, False)]
    assert all(torch.equal(weights, clipped[0]) for weights in clipped)
    assert not torch.equal(clipped[0], _train(rank, None, False, False))


def test_local_steps_are_clipped_before_or_after_join_and_in_a_closure(tmp_path):
    together(2, _all, str(tmp_path / "store"))
