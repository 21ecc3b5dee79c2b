"""Policies of the period: decisions on recorded signals, refusals, and the steps after which real runs average."""

import math

import pytest
import torch

from accordion_bench import train
from accordion_bench.adaptive.accordion import AccordionSync
from accordion_bench.adaptive.period_policies import QSR, AdaComm
from accordion_bench.config.components import build_components
from accordion_bench.options.checks import ConfigError
from accordion_bench.plan import Ladder, Plan, RunFacts, Signals
from accordion_bench.processes.placement import Placement
from accordion_bench.run_config import RunConfig
from accordion_bench.schedules.learning_rate import Cosine, MultiStep
from tests.kit import composed, tiny
from tests.kit.local import CONSTANT, trained
from tests.kit.policies import components
from tests.runs.test_resume import differences, resume, start, state, stop
from tests.sync.test_local_refused import advised

RUN = RunFacts(epochs=60, workers=4, train_size=1437, batch_size=32, schedule=MultiStep(60, 4), warmup_epochs=5)


class TestAdaComm:
    def started(self, period=16, **options):
        policy = AdaComm(**{"every": 1, **options})
        return policy, policy.start(Plan(period=period), Ladder(), RUN)

    def periods(self, losses, lrs=None, **options):
        """The first period, and the one after each interval of one step."""
        policy, plan = self.started(**options)
        lrs, out = lrs or [0.1] * len(losses), [plan.period]
        for step, (loss, lr) in enumerate(zip(losses, lrs, strict=True)):
            plan = policy.update(Signals(0, lr, lr, step=step, exchange=step, loss=loss), plan)
            out.append(plan.period)
        return out

    def test_halves_while_nothing_else_happens(self):
        """The first interval's loss is F_0, and decides nothing."""
        assert self.periods([2.0] * 6) == [16, 16, 8, 4, 2, 1, 1]

    @pytest.mark.parametrize("rule, period", [("paper", 8), ("paddle", 2)])
    def test_a_quarter_of_the_loss(self, rule, period):
        assert self.periods([2.0, 0.5], rule=rule)[-1] == period

    def test_a_drop_may_raise_the_period_up_to_its_limit(self):
        assert self.periods([2.0, 0.5], [0.1, 0.01]) == [16, 16, 26]
        assert self.periods([2.0, 0.5], [0.1, 0.01], max_period=20) == [16, 16, 20]
        # the root alone says 16 x sqrt(10) = 51 from there on, and the halving goes on
        assert self.periods([2.0] * 6, [0.1, 0.1, 0.1, 0.01, 0.01, 0.01]) == [16, 16, 8, 4, 32, 16, 8]

    def test_a_warm_up_does_not_raise_it(self):
        """Three halvings, then a little more learning rate: the root is 15, the period stays."""
        assert self.periods([2.0] * 5, [0.1, 0.1, 0.1, 0.1, 0.11]) == [16, 16, 8, 4, 2, 2]
        assert self.periods([2.0, 2.0], [0.1, 0.4]) == [16, 16, 8]  # sqrt(1 / 4)

    def test_paddle_never_halves(self):
        assert self.periods([2.0] * 4, rule="paddle") == [16, 16, 4, 4, 4]

    @pytest.mark.parametrize("bad", [0.0, math.nan, math.inf, None])
    def test_without_a_loss_the_period_stays(self, bad):
        assert self.periods([bad, 2.0, bad, 2.0, 2.0]) == [16, 16, 16, 16, 8, 4]

    def test_without_a_learning_rate_the_period_stays(self):
        assert self.periods([2.0, 2.0, 2.0, 2.0], [0.1, 0.1, 0.0, 0.0]) == [16, 16, 8, 8, 8]

    def test_an_interval_ends_at_the_first_averaging_after_it(self):
        """Averagings after 4, 8, 9, 16 steps, intervals of 6: ends after 8 and 16; losses weigh by their steps."""
        policy, plan = self.started(period=4, every=6)
        for end, loss in zip((4, 8, 9, 16), (1.0, 3.0, 9.0, 1.0), strict=True):
            plan = policy.update(Signals(0, 0.1, 0.1, step=end - 1, loss=loss), plan)
            decided = policy.decision()
            assert bool(decided) == (end in (8, 16))
        assert policy.first == (2.0, 0.1) and decided["loss"] == (9.0 + 7 * 1.0) / 8
        assert plan.period == 2 and decided["reason"] == "halved"

    def test_synchronous_steps_do_not_count(self):
        """The first interval begins with the local steps; before them the first period stays."""
        policy, plan = self.started(every=4)
        for step in range(40):
            plan = policy.update(Signals(0, 0.4, 0.4, step=step, loss=9.0, local=False), plan)
            assert plan.period == 16 and policy.decision() == {}
        for step in (43, 47):  # averagings after 4 local steps each
            plan = policy.update(Signals(0, 0.1, 0.1, step=step, loss=2.0), plan)
        assert policy.first == (2.0, 0.1) and plan.period == 8

    def test_the_first_period_is_the_sync_own(self):
        assert self.started(period=5)[1].period == 5
        assert self.started(period=5, initial=12)[1].period == 12

    def test_state_continues_in_an_interval(self):
        policy, plan = self.started(every=4)
        for step in range(6):
            plan = policy.update(Signals(0, 0.1, 0.1, step=step, loss=2.0 - 0.1 * step), plan)
        other, _ = self.started(every=4)
        other.load_state_dict(policy.state_dict())
        for step in range(6, 20):
            signals = Signals(0, 0.1, 0.1, step=step, loss=2.0 - 0.1 * step)
            a, b = policy.update(signals, plan), other.update(signals, plan)
            assert a == b and policy.decision() == other.decision()
            plan = a


class TestQSR:
    def started(self, period=4, run=RUN, **options):
        policy = QSR(**{"alpha": 0.0175, **options})
        return policy, policy.start(Plan(period=period), Ladder(), run)

    @pytest.mark.parametrize("lr, period", [(0.008, 4), (0.004, 19), (0.002, 76), (0.001, 306)])
    def test_published_setting(self, lr, period):
        assert self.started()[0].period(lr, 10_000) == period

    def test_floor_of_an_exact_power(self):
        assert math.floor((0.3 / 0.1) ** 2) == 8
        assert self.started(alpha=0.3)[0].period(0.1, 10_000) == 9

    def test_clamped_to_the_end(self):
        policy, _ = self.started()
        assert [policy.period(0.001, left) for left in (307, 306, 305, 2, 1, 0)] == [306, 306, 305, 2, 1, 1]

    def test_learning_rates_of_nothing(self):
        policy, _ = self.started(exponent=8.0)
        assert [policy.period(lr, 77) for lr in (0.0, 1e-300)] == [77, 77]

    def test_exponent_and_off(self):
        assert self.started(exponent=1.0)[0].period(0.001, 100) == 17
        assert [self.started(alpha=0)[0].period(lr, 100) for lr in (0.1, 1e-9, 0.0)] == [4, 4, 4]

    def test_warm_up_has_a_period_of_its_own(self):
        policy, plan = self.started(warmup_period=2)
        assert plan.period == 2
        plan = policy.update(Signals(0, 1e-4, 2e-4, step=1, steps_left=700, warming_up=True), plan)
        assert plan.period == 2 and policy.decision() == {}
        plan = policy.update(Signals(0, 0.008, 0.004, step=3, steps_left=700), plan)
        assert plan.period == 19 and policy.decision() == {"step": 3, "lr": 0.004, "period": 19}

    def test_without_warm_up_it_starts_at_the_base(self):
        run = RunFacts(epochs=10, schedule=Cosine(10, 1, warmup_epochs=0))
        assert self.started(run=run, warmup_period=2)[1].period == 4
        assert self.started(base_period=6)[1].period == 6

    def test_periods_of_the_default_run(self):
        """As the comment in its YAML says."""
        policy, _ = self.started(period=8, **{"alpha": 0.2})
        lrs = [0.1 * RUN.schedule(epoch) for epoch in (5, 30, 50)]
        assert [policy.period(lr, 120) for lr in lrs] == [8, 25, 120]

    def test_a_schedule_that_never_decays(self):
        for schedule in (MultiStep(60, 4, milestones=[]), Cosine(60, 4, final=1.0)):
            run = RunFacts(60, 4, 1437, 32, schedule)
            with pytest.raises(ConfigError, match=r"qsr needs a schedule that lowers .*; type schedule=cosine"):
                self.started(run=run)
            assert self.started(run=run, alpha=0)[1].period == 4


class TestAccordionSync:
    def test_chooses_between_two_periods_by_the_whole_model(self):
        policy = AccordionSync(interval=2, weak=3, strong=9)
        plan = policy.start(Plan(period=8), Ladder(), RUN)
        out, norms = [plan.period], {0: 1.0, 2: 0.9, 4: 0.4, 6: 0.4}
        for epoch in range(8):
            needs = policy.needs(epoch)
            assert needs == ({"norm_of_sum_local"} if epoch % 2 == 0 else set())
            # the tensor alone would say otherwise
            values = {need: {"a": 5.0**epoch, "model": norms[epoch]} for need in needs}
            plan = policy.update(Signals(epoch, 0.1, 0.01 if epoch == 7 else 0.1, values), plan)
            out.append(plan.period)
        assert out == [3, 3, 3, 9, 9, 3, 3, 9, 3]
        assert policy.decision()["reason"] == "learning-rate drop"

    def test_state_continues(self):
        policy, other = AccordionSync(interval=1), AccordionSync(interval=1)
        policy.update(Signals(0, 0.1, 0.1, {"norm_of_sum_local": {"model": 1.0}}), Plan(period=2))
        other.load_state_dict(policy.state_dict())
        values = {"norm_of_sum_local": {"model": 0.9}}
        assert other.update(Signals(1, 0.1, 0.1, values), Plan(period=2)).period == 16


# ---- which choices go together

OVERLAP = ["sync=overlap_local_sgd", "sync.merge_alpha=1", "sync.delay=1", "sync.period=4"]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "overrides, sync, period",
    [
        (["adaptive=qsr"], "local_sgd", 8),
        (["adaptive=adacomm"], "local_sgd", 8),
        (["adaptive=accordion_sync"], "local_sgd", 2),
        (["sync=slowmo", "adaptive=qsr"], "slowmo", 12),
        (["adaptive=qsr", "sync=slowmo"], "slowmo", 12),
        (["adaptive=[qsr,slowmo]"], "slowmo", 12),
        (["sync=slowmo", "adaptive=[slowmo,qsr]"], "slowmo", 12),
        (["adaptive=[accordion,qsr]", "compressor=topk"], "local_sgd", 8),
        (["sync=post_local_sgd", "adaptive=adacomm"], "post_local_sgd", 16),
    ],
)
def test_one_word_also_chooses_the_synchronisation(overrides, sync, period):
    cfg = composed.cfg(*overrides)
    assert cfg["choices"]["sync"] == sync
    assert build_components(RunConfig.from_dict(cfg), 4).plan_for([]).period == period


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "overrides, told",
    [
        (["sync=every_step", "adaptive=qsr"], "adaptive=qsr drives the period .*; type sync=local_sgd adaptive=qsr"),
        (["sync=every_step", "adaptive=adacomm"], "exchanges in every step; type sync=local_sgd adaptive=adacomm"),
        (
            ["sync=hierarchical", "adaptive=accordion_sync"],
            "drives one period, got sync=hierarchical, whose groups .*; type sync=local_sgd adaptive=accordion_sync$",
        ),
        (["adaptive=[slowmo,qsr]"], "needs sync=slowmo, got sync=local_sgd, .*; type sync=slowmo adaptive=qsr$"),
        (["adaptive=[slowmo,accordion,qsr]", "compressor=topk"], r"; type sync=slowmo adaptive=\[accordion,qsr\]$"),
        (["adaptive=[qsr,adacomm]"], "must not drive the same quantity twice, got qsr and adacomm"),
        (["adaptive=qsr", "schedule.milestones=[]"], "needs a schedule that lowers the learning rate"),
        (["adaptive=adacomm", "adaptive.adacomm.every=720"], "every must be less than half the 720 .*, got 720; .*=72"),
        (["adaptive=adacomm", "adaptive.adacomm.every=360"], "every must be less than half the 720 .*, got 360"),
        (["adaptive=adacomm", "epochs=2", "batch_size=400"], "type epochs=3 adaptive.adacomm.every=1$"),
        (["adaptive=adacomm", "epochs=2", "batch_size=400", "adaptive.adacomm.every=1"], "got 2; type epochs=3$"),
        (["adaptive=adacomm", "adaptive.adacomm.rule=papre"], "rule must be one of paper, paddle, got papre; .*paper"),
        (["adaptive=adacomm", "sync.period=40"], "max_period must be an integer of at least 40, .*max_period=40"),
        (["adaptive=adacomm", "adaptive.adacomm.initial=0"], "initial must be an integer of at least 1, got 0"),
        (["adaptive=qsr", "adaptive.qsr.alpha=-1"], "alpha must be a number at least 0, got -1"),
        (["adaptive=qsr", "adaptive.qsr.exponent=0"], "exponent must be a number above 0, got 0"),
        (["adaptive=qsr", "adaptive.qsr.warmup_period=0"], "warmup_period must be an integer of at least 1, got 0"),
        (
            ["adaptive=accordion_sync", "adaptive.accordion_sync.strong=2"],
            "strong must be a period above weak=2",
        ),
        (
            [*OVERLAP, "adaptive=accordion_sync", "adaptive.accordion_sync.weak=1"],
            "merge_alpha must be below 1 where adaptive=accordion_sync drives the period, .*; type .*merge_alpha=0.6",
        ),
        ([*OVERLAP, "adaptive=qsr"], "merge_alpha must be below 1 where adaptive=qsr drives the period"),
        (
            ["sync=post_local_sgd", "sync.switch_step=600", "adaptive=accordion_batch"],
            "switch_step must be null .* or 0 where adaptive=accordion_batch drives the batch .*; type .*=null",
        ),
        (
            ["sync=local_sgd", "sync.switch_step=600", "adaptive=adabatch"],
            "switch_step must be 0 where adaptive=adabatch drives the batch .*; type sync.switch_step=0",
        ),
        (["sync=post_local_sgd", "adaptive=adabatch"], "switch_step must be 0 where .*, got null; .*switch_step=0"),
    ],
)
def test_refused_in_one_sentence(overrides, told):
    with pytest.raises(ConfigError, match=told) as caught:
        components(*overrides)
    assert "\n" not in str(caught.value)
    for typed in advised(overrides, str(caught.value)):
        components(*typed)


@pytest.mark.parametrize("overrides, told", [
    (["sync=local_sgd"], "sync local_sgd (averaging every 8 steps), adaptive none"),
    (["adaptive=accordion_sync"], "sync local_sgd (averaging every 2 steps at first), adaptive accordion_sync"),
    (["sync=hierarchical"], "sync hierarchical (averaging every 16 steps), adaptive none"),
])  # fmt: skip
def test_the_header_tells_the_first_period(overrides, told):
    config = composed.config(*overrides)
    assert told in train.header(config, Placement("simulated", 1, 4), build_components(config, 4))


# ---- real runs: 24 steps, 6 an epoch


def averagings(tmp_path, *overrides):
    """(steps after which the workers have averaged, the trainer)."""
    steps, periods = [], []

    def watch(trainer):
        if trainer.sync.since == 0:
            steps.append(trainer.position.step)
        elif trainer.sync.since > 1:  # constant in a round
            assert trainer.sync.period == periods[-1]
        periods.append(trainer.sync.period)

    return steps, trained(tmp_path, *overrides, watch=watch)


def decisions(trainer, name):
    rows = trainer.folder.read_metrics()
    return [update for row in rows for update in row["decisions"].get(name, {}).get("updates", [])]


def test_qsr_lengthens_at_the_drops_and_ends_with_the_run(tmp_path):
    """Learning rates 0.08, from step 12 on 0.008, from 18 on 0.0008: H is 2, 4, 400."""
    steps, trainer = averagings(tmp_path, "adaptive=qsr", "adaptive.qsr.alpha=0.016", "sync.period=2")
    assert steps == [2, 4, 6, 8, 10, 12, 16, 20, 24]
    assert [(d["step"], d["period"]) for d in decisions(trainer, "qsr")] == [(11, 4), (23, 1)]


def test_qsr_warms_up_with_a_period_of_its_own(tmp_path):
    options = ["adaptive.qsr.alpha=0.016", "adaptive.qsr.warmup_period=1", "schedule.warmup_epochs=1", "sync.period=3"]
    steps, _ = averagings(tmp_path, "adaptive=qsr", *options)
    assert steps == [1, 2, 3, 4, 5, 6, 9, 12, 16, 20, 24]


def test_qsr_does_not_warm_up_where_nothing_rises(tmp_path):
    options = ["adaptive.qsr.alpha=0.016", "adaptive.qsr.warmup_period=1", "schedule.warmup_epochs=1", "sync.period=3"]
    steps, _ = averagings(tmp_path, "adaptive=qsr", *options, "schedule.lr_scaling=none")
    assert steps[:4] == [3, 6, 9, 12]


@pytest.mark.parametrize("phase1", ["gradient", "model"])
def test_qsr_knows_the_first_round_at_the_switch(tmp_path, phase1):
    """Synchronous at 0.08 until step 12, then 0.008, and 0.0008 from step 18 on: H is 4, 400."""
    options = ["adaptive.qsr.alpha=0.016", f"sync.phase1={phase1}", "sync.period=2"]
    steps, _ = averagings(tmp_path, "sync=post_local_sgd", "adaptive=qsr", *options)
    assert [step for step in steps if step > 12] == [16, 20, 24]


def test_adacomm_begins_at_the_switch(tmp_path):
    """Synchronous until step 12, intervals of 3: F_0 is of steps 12 to 15, in which the first period is in force."""
    options = ["adaptive.adacomm.every=3", "sync.period=3", "epochs=6", "schedule.milestones=[2]"]
    steps, trainer = averagings(tmp_path, "sync=post_local_sgd", "adaptive=adacomm", *options)
    made = decisions(trainer, "adacomm")
    assert [d["step"] for d in made][:2] == [14, 17] and made[0]["reason"] == "first loss" and made[0]["period"] == 3
    assert [step for step in steps if step > 12][:2] == [15, 18]


def test_qsr_under_slowmo(tmp_path):
    steps, trainer = averagings(tmp_path, "sync=slowmo", "adaptive=qsr", "adaptive.qsr.alpha=0.016", "sync.period=6")
    assert steps == [6, 12, 18, 24] and trainer.sync.outer_optimizer == "slowmo"


def test_adacomm_decides_by_the_training_loss(tmp_path):
    """Intervals of 6 steps, which are the epochs: their losses are those of the metrics rows."""
    options = ["adaptive.adacomm.every=6", "sync.period=3", *CONSTANT]
    steps, trainer = averagings(tmp_path, "adaptive=adacomm", *options)
    made, rows = decisions(trainer, "adacomm"), trainer.folder.read_metrics()
    assert [d["step"] for d in made] == [5, 11, 17, 23] and made[0]["period"] == 3
    assert [d["loss"] for d in made] == pytest.approx([row["train_loss"] for row in rows], rel=1e-12)
    last, expected = 3, [3, 6]
    for decision in made[1:]:
        root = math.ceil(math.sqrt(decision["loss"] / made[0]["loss"]) * 3)
        assert decision["period"] == (root if root < last else math.ceil(last / 2))
        last = decision["period"]
    for epoch, decision in enumerate(made[:-1], start=1):
        expected += range(6 * epoch + decision["period"], 6 * epoch + 7, decision["period"])
    assert steps == expected


def test_adacomm_costs_eight_bytes_at_an_averaging(tmp_path):
    options = ["sync.period=3", *CONSTANT]
    _, told = averagings(tmp_path / "a", "adaptive=adacomm", "adaptive.adacomm.every=11", *options)
    _, silent = averagings(tmp_path / "b", "adaptive=qsr", "adaptive.qsr.alpha=0", *options)
    control = [t.folder.read_metrics()[0]["control_bytes"] for t in (told, silent)]
    assert control[0] - control[1] == 2 * 8


def test_accordion_sync_is_in_force_from_the_next_averaging_on(tmp_path):
    """Not critical at the end of epoch 1, after 12 steps, in the middle of a round of 5: then rounds of 8."""
    options = {"eta": 1000, "interval": 1, "weak": 5, "strong": 8}
    typed = [f"adaptive.accordion_sync.{key}={value}" for key, value in options.items()]
    steps, trainer = averagings(tmp_path, "adaptive=accordion_sync", *typed, *CONSTANT)
    assert steps == [5, 10, 15, 23]
    assert [row["plan"]["period"] for row in trainer.folder.read_metrics()] == [5, 5, 8, 8]


ARMS = {
    "adacomm": ["adaptive=adacomm", "adaptive.adacomm.every=4", "sync.period=4"],
    "qsr": ["adaptive=qsr", "adaptive.qsr.alpha=0.016", "sync.period=3"],
    "accordion_sync": ["adaptive=accordion_sync", "adaptive.accordion_sync.interval=1"],
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ARMS)
def test_a_resumed_run_decides_the_same(tmp_path, name, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cfg, straight = (start(tmp_path / kind, *ARMS[name]) for kind in ("stopped", "straight"))
    train.run(straight)
    folder = stop(cfg, 14, every=1)
    resume(folder, cfg)
    assert differences(state(folder), state(tiny.only(tmp_path / "straight"))) == []
