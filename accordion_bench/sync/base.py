"""What every synchronisation scheme is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.replicas import Replicas
from accordion_bench.compressors.assemble import Wrapped
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.exchange.runner import CompletedExchange, ExchangeRunner
from accordion_bench.optimizers.inner import Optimizers
from accordion_bench.options.component import Component
from accordion_bench.options.instantiate import Config
from accordion_bench.plan import Plan, RunFacts, TensorSpec
from accordion_bench.position import Position, Rate


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


class Sync(Component):
    """Exchanges what it must before and after each step of the optimizer.

    Class attributes:
        local: workers take steps of their own, between exchanges of differences of parameters.
        late: what it exchanges travels while the workers go on, and is used when it has arrived.
        grows: its period grows by itself, as its options say.
        every_local_step: what it exchanges follows every local step, so that no period is to be found for it.
        without_averages: why it never averages differences of all parameters over all workers, which a compressor or a
            policy would work on, and ends in an average of everything: `which ...`; "" = it does.
        shares: options that are a share of the coordinates, and how reports write them behind the scheme.

    Attributes:
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
    """

    description = replace(Component.description, shares={})

    local: bool = False
    late: bool = False
    grows: bool = False
    every_local_step: bool = False
    without_averages: str = ""
    gradient_exchange: bool = True
    period: int | None = None
    groups: Sequence[tuple[int, int]] | None = None
    outer_optimizer: str = "none"
    quorum: int | None = None
    plans_with: frozenset[str] = frozenset()
    buffers: str = "keep"
    final: bool = False
    partial: bool = False
    split: Sequence[Sequence[int]] | None = None

    def check(self, run: RunFacts, workers_per_process: int) -> None:
        """Refuse options that do not fit the run.

        Args:
            run: how much there is to train.
            workers_per_process: W.

        Raises:
            ConfigError: with what to type instead.
        """

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

    def buffer_averagings(self, steps: int, period: int) -> int:
        """How often the inner optimizers' buffers are averaged in so many local steps.

        Args:
            steps: in all.
            period: H, at the start.
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

    def columns(self) -> dict[str, Any]:
        """What it says in metrics rows, beside bytes and times."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What all workers have in common: tensors, numbers, strings and containers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""

    def make_state(self) -> None:
        """Make what else the first averaging would make, for whoever asks how much there is."""

    def derived(self) -> list[Tensor]:
        """Tensors that follow from its state, so that no checkpoint has them."""
        return []

    def worker_state(self, row: int) -> dict[str, Any]:
        """What belongs to one local worker."""
        return {}

    def load_worker_state(self, row: int, state: dict[str, Any]) -> None:
        """Continue from `worker_state()`."""
