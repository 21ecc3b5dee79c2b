"""Wrapper: base class of compressors around another compressor."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from accordion_bench.codecs.layout import Transfer
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import Compressor, Context, Kept, Saved, State
from accordion_bench.compressors.description import Claims, WhyDense, dense_reason, paper_floats, with_claims
from accordion_bench.compressors.probe import Buckets, Probed, buckets_of, probe_input
from accordion_bench.options.option import with_options
from accordion_bench.plan import TensorSpec


def _paper_floats(compressor: "Wrapper", spec: TensorSpec, level: float | None, workers: int) -> int | None:
    return paper_floats(compressor.inner, spec, level, workers)


def _why_dense(compressor: "Wrapper", spec: TensorSpec, level: float, workers: int) -> WhyDense | None:
    return dense_reason(compressor.inner, spec, level, workers)


def _contraction(compressor: "Wrapper", spec: TensorSpec, level: float) -> float | None:
    return compressor.inner.description.claims.contraction(compressor.inner, spec, level)


def _variance(compressor: "Wrapper", x_R: Tensor, spec: TensorSpec, level: float, ctx: Context) -> Tensor | None:
    found: Tensor | None = compressor.inner.description.claims.variance(compressor.inner, x_R, spec, level, ctx)
    return found


def _buckets_of(compressor: "Wrapper", xs_W: Sequence[Tensor], ctx: Context) -> list[list[Buckets]] | None:
    return buckets_of(compressor.inner, xs_W, ctx)


def _probe_input(compressor: "Wrapper", ps_W: Sequence[Tensor], ctx: Context, state: State, workers: int) -> Probed:
    return probe_input(compressor.inner, ps_W, ctx, state, workers)


@with_options
class Wrapper(Compressor):
    """A compressor around another one; everything that it does not override is delegated to the inner compressor.

    A subclass that declares traits keeps them, and its description. A subclass that creates its inner compressor does
    so before `super().__post_init__()`.
    """

    inner: Compressor

    description = replace(
        Compressor.description,
        paper_floats=_paper_floats,
        why_dense=_why_dense,
        probe_input=_probe_input,
        buckets_of=_buckets_of,
        claims=Claims(contraction=_contraction, variance=_variance),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        claims = self.inner.description.claims
        own = with_claims(type(self).description, draws=claims.draws, sum_eps=claims.sum_eps)
        if type(self).traits is Compressor.traits:
            self.traits = self.inner.traits
            inherited = ("knob_with", "collective_reason", "no_error_feedback", "kernels")
            own = replace(own, **{key: getattr(self.inner.description, key) for key in inherited})
        self.description = own

    @property
    def level(self) -> float | None:
        return self.inner.level

    def check_level(self, key: str, value: Any) -> float:
        return self.inner.check_level(key, value)

    def scheduled(self, level: float, epoch: float) -> float:
        return self.inner.scheduled(level, epoch)

    def codebook(self, bits: int) -> tuple[float, ...] | None:
        return self.inner.codebook(bits)

    def compresses(self, spec: TensorSpec, level: float | None) -> bool:
        return self.inner.compresses(spec, level)

    def init(self, specs: Sequence[TensorSpec], comm: Comm, like: Tensor) -> State:
        return self.inner.init(specs, comm, like)

    def redistributed_state(self, kept_A: Sequence[Saved], worker: int, workers: int) -> dict[str, dict[str, Tensor]]:
        return self.inner.redistributed_state(kept_A, worker, workers)

    def transfers(self, spec: TensorSpec, level: float, workers: int, kept: Kept = None) -> Sequence[Transfer]:
        return self.inner.transfers(spec, level, workers, kept)

    def pays(self, spec: TensorSpec, level: float, workers: int) -> bool:
        return self.inner.pays(spec, level, workers)

    def compressor_input(self, xs_W: Sequence[Tensor], ctx: Context, state: State, workers: int) -> list[Tensor]:
        return self.inner.compressor_input(xs_W, ctx, state, workers)
