"""OneShot: compressors that are two pure functions, `encode` and `decode`.

Tensor suffixes: W local workers, A all workers, R rows (one worker's view of one tensor each), N elements, B bytes.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors import packed_codes
from accordion_bench.compressors.base import (
    Compressor,
    Context,
    Exchanged,
    NonFinite,
    State,
    WhyDense,
    dense_bytes,
    ring,
    subtract_,
)
from accordion_bench.compressors.entropy import coded_bytes
from accordion_bench.compressors.non_finite_row import NonFiniteRow
from accordion_bench.compressors.traits import Traits
from accordion_bench.options.units import counted
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors import keyed_rng, large_pages
from accordion_bench.tensors.same_shape import as_matrices

SMALL = 1 << 16  # coordinates that are copied at less cost than they are encoded apart


class OneShot(Compressor):
    """update = mean_w decode(encode(g_w)), tensor by tensor; their messages stand in one buffer, one after the other.

    A subclass has two pure functions. `encode` turns each row of coordinates into a message that holds everything a
    receiver needs; `decode` (or `add_decoded_`, which saves a pass) is its inverse up to what was lost. `message_bytes`
    says how long the message is.

    Carried by an all-gather. Where that would cost more wire than a dense all-reduce, what would have been decoded goes
    by dense all-reduce: the number of workers changes the bytes, never the training (up to the order of summation).
    """

    traits = Traits(collectives=("all_gather", "two_way"), collective_reason="its messages do not add up")
    entropy: str = "none"  # how entropy_bytes counts the codes, see `entropy.coded_bytes`

    # ---- what a subclass writes

    def encode(self, x_R: Tensor, spec: TensorSpec, level: float, ctx: Context, keys: Sequence[int]) -> Any:
        """Rows [R, N] as messages of bytes [R, B].

        Args:
            x_R: coordinates, float32 or float64.
            spec: name (the first of those encoded together), shape.
            level: the knob's value.
            ctx: step, seed, codebooks.
            keys: one per row, for keyed draws.

        Returns:
            uint8 [R, B]; of an `Uneven` compressor a list of R 1-D messages.

        Raises:
            NonFiniteRow: for NaN and infinity, which have no code.
        """
        raise NotImplementedError

    def decode(self, message_R: Tensor, spec: TensorSpec, level: float, ctx: Context) -> Tensor:
        """Messages [R, B] as rows [R, N] of float32."""
        rows_R = large_pages.zeros(len(message_R), spec.numel, message_R.device)
        self.add_decoded_(rows_R, message_R[None], spec, level, ctx)
        return rows_R

    def message_bytes(self, spec: TensorSpec, level: float) -> int:
        """B, the length of a message; the largest possible one where `fixed_size` is false."""
        raise NotImplementedError

    def add_decoded_(
        self, total_R: Tensor, message_AR: Tensor, spec: TensorSpec, level: float, ctx: Context, alpha: float = 1.0
    ) -> None:
        """total_R [R, N] += alpha x sum_a decode(message_AR[a]), in the order of a: write this or `decode`."""
        for message_R in message_AR:
            total_R.add_(self.decode(message_R, spec, level, ctx).to(total_R.dtype), alpha=alpha)

    def codes_of(
        self, message_A: Tensor, spec: TensorSpec, level: float, ctx: Context
    ) -> tuple[Tensor, Sequence[float]]:
        """The codes [A, N] in messages [A, B] and their codebook, where `entropy` is offered."""
        raise NotImplementedError

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
        """Encode tensors of one level into a buffer; here shape by shape, by `encode`.

        Args:
            message_W: bytes [W, B].
            starts: where in it the message of each tensor begins.
            rows_W: their coordinates [W, N].
            specs: names and shapes.
            level, ctx: as for `encode`.
            workers: the numbers of those whose rows these are, for keyed draws.
            purpose: what else draws hang on.

        Raises:
            NonFiniteRow: row w T + t is the tensor t of the w-th of these workers.
            AssertionError: a message is not as long as `message_bytes` says.
        """
        for ks in alike(specs, rows_W):
            spec, x_R = specs[ks[0]], rows_of([rows_W[k] for k in ks])
            keys_G = [self.keys(ctx, specs[k].name, workers, purpose) for k in ks]
            try:
                message_R = self.encode(
                    x_R, spec, level, ctx, [key for keys in zip(*keys_G, strict=True) for key in keys]
                )
            except NonFiniteRow as bad:
                row, g = divmod(bad.row, len(ks))
                raise NonFiniteRow(row * len(specs) + ks[g]) from None
            promised, given = self.message_bytes(spec, level), message_R.shape[1]
            if given != promised:
                said = f"encode gives {given} bytes for {spec.name}, message_bytes promises {promised}"
                raise AssertionError(f"{said}: messages are not as long as they claim")
            put_(message_W, [starts[k] for k in ks], message_R.unflatten(0, (-1, len(ks))).unbind(1))

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
        """Decode messages of tensors of one level into sums; arguments as for `encode_into_` and `add_all_`."""
        ends = [start + self.message_bytes(spec, level) for start, spec in zip(starts, specs, strict=True)]
        own_A = [message_A[:, start:end] for start, end in zip(starts, ends, strict=True)]
        rows = len(targets_R[0])
        if message_A.device.type == "cpu":
            for target_R, message, spec in zip(targets_R, own_A, specs, strict=True):
                self.add_decoded_(target_R, message.unflatten(0, (-1, rows)), spec, level, ctx, alpha)
        else:  # a launch costs more than a copy
            together = alike(specs, targets_R)
            sizes = [rows * len(ks) * specs[ks[0]].numel for ks in together]
            parts: dict[int, Tensor] = {}
            for ks, zeros in zip(together, targets_R[0].new_zeros(sum(sizes)).split(sizes), strict=True):
                sums_R = zeros.view(rows * len(ks), specs[ks[0]].numel)
                message_AG = torch.stack([own_A[k] for k in ks], dim=1) if len(ks) > 1 else own_A[ks[0]][:, None]
                message_AR = message_AG.unflatten(0, (-1, rows)).flatten(1, 2)
                self.add_decoded_(sums_R, message_AR, specs[ks[0]], level, ctx)
                parts |= zip(ks, sums_R.unflatten(0, (rows, -1)).unbind(1), strict=True)
            torch._foreach_add_(list(targets_R), [parts[k] for k in range(len(specs))], alpha=alpha)
        if divisor != 1:
            torch._foreach_div_(list(targets_R), divisor)

    # ---- what it gets for that

    def gathers(self, spec: TensorSpec, level: float, workers: int) -> bool:
        """Whether the message costs less wire than a dense all-reduce: (A-1) B < 2 (A-1)/A 4n."""
        return self.sent_bytes(spec, level) * max(workers, 2) < 8 * spec.numel

    def why_dense(self, spec: TensorSpec, level: float, workers: int) -> WhyDense | None:
        if not self.compresses(spec, level) or self.gathers(spec, level, workers):
            return None
        at = f" at {self.traits.knob} {level:g}" if self.traits.knob else ""
        reason = f"messages{at} from {counted(workers, 'worker')}, gathered, would cost more than a dense all-reduce"
        two_way = "compressor.collective=two_way" if "two_way" in self.traits.collectives else ""
        return WhyDense(reason, " or ".join(filter(None, [two_way, self._lower_knob()])) or "fewer workers")

    def sent_bytes(self, spec: TensorSpec, level: float) -> int:
        """What a worker hands over for this tensor."""
        return self.message_bytes(spec, level)

    def payload_bytes(self, spec: TensorSpec, level: float | None, workers: int) -> float:
        if level is None or not self.compresses(spec, level) or not self.gathers(spec, level, workers):
            return dense_bytes(spec)
        return self.sent_bytes(spec, level)

    def wire_bytes(self, spec: TensorSpec, level: float | None, workers: int) -> float:
        if level is None or not self.compresses(spec, level) or not self.gathers(spec, level, workers):
            return ring(workers) * dense_bytes(spec)
        return (workers - 1) * self.sent_bytes(spec, level)

    def keys(self, ctx: Context, name: str, workers: Sequence[int], purpose: str = "") -> list[int]:
        """Keys for the rounding noise of one tensor, a different one for each worker."""
        return [keyed_rng.key(ctx.seed, type(self).__name__, purpose, name, ctx.step, worker) for worker in workers]

    def sizes(self, specs: Sequence[TensorSpec], levels: Sequence[float]) -> list[int]:
        """The bytes of each message."""
        return [self.message_bytes(spec, level) for spec, level in zip(specs, levels, strict=True)]

    def encode_all(
        self,
        rows_W: Sequence[Tensor],
        specs: Sequence[TensorSpec],
        levels: Sequence[float],
        ctx: Context,
        workers: Sequence[int],
        purpose: str = "",
    ) -> Any:
        """Tensors [W, N] as messages, one after the other in one buffer: bytes [W, B]; see `encode_into_`."""
        starts = [0, *itertools.accumulate(self.sizes(specs, levels))]
        message_W = torch.empty(
            len(workers), starts.pop(), dtype=torch.uint8, device=rows_W[0].device if rows_W else None
        )
        for level, ks in of_one_level(levels):
            own = [starts[k] for k in ks], [rows_W[k] for k in ks], [specs[k] for k in ks]
            try:
                self.encode_into_(message_W, *own, level, ctx, workers, purpose)
            except NonFiniteRow as bad:
                worker, k = divmod(bad.row, len(ks))
                raise NonFiniteRow(worker * len(specs) + ks[k]) from None
        return message_W

    def add_all_(
        self,
        targets_R: Mapping[int, Tensor],
        message_A: Any,
        specs: Sequence[TensorSpec],
        levels: Sequence[float],
        ctx: Context,
        alpha: float = 1.0,
        divisor: int = 1,
    ) -> None:
        """target [R, N] += alpha x what its messages decode to, summed in order; then / divisor.

        Args:
            targets_R: the sums by the tensor's number; what is not there is not decoded.
            message_A: all senders' messages as `encode_all` makes them, [A, B]; sender a goes to row a mod R.
            specs, levels, ctx: as for `encode_all`.
            alpha: 1 or -1.
            divisor: of the whole.
        """
        starts = [0, *itertools.accumulate(self.sizes(specs, levels))]
        for level, of_level in of_one_level(levels):
            if ks := [k for k in of_level if k in targets_R]:
                own = [starts[k] for k in ks], [specs[k] for k in ks]
                self.add_from_([targets_R[k] for k in ks], message_A, *own, level, ctx, alpha, divisor)

    def gathered(self, message_W: Any, specs: Sequence[TensorSpec], levels: Sequence[float], comm: Comm) -> Any:
        """All workers' messages of the first tensors, [A, B]."""
        size = sum(self.sizes(specs, levels))
        return comm.all_gather(message_W[:, :size]) if size else message_W.new_empty(comm.workers, 0)

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        compressed = {
            i: level for i, level in enumerate(ctx.levels) if level is not None and self.compresses(ctx.specs[i], level)
        }
        gathered = [i for i, level in compressed.items() if self.gathers(ctx.specs[i], level, comm.workers)]
        decoded_here = [i for i in compressed if i not in gathered]  # what would have been decoded travels, dense
        sent = Sent(self, [*gathered, *decoded_here], ctx)
        sent.encode(xs_W, comm)

        reduced = sorted(set(range(len(xs_W))) - set(gathered))
        decoded_W = dict(zip(decoded_here, zeros_like([xs_W[i] for i in decoded_here]), strict=True))
        sent.add_own_(decoded_W, 1.0)
        update: list[Tensor] = [xs_W[0]] * len(xs_W) if xs_W else []
        for i, mean in zip(reduced, comm.all_reduce_mean([decoded_W.get(i, xs_W[i]) for i in reduced]), strict=True):
            update[i] = mean
        saved = 0
        if gathered:
            specs, levels = sent.specs[: len(gathered)], sent.levels[: len(gathered)]
            message_A = self.gathered(sent.message, specs, levels, comm)
            means = zeros_like([xs_W[i][:1] for i in gathered])
            rows = {k: mean.flatten(1) for k, mean in enumerate(means)}
            self.add_all_(rows, message_A, specs, levels, ctx, divisor=comm.workers)
            for i, mean in zip(gathered, means, strict=True):
                update[i] = mean[0]
            if self.entropy != "none":
                saved = self._saved(message_A, specs, levels, ctx)
        if self.entropy != "none":
            comm.ledger.entropy_count(saved)

        def subtract_sent_(targets_W: Mapping[int, Tensor]) -> None:
            subtract_({i: target_W for i, target_W in targets_W.items() if i not in compressed}, xs_W)
            sent.add_own_(targets_W, -1.0)

        return Exchanged(update, subtract_sent_)

    def _saved(self, message_A: Tensor, specs: Sequence[TensorSpec], of_specs: Sequence[float], ctx: Context) -> int:
        """Bytes by which entropy coding would shorten all workers' messages."""
        saved, start = 0, 0
        for spec, level in zip(specs, of_specs, strict=True):
            stop = start + self.message_bytes(spec, level)
            codes_A, levels = self.codes_of(message_A[:, start:stop], spec, level, ctx)
            packed = packed_codes.code_bytes(spec.numel, len(levels))
            saved += sum(packed - coded_bytes(row, levels, self.entropy) for row in codes_A)
            start = stop
        return saved


class Sent:
    """Tensors of an exchange, and what the local workers send of them.

    Args:
        compressor: whose messages these are.
        ids: indices of the tensors in the exchange.
        ctx: of the exchange.

    Attributes:
        place: of each tensor among them, by index.
        specs, levels: of each of them.
        message: what `encode_all` has made of them.
    """

    def __init__(self, compressor: OneShot, ids: Sequence[int], ctx: Context) -> None:
        self.compressor, self.ids, self.ctx = compressor, ids, ctx
        self.place = {i: k for k, i in enumerate(ids)}
        self.specs, self.levels = [ctx.specs[i] for i in ids], [level_of(ctx, i) for i in ids]
        self.message: Any = None

    def encode(self, xs_W: Sequence[Tensor], comm: Comm) -> None:
        """Encode them out of all tensors [W, ...] of the exchange.

        Raises:
            NonFinite: naming one of them, and its worker.
        """
        try:
            rows_W = [xs_W[i].flatten(1) for i in self.ids]
            self.message = self.compressor.encode_all(rows_W, self.specs, self.levels, self.ctx, comm.local)
        except NonFiniteRow as bad:
            worker, k = divmod(bad.row, len(self.ids))
            raise non_finite(self.ctx, self.ids[k], comm.first_named + worker) from None

    def add_own_(self, targets_W: Mapping[int, Tensor], alpha: float) -> None:
        """target [W, ...] += alpha x what the local workers have sent of it; by index, those of other tensors stay."""
        rows_W = {
            self.place[i]: target_W.view(len(target_W), -1) for i, target_W in targets_W.items() if i in self.place
        }
        if rows_W:
            self.compressor.add_all_(rows_W, self.message, self.specs, self.levels, self.ctx, alpha)


def level_of(ctx: Context, i: int) -> float:
    """The level of a tensor that is compressed."""
    level = ctx.levels[i]
    assert level is not None
    return level


def of_one_level(levels: Sequence[float]) -> list[tuple[float, list[int]]]:
    """Which tensors have the same level."""
    found: dict[float, list[int]] = {}
    for k, level in enumerate(levels):
        found.setdefault(level, []).append(k)
    return list(found.items())


def alike(specs: Sequence[TensorSpec], rows_W: Sequence[Tensor]) -> list[list[int]]:
    """Tensors of equal shape; on a CPU large ones stand alone, unless they lie side by side."""
    found: dict[tuple[int, ...], list[int]] = {}
    for k, spec in enumerate(specs):
        found.setdefault(spec.shape, []).append(k)
    together = []
    for ks in found.values():
        copied = rows_W[ks[0]].device.type != "cpu" or specs[ks[0]].numel <= SMALL
        whole = len(ks) == 1 or copied or side_by_side([rows_W[k] for k in ks]) is not None
        together += [ks] if whole else [[k] for k in ks]
    return together


def put_(message_W: Tensor, starts: Sequence[int], parts_W: Sequence[Tensor]) -> None:
    """Write bytes [W, b] into messages [W, B] from these places on, in one launch."""
    places = [message_W[:, start : start + part_W.shape[1]] for start, part_W in zip(starts, parts_W, strict=True)]
    torch._foreach_copy_(places, list(parts_W))


def zeros_like(xs: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous zeros of the shapes of some tensors, side by side."""
    if not xs:
        return []
    sizes = [x.numel() for x in xs]
    parts = large_pages.zeros(1, sum(sizes), xs[0].device, xs[0].dtype)[0].split(sizes)
    return [part.view(x.shape) for part, x in zip(parts, xs, strict=True)]


def rows_of(xs_W: Sequence[Tensor]) -> Tensor:
    """Equal-shaped tensors [W, ...] as rows [W*G, N], worker by worker; without a copy where they lie side by side."""
    together = side_by_side(xs_W)
    if together is None:
        together = torch.stack([x.flatten(1) for x in xs_W], dim=1).flatten(0, 1)
    return together


def side_by_side(xs_W: Sequence[Tensor]) -> Tensor | None:
    """Equal-shaped tensors [W, ...] as rows [W*G, N] without a copy; None where they are apart."""
    numel = xs_W[0][0].numel()
    together = as_matrices(xs_W, (1, numel))
    return None if together is None else together.reshape(len(xs_W) * xs_W[0].shape[0], numel)


def non_finite(ctx: Context, i: int, worker: int) -> NonFinite:
    """The error for a tensor that has no code."""
    return NonFinite(f"what worker {worker} was to send of {ctx.specs[i].name} is not finite")
