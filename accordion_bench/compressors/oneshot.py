"""OneShot: compressors that are two pure functions, `encode` and `decode`.

Tensor suffixes: W local workers, A all workers, R rows (one worker's view of one tensor each), N elements, B bytes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from accordion_bench.codecs.bucket import Bucket, Context, Target, by_level
from accordion_bench.codecs.layout import Layout, Message, bytes_layout
from accordion_bench.codecs.non_finite import NonFiniteRow
from accordion_bench.compressors.gathered import Gathered
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors import keyed_rng, large_pages
from accordion_bench.tensors.same_shape import as_matrices

SMALL = 1 << 16  # coordinates that are copied at less cost than they are encoded apart


class OneShot(Gathered):
    """update = mean_w decode(encode(g_w)), tensor by tensor; their messages stand in one buffer, one after the other.

    A subclass has two pure functions. `encode` turns each row of coordinates into a message that holds everything a
    receiver needs; `decode` (or `add_decoded_`, which saves a pass) is its inverse up to what was lost. `message_bytes`
    says how long the message is.
    """

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
        """Decode messages of tensors of one level into sums, sender a into row a mod R; then / divisor."""
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

    def layout(self, specs: Sequence[TensorSpec], levels: Sequence[float]) -> Layout:
        sizes = [self.message_bytes(spec, level) for spec, level in zip(specs, levels, strict=True)]
        return bytes_layout(tuple(spec.numel for spec in specs), tuple(sizes))

    def keys(self, ctx: Context, name: str, workers: Sequence[int], purpose: str = "") -> list[int]:
        """Keys for the random draws of one tensor, a different one for each worker."""
        stream = self.stream or type(self).__name__
        return [keyed_rng.key(ctx.seed, stream, purpose, name, ctx.step, worker) for worker in workers]

    def encode_bucket(self, bucket: Bucket) -> Message:
        layout = self.layout(bucket.specs, bucket.levels)
        message = Message.empty(layout, len(bucket.workers), bucket.rows_W[0].device)
        for level, ks in by_level(bucket.levels):
            part = bucket.take(ks)
            own = layout.take(ks).starts, part.rows_W, part.specs
            try:
                self.encode_into_(message.rows, *own, level, bucket, bucket.workers, bucket.purpose)
            except NonFiniteRow as bad:
                worker, k = divmod(bad.row, len(ks))
                raise NonFiniteRow(worker * len(bucket.specs) + ks[k]) from None
        return message

    def add_bucket_(self, target: Target, message: Message, bucket: Bucket) -> None:
        for level, ks in by_level(bucket.levels):
            part, rows_R = bucket.take(ks), target.take(ks).rows_R
            starts = message.layout.take(ks).starts
            self.add_from_(rows_R, message.rows, starts, part.specs, level, bucket, target.alpha, target.divisor)


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
