"""DES-LOC: local Adam whose parameters, first moments and second moments are averaged with periods of their own."""

from dataclasses import dataclass, replace

import torch

from accordion_bench.exchange.runner import CompletedExchange
from accordion_bench.options import checks
from accordion_bench.options.checks import ValueRefused
from accordion_bench.position import Rate
from accordion_bench.sync.outer import average_buffers
from accordion_bench.sync.round import Round, When

SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq")  # as torch's optimizers name them


@dataclass(eq=False)
class DesLoc(Round):
    """Each worker takes steps of the inner optimizer, on gradients g_w <- clip(g_w, rho), coordinate by coordinate:

        every K_x steps:  x_w <- mean x_w;    every K_u:  u_w <- mean u_w;    every K_v:  v_w <- mean v_w

    u are the inner optimizer's first moments (AdamW's, Muon's and SGD's momenta), v its second ones. All are averaged
    after the step, moments as they are; a compressor takes differences of parameters. K_x = K_u = K_v = 1 averages
    everything in each step. Where a policy changes K_x, K_u and K_v change with it. Payload in K_x steps: 4 N (1 +
    K_x/K_u + K_x/K_v) bytes, with the defaults 1.5 models.

    Args:
        period: K_x, steps between two averagings of the parameters; longer = fewer bytes.
        momentum_period: K_u, of first moments, a multiple of K_x; null = 3 K_x.
        variance_period: K_v, of second moments, a multiple of K_x; null = 6 K_x.
        clip: rho, the largest absolute value of a coordinate of a worker's gradient; null = any. A largest norm is
            `clip_norm`.
        switch_step, final: see `LocalSGD`.

    Source: Iacob et al. 2025 (arXiv 2505.22549).
    """

    description = replace(Round.description, display_names={"desloc": "DES-LOC"})

    keeps = (*Round.keeps, "meetings")
    period: int = 32
    momentum_period: int | None = None
    variance_period: int | None = None
    clip: float | None = None
    switch_step: int | None = 0
    final: bool = True

    def __post_init__(self) -> None:
        self.buffers = "average"
        super().__init__(When(self.period))
        self.first = self._multiple("momentum_period", self.momentum_period, 3)
        self.second = self._multiple("variance_period", self.variance_period, 6)
        if self.clip is not None:
            checks.number("clip", self.clip, above=0, instead=1.0)
        self.meetings = 0  # averagings of all

    def _multiple(self, key: str, value: int | None, usual: int) -> int:
        """A period as a multiple of K_x."""
        if value is None:
            return usual
        checks.integer(key, value, at_least=1, instead=usual * self.period)
        if value % self.period:
            raise ValueRefused(key, f"a multiple of period={self.period}", value, usual * self.period)
        return value // self.period

    def buffer_interval(self, key: str) -> int:
        return self.second if key in SECOND_MOMENTS else self.first

    @torch.no_grad()
    def before_step(self, lr: Rate) -> CompletedExchange | None:
        completed = super().before_step(lr)
        if self.clip is not None and self.forked:
            torch._foreach_clamp_min_(self.axis.gradients_W, -self.clip)
            torch._foreach_clamp_max_(self.axis.gradients_W, self.clip)
        return completed

    def treat_buffers(self) -> None:
        self.meetings += 1
        average_buffers(self.inner, lambda key: self.meetings % self.buffer_interval(key) == 0)
