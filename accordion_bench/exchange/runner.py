"""ExchangeRunner: creates and runs the exchanges of a training for any synchronisation scheme."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.graphs import CapturedWork, eagerly
from accordion_bench.compressors.assemble import CompressorSetup
from accordion_bench.exchange.ddp import DDPExchange
from accordion_bench.exchange.exchange import Exchange, SendOptions
from accordion_bench.exchange.finite import Finite
from accordion_bench.exchange.overlap import ExchangeOptions, Overlap
from accordion_bench.plan import Ladder, TensorSpec
from accordion_bench.position import Position, Rate, StepInfo

MATRIX, NUMBER = TensorSpec("matrix", (5, 27)), TensorSpec("number", (1,))
PRELOADED = [MATRIX], [MATRIX, NUMBER]  # the number is exchanged dense, so that the codes are only part of the message


class CompletedExchange(NamedTuple):
    """A completed exchange; with groups, the first group's."""

    exchange: Exchange  # the exchange that was run
    xs_W: list[Tensor]  # its inputs, tensors [rows, ...]
    updates: list[list[Tensor]]  # its results [...], for each group


class Observer(Protocol):
    """Receiver of callbacks before and after each exchange."""

    @property
    def wanted(self) -> bool:
        """Whether a policy may want to inspect an exchange at any time."""

    def inspect_before(self, exchanges: Sequence[Exchange], xs_W: Sequence[Sequence[Tensor]], info: StepInfo) -> None:
        """Inspect tensors before an exchange."""

    def inspect_after(self, exchange: Exchange, xs_W: Sequence[Tensor], updates: Sequence[Tensor]) -> None:
        """Inspect inputs and updates after an exchange."""

    def units_change(self) -> None:
        """Prepare for exchanges of differences of parameters, which replace those of gradients."""


class Exchanging(Protocol):
    """Compressors of a training."""

    @property
    def ladder(self) -> Ladder:
        """The knob's values that the plan's levels index."""

    @property
    def wrapped(self) -> CompressorSetup:
        """The compressor of gradients."""

    @property
    def differences(self) -> Callable[[], CompressorSetup]:
        """Factory of the compressor of differences of parameters."""


class ExchangeRunner:
    """Creates the exchanges of a run, runs them, and attributes their time to parts of the step.

    The tensors are those of the replicas of `overlap`; the options determine the bucket sizes.
    """

    def __init__(
        self,
        position: Position,
        overlap: Overlap,
        observer: Observer,
        methods: Exchanging,
        options: ExchangeOptions,
        seed: int = 0,
    ) -> None:
        self.axis, self.comm, self.position = overlap.axis, overlap.comm, position
        self.overlap, self.observer, self.ladder = overlap, observer, methods.ladder
        self.gradients, self.differences = methods.wrapped, methods.differences
        self.seed, self.bucket_mb, self.gradient_mb = seed, options.bucket_mb, options.gradient_mb
        self.ddp: DDPExchange | None = None  # exchanges gradients in place of `Exchange`
        self.finite = Finite(self.comm.device)  # of the values of all exchanges, and of others noted in a step
        self.together: Sequence[Sequence[int]] | None = None  # units of each bucket, see `SendOptions`; None in a run
        self.do: Callable[[CapturedWork], list[Tensor]] = eagerly  # runs work that may be captured

    def new_exchange(
        self,
        of_differences: bool = False,
        comm: Comm | None = None,
        seed: int | None = None,
        parts: Sequence[Sequence[int]] | None = None,
        wrapped: CompressorSetup | None = None,
    ) -> Exchange:
        """Return a new exchange of gradients, or of differences of parameters, in parts as in `SendOptions`.

        By default it is among all workers, with the seed and the compressor of the run.
        """
        if self.ddp is not None:
            self.ddp.finite = self.finite
            return self.ddp
        if wrapped is None:
            wrapped = self.differences() if of_differences else self.gradients
        options = SendOptions(
            seed=self.seed if seed is None else seed,
            **wrapped.for_exchange,
            bucket_mb=self.bucket_mb,
            gradient_mb=self.gradient_mb,
            together=self.together,
            parts=parts,
        )
        specs, like = self.axis.specs, self.axis.like
        exchange = Exchange(wrapped.compressor, specs, self.ladder, comm or self.comm, like, options)
        exchange.what, exchange.finite = "difference" if of_differences else "gradient", self.finite
        return exchange

    def preload(self) -> None:
        """Load the kernels of exchanges before the first step, so that no measured time includes it."""
        if self.ddp is None:
            preload(self.gradients, self.ladder, self.position.plan.codebooks, self.axis.like)

    def run(self, exchanges: Sequence[Exchange], xs_W: Sequence[Sequence[Tensor]], lr: Rate = 1.0) -> CompletedExchange:
        """Run one exchange of all workers, or of each local group, with its inputs, tensors [rows, ...].

        `lr` is the learning rate of gradients, or 1 if the tensors have the units of the parameters.
        """
        clock, info = self.comm.clock, self.position.info(lr)
        clock.lap("update")
        self.observer.inspect_before(exchanges, xs_W, info)
        clock.lap("policy")
        for exchange in exchanges:
            if not exchange.waited_in_backward:
                clock.waits(exchange.kind)

        def exchanged() -> list[list[Tensor]]:
            if self.overlap.armed:
                return [self.overlap.join()]
            return [self.exchanged(exchange, x_W, info) for exchange, x_W in zip(exchanges, xs_W, strict=True)]

        # with elastic membership there are no groups
        updates = self.comm.membership.repeated(lambda: exchanged, exchanged, exchanges[0].keep)()
        if exchanges[0].comm is not self.comm:
            self.comm.ledger.absorb([exchange.comm.ledger for exchange in exchanges])
        clock.lap("exposed")
        self.observer.inspect_after(exchanges[0], xs_W[0], updates[0])
        clock.lap("policy")
        return CompletedExchange(exchanges[0], list(xs_W[0]), updates)

    def exchanged(self, exchange: Exchange, xs_W: Sequence[Tensor], info: StepInfo) -> list[Tensor]:
        """Return the updates of an exchange, which is captured if non-finite values are checked afterwards."""
        if self.do is eagerly or not exchange.replays or exchange.comm is not self.comm:
            return exchange(xs_W, info)
        updates = self.do(exchange.work(xs_W, info))
        exchange.finite.refuse()
        return updates

    def units_change(self) -> None:
        """Prepare for exchanges of differences of parameters, which replace those of gradients."""
        self.observer.units_change()

    @property
    def may_launch(self) -> bool:
        """Whether an exchange can run while training continues: it has a thread, and no policy inspects it."""
        return self.comm.transport is not None and not self.observer.wanted

    def launch(self, exchange: Exchange, xs_W: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Submit differences that will not be changed, and return a function that waits for the updates."""
        self.comm.clock.lap("update")
        return self.overlap.launch(exchange, xs_W, self.position.info())


def preload(wrapped: CompressorSetup, ladder: Ladder, codebooks: Mapping[int, tuple[float, ...]], like: Tensor) -> None:
    """Exchange small tensors at every level, between two workers of this process, on a copy of the compressor.

    The first step is excluded from measured time, but not every run compresses in it: a local method exchanges later,
    and 1-bit Adam starts dense. Importing numba and reading machine code takes a second, compiling it several seconds.
    For a compressor without kernels this is a no-op. The tensors have the dtype and device of `like`.
    """
    if like.device.type not in wrapped.compressor.description.kernels:
        return
    comm = Comm(2, device=str(like.device))
    for specs in PRELOADED:
        rows = ((torch.linspace(-1, 1, 2 * spec.numel), spec.shape) for spec in specs)
        xs_W = [x.to(like.device, like.dtype).view(2, *shape) for x, shape in rows]
        compressor = copy.deepcopy(wrapped.compressor)
        exchange = Exchange(compressor, specs, ladder, comm, like, SendOptions(**wrapped.for_exchange))
        weakest = exchange.weakest()
        for level in range(max(1, len(ladder.values))):
            plan = replace(weakest, levels=dict.fromkeys(weakest.levels, level), codebooks=codebooks)
            for step in sorted({0, exchange.start_step}):
                exchange(xs_W, StepInfo(plan, step, epoch=math.inf))
