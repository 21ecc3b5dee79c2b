"""Static properties of a compressor class, which its instances may refine. Imported without torch."""

from dataclasses import dataclass
from typing import Any

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
