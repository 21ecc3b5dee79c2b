"""TopK: send the largest entries of each tensor, or of each tile of a matrix, optionally with two bits per value.

Tensor suffixes: A all workers.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accordion_bench.codecs.bucket import Bucket, Context, Target
from accordion_bench.codecs.engine import Engine, Selection
from accordion_bench.codecs.engines import engine_for
from accordion_bench.codecs.layout import KEPT, Layout, Message
from accordion_bench.codecs.matrix_tiles import BINS, TileForm, Tiles, in_order
from accordion_bench.codecs.packed_codes import floats_in, unpack_codes
from accordion_bench.codecs.selection import kept_at_least, kept_entries
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import Exchanged, State
from accordion_bench.compressors.description import FEEDBACK, TRAVEL
from accordion_bench.compressors.gathered import target_like
from accordion_bench.compressors.sparse import Sparse
from accordion_bench.options.checks import ValueRefused
from accordion_bench.options.component import Idle, RunContext
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.plan import TensorSpec


class TiledMessages:
    """Messages of the k = ceil(density N) largest magnitudes per tile; ties are resolved in favour of the lower index.

    Tiles are a x b: each side is the largest divisor of its dimension, in the matrix view, that is at most `chunk`.
    See `codecs.matrix_tiles.encode_largest` for values of two bits (`value_bits`).

    Source: Sarfi et al. 2025, SparseLoCo (arXiv 2508.15706), and its authors' code.
    """

    def __init__(self, chunk: int, value_bits: int | None) -> None:
        self.chunk, self.coded = chunk, value_bits is not None

    def forms(self, specs: Sequence[TensorSpec], densities: Sequence[float]) -> list[TileForm]:
        """Return the formats of tensors' messages."""
        pairs = zip(specs, densities, strict=True)
        return [form_of(spec, self.chunk, density, self.coded) for spec, density in pairs]

    def contraction(self, spec: TensorSpec, density: float) -> float | None:
        """Return k / N for exact values; None with two bits, where the error depends on the kept values."""
        (form,) = self.forms([spec], [density])
        return None if self.coded else form.k / form.tiles.numel

    def layout(self, specs: Sequence[TensorSpec], densities: Sequence[float]) -> Layout:
        return tiled_layout(tuple(spec.numel for spec in specs), tuple(self.forms(specs, densities)))

    def encode_bucket(self, bucket: Bucket) -> Message:
        layout = self.layout(bucket.specs, bucket.levels)
        message = Message.empty(layout, len(bucket.workers), bucket.rows_W[0].device)
        engine_for(bucket.rows_W).encode_tiles(bucket, message, self.forms(bucket.specs, bucket.levels))
        return message

    def add_bucket_(self, target: Target, message: Message, bucket: Bucket) -> None:
        engine_for(target.rows_R).add_tiles(target, message, self.forms(bucket.specs, bucket.levels))

    def clip_(self, message_A: Tensor, specs: Sequence[TensorSpec], densities: Sequence[float]) -> None:
        """Scale v_w by min(1, median_A ||v|| / ||v_w||), tensor by tensor, in all workers' messages [A, B], in place.

        The median of an even number of workers is the lower middle value. All workers compute the same factors.
        """
        start = 0
        for form in self.forms(specs, densities):
            size = sum(form.parts)
            own_A, start = message_A[:, start : start + size], start + size
            numbers_A, _, codes_A = own_A.split(form.parts, dim=1)
            values_A = floats_in(numbers_A)
            squares_A = values_A.double().square()
            if form.coded:
                squares_A = squares_A.gather(1, unpack_codes(codes_A, BINS, form.kept).long())
            norms_A = in_order(squares_A).sqrt()
            median = norms_A.median()
            factors_A = torch.where(norms_A > median, median / norms_A, 1.0).float()
            numbers_A.copy_((values_A * factors_A[:, None]).view(torch.uint8))


@functools.lru_cache(4096)
def form_of(spec: TensorSpec, chunk: int, density: float, coded: bool) -> TileForm:
    """Return the format of a tensor's message; cached because each step needs it several times."""
    tiles = Tiles.of(spec, chunk)
    return TileForm(tiles, kept_at_least(tiles.numel, density), coded)


@functools.lru_cache(maxsize=KEPT)
def tiled_layout(numels: tuple[int, ...], forms: tuple[TileForm, ...]) -> Layout:
    """Return the layout of numbers, indices and codes of each tensor; cached."""
    numbers, indices, codes = zip(*(form.parts for form in forms), strict=True) if forms else ((), (), ())
    fields = {
        "numbers": (torch.float32, [nbytes // 4 for nbytes in numbers]),
        "indices": (torch.uint8, indices),
        "codes": (torch.uint8, codes),
    }
    return Layout(numels, [max(1, n) for n in numels], fields)


def _idle(cls: Any, options: Config, context: RunContext) -> Idle:
    yield from Sparse.description.idle(cls, options, context)
    if context.workers == 1:
        yield "reduce", "one worker's mean is its sum"
        yield "clip", "there is one worker"
    if options.get("chunk") is not None:
        yield "count", "compressor.chunk is set: at least one entry of each tile is kept"


def _label_suffix(options: Config) -> str:
    over = ", mean over senders" if options.get("reduce") == "senders" else ""
    if options.get("chunk") is None:
        return (" along a tree" if options.get("collective") == "tree" else "") + over
    bits = f", {options['value_bits']} bits" if options.get("value_bits") else ""
    return f" of tiles{bits}{', clipped' if options.get('clip') == 'median' else ''}{over}"


def _contraction(compressor: "TopK", spec: TensorSpec, level: float) -> float | None:
    if compressor.tiles is not None:
        return compressor.tiles.contraction(spec, level)
    return compressor.kept(spec, level) / max(1, spec.numel)


def _paper_floats(compressor: "TopK", spec: TensorSpec, level: float | None, workers: int) -> int | None:
    """Return 2 A floor(K numel): an index counts as one float, and every worker's message counts. None for tiles."""
    if level is None or spec.ndim < compressor.traits.min_ndim:
        return spec.numel
    if compressor.tiles is not None:
        return None
    return 2 * workers * kept_entries(spec.numel, level, 0)


@with_options
class TopK(Sparse):
    """update = mean_w TopK(g_w): of each tensor the k = density x numel entries of largest magnitude.

    The message is k fp32 values and their indices in the smaller code of `index_codes`. With `chunk` each tile of a
    matrix is compressed by itself, see `TiledMessages`: k = ceil(density tile), indices of ceil(log2 tile) bits.

    `floor` is Accordion's count, with which k may be 0. `sum` over the workers is also Accordion's; with it, compressed
    tensors have A times the learning rate. `senders` is the mean over the workers that sent a coordinate, as in
    SparseLoCo's code: if s of A workers did, A / s times the mean. Each 2-bit value is one of four values, which the
    message contains. `median` clips tensor by tensor: v_w <- v_w min(1, median_A ||v|| / ||v_w||); the residual keeps
    the clipped part. With `senders` or `median`, messages are gathered at any number of workers, because every worker
    needs all of them.

    Ties are resolved in favour of the lower index. Source: Aji and Heafield 2017; Stich et al. 2018; tiles: Sarfi et
    al. 2025 (SparseLoCo).
    """

    density: float = option("share kept; lower density = more compression", default=0.1, above=0, at_most=1)
    count: str = option(default="at_least_one", choices=("at_least_one", "floor"))
    reduce: str = option(
        "over all workers; senders: mean over the workers that sent a coordinate (SparseLoCo's code)",
        default="mean",
        choices=("mean", "sum", "senders"),
    )
    chunk: int | None = option(
        "largest side of the tiles whose largest entries are sent; null = whole tensors, SparseLoCo 64",
        default=None,
        at_least=1,
        instead=64,
    )
    value_bits: int | None = option(
        "null = float32; 2 = four values per tensor, only with chunk", default=None, choices=(2,)
    )
    clip: str = option(
        "none; median: messages are scaled down to the workers' median norm, only with chunk",
        default="none",
        choices=("none", "median"),
    )

    chosen_as = {
        "topk": Choice(
            "the largest entries of each tensor",
            {"error_feedback": True},
            beside=(*FEEDBACK, "residual_decay", "collective", *TRAVEL),
        )
    }

    description = replace(
        Sparse.description,
        kernels=("cpu", "cuda"),
        advised_levels=(0.01, 0.001),
        collective_reason="every worker selects different entries, and a sum of sparse tensors is not sparse",
        idle=_idle,
        label_suffix=_label_suffix,
        paper_floats=_paper_floats,
        claims=replace(
            Sparse.description.claims,
            other_options=(
                {"chunk": 64},
                {"chunk": 64, "value_bits": 2},
                {"chunk": 64, "value_bits": 2, "clip": "median"},
            ),
            contraction=_contraction,
        ),
    )

    traits = replace(
        Sparse.traits,
        knob="density",
        pair=(0.10, 0.99),
        min_ndim=2,
        whole_model=True,
        collectives=("all_gather", "two_way", "tree"),
        replays=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.traits = replace(self.traits, reduces=self.reduce)
        self.tiles: TiledMessages | None = None
        if self.chunk is not None:
            self.tiles = TiledMessages(self.chunk, self.value_bits)
            reason = "a worker of two_way owns pieces of vectors, which have no tiles"
            self.traits = replace(self.traits, collectives=("all_gather",), whole_model=False)
            self.description = replace(self.description, collective_reason=reason)
        elif self.value_bits is not None:
            raise ValueRefused("value_bits", "{null} where chunk is {null}", self.value_bits, None)
        elif self.clip != "none":
            raise ValueRefused("clip", "none where chunk is {null}", self.clip, "none")
        elif self.reduce == "senders":
            reason = "every worker must know which workers sent a coordinate"
            self.traits = replace(self.traits, collectives=("all_gather",))
            self.description = replace(self.description, collective_reason=reason)

    def kept(self, spec: TensorSpec, level: float) -> int:
        """Return k, the number of entries that one worker sends."""
        return kept_entries(spec.numel, level, 1 if self.count == "at_least_one" else 0)

    def compresses(self, spec: TensorSpec, level: float | None) -> bool:
        return super().compresses(spec, level) and (self.tiles is None or spec.numel > 0)

    def most_entries(self, spec: TensorSpec, level: float) -> int:
        return self.kept(spec, level)

    def choose(self, engine: Engine, bucket: Bucket) -> Selection:
        pairs = zip(bucket.specs, bucket.levels, strict=True)
        return engine.largest(bucket.rows_W, [self.kept(spec, level) for spec, level in pairs])

    def layout(self, specs: Sequence[TensorSpec], levels: Sequence[float]) -> Layout:
        return super().layout(specs, levels) if self.tiles is None else self.tiles.layout(specs, levels)

    def encode_bucket(self, bucket: Bucket) -> Message:
        return super().encode_bucket(bucket) if self.tiles is None else self.tiles.encode_bucket(bucket)

    def add_bucket_(self, target: Target, message: Message, bucket: Bucket) -> None:
        if self.tiles is None:
            super().add_bucket_(target, message, bucket)
        else:
            self.tiles.add_bucket_(target, message, bucket)

    def pays(self, spec: TensorSpec, level: float, workers: int) -> bool:
        return self.clip == "median" or self.reduce == "senders" or super().pays(spec, level, workers)

    def combined(self, likes: Sequence[Tensor], from_all: Message, bucket: Bucket) -> Sequence[Tensor]:
        if self.reduce != "senders":
            return super().combined(likes, from_all, bucket)
        sums, counts = target_like(likes, False), target_like(likes, False)
        self.add_bucket_(sums, from_all, bucket)
        self.add_bucket_(counts, from_all.ones("values" if self.tiles is None else "numbers"), bucket)
        senders = torch._foreach_clamp_min(list(counts.rows_R), 1)
        return torch._foreach_div(list(sums.rows_R), list(senders))

    def gather(self, message: Message, bucket: Bucket, comm: Comm) -> Message:
        from_all = super().gather(message, bucket, comm)
        if self.tiles is not None and self.clip == "median":
            self.tiles.clip_(from_all.rows, bucket.specs, bucket.levels)
            # the local workers' messages are clipped as well
            comm.copy_local_rows_(message.rows[:, : from_all.rows.shape[1]], from_all.rows)
        return from_all

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        out = super().exchange(xs_W, ctx, state, comm)
        compressed = [self.compresses(spec, level) for spec, level in zip(ctx.specs, ctx.levels, strict=True)]
        if self.reduce == "sum" and any(compressed):
            torch._foreach_mul_([u for u, c in zip(out.update, compressed, strict=True) if c], comm.workers)
        return out
