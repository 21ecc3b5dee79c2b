"""Signals: what policies need to know of the gradients; collected only in epochs in which somebody needs it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from accordion_bench.blocks import Blocks
from accordion_bench.comm import Comm
from accordion_bench.exchange import WHOLE_MODEL
from accordion_bench.plan import TensorSpec


class GradientSums:
    """Sums over one epoch, per tensor, of local gradients, their mean over workers, or the decoded updates.

    `norm_of_sum_local` reads worker 0 alone (other processes collect nothing), `norm_of_sum_mean` costs one dense
    all-reduce when read, charged to control_bytes, `norm_of_sum_update` is free.

    Args:
        specs: the tensors whose norms are wanted; one float each.
        comm: collectives.
        like: gives type and device.
    """

    def __init__(self, specs: Sequence[TensorSpec], comm: Comm, like: Tensor) -> None:
        self.specs, self.comm, self.like = specs, comm, like
        self.sums: dict[str, Blocks] = {}

    def begin(self, needs: frozenset[str]) -> None:
        """Start an epoch: forget the last one, allocate what is needed."""
        if not self.comm.leader:
            needs = needs - {"norm_of_sum_local"}
        self.sums = {name: Blocks(self.specs, 1, self.like) for name in sorted(needs)}

    @torch.no_grad()
    def add_gradients(self, gradients_W: Sequence[Tensor]) -> None:
        """Add one step's gradients [W, ...], before residual, compression and reduction."""
        if "norm_of_sum_local" in self.sums:
            firsts = list(gradients_W) if self.comm.local_workers == 1 else [g_W[:1] for g_W in gradients_W]
            torch._foreach_add_(self.sums["norm_of_sum_local"].tensors, firsts)
        if "norm_of_sum_mean" in self.sums:
            sums = [g_W.sum(0, keepdim=True) for g_W in gradients_W]
            torch._foreach_add_(self.sums["norm_of_sum_mean"].tensors, sums)

    @torch.no_grad()
    def add_updates(self, updates: Sequence[Tensor]) -> None:
        """Add one step's decoded updates [...]."""
        if "norm_of_sum_update" in self.sums:
            torch._foreach_add_(self.sums["norm_of_sum_update"].tensors, [update[None] for update in updates])

    @torch.no_grad()
    def read(self) -> dict[str, dict[str, float]]:
        """Per signal the norm of each tensor by name, and of the whole `model`; for the leader's eyes."""
        values = {}
        for signal, total in self.sums.items():
            if signal == "norm_of_sum_mean":
                for block in total.blocks:
                    self.comm.sum_(block, "control").div_(self.comm.workers)
            norms = torch.stack([t.double().norm() for t in total.tensors])
            names = [*(spec.name for spec in self.specs), WHOLE_MODEL]
            values[signal] = dict(zip(names, [*norms.tolist(), float(norms.norm())], strict=True))
        return values

    def state_dict(self) -> dict[str, Any]:
        """The running sums, keyed by signal and parameter name."""
        return {
            name: {spec.name: t.clone() for spec, t in zip(self.specs, total.tensors, strict=True)}
            for name, total in self.sums.items()
        }

    def add_state(self, state: dict[str, Any]) -> None:
        """Add the sums of a `state_dict()` to those begun."""
        for name in self.sums.keys() & state.keys():
            for spec, t in zip(self.specs, self.sums[name].tensors, strict=True):
                t += state[name][spec.name].to(t.device)
