"""GradiVeQ: coefficients of gradient vectors in a basis of principal components, summed by all-reduce.

Tensor suffixes: W local workers, K coordinates of a vector, M vectors of a tensor, R coefficients of a vector.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accordion_bench.codecs.layout import Transfer
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import Compressor, Context, Exchanged, Kept, State, paying_levels
from accordion_bench.compressors.description import FEEDBACK, TRAVEL, Traits, WhyDense, shorter_messages
from accordion_bench.compressors.probe import dense_bytes
from accordion_bench.options.checks import ValueRefused
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.plan import TensorSpec

TURN, MOMENT, BASIS, SPANNED = "turn", "moment", "basis", "spanned"  # keys of the state
LEAST = 1e-12  # of the largest eigenvalue; directions below it were absent from the dense steps


def _why_dense(compressor: "GradiVeQ", spec: TensorSpec, level: float, workers: int) -> WhyDense | None:
    if not compressor.compresses(spec, level) or compressor.pays(spec, level, workers):
        return None
    reason = f"{level:g} coefficients of vectors of {compressor.length} would be no shorter than the tensor"
    return WhyDense(reason, shorter_messages(compressor))


@with_options
class GradiVeQ(Compressor):
    """Of T steps L are dense and define the basis; then  a = mean_w U^T v_w,  update = U a,  for each vector v of K.

    A tensor is cut into M = ceil(N / K) vectors v of K consecutive coordinates; the last one is padded with zeros. The
    columns of U [K, r] are the r eigenvectors of largest eigenvalue of the sum of v v^T over the mean gradients of the
    L dense steps, so that all workers compute the same U without a message. Coefficients are summed by all-reduce.
    Worker w's own contribution is U U^T v_w. A tensor that has fewer than K coordinates, or would not become smaller,
    is always exchanged dense. A direction that is absent from the dense steps is not sent.

    Source: Yu et al. 2018 (arXiv 1811.03617), with its equations from memory. The paper recommends vectors along the
    filters of a convolution; here a vector is any K adjacent coordinates.
    """

    rank: int = option("coefficients of each vector; lower rank = more compression", default=8, at_least=1)
    length: int = option("coordinates of a vector", default=64, at_least=1)
    basis_steps: int = option("dense steps that define a basis", default=4, at_least=1)
    period: int = option("steps from one basis to the next", default=64, at_least=1)

    chosen_as = {
        "gradiveq": Choice(
            "all-reduced coefficients of each tensor's vectors in a basis of principal components (GradiVeQ, 2018)",
            {"error_feedback": True},
            beside=(*FEEDBACK, *TRAVEL),
        )
    }

    description = replace(
        Compressor.description,
        display_names={"gradiveq": "GradiVeQ"},
        advised_levels=(4,),
        why_dense=_why_dense,
        smoke_options=lambda options, knob: {"basis_steps": 1, "period": 4},
        claims=replace(Compressor.description.claims, other_options=({"basis_steps": 1, "period": 3},)),
    )
    traits = Traits(knob="rank", pair=(4, 16), min_ndim=2)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank > self.length:
            raise ValueRefused("rank", f"at most length, {self.length}", self.rank, self.length)
        if self.period <= self.basis_steps:
            rule = f"above basis_steps, {self.basis_steps}, or every step would be dense"
            raise ValueRefused("period", rule, self.period, 16 * self.basis_steps)
        self.traits = replace(self.traits, cycle=self.period)

    def compresses(self, spec: TensorSpec, level: float | None) -> bool:
        return super().compresses(spec, level) and spec.numel >= self.length

    def coefficients(self, level: float) -> int:
        """Return r, the number of coefficients per vector."""
        return min(int(level), self.length)

    def transfers(self, spec: TensorSpec, level: float, workers: int, kept: Kept = None) -> Sequence[Transfer]:
        short = 4 * self.coefficients(level) * -(-spec.numel // self.length)
        if kept is not None:
            return [Transfer("all_reduce", dense_bytes(spec) if self.is_dense(kept) else short)]
        whole = self.basis_steps * dense_bytes(spec)
        return [Transfer("all_reduce", (whole + (self.period - self.basis_steps) * short) / self.period)]

    def pays(self, spec: TensorSpec, level: float, workers: int) -> bool:
        return self.coefficients(level) * -(-spec.numel // self.length) <= spec.numel

    def is_dense(self, kept: Mapping[str, Any]) -> bool:
        """Whether the next exchange of a tensor is one of the dense steps that define the basis."""
        return self._turn(kept) < self.basis_steps

    def _turn(self, kept: Mapping[str, Any]) -> int:
        """Return the number of exchanges of a tensor since the start of its last basis."""
        return int(kept.get(TURN, 0))

    def _basis(self, kept: Mapping[str, Any], r: int) -> Tensor:
        """Return U [K, r] with absent directions set to 0; r = K keeps all directions so that nothing is lost."""
        basis: Tensor = kept[BASIS][:, :r]
        return basis if r == self.length else basis * kept[SPANNED][:r]

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        levels = paying_levels(self, ctx, comm.workers)
        own = {i: state.setdefault(ctx.specs[i].name, {}) for i in levels}
        coded = {i: self.coefficients(level) for i, level in levels.items() if not self.is_dense(own[i])}
        bases = {i: self._basis(own[i], r).to(xs_W[i].dtype) for i, r in coded.items()}
        sent_W = {i: self._vectors(xs_W[i]) @ basis for i, basis in bases.items()}  # [W, M, R]
        update = comm.all_reduce_mean([sent_W.get(i, x_W) for i, x_W in enumerate(xs_W)])
        for i, kept in own.items():
            if i in coded:
                update[i] = self._whole(update[i] @ bases[i].mT, ctx.specs[i].shape)
            else:
                self._learn(kept, update[i])
            kept[TURN] = torch.tensor((self._turn(kept) + 1) % self.period)

        def subtract_sent_(targets_W: Mapping[int, Tensor]) -> None:
            for i, target_W in targets_W.items():
                if i not in coded:
                    target_W.sub_(xs_W[i])
                    continue
                for target, sent in zip(target_W, sent_W[i], strict=True):
                    target.sub_(self._whole(sent @ bases[i].mT, ctx.specs[i].shape))

        return Exchanged(update, subtract_sent_)

    def _vectors(self, x_W: Tensor) -> Tensor:
        """Return a tensor [W, ...] as vectors [W, M, K]."""
        flat_W = x_W.flatten(1)
        return torch.nn.functional.pad(flat_W, (0, -flat_W.shape[1] % self.length)).view(len(x_W), -1, self.length)

    def _whole(self, vectors: Tensor, shape: Sequence[int]) -> Tensor:
        return vectors.flatten()[: torch.Size(shape).numel()].view(shape)

    def _learn(self, kept: dict[str, Any], mean: Tensor) -> None:
        """Add a dense mean gradient [...] to the second moment; after L of them compute the basis in float64."""
        vectors = self._vectors(mean[None])[0].double()
        moment = vectors.mT @ vectors
        kept[MOMENT] = kept[MOMENT] + moment if self._turn(kept) else moment
        if self._turn(kept) == self.basis_steps - 1:
            values, directions = torch.linalg.eigh(kept.pop(MOMENT))
            kept[BASIS] = directions.flip(1).contiguous()
            kept[SPANNED] = (values > LEAST * values[-1]).to(values.dtype).flip(0)
