"""Traits: what a compressor is, said once and for all by its class; instances may refine it. Read without torch."""

from dataclasses import dataclass
from typing import Any

COLLECTIVES = ("all_reduce", "all_gather", "two_way")


@dataclass(frozen=True)
class Traits:
    """What the exchange, the wrappers and the checks of a configuration must know of a compressor.

    A subclass writes `traits = replace(OneShot.traits, unbiased=True, ...)`; where an option decides, the constructor
    writes `self.traits = replace(self.traits, ...)`; a wrapper replaces what it changes of the inner one's.

    Args:
        knob: the option that policies may steer (`rank`, `density`, `bits`), or None.
        knob_with: (knob, what to type to have it), where an option has taken the knob away.
        pair: (strong, weak) levels that `adaptive=accordion` uses unless told otherwise.
        tried: levels that advice looks at beside the configured one.
        min_ndim: tensors with fewer dimensions always travel dense.
        tables: embeddings and the output layer have levels, too; else they always travel dense.
        whole_model: whether `compressor.scope=model` (all tensors as one vector) makes sense.
        reduces: `mean`: sum(update) + mean(residual) = sum(mean gradient) under error feedback; `estimate`: the update
            is the mean of what was sent since the beginning; else `sum`, `vote`, ...
        unbiased: E[update] = mean gradient, over the compressor's own draws, without error feedback.
        contracts: E||C(x) - x||^2 <= ||x||^2 for every x, over the compressor's own draws; None = where it is biased.
        scaled: a message says how large what it stands for is; plain signs do not.
        collectives: what can carry the messages, the default first.
        collective_reason: why not the others.
        fixed_size: `payload_bytes` is exact, from sizes alone; else an upper bound.
        cycle: exchanges of a tensor after which its messages are as long as before; `payload_bytes` is their mean, and
            `coming_bytes` says the next one's.
        needs_all: it must see all tensors of a step at once, so that they travel in one bucket.
        by_coordinate: each coordinate travels by itself, so that smaller buckets cost rounds and no computation.
        units: `gradient`, or `parameter`: x <- x - update, the learning rate has been applied; of the tensors whose
            step the compressor takes.
        owns: optimizer options that the compressor applies itself (`momentum`), to the tensors whose step it takes: the
            optimizer must not.
        weight_decay_mode: where `owns` is not empty, how the optimizer still decays: `after_decode` with its momentum,
            `decoupled` without, `in_gradient`: added to the gradient before compression.
        takes: what the constructor is given besides its own options: `momentum`, the optimizer's `momentum` and
            `nesterov`; `betas`, its `betas` and `eps`; `error_feedback`, whether it will be wrapped in it.
        shares_steps: where `owns` is not empty, it takes the step of some tensors alone (`takes_step`); the optimizer
            stays as it is, for the others.
        fits: where `owns` is not empty, classes of the optimizers that may stand beside it: they decay the weights. The
            first is what the user is told to choose, in lower case.
        no_error_feedback: why it must not be wrapped in error feedback; "" = it may.
        kernels: kinds of devices on which it computes with `tensors.kernels` where what compiles them is installed.
        replays: at equal levels every exchange asks a device for the same operations on the same memory, and takes
            numbers of the host that change from step to step (keys of draws, rates) by `upload.fresh`: a GPU may repeat
            it.
    """

    knob: str | None = None
    knob_with: tuple[str, str] = ("", "")
    pair: tuple[float, float] = (0, 0)
    tried: tuple[float, ...] = ()
    min_ndim: int = 1
    tables: bool = True
    whole_model: bool = False
    reduces: str = "mean"
    unbiased: bool = False
    contracts: bool | None = None
    scaled: bool = True
    collectives: tuple[str, ...] = ("all_reduce",)
    collective_reason: str = "its messages add up, so that an all-reduce is the cheapest"
    fixed_size: bool = True
    cycle: int = 1
    needs_all: bool = False
    by_coordinate: bool = False
    units: str = "gradient"
    owns: frozenset[str] = frozenset()
    shares_steps: bool = False
    weight_decay_mode: str = "decoupled"
    takes: frozenset[str] = frozenset()
    fits: tuple[str, ...] = ("SGD",)
    no_error_feedback: str = ""
    kernels: tuple[str, ...] = ()
    replays: bool = False

    @property
    def is_contraction(self) -> bool:
        """Whether what is lost is never more than there was, in the mean."""
        return not self.unbiased if self.contracts is None else self.contracts


def declared_by(cls: Any) -> Traits | None:
    """What the class that a configuration names declares; None where it is no compressor's class."""
    traits = getattr(cls, "traits", None)
    return traits if isinstance(traits, Traits) else None
