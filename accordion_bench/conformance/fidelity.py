"""How close the update is to the mean of real gradients."""

import math

import torch

from accordion_bench.conformance.subject import Maker, Setup, bare, demand, flat
from accordion_bench.conformance.tensors import real_gradients

SMALLEST, LARGEST = 0.1, 3.0  # norm ratios that need no declaration


def check_fidelity(make: Maker, level: float | None = None) -> str:
    """Cosine and norm ratio of the first update to the true mean, gradients of a residual network on real images.

    Required of what reduces by mean: cosine > 0, and a norm ratio of 0.1 to 3, or what the declared contraction (norm
    ratio sqrt(delta) of a projection) and variance (||update||^2 <= mean of ||x_w||^2 + variance) allow beyond.
    """
    specs, xs_W = real_gradients()
    setup = Setup(make(), level, 4, specs, dtype=torch.float32)
    update = flat(setup([x.clone() for x in xs_W]))
    mean = flat([x.mean(0) for x in xs_W])
    cosine = float(torch.cosine_similarity(update, mean, dim=0))
    ratio = float(update.norm() / mean.norm())
    said = f"cosine {cosine:.3f}, norm ratio {ratio:.3f}"
    demand(math.isfinite(cosine) and math.isfinite(ratio), f"{said} on real gradients")
    if setup.compressor.traits.reduces == "mean":
        demand(cosine > 0, f"{said} on real gradients: the update does not point along the mean gradient")
        if setup.compressor.traits.scaled:
            low, high = _limits(setup, xs_W, float(mean.norm()))
            limits = f"declared or plausible are {low:.3g} to {high:.3g}"
            demand(low <= ratio <= high, f"{said} on real gradients: {limits}")
    return said


def _limits(setup: Setup, xs_W: tuple[torch.Tensor, ...], norm: float) -> tuple[float, float]:
    inner, ctx = bare(setup.compressor), setup.context()
    claims = inner.description.claims
    deltas, square = [], 0.0
    for spec, level, x_W in zip(ctx.specs, ctx.levels, setup.exchange.as_sent(xs_W), strict=True):
        rows_W = x_W.flatten(1).double()
        square += float(rows_W.square().sum(1).mean())
        if level is None or not setup.compressor.compresses(spec, level):
            continue
        delta = claims.contraction(inner, spec, level)
        variance = claims.variance(inner, rows_W, spec, level, ctx)
        if delta is not None:
            deltas.append(delta)
        if variance is not None:
            square += float(variance.mean())
    low = min(SMALLEST, math.sqrt(max(0.0, min(deltas, default=1.0))) / 3)
    return low, max(LARGEST, LARGEST * math.sqrt(square) / norm)
