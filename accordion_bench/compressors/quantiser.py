"""Quantisers, TernGrad among them: divide coordinates by a norm, and round them at random to levels of a codebook."""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accordion_bench.codecs.bucket import Bucket, Context, refuse_non_finite
from accordion_bench.codecs.coding import LARGEST, ORDERS, Coding, to_levels
from accordion_bench.codecs.engines import engine_for
from accordion_bench.codecs.layout import Transfer, in_blocks, whole_layout
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import Compressor, Exchanged, Kept, NonFinite, State, paying_levels
from accordion_bench.compressors.dense import METHODS, NONE_FITTED, Codebooks, DenseCodes, check_entropy
from accordion_bench.compressors.description import KEPT, NO_EF21, TRAVEL, Traits, WhyDense
from accordion_bench.compressors.probe import Buckets, cheaper_than_dense
from accordion_bench.options.checks import ValueRefused
from accordion_bench.options.component import Idle, RunContext
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.options.units import counted
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors.kernels.dense_kernels import BlockRule
from accordion_bench.tensors.same_shape import joined


def _idle(cls: Any, options: Config, context: RunContext) -> Idle:
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
    """Return E||Q(v) - v||^2 of each row in closed form."""
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


AROUND = ("collective", "error_feedback", "residual", *KEPT, *TRAVEL)
UNBIASED = {"error_feedback": "unbiased: needs none"}


@with_options
class Quantiser(DenseCodes):
    """Q(v)_i = n_b L_(j+1) with probability (r_i - L_j) / (L_(j+1) - L_j), else n_b L_j;  r_i = v_i / n_b.

    L_j <= r_i <= L_(j+1) are neighbours in the codebook, and n_b is the norm of the bucket b that contains i. A bucket
    of norm 0 decodes to zeros. Unbiased, with E||Q(v) - v||^2 = sum_b n_b^2 sum_i (L_(j+1) - r_i)(r_i - L_j).

    There are 2^bits levels, or one less with a zero level (QSGD's and NUQSGD's papers; ALQ's code has none). Without a
    zero level, a zero coordinate becomes +-L_1 n_b. Exponential levels are +-p^j. If `levels` is a list, `bits` may be
    null, and policies cannot replace the levels. `balanced` buckets have ceil(n / number of buckets) coordinates.
    `entropy` is how entropy_bytes counts the codes (`elias`: omega, `ans`: a real bitstream); messages are packed at
    fixed width.

    The message is a float32 norm per bucket, then packed codes. Source: Alistarh et al. 2017 (arXiv 1610.02132);
    Ramezani-Kebrya et al. 2021 (NUQSGD, 1908.06077); Faghri et al. 2020 (ALQ, 2010.12460).
    """

    bits: int | None = option("2 to 8; lower = more compression", default=4)
    bucket_size: int | None = option("coordinates that share one norm; null = a whole tensor", default=512, at_least=1)
    norm: str = option(default="l2", choices=("l2", "linf"))
    levels: Any = option("uniform, exponential, or a list in ascending order from -1 to 1", default="uniform")
    zero_level: bool = option("whether 0 is a level", default=True)
    p: float = option("base of exponential levels", default=0.5, above=0, below=1)
    balanced: bool = option("buckets of equal size", default=False)
    entropy: str = option("entropy code that the column entropy_bytes counts", default="none", choices=METHODS)

    chosen_as = {
        "qsgd": Choice(
            "random rounding to evenly spaced levels of the L2 norm (Alistarh et al. 2017); adaptive=alq fits "
            "the levels",
            beside=AROUND,
            comments=UNBIASED,
        ),
        "qsgdinf": Choice(
            "random rounding to evenly spaced levels of the largest magnitude",
            {"norm": "linf"},
            AROUND,
            comments=UNBIASED,
        ),
        "nuqsgd": Choice(
            "random rounding to levels p^j of the L2 norm (Ramezani-Kebrya et al. 2021)",
            {"levels": "exponential"},
            AROUND,
            comments=UNBIASED,
        ),
        "trn": Choice(
            "ternary with a scale per bucket: what ALQ's code calls TRN",
            {"bits": None, "bucket_size": 8192, "norm": "linf", "levels": [-1, 0, 1]},
            AROUND,
            leaves_out=("zero_level", "p"),
            comments={**UNBIASED, "bits": "as the levels say", "levels": "five codes per byte"},
        ),
    }

    description = replace(
        DenseCodes.description,
        display_names={"qsgd": "QSGD", "qsgdinf": "QSGDinf", "nuqsgd": "NUQSGD", "trn": "TRN"},
        kernels=("cpu", "cuda"),
        collective_reason="codes with different norms cannot be summed",
        idle=_idle,
        buckets_of=_buckets_of,
        claims=replace(DenseCodes.description.claims, variance=_variance),
    )

    stream = "Quantiser"
    traits = replace(DenseCodes.traits, knob="bits", pair=(3, 8), whole_model=True, unbiased=True, replays=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        named = self.levels in ("uniform", "exponential")
        self.custom = None if named else check_codebook("levels", self.levels)
        if self.custom:
            typed: dict[str, Any] = {"compressor.levels": "uniform"}
            if self.bits in (None, 2):  # 2 bits with a zero level leave no level for a policy to fit
                typed["compressor.bits"] = 4
            self.traits = replace(self.traits, knob=None)
            self.description = replace(self.description, knob_with=("bits", typed))
            if self.bits is None:
                self.bits = bits_of(self.custom)
        self.bits = self.check_level("bits", self.bits)
        check_entropy(self.entropy)

    def check_level(self, key: str, value: Any) -> int:
        if self.custom:
            own = bits_of(self.custom)
            if value != own:
                rule = f"{own} or {{null}}, as compressor.levels has {len(self.custom)} levels"
                raise ValueRefused(key, rule, value, own)
            return own
        if not isinstance(value, int | float) or isinstance(value, bool) or value not in range(2, 9):
            nearest = min(max(int(value), 2), 8) if isinstance(value, int | float) and abs(value) < 1e9 else 4
            raise ValueRefused(key, "an integer from 2 to 8", value, nearest)
        if self.levels == "exponential" and not ascending(self.codebook(int(value))):
            rule = f"so large that {2 ** int(value)} levels differ in float32"
            raise ValueRefused("p", rule, self.p, 0.5)
        return int(value)

    def codebook(self, bits: int) -> tuple[float, ...]:
        if self.custom:
            return self.custom
        if self.levels == "uniform":
            return uniform(bits, self.zero_level)
        return exponential(bits, self.zero_level, self.p)

    def _in_force(self, level: float, fitted: Codebooks) -> tuple[float, ...]:
        """Return the policy's codebook for this level, or the compressor's own."""
        return self.custom or fitted.get(int(level)) or self.codebook(int(level))

    def block_of(self, spec: TensorSpec) -> int | None:
        return self.bucket_size

    def coding(self, level: float, fitted: Codebooks = NONE_FITTED) -> Coding:
        return coding_of(self._in_force(level, fitted), self.norm)

    def _size(self, n: int) -> int:
        return self.blocks(TensorSpec("", (n,)))

    def norms(self, x_R: Tensor) -> Tensor:
        """Return n_b of every bucket, float32 [R, m].

        Raises:
            NonFiniteRow: a row contains NaN or infinity, or its norm exceeds float32.
        """
        cells_R = in_blocks(x_R.float(), self._size(x_R.shape[1]))
        norms_R = torch.linalg.vector_norm(cells_R, ORDERS[self.norm], dim=2, dtype=torch.float64).float()
        refuse_non_finite(norms_R)
        return norms_R


@functools.lru_cache(maxsize=256)
def coding_of(levels: tuple[float, ...], norm: str) -> Coding:
    """Return the coding that divides coordinates by their bucket's norm and rounds them at random to levels."""
    return to_levels(levels, norm, Quantiser.stream)


# ---- codebooks: the levels in [-1, 1] to which normalised coordinates are rounded


@functools.lru_cache(maxsize=64)
def uniform(bits: int, zero_level: bool) -> tuple[float, ...]:
    """Return evenly spaced levels; 3 bits: +-1/7, 3/7, 5/7, 1, or 0, +-1/3, 2/3, 1. `uniform(2, True)` is ternary."""
    count = positive_count(bits, zero_level)
    if zero_level:
        return codebook([j / count for j in range(1, count + 1)], zero_level)
    return codebook([(2 * j - 1) / (2 * count - 1) for j in range(1, count + 1)], zero_level)


@functools.lru_cache(maxsize=64)
def exponential(bits: int, zero_level: bool, p: float = 0.5) -> tuple[float, ...]:
    """Return levels +-p^j, j = 0, 1, ..., and 0 if `zero_level`; p in (0, 1)."""
    return codebook([p**j for j in reversed(range(positive_count(bits, zero_level)))], zero_level)


def codebook(positives: Sequence[float], zero_level: bool) -> tuple[float, ...]:
    """Return the full codebook for the given ascending positive levels."""
    return (*(-level for level in reversed(positives)), *([0.0] if zero_level else []), *positives)


def positive_count(bits: int, zero_level: bool) -> int:
    """Return the number of positive levels, including 1."""
    fewest, kind = (2, "with") if zero_level else (1, "without")
    if bits < fewest:
        raise ValueError(f"a codebook {kind} a zero level needs {fewest} bits")
    return 2 ** (bits - 1) - (1 if zero_level else 0)


def bits_of(levels: Sequence[float]) -> int:
    """Return the bits per code of a fixed-width code for a codebook."""
    return max(1, math.ceil(math.log2(len(levels))))


def check_codebook(key: str, value: Any) -> tuple[float, ...]:
    """Return a codebook as floats, after checking that it ascends from -1 to 1 and has at most 256 levels.

    Raises:
        ValueRefused: with key, rule, value and a suggestion.
    """
    numbers = isinstance(value, list | tuple) and all(
        isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) for x in value
    )
    levels = tuple(float(x) for x in value) if numbers else ()
    if not 2 <= len(levels) <= 256 or not ascending(levels) or (levels[0], levels[-1]) != (-1.0, 1.0):
        rule = "uniform, exponential, or 2 to 256 numbers in ascending order (in float32) from -1 to 1"
        inner = sorted({x for x in levels if -1 < x < 1})
        raise ValueRefused(key, rule, value, [-1, *inner, 1] if 0 < len(inner) <= 30 else "uniform")
    return levels


def ascending(levels: Sequence[float]) -> bool:
    """Whether each level exceeds the previous one in float32."""
    return bool((np.diff(np.array(levels, np.float32)) > 0).all())


TERNARY = (-1.0, 0.0, 1.0)
CODING = to_levels(TERNARY, stream="TernaryCodes")


class TernaryCodes(DenseCodes):
    """Coordinates rounded at random to -s, 0 or s, after clamping to [-s, s]; the message is only codes, five per byte.

    Args:
        entropy: see `Quantiser`.

    Attributes:
        known: s per tensor name, 0-dimensional, the same on all workers.
    """

    stream = "TernaryCodes"

    def __init__(self, entropy: str) -> None:
        self.known: dict[str, Tensor] = {}
        self.entropy = entropy

    def coding(self, level: float, fitted: Codebooks = NONE_FITTED) -> Coding:
        return CODING

    def shared_scales(self, bucket: Bucket) -> Tensor:
        return joined([self.known[spec.name] for spec in bucket.specs])


def _why_dense(compressor: "TernGrad", spec: TensorSpec, level: float, workers: int) -> WhyDense | None:
    if compressor.pays(spec, level, workers):
        return None
    reason = f"an all-gather of codes from {counted(workers, 'worker')} would cost more than a dense all-reduce"
    return WhyDense(reason, ("fewer workers",))


@with_options
class TernGrad(Compressor):
    """C(v)_i = s sgn(v_i) with probability |v_i| / s, else 0;  s = max over workers of min(max |v_w|, clip sigma_w).

    Unbiased, except for what is clamped at s. The scale is shared by an all-reduce of 4 bytes per tensor, so that a
    worker's message contains only codes. Tensors for which that would cost more wire bytes than a dense all-reduce are
    exchanged dense, without rounding.

    `clip` limits the noise, at the price of a bias.

    The paper clamps each worker's tensor at its own clip sigma_w before the scale is shared. Here all tensors are
    clamped at s, which is never less. Source: Wen et al. 2017 (arXiv 1705.07878).
    """

    clip: float | None = option("standard deviations; null = no clipping, then unbiased", default=2.5, above=0)
    entropy: str = option("entropy code that the column entropy_bytes counts", default="none", choices=METHODS)

    chosen_as = {
        "terngrad": Choice(
            "ternary, one scale per tensor shared by all workers (Wen et al. 2017)",
            beside=("error_feedback", "residual", *KEPT, "collective", *TRAVEL),
            comments=NO_EF21,
        )
    }

    description = replace(
        Compressor.description,
        kernels=("cpu", "cuda"),
        collective_reason="all workers share one scale, with which an owner's mean cannot be encoded",
        why_dense=_why_dense,
        claims=replace(Compressor.description.claims, draws="worker"),
    )

    traits = Traits(contracts=False, replays=True, whole_model=True, collectives=("all_gather",))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.traits = replace(self.traits, unbiased=self.clip is None)
        self.codes = TernaryCodes(check_entropy(self.entropy))
        self.rule = LARGEST if self.clip is None else BlockRule("largest", ("linf", "l2", "sum"), clip=self.clip)

    def transfers(self, spec: TensorSpec, level: float, workers: int, kept: Kept = None) -> Sequence[Transfer]:
        return [Transfer("all_reduce", 4), Transfer("all_gather", self.codes.message_bytes(spec, level))]

    pays = cheaper_than_dense

    def largest_of(self, bucket: Bucket) -> list[Tensor]:
        """Return the maximum over the local workers of min(max |v_w|, clip sigma_w), for each tensor."""
        if not bucket.specs:
            return []
        layout = whole_layout(bucket.numels)
        (largest_W,) = engine_for(bucket.rows_W).numbers(bucket, layout, self.rule)
        return list(largest_W[0] if len(largest_W) == 1 else largest_W.amax(0))

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        sent = list(paying_levels(self, ctx, comm.workers))
        shared = comm.all_reduce_max(self.largest_of(Bucket.of(xs_W, ctx, sent, comm.local)))
        checks = engine_for(xs_W).checks_input
        for i, scale in zip(sent, shared, strict=True):
            if checks and not scale.isfinite():
                raise NonFinite(f"the compressor input of some worker for {ctx.specs[i].name} is not finite")
        self.codes.known = {ctx.specs[i].name: scale for i, scale in zip(sent, shared, strict=True)}
        narrowed = replace(ctx, levels=[1 if i in set(sent) else None for i in range(len(ctx.specs))])
        return self.codes.exchange(xs_W, narrowed, state, comm)
