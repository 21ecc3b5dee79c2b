"""What reports, help, checks and the conformance kit know of a compressor; it stands beside the class."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from accordion_bench.options.checks import Less, Way
from accordion_bench.options.component import Component, Description, Idle, Surroundings
from accordion_bench.options.instantiate import Config
from accordion_bench.plan import TensorSpec


@dataclass(frozen=True)
class WhyDense:
    """Why a tensor that has a level travels dense after all.

    Args:
        reason: a clause.
        instead: any of these, and it is compressed.
    """

    reason: str
    instead: Sequence[Way] = field(hash=False)


@dataclass(frozen=True)
class Claims:
    """What a compressor says of its numbers, so that the conformance kit can measure it.

    EF21 reads `sum_eps`, too: it wants sums that are not rounded.

    Args:
        draws: of the keyed numbers: `worker`: each its own; `shared`: all workers the same; "": nothing, but `worker`
            where it is unbiased.
        sum_eps: relative rounding of one addition on the wire; 0 where sums have at least the gradient's precision.
        other_options: options, beside the file's, by which other code runs.
        contraction: called with the compressor, a tensor's spec and its level; returns a delta with
            E||C(x) - x||^2 <= (1 - delta) ||x||^2 for every x, None = not declared. In [0, 1]; below 0 it is no
            contraction, and says how much more than there was may be lost.
        variance: called with the compressor, x_R [R, N], the spec, the level and the context; returns
            E||Q(x) - x||^2 of one message [R] where it is unbiased, None = no closed form.
    """

    draws: str = ""
    sum_eps: float = 0.0
    other_options: tuple[Mapping[str, Any], ...] = ()
    contraction: Callable[[Any, TensorSpec, float], float | None] = lambda compressor, spec, level: None
    variance: Callable[[Any, Any, TensorSpec, float, Any], Any] = lambda compressor, x_R, spec, level, ctx: None


def _idle(cls: Any, options: Config, context: Surroundings) -> Idle:
    yield from Component.description.idle(cls, options, context)
    if context.steered_by and context.knob:
        yield context.knob, f"adaptive={','.join(context.steered_by)} sets the {context.knob}"


def _paper_floats(compressor: Any, spec: TensorSpec, level: float | None, workers: int) -> int | None:
    return spec.numel if level is None else None


def _why_dense(compressor: Any, spec: TensorSpec, level: float, workers: int) -> WhyDense | None:
    return None


@dataclass(frozen=True)
class CompressorDescription(Description):
    """What there is to say of a compressor beside what it does; see `Description`.

    Args:
        advised_levels: levels that advice looks at beside the configured one.
        knob_with: (knob, the options with which there is one), where an option has taken the knob away.
        collective_reason: why no other collective than those of its traits can carry its messages.
        no_error_feedback: why it must not be wrapped in error feedback; "" = it may.
        kernels: kinds of devices on which it computes with compiled kernels where what compiles them is installed.
        paper_floats: called with the compressor, a spec, a level (None = dense) and the number of workers; returns the
            floats of one exchange of the tensor as the Accordion paper counts them, None = it has no count for this.
            The count is that of its tables, whatever this implementation sends. Source: derived from Agarwal et al.,
            MLSys 2021 (arXiv 2010.16248), and its official code.
        why_dense: called with the compressor, a spec, a level and the number of workers; returns why a tensor that has
            a level travels dense, None = it does not, or it was asked to.
        probe: makes the probe of gradients, in place of `probe.probe`.
        probe_input: makes the probe of what would be compressed, in place of `probe.probe_input`.
        buckets_of: called with the compressor, tensors [W, ...] and the context; returns the normalised buckets of each
            local worker's tensors, for policies that fit codebooks. None = it has none.
        claims: see `Claims`.
    """

    advised_levels: tuple[float, ...] = ()
    knob_with: tuple[str, Mapping[str, Any]] = ("", {})
    collective_reason: str = "its messages add up, so that an all-reduce is the cheapest"
    no_error_feedback: str = ""
    kernels: tuple[str, ...] = ()
    paper_floats: Callable[[Any, TensorSpec, float | None, int], int | None] = _paper_floats
    why_dense: Callable[[Any, TensorSpec, float, int], WhyDense | None] = _why_dense
    probe: Callable[..., Any] | None = None
    probe_input: Callable[..., Any] | None = None
    buckets_of: Callable[..., Any] | None = None
    claims: Claims = field(default_factory=Claims)


KEPT = ("residual_bits", "residual_momentum", "residual_reset")  # options of wrappers, for `Choice.beside`
FEEDBACK = ("error_feedback", "feedback_rate", "residual", *KEPT)
NO_EF21 = {"error_feedback": "true: what was lost is added to the next gradient; false; loco: another form"}
TRAVEL = ("scope", "start_step")

OF_COMPRESSORS = CompressorDescription(of_several_kinds=frozenset({"error_feedback"}), idle=_idle)


def paper_floats(compressor: Any, spec: TensorSpec, level: float | None, workers: int) -> int | None:
    """Floats of one exchange of a tensor as the Accordion paper counts them; see `CompressorDescription`."""
    floats: int | None = compressor.description.paper_floats(compressor, spec, level, workers)
    return floats


def why_dense_of(compressor: Any, spec: TensorSpec, level: float, workers: int) -> WhyDense | None:
    """Why a tensor that has a level travels dense; see `CompressorDescription`."""
    why: WhyDense | None = compressor.description.why_dense(compressor, spec, level, workers)
    return why


def shorter_messages(compressor: Any) -> tuple[Way, ...]:
    """What makes messages shorter."""
    knob = compressor.traits.knob
    return (Less("fewer" if knob == "bits" else "a lower", f"compressor.{knob}"),) if knob else ()


def with_claims(description: CompressorDescription, **changes: Any) -> CompressorDescription:
    """The same description with other claims."""
    return replace(description, claims=replace(description.claims, **changes))
