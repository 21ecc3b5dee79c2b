"""The runner: makes exchanges and runs them, for whatever scheme decides when."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.graphs import CapturedWork, eagerly
from accordion_bench.compressors.assemble import Wrapped
from accordion_bench.exchange.ddp import DDPExchange
from accordion_bench.exchange.exchange import Exchange, SendOptions
from accordion_bench.exchange.finite import Finite
from accordion_bench.exchange.overlap import Overlap
from accordion_bench.exchange.overlap_rules import ExchangeOptions
from accordion_bench.exchange.preload import preload
from accordion_bench.plan import Ladder
from accordion_bench.position import Position, Rate, StepInfo


class CompletedExchange(NamedTuple):
    """An exchange that has been made; of groups side by side, the first one's.

    exchange: that was run.
    xs_W: what it has exchanged, tensors [rows, ...].
    updates: what came of it [...], for each group.
    """

    exchange: Exchange
    xs_W: list[Tensor]
    updates: list[list[Tensor]]


class Observer(Protocol):
    """Who looks at what is exchanged."""

    @property
    def wanted(self) -> bool:
        """Whether a policy may want to look at an exchange, at any time."""

    def look_at(self, exchanges: Sequence[Exchange], xs_W: Sequence[Sequence[Tensor]], info: StepInfo) -> None:
        """Before an exchange."""

    def look_back(self, exchange: Exchange, xs_W: Sequence[Tensor], updates: Sequence[Tensor]) -> None:
        """After an exchange."""

    def units_change(self) -> None:
        """From here on differences of parameters are exchanged, no more gradients."""


class Exchanging(Protocol):
    """What the workers of a training send each other."""

    @property
    def ladder(self) -> Ladder:
        """The values behind the plan's levels."""

    @property
    def wrapped(self) -> Wrapped:
        """The compressor of gradients."""

    @property
    def differences(self) -> Callable[[], Wrapped]:
        """Makes the compressor of differences of parameters."""


class ExchangeRunner:
    """Makes the exchanges of a run, and runs them between the laps of the clock.

    Args:
        position: where training stands.
        overlap: the buckets that leave during the backward pass; its tensors are exchanged.
        observer: looks at every exchange before and after it.
        methods: what is sent.
        options: in how large buckets.
        seed: for keyed draws.

    Attributes:
        ddp: exchanges gradients in the place of our own exchange, where it is there.
        finite: looks at what all exchanges of the run have exchanged, and at what others note there in a step.
        together: which units exchanges take together, see `SendOptions`; None in a run.
        do: does what may be captured.
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
        self.ddp: DDPExchange | None = None
        self.finite = Finite(self.comm.device)
        self.together: Sequence[Sequence[int]] | None = None
        self.do: Callable[[CapturedWork], list[Tensor]] = eagerly

    def new_exchange(
        self,
        of_differences: bool = False,
        comm: Comm | None = None,
        seed: int | None = None,
        parts: Sequence[Sequence[int]] | None = None,
        wrapped: Wrapped | None = None,
    ) -> Exchange:
        """An exchange of gradients, or of differences of parameters.

        Args:
            of_differences: the latter.
            comm: the workers; None = all.
            seed: for keyed draws; None = the run's.
            parts: see `SendOptions`.
            wrapped: the compressor; None = that of the run.
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
        """Before the first step: load what exchanges compute with, so that it is in no measured time."""
        if self.ddp is None:
            preload(self.gradients, self.ladder, self.position.plan.codebooks, self.axis.like)

    def run(self, exchanges: Sequence[Exchange], xs_W: Sequence[Sequence[Tensor]], lr: Rate = 1.0) -> CompletedExchange:
        """One exchange: of all workers, or of groups side by side.

        Args:
            exchanges: one for each local group.
            xs_W: what each is to exchange, tensors [rows, ...].
            lr: learning rate, where `xs_W` are gradients; 1 where they are in the units of the parameters.
        """
        clock, info = self.comm.clock, self.position.info(lr)
        clock.lap("update")
        self.observer.look_at(exchanges, xs_W, info)
        clock.lap("policy")
        for exchange in exchanges:
            if not exchange.waited_in_backward:
                clock.waits(exchange.kind)

        def exchanged() -> list[list[Tensor]]:
            if self.overlap.armed:
                return [self.overlap.join()]
            return [self.exchanged(exchange, x_W, info) for exchange, x_W in zip(exchanges, xs_W, strict=True)]

        # where workers come and go there are no groups
        updates = self.comm.membership.repeated(lambda: exchanged, exchanged, exchanges[0].keep)()
        if exchanges[0].comm is not self.comm:
            self.comm.ledger.absorb([exchange.comm.ledger for exchange in exchanges])
        clock.lap("exposed")
        self.observer.look_back(exchanges[0], xs_W[0], updates[0])
        clock.lap("policy")
        return CompletedExchange(exchanges[0], list(xs_W[0]), updates)

    def exchanged(self, exchange: Exchange, xs_W: Sequence[Tensor], info: StepInfo) -> list[Tensor]:
        """The updates of an exchange, which may be captured where what is not finite is looked for afterwards."""
        if self.do is eagerly or not exchange.replays or exchange.comm is not self.comm:
            return exchange(xs_W, info)
        updates = self.do(exchange.work(xs_W, info))
        exchange.finite.refuse()
        return updates

    def units_change(self) -> None:
        """From here on differences of parameters are exchanged, no more gradients."""
        self.observer.units_change()

    @property
    def may_launch(self) -> bool:
        """Whether an exchange may travel while training goes on: it has a thread, and nothing looks at it."""
        return self.comm.transport is not None and not self.observer.wanted

    def launch(self, exchange: Exchange, xs_W: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Hand over differences that will not be changed; returns what waits for the updates."""
        self.comm.clock.lap("update")
        return self.overlap.launch(exchange, xs_W, self.position.info())
