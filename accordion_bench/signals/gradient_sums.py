"""Signals: what policies need to know of the gradients; collected only where a policy needs it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.on_device import copy_on_cpu
from accordion_bench.compressors.none import Dense
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.plan import WHOLE_MODEL, SquareNorms, TensorSpec
from accordion_bench.tensors.same_shape import Blocks

SQUARES = "squared norms"  # beside parameter names, which have no space in them
LEADERS = frozenset(["norm_of_sum_local", "msdr_local"])


class GradientSums:
    """Sums over one epoch, per tensor, of local gradients, their mean over workers, or the decoded updates.

    `norm_of_sum_local` reads worker 0 alone (other processes collect nothing), `norm_of_sum_mean` costs one dense
    all-reduce when read, charged to control_bytes, `norm_of_sum_update` is free.

    `msdr_local`, of worker 0 alone: MSDR = ||m|| / sqrt(sum_i v_i), with m_i and v_i mean and variance of coordinate i
    over the T steps. As sum_i v_i = (1/T) sum_t ||g_t||^2 - ||m||^2, it keeps one sum of gradients, and two numbers per
    tensor. Infinite where nothing varies; NaN for a zero gradient.

    Args:
        specs: the tensors whose norms are wanted; one float each.
        comm: collectives.
        like: gives type and device; half precision is summed in float32.
    """

    def __init__(self, specs: Sequence[TensorSpec], comm: Comm, like: Tensor) -> None:
        self.specs, self.comm = specs, comm
        self.like = like.float() if like.element_size() == 2 else like
        self.sums: dict[str, Blocks] = {}
        self.squares: Tensor | None = None  # of msdr_local: per tensor sum_t ||g_t||^2, then T

    def begin(self, needs: frozenset[str]) -> None:
        """Start an epoch: forget the last one, allocate what is needed."""
        if not self.comm.leader:
            needs = needs - LEADERS
        self.squares = None
        if "msdr_local" in needs:
            self.squares = torch.zeros(len(self.specs) + 1, dtype=torch.float64, device=self.like.device)
        self.sums = {name: Blocks(self.specs, 1, self.like) for name in sorted(needs)}

    @torch.no_grad()
    def add_gradients(self, gradients_W: Sequence[Tensor]) -> None:
        """Add one step's gradients [W, ...], before residual, compression and reduction."""
        for name in self.sums:
            self.comm.clock.event(name)
        if LEADERS & self.sums.keys():
            firsts = list(gradients_W) if self.comm.local_workers == 1 else [g_W[:1] for g_W in gradients_W]
            for name in LEADERS & self.sums.keys():
                torch._foreach_add_(self.sums[name].tensors, firsts)
            if self.squares is not None:
                norms = torch.stack(torch._foreach_norm(firsts, 2, dtype=torch.float64))
                self.squares[:-1] += norms.square()
                self.squares[-1] += 1
        if "norm_of_sum_mean" in self.sums:
            sums = [self.comm.weighted(g_W).sum(0, keepdim=True) for g_W in gradients_W]
            torch._foreach_add_(self.sums["norm_of_sum_mean"].tensors, sums)

    @torch.no_grad()
    def add_updates(self, updates: Sequence[Tensor], specs: Sequence[TensorSpec] | None = None) -> None:
        """Add one step's decoded updates [...], of all tensors or of these."""
        if "norm_of_sum_update" in self.sums:
            named = zip(self.specs, self.sums["norm_of_sum_update"].tensors, strict=True)
            sums = {spec.name: total for spec, total in named}
            torch._foreach_add_([sums[spec.name] for spec in specs or self.specs], [update[None] for update in updates])

    def forget_updates(self) -> None:
        """Start the sum of the decoded updates anew."""
        if "norm_of_sum_update" in self.sums:
            self.sums["norm_of_sum_update"] = Blocks(self.specs, 1, self.like)

    @torch.no_grad()
    def read(self) -> dict[str, dict[str, float]]:
        """Per signal the value of each tensor by name, and of the whole `model`; for the leader's eyes."""
        values = {}
        names = [*(spec.name for spec in self.specs), WHOLE_MODEL]
        for signal, total in self.sums.items():
            if signal == "norm_of_sum_mean":
                for block in total.blocks:
                    self.comm.sum_(block, "control").div_(self.comm.workers)
            norms = torch.stack([t.double().norm() for t in total.tensors])
            norms = torch.cat([norms, norms.norm()[None]])
            if signal == "msdr_local" and self.squares is not None:
                squares, steps = self.squares[:-1] / self.squares[-1], self.squares[-1]
                means = norms / steps
                # rounding may leave a little less than nothing
                spread = (torch.cat([squares, squares.sum()[None]]) - means.square()).clamp_min(0)
                norms = means / spread.sqrt()
            values[signal] = dict(zip(names, norms.tolist(), strict=True))
        return values

    def state_dict(self) -> dict[str, Any]:
        """The running sums, keyed by signal and parameter name."""
        sums = {
            name: {spec.name: copy_on_cpu(t) for spec, t in zip(self.specs, total.tensors, strict=True)}
            for name, total in self.sums.items()
        }
        if self.squares is not None:
            sums["msdr_local"][SQUARES] = copy_on_cpu(self.squares)
        return sums

    def add_state(self, state: dict[str, Any]) -> None:
        """Add the sums of a `state_dict()` to those begun."""
        for name in self.sums.keys() & state.keys():
            for spec, t in zip(self.specs, self.sums[name].tensors, strict=True):
                t += state[name][spec.name].to(t.device)
        if self.squares is not None and "msdr_local" in state:
            self.squares += state["msdr_local"][SQUARES].to(self.squares.device)


@torch.no_grad()
def square_norms(
    exchange: Exchange, gradients_W: Sequence[Tensor], updates: Sequence[Tensor], batch_size: int
) -> SquareNorms:
    """Mean over workers of |g_w|^2, and |mean_w g_w|^2; every process calls it, after the exchange.

    A dense exchange has just computed the mean; any other one does not know it, and one more dense all-reduce is
    charged to control_bytes. The squares themselves are 8 bytes.

    Args:
        exchange: of all workers.
        gradients_W: what was exchanged [W, ...].
        updates: what came of it [...].
        batch_size: samples behind each g_w.
    """
    comm = exchange.comm
    small = _square(gradients_W)
    if type(exchange.compressor) is Dense:
        mean = list(updates)
    else:
        total = torch.cat([g_W.sum(0).flatten() for g_W in gradients_W])
        mean = [comm.sum_(total, "control").div_(comm.workers)]
    of_workers, of_mean = torch.stack([comm.sum_(small, "control"), _square(mean)]).tolist()
    return SquareNorms(of_workers / comm.workers, of_mean, batch_size)


def _square(xs: Sequence[Tensor]) -> Tensor:
    """The sum of squares of all entries, in double precision."""
    norms = [torch.linalg.vector_norm(x, dtype=torch.float64) for x in xs]
    return torch.stack(norms).square().sum()
