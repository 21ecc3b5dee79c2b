"""A trial of a model: what it says of a step, and that the model is as it was."""

import copy
import re
import time

import pytest
import torch
from torch import Tensor, nn

from accordion_bench.advising import step_times
from accordion_bench.advising.step_times import Effort, measured_step
from accordion_bench.options.checks import ConfigError


class Net(nn.Sequential):
    """With buffers, dropout, a frozen part and a parameter that the loss does not reach."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 4))
        self[0].bias.requires_grad_(False)
        self.idle = nn.Parameter(torch.ones(3))


def batch() -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(0)
    return torch.randn(6, 8, generator=draws), torch.randint(4, (6,), generator=draws)


def loss(model: nn.Module, example: tuple[Tensor, Tensor]) -> Tensor:
    x, y = example
    return nn.functional.cross_entropy(model(x), y)


def test_times_of_a_step():
    times = measured_step(Net(), batch(), loss, batch_size=6, effort=Effort(12))
    by_name = {spec.name: ready for spec, ready in zip(times.specs, times.ready, strict=True)}
    assert list(by_name) == ["idle", "0.weight", "1.weight", "1.bias", "4.weight", "4.bias"]
    assert 0 < by_name["4.weight"] <= by_name["1.weight"] <= by_name["0.weight"] <= times.backward_end
    assert by_name["idle"] == times.backward_end
    assert times.update > 0 and len(times.steps) == 12 and not [d for d in times.doubts() if "fewer" in d]
    assert min(times.steps) <= times.compute <= max(times.steps)
    assert (times.batch_size, times.model, times.device, times.source) == (6, "Net", "cpu", "a trial here")
    shapes = {name: tuple(param.shape) for name, param in Net().named_parameters()}
    assert all(shapes[spec.name] == spec.shape for spec in times.specs)


@pytest.mark.parametrize("training", [True, False])
def test_nothing_of_the_model_changes(training):
    model = Net().train(training)
    loss(model.train(), batch()).backward()
    model.train(training)
    arrived: list[Tensor] = []
    model[4].weight.register_post_accumulate_grad_hook(arrived.append)
    before, gradients = copy.deepcopy(model.state_dict()), {n: p.grad for n, p in model.named_parameters()}
    values = {name: g.clone() for name, g in gradients.items() if g is not None}
    random = torch.get_rng_state()
    measured_step(model, batch(), loss, effort=Effort(3))
    assert not arrived and torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    for name, param in model.named_parameters():
        assert param.grad is gradients[name] and (param.grad is None or torch.equal(param.grad, values[name]))
    assert all(part.training == training for part in model.modules())


def test_parts_that_are_frozen_in_evaluation_mode_stay_so():
    model, seen = Net(), []
    model[1].eval()
    model[1].register_forward_hook(lambda part, *_: seen.append(part.training))
    measured_step(model, batch(), loss, effort=Effort(2))
    assert seen and not any(seen)


def test_a_wrapped_model_counts_as_what_it_wraps():
    model = torch.compile(Net(), backend="eager")
    names = [spec.name for spec in measured_step(model, batch(), loss, effort=Effort(2)).specs]
    assert names == [spec.name for spec in measured_step(Net(), batch(), loss, effort=Effort(2)).specs]


def test_the_optimizer_that_was_given_takes_the_steps():
    made = []

    def make(params):
        made.append(torch.optim.AdamW(params, lr=0.0))
        return made[0]

    measured_step(Net(), batch(), loss, make, effort=Effort(3))
    assert {state["step"].item() for state in made[0].state.values()} == {3 + step_times.WARM_UP}


def test_a_slow_step_is_measured_once_and_doubted():
    def slow(model, example):
        time.sleep(0.05)
        return loss(model, example)

    times = measured_step(Net(), batch(), slow, effort=Effort(budget=0.01))
    assert len(times.steps) == 1 and times.steps[0] >= 0.05
    assert times.doubts() == ["a trial here has 1 steps, fewer than 10: record more before you rely on this"]


def no_scalar(model, example):
    return model(example[0])


def no_memory(model, example):
    raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried")


def no_model(model, example):
    return torch.zeros((), requires_grad=False)


WRONG = [
    (nn.ReLU(), loss, 6, "model must have parameters that are trained, got none; pass one with requires_grad=True"),
    (nn.Linear(5, 4), loss, 6, "example_batch must be a batch that the model takes, got one with which loss(model, "),
    (Net(), no_scalar, 6, "loss(model, batch) must be a scalar tensor with a gradient, got a tensor of shape [6, 4]; "),
    (Net(), no_model, 6, "loss(model, batch) must be a scalar tensor with a gradient, got one that depends on no p"),
    (Net(), no_memory, 6, "batch_size must be so small that a step fits into the memory of this device, got 6; type "),
    (Net(), no_memory, 0, "model must fit into the memory of this device with its gradients and a batch, got one "),
]


@pytest.mark.parametrize("model, wrong, batch_size, said", WRONG)
def test_refused_in_one_sentence(model, wrong, batch_size, said):
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}") as refused:
        measured_step(model, batch(), wrong, batch_size=batch_size)
    assert "\n" not in str(refused.value) and ". " not in str(refused.value)


def test_a_copy_that_cannot_be_made_is_refused():
    model = Net()
    model.output = model(batch()[0])  # no leaf
    with pytest.raises(ConfigError, match=r"^model must be one that copy.deepcopy can copy, got one that it cannot \("):
        measured_step(model, batch(), loss)


@pytest.mark.gpu
def test_times_on_a_gpu():
    model, example = Net().cuda(), tuple(part.cuda() for part in batch())
    random = torch.cuda.get_rng_state()
    times = measured_step(model, example, loss, effort=Effort(10))
    assert times.device == "cuda" and 0 < max(times.ready) <= times.backward_end and times.update > 0
    assert torch.equal(torch.cuda.get_rng_state(), random)
