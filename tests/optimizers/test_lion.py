"""Lion: its equations written out, which parameters decay, refusals."""

import pytest
import torch
from torch import nn

from accordion_bench.optimizers.elementwise import Lion
from accordion_bench.options.checks import ConfigError


def test_steps_are_the_equations_written_out():
    generator = torch.Generator().manual_seed(3)
    ours = [nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=generator)) for shape in ((5, 3), (4,), ())]
    values = [x.detach().clone() for x in ours]
    momenta = [torch.zeros_like(x) for x in values]
    optimizer = Lion(ours, lr=0.05, betas=(0.9, 0.97), weight_decay=0.2, decay_on="matrices")
    for t in range(1, 7):
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = eta = 0.05 / t
        for i, x in enumerate(ours):
            x.grad = g = torch.randn(x.shape, generator=generator, dtype=torch.float64)
            u = torch.tensor([(c > 0) - (c < 0) for c in (0.9 * momenta[i] + 0.1 * g).flatten().tolist()])
            decay = 0.2 if x.ndim > 1 else 0.0
            values[i] = values[i] - eta * decay * values[i] - eta * u.double().view(x.shape)
            momenta[i] = 0.97 * momenta[i] + 0.03 * g
        optimizer.step()
        for x, value, momentum in zip(ours, values, momenta, strict=True):
            torch.testing.assert_close(x.detach(), value, rtol=1e-13, atol=1e-13)
            torch.testing.assert_close(optimizer.state[x]["exp_avg"], momentum, rtol=1e-13, atol=1e-13)


def test_without_a_gradient_nothing_moves_but_by_decay():
    x, unreached = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    x.grad = torch.zeros(3)
    Lion([x, unreached], lr=0.5, weight_decay=0.5).step()
    assert x.tolist() == [0.75] * 3 and unreached.tolist() == [1] * 3


@pytest.mark.parametrize("betas", [[0.9], [0.9, 1], [-0.1, 0.9], 0.9, ["a", 0.9]])
def test_betas_that_are_none(betas):
    with pytest.raises(ConfigError, match=r"^betas must be two numbers at least 0 and below 1, got"):
        Lion([nn.Parameter(torch.ones(1))], betas=betas)
