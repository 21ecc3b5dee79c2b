"""Storage of residuals between exchanges: as floats, or in eight bits per coordinate.

Tensor suffixes: W local workers, B bytes.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from accordion_bench.codecs.bucket import Bucket, Context, Target
from accordion_bench.codecs.layout import Message
from accordion_bench.compressors.compressor import Saved, State
from accordion_bench.compressors.gathered import naming
from accordion_bench.compressors.number_formats import Blockwise
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors.same_shape import Blocks

BLOCK = 256  # coordinates that share one scale
FLOATS, BYTES = "residual_W", "residual_bytes_W"  # keys of the state


class Floats:
    """Residuals [W, ...] in the dtype of the gradients, changed in place."""

    def init(self, specs: Sequence[TensorSpec], workers: int, like: Tensor) -> State:
        """Return residuals of zero for some tensors."""
        tensors_W = Blocks(specs, workers, like).tensors
        return {spec.name: {FLOATS: e_W} for spec, e_W in zip(specs, tensors_W, strict=True)}

    def read(self, ctx: Context, state: State, like: Tensor) -> dict[int, Tensor]:
        """Return, by index, the residuals of an exchange's tensors that have one, as the stored tensors."""
        kept = enumerate(state.get(spec.name, {}).get(FLOATS) for spec in ctx.specs)
        return {i: e_W for i, e_W in kept if e_W is not None}

    def copies(self, ctx: Context, state: State, like: Tensor) -> dict[int, Tensor]:
        """Return copies of the residuals, by index."""
        return {i: e_W.clone() for i, e_W in self.read(ctx, state, like).items()}

    def write(self, residuals_W: Mapping[int, Tensor], ctx: Context, state: State, first_worker: int) -> None:
        """Store residuals that `read` returned and the exchange changed; a no-op for floats, which change in place."""

    def opened(self, kept: Saved) -> dict[str, dict[str, Tensor]]:
        """Return one worker's state entries with residuals as floats."""
        return {name: dict(entries) for name, entries in kept.items()}

    def closed(self, kept: Saved) -> dict[str, dict[str, Tensor]]:
        """Return one worker's state entries in the stored format."""
        return self.opened(kept)


class EightBits(Floats):
    """Residuals as int8 with a float32 scale per block of 256 coordinates: 1.016 bytes per coordinate.

    e is stored as s_b round(e / s_b), s_b = max |e_b| / 127, so that the rounding error is at most s_b / 2 per
    coordinate. Residuals are encoded by the codec of `compressor=int8`. During the exchange of a bucket its residuals
    are floats.
    """

    def __init__(self) -> None:
        self.codec = Blockwise("int8", BLOCK)
        self.specs: dict[str, TensorSpec] = {}

    def init(self, specs: Sequence[TensorSpec], workers: int, like: Tensor) -> State:
        self.specs.update((spec.name, spec) for spec in specs)
        sizes = {spec.name: self.codec.message_bytes(spec, 1) for spec in specs}
        return {name: {BYTES: like.new_zeros(workers, size, dtype=torch.uint8)} for name, size in sizes.items()}

    def read(self, ctx: Context, state: State, like: Tensor) -> dict[int, Tensor]:
        kept = enumerate(state.get(spec.name, {}).get(BYTES) for spec in ctx.specs)
        bytes_W = {i: own_W for i, own_W in kept if own_W is not None}
        found = self._decoded([ctx.specs[i] for i in bytes_W], list(bytes_W.values()), like)
        return dict(zip(bytes_W, found, strict=True))

    def copies(self, ctx: Context, state: State, like: Tensor) -> dict[int, Tensor]:
        return self.read(ctx, state, like)

    def write(self, residuals_W: Mapping[int, Tensor], ctx: Context, state: State, first_worker: int) -> None:
        """Encode and store the residuals.

        Raises:
            NonFinite: a residual is not finite.
        """
        ids = list(residuals_W)
        with naming(ctx, ids, first_worker):
            coded = self._encoded([ctx.specs[i] for i in ids], [residuals_W[i] for i in ids])
        if ids:
            torch._foreach_copy_([state[ctx.specs[i].name][BYTES] for i in ids], coded)

    def opened(self, kept: Saved) -> dict[str, dict[str, Tensor]]:
        return self._changed(
            kept, lambda specs, x_W: self._decoded(specs, x_W, x_W[0].new_zeros((), dtype=torch.float64))
        )

    def closed(self, kept: Saved) -> dict[str, dict[str, Tensor]]:
        return self._changed(kept, self._encoded)

    def _changed(
        self, kept: Saved, change: Callable[[Sequence[TensorSpec], Sequence[Tensor]], list[Tensor]]
    ) -> dict[str, dict[str, Tensor]]:
        found = {name: dict(entries) for name, entries in kept.items()}
        for name, spec in self.specs.items():
            if (own := found.get(name, {}).get(BYTES)) is not None:
                found[name][BYTES] = change([spec], [own[None]])[0][0]
        return found

    def _bucket(self, specs: Sequence[TensorSpec], xs_W: Sequence[Tensor]) -> Bucket:
        return Bucket(0, specs, [1] * len(specs), xs_W=xs_W, workers=range(len(xs_W[0])))

    def _decoded(self, specs: Sequence[TensorSpec], bytes_W: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        """Decode messages [W, B] of each tensor to floats [W, ...] of the dtype of `like`."""
        if not specs:
            return []
        tensors_W, layout = Blocks(specs, len(bytes_W[0]), like).tensors, self.codec.layout(specs, [1] * len(specs))
        message = Message(torch.cat(list(bytes_W), dim=1), [layout] * len(bytes_W[0]))
        bucket = self._bucket(specs, tensors_W)
        self.codec.add_bucket_(Target(bucket.rows_W), message, bucket)
        return tensors_W

    def _encoded(self, specs: Sequence[TensorSpec], xs_W: Sequence[Tensor]) -> list[Tensor]:
        if not specs:
            return []
        message = self.codec.encode_bucket(self._bucket(specs, xs_W))
        return list(message.rows.split(message.layout.sizes.tolist(), dim=1))
