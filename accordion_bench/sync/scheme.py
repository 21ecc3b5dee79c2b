"""What every synchronisation scheme is, and the state that checkpoints have of it."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.on_device import copy_on_cpu, restore_
from accordion_bench.comm.replicas import Replicas
from accordion_bench.compressors.assemble import Wrapped
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.exchange.runner import CompletedExchange, ExchangeRunner
from accordion_bench.optimizers.inner import Optimizers
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.component import Component, Idle, Surroundings
from accordion_bench.options.instantiate import Config
from accordion_bench.plan import Plan, RunFacts, TensorSpec
from accordion_bench.position import Position, Rate

LEFT = "workers that must be left then; null = 1"  # what min_workers is
PER_WORKER = "_W"  # ends the names of tensors with a row per worker, in the state of an exchange


@dataclass(frozen=True)
class SyncContext:
    """What a scheme works with.

    Args:
        axis: model, gradients and replicas of the local workers.
        position: where training stands.
        runner: makes exchanges and runs them.
        inner: the optimizers.
        run: what was known before the run.
        weight_decay: for a compressor that takes the step itself.
        clip_mean: largest global L2 norm of an exchanged mean gradient; None = any.
        store: of the run, in which processes tell each other things; None = there is none.
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
    """An exchange, under the name by which a checkpoint keeps its state, and the local workers that take part."""

    name: str
    exchange: Exchange
    rows: range


class Stateful:
    """State by registration: a class names the attributes that are its state.

    Class attributes:
        keeps: names of attributes that all workers have in common: numbers, strings, lists of them, lists of tensors,
            and other `Stateful`s. Tensors are restored in place.

    Example:
        class Round(Sync):
            keeps = ("since", "outer_buffers", "in_flight")
    """

    keeps: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> dict[str, Any]:
        """What all workers have in common; tensors are copied to the CPU."""
        return {name: _saved(getattr(self, name)) for name in self.keeps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`.

        Raises:
            ConfigError: another version has saved it, or another scheme.
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
    """A copy of a value of an attribute, for a checkpoint."""
    if isinstance(value, Stateful):
        return value.state_dict()
    if isinstance(value, Tensor):
        return copy_on_cpu(value)
    if isinstance(value, dict):
        return {key: _saved(item) for key, item in value.items()}
    return [_saved(item) for item in value] if isinstance(value, list) else value


def _restored(value: Any, saved: Any) -> bool:
    """Whether a value could be continued in place: it is `Stateful`, a tensor, or a container of as many."""
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


def _idle(cls: Any, options: Config, context: Surroundings) -> Idle:
    if options.get("min_workers") is not None and not options.get("elastic"):
        yield "min_workers", "sync.elastic is not true"


class Sync(Component, Stateful):
    """Exchanges what it must before and after each step of the optimizer.

    Class attributes:
        local: workers take steps of their own, between exchanges of differences of parameters.
        late: what it exchanges travels while the workers go on, and is used when it has arrived.
        grows: its period grows by itself, as its options say.
        every_local_step: what it exchanges follows every local step, so that no period is to be found for it.
        waits: workers wait for each other; else each goes at its own pace, and meets one other at a time.
        without_averages: why it never averages differences of all parameters over all workers, which a compressor or a
            policy would work on, and ends in an average of everything: `which ...`; "" = it does.
        shares: options that are a share of the coordinates, and how reports write them behind the scheme.

    Attributes:
        weighs: its means can be weighted by the samples of workers whose batches differ.
        gradient_exchange: whether gradients are exchanged at any time of a run.
        period: H, where the plan has one.
        groups: (period, size) of every group of workers, where they have periods of their own.
        outer_optimizer: what takes a step at every averaging; `none` = the mean stays as it is.
        quorum: workers that an averaging needs; None = all.
        plans_with: what it must know of the training beforehand, see `Policy`.
        buffers: the inner optimizers' at an averaging, see `treat_buffers`.
        final: steps that are left after the last averaging end in an exact one.
        partial: an averaging is of some of the tensors.
        split: the tensors, by index, of each averaging of a round; None = all of them.
        elastic: processes may be lost, and others may enter, see `ElasticMembership`.
        min_workers: that must be left then.
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
    plans_with: frozenset[str] = frozenset()
    buffers: str | None = "keep"
    final: bool = False
    partial: bool = False
    split: Sequence[Sequence[int]] | None = None
    elastic: bool | None = False
    min_workers: int | None = None

    def check(self, run: RunFacts, workers_per_process: int) -> None:
        """Refuse options that do not fit the run.

        Args:
            run: how much there is to train.
            workers_per_process: W.

        Raises:
            ConfigError: with what to type instead.
        """
        if self.elastic and (self.min_workers or 1) > run.workers:
            rule = f"at most {run.workers}, the number of workers"
            raise ValueRefused("sync.min_workers", rule, self.min_workers, run.workers)

    def messages(self) -> Wrapped | None:
        """What its workers send, where it does not leave that to `compressor`; made anew by each call."""
        return None

    def makes(self, run: RunFacts) -> Sequence[tuple[Exchange, int]] | None:
        """Every kind of exchange of a run, and how often; asked after `begin`. None = as its period says."""
        return None

    def refuse_driven(self, drivers: Mapping[str, str], run: RunFacts) -> None:
        """Refuse options that a policy would contradict in mid-run.

        Args:
            drivers: by what they drive (see `Policy`), the names of the run's policies.
            run: what is known of the run.

        Raises:
            ValueRefused: with what goes together.
        """
        for name in drivers.values() if self.elastic else ():
            rule = f"{{false}} with adaptive={name}, because policies look at exchanges of all workers"
            raise ValueRefused("sync.elastic", rule, True, False)

    def refuse_tensors(self, specs: Sequence[TensorSpec]) -> None:
        """Refuse options that do not fit the trained tensors.

        Raises:
            ValueRefused: with what to type instead.
        """

    @classmethod
    def in_every_step(cls, options: Config) -> Config:
        """These options with those under which every step exchanges, so that steps can be measured one by one."""
        return {**options, "period": 1} if options.get("period") is not None else options

    def local_steps(self, run: RunFacts) -> int:
        """Steps of the run that workers take by themselves, where the learning rate falls as scheduled."""
        return run.steps if self.local else 0

    def averagings(self, steps: int) -> list[int]:
        """How many averagings of each part of `split` so many local steps have."""
        return []

    def buffer_interval(self, key: str) -> int:
        """After how many averagings the inner optimizers' buffers of a name are averaged, too; 0 = never."""
        return 0

    def buffer_averagings(self, steps: int, period: int, key: str) -> int:
        """How often the inner optimizers' buffers of a name are averaged in so many local steps.

        Args:
            steps: in all.
            period: H, at the start.
            key: their name.
        """
        return 0

    def ends_apart(self, steps: int, period: int) -> bool:
        """Whether the run ends in an exact average, after so many local steps.

        Args:
            steps: in all.
            period: H, at the start.
        """
        return False

    def start(self, plan: Plan) -> Plan:
        """The plan before the first step."""
        return plan

    def begin(self, context: SyncContext) -> None:
        """Before the first step, or before a checkpoint is loaded."""
        self.context = context
        self.axis, self.position, self.runner = context.axis, context.position, context.runner
        self.inner, self.comm, self.clock = context.inner, context.axis.comm, context.axis.comm.clock

    def samples_used(self, batches: Sequence[int]) -> list[int]:
        """Samples of each worker that the mean of the coming step counts; [] = all, as they are. Called once a step.

        Args:
            batches: samples that the workers have.
        """
        return []

    def comes(self, worker: int) -> None:
        """Where no worker waits for another: this one, and no other, takes part in the coming step."""

    @property
    def cuts(self) -> bool:
        """Whether a worker computes with no more samples than `samples_used` says, one at least."""
        return False

    def before_step(self, lr: Rate) -> CompletedExchange | None:
        """Before the optimizer's step: from local gradients [W, ...] to those that it is to use.

        Args:
            lr: learning rate of this step, one for all tensors or one for each.

        Returns:
            what was exchanged and waited for; None = nothing.
        """
        raise NotImplementedError

    def after_step(self, lr: Rate) -> CompletedExchange | None:
        """After the optimizer's step; returns what was exchanged and waited for, None = nothing."""
        raise NotImplementedError

    def land(self) -> None:
        """Wait for what has been launched, if there is anything."""

    def finish(self) -> None:
        """After the last step: leave one consensus model behind."""

    def consensus(self) -> list[Tensor]:
        """The parameters [...] to evaluate; training state stays as it is."""
        return self.axis.shared

    def gradients_go_to(self) -> Exchange | None:
        """The exchange that the gradients of the coming step will go to as they are; None = none."""
        return None

    @property
    def averaging(self) -> bool:
        """Whether the last step was a local one, so that an exchange after it was an averaging of local steps."""
        return False

    @property
    def exchange(self) -> Exchange:
        """The exchange of all workers that is in force now."""
        raise NotImplementedError

    @property
    def parts(self) -> list[Exchange]:
        """What that one falls into: an exchange for each part of `split`, or itself."""
        return [self.exchange]

    def exchanges(self) -> list[Placed]:
        """Every exchange with state."""
        raise NotImplementedError

    def new_exchange(self, comm: Comm | None = None) -> Exchange:
        """One like those that follow local steps, among the workers of `comm`; None = all."""
        raise NotImplementedError

    def between(self) -> list[Exchange]:
        """What follows every local step, between the averagings."""
        return []

    def resized(self) -> None:
        """The number of workers is another one now; residuals and z are as they were."""

    def restart(self) -> None:
        """Start local steps of a worker that has loaded another worker's common state: x_w <- z."""
        self.axis.restart(self.axis.shared, range(len(self.axis.replicas)))

    def columns(self) -> dict[str, Any]:
        """What it says in metrics rows, beside bytes and times."""
        return self.comm.membership.columns()

    def own(self, row: int) -> dict[str, Any]:
        """The tensors that belong to one local worker, in nested dictionaries by name; they are restored in place."""
        return {}

    def derived(self) -> list[Tensor]:
        """Tensors that follow from its state, so that no checkpoint has them."""
        return []

    def worker_state(self, row: int) -> dict[str, Any]:
        """Copies of what belongs to one local worker, on the CPU."""
        copied: dict[str, Any] = _saved(self.own(row))
        return copied

    def load_worker_state(self, row: int, state: dict[str, Any]) -> None:
        """Continue from `worker_state()`."""
        _restored(self.own(row), state)


class SyncState:
    """The state of a scheme and of its exchanges: of all workers, and of each one.

    Args:
        sync: the scheme.
        comm: of all workers.
    """

    def __init__(self, sync: Sync, comm: Comm) -> None:
        self.sync, self.comm = sync, comm

    def state_dict(self) -> dict[str, Any]:
        """What all workers have in common."""
        places = [place for place in self.sync.exchanges() if place.exchange.comm is self.comm]
        return {"sync": self.sync.state_dict(), "exchange_states": {place.name: _common(place) for place in places}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.sync.load_state_dict(state["sync"])
        for place in self.sync.exchanges():
            self._load_common(state["exchange_states"].get(place.name, {}), place)

    def worker_state(self, row: int) -> dict[str, Any]:
        """What belongs to one local worker."""
        places = [place for place in self.sync.exchanges() if row in place.rows]
        return {
            "sync": self.sync.worker_state(row),
            "exchange_states": {place.name: _row(place, row) for place in places},
            # a group's own state is the leader's to save only where all workers are in it
            "groups": {p.name: _common(p) for p in places if p.exchange.comm is not self.comm},
        }

    def load_worker_state(self, row: int, state: dict[str, Any]) -> None:
        """Continue from `worker_state()`."""
        self.sync.load_worker_state(row, state["sync"])
        for place in self.sync.exchanges():
            if row not in place.rows:
                continue
            self._load_common(state["groups"].get(place.name, {}), place)
            for name, entries in state["exchange_states"].get(place.name, {}).items():
                for key, value in entries.items():
                    restore_(place.exchange.state[name][key][row - place.rows.start], value)

    def _load_common(self, state: dict[str, Any], place: Placed) -> None:
        """What the workers of one exchange have in common."""
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
    """With the exchange of all workers under the name that it has now."""
    all_before, all_now = f"pseudo_gradient-{before}", f"pseudo_gradient-{workers}"
    states = state["exchange_states"]
    return state | {"exchange_states": {all_now if name == all_before else name: states[name] for name in states}}
