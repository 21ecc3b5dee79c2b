"""Context: all that an exchange may know besides the tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from accordion_bench.plan import TensorSpec


@dataclass(frozen=True)
class Context:
    """All that an exchange may know besides the tensors.

    Args:
        step: optimizer steps taken before this one.
        specs: name and shape of each exchanged tensor.
        levels: the knob's value per tensor (a rank, a density; 1 without a knob); None = this tensor travels dense.
        seed: the run's seed, for keyed draws.
        lrs: learning rate of this step per tensor, for methods in parameter units.
        codebooks: quantisation levels that a policy has fitted, per number of bits; none = the compressor's own.
    """

    step: int
    specs: Sequence[TensorSpec]
    levels: Sequence[float | None]
    seed: int = 0
    lrs: Sequence[float] = ()
    codebooks: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
