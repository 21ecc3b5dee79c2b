"""Chunks: tensors of any lengths as rows of one length, so that a device is asked once for all of them.

Tensor suffixes: W local workers, C chunks, L coordinates of a chunk, M buckets.
"""

import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from accordion_bench.tensors.upload import table

KEPT = 64  # layouts remembered: of each bucket of a run, for each level and method


class Chunks:
    """Where coordinates and buckets of several tensors lie in chunks [C, L]; a tensor begins with a chunk of its own.

    Buckets either lie inside of chunks (L is a multiple of their size), or consist of chunks.

    Args:
        lengths: coordinates of each tensor.
        length: L.
        bucket: coordinates of a bucket, a divisor or a multiple of L; None = a whole tensor.
        device: where the tensors are.

    Attributes:
        count: C.
        parts: buckets in a chunk; 1 where buckets consist of chunks.
        buckets: of each tensor.
        entries: coordinates of each bucket, float64 [M], 1 where there are none.
    """

    def __init__(self, lengths: tuple[int, ...], length: int, bucket: int | None, device: torch.device) -> None:
        self.lengths, self.length = lengths, length
        self.counts = [-(-n // length) for n in lengths]
        self.starts = [0, *itertools.accumulate(self.counts)]
        self.count = self.starts[-1]
        self.inside = bucket is not None and bucket <= length
        self.parts = length // bucket if bucket is not None and self.inside else 1
        self.buckets = [1 if bucket is None else -(-n // bucket) for n in lengths]
        self.zeros = table(torch.zeros(1, length), device)
        size = self.length // self.parts if bucket is None or self.inside else bucket
        entries = [
            max(1, min(n, (b + 1) * size) - b * size) if bucket else n
            for n, count, m in zip(lengths, self.counts, self.buckets, strict=True)
            for b in range(count * self.parts if self.inside else m)
        ]
        self.entries = table(torch.tensor(entries, dtype=torch.float64), device)
        if not self.inside:
            in_bucket = [
                min(bucket // length, count - first) if bucket else count
                for count in self.counts
                for first in range(0, count, bucket // length if bucket else count)
            ]
            ends = list(itertools.accumulate(in_bucket))
            most = max(in_bucket, default=0)
            # row b: the chunks of bucket b, then the number C, which stands for none
            rows = [[*range(end - n, end), *[self.count] * (most - n)] for n, end in zip(in_bucket, ends, strict=True)]
            owners = [b for b, n in enumerate(in_bucket) for _ in range(n)]
            self.of_bucket, self.bucket_of = (table(torch.tensor(numbers), device) for numbers in (rows, owners))

    @staticmethod
    def fit(bucket: int | None, length: int) -> bool:
        """Whether buckets of this size lie inside of chunks, or consist of them."""
        return bucket is None or length % bucket == 0 or bucket % length == 0

    def joined(self, rows_W: Sequence[Tensor]) -> Tensor:
        """Rows [W, n] of each tensor as [W, C, L], zeros behind their ends."""
        W = len(rows_W[0])
        pieces = [
            piece
            for row_W, count in zip(rows_W, self.counts, strict=True)
            for piece in (row_W, self.zeros[:, : count * self.length - row_W.shape[1]].expand(W, -1))
        ]
        return torch.cat(pieces, dim=1).view(W, self.count, self.length)

    def rows(self, x_W: Tensor) -> list[Tensor]:
        """The inverse of `joined`: views [W, n] of [W, C, L]."""
        flat_W = x_W.view(len(x_W), -1)
        places = zip(self.starts, self.lengths, strict=False)
        return [flat_W[:, start * self.length : start * self.length + n] for start, n in places]

    def cells(self, x_W: Tensor) -> Tensor:
        """[W, C, L] as [W, C, parts, L / parts]: coordinates that share a number of `spread`."""
        return x_W.unflatten(2, (self.parts, -1))

    def norms(self, x_W: Tensor, ord: float) -> Tensor:
        """The norm of every bucket of [W, C, L]: float64 [W, M], 0 for one behind the end of its tensor."""
        norm_W = torch.linalg.vector_norm(self.cells(x_W), ord, dim=3, dtype=torch.float64)
        return norm_W.flatten(1) if self.inside else torch.linalg.vector_norm(self.by_bucket(norm_W), ord, dim=2)

    def by_bucket(self, per_chunk_W: Tensor) -> Tensor:
        """Numbers of chunks [W, C, 1] as [W, M, most chunks of a bucket], zeros where there are fewer."""
        padded_W = torch.nn.functional.pad(per_chunk_W.flatten(1), (0, 1))
        return padded_W.index_select(1, self.of_bucket.flatten()).unflatten(1, self.of_bucket.shape)

    def spread(self, per_bucket_W: Tensor) -> Tensor:
        """Numbers of buckets [W, M] as [W, C, parts]."""
        if self.inside:
            return per_bucket_W.unflatten(1, (self.count, self.parts))
        return per_bucket_W.index_select(1, self.bucket_of)[:, :, None]

    def headers(self, per_bucket_W: Tensor) -> list[Tensor]:
        """Numbers of buckets [W, M] as views [W, m] of each tensor's own."""
        if not self.inside:
            return list(per_bucket_W.split(self.buckets, dim=1))
        places = zip(self.starts, self.buckets, strict=False)
        return [per_bucket_W[:, start * self.parts : start * self.parts + m] for start, m in places]

    def joined_headers(self, headers_W: Sequence[Tensor]) -> Tensor:
        """The inverse of `headers`, of bytes [W, 4 m] of float32, too: float32 [W, M]."""
        if not self.inside:
            return torch.cat(list(headers_W), dim=1).view(torch.float32)
        places = zip(headers_W, self.counts, strict=True)
        sizes = [4 * self.parts * count for count in self.counts]
        return joined_bytes([header_W for header_W, _ in places], sizes, self.zeros).view(torch.float32)

    def codes(self, codes_W: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Packed codes [W, C, B] as views [W, size] of each tensor's own."""
        flat_W, per_chunk = codes_W.view(len(codes_W), -1), codes_W.shape[2]
        places = zip(self.starts, sizes, strict=False)
        return [flat_W[:, start * per_chunk : start * per_chunk + size] for start, size in places]

    def joined_codes(self, codes_W: Sequence[Tensor], per_chunk: int) -> Tensor:
        """The inverse of `codes`, for so many bytes of a chunk."""
        sizes = [per_chunk * count for count in self.counts]
        return joined_bytes(codes_W, sizes, self.zeros).unflatten(1, (self.count, per_chunk))


def joined_bytes(parts_W: Sequence[Tensor], sizes: Sequence[int], zeros: Tensor) -> Tensor:
    """Bytes [W, b] one behind the other, each filled up with zeros to its size."""
    W, none = len(parts_W[0]), zeros.view(torch.uint8)
    pieces = [
        piece
        for part_W, size in zip(parts_W, sizes, strict=True)
        for piece in (part_W, none[:, : size - part_W.shape[1]].expand(W, -1))
    ]
    return torch.cat(pieces, dim=1)


@functools.lru_cache(maxsize=KEPT)
def chunks_of(lengths: tuple[int, ...], length: int, bucket: int | None, device: torch.device) -> Chunks:
    """The chunks of tensors of these lengths, made once."""
    return Chunks(lengths, length, bucket, device)
