"""AdaComp: send the entries that one more gradient would lift to the maximum of their bin, with one scale per tensor.

Tensor suffixes: W local workers, A all workers, R rows, N elements, B bytes.
"""

import copy
from collections.abc import Sequence
from dataclasses import field, replace

import torch
from torch import Tensor

from accordion_bench.codecs.bucket import Bucket, Context
from accordion_bench.codecs.engine import Engine, Selection
from accordion_bench.codecs.engines import engine_for
from accordion_bench.codecs.layout import Layout, SparseLayout
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import Compressor, Exchanged, State, zeros_in_state
from accordion_bench.compressors.description import TRAVEL
from accordion_bench.compressors.gathered import non_finite
from accordion_bench.compressors.probe import Probed, alone, probe_of
from accordion_bench.compressors.sparse import Uneven
from accordion_bench.compressors.wrapper import Wrapper
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors.same_shape import in_rows


class SparseSigns(Uneven):
    """Lossless code of entries -s, 0 or s: s in float32, the number of non-zeros, 2 i + (x_i > 0) by `index_codes`."""

    description = replace(
        Uneven.description,
        kernels=("cpu", "cuda"),
        collective_reason="every worker selects different entries, a sum of sparse tensors is not sparse, "
        "and a server must know the size",
    )

    signs = True
    traits = replace(Uneven.traits, min_ndim=2, whole_model=True)

    def layout(self, specs: Sequence[TensorSpec], levels: Sequence[float]) -> Layout:
        numels = tuple(spec.numel for spec in specs)
        return SparseLayout(numels, numels, signs=True)  # the upper bound: all entries are sent

    def choose(self, engine: Engine, bucket: Bucket) -> Selection:
        return engine.nonzero(bucket.rows_W)


def _probe(compressor: "AdaComp", xs_W: Sequence[Tensor], ctx: Context, state: State, workers: int) -> Probed:
    """Probe e + g; the lost part is the next e."""
    after, ps_W = copy.deepcopy(state), compressor.compressor_input(xs_W, ctx, state, workers)
    compressor.exchange(xs_W, ctx, after, alone(xs_W))

    def lost(i: int) -> Tensor:
        name = ctx.specs[i].name
        return after[name]["residual_W"] if name in state else torch.zeros_like(ps_W[i])

    return probe_of(compressor, ps_W, lost, ctx, workers)


def _probe_input(compressor: "AdaComp", ps_W: Sequence[Tensor], ctx: Context, state: State, workers: int) -> Probed:
    raise NotImplementedError("the selection of entries also depends on the newest gradient")


@with_options
class AdaComp(Wrapper):
    """G_w = e_w + g_w; H_w = G_w + g_w; update = mean_w S(G_w); e_w <- G_w - S(G_w).

    Each tensor is cut into bins of L_T consecutive coordinates, with m_b = max |G_w| in bin b. S(G)_j = sign(G_j)
    mean_b m_b where |H_j| >= m_b, else 0: an entry is sent if one more gradient of the same value would make it the
    largest of its bin. The paper reports about 40 times fewer bytes for convolutions and 200 times fewer for dense
    layers. Error feedback is built in: sum of updates + mean e_w = sum of mean gradients. Tensors of one dimension are
    sent uncompressed.

    The size of a tensor's message is planned before the data are known, at its upper bound of N / 4 bytes. From 32
    workers on, S(G_w) is therefore exchanged by dense all-reduce.

    Source: Chen et al. 2018 (arXiv 1712.02679), from memory: bins, the self-adjusting threshold and the single
    parameter are stated in its abstract; G, H, the scale and the two defaults are recalled.
    """

    inner: Compressor = field(init=False)
    bin_conv: int = option(
        "L_T of convolutions: coordinates per bin; longer = more compression", default=50, at_least=1
    )
    bin_dense: int = option("L_T of matrices", default=500, at_least=1)

    chosen_as = {
        "adacomp": Choice(
            "signs of the entries that one more gradient would lift to their bin's maximum (Chen et al. 2018)",
            beside=("collective", *TRAVEL),
        )
    }

    description = replace(
        Wrapper.description,
        kernels=SparseSigns.description.kernels,
        collective_reason=SparseSigns.description.collective_reason,
        probe=_probe,
        probe_input=_probe_input,
        no_error_feedback="it already accumulates unsent entries in e, which error feedback would count twice",
    )

    traits = SparseSigns.traits

    def __post_init__(self) -> None:
        self.inner = SparseSigns()
        super().__post_init__()

    def bin_size(self, spec: TensorSpec) -> int:
        return max(1, min(self.bin_conv if spec.ndim > 2 else self.bin_dense, spec.numel))

    def init(self, specs: Sequence[TensorSpec], comm: Comm, like: Tensor) -> State:
        compressible = [spec for spec in specs if spec.ndim >= self.traits.min_ndim]
        return zeros_in_state({}, "residual_W", compressible, comm, like)

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        kept = [state.get(spec.name, {}).get("residual_W") for spec in ctx.specs]
        residuals_W = {i: e_W for i, e_W in enumerate(kept) if e_W is not None}
        lossy = [i for i in residuals_W if self.compresses(ctx.specs[i], ctx.levels[i])]
        whole = [i for i in residuals_W if i not in lossy]
        sent_W = list(xs_W)
        if whole:
            sums_W = torch._foreach_add([residuals_W[i] for i in whole], [xs_W[i] for i in whole])
            for i, sum_W in zip(whole, sums_W, strict=True):
                sent_W[i] = sum_W
            torch._foreach_zero_([residuals_W[i] for i in whole])
        if lossy:
            engine, rows_W = engine_for(xs_W), [in_rows(residuals_W[i]) for i in lossy]
            sizes = [self.bin_size(ctx.specs[i]) for i in lossy]
            lifted_W, scales_W = engine.select_in_bins(rows_W, [in_rows(xs_W[i]) for i in lossy], sizes)
            if engine.checks_input and not scales_W.isfinite().all():
                t, w = (~scales_W.isfinite()).T.nonzero()[0].tolist()
                raise non_finite(ctx, lossy[t], comm.first_named + w)
            for i, own_W in zip(lossy, lifted_W, strict=True):
                sent_W[i] = own_W.view(xs_W[i].shape)
        return self.inner.exchange(sent_W, ctx, state, comm)  # lossless for these tensors

    def compressor_input(self, xs_W: Sequence[Tensor], ctx: Context, state: State, workers: int) -> list[Tensor]:
        residuals_W = [state.get(spec.name, {}).get("residual_W", 0) for spec in ctx.specs]
        return [x_W + e_W for x_W, e_W in zip(xs_W, residuals_W, strict=True)]
