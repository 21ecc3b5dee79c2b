"""Base class of synchronisation schemes, and their state in checkpoints."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.on_device import copy_on_cpu, restore_
from accordion_bench.comm.replicas import Replicas
from accordion_bench.compressors.assemble import CompressorSetup
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.exchange.runner import CompletedExchange, ExchangeRunner
from accordion_bench.optimizers.inner import Optimizers
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.component import Component, Idle, RunContext
from accordion_bench.options.instantiate import Config
from accordion_bench.plan import Plan, RunFacts, TensorSpec
from accordion_bench.position import Position, Rate

LEFT = "least number of workers of such a run; null = 1"  # help text of min_workers
PER_WORKER = "_W"  # suffix of tensors [W, ...] with a row per worker, in the state of an exchange


@dataclass(frozen=True)
class SyncContext:
    """The objects on which a scheme operates.

    Args:
        axis: model, gradients and replicas of the local workers.
        position: current step, epoch and plan.
        runner: creates and runs exchanges.
        inner: the optimizers.
        run: facts about the run that are known in advance.
        weight_decay: weight decay, for a compressor that performs the optimizer's step.
        clip_mean: largest global L2 norm of an exchanged mean gradient; None = no limit.
        store: key-value store shared by the processes of the run; None = no store.
    """

    axis: Replicas
    position: Position
    runner: ExchangeRunner
    inner: Optimizers
    run: RunFacts
    weight_decay: float = 0.0
    clip_mean: float | None = None
    store: Any = None


class Placed(NamedTuple):
    """An exchange, its name in checkpoints, and the rows of the local workers that take part."""

    name: str
    exchange: Exchange
    rows: range


class Stateful:
    """Base class of objects that list the attributes which make up their state.

    Class attributes:
        keeps: names of attributes that are equal on all workers: numbers, strings, lists of these, lists of tensors,
            and other `Stateful` objects. Tensors are restored in place.

    Example:
        class Round(Sync):
            keeps = ("since", "outer_buffers", "in_flight")
    """

    keeps: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that is equal on all workers; tensors are copied to the CPU."""
        return {name: _saved(getattr(self, name)) for name in self.keeps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from `state_dict()`.

        Raises:
            ConfigError: the state was saved by another version or scheme.
        """
        if missing := [name for name in self.keeps if name not in state]:
            raise ConfigError(
                f"state must be what this version saves of this scheme, got one without {missing[0]}; begin anew, or "
                "go on with the version that saved it"
            )
        for name in self.keeps:
            before = getattr(self, name)
            if not _restored(before, state[name]):
                setattr(self, name, copy.deepcopy(state[name]))


def _saved(value: Any) -> Any:
    if isinstance(value, Stateful):
        return value.state_dict()
    if isinstance(value, Tensor):
        return copy_on_cpu(value)
    if isinstance(value, dict):
        return {key: _saved(item) for key, item in value.items()}
    return [_saved(item) for item in value] if isinstance(value, list) else value


def _restored(value: Any, saved: Any) -> bool:
    """Restore a value in place, and return whether that was possible; see `Stateful.keeps`."""
    if isinstance(value, Stateful):
        value.load_state_dict(saved)
    elif isinstance(value, Tensor):
        restore_(value, saved)
    elif isinstance(value, dict):
        return all([_restored(item, saved[key]) for key, item in value.items()])
    else:
        alike = isinstance(value, list) and len(value) == len(saved)
        return alike and all([_restored(item, kept) for item, kept in zip(value, saved, strict=True)])
    return True


def _idle(cls: Any, options: Config, context: RunContext) -> Idle:
    if options.get("min_workers") is not None and not options.get("elastic"):
        yield "min_workers", "sync.elastic is not true"


class Sync(Component, Stateful):
    """Synchronisation scheme: decides which exchanges run before and after each step of the optimizer.

    Class attributes:
        local: whether workers take local steps between exchanges of parameter differences.
        late: whether exchanges overlap later steps and are applied when they are complete.
        grows: whether the period grows during the run, as its options define.
        every_local_step: whether it exchanges after every local step, so that no period can be chosen for it.
        waits: whether workers wait for each other; otherwise each runs at its own speed and averages with one other.
        without_averages: reason, as `which ...`, why it never averages the differences of all parameters over all
            workers, on which compressors and policies operate. Such a scheme ends with an exact average. "" = it does.
        shares: options that are a fraction of the coordinates, and their format in reports, after the scheme's name.

    Attributes:
        weighs: whether its means can be weighted by the samples of workers with different batch sizes.
        gradient_exchange: whether gradients are exchanged at any time of a run.
        period: H, number of steps between two averagings; None = the plan has no period.
        groups: (period, size) of each level of worker groups, if they have different periods.
        outer_optimizer: optimizer that steps at every averaging; `none` = the mean is used unchanged.
        quorum: number of workers that an averaging needs; None = all.
        required_facts: facts about the training that it needs in advance, see `Policy`.
        buffers: treatment of the inner optimizers' buffers at an averaging, see `treat_buffers`.
        final: whether steps after the last averaging end with an exact average.
        partial: whether an averaging covers only some of the tensors.
        split: indices of the tensors of each averaging of a round; None = all tensors.
        elastic: whether processes may be lost and others may enter, see `ElasticMembership`.
        min_workers: lower bound of the number of workers in an elastic run.
    """

    description = replace(Component.description, shares={}, idle=_idle)

    local: bool = False
    late: bool = False
    grows: bool = False
    every_local_step: bool = False
    waits: bool = True
    without_averages: str = ""
    weighs: bool = True
    gradient_exchange: bool = True
    period: int | None = None
    groups: Sequence[tuple[int, int]] | None = None
    outer_optimizer: str = "none"
    quorum: int | None = None
    required_facts: frozenset[str] = frozenset()
    buffers: str | None = "keep"
    final: bool = False
    partial: bool = False
    split: Sequence[Sequence[int]] | None = None
    elastic: bool | None = False
    min_workers: int | None = None

    def check(self, run: RunFacts, workers_per_process: int) -> None:
        """Check the options against the run; raise ConfigError, with a suggestion, for one that does not fit."""
        if self.elastic and (self.min_workers or 1) > run.workers:
            rule = f"at most {run.workers}, the number of workers"
            raise ValueRefused("sync.min_workers", rule, self.min_workers, run.workers)

    def messages(self) -> CompressorSetup | None:
        """Return a new compressor if the scheme has its own message format; None = the option `compressor` applies."""
        return None

    def makes(self, run: RunFacts) -> Sequence[tuple[Exchange, int]] | None:
        """Return each kind of exchange of a run and its number, after `begin`; None = they follow from the period."""
        return None

    def refuse_driven(self, drivers: Mapping[str, str], run: RunFacts) -> None:
        """Check the options against the policies of the run, whose names `drivers` maps from properties.

        Raises:
            ValueRefused: a policy would contradict an option; the message suggests a value.
        """
        for name in drivers.values() if self.elastic else ():
            rule = f"{{false}} with adaptive={name}, because policies look at exchanges of all workers"
            raise ValueRefused("sync.elastic", rule, True, False)

    def refuse_tensors(self, specs: Sequence[TensorSpec]) -> None:
        """Check the options against the trained tensors; raise ValueRefused, with a suggestion."""

    @classmethod
    def in_every_step(cls, options: Config) -> Config:
        """Return the options changed so that every step exchanges, for measuring single steps."""
        return {**options, "period": 1} if options.get("period") is not None else options

    def local_steps(self, run: RunFacts) -> int:
        """Return the number of local steps of the run under its learning rate schedule."""
        return run.steps if self.local else 0

    def averagings(self, steps: int) -> list[int]:
        """Return the number of averagings of each part of `split` in `steps` local steps."""
        return []

    def buffer_interval(self, key: str) -> int:
        """Return after how many averagings the inner optimizers' buffers named `key` are averaged; 0 = never."""
        return 0

    def buffer_averagings(self, steps: int, period: int, key: str) -> int:
        """Return how often buffers `key` of the inner optimizers are averaged in these steps; first H = `period`."""
        return 0

    def ends_apart(self, steps: int, period: int) -> bool:
        """Whether a run of this many local steps ends with an exact average; the first H = `period`."""
        return False

    def start(self, plan: Plan) -> Plan:
        """Return the plan for the first step."""
        return plan

    def begin(self, context: SyncContext) -> None:
        """Prepare the scheme before the first step, or before a checkpoint is loaded."""
        self.context = context
        self.axis, self.position, self.runner = context.axis, context.position, context.runner
        self.inner, self.comm, self.clock = context.inner, context.axis.comm, context.axis.comm.clock

    def samples_used(self, batches: Sequence[int]) -> list[int]:
        """Return how many samples of each worker's batch count in the next mean; [] = all. Called once per step."""
        return []

    def comes(self, worker: int) -> None:
        """Set the only worker that takes part in the next step, in schemes without waiting."""

    @property
    def cuts(self) -> bool:
        """Whether a worker's batch is cut to the number from `samples_used`, at least one sample."""
        return False

    def before_step(self, lr: Rate) -> CompletedExchange | None:
        """Replace the local gradients [W, ...] by those of the optimizer's step, before that step.

        Args:
            lr: learning rate of this step, one for all tensors or one per tensor.

        Returns:
            the completed exchange; None = there was none.
        """
        raise NotImplementedError

    def after_step(self, lr: Rate) -> CompletedExchange | None:
        """Exchange after the optimizer's step; return the completed exchange, None = there was none."""
        raise NotImplementedError

    def land(self) -> None:
        """Wait for a launched exchange, if there is one."""

    def finish(self) -> None:
        """Form the consensus model after the last step."""

    def consensus(self) -> list[Tensor]:
        """Return the parameters [...] to evaluate; does not change the training state."""
        return self.axis.shared

    def gradient_exchange_of_next_step(self) -> Exchange | None:
        """Return the exchange that will take the next step's gradients unchanged; None = there is none."""
        return None

    @property
    def averaging(self) -> bool:
        """Whether the last step was a local one, so that an exchange after it averaged local steps."""
        return False

    @property
    def exchange(self) -> Exchange:
        """Current exchange of all workers."""
        raise NotImplementedError

    @property
    def parts(self) -> list[Exchange]:
        """Exchanges of the parts of `split`, or the one exchange of all tensors."""
        return [self.exchange]

    def exchanges(self) -> list[Placed]:
        """Return all exchanges with state."""
        raise NotImplementedError

    def new_exchange(self, comm: Comm | None = None) -> Exchange:
        """Create an exchange of the kind that follows local steps, among the workers of `comm`; None = all."""
        raise NotImplementedError

    def between(self) -> list[Exchange]:
        """Return the exchanges that follow every local step, between averagings."""
        return []

    def resized(self) -> None:
        """Adapt to a new number of workers; residuals and z are unchanged."""

    def restart(self) -> None:
        """Start local steps of a worker that has loaded another worker's common state: x_w <- z."""
        self.axis.restart(self.axis.shared, range(len(self.axis.replicas)))

    def columns(self) -> dict[str, Any]:
        """Return columns for metrics rows, besides bytes and times."""
        return self.comm.membership.columns()

    def own(self, row: int) -> dict[str, Any]:
        """Return the tensors of one local worker in nested dictionaries by name; they are restored in place."""
        return {}

    def derived(self) -> list[Tensor]:
        """Return tensors that follow from the state and are not saved in checkpoints."""
        return []

    def worker_state(self, row: int) -> dict[str, Any]:
        """Return copies of the tensors of one local worker, on the CPU."""
        copied: dict[str, Any] = _saved(self.own(row))
        return copied

    def load_worker_state(self, row: int, state: dict[str, Any]) -> None:
        """Restore the tensors of one local worker from `worker_state()`."""
        _restored(self.own(row), state)


class SyncState:
    """State of a scheme and its exchanges: the common part, and that of each worker; `comm` has all workers."""

    def __init__(self, sync: Sync, comm: Comm) -> None:
        self.sync, self.comm = sync, comm

    def state_dict(self) -> dict[str, Any]:
        """Return the state that is equal on all workers."""
        places = [place for place in self.sync.exchanges() if place.exchange.comm is self.comm]
        return {"sync": self.sync.state_dict(), "exchange_states": {place.name: _common(place) for place in places}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from `state_dict()`."""
        self.sync.load_state_dict(state["sync"])
        for place in self.sync.exchanges():
            self._load_common(state["exchange_states"].get(place.name, {}), place)

    def worker_state(self, row: int) -> dict[str, Any]:
        """Return the state of one local worker."""
        places = [place for place in self.sync.exchanges() if row in place.rows]
        return {
            "sync": self.sync.worker_state(row),
            "exchange_states": {place.name: _row(place, row) for place in places},
            # the leader saves the state of an exchange only if all workers take part
            "groups": {p.name: _common(p) for p in places if p.exchange.comm is not self.comm},
        }

    def load_worker_state(self, row: int, state: dict[str, Any]) -> None:
        """Restore the state of one local worker from `worker_state()`."""
        self.sync.load_worker_state(row, state["sync"])
        for place in self.sync.exchanges():
            if row not in place.rows:
                continue
            self._load_common(state["groups"].get(place.name, {}), place)
            for name, entries in state["exchange_states"].get(place.name, {}).items():
                for key, value in entries.items():
                    restore_(place.exchange.state[name][key][row - place.rows.start], value)

    def _load_common(self, state: dict[str, Any], place: Placed) -> None:
        for name, entries in state.items():
            moved = {key: value.to(self.comm.device, copy=True) for key, value in entries.items()}
            place.exchange.state.setdefault(name, {}).update(moved)


def _common(place: Placed) -> dict[str, Any]:
    return {
        name: {key: copy_on_cpu(value) for key, value in entries.items() if not key.endswith(PER_WORKER)}
        for name, entries in place.exchange.state.items()
    }


def _row(place: Placed, row: int) -> dict[str, Any]:
    at = row - place.rows.start
    return {
        name: {key: copy_on_cpu(value[at]) for key, value in entries.items() if key.endswith(PER_WORKER)}
        for name, entries in place.exchange.state.items()
    }


def renamed(state: dict[str, Any], before: int, workers: int) -> dict[str, Any]:
    """Rename the exchange of all workers in a state of `before` workers to its name with `workers`."""
    all_before, all_now = f"pseudo_gradient-{before}", f"pseudo_gradient-{workers}"
    states = state["exchange_states"]
    return state | {"exchange_states": {all_now if name == all_before else name: states[name] for name in states}}
