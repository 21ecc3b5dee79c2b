"""Dense codes: base class of compressors with a small integer per coordinate and a scale per block; entropy coding.

Tensor suffixes: W local workers, A senders, M blocks of all tensors. Source of the entropy codes: Huffman 1952; Elias
1975; asymmetric numeral systems: Duda 2013 (arXiv 1311.2540).
"""

import functools
import heapq
import importlib.util
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accordion_bench.codecs.bucket import Bucket, NonFiniteRow, Target, by_level
from accordion_bench.codecs.coding import Coding
from accordion_bench.codecs.engines import engine_for
from accordion_bench.codecs.layout import KEPT, Layout, Message
from accordion_bench.codecs.packed_codes import code_bytes, unpack_codes
from accordion_bench.compressors.gathered import Gathered
from accordion_bench.options import checks
from accordion_bench.plan import TensorSpec


def huffman_lengths(counts: Tensor) -> Tensor:
    """Return the bits per symbol [K] of an optimal prefix code, which the lengths determine (canonical Huffman).

    Args:
        counts: [K], frequency or probability of each symbol; above 0 if the code book must contain the symbol.

    Returns int64 [K]: 0 for a symbol that does not occur, 1 for the only symbol.
    """
    lengths = [0] * counts.numel()
    # The second entry breaks ties by age, which gives shallow trees and the same lengths on every rank.
    heap: list[tuple[Any, int, list[int]]] = [(n, i, [i]) for i, n in enumerate(counts.tolist()) if n > 0]
    if len(heap) == 1:
        lengths[heap[0][1]] = 1
    heapq.heapify(heap)
    for age in range(len(lengths), len(lengths) + len(heap) - 1):
        (n, _, some), (m, _, others) = heapq.heappop(heap), heapq.heappop(heap)
        for symbol in some + others:
            lengths[symbol] += 1
        heapq.heappush(heap, (n + m, age, some + others))
    return torch.tensor(lengths, dtype=torch.int64, device=counts.device)


def huffman_bits(counts: Tensor) -> float:
    """Return the bits of the whole stream in its own Huffman code, without the book: sum of count x length."""
    return (counts * huffman_lengths(counts)).sum().item()


def elias_omega_length(n: Tensor) -> Tensor:
    """Return the bits of the Elias omega code of integers n >= 1, elementwise: 1, 3, 3, 6, 6, 6, 6, 7 for 1 to 8."""
    length = torch.ones_like(n, dtype=torch.int64)
    for _ in range(5):  # 2^63 -> 62 -> 5 -> 2 -> 1
        log = _floor_log2(n)
        length += torch.where(n > 1, log + 1, 0)
        n = torch.where(n > 1, log, 1)
    return length


def _floor_log2(n: Tensor) -> Tensor:
    """Return floor(log2 n) of integers n >= 1 in integer arithmetic; a float log2 is wrong near large powers of two."""
    n = n.long()
    log = torch.zeros_like(n)
    for shift in (32, 16, 8, 4, 2, 1):
        large = n >> shift > 0
        log += torch.where(large, shift, 0)
        n = torch.where(large, n >> shift, n)
    return log


def ans_encode(codes: np.ndarray, counts: Any) -> bytes:
    """Encode symbols as one range-ANS bitstream of little-endian 32-bit words; requires the package `constriction`.

    Args:
        codes: uint8 [N], each below K.
        counts: integers [K], the frequency table that the receiver also has. Integers, because every rank must derive
            the same model. A symbol of count 0 can still be sent, at about 24 bits.
    """
    coder = _constriction().stream.stack.AnsCoder()
    coder.encode_reverse(np.ascontiguousarray(codes, dtype=np.int32), _model(counts))
    return coder.get_compressed().astype("<u4").tobytes()


def _model(counts: Any) -> Any:
    table = np.asarray(counts)
    if not np.issubdtype(table.dtype, np.integer):
        raise TypeError(f"a frequency table holds integers, got {table.dtype}")
    weights = np.pad(table.astype(np.float64), (0, max(0, 2 - len(table))))  # the package requires two symbols
    return _constriction().stream.model.Categorical(weights if weights.any() else weights + 1, perfect=False)


def _constriction() -> Any:
    try:
        import constriction
    except ImportError as error:
        raise ImportError("a real bitstream needs the package constriction; type: pip install constriction") from error
    return constriction


METHODS = ("none", "huffman", "elias", "ans")


def check_entropy(value: Any) -> str:
    """Return a method, after checking that it is known and that `ans` has its package."""
    checks.choice("entropy", value, METHODS)
    if value == "ans" and importlib.util.find_spec("constriction") is None:
        raise checks.ValueRefused(
            "entropy", "huffman where the package constriction is not installed", value, "huffman"
        )
    return value


def coded_bytes(codes: Tensor, levels: Sequence[float], method: str) -> int:
    """Return the bytes of one message's codes after entropy coding, with the book or table that the receiver needs.

    Args:
        codes: uint8 [N], indices into the codebook.
        levels: the codebook, ascending.
        method: `huffman`, the message's canonical code, plus a book of one length byte per level; `elias`, omega code
            of the magnitude's index with one sign bit if it is not zero, no book; `ans`, a real bitstream of the
            package `constriction` (on the CPU), plus a table of 4 bytes per level.
    """
    counts = torch.bincount(codes.flatten(), minlength=len(levels))
    if method == "huffman":
        return math.ceil(huffman_bits(counts) / 8) + len(levels)
    if method == "ans":
        table = counts.cpu().numpy()
        return len(ans_encode(codes.flatten().cpu().numpy(), table)) + 4 * len(levels)
    return math.ceil(int((counts * elias_code_lengths(levels).to(counts.device)).sum()) / 8)


def elias_code_lengths(levels: Sequence[float]) -> Tensor:
    """Return the bits of each level [K]: the omega code of its rank in magnitude, and a sign bit."""
    negative, index = sum(level < 0 for level in levels), torch.arange(len(levels))
    if 0.0 in levels:  # zero has no sign
        magnitude = (index - negative).abs()
        return elias_omega_length(magnitude + 1) + torch.where(magnitude > 0, 1, 0)
    magnitude = torch.where(index < negative, negative - 1 - index, index - negative)
    return elias_omega_length(magnitude + 1) + 1


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
