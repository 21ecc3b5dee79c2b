"""Wrapper: a compressor around another one."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from accordion_bench.codecs.layout import Transfer
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.base import Compressor, Context, Probe, State, WhyDense
from accordion_bench.compressors.buckets import Buckets
from accordion_bench.plan import TensorSpec


class Wrapper(Compressor):
    """A compressor around another one; what it does not change is the inner one's.

    Args:
        inner: the wrapped compressor.
    """

    def __init__(self, inner: Compressor) -> None:
        self.inner = inner
        self.traits = inner.traits
        self.draws, self.sum_eps = inner.draws, inner.sum_eps

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

    def why_dense(self, spec: TensorSpec, level: float, workers: int) -> WhyDense | None:
        return self.inner.why_dense(spec, level, workers)

    def init(self, specs: Sequence[TensorSpec], comm: Comm, like: Tensor) -> State:
        return self.inner.init(specs, comm, like)

    def shared_anew(
        self, kept_A: Sequence[Mapping[str, Mapping[str, Tensor]]], worker: int, workers: int
    ) -> dict[str, dict[str, Tensor]]:
        return self.inner.shared_anew(kept_A, worker, workers)

    def buckets_of(self, xs_W: Sequence[Tensor], ctx: Context) -> list[list[Buckets]] | None:
        return self.inner.buckets_of(xs_W, ctx)

    def contraction(self, spec: TensorSpec, level: float) -> float | None:
        return self.inner.contraction(spec, level)

    def variance(self, x_R: Tensor, spec: TensorSpec, level: float, ctx: Context) -> Tensor | None:
        return self.inner.variance(x_R, spec, level, ctx)

    def transfers(
        self, spec: TensorSpec, level: float, workers: int, kept: Mapping[str, Any] | None = None
    ) -> Sequence[Transfer]:
        return self.inner.transfers(spec, level, workers, kept)

    def pays(self, spec: TensorSpec, level: float, workers: int) -> bool:
        return self.inner.pays(spec, level, workers)

    def paper_floats(self, spec: TensorSpec, level: float | None, workers: int) -> int | None:
        return self.inner.paper_floats(spec, level, workers)

    def fed(self, xs_W: Sequence[Tensor], ctx: Context, state: State, workers: int) -> list[Tensor]:
        return self.inner.fed(xs_W, ctx, state, workers)

    def probe_fed(self, xs_W: Sequence[Tensor], ctx: Context, state: State, workers: int) -> Probe:
        return self.inner.probe_fed(xs_W, ctx, state, workers)
