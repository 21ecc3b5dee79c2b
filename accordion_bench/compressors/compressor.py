"""The interface that every compressor implements.

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
from accordion_bench.compressors.description import OF_COMPRESSORS, CompressorDescription
from accordion_bench.compressors.traits import Traits
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.component import Component
from accordion_bench.options.option import options_of
from accordion_bench.plan import RunFacts, TensorSpec
from accordion_bench.tensors.same_shape import Blocks

State = dict[str, dict[str, Any]]
"""Per parameter name, the compressor's tensors; a key ending in `_W` has one row per local worker."""


class NonFinite(RuntimeError):
    """A loss, a gradient or what a compressor was to pack is NaN or infinite; nothing of the step is applied."""


class Exchanged(NamedTuple):
    """The result of one exchange.

    update: tensors [...], what every worker applies; identical on all workers.
    subtract_sent_: called with tensors [W, ...] by index, subtracts in place from each of them the local workers'
        contributions to it, as the others decode them. A function, so that it costs nothing where it is not called, and
        touches only what was sent where error feedback does; of many tensors, so that a device is asked once.
    clear_sent_: the same, but sets to 0 where an entry was sent; of methods that send some entries of a tensor.
    """

    update: list[Tensor]
    subtract_sent_: Callable[[Mapping[int, Tensor]], Any]
    clear_sent_: Callable[[Mapping[int, Tensor]], Any] | None = None


class Compressor(Component):
    """A compressor exchanges a list of tensors [W, ...] and returns their decoded mean.

    Class attributes:
        traits: what it is, see `Traits`.
        description: what there is to say of it, see `CompressorDescription`.

    Attributes:
        start_step: tensors travel dense before this step.
        plans_with: what it must know of the training beforehand, see `Policy`.
    """

    traits: Traits = Traits()
    description: CompressorDescription = OF_COMPRESSORS
    start_step: int = 0
    plans_with: frozenset[str] = frozenset()

    def __init_subclass__(cls) -> None:
        """Refuse a trait that is written as an attribute of the class, where it would not be read."""
        for name in (field.name for field in dataclasses.fields(Traits)):
            if name in vars(cls):
                raise TypeError(f"{cls.__name__}.{name} is a trait; write traits = replace(..., {name}=...)")

    @property
    def level(self) -> float | None:
        """The configured value of the knob."""
        return getattr(self, self.traits.knob) if self.traits.knob else None

    def check_level(self, key: str, value: Any) -> float:
        """Refuse a value that the knob cannot take.

        Raises:
            ConfigError: with key, rule, value and what to type instead.
        """
        own = options_of(type(self)).get(self.traits.knob or "")
        if own is None:
            raise ConfigError(f"{key} has no meaning for a compressor without levels, got {value}")
        level: float = own.checked(value, key)
        return level

    def scheduled(self, level: float, epoch: float) -> float:
        """The level that is in force at a time, for methods with a warm-up of their own."""
        return level

    def codebook(self, bits: int) -> tuple[float, ...] | None:
        """The quantisation levels in [-1, 1] for a number of bits, which policies may replace; None = has none."""
        return None

    def fit_to(self, run: RunFacts) -> None:
        """Settle what hangs on the length of the training.

        Raises:
            ConfigError: an option does not fit the run.
        """

    def compresses(self, spec: TensorSpec, level: float | None) -> bool:
        """Whether something of this tensor may be lost on the way; a tensor sent whole has no residual."""
        return level is not None and spec.ndim >= self.traits.min_ndim

    def takes_step(self, spec: TensorSpec, level: float | None) -> bool:
        """Whether the update of this tensor is its step, so that the optimizer gets a zero gradient of it."""
        return bool(self.traits.optimizer.owns)

    def takes_feedback(self, spec: TensorSpec, level: float | None, workers: int) -> bool:
        """Whether its encoder adds a tensor's residual and keeps what is lost, see `Context.feedback`."""
        return False

    def init(self, specs: Sequence[TensorSpec], comm: Comm, like: Tensor) -> State:
        """State before the first exchange, for tensors of the type and on the device of `like`."""
        return {}

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        """Exchange tensors [W, ...]; may update `state`, never `xs_W`."""
        raise NotImplementedError

    def shared_anew(
        self, kept_A: Sequence[Mapping[str, Mapping[str, Tensor]]], worker: int, workers: int
    ) -> dict[str, dict[str, Tensor]]:
        """One worker's share of the state that another number of workers have each kept: the mean of each tensor.

        Args:
            kept_A: of every worker before, what it kept by name of the tensor and of the state, without a worker axis.
            worker, workers: whose share, of how many.
        """
        return {
            name: {key: torch.stack([kept[name][key].double() for kept in kept_A]).mean(0) for key in entries}
            for name, entries in kept_A[0].items()
        }

    def transfers(
        self, spec: TensorSpec, level: float, workers: int, kept: Mapping[str, Any] | None = None
    ) -> Sequence[Transfer]:
        """The collectives that carry a tensor that is compressed; upper bounds where `fixed_size` is false.

        Args:
            spec, level: of the tensor.
            workers: of the run.
            kept: its state, which says whose turn it is where exchanges take turns; None = the mean over the turns.
        """
        raise NotImplementedError

    def pays(self, spec: TensorSpec, level: float, workers: int) -> bool:
        """Whether a tensor that has a level is compressed, rather than sent whole because that costs less."""
        return True

    def compressor_input(self, xs_W: Sequence[Tensor], ctx: Context, state: State, workers: int) -> list[Tensor]:
        """What would be compressed of tensors [W, ...]: with residual and momentum; changes nothing."""
        return list(xs_W)


def zeros_in_state(state: State, key: str, specs: Sequence[TensorSpec], comm: Comm, like: Tensor) -> State:
    """The state, with zeros [W, ...] of some tensors under a key, in one allocation."""
    for spec, zeros_W in zip(specs, Blocks(specs, comm.local_workers, like).tensors, strict=True):
        state.setdefault(spec.name, {})[key] = zeros_W
    return state


def remembered(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a compressor that is asked the same in every step: answers are kept by arguments until `forget`."""

    @functools.wraps(method)
    def asked(self: Any, *arguments: Any) -> Any:
        known, key = self.__dict__.setdefault("_answers", {}), (method, *arguments)
        if key not in known:
            known[key] = method(self, *arguments)
        return known[key]

    return asked


def forget(compressor: "Compressor") -> None:
    """Ask anew, since what answers depend on has changed."""
    compressor.__dict__.pop("_answers", None)


def subtract_(targets_W: Mapping[int, Tensor], xs_W: Sequence[Tensor]) -> None:
    """Subtract from each target [W, ...] the tensor of its index: what travels whole is lost nowhere."""
    if targets_W:
        torch._foreach_sub_(list(targets_W.values()), [xs_W[i] for i in targets_W])


def paying_levels(compressor: Compressor, ctx: Context, workers: int) -> dict[int, Any]:
    """The levels of the tensors that are compressed and cost less so than whole, by index."""
    levels = compressed_levels(compressor, ctx)
    return {i: level for i, level in levels.items() if compressor.pays(ctx.specs[i], level, workers)}


def compressed_levels(compressor: Compressor, ctx: Context) -> dict[int, Any]:
    """The levels of the tensors of which something may be lost, by index."""
    pairs = enumerate(zip(ctx.specs, ctx.levels, strict=True))
    return {i: level for i, (spec, level) in pairs if compressor.compresses(spec, level)}
