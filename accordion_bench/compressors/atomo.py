"""ATOMO: unbiased compression by a random selection of singular triples."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from accordion_bench.codecs.bucket import refuse_non_finite
from accordion_bench.codecs.engines import engine_for
from accordion_bench.compressors.compressor import Context
from accordion_bench.compressors.description import WhyDense, shorter_messages
from accordion_bench.compressors.oneshot import OneShot
from accordion_bench.compressors.probe import dense_bytes
from accordion_bench.options.option import NEAREST, Choice, option, with_options
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors import keyed_rng
from accordion_bench.tensors.upload import upload

TINY = torch.finfo(torch.float64).tiny


def _why_dense(compressor: "ATOMO", spec: TensorSpec, level: float, workers: int) -> WhyDense | None:
    if spec.ndim < compressor.traits.min_ndim or compressor.compresses(spec, level):
        return OneShot.description.why_dense(compressor, spec, level, workers)
    if level >= min(spec.matrix):
        return WhyDense(f"rank {level:g} exceeds the size of the matrix", shorter_messages(compressor))
    return WhyDense(f"{level:g} triples would be no smaller than the matrix", shorter_messages(compressor))


def _variance(compressor: "ATOMO", x_R: Tensor, spec: TensorSpec, level: float, ctx: Context) -> Tensor:
    sigma = torch.linalg.svdvals(x_R.view(-1, *spec.matrix)).double()
    return (sigma.square() * (1 / inclusion(sigma, int(level)) - 1)).sum(1)


@with_options
class ATOMO(OneShot):
    """update = mean_w sum_{i in S_w} (sigma_i / p_i) u_i v_i^T, with P(i in S_w) = p_i, for each tensor as M [n, m].

    p_i = min(1, c sigma_i) with sum_i p_i = s minimises the variance, E||Q - M||^2 = sum_i sigma_i^2 (1/p_i - 1).

    The paper draws the triples independently, s of them on average. Here systematic sampling with one uniform number
    per matrix selects exactly s triples with the same p_i. Singular triples are orthogonal, so that mean and variance
    equal those of independent draws. The message has a fixed size of 4 s (n + m + 1) bytes.

    The triples are computed from the eigenvectors of the smaller Gram matrix in float64, at a cost of O(n m min(n, m))
    per matrix and step. For any orthonormal u_i with sigma_i v_i = M^T u_i the triples sum to M, so that the message is
    unbiased even if the eigenvectors are inexact. A matrix whose s triples would not be smaller than itself is
    exchanged dense. Error feedback is refused, because a message is not a contraction.

    Source: Wang, Sievert, Charles, Liu, Wright, Papailiopoulos 2018 (arXiv 1806.04090), Algorithm 1, spectral atoms.
    """

    rank: int = option(
        "singular triples sent per matrix; lower rank = more compression", default=2, at_least=1, instead=NEAREST
    )

    chosen_as = {
        "atomo": Choice(
            "a random selection of singular triples, unbiased (Wang et al. 2018); a full SVD of every matrix in every "
            "step",
            beside=("collective", "start_step"),
        )
    }

    description = replace(
        OneShot.description,
        collective_reason="every worker sends different triples, of whole matrices",
        no_error_feedback="a message is not a contraction (sigma_i / p_i exceeds sigma_i), and the residual would grow",
        why_dense=_why_dense,
        claims=replace(OneShot.description.claims, draws="worker", variance=_variance),
    )

    stream = "ATOMO"
    traits = replace(OneShot.traits, knob="rank", pair=(1, 2), min_ndim=2, unbiased=True, collectives=("all_gather",))

    def compresses(self, spec: TensorSpec, level: float | None) -> bool:
        if level is None or spec.ndim < self.traits.min_ndim:
            return False
        return self.message_bytes(spec, level) < dense_bytes(spec)

    def message_bytes(self, spec: TensorSpec, level: float) -> int:
        return 4 * int(level) * (sum(spec.matrix) + 1)

    def encode(self, x_R: Tensor, spec: TensorSpec, level: float, ctx: Context, keys: Sequence[int]) -> Tensor:
        refuse_non_finite(x_R)
        found, s = spectrum(x_R, spec), int(level)
        p = inclusion(found.sigma, s)
        uniform = [torch.rand((), generator=keyed_rng.generator(key), dtype=torch.float64) for key in keys]
        chosen = systematic(p, upload(torch.stack(uniform), x_R.device), s)
        triples = found.triples(chosen, p)
        refuse_non_finite(triples[:, :s])
        return triples.view(torch.uint8)

    def _factors(self, message_R: Tensor, spec: TensorSpec, level: float) -> tuple[Tensor, Tensor]:
        """Return (values x left [..., R, n, s], right [..., R, s, m]) of messages [..., R, B]."""
        (n, m), s = spec.matrix, int(level)
        floats = message_R.clone(memory_format=torch.contiguous_format).view(torch.float32)
        values, left, right = floats.split([s, s * n, s * m], dim=-1)
        return (values[..., None] * left.unflatten(-1, (s, n))).mT, right.unflatten(-1, (s, m))

    def add_decoded_(
        self, total_R: Tensor, message_AR: Tensor, spec: TensorSpec, level: float, ctx: Context, alpha: float = 1.0
    ) -> None:
        left, right = (factor.to(total_R.dtype) for factor in self._factors(message_AR, spec, level))
        if engine_for([total_R]).copies:  # all workers at once, as one product with a longer inner dimension
            left, right = left.permute(1, 2, 0, 3).flatten(2)[None], right.permute(1, 0, 2, 3).flatten(1, 2)[None]
        for own_left, own_right in zip(left, right, strict=True):  # one worker at a time: a fixed order of summation
            total_R.view(-1, *spec.matrix).baddbmm_(own_left, own_right, alpha=alpha)


class Spectrum(NamedTuple):
    """Singular values and vectors of matrices [R, n, m], float64.

    sigma: [R, q], descending; values below 1e-8 of the first are rounding errors.
    vectors: of the shorter side, as rows [R, q, q].
    wide: the matrices with the shorter side first, [R, q, k].
    transposed: whether the shorter side is the second side of the matrices.
    """

    sigma: Tensor
    vectors: Tensor
    wide: Tensor
    transposed: bool

    def triples(self, chosen: Tensor, p: Tensor) -> Tensor:
        """Return sigma_i / p_i, u_i and v_i of the chosen triples, as float32 [R, s (1 + n + m)].

        Args:
            chosen: indices [R, s].
            p: probabilities [R, q].
        """
        short = self.vectors.gather(1, chosen[:, :, None].expand(-1, -1, self.vectors.shape[2]))
        long = short @ self.wide  # sigma_i times the unit vector
        norms = long.norm(dim=2)
        unit = long / norms.clamp_min(TINY)[:, :, None]
        left, right = (unit, short) if self.transposed else (short, unit)
        return torch.cat([norms / p.gather(1, chosen), left.flatten(1), right.flatten(1)], dim=1).float()


def spectrum(x_R: Tensor, spec: TensorSpec) -> Spectrum:
    """Return the spectrum of matrices in rows [R, N]; the singular values of a non-finite matrix are NaN.

    On a GPU, torch's eigh synchronises with the host once per shape.
    """
    n, m = spec.matrix
    finite_R = torch.nan_to_num(x_R, nan=0.0, posinf=0.0, neginf=0.0)
    matrices = finite_R.view(-1, n, m).double()
    wide = matrices.mT if n > m else matrices
    squares, vectors = torch.linalg.eigh(wide @ wide.mT)
    sigma = squares.clamp_min(0).sqrt().flip(1) + x_R.sum(1, keepdim=True) * 0
    return Spectrum(sigma, vectors.mT.flip(1), wide, n > m)


def inclusion(sigma: Tensor, s: int) -> Tensor:
    """Return p_i = min(1, c sigma_i), with c such that sum_i p_i = s: the probabilities of least variance.

    Args:
        sigma: singular values [R, q], descending; at least s of them.
        s: triples to keep.

    Returns:
        p [R, q] in (0, 1], float64; where fewer than s values are positive, the zeros share the rest.
    """
    sigma = sigma.double().clamp_min(TINY)  # so that a zero also has a share, and 0 / p is 0
    others = sigma.flip(1).cumsum(1).flip(1)  # sigma_t + .. + sigma_q
    t = torch.arange(sigma.shape[1], device=sigma.device)
    # with the first t at p = 1, the next has p = (s - t) sigma_t / others_t: the smallest t for which this is below 1
    first = ((s - t) * sigma <= others).int().argmax(1, keepdim=True)
    return ((s - first) * sigma / others.gather(1, first)).masked_fill_(t < first, 1).clamp_min_(TINY)


def systematic(p: Tensor, uniform: Tensor, s: int) -> Tensor:
    """Select exactly s indices per row, ascending, index i with probability p_i.

    The intervals [p_1 + .. + p_{i-1}, p_1 + .. + p_i) tile [0, s); the points u, u + 1, .. u + s - 1 select one each.

    Args:
        p: [R, q] in [0, 1] with sum s.
        uniform: u [R] in [0, 1).

    Returns:
        indices [R, s].
    """
    ends = p.cumsum(1)
    ends[:, -1] = s  # rounding must not lose the last point
    points = uniform[:, None] + torch.arange(s, device=p.device)
    return torch.searchsorted(ends, points, right=True).clamp_max(p.shape[1] - 1)
