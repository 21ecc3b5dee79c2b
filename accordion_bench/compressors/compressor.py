"""Base class and result type of all compressors.

Tensor suffixes: W local workers, A all workers, N elements, M rows, K columns, R rank.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accordion_bench.codecs.bucket import Context
from accordion_bench.codecs.layout import Transfer
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.description import OF_COMPRESSORS, CompressorDescription, Traits
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.component import Component
from accordion_bench.options.option import options_of
from accordion_bench.plan import RunFacts, TensorSpec
from accordion_bench.tensors.same_shape import Blocks

State = dict[str, dict[str, Any]]
"""Per parameter name, the compressor's tensors; a key ending in `_W` has one row per local worker."""
Saved = Mapping[str, Mapping[str, Tensor]]
"""One worker's state without a worker axis."""
Kept = Mapping[str, Any] | None
"""State of one tensor, which determines the turn if exchanges take turns; None = the mean over the turns."""


class NonFinite(RuntimeError):
    """A loss, a gradient or the input of a compressor is NaN or infinite; nothing of the step is applied."""


class Exchanged(NamedTuple):
    """Result of one exchange.

    update: tensors [...] that every worker applies; identical on all workers.
    subtract_sent_: called with targets [W, ...] by index; subtracts from each target, in place, the local workers'
        contributions to it, as the other workers decode them. It is a function so that it costs nothing if it is not
        called, and so that error feedback touches only the sent entries. It takes many tensors to use few launches.
    clear_sent_: the same, but sets the sent entries to 0; for methods that send some entries of a tensor.
    """

    update: list[Tensor]
    subtract_sent_: Callable[[Mapping[int, Tensor]], Any]
    clear_sent_: Callable[[Mapping[int, Tensor]], Any] | None = None


class Compressor(Component):
    """Base class of compressors, which exchange a list of tensors [W, ...] and return their decoded mean.

    Class attributes:
        traits: static properties, see `Traits`.
        description: data for reports, help and checks, see `CompressorDescription`.

    Attributes:
        start_step: first step that is compressed; earlier steps are exchanged dense.
        required_facts: facts of the run that the compressor needs in advance, see `Policy`.
    """

    traits: Traits = Traits()
    description: CompressorDescription = OF_COMPRESSORS
    start_step: int = 0
    required_facts: frozenset[str] = frozenset()

    def __init_subclass__(cls) -> None:
        """Refuse a trait that is written as a class attribute, where it would not be read."""
        for name in (field.name for field in dataclasses.fields(Traits)):
            if name in vars(cls):
                raise TypeError(f"{cls.__name__}.{name} is a trait; write traits = replace(..., {name}=...)")

    @property
    def level(self) -> float | None:
        """Configured value of the knob; None without a knob."""
        return getattr(self, self.traits.knob) if self.traits.knob else None

    def check_level(self, key: str, value: Any) -> float:
        """Return a value of the knob, after checking that the knob can take it.

        Raises:
            ConfigError: with key, rule, value and a suggestion.
        """
        own = options_of(type(self)).get(self.traits.knob or "")
        if own is None:
            raise ConfigError(f"{key} has no meaning for a compressor without levels, got {value}")
        level: float = own.checked(value, key)
        return level

    def scheduled(self, level: float, epoch: float) -> float:
        """Return the level to use at an epoch, for methods with a built-in warm-up."""
        return level

    def codebook(self, bits: int) -> tuple[float, ...] | None:
        """Return the quantisation levels in [-1, 1] for a number of bits, which policies may replace; None = none."""
        return None

    def fit_to(self, run: RunFacts) -> None:
        """Set what depends on the length of the run.

        Raises:
            ConfigError: an option does not fit the run.
        """

    def compresses(self, spec: TensorSpec, level: float | None) -> bool:
        """Whether compression of this tensor may be lossy; a tensor that is sent uncompressed has no residual."""
        return level is not None and spec.ndim >= self.traits.min_ndim

    def takes_step(self, spec: TensorSpec, level: float | None) -> bool:
        """Whether the update of this tensor is its step, so that the optimizer receives a zero gradient for it."""
        return bool(self.traits.optimizer.owns)

    def takes_feedback(self, spec: TensorSpec, level: float | None, workers: int) -> bool:
        """Whether the encoder adds the residual and stores the compression error in it, see `Context.feedback`."""
        return False

    def init(self, specs: Sequence[TensorSpec], comm: Comm, like: Tensor) -> State:
        """Return the state before the first exchange, for tensors of the dtype and on the device of `like`."""
        return {}

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        """Exchange tensors [W, ...]; may change `state`, but never `xs_W`."""
        raise NotImplementedError

    def redistributed_state(self, kept_A: Sequence[Saved], worker: int, workers: int) -> dict[str, dict[str, Tensor]]:
        """Return one worker's share of a state that another number of workers stored: the mean of each tensor.

        Args:
            kept_A: of every previous worker.
            worker, workers: index of the worker, and number of workers.
        """
        return {
            name: {key: torch.stack([kept[name][key].double() for kept in kept_A]).mean(0) for key in entries}
            for name, entries in kept_A[0].items()
        }

    def transfers(self, spec: TensorSpec, level: float, workers: int, kept: Kept = None) -> Sequence[Transfer]:
        """Return the collectives that carry a compressed tensor, with upper bounds if `fixed_size` is false."""
        raise NotImplementedError

    def pays(self, spec: TensorSpec, level: float, workers: int) -> bool:
        """Whether a tensor with a level is compressed; if not, the dense exchange is cheaper."""
        return True

    def compressor_input(self, xs_W: Sequence[Tensor], ctx: Context, state: State, workers: int) -> list[Tensor]:
        """Return the input of the compression [W, ...], including residual and momentum; changes nothing."""
        return list(xs_W)


def zeros_in_state(state: State, key: str, specs: Sequence[TensorSpec], comm: Comm, like: Tensor) -> State:
    """Add zeros [W, ...] for some tensors under a key of the state, in one allocation, and return the state."""
    for spec, zeros_W in zip(specs, Blocks(specs, comm.local_workers, like).tensors, strict=True):
        state.setdefault(spec.name, {})[key] = zeros_W
    return state


def cached_by_arguments(method: Callable[..., Any]) -> Callable[..., Any]:
    """Cache the results of a compressor's method by its arguments, until `forget`."""

    @functools.wraps(method)
    def asked(self: Any, *arguments: Any) -> Any:
        known, key = self.__dict__.setdefault("_answers", {}), (method, *arguments)
        if key not in known:
            known[key] = method(self, *arguments)
        return known[key]

    return asked


def forget(compressor: "Compressor") -> None:
    """Clear the results cached by `cached_by_arguments`, after a change of what they depend on."""
    compressor.__dict__.pop("_answers", None)


def subtract_(targets_W: Mapping[int, Tensor], xs_W: Sequence[Tensor]) -> None:
    """Subtract from each target [W, ...] the tensor of its index: an uncompressed tensor is received exactly."""
    if targets_W:
        torch._foreach_sub_(list(targets_W.values()), [xs_W[i] for i in targets_W])


def paying_levels(compressor: Compressor, ctx: Context, workers: int) -> dict[int, Any]:
    """Return, by index, the levels of the tensors that are compressed and cheaper than a dense exchange."""
    levels = compressed_levels(compressor, ctx)
    return {i: level for i, level in levels.items() if compressor.pays(ctx.specs[i], level, workers)}


def compressed_levels(compressor: Compressor, ctx: Context) -> dict[int, Any]:
    """Return, by index, the levels of the tensors whose compression may be lossy."""
    pairs = enumerate(zip(ctx.specs, ctx.levels, strict=True))
    return {i: level for i, (spec, level) in pairs if compressor.compresses(spec, level)}
