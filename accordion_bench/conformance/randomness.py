"""Measurements of unbiasedness, variance and contraction over keyed random numbers.

Random numbers are keyed, so that results are equal in every run. Tensor suffixes: T draws, N coordinates.
"""

import functools
import math

import torch
from torch import Tensor

from accordion_bench.compressors.ef21 import EF21
from accordion_bench.compressors.error_feedback import ErrorFeedback
from accordion_bench.conformance.subject import (
    KINDS,
    Maker,
    NotApplicable,
    Setup,
    bare,
    demand,
    draws,
    flat,
    layers,
    plain,
    real_gradients,
    repeated,
    sample_distribution,
)
from accordion_bench.plan import TensorSpec

SPECS = (TensorSpec("matrix", (11, 16)), TensorSpec("bias", (33,)))
FOUR_SIGMA = 6.3e-5  # probability of more than four standard errors


def _input() -> list[Tensor]:
    """Return Gaussian tensors with some zeros and one spike."""
    x = sample_distribution("Gaussian", (1, sum(spec.numel for spec in SPECS)))[0]
    x[::17], x[40] = 0, 6.0
    return [part.view(spec.shape) for spec, part in zip(SPECS, x.split([s.numel for s in SPECS]), strict=True)]


@functools.lru_cache(maxsize=4)  # two checks use the same draws
def _draws(make: Maker, level: float | None) -> Tensor:
    """Return the decoded messages of the same tensors in independent draws, [T, N]."""
    xs = _input()
    wrapped = plain(make)
    two_way = wrapped.collective == "two_way"
    each = draws(wrapped.compressor) == "worker" and not two_way
    workers = 16 if each else 1  # rows of one exchange
    setup, rows = Setup(plain(make), level, workers, SPECS), []
    for step in range(16 if each else 128):
        updates, sent_W = setup.contributions(repeated(xs, workers), step)
        if two_way:
            sent_W = [update[None] for update in updates]
        rows.append(torch.cat([s_W.reshape(workers, -1) for s_W in sent_W], dim=1))
    return torch.cat(rows)


def check_unbiased(make: Maker, level: float | None = None) -> str:
    """The mean of many draws equals the input: a chi-square test over all coordinates, and one of the worst coordinate.

    Coordinates need not be independent: the statistic ||mean - x||^2 T / trace(S) is compared with chi^2_d / d, where d
    = trace(S)^2 / trace(S^2) for the covariance S of one draw (Satterthwaite 1946).
    """
    if not plain(make).compressor.traits.unbiased:
        raise NotApplicable("declared biased")
    xs = _input()
    x = flat(xs)
    draws_T = _draws(make, level)
    T = len(draws_T)
    bias = draws_T.mean(0) - x
    centred_T = draws_T - draws_T.mean(0)
    gram = centred_T @ centred_T.T / (T - 1)
    spread = float(gram.trace())
    if spread <= 1e-12 * float(x.square().sum()):
        off = float(bias.norm() / x.norm())
        demand(off <= 1e-6, f"always the same update, which is off by {off:.2g} of the norm: not unbiased")
        return f"no noise, off by {off:.1e}"
    freedom = spread**2 / max(float(gram.square().sum()) - spread**2 / (T - 1), spread**2 / len(x))
    statistic = T * float(bias.square().sum()) / spread
    half = torch.tensor([freedom / 2, statistic * freedom / 2], dtype=torch.float64)
    chance = float(torch.special.gammaincc(*half))  # that chi^2 is larger
    ratio = math.sqrt(statistic)
    demand(
        chance > FOUR_SIGMA,
        f"the mean of {T} draws is {float(bias.norm() / x.norm()):.3g} of the norm away from the input, {ratio:.2f} "
        f"times its standard error (by chance: p = {chance:.1g}): not unbiased",
    )
    worst = _standard_errors(draws_T, x).abs().max()
    limit = math.sqrt(2) * float(torch.special.erfinv(torch.tensor(1 - FOUR_SIGMA / len(x), dtype=torch.float64)))
    where = int(_standard_errors(draws_T, x).abs().argmax())
    demand(
        worst <= limit,
        f"the mean of {T} draws at coordinate {where} is {float(draws_T[:, where].mean()):.4g} instead of "
        f"{float(x[where]):.4g}, {float(worst):.1f} standard errors (limit {limit:.1f})",
    )
    return f"bias {ratio:.2f} standard errors over {T} draws, worst coordinate {float(worst):.1f} (limit {limit:.1f})"


def _standard_errors(draws_T: Tensor, x: Tensor) -> Tensor:
    """Return each coordinate's bias in standard errors [N].

    A rarely selected coordinate may have no measured variance, so each is at least the median, absolute and relative.
    """
    variance = draws_T.var(0)
    relative = (variance / x.square())[x != 0].median()
    least = torch.maximum(variance.median(), relative * x.square())
    return (draws_T.mean(0) - x) / (torch.maximum(variance, least) / len(draws_T)).sqrt().clamp_min(1e-12)


def check_variance(make: Maker, level: float | None = None) -> str:
    """The measured E||Q(x) - x||^2 of one message equals the declared closed form, within four standard errors."""
    wrapped = plain(make)
    outside, compressor = wrapped.compressor, bare(wrapped.compressor)
    if not compressor.traits.unbiased or wrapped.collective == "two_way":
        raise NotApplicable("not the error of one unbiased message")
    xs, told, start = _input(), [], 0
    setup, draws_T = Setup(plain(make), level, 1, SPECS), _draws(make, level)
    ctx = setup.context()
    for x_W, spec, at in zip(setup.exchange.as_sent(repeated(xs, 1)), ctx.specs, ctx.levels, strict=True):
        part_T = draws_T[:, start : start + spec.numel] - x_W.view(1, -1)
        start += spec.numel
        if at is None or not outside.compresses(spec, at):
            continue
        formula = compressor.description.claims.variance(compressor, x_W.view(1, -1), spec, at, ctx)
        if formula is None:
            raise NotApplicable("no closed form declared")
        declared, errors_T = float(formula[0]), part_T.square().sum(1)
        measured, error = float(errors_T.mean()), float(errors_T.std()) / math.sqrt(len(errors_T))
        demand(
            abs(measured - declared) <= 4 * error + 1e-5 * declared,
            f"E||Q(x) - x||^2 of {spec.name} is {measured:.5g} +- {error:.2g} (standard error), not {declared:.5g}",
        )
        told.append(f"{measured / declared if declared else 1.0:.4f}")
    if not told:
        raise NotApplicable("nothing is lost")
    return "measured / declared " + ", ".join(told)


def check_contraction(make: Maker, level: float | None = None) -> str:
    """E||C(x) - x||^2 <= (1 - delta) ||x||^2 with the declared delta, for four kinds of x, one of them real gradients.

    An undeclared delta is 0 under error feedback, which needs a contraction; otherwise the loss is only reported.
    """
    traits, outside = plain(make).compressor.traits, [*layers(make().compressor)]
    estimated = any(isinstance(layer, EF21) for layer in outside)
    if "error_feedback" in traits.optimizer.takes:
        estimated = False  # the method is not the same without its error feedback
    if (traits.unbiased and not estimated) or not traits.scaled:
        raise NotApplicable("unbiased" if traits.unbiased else "its messages do not contain the scale of their input")
    if any(isinstance(layer, ErrorFeedback) for layer in layers(plain(make).compressor)):
        raise NotApplicable("its error feedback is built in: a message also contains residuals")
    fed_back = estimated or any(isinstance(layer, ErrorFeedback) for layer in outside)
    spec = TensorSpec("x", (24, 40))
    cases = [(kind, (spec,), [sample_distribution(kind, (4, *spec.shape))]) for kind in KINDS]
    specs, real = real_gradients()
    told = []
    for kind, of, xs_W in [*cases, ("real", specs, [x.double() for x in real])]:
        told.append(f"{kind} {_lost(make, level, kind, of, xs_W, fed_back):.3g}")
    return "share lost: " + ", ".join(told)


def _lost(
    make: Maker, level: float | None, kind: str, specs: tuple[TensorSpec, ...], xs_W: list[Tensor], fed_back: bool
) -> float:
    """Return the largest share of ||x||^2 that is lost of one tensor; raise AssertionError above 1 - delta."""
    setup = Setup(plain(make), level, 4, specs)
    steps = 32 if draws(setup.compressor) else 1
    lost_T: list[list[Tensor]] = [[] for _ in setup.exchange.sent]
    for step in range(steps):
        _, sent_W = setup.contributions(xs_W, step)
        for i, (x_W, s_W) in enumerate(zip(setup.exchange.as_sent(xs_W), sent_W, strict=True)):
            whole = x_W.flatten(1).square().sum(1).clamp_min(1e-300)
            lost_T[i].append((x_W - s_W).flatten(1).square().sum(1) / whole)
    ctx, worst = setup.context(), 0.0
    inner = bare(setup.compressor)
    claims = inner.description.claims
    for spec, at, steps_T in zip(ctx.specs, ctx.levels, lost_T, strict=True):
        if at is None or not setup.compressor.compresses(spec, at):
            continue
        lost, delta = torch.stack(steps_T), claims.contraction(inner, spec, at)
        measured, error = float(lost.max()), 0.0
        if steps > 1:  # for random compressors the bound is on the expectation
            measured, error = float(lost.mean()), float(lost.mean(1).std()) / math.sqrt(steps)
        said = f"{kind} {spec.name}: {measured:.5g} of ||x||^2 is lost, more than 1 - delta = {1 - (delta or 0):.5g}"
        bound = math.inf if delta is None and not fed_back else 1 - (delta or 0)
        demand(measured <= bound + 4 * error + 1e-6, said)
        worst = max(worst, measured)
    return worst
