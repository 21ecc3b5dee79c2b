"""Quantisers: coordinates divided by their bucket's norm, rounded at random to the levels of a codebook."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accordion_bench.compressors import codebooks, packed_codes
from accordion_bench.compressors.base import Context
from accordion_bench.compressors.buckets import Buckets
from accordion_bench.compressors.dense_codes import Batch, Dense, DenseCodes, rounded, scaled_, values_of
from accordion_bench.compressors.entropy import check_entropy
from accordion_bench.compressors.oneshot import OneShot
from accordion_bench.compressors.rounding.norms import bucket_norms
from accordion_bench.compressors.rounding.passes import refuse_non_finite
from accordion_bench.compressors.rounding.stochastic import encode_levels
from accordion_bench.compressors.rounding.sums import add_levels_
from accordion_bench.options import checks
from accordion_bench.options.component import Idle, Surroundings
from accordion_bench.options.instantiate import Config
from accordion_bench.plan import TensorSpec


class Quantiser(DenseCodes):
    """Q(v)_i = n_b L_(j+1) with probability (r_i - L_j) / (L_(j+1) - L_j), else n_b L_j;  r_i = v_i / n_b.

    L_j <= r_i <= L_(j+1) are neighbours in the codebook, n_b is the norm of the bucket b that i lies in; a bucket of
    norm 0 decodes to zeros. Unbiased, with
    E||Q(v) - v||^2 = sum_b n_b^2 sum_i (L_(j+1) - r_i)(r_i - L_j).

    Args:
        bits: 2 to 8; lower = more compression. 2^bits levels, one less with a zero level.
        bucket_size: consecutive coordinates of a tensor that share one norm, the last bucket included; larger = fewer
            bytes and more noise. null = a whole tensor.
        norm: `l2` or `linf`.
        levels: `uniform`, `exponential` (+-p^j), or a list in ascending order from -1 to 1, for which
            `bits` may be null and no policy can choose others.
        zero_level: whether 0 is a level (QSGD's and NUQSGD's papers; ALQ's code has none). Without, a zero
            coordinate becomes +-L_1 n_b.
        p: base of the exponential levels, in (0, 1).
        balanced: buckets of equal size, ceil(n / number of buckets), so that no tiny last one exists.
        entropy: how the column entropy_bytes counts the codes: `none`, `huffman`, `elias` (omega), `ans` (a real
            bitstream); what is sent stays packed at fixed width.

    The message is a float32 norm per bucket, then packed codes. Source: Alistarh et al. 2017 (arXiv 1610.02132);
    Ramezani-Kebrya et al. 2021 (NUQSGD, 1908.06077); Faghri et al. 2020 (ALQ, 2010.12460).
    """

    traits = replace(
        OneShot.traits,
        knob="bits",
        pair=(3, 8),
        whole_model=True,
        unbiased=True,
        collective_reason="codes of different norms do not add up",
    )

    def __init__(
        self,
        bits: int | None = 4,
        bucket_size: int | None = 512,
        norm: str = "l2",
        levels: Any = "uniform",
        zero_level: bool = True,
        p: float = 0.5,
        balanced: bool = False,
        entropy: str = "none",
    ) -> None:
        self.custom = None if levels in ("uniform", "exponential") else codebooks.check_codebook("levels", levels)
        self.levels = levels
        self.zero_level = checks.boolean("zero_level", zero_level)
        self.p = checks.number("p", p, above=0, below=1, instead=0.5)
        if self.custom:
            typed = " compressor.bits=4" if bits in (None, 2) else ""  # of 2 bits with a level 0 none is free
            self.traits = replace(self.traits, knob=None, knob_with=("bits", f"compressor.levels=uniform{typed}"))
            bits = codebooks.bits_of(self.custom) if bits is None else bits
        self.bits = self.check_level("bits", bits)
        self.bucket_size = None if bucket_size is None else checks.integer("bucket_size", bucket_size, at_least=1)
        self.norm = checks.choice("norm", norm, ["l2", "linf"])
        self.balanced = checks.boolean("balanced", balanced)
        self.entropy = check_entropy(entropy)

    @classmethod
    def idle(cls, options: Config, around: Surroundings) -> Idle:
        yield from super().idle(options, around)
        levels = options.get("levels", "uniform")
        if levels not in ("uniform", "exponential"):
            yield "zero_level", "compressor.levels is a list"
            yield "p", "compressor.levels is a list"
        if levels == "uniform":
            yield "p", "compressor.levels is uniform"
        if options.get("bucket_size", 512) is None:
            yield "balanced", "compressor.bucket_size is null"

    def check_level(self, key: str, value: Any) -> int:
        if self.custom:
            own = codebooks.bits_of(self.custom)
            if value != own:
                rule = f"{own} or null, as compressor.levels has {len(self.custom)} levels"
                raise checks.ValueRefused(key, rule, value, own)
            return own
        if not isinstance(value, int | float) or isinstance(value, bool) or value not in range(2, 9):
            nearest = min(max(int(value), 2), 8) if isinstance(value, int | float) and abs(value) < 1e9 else 4
            raise checks.ValueRefused(key, "an integer from 2 to 8", value, nearest)
        if self.levels == "exponential" and not codebooks.ascending(self.codebook(int(value))):
            rule = f"so large that {2 ** int(value)} levels differ in float32"
            raise checks.ValueRefused("p", rule, self.p, 0.5)
        return int(value)

    def codebook(self, bits: int) -> tuple[float, ...]:
        if self.custom:
            return self.custom
        if self.levels == "uniform":
            return codebooks.uniform(bits, self.zero_level)
        return codebooks.exponential(bits, self.zero_level, self.p)

    def in_force(self, level: float, ctx: Context) -> tuple[float, ...]:
        """The policy's codebook for this level, or the own one."""
        bits = int(level) if self.traits.knob else self.bits
        return ctx.codebooks.get(bits) or self.codebook(bits)

    def size(self, n: int) -> int:
        """Coordinates in a bucket of a tensor of n."""
        if self.bucket_size is None or n <= self.bucket_size:
            return max(n, 1)
        return -(-n // -(-n // self.bucket_size)) if self.balanced else self.bucket_size

    def buckets(self, n: int) -> int:
        """Buckets of a tensor of n coordinates."""
        return -(-n // self.size(n))

    def message_bytes(self, spec: TensorSpec, level: float) -> int:
        return 4 * self.buckets(spec.numel) + packed_codes.code_bytes(spec.numel, len(self.codebook(int(level))))

    def norms(self, x_R: Tensor) -> Tensor:
        """n_b of every bucket, float32 [R, m].

        Raises:
            NonFiniteRow: a row has a NaN or an infinity, or its norm is beyond float32.
        """
        norms_R = bucket_norms(x_R, self.size(x_R.shape[1]), self.norm)
        refuse_non_finite(norms_R)
        return norms_R

    def encode(self, x_R: Tensor, spec: TensorSpec, level: float, ctx: Context, keys: Sequence[int]) -> Tensor:
        norms_R = self.norms(x_R)
        codes_R = encode_levels(x_R, norms_R, self.size(spec.numel), self.in_force(level, ctx), keys)
        return torch.cat([norms_R.view(torch.uint8), codes_R], dim=1)

    def add_decoded_(
        self, total_R: Tensor, message_AR: Tensor, spec: TensorSpec, level: float, ctx: Context, alpha: float = 1.0
    ) -> None:
        header, messages = 4 * self.buckets(spec.numel), message_AR.flatten(0, 1)
        norms = messages[:, :header].clone(memory_format=torch.contiguous_format).view(torch.float32) * alpha
        add_levels_(total_R, messages[:, header:], norms, self.size(spec.numel), self.in_force(level, ctx))

    def dense(self, level: float, ctx: Context) -> Dense | None:
        own = self.balanced and self.bucket_size  # each tensor has a size of its own
        return None if own else Dense((len(self.in_force(level, ctx)),), self.bucket_size)

    def encode_chunks(self, x_W: Tensor, blocks_W: Tensor, batch: Batch) -> tuple[Tensor | None, list[Tensor]]:
        norms_W = batch.chunks.norms(x_W, 2 if self.norm == "l2" else math.inf).float()
        return norms_W, [rounded(x_W, norms_W, batch.chunks, self.in_force(batch.level, batch.ctx), blocks_W)]

    def decode_chunks(self, header_A: Tensor, codes_A: Sequence[Tensor], batch: Batch) -> Tensor:
        values_A = values_of(codes_A[0], self.in_force(batch.level, batch.ctx), batch.chunks)
        return scaled_(values_A, header_A, batch.chunks)

    def buckets_of(self, xs_W: Sequence[Tensor], ctx: Context) -> list[list[Buckets]]:
        tables: list[list[Buckets]] = [[] for _ in range(len(xs_W[0]) if xs_W else 0)]
        for x_W, level in zip(xs_W, ctx.levels, strict=True):
            if level is None or not x_W[0].numel():
                continue
            rows_W = x_W.flatten(1).float()
            size, norms_W = self.size(rows_W.shape[1]), self.norms(rows_W)
            missing = norms_W.shape[1] * size - rows_W.shape[1]
            padded_W = torch.nn.functional.pad(rows_W, (0, missing)).unflatten(1, (-1, size))
            exists = torch.ones_like(padded_W[0], dtype=torch.bool)
            exists[-1, size - missing :] = False
            for table, rows, norms in zip(tables, padded_W, norms_W, strict=True):
                table.append(Buckets(norms, torch.where(norms > 0, 1 / norms, 0)[:, None] * rows, exists))
        return tables

    def codes_of(
        self, message_A: Tensor, spec: TensorSpec, level: float, ctx: Context
    ) -> tuple[Tensor, Sequence[float]]:
        book = self.in_force(level, ctx)
        packed_A = message_A[:, 4 * self.buckets(spec.numel) :].contiguous()
        return packed_codes.unpack_codes(packed_A, len(book), spec.numel), book

    def variance(self, x_R: Tensor, spec: TensorSpec, level: float, ctx: Context) -> Tensor:
        """E||Q(v) - v||^2 of each row, the closed form."""
        norms_R, size = self.norms(x_R).double(), self.size(x_R.shape[1])
        norm_R = norms_R.repeat_interleave(size, dim=1)[:, : x_R.shape[1]]
        r_R = torch.where(norm_R > 0, x_R.double() / norm_R, 0).clamp(-1, 1)
        book = torch.tensor(self.in_force(level, ctx), dtype=torch.float64, device=x_R.device)
        upper = torch.bucketize(r_R, book).clamp(1, len(book) - 1)
        return (norm_R.square() * (book[upper] - r_R) * (r_R - book[upper - 1])).sum(1)
