"""Reference engine: every operation in plain torch, one tensor at a time; simple and slow.

It is the fallback without numba or Triton, and tests compare the other engines with it.

Tensor suffixes: W local workers, S senders, R rows, M blocks of all tensors, N coordinates.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from accordion_bench.codecs.block_numbers import BlockNumbers
from accordion_bench.codecs.bucket import Bucket, Target
from accordion_bench.codecs.coding import LEVELS, MANTISSA, SIGNS, Coding
from accordion_bench.codecs.engine import Engine, Momenta, MomentumSteps, Sampling, Selection, header_of
from accordion_bench.codecs.index_codes import decode_indices, encode_indices
from accordion_bench.codecs.layout import Layout, Message
from accordion_bench.codecs.non_finite import NonFiniteRow
from accordion_bench.codecs.orthonormal import unit_columns, unit_columns_batched
from accordion_bench.codecs.packed_codes import look_up, pack_codes
from accordion_bench.codecs.products import multiply, replace_degenerate, subtract_products
from accordion_bench.codecs.rounding import round_to_levels, rounding_to
from accordion_bench.codecs.selection import at_least, sampled_top, top_indices
from accordion_bench.codecs.tiles import TileForm, add_largest_, encode_largest
from accordion_bench.tensors.counter_rng import BLOCK, blocks_of, integers_of
from accordion_bench.tensors.permutations import draws_of, images, words_of
from accordion_bench.tensors.same_shape import runs
from accordion_bench.tensors.upload import fresh, table, upload

ORDERS = {"l1": 1, "l2": 2, "linf": math.inf}
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}
E3M0_SIGN = 3  # position of the sign bit


@dataclass(frozen=True)
class IndexSelection:
    """Selection stored as ascending indices.

    indices: one tensor [k] per tensor and worker, [T][W].
    """

    indices: list[list[Tensor]]

    @functools.cached_property
    def counts_W(self) -> Tensor:
        """Number of indices, int32 [W, T]."""
        counts = [list(map(len, own_T)) for own_T in zip(*self.indices, strict=True)]
        return upload(torch.tensor(counts, dtype=torch.int32), self.indices[0][0].device)


class Reference(Engine):
    """Engine in plain torch, one tensor at a time."""

    name = "torch"

    def norms(self, bucket: Bucket, layout: Layout, *kinds: str) -> list[Tensor]:
        pairs = zip(bucket.rows_W, layout.blocks.tolist(), strict=True)
        cells = [in_blocks(x_W.float(), size) for x_W, size in pairs]
        return [self._norms_of(cells, kind) for kind in kinds]

    @staticmethod
    def _norms_of(cells: Sequence[Tensor], kind: str) -> Tensor:
        """Return the norms of blocks [W, m, size] of all tensors, float64 [W, M]."""
        if kind in ORDERS:
            found = [torch.linalg.vector_norm(x_W, ORDERS[kind], dim=2, dtype=torch.float64) for x_W in cells]
        elif kind == "count":
            found = [(x_W < 0).sum(2, dtype=torch.float64) for x_W in cells]
        else:
            below = kind == "below"
            found = [(x_W.clamp_max(0) if below else x_W).sum(2, dtype=torch.float64) for x_W in cells]
        return torch.cat(found, dim=1)

    def write(self, message: Message, name: str, numbers_S: Tensor) -> None:
        own = message.layout.fields[name]
        parts_S = numbers_S.split(own.counts.tolist(), dim=1)
        for part_S, (start, stop) in zip(parts_S, own.spans, strict=True):
            message.rows[:, start:stop] = part_S.contiguous().view(torch.uint8)

    def read(self, message: Message, name: str, alpha: float = 1.0) -> Tensor:
        spans = message.layout.fields[name].spans
        numbers_S = torch.cat([floats_in(message.rows[:, start:stop]) for start, stop in spans], dim=1)
        return numbers_S if alpha == 1 else numbers_S * alpha

    def encode(self, bucket: Bucket, message: Message, coding: Coding, numbers: BlockNumbers) -> None:
        layout = message.layout
        if numbers.middles is not None:
            self.write(message, "middles", numbers.middles)
        if numbers.scales is not None:
            self.write(message, header_of(coding), numbers.scales)
        factors, draws = per_tensor(numbers.factors, layout), self._draws(bucket, coding) if coding.bits else None
        for t, (x_W, size) in enumerate(zip(bucket.rows_W, layout.blocks.tolist(), strict=True)):
            n, draws_W = x_W.shape[1], None if draws is None else in_blocks(draws[t][:, : x_W.shape[1]], size)
            if self.checks_input and not coding.norm:
                refuse_non_finite(x_W, t, len(bucket.specs))
            factor_W = None if factors[t] is None else factors[t][..., None]
            codes_W = codes_of(in_blocks(x_W.float(), size), factor_W, draws_W, coding).flatten(1)[:, :n]
            streams = {"codes": (codes_W, coding.kinds)}
            if coding.signs:
                streams["signs"] = ((x_W < 0).to(torch.uint8), 2)
            for name, (own_W, kinds) in streams.items():
                start, stop = layout.fields[name].spans[t]
                message.rows[:, start:stop] = pack_codes(own_W.contiguous(), kinds)

    @staticmethod
    def _draws(bucket: Bucket, coding: Coding) -> list[Tensor]:
        """Return random integers below 2^bits for each tensor, padded to whole blocks, [W, blocks x BLOCK]."""
        counts, cpu = [-(-n // BLOCK) for n in bucket.numels], torch.device("cpu")
        device = bucket.rows_W[0].device
        blocks_W = fresh(lambda moment: blocks_of(bucket.at(moment).keys(coding.stream), counts, cpu), bucket, device)
        return [integers_of(own_W, coding.bits) for own_W in blocks_W.split(counts, dim=1)]

    def add_codes(
        self, target: Target, message: Message, coding: Coding, shared: Tensor | None, middles: Tensor | None
    ) -> None:
        target, layout, scales = target.begun(), message.layout, shared
        if coding.norm:
            scales = self.read(message, header_of(coding))
        elif scales is not None:
            scales = scales.expand(len(message.rows), -1)
        scaled = per_tensor(scales, layout)
        added = per_tensor(middles, layout)
        for t, (row_R, size) in enumerate(zip(target.rows_R, layout.blocks.tolist(), strict=True)):
            values_S = in_blocks(self._values(message, coding, t), size)
            factor: Any = target.alpha if scaled[t] is None else (scaled[t] * target.alpha)[..., None]
            values_S = values_S * factor
            if added[t] is not None:
                values_S = added[t][..., None] + values_S
            for sender, values in enumerate(values_S.flatten(1)[:, : row_R.shape[1]]):
                row_R[sender % len(row_R)].add_(values)
            if target.divisor != 1:
                row_R.div_(target.divisor)

    def _values(self, message: Message, coding: Coding, t: int) -> Tensor:
        """Return the decoded values of tensor t without scales, float32 [S, N]."""
        n = int(message.layout.numels[t])
        start, stop = message.layout.fields["codes"].spans[t]
        values_S = look_up(message.rows[:, start:stop].contiguous(), coding.values, n)
        if coding.signs:
            start, stop = message.layout.fields["signs"].spans[t]
            values_S = values_S * look_up(message.rows[:, start:stop].contiguous(), SIGNS, n)
        return values_S

    # ---- sparse codes

    def largest(self, rows_W: Sequence[Tensor], counts: Sequence[int]) -> Selection:
        found = [top_indices(x_W, k) for x_W, k in zip(rows_W, counts, strict=True)]
        return IndexSelection([list(own_W) for own_W in found])

    def above(self, rows_W: Sequence[Tensor], threshold: float, most: Sequence[int]) -> Selection:
        def found(row: Tensor, k: int) -> Tensor:
            own = at_least(row, threshold)
            return own if len(own) <= k else own[top_indices(row[own][None], k)[0]]

        return IndexSelection([[found(row, k) for row in x_W] for x_W, k in zip(rows_W, most, strict=True)])

    def about(self, rows_W: Sequence[Tensor], counts: Sequence[int], sampling: Sampling) -> Selection:
        pairs = zip(rows_W, counts, strict=True)
        return IndexSelection([[sampled_top(row, k, *sampling) for row in x_W] for x_W, k in pairs])

    def nonzero(self, rows_W: Sequence[Tensor]) -> Selection:
        return IndexSelection([[row.nonzero()[:, 0] for row in x_W] for x_W in rows_W])

    def encode_sparse(self, bucket: Bucket, selection: Selection, message: Message) -> None:
        assert isinstance(selection, IndexSelection)
        for w, (out, layout) in enumerate(zip(message.rows, message.layouts, strict=True)):
            for t, (x_W, own_W) in enumerate(zip(bucket.rows_W, selection.indices, strict=True)):
                own, values, n = own_W[w], x_W[w].index_select(0, own_W[w]).float(), x_W.shape[1]
                if layout.signs:
                    scale = x_W[w].abs().amax(0, keepdim=True) if n else x_W.new_zeros(1)
                    numbers = {"scales": scale.float(), "counts": selection.counts_W[w, t : t + 1]}
                    indices = encode_indices((2 * own + (values > 0))[None], 2 * n)[0]
                else:
                    numbers, indices = {"values": values}, encode_indices(own[None], n)[0]
                    if self.checks_input and not values.isfinite().all():
                        raise NonFiniteRow(w * len(bucket.specs) + t)
                for name, part in (numbers | {"indices": indices}).items():
                    start, stop = layout.fields[name].spans[t]
                    out[start:stop] = part.contiguous().view(torch.uint8)

    def add_sparse(self, target: Target, message: Message) -> None:
        target = target.begun()
        for sender, (out, layout) in enumerate(zip(message.rows, message.layouts, strict=True)):
            for t, (row_R, k) in enumerate(zip(target.rows_R, layout.kept.tolist(), strict=True)):
                parts = {name: out[slice(*field.spans[t])] for name, field in layout.fields.items()}
                own, n = row_R[sender % len(row_R)], row_R.shape[1] * (2 if layout.signs else 1)
                indices = decode_indices(parts["indices"][None].contiguous(), n, k)[0]
                numbers = floats_in(parts["scales" if layout.signs else "values"]) * target.alpha
                if layout.signs:
                    numbers, indices = (2 * (indices & 1) - 1) * numbers, indices >> 1
                if target.clears:
                    own.index_fill_(0, indices, 0)
                else:
                    own.scatter_add_(0, indices, numbers.to(own.dtype))
        if target.divisor != 1:
            for row_R in target.rows_R:
                row_R.div_(target.divisor)

    def select_in_bins(
        self, residuals_W: Sequence[Tensor], news_W: Sequence[Tensor], sizes: Sequence[int]
    ) -> tuple[list[Tensor], Tensor]:
        sent_W, scales = [], []
        for e_W, x_W, size in zip(residuals_W, news_W, sizes, strict=True):
            g_W = e_W.add_(x_W)
            bins_W, newest_W = in_blocks(g_W, size), in_blocks(x_W, size)
            largest_W = bins_W.abs().amax(2)
            reached_W = (bins_W + newest_W).abs_() >= largest_W[:, :, None]
            scales.append(largest_W.double().mean(1).float())
            signs_W = bins_W.sign().mul_(reached_W).flatten(1)[:, : g_W.shape[1]]
            sent_W.append(signs_W * scales[-1].to(g_W.dtype)[:, None])
            e_W.sub_(sent_W[-1])
        return sent_W, torch.stack(scales, dim=1)

    # ---- momenta

    def add_momenta(self, momenta: Momenta) -> Sequence[Tensor]:
        us_W, gs_W, momentum, nesterov, sums_W = momenta
        lists = (us_W, gs_W, sums_W) if sums_W else (us_W, gs_W)
        for us, gs, *sums in runs(*lists, whole=self.copies) if us_W else ():
            if nesterov and sums:
                torch._foreach_add_(us, gs)
                torch._foreach_mul_(us, momentum)
            else:
                torch._foreach_mul_(us, momentum)
                torch._foreach_add_(us, gs)
            for vs in sums:
                torch._foreach_add_(vs, us)
                if nesterov:
                    torch._foreach_add_(vs, gs)
        if sums_W or not nesterov or not us_W:
            return sums_W or us_W
        return list(torch._foreach_add(list(gs_W), list(us_W), alpha=momentum))

    def momentum_steps(self, given: MomentumSteps) -> list[Tensor]:
        momenta, sums, inverses, masks, rates = given
        torch._foreach_copy_(list(momenta), list(sums))
        if alive := [(m, mask) for m, mask in zip(momenta, masks, strict=True) if mask is not None]:
            torch._foreach_mul_([m for m, _ in alive], [mask for _, mask in alive])
        steps = torch._foreach_mul(list(momenta), list(inverses))
        for _, alike in itertools.groupby(zip(rates, steps, strict=True), key=lambda pair: id(pair[0])):
            of_rate = list(alike)
            torch._foreach_mul_([step for _, step in of_rate], of_rate[0][0])
        return list(steps)

    # ---- coordinates that are the same for all workers

    def places(
        self, keys: Callable[[Bucket], Sequence[int]], counts: Sequence[int], bucket: Bucket, device: torch.device
    ) -> Any:
        draws = draws_of(bucket.numels, tuple(counts))
        return images(draws, fresh(lambda moment: words_of(keys(bucket.at(moment))), bucket, device))

    def take(self, rows_W: Sequence[Tensor], places: Any) -> list[Tensor]:
        return [x_W.index_select(1, index) for x_W, index in zip(rows_W, places, strict=True)]

    def put(self, target: Target, values_R: Sequence[Tensor], places: Any, factors: Sequence[float]) -> None:
        target = target.begun()
        for row_R, own_R, index, factor in zip(target.rows_R, values_R, places, factors, strict=True):
            for row, own in zip(row_R, own_R, strict=True):  # index_add_ along the second dimension is 40 times slower
                row.index_add_(0, index, own, alpha=target.alpha * factor)

    # ---- factors

    def orthonormalise(self, factors: Sequence[Tensor], passes: int = 2) -> list[Tensor]:
        return [unit_columns(factor) for factor in factors]

    def multiply(self, matrices_W: Sequence[Tensor], factors: Sequence[Tensor]) -> list[Tensor]:
        return multiply(matrices_W, factors)

    def products(self, lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> list[Tensor]:
        return [left @ right for left, right in zip(lefts, rights, strict=True)]

    def subtract_products(
        self,
        targets_W: Sequence[Mapping[int, Tensor]],
        lefts_W: Sequence[Tensor],
        rights_W: Sequence[Tensor],
        alpha: float = 1.0,
    ) -> None:
        for own_W, left_W, right_W in zip(targets_W, lefts_W, rights_W, strict=True):
            if own_W:
                subtract_products(own_W, left_W, right_W, alpha, self.copies)

    def replace_degenerate(self, news: Sequence[Tensor], olds: Sequence[Tensor]) -> list[Tensor]:
        return replace_degenerate(news, olds)

    # ---- tiles

    def encode_tiles(self, bucket: Bucket, message: Message, forms: Sequence[TileForm]) -> None:
        for t, (x_W, form) in enumerate(zip(bucket.rows_W, forms, strict=True)):
            parts = encode_largest(x_W, form)
            if self.checks_input:
                refuse_non_finite(parts[0], t, len(forms))
            for part_W, field in zip(parts, message.layout.fields.values(), strict=True):
                start, stop = field.spans[t]
                message.rows[:, start:stop] = part_W.view(torch.uint8)

    def add_tiles(self, target: Target, message: Message, forms: Sequence[TileForm]) -> None:
        target, starts = target.begun(), message.layout.starts
        for row_R, form, start in zip(target.rows_R, forms, starts, strict=True):
            own_S = message.rows[:, start : start + sum(form.parts)]
            for message_R in own_S.unflatten(0, (-1, len(row_R))):
                add_largest_(row_R, message_R, form, target.alpha)
            if target.divisor != 1:
                row_R.div_(target.divisor)


class OnDevice(Reference):
    """Engine of a device without kernels, in plain torch."""

    checks_input, copies, fills = False, True, True

    def orthonormalise(self, factors: Sequence[Tensor], passes: int = 2) -> list[Tensor]:
        return unit_columns_batched(factors, passes) if factors else []


def codes_of(x: Tensor, factor: Tensor | None, draws: Tensor | None, coding: Coding) -> Tensor:
    """Return the codes of coordinates, uint8 [..., N].

    Args:
        x: coordinates, float32 [..., N].
        factor: factors of the blocks, float32 [..., 1]; None = 1.
        draws: random integers below 2^bits, int32 [..., N]; None for deterministic codings.
        coding: rounding and values of the codes.
    """
    if coding.rounding == "sign":
        return (x < 0).to(torch.uint8)
    if coding.rounding == "power":
        assert draws is not None
        return _powers(x.abs(), draws, coding.kinds)
    assert factor is not None
    if coding.rounding == LEVELS:
        assert draws is not None
        return round_to_levels(x, factor, draws, rounding_to(coding.values))
    steps = x * factor
    if coding.rounding == "e3m0":
        codes = torch.bucketize(steps.abs(), e3m0_borders(x.device), out_int32=True).to(torch.uint8)
        return codes | steps.signbit().to(torch.uint8) << E3M0_SIGN
    if draws is not None:
        steps = steps.add_(draws.float().mul_(2.0**-coding.bits)).floor_().clamp_(-127, 127)
    elif coding.rounding == "int8":
        steps = steps.round_()
    return steps.to(FORMATS[coding.rounding.removesuffix(" at random")]).view(torch.uint8)


def _powers(magnitude: Tensor, draws: Tensor, kinds: int) -> Tensor:
    """Return exponents of powers of two, plus one if mantissa + draw carries; with 128 kinds from 2^-63 to 2^63."""
    exponents = (magnitude.view(torch.int32) + draws).bitwise_right_shift_(MANTISSA)
    if kinds == 256:
        return exponents.clamp_max_(254).to(torch.uint8)
    below = draws < magnitude * 2.0 ** (63 + MANTISSA)  # magnitudes below 2^-63 become 2^-63 or 0
    return torch.where(magnitude < 2.0**-63, below.int(), exponents.sub_(63).clamp_max_(127)).to(torch.uint8)


E3M0_MAGNITUDES = (0.0, *(2.0**exponent for exponent in range(-6, 1)))


@functools.lru_cache(maxsize=8)
def e3m0_borders(device: torch.device) -> Tensor:
    """Return the borders between adjacent magnitudes, such that ties go to the even code.

    A magnitude equal to a border gets the lower code, so borders above odd codes are reduced by one ulp.
    """
    magnitudes = torch.tensor(E3M0_MAGNITUDES)
    middles = (magnitudes[:-1] + magnitudes[1:]) / 2
    odd = torch.arange(len(middles)) % 2 == 1
    return table(torch.where(odd, torch.nextafter(middles, torch.tensor(0.0)), middles), device)


def in_blocks(x_R: Tensor, size: int) -> Tensor:
    """Return rows [R, N] as blocks [R, m, size], padded with zeros."""
    return pad(x_R, (0, -x_R.shape[1] % size)).unflatten(1, (-1, size))


def per_tensor(numbers: Tensor | None, layout: Layout) -> list[Any]:
    """Split numbers of all blocks [S, M] by tensor, [S, m] each; a list of None for None."""
    counts = (-(-layout.numels // layout.blocks)).tolist()
    return [None] * len(counts) if numbers is None else list(numbers.split(counts, dim=1))


def floats_in(bytes_S: Tensor) -> Tensor:
    """Reinterpret bytes [..., 4 m] as float32 [..., m]; a copy, because fields may be unaligned."""
    if not bytes_S.shape[-1]:
        return bytes_S.float()  # torch cannot view empty tensors with other strides
    return bytes_S.clone(memory_format=torch.contiguous_format).view(torch.float32)


def refuse_non_finite(x_W: Tensor, t: int, tensors: int) -> None:
    """Raise NonFiniteRow w T + t for the first worker w whose row [N] of tensor t is non-finite."""
    finite_W = x_W.float().isfinite().all(1)
    if not finite_W.all():
        raise NonFiniteRow(int((~finite_W).nonzero()[0]) * tensors + t)
