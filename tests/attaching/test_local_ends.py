"""Local steps in one's own loop: gradients that are not there, an end without an average, a quorum nobody hears of."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import accordion_bench as ab
from accordion_bench.options.checks import ConfigError
from tests.kit import by_hand, small_net
from tests.kit.processes import together
from tests.kit.small_net import net, sgd


def told_by_all(said: Any) -> list[Any]:
    heard = [None, None]
    dist.all_gather_object(heard, said)
    return heard


def momenta(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [state["momentum_buffer"].clone() for state in optimizer.state.values()]


def use_one_head(rank: int, store: str) -> None:
    with by_hand.in_group(rank, store):
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 7)])
        alone = [copy.deepcopy(head) for head in model]
        optimizer, optimizers = sgd(model), [sgd(head) for head in alone]
        ab.local(model, optimizer, "local_sgd", period=2, buffers="average")
        x = torch.ones(5, 4)
        for _ in range(2):
            for head, its in ((model[rank], optimizer), *zip(alone, optimizers, strict=True)):
                head(x).square().mean().backward()
                its.step()
                its.zero_grad()
        ours = momenta(optimizer)
        assert all(by_hand.equal(ours, theirs) for theirs in told_by_all(ours))
        halves = [momentum / 2 for its in optimizers for momentum in momenta(its)]  # the other worker's are zero
        torch.testing.assert_close(ours, halves)


def test_buffers_are_averaged_where_workers_reach_different_parameters(tmp_path):
    together(2, use_one_head, str(tmp_path / "store"))


def end(rank: int, store: str) -> None:
    with by_hand.in_group(rank, store):
        for final in (True, False):
            model = net()
            optimizer = sgd(model)
            with ab.local(model, optimizer, "local_sgd", period=5, final=final) as comm:
                small_net.steps(model, optimizer, comm, rank, range(3))
            first, second = told_by_all(by_hand.weights(model))
            assert by_hand.equal(first, second) == final


def test_without_a_final_average_each_process_keeps_its_own_model(tmp_path):
    together(2, end, str(tmp_path / "store"))


def ask_for_a_quorum(rank: int, store: str) -> None:
    with by_hand.in_group(rank, store):
        for passed in ({"switch_step": 3}, {}):
            model = net()
            optimizer = sgd(model)
            with pytest.raises(ConfigError, match=r"sync.quorum needs a run .*; pass lateness=0.1, or quorum=None"):
                ab.local(model, optimizer, "local_sgd", period=2, quorum=1, **passed)
            assert optimizer.param_groups[0]["momentum"] == 0.9


def test_a_quorum_that_nobody_could_hear_of_is_refused_before_the_first_step(tmp_path):
    together(2, ask_for_a_quorum, str(tmp_path / "store"))
