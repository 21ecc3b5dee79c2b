"""OneShot: base class of compressors that consist of two pure functions, `encode` and `decode`.

Tensor suffixes: W local workers, A all workers, R rows (one worker's view of one tensor each), N elements, B bytes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from accordion_bench.codecs.bucket import Bucket, Context, NonFiniteRow, Target
from accordion_bench.codecs.engines import engine_for
from accordion_bench.codecs.layout import Layout, Message, bytes_layout
from accordion_bench.compressors.gathered import Gathered
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors import keyed_rng
from accordion_bench.tensors.same_shape import as_matrices, zero_rows

SMALL = 1 << 16  # coordinates up to which copying costs less than a separate encoding


class OneShot(Gathered):
    """update = mean_w decode(encode(g_w)), tensor by tensor; the messages are contiguous in one buffer.

    A subclass defines two pure functions. `encode` turns each row of coordinates into a message that contains
    everything a receiver needs; `decode` (or `add_decoded_`, which saves a pass) is its inverse up to the error.
    `message_bytes` returns the length of the message.

    Example:
        >>> class Half(OneShot):
        ...     def message_bytes(self, spec, level): return 2 * spec.numel
        ...     def encode(self, x_R, spec, level, ctx, keys): return x_R.half().view(torch.uint8)
        ...     def decode(self, message_R, spec, level, ctx): return message_R.view(torch.float16).float()
        >>> spec = TensorSpec("weight", (3,))
        >>> message_R = Half().encode(torch.tensor([[0.5, -2.0, 4.0]]), spec, 0, None, keys=[0])
        >>> message_R.shape, Half().decode(message_R, spec, 0, None)
        (torch.Size([1, 6]), tensor([[ 0.5000, -2.0000,  4.0000]]))
    """

    def encode(self, x_R: Tensor, spec: TensorSpec, level: float, ctx: Context, keys: Sequence[int]) -> Tensor:
        """Encode rows [R, N] as messages of bytes [R, B].

        Args:
            x_R: coordinates, float32 or float64.
            spec, level, ctx: of the tensors encoded together, with the name of the first one.
            keys: one per row, for keyed draws.

        Raises:
            NonFiniteRow: for NaN and infinity, which cannot be encoded.
        """
        raise NotImplementedError

    def decode(self, message_R: Tensor, spec: TensorSpec, level: float, ctx: Context) -> Tensor:
        """Decode messages [R, B] to rows [R, N] of float32."""
        rows_R = zero_rows(len(message_R), spec.numel, message_R.device)
        self.add_decoded_(rows_R, message_R[None], spec, level, ctx)
        return rows_R

    def message_bytes(self, spec: TensorSpec, level: float) -> int:
        """Return B, the length of a message, or the largest possible length if `fixed_size` is false."""
        raise NotImplementedError

    def add_decoded_(
        self, total_R: Tensor, message_AR: Tensor, spec: TensorSpec, level: float, ctx: Context, alpha: float = 1.0
    ) -> None:
        """Compute total_R [R, N] += alpha x sum_a decode(message_AR[a]), in the order of a; define this or `decode`."""
        for message_R in message_AR:
            total_R.add_(self.decode(message_R, spec, level, ctx).to(total_R.dtype), alpha=alpha)

    def layout(self, specs: Sequence[TensorSpec], levels: Sequence[float]) -> Layout:
        sizes = [self.message_bytes(spec, level) for spec, level in zip(specs, levels, strict=True)]
        return bytes_layout(tuple(spec.numel for spec in specs), tuple(sizes))

    def keys(self, ctx: Context, name: str, workers: Sequence[int], purpose: str = "") -> list[int]:
        """Return the keys for the random draws of one tensor, a different one for each worker."""
        stream = self.stream or type(self).__name__
        return [keyed_rng.key(ctx.seed, stream, purpose, name, ctx.step, worker) for worker in workers]

    def encode_bucket(self, bucket: Bucket) -> Message:
        """Encode the tensors of a bucket; tensors of equal shape and level are encoded together."""
        layout, W = self.layout(bucket.specs, bucket.levels), len(bucket.workers)
        message = Message.empty(layout, W, bucket.rows_W[0].device)
        for ks in together(bucket, bucket.rows_W):
            spec, level, x_R = bucket.specs[ks[0]], bucket.levels[ks[0]], rows_of([bucket.rows_W[k] for k in ks])
            keys_G = [self.keys(bucket, bucket.specs[k].name, bucket.workers, bucket.purpose) for k in ks]
            try:
                message_R = self.encode(
                    x_R, spec, level, bucket, [key for keys in zip(*keys_G, strict=True) for key in keys]
                )
            except NonFiniteRow as bad:
                worker, g = divmod(bad.row, len(ks))
                raise NonFiniteRow(worker * len(bucket.specs) + ks[g]) from None
            promised, given = self.message_bytes(spec, level), message_R.shape[1]
            if given != promised:
                said = f"encode gives {given} bytes for {spec.name}, message_bytes promises {promised}"
                raise AssertionError(f"{said}: messages are not as long as they claim")
            places = [message.rows[:, layout.starts[k] : layout.starts[k] + given] for k in ks]
            torch._foreach_copy_(places, list(message_R.unflatten(0, (W, len(ks))).unbind(1)))
        return message

    def add_bucket_(self, target: Target, message: Message, bucket: Bucket) -> None:
        """Decode the tensors of a bucket; tensors of equal shape and level are decoded together if copies are cheap."""
        rows_R, spans = target.rows_R, message.layout.fields["bytes"].spans
        together_too = bool(rows_R) and engine_for(rows_R).copies
        for ks in together(bucket, rows_R) if together_too else [[k] for k in range(len(rows_R))]:
            sent = [
                message.rows[:, start:stop].unflatten(0, (-1, len(rows_R[0]))) for start, stop in (spans[k] for k in ks)
            ]
            one = len(ks) == 1
            total_R = rows_R[ks[0]] if one else torch.stack([rows_R[k] for k in ks], dim=1).flatten(0, 1)
            message_AR = sent[0] if one else torch.stack(sent, dim=2).flatten(1, 2)
            spec, level = bucket.specs[ks[0]], bucket.levels[ks[0]]
            self.add_decoded_(total_R, message_AR, spec, level, bucket, target.alpha)
            if not one:
                parts = total_R.unflatten(0, (-1, len(ks))).unbind(1)
                torch._foreach_copy_([rows_R[k] for k in ks], list(parts))
        if target.divisor != 1:
            torch._foreach_div_(list(rows_R), target.divisor)


def together(bucket: Bucket, rows_W: Sequence[Tensor]) -> list[list[int]]:
    """Group tensors of equal shape and level; large tensors are grouped only if they are adjacent in memory."""
    found: dict[tuple[tuple[int, ...], float], list[int]] = {}
    for k, (spec, level) in enumerate(zip(bucket.specs, bucket.levels, strict=True)):
        found.setdefault((spec.shape, level), []).append(k)
    groups = []
    for ks in found.values():
        copied = len(ks) == 1 or bucket.specs[ks[0]].numel <= SMALL
        whole = copied or side_by_side([rows_W[k] for k in ks]) is not None
        groups += [ks] if whole else [[k] for k in ks]
    return groups


def rows_of(xs_W: Sequence[Tensor]) -> Tensor:
    """Return equal-shaped tensors [W, ...] as rows [W*G, N], worker by worker; without a copy if adjacent in memory."""
    together = side_by_side(xs_W)
    if together is None:
        together = torch.stack([x.flatten(1) for x in xs_W], dim=1).flatten(0, 1)
    return together


def side_by_side(xs_W: Sequence[Tensor]) -> Tensor | None:
    """Return equal-shaped tensors [W, ...] as rows [W*G, N] without a copy; None if they are not adjacent in memory."""
    numel = xs_W[0][0].numel()
    together = as_matrices(xs_W, (1, numel))
    return None if together is None else together.reshape(len(xs_W) * xs_W[0].shape[0], numel)
