"""Error feedback: add the compression error of each message, or a moving average of them, to the next gradient.

Tensor suffixes: W local workers, B bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from accordion_bench.codecs.bucket import Bucket, Context, Feedback, Target, rate_of_each
from accordion_bench.codecs.engines import engine_for
from accordion_bench.codecs.layout import Message
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import Compressor, Exchanged, Saved, State
from accordion_bench.compressors.gathered import naming
from accordion_bench.compressors.number_formats import Blockwise
from accordion_bench.compressors.two_way import TwoWay
from accordion_bench.compressors.wrapper import Wrapper
from accordion_bench.options import checks
from accordion_bench.options.component import Idle, RunContext
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import option, options_of, with_options
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


GROWS = (
    "accumulates the compression error, which may exceed the input of this compressor: the residual can grow without "
    "bound (qsgd at its defaults: to 3,000 gradients in 100 steps)"
)


def growing(options: Config, compressor: Compressor, typed: str) -> list[str]:
    """Return a warning, about the option as it was `typed`, if plain error feedback wraps no contraction."""
    feeds_back = options.get("error_feedback") is True
    return [f"{typed} {GROWS}"] if feeds_back and not compressor.traits.is_contraction else []


def _idle(cls: Any, options: Config, context: RunContext) -> Idle:
    chosen = options.get("error_feedback") or False
    for key in options_of(ErrorFeedback) if chosen not in (True, "loco") else ():
        yield key, f"compressor.error_feedback is {checks.show(chosen)}"
    if not context.gradients:
        yield "residual_units", "no gradients are exchanged"
        yield "zero_lr", "no gradients are exchanged"
    if options.get("residual_units") == "gradient":
        yield "zero_lr", "compressor.residual_units is gradient"


@with_options
class ErrorFeedback(Wrapper):
    """Wraps a compressor C: p_w = g_w + e_w; send C(p_w); e_w <- p_w - sent_w.

    Hence sum of updates + mean of residuals (+ the owners' residuals, two-way) = sum of mean gradients, for every C
    that reduces by mean. In parameter units g_w is replaced by lr g_w, and the update is the step itself. Then
    x - (mean e_w + e~) takes exactly the uncompressed step, under any schedule of the learning rate.

    With a `local` residual, sent_w is the worker's own contribution as decoded. With an `aggregate` residual it is the
    common update (PowerSGD's paper code, torch's hook, Accordion): the updates are equal, but deviations between
    workers accumulate in e_w. In gradient units e_w does not depend on the learning rate. In parameter units it is the
    paper's e_w times the last learning rate; at a learning rate of 0 the exchange is skipped, or sends the residual
    (`flush`). A `residual_decay` below 1 breaks the identity. With 8 `residual_bits` e_w is stored as int8 with a scale
    per block, in a quarter of the memory; the identity then holds up to the rounding error, see `EightBits`.

    Source: Karimireddy et al. 2019; Vogels et al. 2019, Algorithm 2 (aggregate); Zheng, Huang, Kwok 2019 (parameter).
    """

    residual: str = option(
        "compression error to feed back, each worker's own or that of the mean",
        default="local",
        choices=("local", "aggregate"),
    )
    residual_units: str = option(
        "parameter: the paper's learning-rate ratio; gradient: without",
        default="gradient",
        choices=("gradient", "parameter"),
    )
    zero_lr: str = option(
        "at a learning rate of 0, skip the exchange or flush the residual", default="skip", choices=("skip", "flush")
    )
    residual_decay: float = option(
        "factor of the residual before each exchange; 1 = no decay, SparseLoCo 0.95",
        default=1.0,
        above=0,
        at_most=1,
    )
    residual_bits: int | None = option(
        "bits of the stored residual: 8 = a quarter of the memory, 32; null = 8 for loco, else 32",
        default=None,
        choices=(8, 32),
        instead=8,
    )

    description = replace(Wrapper.description, idle=_idle)
    form: ClassVar[bool | str] = True  # the value of `error_feedback`
    usual_bits: ClassVar[int] = 32  # default of `residual_bits`

    def __post_init__(self) -> None:
        super().__post_init__()
        self.residual_storage = EightBits() if (self.residual_bits or self.usual_bits) == 8 else Floats()
        reduces = self.inner.traits.reduces
        if self.residual == "aggregate" and reduces != "mean":
            raise checks.ValueRefused(
                "residual", f"local, because the update is {reduces}, not a mean", self.residual, "local"
            )
        if reduces in ("vote", "other"):
            rule = f"{{false}}, because the update is a {reduces}, which does not preserve the scale of its input"
            raise checks.ValueRefused("error_feedback", rule, self.form, False)
        if self.residual == "aggregate" and isinstance(self.inner, TwoWay):
            rule = "local with collective=two_way, because the update also contains the owners' residuals"
            raise checks.ValueRefused("residual", rule, self.residual, "local")
        if self.residual_units == "parameter":
            optimizer = self.inner.traits.optimizer
            part = replace(optimizer, units="parameter", owns=optimizer.owns | {"lr"})
            self.traits = replace(self.inner.traits, optimizer=part)

    def init(self, specs: Sequence[TensorSpec], comm: Comm, like: Tensor) -> State:
        state = self.inner.init(specs, comm, like)
        compressible = [spec for spec in specs if spec.ndim >= self.traits.min_ndim]
        for name, entries in self.residual_storage.init(compressible, comm.local_workers, like).items():
            state.setdefault(name, {}).update(entries)
        return state

    def redistributed_state(self, kept_A: Sequence[Saved], worker: int, workers: int) -> dict[str, dict[str, Tensor]]:
        opened_A = [self.residual_storage.opened(kept) for kept in kept_A]
        return self.residual_storage.closed(super().redistributed_state(opened_A, worker, workers))

    def scales(self, ctx: Context) -> Sequence[float]:
        """Return the factor of each tensor before its residual is added."""
        return ctx.lrs if self.traits.optimizer.units == "parameter" else [1.0] * len(ctx.specs)

    def masks(self, ctx: Context, state: State) -> Sequence[Tensor | None]:
        """Return per tensor a mask [...] that is 0 where no residual is kept, or None if all are kept."""
        return ()

    def momenta(self, ctx: Context, state: State) -> tuple[Sequence[Tensor | None], float]:
        """Return per tensor a tensor [...] that is added to each worker's input, or None, and its factor."""
        return (), 0.0

    def _factors(self, scales: Sequence[float], ctx: Context, xs_W: Sequence[Tensor]) -> Sequence[Any]:
        if self.traits.optimizer.units != "parameter" or not xs_W:
            return scales
        return rate_of_each(ctx, xs_W[0], range(len(xs_W)))

    @torch.no_grad()
    def compressor_input(self, xs_W: Sequence[Tensor], ctx: Context, state: State, workers: int) -> list[Tensor]:
        kept_W = self.residual_storage.read(ctx, state, xs_W[0]) if xs_W else {}
        decay = self.residual_decay
        ps_W = [
            torch.add(kept_W[i] * decay, x, alpha=scale) if i in kept_W else x * scale
            for i, (x, scale) in enumerate(zip(xs_W, self.scales(ctx), strict=True))
        ]
        return self.inner.compressor_input(ps_W, ctx, state, workers)

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        scales = self.scales(ctx)
        if xs_W and not any(scales) and self.zero_lr == "skip":
            return Exchanged([torch.zeros_like(x[0]) for x in xs_W], lambda targets_W: None)
        kept_W = self.residual_storage.read(ctx, state, xs_W[0]) if xs_W else {}
        out = self.feed(xs_W, kept_W, ctx, state, comm)
        self.residual_storage.write(kept_W, ctx, state, comm.first_named)
        return out

    def feed(
        self, xs_W: Sequence[Tensor], kept_W: Mapping[int, Tensor], ctx: Context, state: State, comm: Comm
    ) -> Exchanged:
        """Exchange tensors [W, ...] with residuals [W, ...], by index; residuals become the compression error."""
        fed = {
            i
            for i in kept_W
            if self.residual == "local" and self.inner.takes_feedback(ctx.specs[i], ctx.levels[i], comm.workers)
        }
        feedback = Feedback(
            [kept_W.get(i) for i in range(len(xs_W))],
            self._factors(self.scales(ctx), ctx, xs_W),
            self.residual_decay,
            self.masks(ctx, state),
            *self.momenta(ctx, state),
        )
        ps_W = list(xs_W)
        if (others := feedback.take(formed := [i for i in kept_W if i not in fed])) is not None:
            for i, p_W in zip(formed, others.form([xs_W[i] for i in formed]), strict=True):
                ps_W[i] = p_W
        for i in set(range(len(xs_W))) - kept_W.keys():
            scale = feedback.scales[i]
            ps_W[i] = xs_W[i] if isinstance(scale, float) and scale == 1 else xs_W[i] * scale
        out = self.inner.exchange(ps_W, replace(ctx, feedback=feedback.only(fed)), state, comm)
        lossy_W = {i: kept_W[i] for i in formed if self.inner.compresses(ctx.specs[i], ctx.levels[i])}
        whole_W = {i: kept_W[i] for i in formed if i not in lossy_W}
        for i, e in whole_W.items():
            if out.update[i].data_ptr() == e.data_ptr():  # with one worker the mean may alias its tensor
                out.update[i] = out.update[i].clone()
        if whole_W:
            torch._foreach_zero_(list(whole_W.values()))
        if lossy_W and self.residual == "local":
            out.subtract_sent_(lossy_W)
        elif lossy_W:
            torch._foreach_sub_(list(lossy_W.values()), [out.update[i] for i in lossy_W])
        return out


AGE = "residual_age"  # state key of a bucket's first tensor: number of exchanges so far


def _loco_idle(cls: Any, options: Config, context: RunContext) -> Idle:
    if options.get("error_feedback") != "loco":
        for key in ("residual_momentum", "residual_reset"):
            yield key, "compressor.error_feedback is not loco"


@with_options
class LoCo(ErrorFeedback):
    """h_w = g_w + e_w; send C(h_w); e_w <- b e_w + (1 - b) (h_w - C(h_w)); e_w <- 0 after every T exchanges.

    The residual varies less from step to step, and is stored in eight bits. The sum of updates differs from the sum of
    mean gradients, because part of the error is never sent. A tensor that is sent uncompressed has no residual.

    Source: Xie et al. 2024 (arXiv 2407.04480), around 4 bits with a scale for each block.
    """

    residual_momentum: float = option(
        "for loco, in [0, 1): weight of the previous residual; 0 = plain error feedback",
        default=0.8,
        at_least=0,
        below=1,
    )
    residual_reset: int = option(
        "for loco: exchanges between resets of the residual; 0 = never", default=1024, at_least=0
    )

    description = replace(ErrorFeedback.description, idle=_loco_idle)
    form = "loco"
    usual_bits = 8

    def init(self, specs: Sequence[TensorSpec], comm: Comm, like: Tensor) -> State:
        state = super().init(specs, comm, like)
        if specs:
            state.setdefault(specs[0].name, {})[AGE] = torch.zeros((), dtype=torch.int64, device=like.device)
        return state

    def feed(
        self, xs_W: Sequence[Tensor], kept_W: Mapping[int, Tensor], ctx: Context, state: State, comm: Comm
    ) -> Exchanged:
        before_W = self.residual_storage.copies(ctx, state, xs_W[0]) if xs_W else {}
        out = super().feed(xs_W, kept_W, ctx, state, comm)
        lost = [e_W for i, e_W in kept_W.items() if self.compresses(ctx.specs[i], ctx.levels[i])]
        before = [e_W for i, e_W in before_W.items() if self.compresses(ctx.specs[i], ctx.levels[i])]
        if lost:
            torch._foreach_lerp_(lost, before, self.residual_momentum)
        self._reset(lost, ctx, state)
        return out

    def _reset(self, kept_W: Sequence[Tensor], ctx: Context, state: State) -> None:
        """Zero the residuals after every T exchanges; a GPU counts on the device, so that the step can be replayed."""
        ages = [state[spec.name][AGE] for spec in ctx.specs if AGE in state.get(spec.name, {})]
        for age in ages:
            age += 1
        if not ages or not kept_W or not self.residual_reset:
            return
        over = ages[0] % self.residual_reset == 0
        if not engine_for(kept_W).checks_input or over:
            torch._foreach_mul_(list(kept_W), (~over).to(kept_W[0].dtype))
