"""DES-LOC: local Adam with different averaging periods of parameters, first moments and second moments."""

from dataclasses import replace

import torch

from accordion_bench.exchange.runner import CompletedExchange
from accordion_bench.options.checks import ValueRefused
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.position import Rate
from accordion_bench.sync.outer import average_buffers
from accordion_bench.sync.round import Round, When

SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq")  # names in torch's optimizers


@with_options
class DesLoc(Round):
    """Local steps of the inner optimizer on gradients g_w <- clip(g_w, rho), clipped by coordinate:

        every K_x steps:  x_w <- mean x_w;    every K_u:  u_w <- mean u_w;    every K_v:  v_w <- mean v_w

    u are the inner optimizer's first moments (momenta of AdamW, Muon and SGD), v its second moments. Moments are sent
    uncompressed; a compressor applies to differences of parameters. If a policy changes K_x, K_u and K_v change in
    proportion. Payload in K_x steps: 4 N (1 + K_x/K_u + K_x/K_v) bytes, 1.5 models with the defaults. To limit the norm
    of the gradient, use `clip_norm`.

    Source: Iacob et al. 2025 (arXiv 2505.22549).
    """

    description = replace(Round.description, display_names={"desloc": "DES-LOC"})

    keeps = (*Round.keeps, "meetings")
    period: int = option("steps between averagings of the parameters; longer = fewer bytes", default=32, at_least=1)
    momentum_period: int | None = option(
        "of first moments; a multiple of period; null = 3 periods", default=None, at_least=1, instead=96
    )
    variance_period: int | None = option(
        "of second moments; a multiple of period; null = 6 periods", default=None, at_least=1, instead=192
    )
    clip: float | None = option(
        "largest absolute value of a coordinate of a worker's gradient; null = any", default=None, above=0, instead=1.0
    )

    chosen_as = {
        "desloc": Choice(
            "local Adam whose moments are averaged ever more seldom than its parameters (Iacob et al. 2025); usual: "
            "optimizer=adamw"
        )
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        self.buffers = "average"
        super().__init__(When(self.period))
        self.first = self._multiple("momentum_period", self.momentum_period, 3)
        self.second = self._multiple("variance_period", self.variance_period, 6)
        self.meetings = 0  # number of averagings

    def _multiple(self, key: str, value: int | None, usual: int) -> int:
        """Return a period in multiples of K_x."""
        if value is None:
            return usual
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
