"""A step that is counted: nothing is computed, and what it says of a step hangs on no machine."""

import copy
import time

import pytest
import torch
from torch import Tensor, nn

from accordion_bench.advising.counted_step import counted_step, step_on
from accordion_bench.advising.gpus import asked_device, named, operation_seconds
from accordion_bench.options.checks import ConfigError


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))


def batch(size: int = 4) -> tuple[Tensor, Tensor]:
    return torch.zeros(size, 3, 8, 8), torch.zeros(size, dtype=torch.long)


def loss(model: nn.Module, example: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(example[0]), example[1])


def test_products_are_those_of_both_passes():
    """The first layer needs no gradient of its input: two products where the others have three."""
    found = counted_step(net(), batch(4), loss, batch_size=4)
    assert found.whole.convolved == 2 * 2 * (4 * 8 * 8) * 8 * (3 * 9)
    assert found.whole.multiplied == 3 * 2 * 4 * 512 * 10
    assert [spec.name for spec in found.specs] == ["0.weight", "0.bias", "1.weight", "1.bias", "4.weight", "4.bias"]
    assert (found.batch_size, found.model) == (4, "Sequential")


def test_gradients_are_ready_from_the_last_layer_to_the_first():
    times = step_on(asked_device(compute_ms=10), counted_step(net(), batch(), loss), update=0.002)
    by_name = dict(zip([spec.name for spec in times.specs], times.ready, strict=True))
    assert 0 < by_name["4.weight"] <= by_name["1.weight"] <= by_name["0.weight"] <= times.backward_end == 0.01
    assert times.update == 0.002 and times.compute == pytest.approx(0.012)
    assert times.estimated and times.steps == () and times.doubts() == []
    assert times.place == "a GPU with compute_ms=10" and times.device == "cuda"


def test_a_parameter_that_the_loss_does_not_reach_is_ready_at_the_end():
    model = net()
    model.idle = nn.Parameter(torch.ones(3))
    times = step_on(asked_device(compute_ms=10), counted_step(model, batch(), loss), update=0.0)
    assert dict(zip([spec.name for spec in times.specs], times.ready, strict=True))["idle"] == times.backward_end


def test_small_steps_take_what_their_operations_take_and_large_ones_what_their_products_take():
    gpu = named("h100")
    small = counted_step(net(), batch(4), loss)
    assert small.on_gpu(gpu, None, False, 0.0).compute == pytest.approx(operation_seconds() * small.whole.started)
    large = counted_step(net(), tuple(part.expand(10_000_000, *part.shape[1:]) for part in batch(1)), loss)
    half, whole, exact = (
        large.on_gpu(gpu, *how, 0.0).compute for how in (("bfloat16", False), (None, False), (None, True))
    )
    assert half == pytest.approx((large.whole.convolved + large.whole.multiplied) / gpu.half)
    assert whole == pytest.approx(large.whole.convolved / gpu.tf32 + large.whole.multiplied / gpu.float32)
    assert half < whole < exact and large.whole.started == small.whole.started


def test_nothing_is_computed_and_nothing_changes():
    """Ten million images, in no time and no memory; model and random numbers stay as they are."""
    model = net().eval()
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    began = time.process_time()
    counted_step(
        model, (torch.zeros(1).expand(10_000_000, 3, 8, 8), torch.zeros(1, dtype=torch.long).expand(10_000_000)), loss
    )
    assert time.process_time() - began < 30
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state()) and not model.training
    assert all(param.grad is None for param in model.parameters())


def test_a_loss_that_needs_numbers_is_computed_once():
    """Of recurrent layers, too, whose products torch's own kernels hide."""

    def with_numbers(model: nn.Module, example: tuple[Tensor, Tensor]) -> Tensor:
        out = model[0](example[0])[0]
        return out.square().mean() * (1.0 if float(out.detach().sum()) > -1e9 else 2.0)

    model, example = nn.ModuleList([nn.LSTM(4, 4, batch_first=True)]), (torch.randn(2, 5, 4), torch.zeros(2))
    found = counted_step(model, example, with_numbers)
    without = counted_step(model, example, lambda model, example: model[0](example[0])[0].square().mean())
    assert found.whole.multiplied == without.whole.multiplied > 0


@pytest.mark.parametrize(
    ("model", "example", "sentence"),
    [
        (nn.ReLU(), batch(), "model must have parameters that are trained, got none"),
        (net(), (torch.zeros(4, 5), torch.zeros(4)), "example_batch must be a batch that the model takes, got one"),
    ],
)
def test_refusals(model, example, sentence):
    with pytest.raises(ConfigError, match=sentence):
        counted_step(model, example, loss)
