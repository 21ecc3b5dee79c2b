"""Local SGD and its relatives: presets of a round (see `Round`), each with its options as fields."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.component import Idle, RunContext
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import Choice, option, options_of, with_options
from accordion_bench.plan import RunFacts
from accordion_bench.sync.outer import BUFFERS, OUTER, HeavyBall
from accordion_bench.sync.round import Round
from accordion_bench.sync.scheme import LEFT
from accordion_bench.sync.when import When
from accordion_bench.sync.who import Pairs, checked_groups
from accordion_bench.tensors.same_shape import Blocks

OUTER_OPTIONS = ("alpha", "beta", "outer_lr", "outer_momentum", "outer_nesterov")
NOT_GIVEN: Any = object()


def _idle_of_local_sgd(cls: Any, options: Config, context: RunContext) -> Idle:
    yield from Round.description.idle(cls, options, context)
    quorum = options.get("quorum")
    if quorum is None:
        for key in ("grace", "lateness"):
            yield key, "sync.quorum is null"
    elif quorum == context.workers:
        for key in ("quorum", "grace", "lateness"):
            yield key, f"all {quorum} workers are waited for anyway"
    elif options.get("lateness") is not None:
        yield "grace", "sync.lateness draws who is late"


SPARTA = "share of the parameters averaged after every local step, too; 0.005 is usual, null = none"
LATE = ("quorum", "grace", "lateness")
ELASTIC = ("elastic", "min_workers")
COME_AND_GO = "whether workers may be lost and others may enter after a round; needs comm=gloo"
NESTEROV: Mapping[str, tuple[Any, str]] = {"optimizer.nesterov": (True, "as in the paper")}


@with_options
class LocalSGD(Round):
    """Each worker takes H steps of the inner optimizer; then z <- outer(z, mean(z - x_w)) and x_w <- z.

    Workers average after the optimizer steps S + H, S + 2 H, ..., and exactly after the last step of the run. At the
    switch every worker gets a copy of the inner optimizer's buffers; residuals of gradients are discarded.

    H is the `period`; a change by a policy takes effect at the next averaging. S is the `switch_step`. In `groups` each
    H and n divides the next one, and the last n is the number of workers; the default is [[H, A]]. Averaged buffers
    are sent uncompressed, each with the bytes of one model. With a quorum fewer workers are waited for; a late worker
    keeps its difference for the next averaging, see `quorum.py`. SPARTA sends 4 p N bytes a step, see `SparseAverage`.

    Source: Stich 2019 (arXiv 1805.09767); Lin et al. 2020 (arXiv 1808.07217); Zhou and Cong 2019 (hierarchical).
    """

    phase1: str = option("what those steps average", default="gradient", choices=("gradient", "model"))
    outer_optimizer: str = option(
        "none, slowmo or sgd; sync=slowmo and sync=diloco have their options",
        default="none",
        choices=("none", "slowmo", "sgd"),
    )
    buffers: str | None = option("the inner optimizers' buffers at an averaging", default=None, choices=BUFFERS)
    groups: Sequence[tuple[int, int]] | None = option(
        "[[H_1, n_1], ...]: every H_1 steps within n_1 consecutive workers, and so on", default=None
    )
    sparta: float | None = option(SPARTA, default=None, above=0, at_most=1, instead=0.005)
    quorum: int | None = option(
        "workers that must have come for an averaging to go on, 1 to all; null = all",
        default=None,
        at_least=1,
        instead=2,
    )
    grace: float | None = option(
        "seconds that others are waited for then; null = 0", default=None, at_least=0, instead=1.0
    )
    lateness: float | None = option(
        "probability that a worker is late at an averaging, drawn; null = late by the clock",
        default=None,
        at_least=0,
        below=1,
        instead=0.1,
    )
    elastic: bool = option(COME_AND_GO, default=False)
    min_workers: int | None = option(LEFT, default=None, at_least=1, instead=2)

    chosen_as = {
        "local_sgd": Choice(
            "every worker takes `period` steps of its own, then all average (Stich 2019)",
            {"buffers": "keep"},
            leaves_out=("groups",),
            brings=NESTEROV,
        ),
        "post_local_sgd": Choice(
            "synchronous until the first decay of the learning rate, local SGD from there on (Lin et al. 2020)",
            {"period": 16, "switch_step": None, "buffers": "keep"},
            leaves_out=("groups", *LATE, *ELASTIC),
            brings=NESTEROV,
        ),
        "slowmo": Choice(
            "local SGD with slow momentum on the averages (Wang et al. 2020)",
            {"period": 12, "outer_optimizer": "slowmo"},
            beside=("alpha", "beta"),
            leaves_out=("groups",),
            comments={
                "buffers": "keep, reset, average: inner buffers at an averaging; null = reset SGD's, keep others (the "
                "paper)",
            },
            brings=NESTEROV,
        ),
        "diloco": Choice(
            "long local rounds with any inner optimizer, Nesterov steps on the averages (Douillard et al. 2023); "
            "control: workers=1",
            {"period": 30, "outer_optimizer": "sgd", "buffers": "keep"},
            beside=("outer_lr", "outer_momentum", "outer_nesterov"),
            leaves_out=("groups",),
            comments={
                "period": "steps between averagings; 500 in the paper, 30 to 500 usual",
            },
        ),
        "hierarchical": Choice(
            "pairs average often, all workers seldom (as torch's HierarchicalModelAverager; Lin et al. 2020)",
            {"period": None, "buffers": "keep", "groups": [[4, 2], [16, 4]]},
            leaves_out=("sparta", *LATE, *ELASTIC),
            comments={
                "period": "groups say it",
                "buffers": "keep, reset, average: the inner optimizers' buffers at an averaging of all",
                "groups": "every 4 steps within 2 consecutive workers, every 16 within 4",
            },
            brings=NESTEROV,
        ),
    }

    description = replace(
        Round.description,
        display_names={
            "local_sgd": "local SGD",
            "post_local_sgd": "post-local SGD",
            "slowmo": "SlowMo",
            "diloco": "DiLoCo",
            "hierarchical": "hierarchical local SGD",
        },
        shares={"sparta": "SPARTA"},
        idle=_idle_of_local_sgd,
    )

    alpha: float = NOT_GIVEN
    beta: float = NOT_GIVEN
    outer_lr: float = NOT_GIVEN
    outer_momentum: float = NOT_GIVEN
    outer_nesterov: bool = NOT_GIVEN

    def __post_init__(self) -> None:
        if self.groups and self.period is not None:
            raise ValueRefused("period", "{null} where groups say it", self.period, None)
        super().__post_init__()
        groups = [] if self.groups is None else checked_groups(self.groups)
        period = groups[-1][0] if groups else checks.integer("period", self.period, at_least=1, instead=8)
        outer = OUTER[self.outer_optimizer]
        options = {name: value for name in OUTER_OPTIONS if (value := getattr(self, name)) is not NOT_GIVEN}
        for name in options.keys() - options_of(outer).keys():
            others = {"sync": "slowmo"}, {"sync": "diloco"}
            raise ConfigError(f"sync.{name} is no option of outer_optimizer={self.outer_optimizer}", *others)
        super().__init__(When(period, groups=groups), outer=outer(**options))
        if groups and self.sparta is not None:
            raise ValueRefused("sparta", "{null} where groups say who averages", self.sparta, None)
        if self.quorum is None:
            return
        if groups:
            raise ValueRefused("quorum", "{null} where groups say who averages", self.quorum, None)
        if self.sparta is not None:
            rule = "{null} with a quorum, because all workers average a share of their parameters in every step"
            raise ValueRefused("sparta", rule, self.sparta, None)
        if self.buffers == "average":
            rule = "keep or reset with a quorum, because buffers are averaged by all workers"
            raise ValueRefused("buffers", rule, self.buffers, "keep")


def _idle_of_overlap(cls: Any, options: Config, context: RunContext) -> Idle:
    yield from Round.description.idle(cls, options, context)
    if options.get("merge") == "cocod":
        yield "merge_alpha", "sync.merge is cocod"


@with_options
class OverlapLocalSGD(Round):
    """Every H steps the workers launch z' <- mean(z - gamma v_w); `delay` steps later they are pulled towards it.

        launch:  v_w <- beta v_w + (z - x_w) / gamma;   D = exchange(gamma v_w)
        later:   z <- z - D;   x_w <- (1 - merge_alpha) x_w + merge_alpha z       (merge: pull_back)
                 x_w <- x_w + mean x_old - x_old,w                                (merge: cocod)

    gamma is the inner learning rate at the start of the round. If it is 0, D = exchange(z - x_w) and v is unchanged.
    The exchange overlaps the next steps (`comm.overlap`); with policies, which inspect its result, it is blocking.

    `cocod` preserves the mean of the workers, and requires beta = 0. If the delay is H, merge_alpha must be below 1.

    Source: Wang, Liang, Joshi 2020 (arXiv 2002.09539) and its official code; Shen et al. 2019 (CoCoD).
    """

    period: int = option("steps between averagings; longer = fewer bytes", default=2, at_least=1)
    delay: int | None = option("steps until an average is used; null = period", default=None, at_least=1, instead=1)
    merge: str = option("how workers learn of it", default="pull_back", choices=("pull_back", "cocod"))
    merge_alpha: float = option("how far they are pulled", default=0.6, above=0, at_most=1)
    beta: float = option("momentum of the differences; 0 with cocod", default=0.7, at_least=0, below=1)
    buffers: str | None = option("the inner optimizers' buffers when an average is used", default=None, choices=BUFFERS)

    chosen_as = {
        "overlap_local_sgd": Choice(
            "averages are used a round late and pull the workers back (Wang, Liang, Joshi 2020)", {"buffers": "keep"}
        )
    }

    description = replace(
        Round.description, display_names={"overlap_local_sgd": "overlap local SGD"}, idle=_idle_of_overlap
    )

    late = True

    def __post_init__(self) -> None:
        super().__post_init__()
        super().__init__(When(self.period, delay=self.delay), pull=self.merge_alpha)
        if self.delay is not None and self.delay > self.period:
            rule = f"at most period={self.period}, because one average is in flight at a time"
            raise ValueRefused("delay", rule, self.delay, self.period)
        if self.merge == "pull_back" and self.merge_alpha == 1 and self.delay in (None, self.period):
            rule = "below 1 where the delay is a whole period, or the consensus would stay at the start for ever"
            raise ValueRefused("merge_alpha", rule, self.merge_alpha, 0.6)
        if self.merge == "cocod" and self.beta:
            raise ValueRefused("beta", "0 with merge=cocod", self.beta, 0)
        self.momentum_W: list[Tensor] = []
        self.launched_W: list[Tensor] = []

    def refuse_driven(self, drivers: Mapping[str, str], run: RunFacts) -> None:
        if "period" in drivers and self.merge == "pull_back" and self.merge_alpha == 1:
            rule = (
                f"below 1 where adaptive={drivers['period']} drives the period, or the consensus would stay where it "
            )
            rule += "is as soon as the delay is a whole period"
            raise ValueRefused("sync.merge_alpha", rule, 1, 0.6)
        super().refuse_driven(drivers, run)

    def fork(self) -> None:
        super().fork()
        storage = self.axis.specs, self.comm.local_workers, self.axis.shared[0]
        if self.beta:
            self.momentum_W = Blocks(*storage).tensors
        if self.merge == "cocod":
            self.launched_W = Blocks(*storage).tensors
            self.note_launched()

    def prepare(self, message: Sequence[list[Tensor]]) -> None:
        (moved_W,) = message
        if self.merge == "cocod":
            self.note_launched()
        if self.beta and (gamma := self.round_lr):
            torch._foreach_mul_(self.momentum_W, self.beta)
            torch._foreach_add_(self.momentum_W, moved_W, alpha=1 / gamma)
            for moved, v_W in zip(moved_W, self.momentum_W, strict=True):
                torch.mul(v_W, gamma, out=moved)

    def note_launched(self) -> None:
        """Copy the parameters of the workers at a launch."""
        for row in range(len(self.axis.replicas)):
            torch._foreach_copy_([x_W[row] for x_W in self.launched_W], self.axis.values(row))

    def learn(self, z: list[Tensor], rows: range) -> None:
        if self.merge == "pull_back":
            super().learn(z, rows)
            return
        for row in rows:
            values = self.axis.values(row)
            torch._foreach_add_(values, z)
            torch._foreach_sub_(values, [x_W[row] for x_W in self.launched_W])

    def own(self, row: int) -> dict[str, Any]:
        kept = {"momentum": self.momentum_W, "launched": self.launched_W}
        return {key: self.who.named([x_W[row] for x_W in xs_W]) if xs_W else {} for key, xs_W in kept.items()}


@with_options
class NoLoCo(Round):
    """Every H steps random pairs of workers exchange parameters, and each takes a momentum step from its own z_w:

        Delta_w = x_w - z_w
        m_w <- mu m_w + outer_lr (mean_pair Delta + mean_pair z - z_w)
        x_w = z_w <- z_w + m_w

    A worker sends one message, x_w = Delta_w + z_w. mean_w z_w takes a step of momentum SGD on mean_w Delta_w, and is
    evaluated; after the last step all workers average exactly. `workers=1` is the control: the same outer step without
    a partner. As in the paper, the outer learning rate is also the weight of mean_pair z - z_w.

    Source: Kolehmainen et al. 2025 (arXiv 2506.10911) and its official code.
    """

    period: int = option("steps between two meetings; longer = fewer bytes", default=50, at_least=1)
    outer_lr: float = option("not scheduled", default=0.7, above=0)
    outer_momentum: float = option("0.5 in most runs of the official code", default=0.3, at_least=0, below=1)
    buffers: str | None = option("the inner optimizers' buffers at a meeting", default=None, choices=("keep", "reset"))

    chosen_as = {
        "noloco": Choice(
            "long local rounds, then outer steps towards the mean of two workers that meet by chance (Kolehmainen et "
            "al. 2025)",
            {"buffers": "keep"},
        )
    }

    description = replace(Round.description, display_names={"noloco": "NoLoCo"})

    without_averages = "whose workers meet in pairs and never have one mean of all"
    outer_optimizer = "sgd"  # one per worker

    def __post_init__(self) -> None:
        super().__post_init__()
        super().__init__(When(self.period), Pairs(), HeavyBall(self.outer_lr, self.outer_momentum))

    def check(self, run: RunFacts, workers_per_process: int) -> None:
        if run.workers % 2 and run.workers > 1:
            raise ConfigError(
                f"workers must be an even number with sync=noloco, whose workers meet in pairs, got {run.workers}",
                {"workers": run.workers + 1},
                {"sync": "diloco"},
            )
        super().check(run, workers_per_process)
