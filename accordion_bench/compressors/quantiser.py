"""Quantisers: coordinates divided by their bucket's norm, rounded at random to the levels of a codebook."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accordion_bench.codecs.bucket import Context
from accordion_bench.codecs.coding import Coding, to_levels
from accordion_bench.codecs.non_finite import refuse_non_finite
from accordion_bench.codecs.reference import ORDERS, in_blocks
from accordion_bench.compressors import codebooks
from accordion_bench.compressors.buckets import Buckets
from accordion_bench.compressors.dense import NONE_FITTED, Codebooks, DenseCodes
from accordion_bench.compressors.entropy import check_entropy
from accordion_bench.options import checks
from accordion_bench.options.component import Idle, Surroundings
from accordion_bench.options.instantiate import Config
from accordion_bench.plan import TensorSpec


def _idle(cls: Any, options: Config, context: Surroundings) -> Idle:
    yield from DenseCodes.description.idle(cls, options, context)
    levels = options.get("levels", "uniform")
    if levels not in ("uniform", "exponential"):
        yield "zero_level", "compressor.levels is a list"
        yield "p", "compressor.levels is a list"
    if levels == "uniform":
        yield "p", "compressor.levels is uniform"
    if options.get("bucket_size", 512) is None:
        yield "balanced", "compressor.bucket_size is null"


def _variance(compressor: "Quantiser", x_R: Tensor, spec: TensorSpec, level: float, ctx: Context) -> Tensor:
    """E||Q(v) - v||^2 of each row, the closed form."""
    norms_R, size = compressor.norms(x_R).double(), compressor._size(x_R.shape[1])
    norm_R = norms_R.repeat_interleave(size, dim=1)[:, : x_R.shape[1]]
    r_R = torch.where(norm_R > 0, x_R.double() / norm_R, 0).clamp(-1, 1)
    book = torch.tensor(compressor._in_force(level, ctx.codebooks), dtype=torch.float64, device=x_R.device)
    upper = torch.bucketize(r_R, book).clamp(1, len(book) - 1)
    return (norm_R.square() * (book[upper] - r_R) * (r_R - book[upper - 1])).sum(1)


def _buckets_of(compressor: "Quantiser", xs_W: Sequence[Tensor], ctx: Context) -> list[list[Buckets]]:
    tables: list[list[Buckets]] = [[] for _ in range(len(xs_W[0]) if xs_W else 0)]
    for x_W, level in zip(xs_W, ctx.levels, strict=True):
        if level is None or not x_W[0].numel():
            continue
        rows_W = x_W.flatten(1).float()
        size, norms_W = compressor._size(rows_W.shape[1]), compressor.norms(rows_W)
        missing = norms_W.shape[1] * size - rows_W.shape[1]
        padded_W = torch.nn.functional.pad(rows_W, (0, missing)).unflatten(1, (-1, size))
        exists = torch.ones_like(padded_W[0], dtype=torch.bool)
        exists[-1, size - missing :] = False
        for table, rows, norms in zip(tables, padded_W, norms_W, strict=True):
            table.append(Buckets(norms, torch.where(norms > 0, 1 / norms, 0)[:, None] * rows, exists))
    return tables


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

    description = replace(
        DenseCodes.description,
        display_names={"qsgd": "QSGD", "qsgdinf": "QSGDinf", "nuqsgd": "NUQSGD", "trn": "TRN"},
        kernels=("cpu", "cuda"),
        collective_reason="codes of different norms do not add up",
        idle=_idle,
        buckets_of=_buckets_of,
        claims=replace(DenseCodes.description.claims, variance=_variance),
    )

    stream = "Quantiser"
    traits = replace(DenseCodes.traits, knob="bits", pair=(3, 8), whole_model=True, unbiased=True, replays=True)

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
            self.traits = replace(self.traits, knob=None)
            knob_with = ("bits", f"compressor.levels=uniform{typed}")
            self.description = replace(self.description, knob_with=knob_with)
            bits = codebooks.bits_of(self.custom) if bits is None else bits
        self.bits = self.check_level("bits", bits)
        self.bucket_size = None if bucket_size is None else checks.integer("bucket_size", bucket_size, at_least=1)
        self.norm = checks.choice("norm", norm, ["l2", "linf"])
        self.balanced = checks.boolean("balanced", balanced)
        self.entropy = check_entropy(entropy)

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

    def _in_force(self, level: float, fitted: Codebooks) -> tuple[float, ...]:
        """The policy's codebook for this level, or the own one."""
        bits = int(level) if self.traits.knob else self.bits
        return fitted.get(bits) or self.codebook(bits)

    def block_size(self, spec: TensorSpec) -> int | None:
        return self.bucket_size

    def coding(self, level: float, fitted: Codebooks = NONE_FITTED) -> Coding:
        return coding_of(self._in_force(level, fitted), self.norm)

    def _size(self, n: int) -> int:
        """Coordinates of a bucket of a tensor of n."""
        return self.blocks(TensorSpec("", (n,)))

    def norms(self, x_R: Tensor) -> Tensor:
        """n_b of every bucket, float32 [R, m].

        Raises:
            NonFiniteRow: a row has a NaN or an infinity, or its norm is beyond float32.
        """
        cells_R = in_blocks(x_R.float(), self._size(x_R.shape[1]))
        norms_R = torch.linalg.vector_norm(cells_R, ORDERS[self.norm], dim=2, dtype=torch.float64).float()
        refuse_non_finite(norms_R)
        return norms_R


@functools.lru_cache(maxsize=256)
def coding_of(levels: tuple[float, ...], norm: str) -> Coding:
    """Coordinates over the norm of their bucket, rounded at random to levels."""
    return to_levels(levels, norm, Quantiser.stream)
