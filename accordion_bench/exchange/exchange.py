"""Exchange: group tensors into units and buckets, compress them at the plan's levels, keep the compressor's state."""

import contextlib
import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from accordion_bench.codecs.bucket import pattern
from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.graphs import EXCHANGE, CapturedWork, CaptureStage
from accordion_bench.comm.stages import ExchangeKind
from accordion_bench.compressors.compressor import Compressor, Context, NonFinite, State
from accordion_bench.compressors.description import paper_floats
from accordion_bench.compressors.probe import next_payload_bytes, payload_bytes
from accordion_bench.exchange.finite import Finite, Look, all_finite, largest
from accordion_bench.exchange.partition import bucketed_in_parts, dense_warning, levelled, sent_units, unit_spec
from accordion_bench.options.checks import Wording, typed
from accordion_bench.plan import Ladder, Plan, TensorSpec
from accordion_bench.position import StepInfo
from accordion_bench.tensors.same_shape import in_rows


@dataclass(frozen=True)
class SendOptions:
    """How an exchange groups and sends its tensors."""

    seed: int = 0  # for keyed draws
    # unit of compression. `tensor`: each tensor by itself. `model`: all tensors as one vector with one level. `bucket`:
    # consecutive tensors as one vector of at most `block_size` coordinates.
    scope: str = "tensor"
    start_step: int = 0  # steps before this one use a dense all-reduce
    block_size: int | None = None  # coordinates of a unit, for `bucket`
    # MB of payload per bucket and worker, for the first bucket and for the others. The size counts messages at the
    # weakest level after `start_step`, and not gradients, because messages amortise the latency of a round. A bucket is
    # complete when it has reached this size, or when no units are left.
    bucket_mb: tuple[float, float] = (math.inf, math.inf)
    # MB of gradients at which a bucket is also complete, on a device, or if coordinates are independent. Elsewhere each
    # further bucket would slow down the backward pass.
    gradient_mb: float = math.inf
    exempt: frozenset[str] = frozenset()  # names of tensors that are always exchanged dense
    together: Sequence[Sequence[int]] | None = None  # units of each bucket, see `Exchange.buckets`; None = by size
    # units, by index, that are exchanged at different times, so that no bucket contains units of two parts; None = all
    # units at once
    parts: Sequence[Sequence[int]] | None = None


PLAIN = SendOptions()


class Exchange:
    """Exchange of tensors by a compressor at the plan's levels, bucket by bucket, from the last tensors of the model.

    If workers have unequal batches, each worker's tensors are weighted before compression, see `Comm.weighted`. Every
    bucket is exchanged independently. The result is therefore the same whether a bucket is exchanged as soon as its
    gradients are ready (`Overlap`) or after the backward pass (`__call__`).

    Args:
        specs: the tensors, in the model's order; the same on every worker.
        ladder: the knob's values that the plan's levels index.
        like: defines dtype and device of the tensors; half-precision tensors are exchanged in float32.

    Attributes:
        units: tensors of each unit of compression, by index.
        buckets: units of each bucket, in the order of exchange.
        members, bucket_of: tensors of each bucket, by index, and bucket of each tensor.
    """

    waited_in_backward = False  # whether the wait for the exchange ends with the backward pass
    alike = True  # whether every step exchanges among the same workers, and only by the compressor

    def __init__(
        self,
        compressor: Compressor,
        specs: Sequence[TensorSpec],
        ladder: Ladder,
        comm: Comm,
        like: Tensor,
        options: SendOptions = PLAIN,
    ) -> None:
        self.compressor, self.specs, self.ladder, self.comm = compressor, list(specs), ladder, comm
        self.workers = comm.workers
        self.seed, self.scope, self.start_step = options.seed, options.scope, options.start_step
        self.units = sent_units(specs, options.scope, options.block_size)
        self.sent = [unit_spec(self.specs, unit, options.scope) for unit in self.units]
        self._indices: tuple[Plan | None, list[int | None]] = None, []  # the last plan, and its ladder index per unit
        least = compressor.traits.min_ndim
        self.exempt = options.exempt
        compressed = [spec.numel and spec.ndim >= least and spec.name not in self.exempt for spec in self.sent]
        self._without_knob = [1.0 if it_is else None for it_is in compressed]
        bucket_mb, gradient_mb = options.bucket_mb, options.gradient_mb
        if compressor.traits.grouping == "all":
            bucket_mb, gradient_mb = (math.inf, math.inf), math.inf
        if like.device.type == "cpu" and compressor.traits.grouping != "alone":
            gradient_mb = math.inf
        if options.together is None:
            gradients = [spec.numel * like.element_size() for spec in self.sent]
            self.buckets = bucketed_in_parts(self._weakest_bytes(), bucket_mb, gradients, gradient_mb, options.parts)
        else:
            self.buckets = [list(units) for units in options.together]
        self.members = [[i for u in bucket for i in self.units[u]] for bucket in self.buckets]
        self.bucket_of = {i: number for number, members in enumerate(self.members) for i in members}
        self.state: State = {}
        self._keys: list[set[str]] = []  # keys of the state, per bucket
        for bucket in self.buckets:
            like = like.float() if like.element_size() == 2 else like
            state = compressor.init([self.sent[u] for u in bucket], comm, like)
            self._keys.append({*state, *(self.sent[u].name for u in bucket)})
            self.state.update(state)
        self.what = "gradient"  # noun for error messages
        self.number: int | None = None  # of this part, see `part`
        self.finite = Finite(like.device)
        self.numel = sum(spec.numel for spec in specs)
        self._forget()

    def _forget(self) -> None:
        self._counted: tuple[tuple[list[float | None], int], int | None] = ([], 0), 0
        self._dense: tuple[list[float | None], str] = [], ""
        self._predicted: tuple[list[float | None], int] = [], 0
        self._taken: tuple[list[float | None], list[bool]] = [], []

    def _weakest_bytes(self) -> list[float]:
        return self._bytes(self.levels(StepInfo(self.weakest(), self.start_step, epoch=math.inf)))

    def _bytes(self, levels: Sequence[float | None]) -> list[float]:
        pairs = zip(self.sent, levels, strict=True)
        return [payload_bytes(self.compressor, spec, level, self.comm.workers) for spec, level in pairs]

    @property
    def kind(self) -> ExchangeKind:
        """Kind of exchange for the clock; an exchange among some of the workers has the kind of one among all."""
        what = self.what if self.number is None else f"{self.what} {self.number}"
        return ExchangeKind(what, self.workers)

    def part(self, number: int, tensors: Sequence[int]) -> "Exchange":
        """Return an exchange of the tensors of whole buckets, with the same compressor and state, but timed separately.

        Each tensor is a unit; `number` identifies the part.
        """
        own, at = copy.copy(self), {tensor: i for i, tensor in enumerate(tensors)}
        buckets = [bucket for bucket, members in enumerate(self.members) if members[0] in at]
        own.number = number
        own.specs, own.sent = ([specs[i] for i in tensors] for specs in (self.specs, self.sent))
        own.units = [[i] for i in range(len(tensors))]
        own.members = own.buckets = [[at[i] for i in self.members[bucket]] for bucket in buckets]
        own.bucket_of = {i: bucket for bucket, members in enumerate(own.members) for i in members}
        own.numel = sum(spec.numel for spec in own.specs)
        own._without_knob = [self._without_knob[i] for i in tensors]
        own._keys = [self._keys[bucket] for bucket in buckets]
        own._forget()
        return own

    def resized(self) -> None:
        """Update the number of workers after a change of `comm`."""
        self.workers = self.comm.workers
        self._forget()

    def keep(self) -> Callable[[], None]:
        """Copy the compressor's state, and return a function that restores it."""
        before = copy.deepcopy(self.state)

        def put_back() -> None:
            for name in self.state.keys() - before.keys():
                del self.state[name]
            for name, own in before.items():
                now = self.state[name]
                for key in now.keys() - own.keys():
                    del now[key]
                for key, value in own.items():
                    if isinstance(value, Tensor) and key in now:
                        now[key].copy_(value)  # in place, because it may be a view of a larger tensor
                    else:
                        now[key] = copy.deepcopy(value)

        return put_back

    @contextlib.contextmanager
    def among(self, some: Comm) -> Iterator[None]:
        """Return a context in which tensors are exchanged among some of the workers, by the given collectives."""
        everyone, self.comm = self.comm, some
        try:
            yield
        finally:
            self.comm = everyone

    def levels(self, info: StepInfo) -> list[float | None]:
        """Return the knob's value of each unit, 1 without a knob; None = dense."""
        if info.step < self.start_step:
            return [None] * len(self.sent)
        if not self.compressor.traits.knob:
            return list(self._without_knob)

        if self._indices[0] is not info.plan:  # a plan is valid for many steps
            indices = [info.plan.levels.get(spec.name) if spec.numel else None for spec in self.sent]
            self._indices = info.plan, indices
        values = [self.compressor.scheduled(value, info.epoch) for value in self.ladder.values]
        return [None if index is None else values[index] for index in self._indices[1]]

    def predicted_bytes(self, info: StepInfo) -> int:
        """Return the payload bytes of this step by size and turn, for float32 tensors and a learning rate above 0."""
        levels, workers = self.levels(info), self.comm.workers
        if levels != self._predicted[0] or self.compressor.traits.cycle > 1:  # a plan is valid for many steps
            pairs = zip(self.sent, levels, strict=True)
            own = (next_payload_bytes(self.compressor, spec, level, workers, self.state) for spec, level in pairs)
            self._predicted = levels, round(sum(own))
        return self._predicted[1]

    def mean_bytes(self, info: StepInfo) -> int:
        """Return the payload bytes as a mean over all turns."""
        return round(sum(self._bytes(self.levels(info))))

    def steps_taken(self, info: StepInfo) -> list[bool]:
        """Return for each tensor whether its update is its step, which the optimizer must not take again."""
        levels = self.levels(info)
        if levels != self._taken[0]:
            taken = [False] * len(self.specs)
            for spec, level, unit in zip(self.sent, levels, self.units, strict=True):
                for i in unit:
                    taken[i] = self.compressor.takes_step(spec, level)
            self._taken = levels, taken
        return self._taken[1]

    def dense_warning(self, info: StepInfo, worded: Wording = typed) -> str:
        """Return a warning about units of this step that are dense although they have a level; "" if negligible."""
        levels = self.levels(info)
        if levels != self._dense[0]:
            self._dense = levels, dense_warning(self.compressor, self.sent, levels, self.comm.workers, worded)
        return self._dense[1]

    def weakest(self) -> Plan:
        """Return the plan with the weakest level that a policy may choose."""
        names = levelled(self.compressor, self.sent, self.exempt)
        return Plan(dict.fromkeys(names, len(self.ladder.values) - 1) if self.ladder.values else {}, 1)

    def paper_floats(self, levels: list[float | None]) -> int | None:
        """Return the floats of one exchange at these levels as the Accordion paper counts them; None = no count."""
        asked = levels, self.comm.workers
        if asked != self._counted[0]:
            pairs = zip(self.sent, levels, strict=True)
            counts = [paper_floats(self.compressor, spec, level, self.comm.workers) for spec, level in pairs]
            known = [count for count in counts if count is not None]
            self._counted = asked, sum(known) if len(known) == len(counts) else None
        return self._counted[1]

    @torch.no_grad()
    def __call__(self, xs_W: Sequence[Tensor], info: StepInfo) -> list[Tensor]:
        """Exchange tensors [W, ...], and return the updates [...], one per spec.

        Raises:
            NonFinite: a gradient is NaN or infinite; on a CPU nothing was sent, and no state has changed. Or a
                wrapper's result for finite gradients is; then its state has changed.
        """
        if not self.finite.late:
            self.refuse_non_finite(xs_W)
        updates = self.unread(xs_W, info)
        self.finite.refuse()
        return updates

    @torch.no_grad()
    def unread(self, xs_W: Sequence[Tensor], info: StepInfo) -> list[Tensor]:
        """Exchange tensors without checking for non-finite values; on a device they are noted for a later check."""
        ctx = self.begin(info)
        updates: list[Tensor | None] = [None] * len(self.specs)
        for bucket, members in enumerate(self.members):
            left = self.send(bucket, [xs_W[i] for i in members], ctx)
            for i, update in zip(members, self.receive(bucket, left), strict=True):
                updates[i] = update
        return updates  # type: ignore[return-value]

    @property
    def replays(self) -> bool:
        """Whether a device may replay an exchange: the host reads nothing before its end."""
        return self.alike and self.finite.late and self.compressor.traits.replays

    def work(self, xs_W: Sequence[Tensor], info: StepInfo) -> CapturedWork:
        """Return `unread` as work that can be captured, which changes the compressor's state."""
        ctx, books = self.context(info), tuple(sorted(info.plan.codebooks.items()))
        own, clock = [x for number in range(len(self.buckets)) for x in self.state_of(number)], self.comm.clock
        where = tuple(x.data_ptr() for x in (*xs_W, *own))
        stage = CaptureStage(lambda: None, lambda: self.unread(xs_W, info))
        key = id(self), tuple(ctx.levels), books, pattern(ctx), where, clock.plan, clock.warm
        return CapturedWork(EXCHANGE, key, [stage], lambda: own, moment=ctx)

    def begin(self, info: StepInfo) -> Context:
        """Return the context of this step, and count the floats of all its buckets."""
        ctx = self.context(info)
        self.comm.ledger.paper_count(self.paper_floats(list(ctx.levels)))
        return ctx

    @torch.no_grad()
    def send(self, number: int, xs_W: Sequence[Tensor], ctx: Context) -> list[Tensor]:
        """Exchange a bucket as `bucket` does; on a device, append a tensor of magnitudes for `receive` to check."""
        updates = self.bucket(number, xs_W, ctx)
        return [*updates, largest([*_rows(xs_W), *updates])] if self.finite.late else updates

    def receive(self, number: int, left: list[Tensor]) -> list[Tensor]:
        """Return the updates of a bucket from the result of `send`, in the training thread."""
        if not self.finite.late:
            return left
        *updates, magnitudes = left
        filled = [i for i in self.members[number] if self.specs[i].numel]
        given = Look(len(filled) * self.comm.local_workers, lambda k, _: f"{self._row(filled, k)} is not finite")
        sent = "the compressor input of some worker for"
        got = Look(len(filled), lambda k, _: f"{sent} {self.specs[filled[k]].name} is not finite", self.comm)
        self.finite.note(magnitudes, given, got)
        return updates

    def state_of(self, number: int) -> Iterator[Tensor]:
        """Yield the tensors of the compressor's state that the exchange of a bucket reads and changes."""
        for key in self._keys[number]:
            yield from (value for value in self.state.get(key, {}).values() if isinstance(value, Tensor))

    @torch.no_grad()
    def bucket(self, number: int, xs_W: Sequence[Tensor], ctx: Context) -> list[Tensor]:
        """Exchange the tensors [W, ...] of a bucket's `members` in a step's context; return the updates [...]."""
        units = self.buckets[number]
        specs, lrs = [ctx.specs[u] for u in units], [ctx.lrs[u] for u in units]
        own = replace(ctx, specs=specs, levels=[ctx.levels[u] for u in units], lrs=lrs)
        counts = [len(self.units[u]) for u in units]
        with self.comm.clock.exchanging(self.kind, number, self.comm.ledger):
            updates = self.compressor.exchange(self._join(xs_W, counts), own, self.state, self.comm).update
        if self.scope != "tensor":
            sizes = [[self.specs[i].numel for i in self.units[u]] for u in units]
            updates = [part for update, own in zip(updates, sizes, strict=True) for part in update.view(-1).split(own)]
        shapes = [self.specs[i].shape for i in self.members[number]]
        return [_as_given(update, shape, x_W) for update, shape, x_W in zip(updates, shapes, xs_W, strict=True)]

    def context(self, info: StepInfo) -> Context:
        """Return the compressor's context of this step."""
        lr = info.lr
        if isinstance(lr, int | float):
            of_unit: list[float] = [lr] * len(self.units)
        else:
            if any(lr[i] != lr[unit[0]] for unit in self.units for i in unit):
                raise ValueError("tensors that form one vector must have one learning rate; use scope=tensor")
            of_unit = [lr[unit[0]] for unit in self.units]
        return Context(info.step, self.sent, self.levels(info), self.seed, of_unit, info.plan.codebooks)

    def as_sent(self, xs_W: Sequence[Tensor]) -> list[Tensor]:
        """Return all tensors as units of the scope, with half precision as float32, weighted by samples."""
        return self._join(xs_W, [len(unit) for unit in self.units])

    def _join(self, xs_W: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
        wide_W = [self.comm.weighted(x.float() if x.element_size() == 2 else x) for x in xs_W]
        if self.scope == "tensor":
            return wide_W
        ends = list(itertools.accumulate(counts))
        parts = [wide_W[end - count : end] for end, count in zip(ends, counts, strict=True)]
        return [torch.cat([in_rows(x_W) for x_W in part], dim=1).unsqueeze(1) for part in parts]

    @torch.no_grad()
    def refuse_non_finite(self, xs_W: Sequence[Tensor], what: str | None = None) -> None:
        """Raise NonFinite for the first non-finite tensor [W, ...], one per spec, or value noted in this step."""
        if not self.finite.late:
            if bad := self.non_finite(xs_W, what):
                raise NonFinite(f"{bad} is not finite")
            return
        filled = [i for i, spec in enumerate(self.specs) if spec.numel]
        values = largest(_rows(xs_W))
        self.finite.note(values, Look(len(values), lambda k, _: f"{self._row(filled, k, what)} is not finite"))
        self.finite.refuse()

    def _row(self, members: Sequence[int], number: int, what: str | None = None) -> str:
        """Return a description of a worker's tensor, given the number of its row among the rows of some tensors."""
        which, row = divmod(number, self.comm.local_workers)
        name, worker = self.specs[members[which]].name, self.comm.first_named + row
        return f"the {what or self.what} of {name} on worker {worker}"

    def non_finite(
        self, xs_W: Sequence[Tensor], what: str | None = None, members: Sequence[int] | None = None
    ) -> str | None:
        """Return a description of the first non-finite tensor and its worker; None, after one pass, if all are finite.

        The tensors [W, ...] have the indices `members`, one per spec by default, and the noun `what`.
        """
        if all_finite(xs_W):
            return None
        for i, x_W in zip(members or range(len(self.specs)), xs_W, strict=True):
            for row, x in enumerate(x_W):
                if not x.isfinite().all():
                    return self._row([i], row, what)
        return None


def _as_given(update: Tensor, shape: Sequence[int], like: Tensor) -> Tensor:
    """Return an update with the shape of its tensor and the dtype of its gradient, without a copy if it has both."""
    shaped = update if update.shape == shape else update.view(shape)
    return shaped if shaped.dtype == like.dtype else shaped.to(like.dtype)


def _rows(xs_W: Sequence[Tensor]) -> list[Tensor]:
    """Return each local worker's part of each tensor [W, ...]; with one worker no views are made."""
    return [row for x_W in xs_W for row in ([x_W] if len(x_W) == 1 else x_W)]
