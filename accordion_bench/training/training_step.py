"""Model, data, optimizers and exchange of all workers, and one optimizer step of training (`TrainingStep`)."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from accordion_bench.batches import unequal
from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.graphs import EXCHANGE, UPDATE, WORKERS, Graphs, graphs_of
from accordion_bench.comm.worker_axis import Batch, WorkerAxis
from accordion_bench.compressors.compressor import NonFinite
from accordion_bench.config import engine_rules
from accordion_bench.config.components import Components, build_model, build_optimizer
from accordion_bench.datasets.dataset import Data, Dataset
from accordion_bench.datasets.sampler import Sampler, Sharding
from accordion_bench.exchange.ddp import DDPExchange
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.exchange.finite import Look
from accordion_bench.exchange.overlap import Overlap
from accordion_bench.forward.execution import LossScale, autocast, compiled
from accordion_bench.forward.task import Task, task_of
from accordion_bench.loop.step import CommunicatingStep, StepOptions
from accordion_bench.optimizers.inner import InnerOptimizers, parameter_kinds, tables_of
from accordion_bench.plan import Ladder
from accordion_bench.position import Position
from accordion_bench.run_config import RunConfig
from accordion_bench.signals.policy_runner import BatchFacts
from accordion_bench.tensors.keyed_rng import kept_rng, key, seeded
from accordion_bench.training.replayed import Replayed, Slots


class Own(NamedTuple):
    """Batch of one local worker: `read` returns inputs (images in their memory format) and targets.

    The key is equal for batches of the same shapes in the same memory.
    """

    samples: int
    read: Callable[[], tuple[Tensor, Tensor]]
    key: Hashable


class Feed:
    """Batches of an epoch, step by step.

    If the workers' passes are captured and the data is on the device, reading the batch is part of the captured work.
    Then only the sample indices of all workers are copied in each step, in one copy.
    """

    def __init__(
        self, data: Any, sampler: Sampler, comm: Comm, replayed: Replayed, memory_format: torch.memory_format
    ) -> None:
        self.data, self.sampler, self.comm, self.memory_format = data, sampler, comm, memory_format
        self.slots = Slots(replayed, memory_format)
        self.in_passes = replayed.captures(WORKERS) and getattr(data, "by_device", False)
        self._numbers: dict[tuple[int, ...], Tensor] = {}  # sample indices [sum of sizes], by batch sizes
        self._steps: Iterator[Sequence[Tensor]] = iter(())
        self._batches: Iterator[tuple[Tensor, Tensor]] = iter(())

    def begin_epoch(self, epoch: int, steps: range) -> None:
        """Set the steps of the epoch that follow, in the order that the sampler has drawn."""
        sampler = self.sampler  # a generator that refers to self would be a reference cycle
        workers = range(self.comm.first_worker, self.comm.first_worker + self.comm.local_workers)
        numbers = ([sampler.batch(worker, step) for worker in workers] for step in steps)
        if self.in_passes:
            self.data.begin_epoch(epoch)
            self._steps = numbers
        else:
            self._batches = self.data.train_batches(epoch, (own for step in numbers for own in step))

    def step(self) -> Iterator[Own]:
        """Yield the batch of each local worker in the next step; mark each worker's turn on the clock."""
        if not self.in_passes:
            for row in range(self.comm.local_workers):
                self.comm.clock.worker()
                x, y = self.slots.filled(WORKERS, row, *next(self._batches))
                key = (x.data_ptr(), y.data_ptr(), x.shape, y.shape)
                yield Own(len(y), lambda x=x, y=y: (x, y), key)  # type: ignore[misc]
            return
        numbers = next(self._steps)
        sizes = tuple(len(own) for own in numbers)
        place = self._numbers.get(sizes)
        if place is None:
            place = self._numbers[sizes] = torch.empty_like(torch.cat(list(numbers)))
        torch.cat(list(numbers), out=place)
        for own in place.split(list(sizes)):
            self.comm.clock.worker()
            yield Own(len(own), lambda own=own: self._read(own), own.data_ptr())  # type: ignore[misc]

    def _read(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        x, y = self.data.train_batch(numbers)
        return x.to(memory_format=self.memory_format), y


class TrainingStep:
    """One optimizer step of all workers, and all objects it uses. No run folder is needed.

        step = TrainingStep(config, Comm(4), build_components(config, 4))
        step.begin_epoch()
        step.take()

    `store` is the key-value store of the run, shared by processes; `tell` reports a sentence to the user.

    Attributes, by role:
        training: axis (model, gradients, buffers), inner (optimizers), task, data, sampler, feed (batches), loss_scale
            (in float16), memory_format (of images), forward (callable model), used (samples per worker that this step
            counts; [] = all)
        exchange: communicating (the step from gradients on), sync (synchronisation scheme with its exchanges), ddp
            (DistributedDataParallel instead of an exchange), models_overlap (whether the time model assumes an exchange
            during the backward pass, if each worker had its own process; False for a single worker)
        progress: position (epoch, step, plan), clock
        capture: graphs, replayed
    """

    def __init__(
        self,
        config: RunConfig,
        comm: Comm,
        parts: Components,
        store: Any = None,
        tell: Callable[[str], object] = lambda _: None,
    ) -> None:
        self.config, self.comm, self.device, self.clock = config, comm, comm.device, comm.clock
        comm.weigh(unequal(config.batch_size))
        self.data, self.task, self.sampler = load_data_and_task(config, parts.dataset, comm)
        self.memory_format = torch.channels_last if config.channels_last else torch.preserve_format
        model = new_model(config, parts.dataset, comm, self.memory_format)
        self.axis = WorkerAxis(model, comm, config.seed, config.bn, tables_of(model))
        self.inner = optimizers_of(config, parts, self.axis)
        self.loss_scale = LossScale() if config.precision == "float16" else None
        plan = parts.plan_for(self.axis.specs)
        self.position = Position(plan, config.optimizer["lr"], parts.schedule, config.epochs, self.sampler.steps)

        late = parts.exchange.after_backward(parts.wrapped, max(2, comm.processes))
        self.models_overlap = comm.workers > 1 and not late
        overlap = self._overlap(parts)
        self.ddp = self._ddp(parts.ladder, tell) if config.comm.engine == "ddp" else None
        options = self._step_options(parts, store)
        self.communicating = CommunicatingStep(parts, self.inner, self.position, overlap, self._batch_facts(), options)
        self.sync = self.communicating.sync
        if self.sync.elastic:
            self.sampler.enable_elastic_dealing(config.largest_batch)

        self.forward = compiled(self.ddp.module if self.ddp else model, config.compile)
        eager = engine_rules.stays_eager(config, parts, comm.processes)
        self.graphs = self.clock.graphs = Graphs() if set(eager) == engine_rules.ALL else graphs_of(self.device)
        records = comm.ledger, self.clock, self.communicating.runner.finite
        self.replayed = Replayed(self.graphs, records, tell, eager)
        self.clock.at_once = config.workers_at_once > 1
        if self.graphs.captures:
            self.communicating.runner.do = self.replayed
        self.feed = Feed(self.data, self.sampler, comm, self.replayed, self.memory_format)

    def _overlap(self, parts: Components) -> Overlap:
        """Create the overlap, which sends buckets during the backward pass, or records when they could be sent."""
        processes = self.comm.processes
        leave_early = not parts.exchange.after_backward(parts.wrapped, processes)
        overlap = Overlap(self.axis, self.comm, parts.exchange.overlaps(processes), leave_early)
        if parts.sync.gradient_exchange and (leave_early or self.models_overlap):
            overlap.listen()
        return overlap

    def _ddp(self, ladder: Ladder, tell: Callable[[str], object]) -> DDPExchange:
        config = self.config
        hook = engine_rules.foreign_hook(config)
        made = DDPExchange(self.axis, config.compressor, ladder, config.seed, config.comm.bucket_cap_mb, hook)
        if warning := engine_rules.unsaved(config, made):
            tell(f"warning: {warning}")
        return made

    def _step_options(self, parts: Components, store: Any) -> StepOptions:
        config = self.config
        return StepOptions(
            exchange=parts.exchange,
            seed=config.seed,
            clip_norm=config.clip_norm,
            clip_mean=config.clip_at == "after",
            weight_decay=config.optimizer.get("weight_decay", 0),
            measure=dataclasses.asdict(config.measure),
            store=store,
            ddp=self.ddp,
        )

    def _batch_facts(self) -> BatchFacts:
        # the lambda must not refer to self, which would keep the data's reading processes alive
        sampler, position, worker = self.sampler, self.position, self.comm.first_worker
        return BatchFacts(self.axis.loss_sum_W, lambda: len(sampler.batch(worker, position.step_in_epoch)))

    @property
    def exchange(self) -> Exchange:
        """The current exchange of all workers."""
        return self.sync.exchange

    def begin_epoch(self) -> None:
        """Draw the epoch's order of samples; a resumed epoch continues at its step."""
        position = self.position
        if position.step_in_epoch == 0:
            self.communicating.policies.begin_epoch()
            self.axis.loss_sum_W.zero_()
            self.task.begin_epoch()
        self.sampler.steps_before = position.step - position.step_in_epoch
        self.sampler.begin_epoch(position.epoch, position.plan.batch_size)
        self.feed.begin_epoch(position.epoch, range(position.step_in_epoch, position.steps_per_epoch))
        self.axis.model.train()

    def take(self) -> None:
        """Take one optimizer step of all workers; NonFinite if a loss, a gradient or an exchange's result is."""
        step, lr = self.communicating, self.position.lr()
        step.begin(self.position.plan.batch_size)
        sizes = self.sampler.sizes(self.position.step_in_epoch)
        self.used = self.sync.samples_used(sizes or [self.position.plan.batch_size] * self.comm.workers)
        if (sizes or self.used) and self.sync.gradient_exchange_of_next_step() is not None:  # else full batches weigh
            self.comm.weigh(self.used or sizes)
        samples = self._backward_passes()
        try:
            self.refuse_non_finite(self.axis.loss_W)
            if self.loss_scale is None or self._undo(self.loss_scale):
                self.axis.in_place = self.replayed.captures(UPDATE) and not self.replayed.captures(EXCHANGE)
                step.before_update(lr)
                self.inner.step(lr, self.replayed if self.graphs.captures else None)
                step.after_update(lr)
            step.taken()
        except NonFinite as bad:
            position = self.position
            raise NonFinite(
                f"step {position.step} (epoch {position.epoch}): {bad}; try a smaller optimizer.lr, now {lr:g} after "
                "schedule and scaling"
            ) from None
        if sizes or self.used:
            self.comm.weigh(self.sampler.sharding.batches or [1] * self.comm.workers)
        step.over(max(sizes, default=samples))

    def _backward_passes(self) -> int:
        """Compute the gradients of all local workers into their rows; return the last worker's number of samples."""
        with kept_rng(self.device):
            for row, own in enumerate(self.feed.step()):
                self.clock.lap("data")
                self.backward(row, self._cut(row, own) if self.sync.cuts else own)
                if self.clock.sampled:  # run workers one after another to measure each worker's time
                    self.graphs.join()
                self.clock.lap("compute")
        self.graphs.join()
        self.clock.lap("compute")
        return own.samples

    def _cut(self, row: int, own: Own) -> Own:
        samples = max(1, min(own.samples, self.used[self.comm.first_worker + row]))

        def read() -> tuple[Tensor, Tensor]:
            x, y = own.read()
            return x[:samples], y[:samples]

        return Own(samples, read, (own.key, samples))

    def backward(self, row: int, own: Own) -> None:
        """Run forward and backward passes of one local worker, which has this index in its process."""
        size = self.config.micro_batch_size or own.samples
        count = math.ceil(own.samples / size)
        parts: list[tuple[Tensor, Tensor]] = []  # micro-batches; the first one reads the batch

        def share_of_loss(i: int) -> Tensor:
            if i == 0:
                parts[:] = zip(*(values.split(size) for values in own.read()), strict=True)
            x, y = parts[i]
            only_add_up = self.ddp.no_sync() if self.ddp and i < count - 1 else contextlib.nullcontext()
            with only_add_up, autocast(self.config.precision, self.device):
                loss = self.task.loss(self.forward, x, y, row, i)
                return loss if count == 1 else loss * (len(y) / own.samples)

        step, last = self.communicating, row == self.comm.local_workers - 1
        leaving = step.leaving() if last else None
        key = (own.key, id(leaving))
        scale = self.loss_scale.value if self.loss_scale else 1.0
        lane = 1 + row % self.config.workers_at_once if self.clock.at_once else 0
        batch = Batch(share_of_loss, count, scale, lambda: step.arm(self.position.lr(), leaving), key, lane)
        self.axis.backward(row, self.position.step, batch, self.replayed)
        if last:
            step.backward_over()

    def refuse_non_finite(self, loss_W: Tensor) -> None:
        """Raise NonFinite for a loss, before anything is exchanged; on a device, before a result is applied."""
        finite = self.communicating.runner.finite
        if finite.late:
            finite.note(loss_W, Look(len(loss_W), self._loss_is))
            return
        for row, value in enumerate(loss_W.tolist()):
            if not math.isfinite(value):
                raise NonFinite(self._loss_is(row, value))

    def _loss_is(self, row: int, value: float) -> str:
        gradient = self.exchange.non_finite(self.axis.gradients_W, "gradient")
        bad = f"the loss of worker {self.comm.first_worker + row} is {value}"
        return bad + (f", and {gradient} is not finite" if gradient else "")

    def _undo(self, scale: LossScale) -> bool:
        """Divide the gradients by the loss scale; return whether all workers' are finite, so that the step is taken.

        A skipped step changes only the scale, BatchNorm's statistics and the step count, and thus the schedule.
        """
        gradients_W = self.axis.gradients_W
        self.clock.lap("update")
        overflow = bool(self.comm.sum_(scale.undo_(gradients_W), "control"))
        self.clock.lap("exposed")
        if overflow:
            self.communicating.runner.finite.refuse()  # no exchange follows, so check the loss here
        if overflow and scale.value <= 1:
            bad = self.exchange.non_finite(gradients_W, "gradient") or "a gradient of another process"
            raise NonFinite(f"{bad} is not finite, at a loss scale of {scale.value:g}")
        if overflow and self.ddp:
            self.ddp.charge(self.position.info())
            self.comm.ledger.dense_step(self.exchange.numel)
        scale.update(overflow)
        return not overflow


def load_data_and_task(config: RunConfig, dataset: Dataset, comm: Comm) -> tuple[Data, Task, Sampler]:
    """Load the data; return it with its task and the sampler."""
    data = dataset.load(config.paths.data, config.seed, comm.device)
    train, validation = dataset.split(data.train_size, config.seed)
    size = data.train_size if train is None else len(train)
    indexed_on = getattr(data, "indexed_on", "cpu")
    labels = getattr(data, "train_labels", None)
    sharding = Sharding(dataset.sharding, unequal(config.batch_size), dataset.alpha or 1.0, labels)
    sampler = Sampler(size, comm.workers, config.seed, sharding, train, indexed_on)
    return data, task_of(dataset, comm.device, validation), sampler


def new_model(config: RunConfig, dataset: Dataset, comm: Comm, memory_format: torch.memory_format) -> nn.Module:
    """Return the model on its device, with the leader's initial weights."""
    with seeded(key(config.seed, "model")):
        model = build_model(config.model, dataset, config.chosen("model"), config.chosen("dataset"))
    model = model.to(comm.device).to(memory_format=memory_format)
    comm.broadcast_([*model.parameters(), *model.buffers()], "setup")
    return model


def optimizers_of(config: RunConfig, parts: Components, axis: WorkerAxis) -> InnerOptimizers:
    """Return the optimizer of the shared parameters, and those of replicas if workers take local steps."""
    kinds = parameter_kinds(axis.model)
    return InnerOptimizers(
        axis,
        lambda params: build_optimizer(config.optimizer, parts.wrapped.compressor, params, kinds),
        lambda params: build_optimizer(config.optimizer, parts.differences().compressor, params, kinds),
    )
