"""AdamW: which parameters decay, and that it is torch's where all of them do."""

import pytest
import torch
from torch import nn

from accordion_bench.compressors.uncoded import Dense
from accordion_bench.config.components import build_optimizer
from accordion_bench.optimizers.elementwise import AdamW
from accordion_bench.options.checks import ConfigError
from accordion_bench.tensors.keyed_rng import seeded
from tests.kit.helpers import yaml_node


def params() -> list[nn.Parameter]:
    with seeded(1):
        return [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in ((4, 3), (4,), (2, 3, 3, 3), ())]


def steps(optimizer: torch.optim.Optimizer, own: list[nn.Parameter], count: int = 4) -> None:
    generator = torch.Generator().manual_seed(2)
    for _ in range(count):
        for param in own:
            param.grad = torch.randn(param.shape, generator=generator, dtype=param.dtype)
        optimizer.step()


def test_all_parameters_decay_as_torch_s_do():
    ours, theirs = params(), params()
    steps(AdamW(ours, lr=0.1, betas=(0.8, 0.9), weight_decay=0.3), ours)
    steps(torch.optim.AdamW(theirs, lr=0.1, betas=(0.8, 0.9), weight_decay=0.3), theirs)
    assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


def test_matrices_alone_decay():
    ours, decayed, plain = params(), params(), params()
    steps(AdamW(ours, lr=0.1, weight_decay=0.3, decay_on="matrices"), ours)
    steps(torch.optim.AdamW(decayed, lr=0.1, weight_decay=0.3), decayed)
    steps(torch.optim.AdamW(plain, lr=0.1, weight_decay=0), plain)
    for x, with_decay, without in zip(ours, decayed, plain, strict=True):
        torch.testing.assert_close(x, with_decay if x.ndim > 1 else without, rtol=0, atol=0)
        assert not torch.equal(with_decay, without)


def test_a_step_is_the_equation_written_out():
    (x,) = ours = [nn.Parameter(torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))]
    value, m, v = x.detach().clone(), torch.zeros(5, 3).double(), torch.zeros(5, 3).double()
    optimizer = AdamW(ours, lr=0.05, betas=(0.9, 0.95), weight_decay=0.1, decay_on="matrices")
    generator = torch.Generator().manual_seed(5)
    for t in range(1, 6):
        x.grad = g = torch.randn(5, 3, generator=generator, dtype=torch.float64)
        optimizer.step()
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
        value = value - 0.05 * 0.1 * value - 0.05 * (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
    torch.testing.assert_close(x.detach(), value, rtol=1e-12, atol=1e-12)


def test_a_model_of_vectors_or_of_matrices_alone():
    for own in ([params()[0]], [params()[1]]):
        steps(AdamW(own, decay_on="matrices"), own)


def test_another_word_is_refused():
    with pytest.raises(ConfigError) as refused:
        build_optimizer({**yaml_node("optimizer", "adamw"), "decay_on": "vectors"}, Dense(), params(), {})
    assert (
        str(refused.value) == "optimizer.decay_on must be null or matrices, got vectors; type optimizer.decay_on=null"
    )
