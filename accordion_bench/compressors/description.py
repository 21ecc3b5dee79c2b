"""Properties of a compressor class: its traits, and a description for reports, help, checks and the conformance kit."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from accordion_bench.options.checks import Less, Way
from accordion_bench.options.component import Component, Description, Idle, RunContext
from accordion_bench.options.instantiate import Config
from accordion_bench.plan import TensorSpec

COLLECTIVES = ("all_reduce", "all_gather", "two_way", "tree")


@dataclass(frozen=True)
class OptimizerPart:
    """The part of the optimizer that a compressor takes over, and the optimizer options that it receives.

    Args:
        owns: optimizer options that the compressor applies itself (`momentum`, `lr`), to the tensors whose step it
            takes; the optimizer must not apply them. Empty = the optimizer takes the step.
        units: of the update: `gradient`, or `parameter`: x <- x - update, with the learning rate already applied.
        shares_steps: whether it takes the step of some tensors only (`Compressor.takes_step`); the optimizer is
            unchanged for the others.
        weight_decay_mode: how the optimizer applies weight decay: `after_decode` with its momentum, `decoupled`
            without, `in_gradient`: added to the gradient before compression.
        decay_factor: weight decay of the tensors whose step it takes, as a multiple of the optimizer's rate.
        fits: classes of optimizers that can be combined with it; they apply weight decay. Error messages suggest the
            first one, in lower case.
        looks_ahead: whether each worker computes its next gradients at x - lr s_w; s_w [W, ...] is `ahead_W` in the
            state.
        takes: constructor arguments in addition to its own options: `momentum`, the optimizer's `momentum` and
            `nesterov`; `betas`, its `betas` and `eps`; `error_feedback`, whether it will be wrapped in error feedback.
    """

    owns: frozenset[str] = frozenset()
    units: str = "gradient"
    shares_steps: bool = False
    weight_decay_mode: str = "decoupled"
    decay_factor: float = 1.0
    fits: tuple[str, ...] = ("SGD",)
    looks_ahead: bool = False
    takes: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Traits:
    """Properties of a compressor that the exchange, the wrappers and the configuration checks depend on.

    A subclass defines `traits = replace(OneShot.traits, unbiased=True, ...)`. If an option determines a trait, the
    constructor assigns `self.traits = replace(self.traits, ...)`. A wrapper replaces the inner traits that it changes.

    Args:
        knob: the option that policies may steer (`rank`, `density`, `bits`), or None.
        pair: default (strong, weak) levels of `adaptive=accordion`.
        min_ndim: tensors with fewer dimensions are always exchanged dense.
        tables: whether embeddings and the output layer have levels; if not, they are always exchanged dense.
        whole_model: whether `compressor.scope=model` (all tensors as one vector) is supported.
        reduces: `mean`: sum(update) + mean(residual) = sum(mean gradient) under error feedback; `estimate`: the update
            is the mean of all messages since the first step; `senders`: a coordinate's mean over the workers that sent
            it; otherwise `sum`, `vote`, ...
        unbiased: whether E[update] = mean gradient, over the compressor's own draws, without error feedback.
        contracts: whether E||C(x) - x||^2 <= ||x||^2 for every x, over the compressor's own draws; None = if biased.
        scaled: whether messages contain a magnitude (plain signs do not).
        collectives: collectives that can carry the messages, the default first.
        fixed_size: whether `payload_bytes` is exact and depends on sizes only; if not, it is an upper bound.
        cycle: number of exchanges of a tensor after which message lengths repeat; `payload_bytes` is their mean, and
            `next_payload_bytes` returns the next one's.
        grouping: how tensors are grouped: `together`: in the exchange's buckets; `alone`: each coordinate is
            independent, so that smaller buckets cost rounds and no computation; `all`: all tensors of a step in one
            bucket.
        optimizer: the part of the optimizer that it takes over, see `OptimizerPart`.
        replays: whether a GPU may capture and replay the exchange: at equal levels every exchange runs the same
            operations on the same memory, and uploads changing numbers (keys of draws, rates) by `upload.fresh`.
    """

    knob: str | None = None
    pair: tuple[float, float] = (0, 0)
    min_ndim: int = 1
    tables: bool = True
    whole_model: bool = False
    reduces: str = "mean"
    unbiased: bool = False
    contracts: bool | None = None
    scaled: bool = True
    collectives: tuple[str, ...] = ("all_reduce",)
    fixed_size: bool = True
    cycle: int = 1
    grouping: str = "together"
    optimizer: OptimizerPart = OptimizerPart()
    replays: bool = False

    @property
    def is_contraction(self) -> bool:
        """Whether E||C(x) - x||^2 <= ||x||^2 for every x."""
        return not self.unbiased if self.contracts is None else self.contracts


def declared_by(cls: Any) -> Traits | None:
    """Return the traits of the class that a configuration names; None if it is not a compressor class."""
    traits = getattr(cls, "traits", None)
    return traits if isinstance(traits, Traits) else None


@dataclass(frozen=True)
class WhyDense:
    """Why a tensor with a level is exchanged dense.

    Args:
        reason: a clause.
        instead: alternative settings, each of which makes the tensor compressed.
    """

    reason: str
    instead: Sequence[Way] = field(hash=False)


@dataclass(frozen=True)
class Claims:
    """Numerical properties that a compressor declares, so that the conformance kit can measure them.

    EF21 also reads `sum_eps`, because it needs sums without rounding.

    Args:
        draws: who draws random numbers: `worker`: each worker its own; `shared`: the same on all workers; "": no draws,
            but `worker` if it is unbiased.
        sum_eps: relative rounding error of one addition on the wire; 0 if sums have at least the gradient's
            precision.
        other_options: options, in addition to the YAML file's, that select other code paths.
        contraction: called with the compressor, a tensor's spec and its level; returns a delta with
            E||C(x) - x||^2 <= (1 - delta) ||x||^2 for every x, None = not declared. In [0, 1] for a contraction;
            below 0 the error may exceed ||x||^2, by up to -delta ||x||^2.
        variance: called with the compressor, x_R [R, N], the spec, the level and the context; returns
            E||Q(x) - x||^2 of one message [R] if it is unbiased, None = no closed form.
    """

    draws: str = ""
    sum_eps: float = 0.0
    other_options: tuple[Mapping[str, Any], ...] = ()
    contraction: Callable[[Any, TensorSpec, float], float | None] = lambda compressor, spec, level: None
    variance: Callable[[Any, Any, TensorSpec, float, Any], Any] = lambda compressor, x_R, spec, level, ctx: None


def _idle(cls: Any, options: Config, context: RunContext) -> Idle:
    yield from Component.description.idle(cls, options, context)
    if context.steered_by and context.knob:
        yield context.knob, f"adaptive={','.join(context.steered_by)} sets the {context.knob}"


def _paper_floats(compressor: Any, spec: TensorSpec, level: float | None, workers: int) -> int | None:
    return spec.numel if level is None else None


@dataclass(frozen=True)
class CompressorDescription(Description):
    """Properties of a compressor for everything except the exchange; see `Description`.

    Args:
        advised_levels: levels that advice considers in addition to the configured one.
        knob_with: (knob, options that enable it), if an option has disabled the knob.
        collective_reason: why no collective except those of its traits can carry its messages.
        no_error_feedback: why it must not be wrapped in error feedback; "" = it may be.
        kernels: kinds of devices on which it uses compiled kernels, if their compiler is installed.
        paper_floats: called with the compressor, a spec, a level (None = dense) and the number of workers; returns the
            floats of one exchange of the tensor in the Accordion paper's tables, None = the paper has no count. Source:
            derived from Agarwal et al., MLSys 2021 (arXiv 2010.16248), and its official code.
        why_dense: called with the same, and a level; returns why a tensor with a level is exchanged dense, None = it is
            compressed, or was configured to be dense.
        probe: probes gradients, in place of `probe.probe`.
        probe_input: probes the input of the compression, in place of `probe.probe_input`.
        buckets_of: called with the compressor, tensors [W, ...] and the context; returns the normalised buckets of each
            local worker's tensors, for policies that fit codebooks. None = no buckets.
        claims: see `Claims`.
    """

    advised_levels: tuple[float, ...] = ()
    knob_with: tuple[str, Mapping[str, Any]] = ("", {})
    collective_reason: str = "its messages can be summed, so that an all-reduce is the cheapest"
    no_error_feedback: str = ""
    kernels: tuple[str, ...] = ()
    paper_floats: Callable[[Any, TensorSpec, float | None, int], int | None] = _paper_floats
    why_dense: Callable[[Any, TensorSpec, float, int], WhyDense | None] = lambda *_: None
    probe: Callable[..., Any] | None = None
    probe_input: Callable[..., Any] | None = None
    buckets_of: Callable[..., Any] | None = None
    claims: Claims = field(default_factory=Claims)


KEPT = ("residual_bits", "residual_momentum", "residual_reset")  # options of wrappers, for `Choice.beside`
FEEDBACK = ("error_feedback", "feedback_rate", "residual", *KEPT)
NO_EF21 = {"error_feedback": "true: the compression error is added to the next gradient; false; loco: another form"}
TRAVEL = ("scope", "start_step")

OF_COMPRESSORS = CompressorDescription(of_several_kinds=frozenset({"error_feedback"}), idle=_idle)


def paper_floats(compressor: Any, spec: TensorSpec, level: float | None, workers: int) -> int | None:
    """Return the floats of one exchange of a tensor as the Accordion paper counts them; see `CompressorDescription`."""
    floats: int | None = compressor.description.paper_floats(compressor, spec, level, workers)
    return floats


def dense_reason(compressor: Any, spec: TensorSpec, level: float, workers: int) -> WhyDense | None:
    """Return why a tensor with a level is exchanged dense; see `CompressorDescription`."""
    why: WhyDense | None = compressor.description.why_dense(compressor, spec, level, workers)
    return why


def shorter_messages(compressor: Any) -> tuple[Way, ...]:
    """Return settings that make messages shorter."""
    knob = compressor.traits.knob
    return (Less("fewer" if knob == "bits" else "a lower", f"compressor.{knob}"),) if knob else ()


def with_claims(description: CompressorDescription, **changes: Any) -> CompressorDescription:
    """Return a copy of a description with other claims."""
    return replace(description, claims=replace(description.claims, **changes))
