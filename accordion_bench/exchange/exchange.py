"""Exchange: which tensors travel, at which level, in which order; owns the compressor's state."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from accordion_bench.comm.clock import ExchangeKind
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.base import Compressor, Context, NonFinite, State
from accordion_bench.exchange.dense_share import goes_dense
from accordion_bench.exchange.partition import bucketed, levelled, sent_units, unit_spec
from accordion_bench.plan import Ladder, Plan, TensorSpec
from accordion_bench.position import StepInfo


class Exchange:
    """Calls a compressor with what the plan says, bucket by bucket, the last tensors of the model first.

    Every bucket is an exchange by itself, so that it makes no difference to the result whether it takes place as soon
    as its gradients are there (`Overlap`) or after the backward pass (`__call__`).

    Args:
        compressor: with its wrappers.
        specs: the tensors, in the model's order; the same on every worker.
        ladder: the values behind the plan's levels.
        comm: collectives.
        like: gives type and device of the tensors; half-precision tensors are exchanged in float32.
        seed: for keyed draws.
        scope: `tensor`: each tensor by itself. `model`: all tensors as one vector with one level. `bucket`: consecutive
            tensors as one vector of at most `block_size` coordinates.
        block_size: for `bucket`.
        start_step: dense all-reduce before this step.
        bucket_mb: MB that a worker hands over in one exchange, in the first bucket and in the others: of messages at
            the weakest level, not of gradients, since it is for messages that a round of collectives pays; of those
            after `start_step`. A bucket is full when it has reached them, or when there is nothing left.

    Attributes:
        what: gradients or differences, for messages.
        units: which tensors travel as one, by index.
        buckets: which units are exchanged together, in the order in which they travel.
        members: which tensors, by index, are in a bucket.
        bucket_of: in which bucket a tensor is.

    Class attributes:
        waited_in_backward: whether the waiting is over when the backward pass ends.
    """

    waited_in_backward = False

    def __init__(
        self,
        compressor: Compressor,
        specs: Sequence[TensorSpec],
        ladder: Ladder,
        comm: Comm,
        like: Tensor,
        seed: int = 0,
        scope: str = "tensor",
        start_step: int = 0,
        block_size: int | None = None,
        bucket_mb: tuple[float, float] = (math.inf, math.inf),
    ) -> None:
        self.compressor, self.specs, self.ladder, self.comm = compressor, list(specs), ladder, comm
        self.seed, self.scope, self.start_step = seed, scope, start_step
        self.units = sent_units(specs, scope, block_size)
        self.sent = [unit_spec(self.specs, unit, scope) for unit in self.units]
        everything = (math.inf, math.inf)
        self.buckets = bucketed(self._weakest_bytes(), everything if compressor.traits.needs_all else bucket_mb)
        self.members = [[i for u in bucket for i in self.units[u]] for bucket in self.buckets]
        self.bucket_of = {i: number for number, members in enumerate(self.members) for i in members}
        self.state: State = {}
        for bucket in self.buckets:
            like = like.float() if like.element_size() == 2 else like
            self.state.update(compressor.init([self.sent[u] for u in bucket], comm, like))
        self.what = "gradient"
        self.numel = sum(spec.numel for spec in specs)
        self._counted: tuple[list[float | None], int | None] = [], 0
        self._dense: tuple[list[float | None], str] = [], ""
        self._predicted: tuple[list[float | None], int] = [], 0

    def _weakest_bytes(self) -> list[float]:
        """Payload of each sent tensor at the weakest level that a plan may choose."""
        levels = self.levels(StepInfo(self.weakest(), self.start_step, epoch=math.inf))
        pairs = zip(self.sent, levels, strict=True)
        return [self.compressor.payload_bytes(spec, level, self.comm.workers) for spec, level in pairs]

    @property
    def kind(self) -> ExchangeKind:
        """For the clock."""
        return ExchangeKind(self.what, self.comm.workers)

    def levels(self, info: StepInfo) -> list[float | None]:
        """The knob's value for each sent tensor, 1 without a knob; None = dense."""
        compressor = self.compressor

        def level(spec: TensorSpec) -> float | None:
            if info.step < self.start_step or not spec.numel:
                return None
            if compressor.traits.knob:
                index = info.plan.levels.get(spec.name)
                return None if index is None else compressor.scheduled(self.ladder.values[index], info.epoch)
            return 1 if spec.ndim >= compressor.traits.min_ndim else None

        return [level(spec) for spec in self.sent]

    def predicted_bytes(self, info: StepInfo) -> int:
        """Payload that this step will hand to the collectives, from sizes alone."""
        levels = self.levels(info)
        if levels != self._predicted[0]:  # a plan lasts for many steps
            pairs = zip(self.sent, levels, strict=True)
            payload = sum(self.compressor.payload_bytes(spec, level, self.comm.workers) for spec, level in pairs)
            self._predicted = levels, round(payload)
        return self._predicted[1]

    def goes_dense(self, info: StepInfo) -> str:
        """What of this step travels dense although it has a level, and why, in a sentence; "" = next to nothing."""
        levels = self.levels(info)
        if levels != self._dense[0]:
            self._dense = levels, goes_dense(self.compressor, self.sent, levels, self.comm.workers)
        return self._dense[1]

    def weakest(self) -> Plan:
        """The plan with the weakest level of all that a policy may choose."""
        names = levelled(self.compressor, self.sent)
        return Plan(dict.fromkeys(names, len(self.ladder.values) - 1) if self.ladder.values else {}, 1)

    def paper_floats(self, levels: list[float | None]) -> int | None:
        """Volume of one exchange at these levels as the Accordion paper counts it; None = it has no count for this."""
        if levels != self._counted[0]:
            pairs = zip(self.sent, levels, strict=True)
            counts = [self.compressor.paper_floats(spec, level, self.comm.workers) for spec, level in pairs]
            known = [count for count in counts if count is not None]
            self._counted = levels, sum(known) if len(known) == len(counts) else None
        return self._counted[1]

    @torch.no_grad()
    def __call__(self, xs_W: Sequence[Tensor], info: StepInfo) -> list[Tensor]:
        """Exchange tensors [W, ...], one per spec.

        Args:
            xs_W: gradients.
            info: of this step.

        Returns:
            the updates [...], one per spec.

        Raises:
            NonFinite: a gradient is NaN or infinite; nothing was sent and no state has changed. Or what a wrapper made
                of finite gradients is; then its state has.
        """
        if bad := self.non_finite(xs_W):
            raise NonFinite(f"{bad} is not finite")
        ctx = self.begin(info)
        updates: list[Tensor | None] = [None] * len(self.specs)
        for bucket, members in enumerate(self.members):
            for i, update in zip(members, self.bucket(bucket, [xs_W[i] for i in members], ctx), strict=True):
                updates[i] = update
        return updates  # type: ignore[return-value]

    def begin(self, info: StepInfo) -> Context:
        """What the compressor may know of this step; the exchange of all buckets is counted with it."""
        ctx = self.context(info)
        self.comm.ledger.paper_count(self.paper_floats(list(ctx.levels)))
        return ctx

    @torch.no_grad()
    def bucket(self, number: int, xs_W: Sequence[Tensor], ctx: Context) -> list[Tensor]:
        """Exchange one bucket.

        Args:
            number: of the bucket.
            xs_W: its tensors [W, ...], one for each of its `members`.
            ctx: of the whole step.

        Returns:
            their updates [...].
        """
        units = self.buckets[number]
        own = replace(
            ctx,
            specs=[ctx.specs[u] for u in units],
            levels=[ctx.levels[u] for u in units],
            lrs=[ctx.lrs[u] for u in units],
        )
        counts = [len(self.units[u]) for u in units]
        with self.comm.clock.exchanging(self.kind, number, self.comm.ledger):
            updates = self.compressor.exchange(self._join(xs_W, counts), own, self.state, self.comm).update
        out, first = [], 0
        for update, count in zip(updates, counts, strict=True):
            shapes = [x_W.shape[1:] for x_W in xs_W[first : first + count]]
            parts = [update] if self.scope == "tensor" else update.view(-1).split([shape.numel() for shape in shapes])
            out += [part.view(s).to(x.dtype) for part, s, x in zip(parts, shapes, xs_W[first:], strict=False)]
            first += count
        return out

    def context(self, info: StepInfo) -> Context:
        """What the compressor may know of this step."""
        lr = info.lr
        lrs = [lr] * len(self.specs) if isinstance(lr, int | float) else list(lr)
        if any(lrs[i] != lrs[unit[0]] for unit in self.units for i in unit):
            raise ValueError("tensors that travel as one vector must have one learning rate; use scope=tensor")
        of_unit = [lrs[unit[0]] for unit in self.units]
        return Context(info.step, self.sent, self.levels(info), self.seed, of_unit, info.plan.codebooks)

    def as_sent(self, xs_W: Sequence[Tensor]) -> list[Tensor]:
        """All tensors as they travel: in the units of the scope, half precision as float32."""
        return self._join(xs_W, [len(unit) for unit in self.units])

    def _join(self, xs_W: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
        """Join so many tensors each to one unit."""
        wide_W = [x.float() if x.element_size() == 2 else x for x in xs_W]
        if self.scope == "tensor":
            return wide_W
        ends = list(itertools.accumulate(counts))
        parts = [wide_W[end - count : end] for end, count in zip(ends, counts, strict=True)]
        return [torch.cat([x_W.flatten(1) for x_W in part], dim=1).unsqueeze(1) for part in parts]

    def non_finite(
        self, xs_W: Sequence[Tensor], what: str | None = None, members: Sequence[int] | None = None
    ) -> str | None:
        """The first (parameter, worker) whose tensor is not finite; one pass where all are.

        Args:
            xs_W: tensors [W, ...].
            what: they are; default: what is exchanged.
            members: which tensors they are, by index; default: one per spec.
        """
        if not xs_W or bool(torch.stack([x_W.sum(dtype=self._wide(x_W)) for x_W in xs_W]).sum().isfinite()):
            return None
        for i, x_W in zip(members or range(len(self.specs)), xs_W, strict=True):
            for row, x in enumerate(x_W):
                if not x.isfinite().all():
                    return f"the {what or self.what} of {self.specs[i].name} on worker {self.comm.first_named + row}"
        return None

    @staticmethod
    def _wide(x: Tensor) -> torch.dtype:
        return torch.float32 if x.element_size() == 2 else x.dtype
