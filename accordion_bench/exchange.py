"""Exchange: which tensors travel, at which level, in which order; owns the compressor's state."""

from collections.abc import Sequence

import torch
from torch import Tensor

from accordion_bench.comm import Comm
from accordion_bench.compressors.base import Compressor, Context, NonFinite, Probe, State
from accordion_bench.compressors.levels import NonFiniteInput as NonFiniteRow
from accordion_bench.plan import Ladder, Measured, Plan, TensorSpec
from accordion_bench.statistics import Buckets

WHOLE_MODEL = "model"


class Exchange:
    """Calls a compressor with what the plan says, once per step, after backward.

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
    """

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
    ) -> None:
        self.compressor, self.specs, self.ladder, self.comm = compressor, list(specs), ladder, comm
        self.seed, self.scope, self.start_step = seed, scope, start_step
        self.units = sent_units(specs, scope, block_size)
        self.sent = [unit_spec(self.specs, unit, scope) for unit in self.units]
        self.state: State = compressor.init(self.sent, comm, like.float() if like.element_size() == 2 else like)
        self.what = "gradient"  # for messages
        self.numel = sum(spec.numel for spec in specs)
        self._counted: tuple[list[float | None], int | None] = [], 0

    def levels(self, plan: Plan, step: int, epoch: float = 0) -> list[float | None]:
        """The knob's value for each sent tensor, 1 without a knob; None = dense."""
        compressor = self.compressor

        def level(spec: TensorSpec) -> float | None:
            if step < self.start_step or not spec.numel:
                return None
            if compressor.knob:
                index = plan.levels.get(spec.name)
                return None if index is None else compressor.scheduled(self.ladder.values[index], epoch)
            return 1 if spec.ndim >= compressor.min_ndim else None

        return [level(spec) for spec in self.sent]

    def predicted_bytes(self, plan: Plan, step: int, epoch: float = 0) -> int:
        """Payload that this step will hand to the collectives, from sizes alone."""
        levels = self.levels(plan, step, epoch)
        pairs = zip(self.sent, levels, strict=True)
        return round(sum(self.compressor.payload_bytes(spec, level, self.comm.workers) for spec, level in pairs))

    def paper_floats(self, levels: list[float | None]) -> int | None:
        """Volume of one exchange at these levels as the Accordion paper counts it; None = it has no count for this."""
        if levels != self._counted[0]:  # a plan lasts for many steps
            pairs = zip(self.sent, levels, strict=True)
            counts = [self.compressor.paper_floats(spec, level, self.comm.workers) for spec, level in pairs]
            known = [count for count in counts if count is not None]
            self._counted = levels, sum(known) if len(known) == len(counts) else None
        return self._counted[1]

    @torch.no_grad()
    def __call__(
        self, xs_W: Sequence[Tensor], plan: Plan, step: int, lr: float | Sequence[float], epoch: float = 0
    ) -> list[Tensor]:
        """Exchange tensors [W, ...], one per spec.

        Args:
            xs_W: gradients.
            plan: levels and codebooks.
            step: optimizer steps taken before.
            lr: learning rate of this step, one for all tensors or one for each.
            epoch: epochs passed, for warm-ups.

        Returns:
            the updates [...], one per spec.

        Raises:
            NonFinite: a gradient is NaN or infinite; nothing was sent and no state has changed. Or what a wrapper made
                of finite gradients is; then its state has.
        """
        if bad := self.non_finite(xs_W):
            raise NonFinite(f"{bad} is not finite")
        ctx = self.context(plan, step, lr, epoch)
        updates = self.compressor.exchange(self.as_sent(xs_W), ctx, self.state, self.comm).update
        self.comm.ledger.paper_count(self.paper_floats(list(ctx.levels)))
        out: list[Tensor] = [updates[0]] * len(self.specs) if self.specs else []
        for update, unit in zip(updates, self.units, strict=True):
            parts = [update] if self.scope == "tensor" else update.view(-1).split([self.specs[i].numel for i in unit])
            for i, part in zip(unit, parts, strict=True):
                out[i] = part.view(self.specs[i].shape).to(xs_W[i].dtype)
        return out

    @torch.no_grad()
    def probe(
        self,
        xs_W: Sequence[Tensor],
        plan: Plan,
        step: int,
        epoch: float = 0,
        lr: float | Sequence[float] = 1.0,
        first: bool = False,
    ) -> Probe:
        """Error and bytes per sent tensor as under the plan; changes and sends nothing.

        Args:
            xs_W, plan, step, epoch, lr: as for an exchange.
            first: of the first local worker alone, not of all.
        """
        ctx, state = self.context(plan, step, lr, epoch), self.state
        if first:
            xs_W, state = [x_W[:1] for x_W in xs_W], self._of_first()
        return self.compressor.probe(self.as_sent(xs_W), ctx, state, self.comm.workers)

    @torch.no_grad()
    def fed(
        self, xs_W: Sequence[Tensor], plan: Plan, step: int, epoch: float = 0, lr: float | Sequence[float] = 1.0
    ) -> list[Tensor]:
        """What the first local worker would compress, with its residual and momentum, [1, ...] as it travels."""
        own, ctx = self.as_sent([x_W[:1] for x_W in xs_W]), self.context(plan, step, lr, epoch)
        fed = self.compressor.fed(own, ctx, self._of_first(), self.comm.workers)
        # not a view of gradients that the next step overwrites
        return [p.clone() if p.data_ptr() == x.data_ptr() else p for p, x in zip(fed, own, strict=True)]

    def _of_first(self) -> State:
        """The state of the first local worker alone, not copied."""
        return {
            name: {key: value[:1] if key.endswith("_W") else value for key, value in entries.items()}
            for name, entries in self.state.items()
        }

    @torch.no_grad()
    def measured(
        self,
        xs_W: Sequence[Tensor],
        level: int,
        plan: Plan,
        step: int,
        epoch: float = 0,
        lr: float = 1.0,
        fed: bool = False,
    ) -> dict[str, Measured]:
        """What one level of the ladder would cost and lose on the first local worker, per tensor that has levels.

        Args:
            xs_W: what is to be exchanged, or, where `fed`, what `fed` has made of it.
            level: index into the ladder.
            plan, step, epoch, lr: as for an exchange.
            fed: residual, momentum and learning rate are in `xs_W`.
        """
        everywhere = plan.with_levels(dict.fromkeys(plan.levels, level))
        ctx = self.context(everywhere, step, lr, epoch)
        own, probe_of = list(xs_W), self.compressor.probe_fed
        if not fed:
            own, probe_of = self.as_sent([x_W[:1] for x_W in xs_W]), self.compressor.probe
        probe = probe_of(own, ctx, self._of_first(), self.comm.workers)
        named = zip(self.sent, probe.measured, strict=True)
        return {spec.name: found for spec, found in named if spec.name in plan.levels}

    def buckets(self, xs_W: Sequence[Tensor], plan: Plan, step: int, epoch: float = 0) -> list[list[Buckets]]:
        """The quantiser's buckets of each local worker's tensors, where a policy asks for them."""
        if bad := self.non_finite(xs_W):
            raise NonFinite(f"{bad} is not finite")
        try:
            buckets_W = self.compressor.buckets_of(self.as_sent(xs_W), self.context(plan, step, 1.0, epoch))
        except NonFiniteRow:
            raise NonFinite("the norm of a bucket of gradients is beyond float32") from None
        assert buckets_W is not None
        return buckets_W

    def context(self, plan: Plan, step: int, lr: float | Sequence[float], epoch: float = 0) -> Context:
        """What the compressor may know of this step."""
        lrs = [lr] * len(self.specs) if isinstance(lr, int | float) else list(lr)
        if any(lrs[i] != lrs[unit[0]] for unit in self.units for i in unit):
            raise ValueError("tensors that travel as one vector must have one learning rate; use scope=tensor")
        of_unit = [lrs[unit[0]] for unit in self.units]
        return Context(step, self.sent, self.levels(plan, step, epoch), self.seed, of_unit, plan.codebooks)

    def as_sent(self, xs_W: Sequence[Tensor]) -> list[Tensor]:
        """The tensors as they travel: in the units of the scope, half precision as float32."""
        wide_W = [x.float() if x.element_size() == 2 else x for x in xs_W]
        if self.scope == "tensor":
            return wide_W
        return [torch.cat([wide_W[i].flatten(1) for i in unit], dim=1).unsqueeze(1) for unit in self.units]

    def non_finite(self, xs_W: Sequence[Tensor], what: str | None = None) -> str | None:
        """The first (parameter, worker) whose tensor is not finite; one pass where all are.

        Args:
            xs_W: tensors [W, ...], one per spec.
            what: they are; default: what is exchanged.
        """
        if not xs_W or bool(torch.stack([x_W.sum(dtype=self._wide(x_W)) for x_W in xs_W]).sum().isfinite()):
            return None
        for spec, x_W in zip(self.specs, xs_W, strict=True):
            for row, x in enumerate(x_W):
                if not x.isfinite().all():
                    return f"the {what or self.what} of {spec.name} on worker {self.comm.first_named + row}"
        return None

    @staticmethod
    def _wide(x: Tensor) -> torch.dtype:
        return torch.float32 if x.element_size() == 2 else x.dtype


def sent_units(specs: Sequence[TensorSpec], scope: str, block_size: int | None = None) -> list[list[int]]:
    """Which tensors, by index, travel as one unit."""
    if scope == "tensor":
        return [[i] for i in range(len(specs))]
    limit = float("inf") if scope == WHOLE_MODEL or block_size is None else block_size
    units: list[list[int]] = []
    filled = 0.0
    for i, spec in enumerate(specs):
        if not units or filled + spec.numel > limit:
            units.append([])
            filled = 0
        units[-1].append(i)
        filled += spec.numel
    return units


def unit_spec(specs: Sequence[TensorSpec], unit: Sequence[int], scope: str) -> TensorSpec:
    """One unit as a tensor: itself, or a vector [1, N] of two dimensions, so that every method takes it."""
    if scope == "tensor":
        return specs[unit[0]]
    name = WHOLE_MODEL if scope == WHOLE_MODEL else f"bucket from {specs[unit[0]].name}"
    return TensorSpec(name, (1, sum(specs[i].numel for i in unit)))


def sent_specs(specs: Sequence[TensorSpec], scope: str, block_size: int | None = None) -> list[TensorSpec]:
    """What travels as one unit: each tensor, a bucket, or the whole model as one vector."""
    return [unit_spec(specs, unit, scope) for unit in sent_units(specs, scope, block_size)]


def levelled(compressor: Compressor, sent: Sequence[TensorSpec]) -> list[str]:
    """Names of the tensors that get a level: those of enough dimensions."""
    return [spec.name for spec in sent if compressor.knob and spec.ndim >= compressor.min_ndim]
