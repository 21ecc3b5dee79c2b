"""One training step with communication. Its order is written here alone.

The bench's trainer brings a backward pass, `ab.attach` brings hooks of a user's optimizer, the advisor's rehearsal
brings made gradients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from accordion_bench.exchange.ddp import DDPExchange
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.exchange.overlap import Overlap
from accordion_bench.exchange.overlap_rules import ExchangeOptions
from accordion_bench.exchange.runner import CompletedExchange, ExchangeRunner, Exchanging
from accordion_bench.optimizers.inner import Optimizers
from accordion_bench.position import Position, Rate
from accordion_bench.signals.policy_runner import Adapting, BatchFacts, PolicyRunner
from accordion_bench.sync.scheme import Sync, SyncContext


class Communicating(Exchanging, Adapting, Protocol):
    """The methods of a training: what is sent, when, and what adapts it."""

    @property
    def sync(self) -> Sync:
        """When and among whom."""


@dataclass(frozen=True)
class StepOptions:
    """What of a training decides its steps, beside the methods.

    Args:
        exchange: how and when gradients are exchanged.
        seed: for keyed draws.
        clip_norm: largest global L2 norm of a gradient; None = any.
        clip_mean: it is that of the exchanged mean, not of each worker's own gradient.
        weight_decay: of the optimizer, for a compressor that applies it.
        measure: what is recorded whatever policies want to know, see `PolicyRunner`.
        store: of the run, in which processes tell each other things; None = there is none.
        ddp: exchanges gradients in the place of our own exchange; None = our own does.
        together: which units exchanges take together, see `SendOptions`; None = as their sizes say.
    """

    exchange: ExchangeOptions = field(default_factory=ExchangeOptions)
    seed: int = 0
    clip_norm: float | None = None
    clip_mean: bool = False
    weight_decay: float = 0.0
    measure: Mapping[str, bool] = field(default_factory=dict)
    store: Any = None
    ddp: DDPExchange | None = None
    together: Sequence[Sequence[int]] | None = None


class CommunicatingStep:
    """A step of all workers, from their own gradients to the parameters that the next step starts from.

        step.begin(batch_size)
        step.arm(lr, step.leaving())    # before the last backward pass: its gradients may leave as they come
        loss.backward()                 # the caller puts the gradients into `axis.gradients_W`
        step.backward_over()
        step.before_update(lr)          # clipping, sums for policies, bytes of dense gradients, the scheme's exchange
        optimizer.step()
        step.after_update(lr)           # the scheme's exchange of parameters; policies decide
        step.taken()                    # late look for values that are not finite; the position moves on
        step.over(samples)              # the clock closes the step

    A step that all workers leave out has no `before_update` and no `after_update`.

    Args:
        methods: what is sent, when, and what adapts it.
        inner: the optimizers, for schemes that read their state; the caller takes their step.
        position: where training stands.
        overlap: lets gradients leave during the backward pass; it knows the replicas and the communicator.
        batches: what the loop tells of its batches.
        options: everything else.

    Attributes:
        policies: collects what policies want to know, and does what they decide.
        runner: makes exchanges and runs them.
        sync: the scheme.
        axis, comm, clock: replicas of the local workers, their communicator, its clock.
        under_way: the optimizer is about to step, or has, and the position has not moved on yet.
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
        self.under_way = False

    @property
    def exchange(self) -> Exchange:
        """The exchange of all workers that is in force now."""
        return self.sync.exchange

    def begin(self, batch_size: int) -> None:
        """A step begins under the plan in force, for the clock.

        Args:
            batch_size: samples per worker.
        """
        self.clock.in_force(batch_size, self.exchange.predicted_bytes(self.position.info()))
        self.clock.worker()

    # ---- gradients

    def leaving(self) -> Exchange | None:
        """The exchange whose buckets may leave as they fill in this step; None where something must look first."""
        looks_first = self.runner.ddp is not None or self.policies.looks()
        return self.sync.gradients_go_to() if self.overlap.notes and not looks_first else None

    def arm(self, lr: Rate, exchange: Exchange | None) -> None:
        """From here on the gradients that arrive are the last ones of this step.

        Args:
            lr: learning rate, one for all tensors or one for each.
            exchange: as `leaving` has said it.
        """
        if exchange is not None:
            self.overlap.arm(exchange, exchange.begin(self.position.info(lr)) if self.overlap.allowed else None)

    def backward_over(self) -> None:
        """All gradients are in `axis.gradients_W`; those that have not left may do so now."""
        self.overlap.complete()

    # ---- around the optimizer's step

    def before_update(self, lr: Rate) -> None:
        """From each worker's own gradients to those that the optimizer is to use.

        Args:
            lr: learning rate, one for all tensors or one for each.

        Raises:
            NonFinite: a gradient is NaN or infinite.
        """
        if self.clip_own:
            self.axis.clip(self.clip_own)
            self.clock.lap("compute")
        self.policies.epoch_sums.add_gradients(self.axis.gradients_W)
        self.clock.lap("policy")
        self.comm.ledger.dense_step(self.exchange.numel)
        self.under_way = True
        self._before = self.sync.before_step(lr)

    def after_update(self, lr: Rate) -> None:
        """From what the optimizer has left to the parameters and the plan of the next step.

        Args:
            lr: learning rate, one for all tensors or one for each.

        Raises:
            NonFinite: a difference of parameters is NaN or infinite.
        """
        after = self.sync.after_step(lr)
        completed, self._before = self._before if after is None else after, None
        if completed is not None:
            self.decide(completed)

    def decide(self, completed: CompletedExchange) -> None:
        """Let the policies that are due change the plan after an exchange."""
        self.policies.after_exchange(completed, self.sync.averaging)
        self.clock.lap("policy")

    def give_up(self) -> None:
        """Nothing will come of what `before_update` has exchanged."""
        self._before = None

    # ---- the end

    def taken(self) -> None:
        """The step has been taken, or left out by all workers.

        Raises:
            NonFinite: something that was noted in this step is NaN or infinite.
        """
        self.runner.finite.refuse()  # where no exchange has read it
        self.position.step_taken()
        self.under_way = False
        self.comm.membership.border()

    @property
    def steps(self) -> int:
        """That the workers have taken, the one that is not over yet among them."""
        return self.position.step + self.under_way

    def over(self, samples: int) -> None:
        """The step is over, for the clock; from the first one on, times count.

        Args:
            samples: of one worker.
        """
        self.clock.step_over(samples)
        self.clock.warm = True
