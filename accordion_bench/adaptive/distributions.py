"""Distributions of normalised gradient coordinates r in [-1, 1]: a fitted mixture and a histogram of the data.

Both provide the following, in fp64, on the device of their parameters and without a loop over components:

    F(x)      the cdf and its inverse
    M_k(a, c) = integral of r^k dF over [a, c], k = 0, 1, 2: all that the level solvers need
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

TERMS_AT_ONCE = 2**18  # points x components evaluated together; bounds the memory
NARROWEST = 1e-12  # standard deviation that represents a point mass, so that all formulas stay defined
SMALLEST = 2.0**-20  # upper edge of the first bin, below any useful level (rms of r is 1 / sqrt(bucket size))


class Distribution:
    """Base class of distributions on [-1, 1].

    Attributes:
        like: an fp64 tensor; new tensors are created on its device.
        negligible: mass below which an interval counts as empty, because it may be rounding noise.
    """

    like: Tensor
    negligible: float

    def moments(self, a: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return M_k(a, c) for k = 0, 1, 2, elementwise over fp64 tensors a <= c."""
        raise NotImplementedError

    def pdf(self, x: Tensor) -> Tensor:
        """Return the density, elementwise."""
        raise NotImplementedError

    def symmetric(self) -> "Distribution":
        """Return this distribution made symmetric about 0."""
        raise NotImplementedError

    def cdf(self, x: Tensor) -> Tensor:
        """Return F(x), elementwise."""
        return self.moments(-torch.ones_like(x), x)[0]

    def quantile(self, p: Tensor) -> Tensor:
        """Return F^-1(p), elementwise; p = 0 gives -1, p = 1 gives 1."""
        ones = torch.ones_like(p)
        x = increasing_root(lambda x: (self.cdf(x) - p, self.pdf(x)), -ones, ones, torch.zeros_like(p))
        return torch.where(p <= 0, -ones, torch.where(p >= 1, ones, x))


class TruncatedNormals(Distribution):
    """Weighted mixture of normals, each truncated to [-1, 1].

    Args:
        mu, sigma, weight: [C], one entry per component. Weights need not be normalised; a component of weight 0 is
            ignored, whatever its mu and sigma. A sigma of 0 or NaN (a bucket of one element) is a point mass.
    """

    negligible = 1e-290  # tails are computed from the side where they are small, so that only underflow is noise

    def __init__(self, mu: Tensor, sigma: Tensor, weight: Tensor) -> None:
        used = weight > 0
        self.mu = torch.where(used, mu.double(), 0.0).clamp(-1, 1)
        self.sigma = torch.where(used, sigma.double(), 1.0).nan_to_num(0.0).clamp_min(NARROWEST)
        weight = torch.where(used, weight.double(), 0.0)
        self.weight = self.like = weight / weight.sum().clamp_min(1e-300)
        scale = self.sigma * math.sqrt(2)
        self.inside = (torch.erf((1 - self.mu) / scale) + torch.erf((1 + self.mu) / scale)) / 2

    def symmetric(self) -> "TruncatedNormals":
        """Return the mixture with the mean of every component set to 0 and its variance to mu^2 + sigma^2."""
        return TruncatedNormals(torch.zeros_like(self.mu), torch.hypot(self.mu, self.sigma), self.weight)

    def pdf(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1)
        parts = [self._density(points) @ self.weight for points in flat.split(self._points_at_once())]
        return torch.cat(parts).view_as(x) if parts else flat.view_as(x)

    def moments(self, a: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, c = torch.broadcast_tensors(a, c)
        size = self._points_at_once()
        pairs = zip(a.reshape(-1).clamp(-1, 1).split(size), c.reshape(-1).clamp(-1, 1).split(size), strict=True)
        m0, m1, m2 = torch.cat([self._moments(*pair) for pair in pairs], dim=1).view(3, *a.shape)
        return m0, m1, m2

    def _points_at_once(self) -> int:
        return max(1, TERMS_AT_ONCE // max(1, self.mu.numel()))

    def _density(self, x: Tensor) -> Tensor:
        z = (x[:, None] - self.mu) / self.sigma
        density = torch.exp(-z * z / 2) / (math.sqrt(2 * math.pi) * self.sigma * self.inside)
        return density * (x.abs() <= 1)[:, None]

    def _moments(self, a: Tensor, c: Tensor) -> Tensor:
        alpha, gamma = (a[:, None] - self.mu) / self.sigma, (c[:, None] - self.mu) / self.sigma
        mirror = alpha + gamma < 0  # Phi near 1 loses all digits: compute from the tail instead
        near, far = torch.where(mirror, -gamma, alpha), torch.where(mirror, -alpha, gamma)
        m0 = (torch.erfc(near / math.sqrt(2)) - torch.erfc(far / math.sqrt(2))) / (2 * self.inside)
        scale = self.sigma / (math.sqrt(2 * math.pi) * self.inside)  # sigma^2 f(x) = scale exp(-z^2 / 2)
        fa, fc = scale * torch.exp(-alpha * alpha / 2), scale * torch.exp(-gamma * gamma / 2)
        m1 = self.mu * m0 - (fc - fa)
        m2 = (self.mu**2 + self.sigma**2) * m0 - ((c[:, None] + self.mu) * fc - (a[:, None] + self.mu) * fa)
        return torch.stack([m0 @ self.weight, m1 @ self.weight, m2 @ self.weight])


class Histogram(Distribution):
    """Weighted histogram of |r|, extended symmetrically to [-1, 1].

    A bin stores its mass and its sums of |r| and r^2, so that M_k between bin edges is exactly that of the data. Inside
    a bin the mass is uniform on each side of the bin's mean, with the shares that reproduce this mean. Histograms with
    the same edges are merged by adding their arrays.

    Args:
        edges: [B + 1], ascending from 0 to 1.
        mass, first, second: [B], sums of w, w |r| and w r^2 per bin, not necessarily normalised.
    """

    negligible = 1e-13  # differences of cumulative sums

    def __init__(self, edges: Tensor, mass: Tensor, first: Tensor, second: Tensor) -> None:
        self.mass, self.first, self.second = mass.double(), first.double(), second.double()
        self.like = self.mass
        low, width = edges[:-1].double(), edges.double().diff()
        m0, m1, m2 = self.arrays() / self.mass.sum().clamp_min(1e-300)
        # mean of the bin as a share of its width, clamped so that neither half is empty
        middle = torch.where(m0 > 0, (m1 / m0 - low) / width, 0.5).clamp(1e-6, 1 - 1e-6)

        def halves(left: Tensor, right: Tensor) -> Tensor:
            return torch.stack([left, right], dim=1).flatten()

        self.low, self.width = halves(low, low + middle * width), halves(middle * width, (1 - middle) * width)
        share = halves(1 - middle, middle)
        self.density = m0.repeat_interleave(2) * share / self.width
        mass0, mass1, mass2 = self.density * _powers(self.low, self.width)
        missing = (m2 - mass2.view(-1, 2).sum(1)).repeat_interleave(2) * share  # the spread inside the bin
        self.missing = missing / self.width
        self.cumulative = torch.stack([mass0, mass1, mass2 + missing]).cumsum(1).roll(1, dims=1)
        self.cumulative[:, 0] = 0

    @staticmethod
    def log_edges(bins: int = 4096, device: torch.device | str | None = None) -> Tensor:
        """Return [bins + 1] edges: 0, then logarithmically spaced from 2^-20 to 1."""
        exponents = torch.linspace(math.log2(SMALLEST), 0, bins, dtype=torch.float64, device=device)
        return torch.cat([torch.zeros_like(exponents[:1]), torch.exp2(exponents)])

    @staticmethod
    def of(r: Tensor, weight: Tensor, bins: int = 4096) -> "Histogram":
        """Return the histogram of finite r [..., N] in [-1, 1]; weight broadcasts to r, e.g. ||v||^2 [..., 1]."""
        edges = Histogram.log_edges(bins, r.device)
        size = r.abs().clamp(max=1).reshape(-1).double()
        w = weight.double().expand(r.shape).reshape(-1)
        place = torch.bucketize(size, edges[1:-1])
        sums = [_counted(place, weights, bins) for weights in (w, w * size, w * size * size)]
        return Histogram(edges, *sums)

    def arrays(self) -> Tensor:
        """Return the sums [3, B] before normalisation; add them over ranks and pass the result to `from_arrays`."""
        return torch.stack([self.mass, self.first, self.second])

    @staticmethod
    def from_arrays(arrays: Tensor) -> "Histogram":
        """Return the histogram with sums [3, B] over the edges `log_edges(B)`."""
        return Histogram(Histogram.log_edges(arrays.shape[1], arrays.device), *arrays)

    def symmetric(self) -> "Histogram":
        return self

    def pdf(self, x: Tensor) -> Tensor:
        return self.density[self._half_bin(x.abs())] / 2 * (x.abs() <= 1)

    def moments(self, a: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, c = torch.broadcast_tensors(a, c)
        m0, m1, m2 = self._from_zero(c) - self._from_zero(a)
        return m0, m1, m2

    def _half_bin(self, size: Tensor) -> Tensor:
        return torch.bucketize(size, self.low[1:])

    def _from_zero(self, x: Tensor) -> Tensor:
        """Return the integrals of r^k dF from 0 to x, [3, ...]."""
        size = x.abs().clamp(max=1)
        i = self._half_bin(size)
        step = size - self.low[i]
        sums = self.cumulative[:, i] + self.density[i] * _powers(self.low[i], step)
        sums[2] += self.missing[i] * step
        sign = x.sign()
        return sums / 2 * torch.stack([sign, sign * sign, sign])


def _powers(low: Tensor, step: Tensor) -> Tensor:
    """Return the integrals of 1, r and r^2 over [low, low + step], [3, ...]."""
    return torch.stack([step, step * (low + step / 2), step * (low * (low + step) + step * step / 3)])


def increasing_root(
    value_and_slope: Callable[[Tensor], tuple[Tensor, Tensor]], low: Tensor, high: Tensor, start: Tensor
) -> Tensor:
    """Return the root in [low, high] of an increasing function, elementwise, by a bracketed Newton's method.

    The method bisects where Newton's step leaves the bracket or exceeds half of the step before the last one, so that
    every element converges, also on plateaus and at jumps.

    Args:
        value_and_slope: maps x to the function and its derivative, all of one shape.
        low, high: the bracket, of that shape; the function is <= 0 at low and >= 0 at high.
        start: first guess inside the bracket.

    Returns:
        x, to 1e-11 of itself plus 1e-13; on a plateau any of its points.
    """
    x = start
    last = before = high - low
    done = high <= low
    for _ in range(120):  # two steps per halving in the worst case
        value, slope = value_and_slope(x)
        low, high = torch.where(value <= 0, x, low), torch.where(value >= 0, x, high)
        newton = x - value / slope
        good = (newton >= low) & (newton <= high) & (2 * value.abs() <= before * slope)
        new = torch.where(done, x, torch.where(good, newton, (low + high) / 2))
        before, last = last, (new - x).abs()
        x = new
        done = done | (last <= 1e-11 * x.abs() + 1e-13)
        if bool(done.all()):
            break
    return x


POWER = {"squared": 2, "first": 1, "none": 0}


def _counted(place: Tensor, weights: Tensor, bins: int) -> Tensor:
    """Return the sum of the weights [N] in each bin, [bins]."""
    if place.device.type == "cpu":
        return torch.bincount(place, weights, minlength=bins)
    return weights.new_zeros(bins).index_add_(0, place, weights)  # bincount would synchronise with the host


def weight_of(norms: Tensor, weight: str) -> Tensor:
    """Return a coordinate's weight from its bucket's norm: norm^2 (as in the quantiser's error), norm or 1; 0 for 0."""
    return norms.double() ** POWER[weight] * (norms > 0)
