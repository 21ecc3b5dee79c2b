"""Engine: operations on a bucket of tensors in plain torch; engines with kernels override them.

A codec defines the fields of its messages (`Layout`) and how coordinates become codes (`Coding`). The engine hides the
device. `Engine` processes one tensor at a time: simple, slow, and the fallback without numba or Triton. The other
engines return the same messages bit for bit, and the same sums within rounding.

Tensor suffixes: W local workers, S senders, R rows, T tensors, M blocks of all tensors, N coordinates.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from accordion_bench.codecs.bucket import Bucket, NonFiniteRow, Target, refuse_non_finite
from accordion_bench.codecs.coding import LARGEST, SIGNS, BlockNumbers, Coding, codes_of, factors_of, finished, norms_of
from accordion_bench.codecs.layout import KEPT, Layout, Message, in_blocks, per_tensor, whole_layout
from accordion_bench.codecs.matrix_tiles import TileForm, add_largest_, encode_largest
from accordion_bench.codecs.orthonormal import MatrixOperations, unit_columns_batched
from accordion_bench.codecs.packed_codes import decode_indices, encode_indices, floats_in, look_up, pack_codes
from accordion_bench.codecs.selection import IndexSelection, Sampling, Selection, at_least, sampled_top, top_indices
from accordion_bench.tensors.kernels.dense_kernels import BlockRule
from accordion_bench.tensors.keyed_rng import BLOCK, blocks_of, integers_of
from accordion_bench.tensors.permutations import draws_of, images, words_of
from accordion_bench.tensors.same_shape import runs
from accordion_bench.tensors.upload import fresh, table


class Momenta(NamedTuple):
    """Momenta u and the gradients to add to them.

    us_W, gs_W: momenta and gradients, [W, ...] of each tensor.
    factor: b.
    nesterov: whether to return Nesterov's momentum.
    sums_W: accumulated momenta v of each tensor; empty = none.
    """

    us_W: Sequence[Tensor]
    gs_W: Sequence[Tensor]
    factor: float
    nesterov: bool = False
    sums_W: Sequence[Tensor] = ()


class MomentumSteps(NamedTuple):
    """Optimizer steps by momenta that have been exchanged.

    momenta, sums, inverses: tensors [...].
    masks: zeros where `inverses` are 0, and ones elsewhere; None = ones.
    rates: learning rate of each tensor, see `bucket.rates_of`.
    """

    momenta: Sequence[Tensor]
    sums: Sequence[Tensor]
    inverses: Sequence[Tensor]
    masks: Sequence[Tensor | None]
    rates: Sequence[Any]


class Engine(MatrixOperations):
    """Operations on a bucket of tensors.

    Class attributes:
        name: name of the implementation, for the header of a run.
        checks_input: whether non-finite input is refused. On a GPU the input is not checked, because that would
            synchronise with the host; non-finite values propagate to the sum.
        one_by_one: whether products of matrices of different sizes cost no more than products of equal sizes.
        fills: whether to pass uninitialised memory for sums. On a CPU the system provides zeros without a pass.
    """

    name = "torch"
    checks_input: bool = True
    one_by_one: bool = False
    fills: bool = False

    # ---- dense codes: one code per coordinate

    def norms(self, bucket: Bucket, layout: Layout, *kinds: str) -> list[Tensor]:
        """Return one number per block, float64 [W, M] for each kind; non-finite where a coordinate is non-finite.

        Args:
            bucket, layout: coordinates, and layout that defines the blocks.
            kinds: `l1`, `l2`, `linf`; `sum` of the coordinates; `below`: sum of the negative ones; `count`: number of
                the negative ones.
        """
        pairs = zip(bucket.rows_W, layout.blocks.tolist(), strict=True)
        cells = [in_blocks(x_W.float(), size) for x_W, size in pairs]
        return [norms_of(cells, kind) for kind in kinds]

    def write(self, message: Message, name: str, numbers_S: Tensor) -> None:
        """Write one number per block, float32 [S, M], into a field of messages of one layout."""
        own = message.layout.fields[name]
        parts_S = numbers_S.split(own.counts.tolist(), dim=1)
        for part_S, (start, stop) in zip(parts_S, own.spans, strict=True):
            message.rows[:, start:stop] = part_S.contiguous().view(torch.uint8)

    def read(self, message: Message, name: str, alpha: float = 1.0) -> Tensor:
        """Return a field of one float32 per block, times alpha: [S, M]."""
        spans = message.layout.fields[name].spans
        numbers_S = torch.cat([floats_in(message.rows[:, start:stop]) for start, stop in spans], dim=1)
        return numbers_S if alpha == 1 else numbers_S * alpha

    def encode(self, bucket: Bucket, message: Message, coding: Coding, numbers: BlockNumbers) -> None:
        """Write the numbers of the blocks, and the fields `codes` and `signs`, into messages of the local workers.

        Raises:
            NonFiniteRow: if `checks_input` and the input is non-finite; row w T + t is worker w's part of tensor t.
        """
        layout = message.layout
        if numbers.middles is not None:
            self.write(message, "middles", numbers.middles)
        if numbers.scales is not None:
            self.write(message, header_of(coding), numbers.scales)
        factors, draws = per_tensor(numbers.factors, layout), _draws(bucket, coding) if coding.bits else None
        for t, (x_W, size) in enumerate(zip(bucket.rows_W, layout.blocks.tolist(), strict=True)):
            n, draws_W = x_W.shape[1], None if draws is None else in_blocks(draws[t][:, : x_W.shape[1]], size)
            if self.checks_input and not coding.norm:
                refuse_non_finite(x_W.float(), t, len(bucket.specs))
            factor_W = None if factors[t] is None else factors[t][..., None]
            codes_W = codes_of(in_blocks(x_W.float(), size), factor_W, draws_W, coding).flatten(1)[:, :n]
            streams = {"codes": (codes_W, coding.kinds)}
            if coding.signs:
                streams["signs"] = ((x_W < 0).to(torch.uint8), 2)
            for name, (own_W, kinds) in streams.items():
                start, stop = layout.fields[name].spans[t]
                message.rows[:, start:stop] = pack_codes(own_W.contiguous(), kinds)

    def add_codes(
        self, target: Target, message: Message, coding: Coding, shared: Tensor | None, middles: Tensor | None
    ) -> None:
        """Add the decoded values of all senders; each product and each sum is rounded once.

        Args:
            target: sums, with alpha and divisor.
            message: messages of all senders; the field `header_of(coding)` contains the scales.
            coding: description of the codes.
            shared: scales of whole tensors, float32 [T], if messages contain none.
            middles: offsets of the scaled values, already multiplied by alpha, float32 [S, M]; None = 0.
        """
        target, layout, scales = target.begun(), message.layout, shared
        if coding.norm:
            scales = self.read(message, header_of(coding))
        elif scales is not None:
            scales = scales.expand(len(message.rows), -1)
        scaled, added = per_tensor(scales, layout), per_tensor(middles, layout)
        for t, (row_R, size) in enumerate(zip(target.rows_R, layout.blocks.tolist(), strict=True)):
            values_S = in_blocks(_values(message, coding, t), size)
            factor: Any = target.alpha if scaled[t] is None else (scaled[t] * target.alpha)[..., None]
            values_S = values_S * factor
            if added[t] is not None:
                values_S = added[t][..., None] + values_S
            for sender, values in enumerate(values_S.flatten(1)[:, : row_R.shape[1]]):
                row_R[sender % len(row_R)].add_(values)
        target.divide_()

    def numbers(self, bucket: Bucket, layout: Layout, rule: BlockRule) -> list[Tensor]:
        """Return the numbers that a rule derives from the norms of all blocks, float32 [W, M]; see `finished`."""
        norms_W = self.norms(bucket, layout, *rule.norms)
        return finished(rule, norms_W, entries_on(layout, norms_W[0].device))

    def factors(self, rule: BlockRule, scales: Tensor) -> Tensor:
        """Return the factors of coordinates, given the scales of their blocks."""
        return factors_of(rule, scales)

    def largest_of(self, bucket: Bucket) -> Tensor:
        """Return the largest magnitude of every tensor, float32 [W, T]; 0 for an empty tensor."""
        (found_W,) = self.numbers(bucket, whole_layout(bucket.numels), LARGEST)
        if all(bucket.numels):
            return found_W
        columns, zeros_W = iter(found_W.unbind(1)), found_W.new_zeros(len(found_W))
        return torch.stack([next(columns) if n else zeros_W for n in bucket.numels], dim=1)

    def encode_dense(self, bucket: Bucket, message: Message, coding: Coding, shared: Tensor | None = None) -> None:
        """Write scales and codes of all coordinates, and keep the quantisation error in the residuals.

        Args:
            bucket: coordinates, with residuals if `bucket.feedback` is set, see `Feedback`.
            message: messages of the local workers, with the fields of `Dense.layout`.
            coding: description of the codes.
            shared: scales of whole tensors, equal on all workers, float32 [T], if messages contain none.

        Raises:
            NonFiniteRow: as `encode`.
        """
        formed, feedback = bucket.formed(), bucket.feedback
        self.encode_formed(formed, message, coding, shared)
        if feedback is not None:
            self.add_dense(Target(feedback.rows_W, -1.0), message, coding, shared)
            feedback.mask()

    def encode_formed(self, bucket: Bucket, message: Message, coding: Coding, shared: Tensor | None = None) -> None:
        """Write scales and codes without residuals, by `numbers` and `encode`; arguments as for `encode_dense`."""
        layout, rule, numbers = message.layout, coding.rule, BlockNumbers()
        if rule.norms:
            first_W, *rest = self.numbers(bucket, layout, rule)
            self._refuse(layout, first_W)
            if rule.kind == "means":
                self._refuse(layout, rest[0])
                numbers = BlockNumbers(rest[0], middles=first_W)
            else:
                numbers = BlockNumbers(first_W, *rest)
        elif shared is not None:
            numbers = BlockNumbers(factors=self.factors(rule, shared[None]))
        self.encode(bucket, message, coding, numbers)

    def _refuse(self, layout: Layout, numbers_W: Tensor) -> None:
        """Raise NonFiniteRow if a number of a block [W, M] is non-finite."""
        if self.checks_input and not numbers_W.isfinite().all():
            w, block = (~numbers_W.isfinite()).nonzero()[0].tolist()
            tensor = int(np.searchsorted(layout.counts.cumsum(), block, side="right"))
            raise NonFiniteRow(w * len(layout.counts) + tensor)

    def add_dense(self, target: Target, message: Message, coding: Coding, shared: Tensor | None = None) -> None:
        """Add scale x decoded value of every sender; arguments as for `encode_dense` and `add_codes`."""
        middles = self.read(message, "middles", target.alpha) if coding.norm == "means" else None
        self.add_codes(target, message, coding, shared, middles)

    # ---- sparse codes: selected coordinates and their indices

    def largest(self, rows_W: Sequence[Tensor], counts: Sequence[int]) -> Selection:
        """Select the `counts` [T] largest magnitudes of each tensor's rows [W, N]; ties go to the lower index.

        NaN counts as the largest magnitude, so that it reaches the check of the packed values.
        """
        return IndexSelection([list(top_indices(x_W, k)) for x_W, k in zip(rows_W, counts, strict=True)])

    def above(self, rows_W: Sequence[Tensor], threshold: float, most: Sequence[int]) -> Selection:
        """Select magnitudes of at least a threshold, at most the `most` [T] largest of each row."""

        def found(row: Tensor, k: int) -> Tensor:
            own = at_least(row, threshold)
            return own if len(own) <= k else own[top_indices(row[own][None], k)[0]]

        return IndexSelection([[found(row, k) for row in x_W] for x_W, k in zip(rows_W, most, strict=True)])

    def about(self, rows_W: Sequence[Tensor], counts: Sequence[int], sampling: Sampling) -> Selection:
        """Select about `counts` [T] of the largest non-zero magnitudes of each row, see `selection.sampled_top`."""
        pairs = zip(rows_W, counts, strict=True)
        return IndexSelection([[sampled_top(row, k, *sampling) for row in x_W] for x_W, k in pairs])

    def nonzero(self, rows_W: Sequence[Tensor]) -> Selection:
        """Select all non-zero coordinates."""
        return IndexSelection([[row.nonzero()[:, 0] for row in x_W] for x_W in rows_W])

    def encode_sparse(self, bucket: Bucket, selection: Selection, message: Message) -> None:
        """Write the selected coordinates into all fields of `SparseLayout`s.

        Raises:
            NonFiniteRow: as `encode`, for selected values.
        """
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
        """Add the entries of every sender."""
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
        target.divide_()

    def select_in_bins(
        self, residuals_W: Sequence[Tensor], news_W: Sequence[Tensor], sizes: Sequence[int]
    ) -> tuple[list[Tensor], Tensor]:
        """Send G = e + news as +-scale where |G + news| reaches the largest |G| of its bin, else as 0; e <- G - sent.

        Args:
            residuals_W: residuals e [W, N], updated in place.
            news_W: newest gradients [W, N].
            sizes: number of consecutive coordinates per bin, for each tensor.

        Returns:
            values to send [W, N]; scales [W, T]: mean over the bins of a row of their largest magnitudes, float32.
        """
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

    def encode_tiles(self, bucket: Bucket, message: Message, forms: Sequence[TileForm]) -> None:
        """Write the largest magnitudes of each tile of matrices, see `matrix_tiles.encode_largest`.

        Raises:
            NonFiniteRow: as `encode`, for selected values.
        """
        for t, (x_W, form) in enumerate(zip(bucket.rows_W, forms, strict=True)):
            parts = encode_largest(x_W, form)
            if self.checks_input:
                refuse_non_finite(parts[0], t, len(forms))
            for part_W, field in zip(parts, message.layout.fields.values(), strict=True):
                start, stop = field.spans[t]
                message.rows[:, start:stop] = part_W.view(torch.uint8)

    def add_tiles(self, target: Target, message: Message, forms: Sequence[TileForm]) -> None:
        """Add the entries of every sender."""
        target, starts = target.begun(), message.layout.starts
        for row_R, form, start in zip(target.rows_R, forms, starts, strict=True):
            own_S = message.rows[:, start : start + sum(form.parts)]
            for message_R in own_S.unflatten(0, (-1, len(row_R))):
                add_largest_(row_R, message_R, form, target.alpha)
        target.divide_()

    # ---- momenta

    def add_momenta(self, momenta: Momenta) -> Sequence[Tensor]:
        """Update momenta in place: u <- b u + g.

        Returns:
            u; with `nesterov` g + b u in new tensors. With sums, v after v <- v + u; with sums and `nesterov`, v after
            u <- b (u + g) and v <- v + u + g.
        """
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
        """Set momenta to sums x masks in place; return momentum x inverse x rate."""
        momenta, sums, inverses, masks, rates = given
        torch._foreach_copy_(list(momenta), list(sums))
        if alive := [(m, mask) for m, mask in zip(momenta, masks, strict=True) if mask is not None]:
            torch._foreach_mul_([m for m, _ in alive], [mask for _, mask in alive])
        steps = torch._foreach_mul(list(momenta), list(inverses))
        for _, alike in itertools.groupby(zip(rates, steps, strict=True), key=lambda pair: id(pair[0])):
            of_rate = list(alike)
            torch._foreach_mul_([step for _, step in of_rate], of_rate[0][0])
        return list(steps)

    # ---- coordinates that are equal for all workers

    def places(
        self, keys: Callable[[Bucket], Sequence[int]], counts: Sequence[int], bucket: Bucket, device: torch.device
    ) -> Any:
        """Draw coordinates of each tensor for `take` and `put`; all engines draw the same.

        They are the first images of a keyed permutation of the coordinates, in that order, see `permutations`.

        Args:
            keys: function of the bucket at any step that returns a key per tensor.
            counts: number of coordinates per tensor.
            bucket, device: tensors, and their device.
        """
        draws = draws_of(bucket.numels, tuple(counts))
        return images(draws, fresh(lambda moment: words_of(keys(bucket.at(moment))), bucket, device))

    def take(self, rows_W: Sequence[Tensor], places: Any) -> list[Tensor]:
        """Return the coordinates [W, k] of each tensor's rows [W, N] at these places."""
        return [x_W.index_select(1, index) for x_W, index in zip(rows_W, places, strict=True)]

    def put(self, target: Target, values_R: Sequence[Tensor], places: Any, factors: Sequence[float]) -> None:
        """Add alpha x factor x values [R, k] to each tensor's rows at these places."""
        target = target.begun()
        for row_R, own_R, index, factor in zip(target.rows_R, values_R, places, factors, strict=True):
            for row, own in zip(row_R, own_R, strict=True):  # index_add_ along the second dimension is 40 times slower
                row.index_add_(0, index, own, alpha=target.alpha * factor)


class OnDevice(Engine):
    """Engine of a device without kernels, in plain torch."""

    checks_input, copies, fills = False, True, True

    def orthonormalise(self, factors: Sequence[Tensor], passes: int = 2) -> list[Tensor]:
        return unit_columns_batched(factors, passes) if factors else []


def header_of(coding: Coding) -> str:
    """Return the name of the field with the scales of the values."""
    return "halves" if coding.norm == "means" else "scales"


@functools.lru_cache(maxsize=KEPT)
def entries_on(layout: Layout, device: torch.device) -> Tensor:
    """Return the number of coordinates per block of a layout, float64 [M], on a device."""
    return table(torch.from_numpy(layout.entries), device)


def _draws(bucket: Bucket, coding: Coding) -> list[Tensor]:
    """Return random integers below 2^bits for each tensor, padded to whole blocks, [W, blocks x BLOCK]."""
    counts, cpu = [-(-n // BLOCK) for n in bucket.numels], torch.device("cpu")
    device = bucket.rows_W[0].device
    blocks_W = fresh(lambda moment: blocks_of(bucket.at(moment).keys(coding.stream), counts, cpu), bucket, device)
    return [integers_of(own_W, coding.bits) for own_W in blocks_W.split(counts, dim=1)]


def _values(message: Message, coding: Coding, t: int) -> Tensor:
    """Return the decoded values of tensor t without scales, float32 [S, N]."""
    n = int(message.layout.numels[t])
    start, stop = message.layout.fields["codes"].spans[t]
    values_S = look_up(message.rows[:, start:stop].contiguous(), coding.values, n)
    if coding.signs:
        start, stop = message.layout.fields["signs"].spans[t]
        values_S = values_S * look_up(message.rows[:, start:stop].contiguous(), SIGNS, n)
    return values_S
