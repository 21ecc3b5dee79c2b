"""Error feedback: what a message lost is added to the next gradient."""

from collections.abc import Sequence

from torch import Tensor

from accordion_bench import check
from accordion_bench.blocks import Blocks
from accordion_bench.comm import Comm
from accordion_bench.compressors.base import Compressor, Context, Exchanged, State
from accordion_bench.plan import TensorSpec


class ErrorFeedback(Compressor):
    """Wraps a compressor C: p_w = g_w + e_w; send C(p_w); e_w <- p_w - sent_w, in raw gradient units.

    Hence sum of updates + mean of residuals = sum of mean gradients, for every C that reduces by mean.

    Args:
        inner: the compressor C.
        residual: `local`: sent_w is the worker's own contribution as decoded. `aggregate`: sent_w is the common update
            (PowerSGD's paper code, torch's hook, Accordion); equal updates, but worker deviations add up in e_w.

    Source: Karimireddy et al. 2019; Vogels et al. 2019, Algorithm 2 (aggregate).
    """

    def __init__(self, inner: Compressor, residual: str = "local") -> None:
        check.choice("residual", residual, ["local", "aggregate"])
        if residual == "aggregate" and inner.reduces != "mean":
            raise check.ValueRefused("residual", f"local, because the update is a {inner.reduces}", residual, "local")
        self.inner, self.residual = inner, residual
        self.knob, self.pair, self.min_ndim = inner.knob, inner.pair, inner.min_ndim
        self.whole_model, self.reduces = inner.whole_model, inner.reduces

    def compresses(self, spec: TensorSpec, level: float | None) -> bool:
        return self.inner.compresses(spec, level)

    @property
    def level(self) -> float | None:
        return self.inner.level

    def check_level(self, key, value) -> float:
        return self.inner.check_level(key, value)

    def payload_bytes(self, spec: TensorSpec, level: float | None, workers: int) -> int:
        return self.inner.payload_bytes(spec, level, workers)

    def init(self, specs: Sequence[TensorSpec], comm: Comm, like: Tensor) -> State:
        state = self.inner.init(specs, comm, like)
        compressible = [spec for spec in specs if spec.ndim >= self.min_ndim]
        residuals_W = Blocks(compressible, comm.local_workers, like).tensors
        for spec, residual_W in zip(compressible, residuals_W, strict=True):
            state.setdefault(spec.name, {})["residual_W"] = residual_W
        return state

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        residuals_W = [state.get(spec.name, {}).get("residual_W") for spec in ctx.specs]
        # p_w is formed in the residual's own storage, so that error feedback needs no third buffer
        ps_W = [x if e is None else e.add_(x) for x, e in zip(xs_W, residuals_W, strict=True)]
        out = self.inner.exchange(ps_W, ctx, state, comm)
        for i, residual_W in enumerate(residuals_W):
            if residual_W is None:
                continue
            if not self.inner.compresses(ctx.specs[i], ctx.levels[i]):
                residual_W.zero_()
            elif self.residual == "local":
                out.subtract_sent_(i, residual_W)
            else:
                residual_W.sub_(out.update[i])
        return out
