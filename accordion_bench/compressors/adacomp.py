"""AdaComp: per bin, the entries that the newest gradient would lift to the bin's maximum; one scale per tensor.

Tensor suffixes: W local workers, A all workers, R rows, N elements, B bytes.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from accordion_bench.codecs import index_codes
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.base import Context, Exchanged, Probe, State, alone
from accordion_bench.compressors.flat_bucket import as_rows
from accordion_bench.compressors.gathered import non_finite
from accordion_bench.compressors.sparse_on_device import (
    add_in_order_,
    as_bytes,
    exchanged,
    flattened,
    gather_uneven,
    read_counts,
    runs_on_device,
)
from accordion_bench.compressors.uneven import Messages, Uneven
from accordion_bench.compressors.wrapper import Wrapper
from accordion_bench.options import checks
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors import kernels
from accordion_bench.tensors.same_shape import Blocks
from accordion_bench.tensors.upload import upload

HEADER = 8  # bytes of a message before its entries: the scale, and how many entries follow


class SparseSigns(Uneven):
    """Nothing is lost of tensors whose entries are -s, 0 or s: a float32 s, their number, and 2 i + (x_i > 0).

    The numbers 2 i + (x_i > 0) below 2 N are in the smaller code of `wire`: a sign costs one bit.
    """

    traits = replace(
        Uneven.traits,
        kernels=("cpu",),
        min_ndim=2,
        whole_model=True,
        collective_reason="every worker keeps other entries, a sum of sparse tensors is not sparse, "
        "and a server must know the size",
    )

    def message_bytes(self, spec: TensorSpec, level: float) -> int:
        return HEADER + (2 * spec.numel + 7) // 8  # where all entries are sent

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        if runs_on_device(xs_W):
            return self._on_device(xs_W, ctx, comm)
        return super().exchange(xs_W, ctx, state, comm)

    def _on_device(self, xs_W: Sequence[Tensor], ctx: Context, comm: Comm) -> Exchanged:
        """The same for a whole bucket at once; the host waits once, for how many entries are sent."""
        flat, gathered = flattened(self, ctx, comm.workers)
        if not flat.ids:
            return super().exchange(xs_W, ctx, {}, comm)
        x_W, tensors, W = flat.rows(xs_W), sum(start < gathered for start in flat.starts), comm.local_workers
        sent_W = x_W != 0
        last = upload(
            torch.tensor([start + n - 1 for start, n in zip(flat.starts, flat.sizes, strict=True)]), x_W.device
        )
        until_W = sent_W.cumsum(1, dtype=torch.int32).index_select(1, last)
        counts_W = torch.diff(until_W, dim=1, prepend=until_W.new_zeros(W, 1))
        own_W, counts_A = read_counts(counts_W, tensors, comm)

        def summed() -> Tensor:
            kept_W = [sum(counts[:tensors]) for counts in own_W]
            positions = torch.nonzero_static(sent_W[:, :gathered], size=sum(kept_W))[:, 1]
            positions_W = positions.split(kept_W)
            values_W = [x.index_select(0, own) for x, own in zip(x_W, positions_W, strict=True)]
            # all entries of a tensor have one magnitude: that of the first; without entries, any
            own = [count for counts in own_W for count in counts[:tensors]]
            first = upload((torch.tensor(own).cumsum(0) - torch.tensor(own)), x_W.device)
            magnitudes = torch.cat([*values_W, x_W.new_zeros(1)]).abs_().float()
            scales = as_bytes(magnitudes.index_select(0, first)).view(W, tensors, 4)
            numbers = counts_W[:, :tensors].contiguous().view(torch.uint8).view(W, tensors, 4)
            heads_A, entries_A = gather_uneven(
                list(torch.cat([scales, numbers], dim=2).flatten(1)),
                [2 * at + (values > 0) for at, values in zip(positions_W, values_W, strict=True)],
                [2 * start for start in flat.starts[:tensors]],
                [2 * n for n in flat.sizes[:tensors]],
                counts_A,
                lambda kept: HEADER * tensors,
                comm,
            )
            scales_A = torch.cat(heads_A).view(-1, HEADER)[:, :4].contiguous().view(torch.float32)[:, 0]
            entries = torch.cat(entries_A)
            end = upload(torch.tensor(counts_A).flatten().cumsum(0), x_W.device)
            tensor = torch.searchsorted(end, torch.arange(len(entries), device=x_W.device), right=True)
            values = (2 * (entries & 1) - 1) * scales_A.index_select(0, tensor)
            kept_A = [len(own) for own in entries_A]
            return add_in_order_(x_W.new_zeros(gathered), (entries >> 1).split(kept_A), values.split(kept_A))

        return exchanged(xs_W, flat, gathered, lambda: x_W, summed, comm)

    def encode_all(
        self,
        rows_W: Sequence[Tensor],
        specs: Sequence[TensorSpec],
        levels: Sequence[float],
        ctx: Context,
        workers: Sequence[int],
        purpose: str = "",
    ) -> Messages:
        if not kernels.usable(rows_W):
            return super().encode_all(rows_W, specs, levels, ctx, workers, purpose)
        from accordion_bench.compressors.sparse_rows import choose_nonzero, encode_chosen
        from accordion_bench.tensors.kernels.rows import Rows

        rows = Rows(rows_W)
        chosen = choose_nonzero(rows)
        messages = encode_chosen(rows, chosen, len(specs), header=HEADER)
        counts_W = torch.from_numpy(chosen.kept.astype(np.int32)).view(-1, len(specs), 1).view(torch.uint8)
        for t, own_W in enumerate(messages):
            scales_W = torch.linalg.vector_norm(rows_W[t], math.inf, dim=1, keepdim=True).float().view(torch.uint8)
            for own, scale, count in zip(own_W, scales_W, counts_W[:, t], strict=True):
                own[:4], own[4:HEADER] = scale, count
        return messages

    header = HEADER

    def entries(self, message: Tensor, spec: TensorSpec) -> int:
        return int(message[4:HEADER].clone().view(torch.int32))

    def encode(self, x_R: Tensor, spec: TensorSpec, level: float, ctx: Context, keys: Sequence[int]) -> list[Tensor]:
        messages = []
        for row in x_R:
            indices = row.nonzero()[:, 0]
            count = torch.tensor([len(indices)], dtype=torch.int32, device=row.device)
            header = torch.cat([row.abs().amax(0, keepdim=True).float().view(torch.uint8), count.view(torch.uint8)])
            entries = 2 * indices + (row[indices] > 0)
            messages.append(torch.cat([header, index_codes.encode_indices(entries[None], 2 * spec.numel)[0]]))
        return messages

    def add_decoded_(
        self, total_R: Tensor, message_AR: Tensor, spec: TensorSpec, level: float, ctx: Context, alpha: float = 1.0
    ) -> None:
        for message_R in message_AR:
            for total, message in zip(total_R, message_R, strict=True):
                header = message[:HEADER].clone()
                scale, count = header[:4].view(torch.float32), int(header[4:].view(torch.int32))
                entries = index_codes.decode_indices(message[None, HEADER:].contiguous(), 2 * spec.numel, count)[0]
                signs = (2 * (entries & 1) - 1).to(total.dtype)
                total.index_add_(0, entries >> 1, signs * scale.to(total.dtype), alpha=alpha)


class AdaComp(Wrapper):
    """G_w = e_w + g_w; H_w = G_w + g_w; update = mean_w S(G_w); e_w <- G_w - S(G_w).

    Each tensor is cut into bins of L_T consecutive coordinates, m_b = max |G_w| in bin b. S(G)_j = sign(G_j) mean_b m_b
    where |H_j| >= m_b, else 0: an entry is sent when one more gradient like this one would make it its bin's largest.
    How many these are adapts by itself; about 40 times fewer bytes for convolutions and 200 times for dense layers are
    reported. Error feedback is built in: sum of updates + mean e_w = sum of mean gradients. Tensors of one dimension
    travel whole.

    The message of a tensor has at most N / 4 bytes and is sized for that before the data are known: from 32 workers on
    S(G_w) travels by dense all-reduce.

    Args:
        bin_conv: L_T of convolutions (more than two dimensions); longer = fewer bytes.
        bin_dense: L_T of matrices.

    Source: Chen et al. 2018 (arXiv 1712.02679), as recalled: bins, the self-adjusting threshold and one parameter are
    from its abstract; G, H, the scale (the mean over the tensor's bins) and the two defaults are from memory.
    """

    traits = replace(
        SparseSigns.traits,
        no_error_feedback="e, what was not sent, is kept inside: around it, the same would be counted twice",
    )

    def __init__(self, bin_conv: int = 50, bin_dense: int = 500) -> None:
        super().__init__(SparseSigns())
        self.traits = type(self).traits
        self.bin_conv = checks.integer("bin_conv", bin_conv, at_least=1, instead=50)
        self.bin_dense = checks.integer("bin_dense", bin_dense, at_least=1, instead=500)

    def bin_size(self, spec: TensorSpec) -> int:
        """L_T of a tensor."""
        return max(1, min(self.bin_conv if spec.ndim > 2 else self.bin_dense, spec.numel))

    def init(self, specs: Sequence[TensorSpec], comm: Comm, like: Tensor) -> State:
        compressible = [spec for spec in specs if spec.ndim >= self.traits.min_ndim]
        residuals_W = Blocks(compressible, comm.local_workers, like).tensors
        return {spec.name: {"residual_W": e_W} for spec, e_W in zip(compressible, residuals_W, strict=True)}

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        if runs_on_device(xs_W):
            return self._on_device(xs_W, ctx, state, comm)
        residuals_W = [state.get(spec.name, {}).get("residual_W") for spec in ctx.specs]
        sent_W, lossy_W = list(xs_W), {}
        for i, e_W in enumerate(residuals_W):
            if e_W is not None and self.compresses(ctx.specs[i], ctx.levels[i]):
                lossy_W[i] = e_W.add_(xs_W[i]).flatten(1)
            elif e_W is not None:
                sent_W[i] = e_W + xs_W[i]
        if lossy_W:
            news_W = [xs_W[i].flatten(1) for i in lossy_W]
            chosen_W, scales_W = chosen(list(lossy_W.values()), news_W, [self.bin_size(ctx.specs[i]) for i in lossy_W])
            for t, w in (~scales_W.isfinite()).T.nonzero().tolist():
                raise non_finite(ctx, list(lossy_W)[t], comm.first_named + w)
            for i, own_W in zip(lossy_W, chosen_W, strict=True):
                sent_W[i] = own_W.view(xs_W[i].shape)
        out = self.inner.exchange(sent_W, ctx, state, comm)
        for i, e_W in enumerate(residuals_W):
            if e_W is None:
                continue
            if self.compresses(ctx.specs[i], ctx.levels[i]):
                e_W.sub_(sent_W[i])  # as the others decode it: the message loses nothing
            else:
                e_W.zero_()
        return out

    def _on_device(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        """The same for a whole bucket at once; nobody looks whether scales are finite."""
        residuals_W = {i: state[spec.name]["residual_W"] for i, spec in enumerate(ctx.specs) if spec.name in state}
        lossy = [i for i in residuals_W if self.compresses(ctx.specs[i], ctx.levels[i])]
        whole = [i for i in residuals_W if i not in lossy]
        sent_W = list(xs_W)
        if whole:
            sums_W = torch._foreach_add([residuals_W[i] for i in whole], [xs_W[i] for i in whole])
            for i, sum_W in zip(whole, sums_W, strict=True):
                sent_W[i] = sum_W
            torch._foreach_zero_([residuals_W[i] for i in whole])
        if lossy:
            grown_W, news_W = [residuals_W[i] for i in lossy], [xs_W[i].flatten(1) for i in lossy]
            torch._foreach_add_(as_rows(grown_W), [x.reshape(-1) for x_W in news_W for x in x_W])
            chosen_W = selected_on_device(grown_W, news_W, [self.bin_size(ctx.specs[i]) for i in lossy])
            for i, chosen in zip(lossy, chosen_W, strict=True):
                sent_W[i] = chosen.view(xs_W[i].shape)
        out = self.inner.exchange(sent_W, ctx, state, comm)
        if lossy:
            torch._foreach_sub_(as_rows(grown_W), as_rows(chosen_W))
        return out

    def fed(self, xs_W: Sequence[Tensor], ctx: Context, state: State, workers: int) -> list[Tensor]:
        residuals_W = [state.get(spec.name, {}).get("residual_W", 0) for spec in ctx.specs]
        return [x_W + e_W for x_W, e_W in zip(xs_W, residuals_W, strict=True)]

    @torch.no_grad()
    def probe(self, xs_W: Sequence[Tensor], ctx: Context, state: State, workers: int) -> Probe:
        """Of e + g; what would be lost is the next e."""
        after, ps_W = copy.deepcopy(state), self.fed(xs_W, ctx, state, workers)
        self.exchange(xs_W, ctx, after, alone(xs_W))

        def lost(i: int) -> Tensor:
            name = ctx.specs[i].name
            return after[name]["residual_W"] if name in state else torch.zeros_like(ps_W[i])

        return self.probe_of(ps_W, lost, ctx, workers)

    def probe_fed(self, xs_W: Sequence[Tensor], ctx: Context, state: State, workers: int) -> Probe:
        raise NotImplementedError("which entries are sent depends on the newest gradient, too")


def chosen(grown_W: Sequence[Tensor], news_W: Sequence[Tensor], sizes: Sequence[int]) -> tuple[list[Tensor], Tensor]:
    """What is sent of tensors G [W, N] after the newest gradients, in bins of these sizes; scales [W, T]."""
    if kernels.usable([*grown_W, *news_W]):
        from accordion_bench.tensors.kernels.bins import send_lifted

        return send_lifted(grown_W, news_W, sizes)
    found = [selected(*one) for one in zip(grown_W, news_W, sizes, strict=True)]
    sent_W = [signs_W * scales_W.to(signs_W.dtype)[:, None] for signs_W, scales_W in found]
    return sent_W, torch.stack([scales_W for _, scales_W in found], dim=1)


def selected(grown_W: Tensor, x_W: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """What is sent of G = `grown_W` [W, ...] after the gradient `x_W`, in bins of `size`.

    Returns:
        signs [W, ...], 0 where nothing is sent; scales [W], numbers of float32.
    """
    n = x_W[0].numel()
    bins_W, news_W = (pad(t_W.flatten(1), (0, -n % size)).unflatten(1, (-1, size)) for t_W in (grown_W, x_W))
    largest_W = bins_W.abs().amax(2)
    chosen_W = (bins_W + news_W).abs_() >= largest_W[:, :, None]
    signs_W = bins_W.sign().mul_(chosen_W).flatten(1)[:, :n]
    return signs_W.view(grown_W.shape), largest_W.double().mean(1).float()


def selected_on_device(grown_W: Sequence[Tensor], news_W: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """What is sent of some tensors, signs times scale: `selected` for all of them in launches that grow with bin sizes.

    Args:
        grown_W: G, [W, ...].
        news_W: the newest gradients.
        sizes: of each tensor's bins.

    Returns:
        rows [W, n] for each tensor.
    """
    W, device = len(grown_W[0]), grown_W[0].device
    order = sorted(range(len(sizes)), key=lambda t: sizes[t])
    numels = [grown_W[t][0].numel() for t in order]
    counts = [-(-n // sizes[t]) for t, n in zip(order, numels, strict=True)]
    zeros_W = grown_W[0].new_zeros(W, max(sizes))

    def padded(xs_W: Sequence[Tensor]) -> Tensor:
        pairs = ((xs_W[t].flatten(1), zeros_W[:, : -n % sizes[t]]) for t, n in zip(order, numels, strict=True))
        return torch.cat([piece_W for pair in pairs for piece_W in pair], dim=1)

    def in_bins(row_W: Tensor) -> list[Tensor]:
        """Rows of padded tensors as bins [W, bins, size], one tensor of bins for each size."""
        of_size = {
            size: sum(n for t, n in zip(order, counts, strict=True) if sizes[t] == size) for size in sorted(set(sizes))
        }
        parts_W = row_W.split([size * count for size, count in of_size.items()], dim=1)
        return [part_W.unflatten(1, (-1, size)) for size, part_W in zip(of_size, parts_W, strict=True)]

    row_W = padded(grown_W)
    largest_W = [bins_W.amax(2) for bins_W in in_bins(row_W.abs())]
    lifted_W = in_bins(padded(news_W).add_(row_W).abs_())
    for bins_W, lifted, largest in zip(in_bins(row_W.sign_()), lifted_W, largest_W, strict=True):
        bins_W.mul_(lifted >= largest[:, :, None])
    bins = upload(torch.tensor(counts * W), device)
    sums = torch.segment_reduce(torch.cat(largest_W, dim=1).double().flatten(), "sum", lengths=bins, unsafe=True)
    scales = (sums / bins).float().to(row_W.dtype)
    tensor = torch.searchsorted(bins.cumsum(0), torch.arange(W * sum(counts), device=device), right=True)
    of_bins_W = scales.index_select(0, tensor).view(W, -1)
    for bins_W, scale_W in zip(in_bins(row_W), of_bins_W.split([x.shape[1] for x in largest_W], dim=1), strict=True):
        bins_W.mul_(scale_W[:, :, None])
    widths = [sizes[t] * count for t, count in zip(order, counts, strict=True)]
    parts_W = dict(zip(order, row_W.split(widths, dim=1), strict=True))
    return [parts_W[t][:, : grown_W[t][0].numel()] for t in range(len(sizes))]
