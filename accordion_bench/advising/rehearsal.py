"""Rehearsal: time the steps of a method on random gradients, with scheme, exchange and optimizer of a real run.

One worker of A runs in its process. The others do not exist; their messages are copies of its own.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from accordion_bench.advising.step_times import waiting_for
from accordion_bench.attaching.own_parameters import OwnParameters
from accordion_bench.attaching.users_optimizer import UsersOptimizer
from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.stages import ExchangeKind, ExchangePart, Stage
from accordion_bench.compressors.assemble import optimizer_node
from accordion_bench.exchange.dry_exchange import size_of, state_bytes, tensors_in
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.exchange.overlap import ExchangeOptions, Overlap
from accordion_bench.exchange.runner import CompletedExchange
from accordion_bench.loop.step import CommunicatingStep, StepOptions
from accordion_bench.methods.build import build_methods
from accordion_bench.methods.compatibility import MethodOptions, refuse_clipping_after
from accordion_bench.network.collective_costs import payload_and_times
from accordion_bench.optimizers.inner import fused, without_dynamo
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.instantiate import Config, build, target
from accordion_bench.plan import RunFacts, TensorSpec
from accordion_bench.position import Position
from accordion_bench.signals.policy_runner import BatchFacts
from accordion_bench.sync.outer import averaged
from accordion_bench.sync.scheme import Sync

STEPS = 1000  # steps of the assumed run
RATE = 0.1  # learning rate, which affects no time
PAST = 10**6  # epoch after the end of every warm-up


class RehearsalComm(Comm):
    """Communicator of A workers of which only the first exists; bytes, tensors and code are those of a real run.

    It follows the code path of one worker per process, whose time matters. Workers simulated in one process are summed
    without a collective.
    """

    def __init__(self, workers: int, device: str = "cpu") -> None:
        super().__init__(1, workers, 0, device)

    def _run(self, run: Callable[[], object]) -> None:
        """Do nothing: there is no other process, and the caller writes the received tensors."""

    def _arrives(self, write: Callable[[], object]) -> None:
        """Write received tensors, and record the time as that of a collective."""
        start = self.clock.mark()
        write()
        self.clock.collective(start)

    def _summed(self, fused: Tensor) -> Tensor:
        self.ledger.all_reduce(fused.numel() * fused.element_size())
        self._arrives(lambda: fused.mul_(self.workers))
        return fused

    def all_gather(self, message_W: Tensor, account: str = "payload") -> Tensor:
        if account == "payload":
            self.ledger.all_gather(message_W.shape[1])
        message_A = message_W.new_empty(self.workers, message_W.shape[1])
        self._arrives(lambda: message_A.copy_(message_W))
        return message_A

    def all_gather_uneven(self, messages_W: Sequence[Tensor], sizes_A: Sequence[int]) -> list[Tensor]:
        self.ledger.all_gather_uneven(sizes_A)
        (mine,) = messages_W
        parts_A = list(mine.new_empty(sum(sizes_A)).split(list(sizes_A)))
        self._arrives(lambda: _fill_(parts_A, mine))
        return parts_A

    def all_to_all(self, messages_AW: Sequence[Tensor]) -> list[Tensor]:
        self.ledger.all_to_all([message.shape[1] for message in messages_AW])
        mine = messages_AW[0]
        received = mine.new_empty(self.workers, mine.shape[1])
        self._arrives(lambda: received.copy_(mine))
        return [received]

    def send_receive(self, message_W: Tensor, targets_A: Sequence[int | None]) -> Tensor:
        self.ledger.send_receive(message_W.numel() * message_W.element_size(), targets_A)
        theirs_W = torch.empty_like(message_W)
        self._arrives(lambda: theirs_W.copy_(message_W))
        return theirs_W


def _fill_(parts_A: Sequence[Tensor], mine: Tensor) -> None:
    """Fill the messages of all workers with this worker's message, or with zeros if the lengths differ."""
    for part in parts_A:
        if len(part) == len(mine):
            part.copy_(mine)
        else:
            part.zero_()


Units = Sequence[Sequence[int]]  # indices of the units of each bucket


class BucketTimes(NamedTuple):
    """Measured times and messages of one bucket."""

    # encode, decode: seconds of each exchange
    encode: list[float]
    decode: list[float]
    # by kind of collective, mean (payload bytes of one worker, number of collectives) per exchange
    sent: dict[str, tuple[float, float]]


class Beside(NamedTuple):
    """Further operations of a step on its gradients: clipping, and norms of sums that no policy needs."""

    clip_norm: float | None = None
    clip_at: str | None = None
    norms: bool = False

    @property
    def clips_own(self) -> bool:
        """Whether each worker clips its own gradients, before the exchange."""
        return self.clip_norm is not None and self.clip_at != "after"


NOTHING = Beside()


class StepPartTimes(NamedTuple):
    """Seconds of the parts of one step."""

    before: float  # before the optimizer's step, including exchange, clipping and sums for policies
    update: float  # optimizer's step
    after: float  # work of the scheme after the optimizer's step, including exchange
    exchanged: float  # part of `before` or `after` within the exchange of buckets
    look: float  # check of all gradients for non-finite values


class RehearsalResult(NamedTuple):
    """Result of a rehearsal. It contains no tensors, so that their memory is free for the next rehearsal."""

    workers: int  # A
    specs: tuple[TensorSpec, ...]  # exchanged tensors
    members: tuple[tuple[int, ...], ...]  # indices into `specs` of each bucket
    parts: tuple[tuple[int, ...], ...]  # numbers of the buckets of each exchange of a round
    buckets: tuple[BucketTimes, ...]  # measured times and messages of each bucket, in the order of their exchange
    steps: tuple[StepPartTimes, ...]  # measured times of each step
    local: bool  # whether the method takes local steps, with an exchange after the last
    fixed_size: bool  # whether the length of each message is independent of the data
    # bytes of the optimizer's buffers that the scheme averages, by name, as means per averaging
    averaged: dict[str, float]
    state: float  # bytes of the method's state in this worker, without model and optimizer
    together: Units  # units of each bucket
    partial: bool  # whether each exchange of a round sends only some of the tensors
    # whether an exchange overlaps with the backward pass or, for a local method, with local steps, in a run of one
    # worker per process
    overlaps: bool
    every_local_step: bool  # whether an exchange follows every local step
    # whether workers wait for each other. Otherwise this worker has met another one in each step, and no other workers
    # have met.
    waits: bool
    moved_momentum: bool  # whether the compressor performs a part of the optimizer's step


class RehearsedStep(CommunicatingStep):
    """Step whose policies collect their signals but make no decisions."""

    def decide(self, completed: CompletedExchange) -> None:
        """Do nothing."""


class Rehearsal:
    """Timed steps of one worker on given gradients: all parts of a step except its forward and backward pass.

    `together` has the units of each bucket; None = as in a run of this many workers. ConfigError is raised if the
    methods are incompatible, or their steps are not all alike.
    """

    def __init__(
        self,
        chosen: MethodOptions,
        specs: Sequence[TensorSpec],
        workers: int,
        device: torch.device,
        together: Units | None = None,
        beside: Beside = NOTHING,
    ) -> None:
        chosen = replace(chosen, sync=target(chosen.sync, "sync").in_every_step(chosen.sync))
        refuse_other_steps(build(chosen.sync, "sync"), chosen.sync_name)
        methods = build_methods(chosen, RunFacts(workers=workers, train_size=STEPS * workers), 1)
        self.comm = RehearsalComm(workers, str(device))
        self.clock = self.comm.clock
        params = [(spec.name, nn.Parameter(torch.zeros(spec.shape, device=device))) for spec in specs]
        self.axis = OwnParameters(params, self.comm, {spec.name for spec in specs if spec.table})
        node = optimizer_node(chosen.optimizer, methods.wrapped.compressor)
        self.optimizer = optimizer_of(node, self.axis.params)
        self.wait = waiting_for(device)
        self.moved_momentum = dict(chosen.optimizer) != node
        plan = methods.plan_for(self.axis.specs)
        self.position = Position(plan, RATE, lambda _: 1.0, 2 * PAST, lambda _: 1, PAST, methods.wrapped.start_step)
        self.beside = beside
        options = ExchangeOptions(clips=beside.clips_own)
        late = not options.after_backward(methods.wrapped, processes=2)
        self.overlaps = methods.sync.late if methods.sync.local else late or not methods.sync.waits
        self.info = self.position.info(RATE)
        if beside.clip_at == "after":
            refuse_clipping_after(methods.sync, methods.wrapped.compressor)
        batches = BatchFacts(torch.zeros((), dtype=torch.float64), lambda: 1)
        self.communicating = RehearsedStep(
            *(methods, UsersOptimizer(self.optimizer, self.axis), self.position),
            *(Overlap(self.axis, self.comm, False, False), batches),
            StepOptions(
                exchange=options,
                clip_norm=beside.clip_norm,
                clip_mean=beside.clip_at == "after",
                weight_decay=chosen.optimizer.get("weight_decay", 0.0),
                measure={"norms": beside.norms},
                together=together,
            ),
        )
        self.sync, self.policies = self.communicating.sync, self.communicating.policies
        self.policies.begin_epoch()
        self.steps: list[StepPartTimes] = []
        self.clock.warm = True

    @property
    def exchange(self) -> Exchange:
        """Exchange of all workers."""
        return self.sync.exchange

    def step(self, gradients: Sequence[Tensor]) -> None:
        """Take and time one step with these gradients [...], one per tensor."""
        for param, gradient in zip(self.axis.params, gradients, strict=True):
            param.grad = gradient.clone(memory_format=torch.contiguous_format)
        self.axis.collect()
        self.sync.comes(self.comm.first_worker)
        self.wait()
        look = self._look()
        self.clock.start()
        self.clock.worker()
        began = self.clock.mark()
        self.communicating.before_update(RATE)
        ready = self.clock.mark()
        self.optimizer.step()
        updated = self.clock.mark()
        self.communicating.after_update(RATE)
        over = self.clock.mark()
        self.communicating.taken()
        self.axis.forget()
        self.wait()
        between = self.clock.between
        taken = between(began, ready), between(ready, updated), between(updated, over)
        self.steps.append(StepPartTimes(*taken, self._exchanged(), look))

    def _look(self) -> float:
        """Return the seconds of the check for non-finite gradients, which a CPU makes before it sends; 0 on a GPU."""
        if self.exchange.finite.late:
            return 0.0
        began = self.clock.mark()
        self.exchange.non_finite(self.axis.gradients_W)
        return self.clock.between(began, self.clock.mark())

    def _exchanged(self) -> float:
        now = sum(self.clock.read().get(part, 0.0) for part in ("encode", "comm", "decode"))
        return now - sum(step.exchanged for step in self.steps)

    def found(self) -> RehearsalResult:
        """Return the result of the steps so far."""
        exchange, numbers = self.exchange, iter(range(len(self.exchange.members)))
        return RehearsalResult(
            workers=self.comm.workers,
            specs=tuple(exchange.specs),
            members=tuple(map(tuple, exchange.members)),
            parts=tuple(tuple(itertools.islice(numbers, len(part.members))) for part in self.sync.parts),
            buckets=tuple(self.buckets()),
            steps=tuple(self.steps),
            local=self.sync.local,
            fixed_size=exchange.compressor.traits.fixed_size,
            averaged=self._averaged(),
            state=self.state(),
            together=exchange.buckets,
            partial=self.sync.partial,
            overlaps=self.overlaps,
            every_local_step=self.sync.every_local_step,
            waits=self.sync.waits,
            moved_momentum=self.moved_momentum,
        )

    def _averaged(self) -> dict[str, float]:
        """Return the bytes of the optimizer's buffers that the scheme averages, as means per averaging."""
        found: dict[str, float] = {}
        for own in self.optimizer.state.values():
            for key in averaged(own):
                if interval := self.sync.buffer_interval(key):
                    found[key] = found.get(key, 0.0) + size_of([own[key]]) / interval
        return found

    def buckets(self) -> list[BucketTimes]:
        """Return the measured times and messages of each bucket, in the order of their exchange."""
        found = self.clock.exchanges()
        return [bucket for part in self.sync.parts for bucket in self._of_kind(part.kind, found[part.kind][-1])]

    def _of_kind(self, kind: ExchangeKind, stages: Sequence[Stage]) -> list[BucketTimes]:
        return [
            BucketTimes(
                list(self.clock.series[ExchangePart(kind, "encode", number)].values),
                list(self.clock.series[ExchangePart(kind, "decode", number)].values),
                {name: payload_and_times(name, *sent, self.comm.workers) for name, sent in (stage.kinds or {}).items()},
            )
            for number, stage in enumerate(stages)
        ]

    def state(self) -> float:
        """Return the bytes of the method's state in this worker, without model and optimizer."""
        scheme = [self.sync.state_dict(), self.sync.worker_state(0)]
        anchor = size_of(self.axis.shared) if self.sync.local else 0
        return state_bytes(self.exchange) + anchor + size_of(tensors_in(scheme))


def refuse_other_steps(sync: Sync, name: str) -> None:
    """Raise ConfigError for schemes that start with synchronous steps, or have groups with different periods."""
    if sync.groups:
        raise ConfigError(
            f"sync={name} has groups with periods of their own, which no single period stands for; look at "
            "sync=local_sgd"
        )
    if sync.local and sync.gradient_exchange:
        raise ConfigError(
            f"sync={name} takes synchronous steps first and local ones later; look at dense and at sync=local_sgd"
        )


def optimizer_of(node: Config, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Build the optimizer of these parameters from its options; ConfigError if it is no torch optimizer."""
    device = params[0].device
    made: Any = build(node, "optimizer", positional=[params], adapt=lambda cls: fused(without_dynamo(cls), device))
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(f"optimizer must be a torch optimizer, got {node.get('_target_')}", {"optimizer": "sgd"})
    return made
