"""SPARTA: in every step the workers average a few of their parameters."""

from dataclasses import replace

from accordion_bench.comm.collectives import Comm
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.options import checks
from accordion_bench.options.instantiate import Config
from accordion_bench.sync.base import Placed
from accordion_bench.sync.local_sgd import LocalSGD


def _smoke_options(options: Config, knob: str) -> Config:
    return {}


class Sparta(LocalSGD):
    """Each worker takes steps of its own; after each one x_w[mask] <- mean_w x_w[mask], one keyed mask for all.

    Nothing else is exchanged, but for one exact average after the last step. The same beside averagings of everything
    is `sync.sparta` of `LocalSGD`.

    Args:
        sparta: p, the share of all coordinates that a mask has, in (0, 1]; lower share = fewer bytes. See
            `SparseAverage`.
        switch_step, final: see `LocalSGD`.

    Source: "Improving the Efficiency of Distributed Training using Sparse Parameter Averaging" (openreview stFPf3gzq1),
    and EXO Gym.
    """

    description = replace(LocalSGD.description, display_names={"sparta": "SPARTA"}, smoke_options=_smoke_options)

    every_local_step = True
    without_averages = "which averages a share of the parameters in every step, as they are"

    def __init__(self, sparta: float = 0.005, switch_step: int | None = 0, final: bool = True) -> None:
        checks.number("sparta", sparta, above=0, at_most=1, instead=0.005)  # null, too, is refused here
        super().__init__(1, switch_step, final=final, sparta=sparta)

    def ends_apart(self, steps: int, period: int) -> bool:
        return self.final and steps > 0

    def fork(self) -> None:
        super().fork()
        self.tiers = []  # nobody averages differences

    def new_exchange(self, comm: Comm | None = None) -> Exchange:
        return self.sparse_average(comm or self.comm)

    def between(self) -> list[Exchange]:
        return []

    def exchanges(self) -> list[Placed]:
        return [] if self.forked else self.every_step.exchanges()

    @property
    def exchange(self) -> Exchange:
        return self.sparse if self.forked and self.sparse else self.every_step.exchange

    def after_local_step(self) -> None:
        """All is said: the sparse average has been made."""
