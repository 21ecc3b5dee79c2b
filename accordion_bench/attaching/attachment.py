"""`Attachment`: hooks on a user's model and optimizer that run the exchange around each optimizer step."""

import contextlib
import datetime
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from accordion_bench.attaching.agreement import is_due, lost_worker_told, refuse_drift
from accordion_bench.attaching.checked_arguments import Setting
from accordion_bench.attaching.own_parameters import OwnParameters, trained_parameters, trained_tables
from accordion_bench.attaching.parameter_watch import ParameterWatch
from accordion_bench.attaching.users_loop import LoopPosition, Reminders
from accordion_bench.attaching.users_optimizer import Stepping, UsersOptimizer
from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.membership import SampleAssignment
from accordion_bench.compressors.compressor import NonFinite
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.exchange.overlap import Overlap
from accordion_bench.exchange.runner import CompletedExchange
from accordion_bench.loop.step import CommunicatingStep
from accordion_bench.methods.build import Methods
from accordion_bench.network.timeline_file import Timeline
from accordion_bench.options.checks import ConfigError, passed
from accordion_bench.plan import TrainingLoss
from accordion_bench.position import Rate
from accordion_bench.signals.policy_runner import BatchFacts

log = logging.getLogger("accordion_bench")


class HookedStep(CommunicatingStep):
    """Step of a user's loop, which checks that losses were reported to policies that need them."""

    losses = 0  # number of reported losses

    def decide(self, completed: CompletedExchange) -> None:
        if not self.losses and any(isinstance(request, TrainingLoss) for request in self.policies.needs_at()):
            names = ", ".join(self.policies.policies)
            raise ConfigError(f"adaptive={names} needs the loss of every step, got none; call comm.note(loss)")
        super().decide(completed)


class Attachment:
    """Connection of a training loop to an exchange, which runs around each step of the optimizer."""

    def __init__(self, model: nn.Module, optimizer: Stepping, methods: Methods, comm: Comm, setting: Setting) -> None:
        self.model, self.optimizer, self.methods, self.comm, self.setting = model, optimizer, methods, comm, setting
        self.clock = comm.clock
        named = trained_parameters(model)
        self.axis = OwnParameters(named, comm, trained_tables(model))
        self.inner = UsersOptimizer(optimizer, self.axis)
        self.watch = ParameterWatch(model, named, self.inner.all)
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=comm.device)
        given = setting.passed
        plan, training = methods.plan_for(self.axis.specs), (given.schedule, given.epochs, given.steps_per_epoch)
        self.position = LoopPosition(plan, self._first_rate, *training)
        exchange = setting.step.exchange
        has_thread = exchange.overlaps(comm.processes)
        early = has_thread and not exchange.needs_all_gradients(methods.wrapped)  # scope=model, too: one bucket
        self.overlap = Overlap(self.axis, comm, has_thread, early)
        batches = BatchFacts(self.loss_sum, lambda: given.batch_size)
        self.step = HookedStep(methods, self.inner, self.position, self.overlap, batches, setting.step)
        self.sync, self.policy_runner = self.step.sync, self.step.policies
        self.started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.joined = self.accumulating = self.attached = self.finished = False
        self.deal: SampleAssignment | None = None  # assigns samples, if the loop calls `samples`
        self.delivering: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
        self._lr: Rate = 0.0
        self.decisions: dict[str, Any] = {}  # of the policies in the last epoch, by name
        self.reminders = Reminders(methods, setting.chosen.compressor_name, self.position, comm.leader)
        self._told_of_rounding = False
        self._stepped: list[torch.optim.Optimizer] = []  # optimizers that have performed this step
        self.recording: Timeline | None = None
        self.when_recorded: Callable[[], None] = lambda: None
        self._handles: list[Any] = []
        self._when_detached: list[Callable[[], None]] = []
        self.policy_runner.begin_epoch()

    def _first_rate(self) -> float:
        rate = self.inner.rate()
        return rate if isinstance(rate, int | float) else rate[0]

    @property
    def exchange(self) -> Exchange:
        """Current exchange of all workers, with its compression levels and its state."""
        return self.sync.exchange

    def connect(self, listens: bool = True) -> None:
        """Register the hooks that run the exchange; `listens`: autograd hooks report gradients, not the hook of DDP."""
        for optimizer in self.inner.all:
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))
        self._handles.append(self.model.register_load_state_dict_post_hook(lambda *_: self.watch.note()))
        self.watch.note()  # the parameters are those of rank 0 since then
        self.watch.start()
        self.when_detached(self.watch.stop)
        if listens:
            for i, param in enumerate(self.axis.params):
                hook = param.register_post_accumulate_grad_hook(lambda _, i=i: self._arrived(i))
                self._handles.append(hook)
        self.attached = True
        if (said := self.exchange.dense_warning(self.position.info(), passed)) and self.comm.leader:
            log.warning("%s", said)
        self.step.runner.preload()
        self._begin_step()
        self.clock.start()

    def detach(self) -> None:
        """Remove all hooks; call it between two steps."""
        if not self.attached:
            return
        self.attached = False
        if self.comm.connected:
            self.sync.land()
        for handle in self._handles:
            handle.remove()
        for undo in self._when_detached:
            undo()
        transport = self.comm.transport
        if transport is None or transport.close(seconds=1):
            self.comm.leave()
        self.comm.membership.leave(self.finished)

    def when_detached(self, undo: Callable[[], None]) -> None:
        """Register a function that `detach` calls."""
        self._when_detached.append(undo)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context of all backward passes of a step except the last: gradients accumulate locally."""
        before, self.accumulating = self.accumulating, True
        try:
            with self.delivering():
                yield
        finally:
            self.accumulating = before

    def _arrived(self, i: int) -> None:
        """Handle a gradient that autograd has accumulated."""
        if self.accumulating or not self.attached:
            return
        if self.recording is not None:
            self.recording.arrived(i)
        if not self.watch.pending:
            self._look()
        elif self.axis.is_taken(i):
            self._arrived_again(i)
        if not self.axis.has_taken and self.overlap.armed is None:
            self.step.arm(self.inner.rate(), self.step.leaving())
        if not self.setting.scaled:
            if not self.axis.has_taken:
                self.axis.samples = is_due(self.position.step + 1)
            self.axis.taken(i)
        self.overlap.arrived(i)

    def _arrived_again(self, i: int) -> None:
        """Handle a second backward pass before the optimizer's step."""
        self._look()
        left = self.joined or self._leaves_early
        if left and not self.axis.was_reset(i):
            raise ConfigError(
                f"all backward passes of a step but the last must be within comm.no_sync(), got two that reach "
                f"{self.axis.specs[i].name}, whose gradient has been sent; write `with comm.no_sync():` around the "
                "earlier ones, forward pass included; or, where a layer is used twice within activation checkpoints, "
                "pass use_reentrant=False to torch.utils.checkpoint"
            )
        self._give_up_unused()

    def _look(self) -> None:
        """Check at the start of a backward pass that all workers share its parameters and step them."""
        self._refuse_missing_steps()
        self.watch.refuse_replaced()
        self.watch.refuse_moved()
        self.watch.pending = True

    def _refuse_missing_steps(self) -> None:
        if self._stepped:
            names = ", ".join(type(own).__name__ for own in self.inner.all if own not in self._stepped)
            raise ConfigError(
                f"optimizers must all take a step after each backward pass, got none of {names}; call its step, or "
                "attach each with a module of its own"
            )

    def _give_up_unused(self) -> None:
        self.give_up_step()
        self.reminders.gradients_unused()

    @property
    def _leaves_early(self) -> bool:
        return self.overlap.armed is not None and self.overlap.armed.ctx is not None

    @property
    def under_way(self) -> bool:
        """Whether gradients of the current step are being exchanged."""
        return self._leaves_early and self.axis.has_taken

    def give_up_step(self) -> None:
        """Discard the gradients of this step, after waiting for exchanges in progress, as on all workers."""
        if self._leaves_early:
            self.axis.collect()
            self.step.backward_over()
            self.overlap.join()
        self.overlap.armed = None
        self._forget()

    def skip_step(self) -> None:
        """Skip this step on all workers."""
        self.give_up_step()
        self.watch.note()

    def _forget(self) -> None:
        self.joined = False
        self.step.give_up()
        self.axis.forget()

    def begin_delivery(self) -> None:
        """Start a step whose gradients are read from the buckets of DistributedDataParallel."""
        self._look()
        if self.axis.has_taken:
            self.reminders.update_lost(self.exchange.compressor)
            self._give_up_unused()
        self.axis.delivers = True
        self.step.arm(self.inner.rate(), self.step.leaving())

    def arrive(self, i: int, gradient: Tensor) -> None:
        """Take the gradient of one parameter of this step."""
        if self.recording is not None:
            self.recording.arrived(i)
        self.axis.take(i, gradient)
        self.overlap.arrived(i)

    def join(self) -> None:
        """Wait until the gradients of the parameters are the exchanged ones, e.g. to clip or inspect them.

        The optimizer's step calls it otherwise.

        Raises:
            NonFinite: a gradient is NaN or infinite.
            LostWorker: another process has ended.
            ConfigError: gradients were changed between the backward pass and the exchange.
        """
        if self.joined:
            return
        with self._told():
            self.watch.refuse_replaced()
            self._note_rate()
            if self.sync.gradient_exchange_of_next_step() is not None and (name := self.axis.changed()):
                raise ConfigError(
                    f"gradients must stay as backward has left them until they are exchanged, got that of {name} "
                    "changed; call comm.join() first, or pass clip_norm= instead of clipping them, or scaler= with a "
                    "GradScaler"
                )
            # without zeros the optimizers' buffers could differ between workers
            self.axis.collect(give=self.sync.buffers == "average")
            self.step.backward_over()
            self.clock.lap("compute")
            self.step.before_update(self._lr)
            self.joined = True

    def _note_rate(self) -> None:
        self.position.note_rate()
        self._lr = self.inner.rate()

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]] | None:
        """Join before the step, or after the closure if there is one; args[0] is the optimizer."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if optimizer in self._stepped:
            self._refuse_missing_steps()
        if closure is not None and len(self.inner.all) > 1:
            raise ConfigError(
                "optimizers must step without a closure where there are several, got one, which would compute "
                "gradients between their steps; call backward before the first of them steps"
            )
        self.watch.stepping()
        if closure is None:
            self.join()
            self._note_rate()
            return None

        def closure_then_join() -> Any:
            self.give_up_step()
            with torch.enable_grad():
                loss = closure()
            self.join()
            self._note_rate()
            return loss

        if len(args) > 1:
            return (args[0], closure_then_join, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure_then_join}

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._stepped.append(optimizer)
        self.watch.stepped()
        if len(self._stepped) == len(self.inner.all):
            self._stepped = []
            self._all_have_stepped()

    def _all_have_stepped(self) -> None:
        with self._told():
            self.step.after_update(self._lr)
            if not self.axis.replicas and is_due(self.step.steps):
                self.clock.lap("update")
                arguments = self.comm, self.axis.shared, self.step.steps, not self._told_of_rounding
                self._told_of_rounding |= self.comm.membership.together(lambda: refuse_drift(*arguments))
                self.clock.lap("policy")
            self.step.taken()  # may admit other workers, whose first step is the next one
        self.watch.note()
        self.step.over(self.setting.passed.batch_size)
        self._forget()
        if self.recording is not None and self.recording.end_step():
            self.when_recorded()
            self.recording = None
        self.reminders.gradients_used()
        self._begin_step()

    def _begin_step(self) -> None:
        self.step.begin(self.setting.passed.batch_size)
        if self.recording is not None:
            self.recording.begin_step()

    def pause(self) -> None:
        """Wait for exchanges in progress, and stop measuring time until the end of the next step."""
        self.sync.land()
        self.clock.step_over()
        self.clock.warm = False

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Context that adds the step to errors of lost workers and non-finite values."""
        step = self.position.step
        try:
            with lost_worker_told(f"step {step}", self.setting.passed.timeout):
                yield
        except NonFinite as bad:
            scaler = ", or pass scaler= if a GradScaler scales the loss" if self.axis.delivers else ""
            rate = f"lower the learning rate, now {self._first_rate():g}"
            raise NonFinite(f"step {step}: {bad}; {rate}{scaler}") from None
