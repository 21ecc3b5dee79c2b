"""Distributions of normalised coordinates, and the codebooks fitted to them."""

import functools
from collections.abc import Sequence

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import torch

from accordion_bench.adaptive import distributions, level_solvers
from accordion_bench.adaptive.distributions import Distribution, Histogram, TruncatedNormals
from accordion_bench.adaptive.level_solvers import alq, alqg, amq, exponential, psi, uniform
from accordion_bench.compressors import dense
from tests.kit.bitstreams import shannon_bits

BUCKET = 16384


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def normal(sigma: float = BUCKET**-0.5) -> TruncatedNormals:
    return TruncatedNormals(f64(0), f64(sigma), f64(1))


def mixture() -> TruncatedNormals:
    return TruncatedNormals(f64(-0.3, 0, 0.05, 0.6), f64(0.1, 0.01, 0.004, 0.9), f64(1, 3, 2, 0.5))


@functools.cache
def samples(name: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised buckets r [64, d] and their squared norms [64, 1]."""
    generator = np.random.default_rng(seed)
    size = (64, BUCKET)
    drawn = {
        "gaussian": lambda: generator.standard_normal(size),
        "laplace": lambda: generator.laplace(size=size),
        "student": lambda: generator.standard_t(3, size),
    }[name]()
    norms = np.linalg.norm(drawn, axis=1, keepdims=True)
    return torch.from_numpy(drawn / norms), torch.from_numpy(norms**2)


@functools.cache
def histogram(name: str) -> Histogram:
    return Histogram.of(*samples(name))


DISTRIBUTIONS = {  # made in the test, because a histogram of samples would cost each process a second of collection
    "normal": normal,
    "mixture": mixture,
    "symmetric mixture": lambda: mixture().symmetric(),
    "laplace": lambda: histogram("laplace"),
}


@functools.cache
def optimum(zero_level: bool = False) -> level_solvers.Fit:
    return alq(normal(), 3, zero_level)


@functools.cache
def published() -> level_solvers.Fit:
    return alq(normal(), 3, False, solver="official")


def expected_error(r: torch.Tensor, levels: tuple[float, ...]) -> torch.Tensor:
    """(c - r)(r - a) of every coordinate, straight from the definition."""
    book = f64(*levels)
    up = torch.bucketize(r, book[1:-1]) + 1
    return (book[up] - r) * (r - book[up - 1])


# ------------------------------------------------------------------------------------------------ moments and cdf


def truncnorm(mu: float, sigma: float):
    return scipy.stats.truncnorm((-1 - mu) / sigma, (1 - mu) / sigma, mu, sigma)


def simpson(mu: float, sigma: float, a: float, c: float) -> list[float]:
    """M0, M1, M2 by Simpson's rule on 20,001 points."""
    x = np.linspace(a, c, 20_001)
    weights = np.ones_like(x)
    weights[1:-1:2], weights[2:-1:2] = 4, 2
    return [float((weights * x**k * truncnorm(mu, sigma).pdf(x)).sum() * (x[1] - x[0]) / 3) for k in range(3)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("mu", [0.0, 0.02, -0.3])
@pytest.mark.parametrize("sigma", [1 / 128, 0.1, 2.0])
def test_moments_equal_numerical_integration_far_out_too(mu, sigma):
    dist = TruncatedNormals(f64(mu), f64(sigma), f64(7))
    intervals = [(-1, 1), (0, 1), (-0.5, 0.1), (mu - 2 * sigma, mu + sigma)]
    intervals += [(mu + side * k * sigma, mu + side * (k + 2) * sigma) for side in (1, -1) for k in (1, 6, 12, 20, 30)]
    for ends in intervals:
        a, c = np.clip(sorted(ends), -1, 1)
        nearby = np.clip([a, c], mu - 37 * sigma, mu + 37 * sigma)  # beyond, the density is 0 in fp64
        expected = simpson(mu, sigma, *nearby)
        found = [float(m) for m in dist.moments(f64(a), f64(c))]
        size = [max(abs(a), abs(c)) ** k * expected[0] for k in range(3)]  # M1 of a symmetric interval is 0
        assert np.all(np.abs(np.subtract(found, expected)) <= 1e-10 * np.array(size) + 1e-300)


def test_interval_variance_keeps_its_digits_in_the_tail():
    """V cancels twice: the integrand itself, integrated, is the judge."""
    sigma = 1 / 128
    for a, c in [(5 * sigma, 6 * sigma), (20 * sigma, 1), (30 * sigma, 31 * sigma), (0.0, 1e-4)]:
        x = np.linspace(a, min(c, a + 12 * sigma), 20_001)
        integrand = (c - x) * (x - a) * truncnorm(0, sigma).pdf(x)
        expected = float(scipy.integrate.simpson(integrand, x=x))
        assert float(level_solvers.interval_variance(normal(), f64(a), f64(c))) == pytest.approx(expected, rel=1e-8)


def test_mixture_is_the_weighted_sum_of_its_components(monkeypatch):
    a, c = f64(-0.9, -0.2, 0.01, 0.3)[:, None], f64(-0.1, 0.31, 1)[None]
    whole = torch.stack(mixture().moments(a, c))
    parts = zip(f64(-0.3, 0, 0.05, 0.6), f64(0.1, 0.01, 0.004, 0.9), f64(1, 3, 2, 0.5) / 6.5, strict=True)
    expected = sum(w * torch.stack(TruncatedNormals(m[None], s[None], f64(1)).moments(a, c)) for m, s, w in parts)
    torch.testing.assert_close(whole, expected, rtol=1e-12, atol=1e-15)
    monkeypatch.setattr(distributions, "TERMS_AT_ONCE", 8)  # the points in pieces
    torch.testing.assert_close(torch.stack(mixture().moments(a, c)), whole, rtol=0, atol=0)
    torch.testing.assert_close(mixture().pdf(c), torch.stack([mixture().pdf(x) for x in c.flatten()]).view_as(c))


@pytest.mark.parametrize("name", ["normal", "mixture", "laplace"])
def test_quantile_inverts_cdf_and_pdf_is_its_slope(name):
    dist = DISTRIBUTIONS[name]()
    p = torch.linspace(0, 1, 101, dtype=torch.float64)
    x = dist.quantile(p)
    assert x[0] == -1 and x[-1] == 1 and (x.diff() > 0).all()
    torch.testing.assert_close(dist.cdf(x), p, rtol=0, atol=1e-12)
    torch.testing.assert_close(dist.cdf(f64(-1, 1)), f64(0, 1), rtol=0, atol=1e-12)
    inner = x[1:-1]
    step = 1e-9
    slope = (dist.cdf(inner + step) - dist.cdf(inner - step)) / (2 * step)
    assert (
        (dist.pdf(inner) - slope).abs() <= 1e-4 * slope
    ).float().mean() > 0.99  # a bin's edge is no place for a slope


def test_root_finder_survives_plateaus_jumps_and_roots_at_the_ends():
    kink = f64(0.3)

    def functions(x):
        value = torch.stack([(x[0] > kink[0]) * 2.0 - 1, (x[1] - 0.7).clamp(0, 0.1), x[2] ** 9, x[3] - 1, x[4]])
        slope = torch.stack(
            [x[0] * 0, ((x[1] > 0.7) & (x[1] < 0.8)).double(), 9 * x[2] ** 8, x[3] * 0 + 1, x[4] * 0 + 1]
        )
        return value, slope

    low, high = torch.zeros(5, dtype=torch.float64), torch.ones(5, dtype=torch.float64)
    root = distributions.increasing_root(functions, low, high, f64(0.5, 0.95, 0.9, 0.5, 0.5))
    assert abs(root[0] - 0.3) < 0.3e-11 + 1e-13 and root[1] <= 0.7 + 1e-11 and root[2] < 0.02
    torch.testing.assert_close(root[3:], f64(1, 0), rtol=0, atol=1e-12)


# --------------------------------------------------------------------------------------------------- histogram


def test_histogram_is_exact_between_bin_edges_and_merges_by_adding():
    r, weight = samples("student")
    whole = Histogram.of(r, weight)
    halves = [Histogram.of(r[:20], weight[:20]).arrays(), Histogram.of(r[20:], weight[20:]).arrays()]
    merged = Histogram.from_arrays(halves[0] + halves[1])
    edges = Histogram.log_edges()
    a, c = edges[[0, 500, 2000, 3000, 3500]], edges[[4096, 2500, 2600, 3001, 3500]]
    w = weight.expand(r.shape) / weight.expand(r.shape).sum()
    for dist in (whole, merged):
        for k, found in enumerate(dist.moments(a, c)):
            expected = [
                (w * r.abs() ** k)[(r.abs() > low) & (r.abs() <= high)].sum() / 2
                for low, high in zip(a, c, strict=True)
            ]
            torch.testing.assert_close(found, torch.stack(expected), rtol=1e-9, atol=1e-15)
    mirrored = whole.moments(-c, -a)
    torch.testing.assert_close(torch.stack(mirrored), torch.stack(whole.moments(a, c)) * f64(1, -1, 1)[:, None])


def test_histogram_agrees_with_the_data_at_any_levels():
    r, weight = samples("laplace")
    dist = histogram("laplace")
    for levels in (alq(dist, 3, False).levels, alq(dist, 6, True, sweeps=10).levels, exponential(4, False, 0.37)):
        true = float((expected_error(r, levels) * weight).sum() / (weight.sum() * BUCKET))
        assert float(psi(dist, levels)) == pytest.approx(true, rel=1e-4)


def test_histogram_of_gaussian_data_agrees_with_the_normal():
    fitted = alq(histogram("gaussian"), 3, False)
    exact = optimum()
    assert fitted.psi == pytest.approx(exact.psi, rel=0.01)
    assert fitted.levels == pytest.approx(exact.levels, rel=0.02)


# ----------------------------------------------------------------------------------------------- fixed codebooks


def test_fixed_codebooks():
    assert uniform(3, False) == pytest.approx([-1, -5 / 7, -3 / 7, -1 / 7, 1 / 7, 3 / 7, 5 / 7, 1])
    assert uniform(3, True) == pytest.approx([-1, -2 / 3, -1 / 3, 0, 1 / 3, 2 / 3, 1])
    assert exponential(3, False) == (-1, -0.5, -0.25, -0.125, 0.125, 0.25, 0.5, 1)
    assert exponential(3, True, 0.1) == pytest.approx([-1, -0.1, -0.01, 0, 0.01, 0.1, 1])
    assert uniform(2, True) == exponential(2, True) == (-1, 0, 1)
    assert uniform(1, False) == (-1, 1)
    with pytest.raises(ValueError, match="2 bits"):
        uniform(1, True)


@pytest.mark.sample(5)
@pytest.mark.parametrize("zero_level", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_codebooks_have_their_size_and_stay_ascending_in_fp32(bits, zero_level):
    point = TruncatedNormals(f64(0), f64(0), f64(1))
    fits = [solve(dist, bits, zero_level, sweeps=3) for dist in (normal(), point) for solve in (alq, alqg)]
    fits += [amq(dist, bits, zero_level) for dist in (normal(), point)]
    books = [uniform(bits, zero_level), exponential(bits, zero_level), *(fit.levels for fit in fits)]
    for book in books:
        levels = torch.tensor(book, dtype=torch.float32)
        assert len(book) == 2**bits - zero_level and book[0] == -1 and book[-1] == 1
        assert (levels.diff() > 0).all() and torch.equal(levels, -levels.flip(0))


def test_collapsed_levels_are_separated_and_others_left_alone():
    collapsed = torch.stack([f64(0, 0, 0, 1), f64(1, 1, 1, 1), f64(0.5, 0.5, 0.5, 1), f64(0.9, 0.2, 0.3, 1)])
    separated = level_solvers._separate(collapsed)
    assert (separated[:, 0] > 0).all() and (separated[:, -1] == 1).all()
    assert (separated.float().diff(dim=1) > 0).all()
    assert (separated - collapsed)[:3].abs().max() <= 4 * level_solvers.GAP
    fine = f64(1e-6, 2e-6, 0.5, 1)[None]
    torch.testing.assert_close(level_solvers._separate(fine), fine, rtol=1e-12, atol=0)


# ------------------------------------------------------------------------------------ the table: N(0, 1/16384), 3 bits


def dummy_zero_dropped() -> tuple[float, ...]:
    """Four levels fitted as if there were a zero level besides, which is then left out: what not to do."""
    levels, _ = level_solvers.coordinate_descent(normal(), f64(0.003, 0.01, 0.02, 1)[None], True, tol=1e-9)
    return level_solvers.codebook(levels[0].tolist(), False)


TABLE = {
    "uniform": (lambda: uniform(3, False), [1 / 7, 3 / 7, 5 / 7, 1], 333.3673, 1.0, 1.5),
    "exponential": (lambda: exponential(3, False), [0.125, 0.25, 0.5, 1], 255.0, 1.0, 1.5),
    "uniform, zero": (lambda: uniform(3, True), [1 / 3, 2 / 3, 1], 33.0431, 0.1528, 1.0281),
    "exponential, zero": (lambda: exponential(3, True), [0.25, 0.5, 1], 24.5323, 0.1932, 1.0374),
    "alq": (lambda: optimum().levels, [0.0034706, 0.0114758, 0.0272057, 1], 0.229074, 2.0951, 2.2420),
    "alq, zero": (lambda: optimum(True).levels, [0.0091592, 0.0258523, 1], 0.359435, 1.8248, 1.9799),
    "amq": (lambda: amq(normal(), 3, False).levels, [0.0023442, 0.0176466, 0.1328404, 1], 0.593039, 1.8446, 2.0374),
    "amq, zero": (lambda: amq(normal(), 3, True).levels, [0.0148793, 0.1219809, 1], 0.860747, 1.3977, 1.6144),
    "dummy zero, dropped": (dummy_zero_dropped, [0.0059085, 0.0132205, 0.0282778, 1], 0.323202, 1.8873, 2.0135),
}


def symbol_probabilities(dist: Distribution, levels: Sequence[float]) -> torch.Tensor:
    """The probability of each symbol of a full codebook [K]; they sum to the mass of the distribution, 1."""
    levels = torch.as_tensor(levels, dtype=torch.float64, device=dist.like.device)
    a, c = levels[:-1], levels[1:]
    m0, m1, _ = dist.moments(a, c)
    up, down = ((m1 - a * m0) / (c - a)).clamp_min(0), ((c * m0 - m1) / (c - a)).clamp_min(0)
    return torch.nn.functional.pad(up, (1, 0)) + torch.nn.functional.pad(down, (0, 1))


@pytest.mark.parametrize("row", TABLE)
def test_reference_table(row):
    make, positives, error, shannon, huffman = TABLE[row]
    levels = make()
    assert levels[-len(positives) :] == pytest.approx(positives, abs=0.6e-7)
    assert BUCKET * float(psi(normal(), levels)) == pytest.approx(error, abs=0.6e-4 if error > 1 else 0.6e-6)
    shares = symbol_probabilities(normal(), levels)
    assert float(shares.sum()) == pytest.approx(1, abs=1e-12)
    assert shannon_bits(shares) == pytest.approx(shannon, abs=0.6e-4)
    book = shares.clamp_min(1e-300)  # the book holds every symbol, the ones that never occur too
    assert dense.huffman_bits(book) == pytest.approx(huffman, abs=0.6e-4)


@pytest.mark.parametrize("start", range(4))
@pytest.mark.parametrize("zero_level", [False, True])
def test_alq_reaches_the_optimum_from_every_start(start, zero_level):
    starts = level_solvers.initial_levels(normal(), 3, zero_level)
    end, _ = level_solvers.coordinate_descent(normal(), starts[start : start + 1], zero_level)
    row = TABLE["alq, zero" if zero_level else "alq"]
    assert end[0].tolist() == pytest.approx(row[1], abs=0.6e-7)


def test_alq_never_climbs_and_is_done_after_twenty_sweeps():
    starts = level_solvers.initial_levels(normal(), 3, False)
    last = torch.full((len(starts),), torch.inf, dtype=torch.float64)
    for sweeps in (1, 2, 3, 5, 10, 20):
        levels, taken = level_solvers.coordinate_descent(normal(), starts, False, sweeps)
        error = BUCKET * level_solvers._psi_of_positives(normal(), levels, False)
        assert taken <= sweeps and (error <= last + 1e-12).all()
        last = error
        if sweeps == 10:
            assert (error < 0.2295).all()
    torch.testing.assert_close(error, torch.full_like(error, 0.229074), rtol=0, atol=5e-7)


def best_between(dist, a, c):
    """Return the best level between fixed neighbours."""
    return level_solvers._between(dist, a, c, torch.zeros_like(a, dtype=torch.bool), (a + c) / 2)


@pytest.mark.sample(5)
@pytest.mark.parametrize("zero_level", [False, True])
@pytest.mark.parametrize("name", ["normal", "symmetric mixture", "laplace"])
def test_alq_levels_are_stationary_without_the_symmetry_constraint(name, zero_level):
    dist = DISTRIBUTIONS[name]()
    levels = f64(*alq(dist, 3, zero_level, tol=1e-9).levels)
    torch.testing.assert_close(best_between(dist, levels[:-2], levels[2:]), levels[1:-1], rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("dist", [normal(), mixture()])
def test_best_level_is_the_best_between_its_neighbours(dist):
    a, c = f64(-1, -0.01, 0.0, 0.02, 0.2), f64(-0.2, 0.015, 0.01, 1, 0.21)
    best = best_between(dist, a, c)
    grid = a + (c - a) * torch.linspace(0, 1, 20_001, dtype=torch.float64)[:, None]
    error = level_solvers.interval_variance(dist, a, grid) + level_solvers.interval_variance(dist, grid, c)
    torch.testing.assert_close(best, grid.gather(0, error.argmin(0)[None])[0], rtol=0, atol=1e-4)
    shifted = dist.cdf(c) - (dist.moments(a, c)[1] - a * dist.moments(a, c)[0]) / (c - a)
    torch.testing.assert_close(dist.cdf(best), shifted, rtol=0, atol=1e-12)


def test_empty_interval_gives_its_midpoint():
    a, c = f64(0.5), f64(0.7)  # 64 sigma out: the mass is below the smallest number
    assert float(best_between(normal(), a, c)) == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("weight", "positives", "error"),
    [
        ((9, 1), [0.029581, 0.106099, 0.338554, 1], 1.66539e-3),
        ((3, 1), [0.036831, 0.144146, 0.369513, 1], 2.66501e-3),
        ((1, 1), [0.045849, 0.185928, 0.397754, 1], 3.76144e-3),
    ],
)
def test_weights_of_the_components(weight, positives, error):
    fit = alq(TruncatedNormals(f64(0, 0), f64(0.05, 0.2), f64(*weight)), 3, False)
    assert fit.levels[4:] == pytest.approx(positives, abs=0.6e-6)
    assert fit.psi == pytest.approx(error, abs=0.6e-8)


def test_psi_is_the_error_of_sampled_vectors():
    """200 Gaussian vectors of unit norm: the mean expected error is d psi within three standard errors."""
    generator = torch.Generator().manual_seed(0)
    r = torch.randn(200, BUCKET, generator=generator, dtype=torch.float64)
    r /= r.norm(dim=1, keepdim=True)
    fit = optimum()
    errors = expected_error(r, fit.levels).sum(1)
    assert abs(float(errors.mean()) - BUCKET * fit.psi) < 3 * float(errors.std()) / 200**0.5
    assert float(errors.std()) / 200**0.5 == pytest.approx(0.0005, rel=0.3)


@pytest.mark.sample(2)
@pytest.mark.parametrize("bits", [6, 8])
def test_more_bits_start_near_the_optimum(bits):
    """High-resolution theory: psi -> 2 (integral of f^(1/3) over x > 0)^3 ... / (6 P^2) for P positive levels."""
    sigma = 1 / 128
    integral = (2 * np.pi * sigma**2) ** (-1 / 6) * np.sqrt(2 * np.pi * 3) * sigma / 2
    expected = 2 * integral**3 / (6 * (2 ** (bits - 1) - 0.5) ** 2)
    assert alq(normal(), bits, False, sweeps=20).psi == pytest.approx(expected, rel=0.2)


# ------------------------------------------------------------------------------------------ starts, ALQG, AMQ, official


def test_a_start_is_never_made_worse():
    good = optimum()
    for solve in (alq, alqg):
        assert solve(normal(), 3, False, previous=good.levels).psi <= good.psi
    assert alq(normal(), 3, False, previous=good.levels, sweeps=0).levels == pytest.approx(good.levels, rel=1e-12)
    with pytest.raises(ValueError, match="8 levels"):
        alq(normal(), 4, False, previous=good.levels)


@pytest.mark.sample(2)
@pytest.mark.parametrize("zero_level", [False, True])
def test_alqg_descends_along_the_gradient(zero_level):
    positives = f64(0.05, 0.2, 0.5, 1)[None]
    dist = mixture().symmetric()
    for x, a, c, central in level_solvers._by_parity(grid := level_solvers._with_zero(positives), zero_level):
        gradient, slope = level_solvers._gradient(dist, a, x, c, central)
        for k, j in enumerate((grid[0, :, None] == x[0]).nonzero()[:, 0].tolist()):
            step, moved = 1e-5, torch.stack([positives[0]] * 3)
            moved[0, j - 1] -= step
            moved[2, j - 1] += step
            low, middle, high = level_solvers._psi_of_positives(dist, moved, zero_level) / 2
            assert float(gradient[0, k]) == pytest.approx(float(high - low) / (2 * step), rel=1e-5)
            assert float(slope[0, k]) == pytest.approx(float(high - 2 * middle + low) / step**2, rel=1e-3)
    fit = alqg(dist, 3, zero_level)
    starts = level_solvers.initial_levels(dist, 3, zero_level)
    assert fit.psi < float(level_solvers._psi_of_positives(dist, starts, zero_level).min())
    assert fit.psi >= alq(dist, 3, zero_level).psi
    wide = normal(0.3)  # curved everywhere: descent arrives
    assert alqg(wide, 3, zero_level, sweeps=400).psi == pytest.approx(alq(wide, 3, zero_level).psi, rel=1e-6)


def test_alqg_needs_more_sweeps_where_coordinates_are_small():
    dist = normal(0.05)
    best, few, more = alq(dist, 3, True), alqg(dist, 3, True), alqg(dist, 3, True, sweeps=300)
    assert few.sweeps == 30 and few.psi > 1.05 * best.psi
    assert more.sweeps == 300 and best.psi <= more.psi < 1.001 * best.psi


@pytest.mark.parametrize("zero_level", [False, True])
def test_amq_finds_the_lower_of_its_minima(zero_level):
    p = torch.exp(torch.linspace(-6.9, -0.001, 4001, dtype=torch.float64))
    count = 3 if zero_level else 4
    error = level_solvers._psi_of_positives(
        normal(), p[:, None] ** torch.arange(count - 1, -1, -1, dtype=torch.float64), zero_level
    )
    minima = 1 + ((error[1:-1] < error[:-2]) & (error[1:-1] < error[2:])).nonzero()[:, 0]
    assert len(minima) == 2
    assert float(p[minima[0]]) == pytest.approx(0.0219, abs=1e-4)
    assert BUCKET * float(error[minima[0]]) == pytest.approx(1.3104, abs=1e-4)
    fit = amq(normal(), 3, zero_level)
    assert fit.psi <= float(error.min()) and fit.levels[-2] == pytest.approx(float(p[minima[1]]), rel=2e-3)
    assert amq(normal(), 3, zero_level, previous_p=0.9).levels == fit.levels
    assert amq(normal(), 3, zero_level, previous_p=fit.levels[-2]).psi <= fit.psi


def test_the_published_solvers_stop_where_their_code_stops():
    fit = published()
    sides = torch.stack([f64(*fit.levels[4:]), -f64(*fit.levels[:4]).flip(0)])
    assert sides.mean(0).tolist() == pytest.approx([0.0049, 0.0181, 0.128, 1], rel=0.006)
    assert BUCKET * fit.psi == pytest.approx(0.453, abs=0.0005)
    assert fit.psi == pytest.approx(float(psi(normal(), fit.levels)), rel=1e-12)
    fit = amq(normal(), 3, False, solver="official")
    assert fit.levels[-2] == pytest.approx(0.2317, abs=0.5e-4)
    assert BUCKET * fit.psi == pytest.approx(1.936, abs=0.5e-3)
    for solve in (alq, amq):
        with pytest.raises(ValueError, match="zero"):
            solve(normal(), 3, True, solver="official")


# -------------------------------------------------------------------------------------------------- heavy tails


@pytest.mark.parametrize(
    ("name", "exact", "official", "exact_amq", "empirical", "spread"),
    [
        ("gaussian", 0.229, 0.451, 0.594, 0.229, 0.01),
        ("laplace", 0.836, 0.661, 0.757, 0.362, 0.03),
        ("student", 2.17, 0.742, 0.824, 0.65, 0.05),
    ],
)
def test_heavy_tails(name, exact, official, exact_amq, empirical, spread):
    """The optimum of the wrong model loses to the fit of the data, and even to levels that are not converged."""
    r, weight = samples(name)
    data = histogram(name)

    def error(levels):
        return BUCKET * float(psi(data, levels))

    model = optimum().levels
    assert error(model) == pytest.approx(exact, rel=spread)
    assert error(published().levels) == pytest.approx(official, rel=spread)
    assert error(amq(normal(), 3, False).levels) == pytest.approx(exact_amq, rel=spread)
    fit = alq(data, 3, False)
    assert BUCKET * fit.psi == pytest.approx(empirical, rel=spread)
    assert fit.psi == pytest.approx(float((expected_error(r, fit.levels) * weight).mean() / weight.mean()), rel=1e-4)
    if name != "gaussian":
        assert error(fit.levels) < 0.5 * error(model)
        assert error(fit.levels) < error(amq(data, 3, False).levels)


# --------------------------------------------------------------------------------------------------- degenerate

NAN = float("nan")
DEGENERATE = {
    "zero norm": TruncatedNormals(f64(NAN, 0), f64(NAN, 0.01), f64(0, 1)),
    "nothing at all": TruncatedNormals(f64(0), f64(0.1), f64(0)),
    "no component": TruncatedNormals(f64(), f64(), f64()),
    "constant bucket": TruncatedNormals(f64(1 / 128), f64(0), f64(1)),
    "one element": TruncatedNormals(f64(1), f64(NAN), f64(1)),
    "zero histogram": Histogram.of(torch.zeros(3, 10), torch.zeros(3, 1)),
    "constant histogram": Histogram.of(torch.full((3, 64), 1 / 8), torch.ones(3, 1)),
    "one element, histogram": Histogram.of(torch.tensor([[1.0], [-1.0]]), torch.ones(2, 1)),
    "sparse histogram": Histogram.of(torch.eye(64)[:3], torch.ones(3, 1)),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("case", DEGENERATE)
def test_degenerate_buckets_give_finite_ascending_levels(case):
    dist = DEGENERATE[case]
    for zero_level in (False, True):
        for solve in (alq, alqg, amq):
            fit = solve(dist, 3, zero_level)
            levels = torch.tensor(fit.levels, dtype=torch.float32)
            assert np.isfinite(fit.psi) and fit.psi >= 0 and (levels.diff() > 0).all()
            shares = symbol_probabilities(dist, fit.levels)
            assert shares.isfinite().all() and (shares >= 0).all()
            assert float(shares.sum()) == pytest.approx(float(dist.cdf(f64(1))), abs=1e-6)


def test_nothing_to_fit_keeps_the_codebook_in_use():
    previous = exponential(3, False, 0.3)
    assert alq(DEGENERATE["nothing at all"], 3, False, previous=previous).levels == pytest.approx(previous)


def test_a_candidate_that_is_not_finite_never_wins():
    class Broken(TruncatedNormals):
        def moments(self, a, c):
            m0, m1, m2 = super().moments(a, c)
            return m0, torch.where(c - a > 0.6, NAN, m1), m2

    broken = Broken(f64(0), f64(0.05), f64(1))
    broken.symmetric = lambda: broken
    for zero_level in (False, True):
        assert np.isfinite(amq(broken, 3, zero_level, previous_p=0.1).psi)
        assert np.isfinite(alq(broken, 3, zero_level).psi)
