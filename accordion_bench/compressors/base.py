"""The waist: what every compressor takes and gives back.

Tensor suffixes: W local workers, A all workers, N elements, M rows, K columns, R rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from accordion_bench.check import ConfigError
from accordion_bench.comm import Comm
from accordion_bench.plan import TensorSpec

State = dict[str, dict[str, Any]]
"""Per parameter name, the compressor's tensors; a key ending in `_W` has one row per local worker."""


@dataclass(frozen=True)
class Context:
    """All that an exchange may know besides the tensors.

    Args:
        step: optimizer steps taken before this one.
        specs: name and shape of each exchanged tensor.
        levels: the knob's value per tensor (a rank, a density); None = this tensor travels dense.
        seed: the run's seed, for keyed draws.
        lr: learning rate of this step (for residuals in parameter units).
    """

    step: int
    specs: Sequence[TensorSpec]
    levels: Sequence[float | None]
    seed: int = 0
    lr: float = 1.0


class Exchanged(NamedTuple):
    """The result of one exchange.

    update: tensors [...], what every worker applies; identical on all workers.
    subtract_sent_: called with (index, [W, ...]), subtracts in place each local worker's contribution to that tensor
        as the others decode it. A function, so that it costs nothing where nobody asks, and touches only what was sent
        where error feedback does.
    """

    update: list[Tensor]
    subtract_sent_: Callable[[int, Tensor], Any]


class Compressor:
    """A compressor exchanges a list of tensors [W, ...] and returns their decoded mean.

    Class attributes:
        knob: the option that policies may steer (`rank`, `density`, `bits`), or None.
        pair: (strong, weak) levels that `adaptive=accordion` uses unless told otherwise.
        min_ndim: tensors with fewer dimensions always travel dense.
        whole_model: whether `compressor.scope=model` (all tensors as one vector) makes sense.
        reduces: `mean`: sum(update) + mean(residual) = sum(mean gradient) under error feedback; else e.g. `sum`.
    """

    knob: str | None = None
    pair: tuple[float, float] = (0, 0)
    min_ndim: int = 1
    whole_model: bool = False
    reduces: str = "mean"

    @property
    def level(self) -> float | None:
        """The configured value of the knob."""
        return getattr(self, self.knob) if self.knob else None

    def check_level(self, key: str, value: Any) -> float:
        """Refuse a value that the knob cannot take.

        Raises:
            ConfigError: with key, rule, value and what to type instead.
        """
        raise ConfigError(f"{key} has no meaning for a compressor without levels, got {value}")

    def compresses(self, spec: TensorSpec, level: float | None) -> bool:
        """Whether something of this tensor may be lost on the way; a tensor sent whole has no residual."""
        return True

    def init(self, specs: Sequence[TensorSpec], comm: Comm, like: Tensor) -> State:
        """State before the first exchange, for tensors of the type and on the device of `like`."""
        return {}

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        """Exchange tensors [W, ...]; may update `state`, never `xs_W`."""
        raise NotImplementedError

    def payload_bytes(self, spec: TensorSpec, level: float | None, workers: int) -> int:
        """Exact bytes that one worker hands to the collectives for this tensor; `level` None = dense."""
        raise NotImplementedError


def dense_bytes(spec: TensorSpec) -> int:
    """Payload of an fp32 all-reduce of one tensor."""
    return 4 * spec.numel
