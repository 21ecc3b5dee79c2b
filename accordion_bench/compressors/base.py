"""The waist: what every compressor takes and gives back.

Tensor suffixes: W local workers, A all workers, N elements, M rows, K columns, R rank.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accordion_bench.codecs.bucket import Context
from accordion_bench.codecs.layout import Transfer
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.buckets import Buckets, moments
from accordion_bench.compressors.claims import Claims
from accordion_bench.compressors.traits import Traits
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.component import Component, Idle, Surroundings
from accordion_bench.options.instantiate import Config
from accordion_bench.plan import Measured, RunFacts, TensorSpec
from accordion_bench.tensors.same_shape import in_rows

State = dict[str, dict[str, Any]]
"""Per parameter name, the compressor's tensors; a key ending in `_W` has one row per local worker."""


class NonFinite(RuntimeError):
    """A loss, a gradient or what a compressor was to pack is NaN or infinite; nothing of the step is applied."""


class Exchanged(NamedTuple):
    """The result of one exchange.

    update: tensors [...], what every worker applies; identical on all workers.
    subtract_sent_: called with tensors [W, ...] by index, subtracts in place from each of them the local workers'
        contributions to it, as the others decode them. A function, so that it costs nothing where nobody asks, and
        touches only what was sent where error feedback does; of many tensors, so that a device is asked once.
    """

    update: list[Tensor]
    subtract_sent_: Callable[[Mapping[int, Tensor]], Any]


class Probe(NamedTuple):
    """What a level would cost and lose, without sending anything.

    error: per tensor, ||p - C(p)||^2 / ||p||^2, mean over the local workers; 0 for a zero tensor. p is what would be
        sent: the gradient, with residual and momentum where there are any.
    total_error: the same of all tensors together.
    payload_bytes: per tensor, of one worker; an upper bound where `fixed_size` is false.
    buckets: per local worker, norm, mean and standard deviation of the normalised coordinates of every bucket, [B, 3];
        empty for methods without a codebook.
    measured: per tensor, of the first local worker, its error, norms and bytes.
    """

    error: list[float]
    total_error: float
    payload_bytes: list[float]
    buckets: list[Tensor]
    measured: list[Measured]


class WhyDense(NamedTuple):
    """Why a tensor that has a level travels dense after all.

    reason: a clause.
    instead: what to type for it to be compressed.
    """

    reason: str
    instead: str


class Compressor(Component, Claims):
    """A compressor exchanges a list of tensors [W, ...] and returns their decoded mean.

    Class attributes:
        traits: what it is, see `Traits`.

    Attributes:
        start_step: tensors travel dense before this step.
        plans_with: what it must know of the training beforehand, see `Policy`.
    """

    traits: Traits = Traits()
    of_several_kinds = frozenset({"error_feedback"})
    start_step: int = 0
    plans_with: frozenset[str] = frozenset()

    def __init_subclass__(cls) -> None:
        """Refuse a trait that is written as an attribute of the class, where nobody would read it."""
        for name in (field.name for field in dataclasses.fields(Traits)):
            if name in vars(cls):
                raise TypeError(f"{cls.__name__}.{name} is a trait; write traits = replace(..., {name}=...)")

    @classmethod
    def idle(cls, options: Config, around: Surroundings) -> Idle:
        if around.steered_by and around.knob:
            yield around.knob, f"adaptive={','.join(around.steered_by)} sets the {around.knob}"

    @classmethod
    def told(cls, options: Config) -> str:
        """What reports say of its options behind name and level; "" = nothing."""
        return ""

    @property
    def level(self) -> float | None:
        """The configured value of the knob."""
        return getattr(self, self.traits.knob) if self.traits.knob else None

    def check_level(self, key: str, value: Any) -> float:
        """Refuse a value that the knob cannot take.

        Raises:
            ConfigError: with key, rule, value and what to type instead.
        """
        raise ConfigError(f"{key} has no meaning for a compressor without levels, got {value}")

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
        return bool(self.traits.owns)

    def takes_feedback(self, spec: TensorSpec, level: float | None, workers: int) -> bool:
        """Whether its encoder adds a tensor's residual and keeps what is lost, see `Context.feedback`."""
        return False

    def why_dense(self, spec: TensorSpec, level: float, workers: int) -> WhyDense | None:
        """Why a tensor that has a level travels dense; None = it does not, or it was asked to."""
        return None

    def compressed(self, ctx: Context) -> dict[int, Any]:
        """The levels of the tensors of which something may be lost, by index."""
        pairs = enumerate(zip(ctx.specs, ctx.levels, strict=True))
        return {i: level for i, (spec, level) in pairs if self.compresses(spec, level)}

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

    def carried(
        self, spec: TensorSpec, level: float | None, workers: int, kept: Mapping[str, Any] | None = None
    ) -> Sequence[Transfer]:
        """The collectives of any tensor; `level` None = dense. See `transfers`."""
        if level is None or not self.compresses(spec, level) or not self.pays(spec, level, workers):
            return [Transfer("all_reduce", dense_bytes(spec))]
        return self.transfers(spec, level, workers, kept)

    def payload_bytes(self, spec: TensorSpec, level: float | None, workers: int) -> float:
        """Bytes that one worker hands to the collectives for this tensor (mean over workers); `level` None = dense.

        Where exchanges of a tensor take turns, their mean.
        """
        return sum(transfer.payload(workers) for transfer in self.carried(spec, level, workers))

    def coming_bytes(self, spec: TensorSpec, level: float | None, workers: int, state: State) -> float:
        """The same of the next exchange, whose turn it is by what `state` keeps."""
        carried = self.carried(spec, level, workers, state.get(spec.name, {}))
        return sum(transfer.payload(workers) for transfer in carried)

    def wire_bytes(self, spec: TensorSpec, level: float | None, workers: int) -> float:
        """Bytes that one worker's link sends for this tensor (mean over workers)."""
        return wire(self.carried(spec, level, workers), workers) / workers

    def _lower_knob(self) -> str:
        """What to type for shorter messages."""
        knob = self.traits.knob
        return f"{'fewer' if knob == 'bits' else 'a lower'} compressor.{knob}" if knob else ""

    def paper_floats(self, spec: TensorSpec, level: float | None, workers: int) -> int | None:
        """Floats of one exchange of this tensor as the Accordion paper counts them; None = it has no count for this.

        The count is that of its tables, whatever this implementation sends. Source: derived from Agarwal et al.,
        MLSys 2021 (arXiv 2010.16248), and its official code.
        """
        return spec.numel if level is None else None

    def fed(self, xs_W: Sequence[Tensor], ctx: Context, state: State, workers: int) -> list[Tensor]:
        """What would be compressed of tensors [W, ...]: with residual and momentum; changes nothing."""
        return list(xs_W)

    def buckets_of(self, xs_W: Sequence[Tensor], ctx: Context) -> list[list[Buckets]] | None:
        """The normalised buckets of each local worker's tensors, for policies that fit codebooks; None = has none."""
        return None

    @torch.no_grad()
    def probe(self, xs_W: Sequence[Tensor], ctx: Context, state: State, workers: int) -> Probe:
        """Error and bytes at the levels of `ctx`; touches neither state nor network.

        Args:
            xs_W: tensors [W, ...] of the local workers, whose error is looked at.
            ctx: as for `exchange`.
            state: as for `exchange`; not changed.
            workers: of the whole run, for the bytes.
        """
        return self.probe_fed(self.fed(xs_W, ctx, state, workers), ctx, state, workers)

    @torch.no_grad()
    def probe_fed(self, xs_W: Sequence[Tensor], ctx: Context, state: State, workers: int) -> Probe:
        """The same of what `fed` has made, or of a mean of several of these."""
        out = self.exchange(xs_W, ctx, copy.deepcopy(state), alone(xs_W))

        def lost(i: int) -> Tensor:
            lost_W = xs_W[i].clone()
            out.subtract_sent_({i: lost_W})
            return lost_W

        return self.probe_of(xs_W, lost, ctx, workers)

    def probe_of(self, ps_W: Sequence[Tensor], lost: Callable[[int], Tensor], ctx: Context, workers: int) -> Probe:
        """The probe of what would be sent, when it is known what is lost.

        Args:
            ps_W: what would be sent [W, ...], per tensor.
            lost: called with each index, returns p - C(p) [W, ...].
            ctx: the levels.
            workers: of the whole run.
        """
        pairs = zip(ctx.specs, ctx.levels, strict=True)
        sizes = [[f(s, level, workers) for f in (self.payload_bytes, self.wire_bytes)] for s, level in pairs]
        found = []
        for i, p_W in enumerate(ps_W):
            lost_W = lost(i)
            part, whole = (in_rows(x_W).double().square().sum(1) for x_W in (lost_W, p_W))
            sent_norm = (p_W[0] - lost_W[0]).double().norm()
            error = torch.where(whole > 0, part / whole.clamp_min(1e-300), 0).mean()
            found.append(torch.stack([part[0], whole[0].sqrt(), sent_norm, error, part.sum(), whole.sum()]))
        numbers = torch.stack(found).tolist() if found else []  # of all tensors in one copy to the host
        measured = [Measured(row[0], row[1], row[2], wire) for row, (_, wire) in zip(numbers, sizes, strict=True)]
        errors = [row[3] for row in numbers]
        all_lost, everything = (sum(row[column] for row in numbers) for column in (4, 5))
        total = all_lost / everything if everything else 0.0
        buckets = [moments(own) for own in self.buckets_of(ps_W, ctx) or []]
        return Probe(errors, total, [payload for payload, _ in sizes], buckets, measured)


def subtract_(targets_W: Mapping[int, Tensor], xs_W: Sequence[Tensor]) -> None:
    """Subtract from each target [W, ...] the tensor of its index: what travels whole is lost nowhere."""
    if targets_W:
        torch._foreach_sub_(list(targets_W.values()), [xs_W[i] for i in targets_W])


def alone(xs_W: Sequence[Tensor]) -> Comm:
    """The workers whose tensors [W, ...] these are, as if there were no others."""
    return Comm(xs_W[0].shape[0] if xs_W else 1, device=str(xs_W[0].device) if xs_W else "cpu")


def wire(transfers: Sequence[Transfer], workers: int) -> float:
    """Bytes that the links of all workers send."""
    return sum(transfer.wire(workers) for transfer in transfers)


def cheaper_than_dense(transfers: Sequence[Transfer], spec: TensorSpec, workers: int) -> bool:
    """Whether these collectives cost less wire than a dense all-reduce; of one worker, as of two."""
    workers = max(workers, 2)
    return wire(transfers, workers) < wire([Transfer("all_reduce", dense_bytes(spec))], workers)


def dense_bytes(spec: TensorSpec) -> int:
    """Payload of an fp32 all-reduce of one tensor."""
    return 4 * spec.numel
