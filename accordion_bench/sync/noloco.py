"""NoLoCo: local steps, and outer steps towards the mean of two workers; no collective of all of them."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.on_device import copy_on_cpu, restore_
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError
from accordion_bench.plan import RunFacts
from accordion_bench.sync.buffers import treat_buffers
from accordion_bench.sync.exact_average import exact_average
from accordion_bench.sync.groups import Group, Tier
from accordion_bench.sync.local_sgd import LocalSGD
from accordion_bench.sync.pair_exchange import PairExchange


class NoLoCo(LocalSGD):
    """Every H steps workers meet in keyed random pairs, and each takes a step of momentum SGD from its own z_w:

        Delta_w = x_w - z_w
        m_w <- mu m_w + outer_lr (mean_pair Delta + mean_pair z - z_w)
        x_w = z_w <- z_w + m_w

    As Delta_w + z_w = x_w, one message of x_w is all that a worker sends. Of an even number of workers mean_w z_w takes
    a step of momentum SGD on mean_w Delta_w. Evaluated is mean_w z_w; after the last step all workers average exactly.
    `workers=1` is the control: the same outer step, and nobody to meet.

    Args:
        period: H, steps between two meetings; longer = fewer bytes.
        outer_lr: its learning rate, not scheduled; as the paper, also the weight of mean_pair z - z_w.
        outer_momentum: mu, in [0, 1).
        buffers: the inner optimizers' at a meeting: `keep` or `reset`; null = keep.
        switch_step, final: see `LocalSGD`.

    Source: Kolehmainen et al. 2025 (arXiv 2506.10911) and its official code.
    """

    description = replace(LocalSGD.description, display_names={"noloco": "NoLoCo"})

    without_averages = "whose workers meet in pairs and never have one mean of all"

    def __init__(
        self,
        period: int = 50,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.3,
        switch_step: int | None = 0,
        buffers: str | None = None,
        final: bool = True,
    ) -> None:
        super().__init__(period, switch_step, buffers=buffers, final=final)
        self.outer_optimizer = "sgd"  # each worker's own
        self.outer_lr = checks.number("outer_lr", outer_lr, above=0, instead=0.7)
        self.outer_momentum = checks.number("outer_momentum", outer_momentum, at_least=0, below=1, instead=0.3)
        if buffers is not None:
            checks.choice("buffers", buffers, ["keep", "reset"])
        self.z: list[list[Tensor]] = []  # of each local worker
        self.momentum: list[list[Tensor]] = []
        self.finished = False

    def check(self, run: RunFacts, workers_per_process: int) -> None:
        if run.workers % 2 and run.workers > 1:
            raise ConfigError(
                f"workers must be an even number with sync=noloco, whose workers meet in pairs, got {run.workers}; "
                f"type workers={run.workers + 1}, or sync=diloco"
            )
        super().check(run, workers_per_process)

    def ends_apart(self, steps: int, period: int) -> bool:
        return self.final and steps > 0

    def new_exchange(self, comm: Comm | None = None) -> Exchange:
        return self._new_pairs(comm or self.comm)

    def _new_pairs(self, comm: Comm) -> PairExchange:
        pairs = PairExchange(self.axis.specs, comm, self.axis.like, self.runner.seed)
        pairs.finite = self.runner.finite
        return pairs

    def fork(self) -> None:
        super().fork()
        self.pairs = self._new_pairs(self.comm)
        self.tiers = [Tier(self.comm.workers, [Group(range(self.comm.local_workers), self.pairs, self.axis.shared)])]
        self.z = [[x.clone() for x in own] for own in self._values()]
        self.momentum = [[torch.zeros_like(x) for x in own] for own in self.z]

    def _values(self) -> list[list[Tensor]]:
        """The parameters of each local worker."""
        return [self.axis.values(row) for row in range(self.comm.local_workers)]

    def after_local_step(self) -> None:
        """Meet where a period has passed."""
        if self.since >= (self.period or 1):
            self.meet()

    @torch.no_grad()
    def meet(self) -> None:
        """The outer step of each local worker, and its replica goes on from there."""
        self.clock.waits(self.pairs.kind)
        means = self.pairs.means(self._values(), self.position.step)
        self.clock.lap("exposed")
        for values, mean, z, m in zip(self._values(), means, self.z, self.momentum, strict=True):
            torch._foreach_sub_(mean, z)
            torch._foreach_mul_(m, self.outer_momentum)
            torch._foreach_add_(m, mean, alpha=self.outer_lr)
            torch._foreach_add_(z, m)
            torch._foreach_copy_(values, z)
        self.since = 0
        treat_buffers(self.inner, self.buffers)

    def consensus(self) -> list[Tensor]:
        return self.axis.mean_over_workers(self.z, "eval") if self.forked and not self.finished else self.axis.shared

    def finish(self) -> None:
        """One exact average of what the workers have become."""
        if self.forked and self.final:
            exact_average(self.axis)
            self.finished = True

    def worker_state(self, row: int) -> dict[str, Any]:
        kept = {"z": self.z, "momentum": self.momentum} if self.forked else {}
        return {
            key: {name: copy_on_cpu(x) for name, x in zip(self.names, rows[row], strict=True)}
            for key, rows in kept.items()
        }

    def load_worker_state(self, row: int, state: dict[str, Any]) -> None:
        for key, rows in (("z", self.z), ("momentum", self.momentum)):
            for name, x in zip(self.names, rows[row] if self.forked else [], strict=False):
                restore_(x, state[key][name])
