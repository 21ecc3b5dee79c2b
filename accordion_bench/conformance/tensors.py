"""What the checks exchange: made-up gradients, and real ones of a small network in training.

Tensor suffixes: W workers.
"""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from accordion_bench.plan import TensorSpec
from accordion_bench.tensors import keyed_rng
from accordion_bench.tensors.same_shape import Blocks

# as in a small network: repeated shapes, 1-D tensors between them, a wide and a narrow matrix, odd sizes, one entry
SPECS = (
    TensorSpec("stem", (8, 3, 3, 3)),
    TensorSpec("a", (16, 8, 3, 3)),
    TensorSpec("a.bias", (16,)),
    TensorSpec("b", (16, 8, 3, 3)),
    TensorSpec("c", (16, 8, 3, 3)),
    TensorSpec("head", (10, 64)),
    TensorSpec("odd", (5, 23)),
    TensorSpec("tiny", (1, 1)),
)


def gradients(
    specs: Sequence[TensorSpec] = SPECS, workers: int = 4, step: int = 0, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Gradients [W, ...]: a lasting mean of rank 4 with decaying singular values, and noise of worker and step.

    All are numbers of float32, whatever the type; the caller may change them.
    """
    drawn, blocks = _drawn(tuple(specs), workers, step, dtype), Blocks(specs, workers, torch.zeros((), dtype=dtype))
    for block, values in zip(blocks.blocks, drawn.blocks, strict=True):
        block.copy_(values)
    return blocks.tensors


@functools.lru_cache(maxsize=64)
def _drawn(specs: tuple[TensorSpec, ...], workers: int, step: int, dtype: torch.dtype) -> Blocks:
    lasting, noise = keyed_rng.generator("conformance"), keyed_rng.generator("conformance", step)
    blocks = Blocks(specs, workers, torch.zeros((), dtype=dtype))
    for x_W in blocks.tensors:
        n, m = x_W.shape[1], x_W[0].numel() // max(x_W.shape[1], 1)
        left = torch.randn(n, 4, generator=lasting) * 3.0 ** -torch.arange(4)
        common = left @ torch.randn(4, m, generator=lasting)
        x_W.copy_(common.view(x_W.shape[1:]) + 0.05 * torch.randn(x_W.shape, generator=noise))
    return blocks


def repeated(xs: Sequence[Tensor], workers: int) -> list[Tensor]:
    """The same tensors [...] on every worker, [W, ...]."""
    return [x.expand(workers, *x.shape).clone() for x in xs]


def _spike(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    x = 1e-3 * torch.randn(shape, generator=generator)
    x.flatten(1)[:, 5] = 10.0
    return x


def _heavy(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """Student's t with two degrees of freedom."""
    normal, chi = torch.randn(shape, generator=generator), torch.randn(2, *shape, generator=generator)
    return normal / chi.square().mean(0).sqrt()


KINDS: dict[str, Callable[[torch.Generator, tuple[int, ...]], Tensor]] = {
    "Gaussian": lambda generator, shape: torch.randn(shape, generator=generator),
    "heavy-tailed": _heavy,
    "one spike": _spike,
}


def of_kind(kind: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    """Numbers [W, ...] of one of KINDS."""
    return KINDS[kind](keyed_rng.generator("conformance", kind), shape).to(dtype)


@functools.cache
def real_gradients(workers: int = 4, steps: int = 8) -> tuple[tuple[TensorSpec, ...], tuple[Tensor, ...]]:
    """(specs, gradients [W, ...] in float32) of a residual network on the bundled digits, after some steps of SGD."""
    from accordion_bench.datasets.digits import Digits
    from accordion_bench.models.resnet import ResNet

    data = Digits().load("", seed=0, device=torch.device("cpu"))
    with keyed_rng.seeded(keyed_rng.key("conformance", "model")):
        model = ResNet(1, 10, widths=[8, 16], blocks=[1, 1])
    named = list(model.named_parameters())
    order = torch.randperm(data.train_size, generator=keyed_rng.generator("conformance", "order"))
    blocks = Blocks([TensorSpec(name, tuple(p.shape)) for name, p in named], workers, torch.zeros(()))
    for step in range(steps + 1):
        for worker in range(workers):
            start = 32 * (step * workers + worker)
            images, labels = data.train_batch(order[start : start + 32])
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            found = torch.autograd.grad(loss, [p for _, p in named])
            for x_W, gradient in zip(blocks.tensors, found, strict=True):
                x_W[worker] = gradient
        if step < steps:
            with torch.no_grad():
                for (_, p), x_W in zip(named, blocks.tensors, strict=True):
                    p.sub_(x_W.mean(0), alpha=0.1)
    return tuple(TensorSpec(name, tuple(p.shape)) for name, p in named), tuple(blocks.tensors)
