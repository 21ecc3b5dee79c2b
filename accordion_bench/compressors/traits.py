"""Static properties of a compressor class, which its instances may refine. Read without torch."""

from dataclasses import dataclass
from typing import Any

COLLECTIVES = ("all_reduce", "all_gather", "two_way", "tree")


@dataclass(frozen=True)
class OptimizerPart:
    """What a compressor takes over from the optimizer, and what it is given of it.

    Args:
        owns: optimizer options that the compressor applies itself (`momentum`, `lr`), to the tensors whose step it
            takes: the optimizer must not. Empty = the optimizer takes the step.
        units: of the update: `gradient`, or `parameter`: x <- x - update, the learning rate has been applied.
        shares_steps: it takes the step of some tensors alone (`Compressor.takes_step`); the optimizer stays as it is,
            for the others.
        weight_decay_mode: how the optimizer still decays: `after_decode` with its momentum, `decoupled` without,
            `in_gradient`: added to the gradient before compression.
        decay_factor: weights whose step it takes decay at so many times the optimizer's rate.
        fits: classes of the optimizers that may stand beside it: they decay the weights. The first is what the user is
            told to choose, in lower case.
        looks_ahead: each worker computes its next gradients at x - lr s_w; s_w [W, ...] is `ahead_W` in the state.
        takes: what the constructor is given besides its own options: `momentum`, the optimizer's `momentum` and
            `nesterov`; `betas`, its `betas` and `eps`; `error_feedback`, whether it will be wrapped in it.
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
    """What the exchange, the wrappers and the checks of a configuration must know of a compressor.

    A subclass writes `traits = replace(OneShot.traits, unbiased=True, ...)`; where an option decides, the constructor
    writes `self.traits = replace(self.traits, ...)`; a wrapper replaces what it changes of the inner one's.

    Args:
        knob: the option that policies may steer (`rank`, `density`, `bits`), or None.
        pair: (strong, weak) levels that `adaptive=accordion` uses unless told otherwise.
        min_ndim: tensors with fewer dimensions always travel dense.
        tables: embeddings and the output layer have levels, too; else they always travel dense.
        whole_model: whether `compressor.scope=model` (all tensors as one vector) makes sense.
        reduces: `mean`: sum(update) + mean(residual) = sum(mean gradient) under error feedback; `estimate`: the update
            is the mean of what was sent since the beginning; `senders`: a coordinate's mean over those that have sent
            it; else `sum`, `vote`, ...
        unbiased: E[update] = mean gradient, over the compressor's own draws, without error feedback.
        contracts: E||C(x) - x||^2 <= ||x||^2 for every x, over the compressor's own draws; None = where it is biased.
        scaled: whether messages carry a magnitude (plain signs do not).
        collectives: what can carry the messages, the default first.
        fixed_size: `payload_bytes` is exact, from sizes alone; else an upper bound.
        cycle: exchanges of a tensor after which its messages are as long as before; `payload_bytes` is their mean, and
            `coming_bytes` says the next one's.
        grouping: which tensors travel together: `together`: buckets as the exchange cuts them; `alone`: each coordinate
            travels by itself, so that smaller buckets cost rounds and no computation; `all`: it must see all tensors of
            a step at once, so that they travel in one bucket.
        optimizer: what it takes over from the optimizer, see `OptimizerPart`.
        replays: at equal levels every exchange asks a device for the same operations on the same memory, and takes
            numbers of the host that change from step to step (keys of draws, rates) by `upload.fresh`: a GPU may repeat
            it.
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
        """Whether what is lost is never more than there was, in the mean."""
        return not self.unbiased if self.contracts is None else self.contracts


def declared_by(cls: Any) -> Traits | None:
    """What the class that a configuration names declares; None where it is no compressor's class."""
    traits = getattr(cls, "traits", None)
    return traits if isinstance(traits, Traits) else None
