"""TopK: the largest entries of each tensor."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accordion_bench.codecs import index_codes
from accordion_bench.codecs.bucket import Bucket, Context
from accordion_bench.codecs.layout import Message
from accordion_bench.codecs.section_codes import SectionCodes, layout_of
from accordion_bench.codecs.selection import kept_entries, top_indices, values_at
from accordion_bench.codecs.top_keys import Part, top_positions
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.base import Exchanged, State
from accordion_bench.compressors.chunked_topk import TiledMessages
from accordion_bench.compressors.oneshot import OneShot, put_
from accordion_bench.compressors.sparse_on_device import (
    add_in_order_,
    as_bytes,
    codes_apart,
    decode_values,
    encode_values,
    exchanged,
    flattened,
    runs_on_device,
)
from accordion_bench.options import checks
from accordion_bench.options.component import Idle, Surroundings
from accordion_bench.options.instantiate import Config
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors import kernels


class TopK(OneShot):
    """update = mean_w TopK(g_w): of each tensor the k = density x numel entries of largest magnitude.

    The message is k fp32 values and their indices in the smaller code of `wire`. With `chunk` it is made of each tile
    of a matrix by itself, see `chunked_topk.TiledMessages`: k = ceil(density tile), indices of ceil(log2 tile) bits.

    Args:
        density: share of entries kept, in (0, 1]; lower density = more compression.
        count: `at_least_one`: k = max(1, floor(density numel)); `floor`: k may be 0 (Accordion's code).
        reduce: `mean` over workers, or `sum` (Accordion's code: compressed tensors then see A times the learning rate).
        chunk: largest side of a tile; null = no tiles.
        value_bits: 2 = each value as one of four, which the message brings; null = float32.
        clip: `none`, or `median`: v_w <- v_w min(1, median_A ||v|| / ||v_w||), tensor by tensor; the residual keeps
            what is cut off. Messages are then gathered at any number of workers: everybody must see all norms.

    Ties go to the lower index. Source: Aji and Heafield 2017; Stich et al. 2018; tiles: Sarfi et al. 2025 (SparseLoCo).
    """

    traits = replace(
        OneShot.traits,
        kernels=("cpu",),
        knob="density",
        pair=(0.10, 0.99),
        tried=(0.01, 0.001),
        min_ndim=2,
        whole_model=True,
        replays=True,
        collective_reason="every worker keeps other entries, and a sum of sparse tensors is not sparse",
    )
    also = ({"chunk": 64}, {"chunk": 64, "value_bits": 2}, {"chunk": 64, "value_bits": 2, "clip": "median"})

    def __init__(
        self,
        density: float = 0.1,
        count: str = "at_least_one",
        reduce: str = "mean",
        chunk: int | None = None,
        value_bits: int | None = None,
        clip: str = "none",
    ) -> None:
        self.density = self.check_level("density", density)
        self.count = checks.choice("count", count, ["at_least_one", "floor"])
        self.reduce = checks.choice("reduce", reduce, ["mean", "sum"])
        self.traits = replace(self.traits, reduces=self.reduce)
        self.clip = checks.choice("clip", clip, ["none", "median"])
        if value_bits not in (None, 2) or isinstance(value_bits, bool):
            instead = None if chunk is None else 2
            raise checks.ValueRefused("value_bits", "null, or 2 beside chunk", value_bits, instead)
        self.tiles: TiledMessages | None = None
        if chunk is not None:
            self.tiles = TiledMessages(checks.integer("chunk", chunk, at_least=1, instead=64), value_bits)
            reason = "a worker of two_way owns pieces of vectors, which have no tiles"
            self.traits = replace(self.traits, collectives=("all_gather",), collective_reason=reason, whole_model=False)
        elif value_bits is not None:
            raise checks.ValueRefused("value_bits", "null where chunk is null", value_bits, None)
        elif self.clip != "none":
            raise checks.ValueRefused("clip", "none where chunk is null", clip, "none")

    @classmethod
    def idle(cls, options: Config, around: Surroundings) -> Idle:
        yield from super().idle(options, around)
        if around.workers == 1:
            yield "reduce", "one worker's mean is its sum"
            yield "clip", "there is one worker"
        if options.get("chunk") is not None:
            yield "count", "compressor.chunk is set: at least one entry of each tile is kept"

    @classmethod
    def told(cls, options: Config) -> str:
        if options.get("chunk") is None:
            return ""
        bits = f", {options['value_bits']} bits" if options.get("value_bits") else ""
        return f" of tiles{bits}{', clipped' if options.get('clip') == 'median' else ''}"

    def check_level(self, key: str, value: Any) -> float:
        return checks.number(key, value, above=0, at_most=1, instead=0.1)

    def kept(self, spec: TensorSpec, level: float) -> int:
        """k, the number of entries that one worker sends."""
        return kept_entries(spec.numel, level, 1 if self.count == "at_least_one" else 0)

    def compresses(self, spec: TensorSpec, level: float | None) -> bool:
        return super().compresses(spec, level) and (self.tiles is None or spec.numel > 0)

    def contraction(self, spec: TensorSpec, level: float) -> float | None:
        if self.tiles is not None:
            return self.tiles.contraction(spec, level)
        return self.kept(spec, level) / max(1, spec.numel)

    def message_bytes(self, spec: TensorSpec, level: float) -> int:
        if self.tiles is not None:
            return self.tiles.message_bytes(spec, level)
        return index_codes.sparse_bytes(spec.numel, self.kept(spec, level))

    def gathers(self, spec: TensorSpec, level: float, workers: int) -> bool:
        return self.clip == "median" or super().gathers(spec, level, workers)

    def paper_floats(self, spec: TensorSpec, level: float | None, workers: int) -> int | None:
        """2 A floor(K numel): an index counts as one float, and every worker's message; tiles are not in the paper."""
        if level is None or spec.ndim < self.traits.min_ndim:
            return spec.numel
        if self.tiles is not None:
            return None
        return 2 * workers * kept_entries(spec.numel, level, 0)

    def encode(self, x_R: Tensor, spec: TensorSpec, level: float, ctx: Context, keys: Sequence[int]) -> Tensor:
        if self.tiles is not None:
            return self.tiles.encode(x_R, spec, level)
        k = self.kept(spec, level)
        if x_R.device.type != "cpu":
            positions_R = top_positions(x_R, [Part(0, 1, spec.numel, k)])
            return encode_values(
                x_R.gather(1, positions_R), positions_R, SectionCodes(layout_of((spec.numel,), (k,)), x_R.device)
            )
        indices_R = top_indices(x_R, k)
        return index_codes.encode_sparse(indices_R, torch.stack(values_at(x_R, list(indices_R))), spec.numel)

    def add_decoded_(
        self, total_R: Tensor, message_AR: Tensor, spec: TensorSpec, level: float, ctx: Context, alpha: float = 1.0
    ) -> None:
        if self.tiles is not None:
            self.tiles.add_decoded_(total_R, message_AR, spec, level, alpha)
            return
        k = self.kept(spec, level)
        if total_R.device.type == "cpu":
            index_codes.add_sparse_(total_R, message_AR, k, alpha)
            return
        codes = SectionCodes(layout_of((spec.numel,), (k,)), total_R.device)
        values_AR, positions_AR = decode_values(message_AR.flatten(0, 1), codes)
        shape = (*message_AR.shape[:2], k)
        for positions_R, values_R in zip(positions_AR.view(shape), (values_AR * alpha).view(shape), strict=True):
            total_R.scatter_add_(1, positions_R, values_R.to(total_R.dtype))

    def encode_into_(
        self,
        message_W: Tensor,
        starts: Sequence[int],
        rows_W: Sequence[Tensor],
        specs: Sequence[TensorSpec],
        level: float,
        ctx: Context,
        workers: Sequence[int],
        purpose: str = "",
    ) -> None:
        if self.tiles is not None:
            if kernels.usable(rows_W):
                self.tiles.encode_into_(message_W, starts, rows_W, specs, level)
            else:
                super().encode_into_(message_W, starts, rows_W, specs, level, ctx, workers, purpose)
            return
        kept = [self.kept(spec, level) for spec in specs]
        if kernels.usable(rows_W):
            from accordion_bench.compressors.sparse_rows import encode_largest_

            encode_largest_(message_W, starts, rows_W, kept)
            return
        if not runs_on_device(rows_W):
            super().encode_into_(message_W, starts, rows_W, specs, level, ctx, workers, purpose)
            return
        sizes = [spec.numel for spec in specs]
        x_W, codes = torch.cat(list(rows_W), dim=1), codes_apart(sizes, kept, rows_W[0].device)
        firsts = itertools.accumulate([0, *sizes[:-1]])
        positions_W = top_positions(
            x_W, [Part(*part) for part in zip(firsts, [1] * len(specs), sizes, kept, strict=True)]
        )
        value_bytes = as_bytes(x_W.gather(1, positions_W)).split([4 * k for k in kept], dim=1)
        pairs = zip(value_bytes, codes.encode(positions_W).split(codes.nbytes, dim=1), strict=True)
        places = [at for start, k in zip(starts, kept, strict=True) for at in (start, start + 4 * k)]
        put_(message_W, places, [part_W for pair in pairs for part_W in pair])

    def add_from_(
        self,
        targets_R: Sequence[Tensor],
        message_A: Tensor,
        starts: Sequence[int],
        specs: Sequence[TensorSpec],
        level: float,
        ctx: Context,
        alpha: float = 1.0,
        divisor: int = 1,
    ) -> None:
        if self.tiles is not None:
            if kernels.usable(targets_R):
                self.tiles.add_from_(targets_R, message_A, starts, specs, level, alpha, divisor)
            else:
                super().add_from_(targets_R, message_A, starts, specs, level, ctx, alpha, divisor)
            return
        kept, rows = [self.kept(spec, level) for spec in specs], len(targets_R[0])
        if kernels.usable(targets_R):
            from accordion_bench.compressors.sparse_rows import add_sparse_

            add_sparse_(targets_R, message_A, starts, kept, alpha, divisor)
            return
        if not runs_on_device(targets_R):
            super().add_from_(targets_R, message_A, starts, specs, level, ctx, alpha, divisor)
            return
        sizes = [spec.numel for spec in specs]
        codes = codes_apart(sizes, kept, message_A.device)
        ends = [start + self.message_bytes(spec, level) for start, spec in zip(starts, specs, strict=True)]
        heads = [message_A[:, start : start + 4 * k] for start, k in zip(starts, kept, strict=True)]
        tails = [message_A[:, start + 4 * k : end] for start, end, k in zip(starts, ends, kept, strict=True)]
        values_A, positions_A = decode_values(torch.cat(heads + tails, dim=1), codes)
        total_R = torch.zeros(rows, sum(sizes), device=values_A.device)
        for a, (positions, values) in enumerate(zip(positions_A, values_A, strict=True)):
            total_R[a % rows].scatter_add_(0, positions, values)
        torch._foreach_add_(list(targets_R), list(total_R.split(sizes, dim=1)), alpha=alpha)
        if divisor != 1:
            torch._foreach_div_(list(targets_R), divisor)

    def _on_device(self, xs_W: Sequence[Tensor], ctx: Context, comm: Comm) -> Exchanged:
        """The same for a whole bucket at once."""
        flat, gathered = flattened(self, ctx, comm.workers)
        if not flat.ids:
            return super().exchange(xs_W, ctx, {}, comm)
        kept = [self.kept(ctx.specs[i], ctx.levels[i]) for i in flat.ids]  # type: ignore[arg-type]
        x_W = flat.rows(xs_W)
        positions_W = top_positions(x_W, flat.parts(kept))
        values_W = x_W.gather(1, positions_W).float()

        def summed() -> Tensor:
            count = sum(start < gathered for start in flat.starts)
            codes = SectionCodes(layout_of(tuple(flat.sizes[:count]), tuple(kept[:count])), x_W.device)
            k = sum(codes.kept)
            message_W = encode_values(values_W[:, :k], positions_W[:, :k], codes)
            message_A = comm.all_gather(message_W) if k else message_W.new_empty(comm.workers, 0)
            values_A, positions_A = decode_values(message_A, codes)
            return add_in_order_(x_W.new_zeros(gathered), list(positions_A), list(values_A))

        def own_rows() -> Tensor:
            return torch.zeros_like(x_W).scatter_(1, positions_W, values_W.to(x_W.dtype))

        return exchanged(xs_W, flat, gathered, own_rows, summed, comm)

    def gather(self, message: Message, bucket: Bucket, comm: Comm) -> Message:
        everyones = super().gather(message, bucket, comm)
        if self.tiles is not None and self.clip == "median":
            self.tiles.clip_(everyones.rows, bucket.specs, bucket.levels)
            # what this process has sent is cut, too
            comm.put_own_(message.rows[:, : everyones.rows.shape[1]], everyones.rows)
        return everyones

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        on_device = self.tiles is None and runs_on_device(xs_W)
        out = self._on_device(xs_W, ctx, comm) if on_device else super().exchange(xs_W, ctx, state, comm)
        if self.reduce == "mean":
            return out
        compressed = [self.compresses(spec, level) for spec, level in zip(ctx.specs, ctx.levels, strict=True)]
        if on_device and any(compressed):
            torch._foreach_mul_([u for u, c in zip(out.update, compressed, strict=True) if c], comm.workers)
            return out
        update = [u * comm.workers if c else u for u, c in zip(out.update, compressed, strict=True)]
        return Exchanged(update, out.subtract_sent_)
