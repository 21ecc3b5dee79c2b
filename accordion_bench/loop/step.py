"""One training step with communication; defines the order of its parts.

It is used by the bench's trainer with a backward pass, by `ab.attach` with hooks of a user's optimizer, and by the
advisor's rehearsal with synthetic gradients.

Also the state for workers that join an elastic run, and callbacks for a change of the workers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from accordion_bench.comm.membership import SampleAssignment
from accordion_bench.exchange.ddp import DDPExchange
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.exchange.overlap import ExchangeOptions, Overlap
from accordion_bench.exchange.runner import CompletedExchange, ExchangeRunner, Exchanging
from accordion_bench.optimizers.inner import Optimizers
from accordion_bench.position import Position, Rate
from accordion_bench.signals.policy_runner import Adapting, BatchFacts, PolicyRunner
from accordion_bench.sync.scheme import Sync, SyncContext


class Communicating(Exchanging, Adapting, Protocol):
    """The methods of a training: compressors, policies and the synchronisation scheme."""

    @property
    def sync(self) -> Sync:
        """The scheme that determines when and among which workers to exchange."""


@dataclass(frozen=True)
class StepOptions:
    """Options of a training's steps, in addition to the methods."""

    exchange: ExchangeOptions = field(default_factory=ExchangeOptions)  # how and when gradients are exchanged
    seed: int = 0  # for keyed draws
    clip_norm: float | None = None  # upper bound of the global L2 norm of a gradient; None = unbounded
    clip_mean: bool = False  # whether the exchanged mean is clipped, rather than each worker's own gradient
    weight_decay: float = 0.0  # of the optimizer, for a compressor that applies it
    # metrics that are recorded regardless of policies, see `PolicyRunner`
    measure: Mapping[str, bool] = field(default_factory=dict)
    store: Any = None  # the run's store for communication between processes; None = no store
    ddp: DDPExchange | None = None  # exchanges gradients in place of `Exchange`; None = `Exchange` does
    together: Sequence[Sequence[int]] | None = None  # units of each bucket, see `SendOptions`; None = by size


class CommunicatingStep:
    """A step of all workers, from their own gradients to the parameters that the next step starts from.

        step.begin(batch_size)
        step.arm(lr, step.leaving())    # before the last backward pass: buckets may be submitted as they fill
        loss.backward()                 # the caller stores the gradients in `axis.gradients_W`
        step.backward_over()
        step.before_update(lr)          # clipping, sums for policies, bytes of dense gradients, the scheme's exchange
        optimizer.step()
        step.after_update(lr)           # the scheme's exchange of parameters; policies decide
        step.taken()                    # late check for non-finite values; advances the position
        step.over(samples)              # the clock closes the step

    A step that all workers skip has no `before_update` and no `after_update`.

    Args:
        inner: the optimizers, for schemes that read their state; the caller takes their step.
        overlap: submits buckets during the backward pass; contains the replicas and the communicator.
        batches: loss and sample counts of the loop's batches.
    """

    def __init__(
        self,
        methods: Communicating,
        inner: Optimizers,
        position: Position,
        overlap: Overlap,
        batches: BatchFacts,
        options: StepOptions,
    ) -> None:
        self.position, self.overlap, self.axis = position, overlap, overlap.axis
        self.comm, self.clock = overlap.comm, overlap.comm.clock
        self.clip_own = None if options.clip_mean else options.clip_norm
        self.policies = PolicyRunner(methods, self.axis, position, batches, options.measure)
        self.runner = ExchangeRunner(position, overlap, self.policies, methods, options.exchange, options.seed)
        self.runner.ddp, self.runner.together = options.ddp, options.together
        self.sync = methods.sync
        self.sync.begin(
            SyncContext(
                *(self.axis, position, self.runner, inner, methods.run, options.weight_decay),
                clip_mean=options.clip_norm if options.clip_mean else None,
                store=options.store,
            )
        )
        self._before: CompletedExchange | None = None
        self.under_way = False  # whether the optimizer is about to step or has, and the position has not advanced

    @property
    def exchange(self) -> Exchange:
        """The exchange of all workers that is currently in use."""
        return self.sync.exchange

    def begin(self, batch_size: int) -> None:
        """Start the clock of a step under the current plan, with this number of samples per worker."""
        self.clock.in_force(batch_size, self.exchange.predicted_bytes(self.position.info()))
        self.clock.worker()

    def leaving(self) -> Exchange | None:
        """Return the exchange whose buckets may be submitted as they fill; None if they may not.

        They may not if DistributedDataParallel exchanges gradients, or a policy inspects them first.
        """
        needs_all_gradients = self.runner.ddp is not None or self.policies.looks()
        return self.sync.gradient_exchange_of_next_step() if self.overlap.notes and not needs_all_gradients else None

    def arm(self, lr: Rate, exchange: Exchange | None) -> None:
        """Start collecting the last gradients of this step, for the result of `leaving`."""
        if exchange is not None:
            self.overlap.arm(exchange, exchange.begin(self.position.info(lr)) if self.overlap.allowed else None)

    def backward_over(self) -> None:
        """Submit the remaining buckets; all gradients must be in `axis.gradients_W`."""
        self.overlap.complete()

    def before_update(self, lr: Rate) -> None:
        """Turn each worker's gradients into those that the optimizer uses; NonFinite if one is NaN or infinite."""
        if self.clip_own:
            self.axis.clip(self.clip_own)
            self.clock.lap("compute")
        self.policies.epoch_sums.add_gradients(self.axis.gradients_W)
        self.clock.lap("policy")
        self.comm.ledger.dense_step(self.exchange.numel)
        self.under_way = True
        self._before = self.sync.before_step(lr)

    def after_update(self, lr: Rate) -> None:
        """Turn the optimizer's result into parameters and plan of the next step; NonFinite if a difference is."""
        after = self.sync.after_step(lr)
        completed, self._before = self._before if after is None else after, None
        if completed is not None:
            self.decide(completed)

    def decide(self, completed: CompletedExchange) -> None:
        """Let the policies that are due change the plan after an exchange."""
        self.policies.after_exchange(completed, self.sync.averaging)
        self.clock.lap("policy")

    def give_up(self) -> None:
        """Discard the result of `before_update`."""
        self._before = None

    def taken(self) -> None:
        """Complete the step, whether taken or skipped by all, and advance; NonFinite if a value noted in it is."""
        self.runner.finite.refuse()  # values that no exchange has read
        self.position.step_taken()
        self.under_way = False
        self.comm.membership.border()

    @property
    def steps(self) -> int:
        """Number of steps taken, including the current one."""
        return self.position.step + self.under_way

    def over(self, samples: int) -> None:
        """Close the measurement of a step with this many samples of a worker; times count from the second step on."""
        self.clock.step_over(samples)
        self.clock.warm = True


State = dict[str, Any]


@dataclass(frozen=True)
class Hooks:
    """Callbacks into the training loop."""

    state: Callable[[], State]  # returns the state that all workers share, and buffers of the model
    put: Callable[[State], None]  # restores the result of another worker's `state`
    deal: Callable[[], SampleAssignment | None]  # returns the assignment of samples; None = the loop assigns its own
    # called after the workers have changed, with the ranks of the lost processes and the previous number of processes
    changed: Callable[[Sequence[int], int], None]


class SharedState:
    """The state that all workers share: the `Owner` of an elastic membership.

    A worker that joins continues from the shared state, without a residual. If workers take local steps, the shared
    state is the last consensus, and the new worker's inner optimizer starts empty.
    """

    def __init__(self, step: CommunicatingStep, hooks: Hooks) -> None:
        self.step, self.hooks = step, hooks

    def resized(self, lost: Sequence[int], before: int) -> None:
        self.step.sync.resized()
        if before:
            self.hooks.changed(lost, before)

    def averaged(self) -> None:
        if (deal := self.hooks.deal()) is not None:
            deal.averaged(self.step.steps)

    def shared_state(self) -> State:
        return self.hooks.state()

    def take_over(self, state: State) -> None:
        self.hooks.put(state)
        self.step.sync.restart()
