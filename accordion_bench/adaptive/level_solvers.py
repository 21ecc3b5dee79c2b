"""Codebooks for unbiased stochastic quantisation, fixed or fitted to a distribution of the normalised coordinates.

A coordinate r between adjacent levels a and c is rounded to c with probability (r - a) / (c - a), else to a. Its error:

    V(a, c) = integral of (c - r)(r - a) dF over [a, c] = (a + c) M1 - M2 - a c M0
    psi(L)  = sum_j V(L_j, L_{j+1}),        E ||Q(v) - v||^2 = n psi ||v||^2

Codebooks are symmetric and contain -1 and 1: K = 2^b levels, or K = 2^b - 1 levels including 0 (`zero_level`). The
solvers optimise the positive levels l_1 < ... < l_P = 1 for a symmetric density.

Source: Faghri et al. 2020 (arXiv 2010.12460); exponential levels: Ramezani-Kebrya et al. 2021 (arXiv 1908.06077).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from accordion_bench.adaptive.distributions import Distribution, Histogram, increasing_root
from accordion_bench.compressors.quantiser import codebook, exponential, positive_count, uniform

GAP = 2.0**-22  # smallest distance of neighbours: keeps levels strictly ascending in fp32 (spacing 2^-24 below 1)
RANGE = (1e-3, 0.999)  # of the multiplier p
TINY = 1e-30  # the smallest p^s: a normal number in fp32


class Fit(NamedTuple):
    """Result of a solver: levels ascending from -1 to 1, their expected error psi, and the number of sweeps taken."""

    levels: tuple[float, ...]
    psi: float
    sweeps: int


def interval_variance(dist: Distribution, a: Tensor, c: Tensor) -> Tensor:
    """Return V(a, c), elementwise over fp64 tensors a <= c."""
    m0, m1, m2 = dist.moments(a, c)
    return ((a + c) * m1 - m2 - a * c * m0).clamp_min(0)


def psi(dist: Distribution, levels: Sequence[float] | Tensor) -> Tensor:
    """Return psi(L) of full codebooks [..., K] ascending from -1 to 1, shape [...]."""
    levels = torch.as_tensor(levels, dtype=torch.float64, device=dist.like.device)
    return interval_variance(dist, levels[..., :-1], levels[..., 1:]).sum(-1)


# ---------------------------------------------------------------------------------------------- free levels


def alq(
    dist: Distribution,
    bits: int,
    zero_level: bool,
    previous: Sequence[float] | None = None,
    sweeps: int = 100,
    tol: float = 1e-6,
    solver: str = "exact",
) -> Fit:
    """ALQ: fit a codebook by coordinate descent, which moves each level to the minimum between its neighbours.

    Args:
        dist, bits, zero_level: distribution of the normalised coordinates, and form of the codebook.
        previous: the current codebook, an additional start besides those of `initial_levels`.
        sweeps, tol: stop after so many sweeps, or once no level moves by more than the share `tol` of itself.
        solver: `exact`, or `official` for the procedure of the paper's published code, see `_official_alq`.

    Returns:
        The codebook of lowest psi among the starts and the results of the descent.
    """
    if solver == "official":
        return _official_alq(dist, bits, zero_level)
    dist = dist.symmetric()
    starts = initial_levels(dist, bits, zero_level, previous)
    ends, count = coordinate_descent(dist, starts, zero_level, sweeps, tol)
    return _best(dist, torch.cat([starts, ends]), zero_level, count)


def alqg(
    dist: Distribution, bits: int, zero_level: bool, previous: Sequence[float] | None = None, sweeps: int = 30
) -> Fit:
    """ALQG: fit a codebook by gradient descent, l_j <- l_j - sign(g_j) min(0.1 |g_j|, delta_j / 2).

    delta_j is the smaller gap to a neighbour; arguments and result are those of `alq`. 30 sweeps are too few where
    coordinates are small relative to their norm: psi stays above ALQ's (see docs/algorithms.md) until later updates.
    """
    dist = dist.symmetric()
    starts = initial_levels(dist, bits, zero_level, previous)
    grid = _with_zero(starts)
    for _ in range(sweeps):
        for x, a, c, central in _by_parity(grid, zero_level):
            step = 0.1 * _gradient(dist, a, x, c, central)[0]
            room = torch.minimum(x - a, c - x) / 2
            x -= torch.maximum(torch.minimum(step, room), -room)
    return _best(dist, torch.cat([starts, _separate(grid[:, 1:])]), zero_level, sweeps)


def initial_levels(dist: Distribution, bits: int, zero_level: bool, previous: Sequence[float] | None = None) -> Tensor:
    """Return positive start levels [S, P]: `previous` if given, exponential (p = 1/2), uniform, quantiles, companded.

    The companded start is optimal for many levels, so that 6 and 8 bits need few sweeps.
    """
    count = positive_count(bits, zero_level)
    upper = torch.arange(count, dtype=torch.float64, device=dist.like.device)
    last = 2 * count if zero_level else 2 * count - 1
    quantiles = dist.quantile((upper + (last - count + 1)) / last)
    fixed = [quantiles.new_tensor(made(bits, zero_level)[-count:]) for made in (exponential, uniform)]
    whole = 2 * count + 1 if zero_level else 2 * count
    if previous is not None and len(previous) != whole:
        raise ValueError(f"the previous codebook has {len(previous)} levels, this form has {whole}")
    first = [] if previous is None else [quantiles.new_tensor(previous[-count:])]
    return _separate(torch.stack([*first, *fixed, quantiles, _companded(dist, count, zero_level)]))


def _companded(dist: Distribution, count: int, zero_level: bool) -> Tensor:
    """Return positive levels [P] of density ~ f^(1/3), which minimises psi ~ sum_j h_j^3 f / 6 over the gaps h."""
    edges = Histogram.log_edges(512, dist.like.device)
    mass = dist.moments(edges[:-1], edges[1:])[0].clamp_min(0)
    wanted = torch.nn.functional.pad((mass * edges.diff() ** 2).pow(1 / 3).cumsum(0), (1, 0))
    offset = 0.0 if zero_level else 0.5
    share = (torch.arange(1, count + 1, dtype=torch.float64, device=edges.device) - offset) / (count - offset)
    target = share * wanted[-1]
    i = torch.searchsorted(wanted, target).clamp(1, len(wanted) - 1)
    part = (target - wanted[i - 1]) / (wanted[i] - wanted[i - 1]).clamp_min(1e-300)
    return edges[i - 1] + part * (edges[i] - edges[i - 1])


def coordinate_descent(
    dist: Distribution, starts: Tensor, zero_level: bool, sweeps: int = 100, tol: float = 1e-6
) -> tuple[Tensor, int]:
    """Descend from each row of positive levels [S, P] for a symmetric density; return the rows and the sweeps taken."""
    grid, taken = _with_zero(starts), 0
    while taken < sweeps:
        taken += 1
        before = grid.clone()
        for x, a, c, central in _by_parity(grid, zero_level):
            x.copy_(_between(dist, a, c, central, x))
        if bool(((grid - before).abs() <= tol * grid).all()):
            break
    return _separate(grid[:, 1:]), taken


def _with_zero(positives: Tensor) -> Tensor:
    """Return a copy [S, 1 + P] with a leading column of zeros, the left neighbour of l_1."""
    return torch.nn.functional.pad(positives, (1, 0))


def _by_parity(grid: Tensor, zero_level: bool) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yield views (x, a, c, central) of the free levels of a grid [S, 1 + P] and their neighbours, odd levels first.

    Levels of one parity do not depend on each other. `central` marks l_1 where its left neighbour is -l_1.
    """
    for first in (1, 2):
        x = grid[:, first:-1:2]
        central = torch.zeros(x.shape[1], dtype=torch.bool, device=x.device)
        if first == 1 and not zero_level:
            central[:1] = True
        if x.numel():
            yield x, grid[:, first - 1 : -2 : 2], grid[:, first + 1 :: 2], central


def _gradient(dist: Distribution, a: Tensor, x: Tensor, c: Tensor, central: Tensor) -> tuple[Tensor, Tensor]:
    """Return the derivative of psi at l = x, and its slope:

        d psi / d l = integral of (r - a) dF over [a, x] - integral of (c - r) dF over [x, c]

    Where `central`, the left neighbour is the mirror image -x, and a = 0.
    """
    below, below_first, _ = dist.moments(a, x)
    above, above_first, _ = dist.moments(x, c)
    left = torch.where(central, 2 * x * below, below_first - a * below)
    slope = torch.where(central, 2 * below + (c + x) * dist.pdf(x), (c - a) * dist.pdf(x))
    return left - (c * above - above_first), slope


def _between(dist: Distribution, a: Tensor, c: Tensor, central: Tensor, start: Tensor) -> Tensor:
    """Return the zero of `_gradient` in [a, c], or the midpoint where [a, c] has no mass."""
    start = torch.minimum(torch.maximum(start, a), c)
    x = increasing_root(lambda x: _gradient(dist, a, x, c, central), a, c, start)
    return torch.where(dist.moments(a, c)[0] > dist.negligible, x, (a + c) / 2)


def _separate(positives: Tensor) -> Tensor:
    """Return positive levels [S, P] that are at least `GAP` apart and above 0, with the smallest change."""
    steps = GAP * torch.arange(1, positives.shape[1] + 1, dtype=torch.float64, device=positives.device)
    rising = (positives - steps).clamp(0, 1 - float(steps[-1])).cummax(-1).values + steps
    return torch.cat([rising[:, :-1], torch.ones_like(rising[:, :1])], dim=1)


def _psi_of_positives(dist: Distribution, positives: Tensor, zero_level: bool) -> Tensor:
    """Return psi [S] of symmetric codebooks with positive levels [S, P], for a symmetric density."""
    grid = _with_zero(positives)
    a, c = grid[:, :-1], grid[:, 1:]
    m0, m1, m2 = dist.moments(a, c)
    terms = (a + c) * m1 - m2 - a * c * m0
    if not zero_level:
        terms[:, 0] = c[:, 0] ** 2 * m0[:, 0] - m2[:, 0]  # between -l_1 and l_1
    return 2 * terms.clamp_min(0).sum(-1)


def _best(dist: Distribution, candidates: Tensor, zero_level: bool, sweeps: int) -> Fit:
    """Return the first of the candidates [S, P] with the lowest psi, ignoring non-finite values."""
    values = _psi_of_positives(dist, candidates, zero_level)
    winner = int(torch.where(values.isfinite(), values, math.inf).argmin())
    return Fit(codebook(candidates[winner].tolist(), zero_level), float(values[winner]), sweeps)


# ---------------------------------------------------------------------------------------------- one multiplier


def amq(dist: Distribution, bits: int, zero_level: bool, previous_p: float | None = None, solver: str = "exact") -> Fit:
    """AMQ: fit a codebook of levels +-p^j by a search over a grid of p, then a golden-section search.

    Args:
        dist, bits, zero_level: distribution of the normalised coordinates, and form of the codebook.
        previous_p: the current multiplier, an additional candidate.
        solver: `exact`, or `official` for the procedure of the paper's published code, see `_official_amq`.

    Returns:
        The codebook; p is its largest level below 1, `levels[-2]`.
    """
    if solver == "official":
        return _official_amq(dist, bits, zero_level, previous_p)
    dist = dist.symmetric()
    count = positive_count(bits, zero_level)
    lowest = max(RANGE[0], TINY ** (1 / max(1, count - 1)))
    powers = torch.arange(count - 1, -1, -1, dtype=torch.float64, device=dist.like.device)

    def value(log_p: Tensor) -> Tensor:
        values = _psi_of_positives(dist, torch.exp(log_p[:, None] * powers), zero_level)
        return torch.where(values.isfinite(), values, math.inf)

    grid = torch.linspace(math.log(lowest), math.log(RANGE[1]), 512, dtype=torch.float64, device=dist.like.device)
    i = int(value(grid).argmin())
    low, high = float(grid[max(0, i - 1)]), float(grid[min(511, i + 1)])
    narrowed, steps = _golden_section(lambda x: float(value(grid.new_tensor([x]))), low, high)
    previous = [] if previous_p is None else [math.log(min(max(previous_p, lowest), RANGE[1]))]
    candidates = grid.new_tensor([narrowed, float(grid[i]), *previous])
    return _best(dist, torch.exp(candidates[:, None] * powers), zero_level, steps)


def _golden_section(function: Callable[[float], float], low: float, high: float) -> tuple[float, int]:
    """Return the position of the only minimum of a function in [low, high], to 1e-9, and the number of steps."""
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = function(left), function(right)
    steps = 0
    while high - low > 1e-9:
        steps += 1
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = function(right)
    return (low + high) / 2, steps


# ------------------------------------------------------------------ the published code, for comparison with its numbers


def _official_alq(dist: Distribution, bits: int, zero_level: bool) -> Fit:
    """ALQ of the published code: 30 sweeps of 10 finite-difference gradient steps of size 1 per level, not converged.

    It ignores the previous codebook. All levels are free, so that the result is not exactly symmetric. Starts whose
    levels leave their interval are discarded.
    """
    _refuse_zero_level(zero_level)
    count = 2**bits
    quantiles = dist.quantile(torch.linspace(0, 1, count, dtype=torch.float64, device=dist.like.device))
    levels = torch.stack([quantiles, *(quantiles.new_tensor(made(bits, False)) for made in (uniform, exponential))])
    valid = torch.ones(len(levels), dtype=torch.bool, device=levels.device)
    for _ in range(30):
        for j in range(1, count - 1):
            a, x, c = levels[:, j - 1], levels[:, j], levels[:, j + 1]
            eps = (c - a) / 1000
            for _ in range(10):
                error = _error_around(dist, a, torch.stack([x + eps, x - eps]), c)
                x = x - (error[0] - error[1]) / (2 * eps)
            valid &= (a < x) & (x < c)
            levels[:, j] = x
    values = torch.where(valid, psi(dist, levels), math.inf)
    winner = int(values.argmin())
    return Fit(tuple(levels[winner].tolist()), float(values[winner]), 30)


def _error_around(dist: Distribution, a: Tensor, x: Tensor, c: Tensor) -> Tensor:
    (m0, m1, m2), (n0, n1, n2) = dist.moments(a, x), dist.moments(x, c)
    return (a + x) * m1 - m2 - a * x * m0 + (x + c) * n1 - n2 - x * c * n0


def _official_amq(dist: Distribution, bits: int, zero_level: bool, previous_p: float | None, steps: int = 40) -> Fit:
    """AMQ of the published code: gradient steps p <- p - 0.7 d(psi / 2)/dp from eight starts.

    The results are compared without the error of the inner interval.
    """
    _refuse_zero_level(zero_level)
    s = 2 ** (bits - 1) - 1
    starts = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6 if previous_p is None else previous_p, 0.8, 0.9]
    p = torch.tensor(starts, dtype=torch.float64, device=dist.like.device)[:, None]
    j = torch.arange(s, dtype=torch.float64, device=p.device)
    for _ in range(steps):
        m0, m1, _ = dist.moments(p ** (j + 1), p**j)
        outer = (j * p ** (j - 1) + (j + 1) * p**j) * m1 - (2 * j + 1) * p ** (2 * j) * m0
        inner = 2 * s * p ** (2 * s - 1) * dist.moments(torch.zeros_like(p), p**s)[0]
        p = p - 0.7 * (inner + outer.sum(1, keepdim=True))
    compared = interval_variance(dist, p ** (j + 1), p**j).sum(1)
    usable = compared.isfinite() & (p[:, 0] > TINY ** (1 / max(1, s))) & (p[:, 0] < 1)
    winner = int(torch.where(usable, compared, math.inf).argmin())
    levels = exponential(bits, False, float(p[winner]))
    return Fit(levels, float(psi(dist, levels)), steps)


def _refuse_zero_level(zero_level: bool) -> None:
    if zero_level:
        raise ValueError("the published solvers do not support a zero level; use solver=exact, or zero_level=false")
