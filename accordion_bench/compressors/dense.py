"""Dense codes: base class of compressors that send a small integer per coordinate and a scale per block.

Tensor suffixes: W local workers, A senders, M blocks of all tensors.
"""

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from accordion_bench.codecs.bucket import Bucket, NonFiniteRow, Target, by_level
from accordion_bench.codecs.coding import Coding
from accordion_bench.codecs.engines import engine_for
from accordion_bench.codecs.layout import KEPT, Layout, Message
from accordion_bench.codecs.packed_codes import code_bytes, unpack_codes
from accordion_bench.compressors.entropy import coded_bytes
from accordion_bench.compressors.gathered import Gathered
from accordion_bench.plan import TensorSpec

Codebooks = Mapping[int, tuple[float, ...]]
NONE_FITTED: Codebooks = {}


class DenseCodes(Gathered):
    """C(v)_i = s_b value(code(v_i, s_b)), where s_b is the scale of the block b that contains i.

    A subclass defines the mapping of coordinates to codes (`coding`) and the number of coordinates per scale
    (`block_of`).
    """

    balanced: bool = False  # whether the blocks of a tensor are of equal size
    takes_empty = True

    def coding(self, level: float, fitted: Codebooks = NONE_FITTED) -> Coding:
        """Return the mapping of coordinates to codes at a level, with the codebooks that a policy fitted."""
        raise NotImplementedError

    def block_of(self, spec: TensorSpec) -> int | None:
        """Return the number of coordinates that share a scale; None = the whole tensor."""
        return None

    def shared_scales(self, bucket: Bucket) -> Tensor | None:
        """Return scales of whole tensors that every worker knows, float32 [T]; None if messages contain scales."""
        return None

    def takes_feedback(self, spec: TensorSpec, level: float | None, workers: int) -> bool:
        return self.compresses(spec, level)

    def blocks(self, spec: TensorSpec) -> int:
        """Return the coordinates per block of this tensor, at least 1."""
        n, size = spec.numel, self.block_of(spec)
        if size is None or n <= size:
            return max(n, 1)
        return -(-n // -(-n // size)) if self.balanced else size

    def layout(self, specs: Sequence[TensorSpec], levels: Sequence[float]) -> Layout:
        codings = {level: self.coding(level) for level in dict.fromkeys(levels)}
        kinds = tuple(codings[level].kinds for level in levels)
        names = next(iter(codings.values())).fields if codings else ("codes",)
        return dense_layout(tuple(spec.numel for spec in specs), tuple(map(self.blocks, specs)), kinds, names)

    def encode_bucket(self, bucket: Bucket) -> Message:
        layout = self.layout(bucket.specs, bucket.levels)
        message = Message.empty(layout, len(bucket.workers), bucket.rows_W[0].device)
        engine = engine_for(bucket.rows_W)
        for level, ks in by_level(bucket.levels):
            part, coding = bucket.take(ks), self.coding(level, bucket.codebooks)
            try:
                engine.encode_dense(part, message.take(ks), coding, self.shared_scales(part))
            except NonFiniteRow as bad:
                worker, k = divmod(bad.row, len(ks))
                raise NonFiniteRow(worker * len(bucket.specs) + ks[k]) from None
        return message

    def encode_fed(self, bucket: Bucket) -> Message:
        return self.encode_bucket(bucket)

    def add_bucket_(self, target: Target, message: Message, bucket: Bucket) -> None:
        engine = engine_for(target.rows_R)
        for level, ks in by_level(bucket.levels):
            part, coding = bucket.take(ks), self.coding(level, bucket.codebooks)
            engine.add_dense(target.take(ks), message.take(ks), coding, self.shared_scales(part))

    def saved_bytes(self, message: Message, bucket: Bucket) -> int:
        saved, spans = 0, message.layout.fields["codes"].spans
        for spec, level, (start, stop) in zip(bucket.specs, bucket.levels, spans, strict=True):
            book = self.coding(level, bucket.codebooks).values
            codes_A = unpack_codes(message.rows[:, start:stop].contiguous(), len(book), spec.numel)
            saved += sum(stop - start - coded_bytes(row, book, self.entropy) for row in codes_A)
        return saved


@functools.lru_cache(maxsize=4 * KEPT)
def dense_layout(
    numels: tuple[int, ...], blocks: tuple[int, ...], kinds: tuple[int, ...], names: tuple[str, ...]
) -> Layout:
    """Return the layout of block scales, packed codes and, if they are a separate field, signs; cached.

    Args:
        numels, blocks, kinds: coordinates, coordinates per block and K, the number of different codes, per tensor.
        names: names of the fields.
    """
    counts = [-(-n // size) for n, size in zip(numels, blocks, strict=True)]
    streams = {
        "codes": [code_bytes(n, K) for n, K in zip(numels, kinds, strict=True)],
        "signs": [code_bytes(n, 2) for n in numels],
    }
    fields = {name: (torch.uint8, streams[name]) if name in streams else (torch.float32, counts) for name in names}
    return Layout(numels, blocks, fields)
