"""Overlap: exchange buckets of gradients during the backward pass, with its rules and the size of buckets."""

import functools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.on_device import Transport
from accordion_bench.comm.replicas import Replicas
from accordion_bench.compressors.assemble import CompressorSetup
from accordion_bench.compressors.compressor import Context, NonFinite
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.plan import WHOLE_MODEL
from accordion_bench.position import StepInfo

DEFAULT_BUCKETS = (1.0, 25.0)  # MB, as DistributedDataParallel: a small first bucket is submitted early
DEFAULT_GRADIENTS = 25.0  # MB of gradients per bucket


@dataclass(frozen=True)
class ExchangeOptions:
    """Options of a run that determine how and when gradients are exchanged."""

    engine: str = "exchange"  # `exchange`, or `ddp`: stock DistributedDataParallel with its own hooks
    overlap: bool | None = None  # whether exchanges run in a separate thread; None = if there are several processes
    # MB of messages per bucket; None = 1, then 25, and at most 25 MB of gradients on a device, for casts everywhere
    bucket_cap_mb: float | None = None
    float16: bool = False  # whether the loss is scaled, so that all gradients are checked before any is used
    clips: bool = False  # whether each worker's gradients are clipped, by their global norm
    elastic: bool = False  # whether workers may join and leave, so that an exchange may be repeated with all gradients

    def overlaps(self, processes: int) -> bool:
        """Whether exchanges run in a separate thread: with several processes, unless `comm.overlap` overrides this."""
        return self.engine != "ddp" and (processes > 1 if self.overlap is None else self.overlap)

    def after_backward(self, wrapped: CompressorSetup, processes: int) -> str:
        """Return why gradients are exchanged after the backward pass in this run; "" = earlier exchange is possible."""
        if self.engine == "ddp":
            return "comm.engine=ddp does so itself"
        if not self.overlaps(processes):
            return "all workers share a process" if self.overlap is None else "comm.overlap=false"
        if wrapped.scope == WHOLE_MODEL:
            return "compressor.scope=model"
        return self.needs_all_gradients(wrapped)

    def needs_all_gradients(self, wrapped: CompressorSetup) -> str:
        """Return why all gradients must be available before any is submitted; "" = this is not required."""
        if self.float16:
            return "precision=float16 checks all gradients first"
        if self.clips:
            return "clip_norm needs all gradients first"
        if self.elastic:
            return "sync.elastic may repeat an exchange with all gradients"
        traits = wrapped.compressor.traits
        if "momentum" in traits.optimizer.owns and traits.optimizer.weight_decay_mode == "in_gradient":
            return "weight decay is added to the gradients first"
        return ""

    @property
    def bucket_mb(self) -> tuple[float, float]:
        """MB of the first bucket and of the others."""
        return DEFAULT_BUCKETS if self.bucket_cap_mb is None else (self.bucket_cap_mb, self.bucket_cap_mb)

    @property
    def gradient_mb(self) -> float:
        """MB of gradients at which a bucket is complete on a device, and for casts everywhere, for any payload.

        There the exchange of a bucket is hidden behind the rest of the backward pass without using a core. Casts take
        the same time in one bucket as in several.
        """
        return DEFAULT_GRADIENTS if self.bucket_cap_mb is None else math.inf


class Armed(NamedTuple):
    """An exchange whose buckets are submitted as they fill; without a context, only their ready times are noted."""

    exchange: Exchange
    ctx: Context | None
    xs_W: list[dict[int, Tensor]]
    under_way: list[Future | None]


class Overlap:
    """Submits each bucket to the transport as soon as the last worker of this process has its gradients.

    Buckets are submitted in a fixed order: a bucket that fills early waits for the earlier buckets. Parameters that the
    backward pass did not reach have a zero gradient, and their buckets are submitted at its end.

    Exchanges run in a separate thread if `transport`. Unless `allowed`, buckets are not submitted early, and only their
    ready times are noted, for the modelled clock.
    """

    def __init__(self, axis: Replicas, comm: Comm, transport: bool, allowed: bool) -> None:
        self.axis, self.comm, self.allowed = axis, comm, allowed
        self.armed: Armed | None = None
        if transport:
            comm.transport = Transport(comm.device)
        self.notes = transport or comm.workers > 1  # a lone worker exchanges nothing

    def listen(self) -> None:
        """Register autograd hooks that report the arrival of gradients."""
        for i, param in enumerate(self.axis.params if self.notes else []):
            param.register_post_accumulate_grad_hook(lambda _, i=i: self.arrived(i))

    def arm(self, exchange: Exchange, ctx: Context | None) -> None:
        """Start collecting the gradients of the last worker's last micro-batch; without a context none leaves early."""
        if self.notes:
            self.armed = Armed(exchange, ctx, [{} for _ in exchange.buckets], [])

    def arrived(self, i: int) -> None:
        """Record the last gradient of this step for one parameter, and submit its bucket if it is full."""
        if self.armed is None:
            return
        exchange, ctx, xs_W, _ = self.armed
        number = exchange.bucket_of[i]
        arrived = xs_W[number]
        arrived[i] = self.axis.params[i] if ctx is None else self.axis.taken(i)
        if len(arrived) == len(exchange.members[number]):
            self._leave()

    def _leave(self) -> None:
        assert self.armed is not None
        exchange, ctx, xs_W, under_way = self.armed
        while (number := len(under_way)) < len(xs_W) and len(xs_W[number]) == len(exchange.members[number]):
            self.comm.clock.ready(number)
            own_W = [xs_W[number][i] for i in exchange.members[number]]
            xs_W[number].clear()
            under_way.append(None if ctx is None else self._submit(exchange, number, own_W, ctx))

    def _submit(self, exchange: Exchange, number: int, xs_W: Sequence[Tensor], ctx: Context) -> Future:
        assert self.comm.transport is not None
        work = functools.partial(checked, exchange, number, xs_W, ctx)
        return self.comm.transport.submit(work, xs_W, functools.partial(exchange.state_of, number))

    def complete(self) -> None:
        """Submit the remaining buckets after the backward pass, when all gradients are in their rows."""
        if self.armed is None:
            return
        if self.armed.ctx is None:
            self.armed = None
            return
        for number in range(len(self.armed.under_way), len(self.armed.xs_W)):
            members = self.armed.exchange.members[number]
            self.armed.xs_W[number].update({i: self.axis.gradients_W[i] for i in members})
        self._leave()

    def join(self) -> list[Tensor]:
        """Wait for all buckets, and return the updates [...], one per spec; NonFinite if a gradient is."""
        assert self.armed is not None
        (exchange, _, _, under_way), self.armed = self.armed, None
        return self._landed(exchange, under_way)

    def launch(self, exchange: Exchange, xs_W: Sequence[Tensor], info: StepInfo) -> Callable[[], list[Tensor]]:
        """Submit tensors, in the units of the parameters, that will not be changed; return a wait for the updates."""
        ctx, clock = exchange.begin(info), self.comm.clock
        alone = self.comm.local_workers == 1
        if alone:
            since = clock.launched(len(exchange.members))
        else:  # local workers compute one after another, which hides nothing of one worker's exchange
            clock.waits(exchange.kind)
        numbered = enumerate(exchange.members)
        under_way = [self._submit(exchange, number, [xs_W[i] for i in own], ctx) for number, own in numbered]

        def land() -> list[Tensor]:
            if alone:
                clock.waits(exchange.kind, since)
            try:
                return self._landed(exchange, under_way)
            except NonFinite as bad:
                raise NonFinite(f"{bad}, in the average that was launched after step {info.step}") from None

        return land

    def _landed(self, exchange: Exchange, under_way: Sequence[Future | None]) -> list[Tensor]:
        assert self.comm.transport is not None
        updates: dict[int, Tensor] = {}
        for number, future in enumerate(under_way):
            assert future is not None
            left = exchange.receive(number, self.comm.transport.wait(future))
            updates.update(zip(exchange.members[number], left, strict=True))
        exchange.finite.refuse()
        return [updates[i] for i in range(len(exchange.specs))]


def checked(exchange: Exchange, number: int, xs_W: Sequence[Tensor], ctx: Context) -> list[Tensor]:
    """Exchange one bucket for `Exchange.receive`, on a CPU after a check of its gradients.

    Earlier buckets of the step may have been sent before NonFinite is raised.
    """
    if not exchange.finite.late and (bad := exchange.non_finite(xs_W, members=exchange.members[number])):
        raise NonFinite(f"{bad} is not finite")
    return exchange.send(number, xs_W, ctx)
