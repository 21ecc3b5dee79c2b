"""Policies of the batch size: decisions on recorded signals, refusals, and runs in which the batch really grows."""

import io
import math
import re

import pytest
import torch

from accordion_bench import train
from accordion_bench.adaptive.accordion import AccordionBatch
from accordion_bench.adaptive.batch_policies import AdaBatch, GrowBatch, NoiseScale, float32, noise_and_signal
from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.worker_axis import Batch, WorkerAxis
from accordion_bench.config.components import build_components
from accordion_bench.options.checks import ConfigError
from accordion_bench.plan import Ladder, Plan, RunFacts, Signals, SquareNorms
from accordion_bench.position import StepInfo
from accordion_bench.run_config import RunConfig
from accordion_bench.runs import checkpoint
from accordion_bench.runs.folder import RunFolder
from accordion_bench.schedules.learning_rate import Cosine, MultiStep
from accordion_bench.signals import policy_runner
from accordion_bench.signals.statistics import square_norms
from accordion_bench.training import progress
from tests.kit import composed, tiny
from tests.kit.helpers import SPECS, exchange_for, gradients
from tests.kit.policies import components
from tests.runs.test_resume import differences, resume, start, state, stop

CIFAR = RunFacts(epochs=300, workers=4, train_size=50_000, batch_size=128)


def batches(policy, run, norm=lambda epoch: 1.0, lr=0.1):
    """(batch, lr factor) of every epoch, and the plan as it travels."""
    plan = policy.start(Plan(batch_size=run.batch_size), Ladder(), run)
    out = []
    for epoch in range(run.epochs):
        out.append((plan.batch_size, plan.lr_factor))
        now, then = (lr * run.schedule(e) * plan.lr_factor for e in (epoch, epoch + 1))
        values = {need: {"a": norm(epoch), "model": norm(epoch)} for need in policy.needs(epoch)}
        plan = policy.update(Signals(epoch, now, then, values), plan)
        assert torch.tensor(plan.pack(), dtype=torch.float32).tolist() == plan.pack()  # nothing is lost on the way
    return out


def spans(rows):
    """[(first epoch, batch, factor), ...] wherever something changes."""
    return [(e, *row) for e, row in enumerate(rows) if e == 0 or row != rows[e - 1]]


@pytest.mark.parametrize(
    "policy",
    [
        *(
            AdaBatch(freq=7, beta=1.7, gamma=1.7),
            AdaBatch(freq=1, beta=1e9, gamma=1e9),
            GrowBatch(),
            GrowBatch(cap=500),
        ),
        *(AccordionBatch(interval=1, eta=9), AccordionBatch(large_batch=333, fixed_switch=20)),
    ],
)
def test_the_batches_to_come_are_known_beforehand(policy):
    run = RunFacts(60, 4, 50_000, 128, Cosine(60, 4) if isinstance(policy, GrowBatch) else MultiStep(60, 4))
    taken = {batch for batch, _ in batches(policy, run)} - {128}
    assert taken and taken == set(policy.later_batches(128)) - {128}


def test_the_noise_scale_may_double_once_per_epoch_within_the_cap():
    policy = NoiseScale()
    for epochs, sizes in ((1, []), (3, [16, 32]), (9, [16, 32, 64])):
        policy.start(Plan(batch_size=8), Ladder(), RunFacts(epochs, 4, 256, 8))
        assert policy.later_batches(8) == sizes and policy.later_batches(100) == []


class TestAccordionBatch:
    def test_the_switch_lands_after_the_first_check_that_does_not_fire(self):
        """The check at 10 fires, the one at 20 does not: large from 21 on, and for good, whatever the schedule does."""
        run = RunFacts(300, 4, 50_000, 128, MultiStep(300, 4))
        rows = batches(AccordionBatch(interval=10, lr_scaling="linear"), run, norm=lambda e: 6.0 if e == 0 else 1.1)
        assert spans(rows) == [(0, 128, 1.0), (21, 1024, 8.0)]

    def test_fixed_switch_of_the_paper_and_its_volume(self):
        rows = batches(AccordionBatch(fixed_switch=20, lr_scaling="linear"), CIFAR)
        assert spans(rows) == [(0, 128, 1.0), (20, 1024, 8.0)]
        # the paper drops the samples that do not fill a step, this sampler keeps them as one step more
        paper = sum(CIFAR.per_worker // batch for batch, _ in rows)
        assert paper == 20 * 97 + 280 * 12 and 11_173_962 * paper == pytest.approx(59.22e9, rel=1e-4)
        assert sum(CIFAR.steps_per_epoch(batch) for batch, _ in rows) == 20 * 98 + 280 * 13

    def test_nothing_is_collected_for_a_fixed_switch(self):
        assert not any(AccordionBatch(fixed_switch=20).needs(e) for e in range(40))
        assert [e for e in range(11) if AccordionBatch().needs(e)] == [0, 5, 10]

    @pytest.mark.parametrize(
        "options, batch, factor",
        [
            ({"lr_scaling": "sqrt"}, 1024, float32(math.sqrt(8))),
            ({"lr_scaling": "none"}, 1024, 1.0),
            ({}, 1024, 1.0),
            ({"factor": 3, "lr_scaling": "linear"}, 384, 3.0),
            ({"large_batch": 12_500, "lr_scaling": "linear"}, 12_500, float32(12_500 / 128)),
        ],
    )
    def test_options(self, options, batch, factor):
        assert spans(batches(AccordionBatch(**options), CIFAR))[1:] == [(6, batch, factor)]

    def test_a_learning_rate_drop_holds_the_switch_back(self):
        """Cut at 8: the check at 10 is held, the one at 15 compares with the norm of 5."""
        run = RunFacts(30, 4, 50_000, 128, MultiStep(30, 1, milestones=[8]))
        norms = {0: 4.0, 5: 1.0, 15: 0.9}
        policy = AccordionBatch()
        assert spans(batches(policy, run, norm=lambda e: norms.get(e, 1.0)))[1:] == [(16, 1024, 1.0)]

    def test_the_decision_says_why(self):
        policy = AccordionBatch(interval=2)
        batches(policy, RunFacts(3, 4, 50_000, 128))
        assert policy.decision() == {
            "norm_before": [1.0], "norm": [1.0], "critical": False, "reason": "norm", "batch_size": 1024,
            "lr_factor": 1.0,
        }  # fmt: skip


def test_after_the_switch_of_the_batch_nobody_collects(tmp_path):
    """On all processes alike: what `update` has seen is known to the leader alone, the plan to everybody."""
    leader, follower = AccordionBatch(interval=1, factor=2), AccordionBatch(interval=1, factor=2)
    run = RunFacts(epochs=9, train_size=64, batch_size=4)
    plan, _ = (policy.start(Plan(batch_size=4), Ladder(), run) for policy in (leader, follower))
    for epoch in range(3):
        for policy in (leader, follower):
            policy.begin_epoch(epoch, 0, plan)
        assert leader.needs(epoch) == follower.needs(epoch) == ({leader.signal} if epoch < 2 else set())
        plan = leader.update(Signals(epoch, 0.1, 0.1, {leader.signal: {"model": 1.0}}), plan)
    assert plan.batch_size == 8 and leader.decision() == {}
    resumed = AccordionBatch(interval=1, factor=2)
    resumed.load_state_dict(leader.state_dict())
    assert resumed.needs(3) == set()


class TestAdaBatch:
    def test_every_freq_epochs(self):
        rows = batches(AdaBatch(), RunFacts(60, 4, 50_000, 32))
        assert spans(rows) == [(0, 32, 1.0), (20, 64, 0.75), (40, 128, 0.5625)]

    def test_capped_at_the_data_where_the_learning_rate_takes_over(self):
        """360 samples per worker: 128 -> 256 -> 360 of 512 wanted -> 360; LR / B goes on falling by 0.375."""
        rows = spans(batches(AdaBatch(freq=1), RunFacts(5, 4, 1437, 128)))
        assert [batch for _, batch, _ in rows] == [128, 256, 360, 360, 360]
        assert rows[2][2] == pytest.approx(0.75**2 * 360 / 512)
        assert [f / b * 128 for _, b, f in rows] == pytest.approx([0.375**k for k in range(5)])

    def test_growth_without_end_ends_at_the_data(self):
        rows = batches(AdaBatch(freq=1, beta=10, gamma=7), RunFacts(2000, 4, 1437, 32))
        assert rows[-1] == (360, 0.0)  # 0.7^2000 is below float32
        assert all(math.isfinite(factor) for _, factor in rows)

    def test_fractions(self):
        rows = spans(batches(AdaBatch(freq=1, beta=1.5, gamma=1.5), RunFacts(4, 4, 50_000, 3)))
        assert [batch for _, batch, _ in rows] == [3, 4, 6, 10]
        assert [factor for _, _, factor in rows] == pytest.approx([1, 4 / 3, 2, 10 / 3])

    def test_the_schedules_own_decay_is_not_doubled(self):
        for decaying in (Cosine(60, 4), MultiStep(60, 4)):
            run = RunFacts(60, 4, 50_000, 32, decaying)
            with pytest.raises(ConfigError, match=r"gamma must be beta=2\.0 .* decay twice, got 0\.75; .*=constant"):
                AdaBatch().start(Plan(), Ladder(), run)
            AdaBatch(gamma=2).start(Plan(), Ladder(), run)


class TestGrowBatch:
    def test_milestones(self):
        """f = 5 at 60, 120, 160 with B 128, 640, 3200, 16,000 over all workers; a tenth of the data is 5,000."""
        schedule = MultiStep(200, 1, milestones=[60, 120, 160], gamma=0.2, warmup_epochs=0)
        run = RunFacts(200, 4, 50_000, 32, schedule)
        rows = batches(GrowBatch(), run)
        assert spans(rows)[:3] == [(0, 32, 1.0), (60, 160, 5.0), (120, 800, 25.0)]
        assert spans(rows)[3] == (160, 1250, float32(1250 / 32))
        rates = [schedule(e) * factor for e, (_, factor) in enumerate(rows)]
        assert rates[:160] == pytest.approx([1.0] * 160)
        assert rates[160:] == pytest.approx([1250 / 4000] * 40)  # the rest of the fourth division
        assert all(f == pytest.approx(b / 32) for b, f in rows)

    def test_slow_decay_is_tracked_as_a_fraction(self):
        """Warm-up changes nothing; then LR / B follows the cosine to the epoch, and B grows by single samples."""
        run = RunFacts(100, 4, 50_000, 32, Cosine(100, 4))
        rows = batches(GrowBatch(cap=640), run)
        assert rows[:6] == [(32, 1.0)] * 6
        for epoch, (batch, factor) in enumerate(rows[6:], 6):
            wanted = 32 * run.schedule(5) / run.schedule(epoch)
            assert batch == min(round(wanted), 640) and factor == float32(batch / 32)
        assert {32, 33, 34, 640} <= {batch for batch, _ in rows} and len(set(rows)) > 50

    def test_continues(self):
        policy = GrowBatch()
        batches(policy, RunFacts(50, 4, 50_000, 32, Cosine(100, 4)))
        other = GrowBatch()
        other.load_state_dict(policy.state_dict())
        assert other.wanted == policy.wanted > 32


class TestNoiseScale:
    G, SIGMA = torch.linspace(-0.5, 1, 24, dtype=torch.float64), torch.linspace(0.1, 9, 24, dtype=torch.float64)

    @pytest.mark.parametrize("workers, b", [(2, 4), (4, 8), (8, 1)])
    def test_estimates_are_unbiased(self, workers, b):
        generator, draws = torch.Generator().manual_seed(7), 20_000
        noise = torch.randn(draws, workers, 24, generator=generator, dtype=torch.float64)
        g_W = self.G + (self.SIGMA / b).sqrt() * noise
        small, big = g_W.square().sum(2).mean(1), g_W.mean(1).square().sum(1)
        estimates = torch.tensor(
            [noise_and_signal(SquareNorms(s, g, b), workers) for s, g in zip(small.tolist(), big.tolist(), strict=True)]
        )
        mean, error = estimates.mean(0), estimates.std(0) / math.sqrt(draws)
        truth = torch.stack([self.SIGMA.sum(), self.G.square().sum()])
        assert bool(((mean - truth).abs() < 4 * error).all()) and bool((error < 0.05 * truth).all())

    @pytest.mark.parametrize("name, bytes_of_the_mean", [("none", 0), ("topk", 8), ("powersgd", 8)])
    def test_measured_in_an_exchange(self, name, bytes_of_the_mean):
        """The same numbers behind every compressor; the mean is paid for where the exchange does not know it."""
        exchange, plan = exchange_for(name)
        g = gradients().tensors
        updates = exchange(g, StepInfo(plan, 0, 1.0))
        found = square_norms(exchange, g, updates, 32)
        rows = torch.cat([x.flatten(1) for x in g], dim=1)
        assert found.small == pytest.approx(float(rows.square().sum(1).mean()))
        assert found.big == pytest.approx(float(rows.mean(0).square().sum()))
        numel = sum(spec.numel for spec in SPECS)  # in float64 here
        assert exchange.comm.ledger.columns()["control_bytes"] == 8 + bytes_of_the_mean * numel

    def policy(self, **options):
        policy = NoiseScale(**options)
        return policy, policy.start(Plan(batch_size=8), Ladder(), RunFacts(9, 4, 256, 8))

    def measure(self, policy, plan, noise, signal, b=8):
        """Hand it the squares that have exactly these estimates."""
        found = SquareNorms(signal + noise / b, signal + noise / (4 * b), b)
        assert noise_and_signal(found, 4) == pytest.approx((noise, signal))
        assert policy.update(Signals(0, 0.1, 0.1, square_norms=found), plan) == plan and not policy.decision()

    def test_doubles_once_per_epoch_up_to_the_cap(self):
        policy, plan = self.policy()  # 64 samples per worker
        seen = []
        for noise in (31.0, 33.0, 1000.0, 1000.0, 1000.0, 0.1):
            policy.noise = policy.signal = policy.weight = 0.0
            self.measure(policy, plan, noise, 1.0)
            plan = policy.update(Signals(0, 0.1, 0.1), plan)
            seen.append((plan.batch_size, plan.lr_factor, policy.decision()["grows"]))
        assert seen == [
            (8, 1, False), (16, 2, True), (32, 4, True), (64, 8, True), (64, 8, True), (64, 8, False)
        ]  # fmt: skip

    def test_averages_are_divided_not_ratios_averaged(self):
        policy, plan = self.policy(ema=0.5)
        self.measure(policy, plan, 10.0, 1.0)
        self.measure(policy, plan, 40.0, 0.2, b=3)  # the last, smaller batch of an epoch
        policy.update(Signals(0, 0.1, 0.1), plan)
        told = policy.decision()
        assert (told["noise"], told["signal"]) == pytest.approx(((10 + 2 * 40) / 3, (1 + 2 * 0.2) / 3))
        assert told["noise_scale"] == pytest.approx(90 / 1.4)

    @pytest.mark.parametrize(
        "noise, signal, batch, scale", [(5.0, -0.1, 16, None), (-1.0, 2.0, 8, -0.5), (-1.0, -1.0, 8, None)]
    )
    def test_estimates_that_are_not_positive(self, noise, signal, batch, scale):
        policy, plan = self.policy()
        self.measure(policy, plan, noise, signal)
        assert policy.update(Signals(0, 0.1, 0.1), plan).batch_size == batch
        assert policy.decision()["noise_scale"] == (scale and pytest.approx(scale))

    def test_threshold_and_nothing_measured(self):
        policy, plan = self.policy(threshold=2.0)
        assert policy.update(Signals(0, 0.1, 0.1), plan) == plan and policy.decision() == {}
        self.measure(policy, plan, 63.0, 1.0)
        assert policy.update(Signals(0, 0.1, 0.1), plan).batch_size == 8
        assert [e for e in range(11) if policy.needs_at(e) and policy.due(e)] == [0, 5, 10]


CAP = ["adaptive.grow_batch.cap=320"]
REFUSED = [
    (["adaptive=accordion_batch", "batch_size=64"], "factor must be at most 5 .* 360 samples.*, got 8; .*factor=5"),
    (["adaptive=accordion_batch", "batch_size=200"], "batch_size must be at most 45 .*, got 200; type batch_size=45"),
    (["adaptive=accordion_batch", "adaptive.accordion_batch.large_batch=361"], "large_batch must .* 360, .*, got 361"),
    (["adaptive=accordion_batch", "adaptive.accordion_batch.large_batch=32"], "above batch_size=32 .*, got 32"),
    (["adaptive=accordion_batch", "adaptive.accordion_batch.fixed_switch=60"], "fixed_switch must .* below 60, .*=4"),
    (["adaptive=adabatch", "schedule=multistep"], "gamma must be beta=2.0 with a schedule that decays"),
    (["adaptive=grow_batch", "batch_size=36"], r"cap must be above .*=36 .*tenth .* 35\), got null; .*cap=360"),
    (["adaptive=grow_batch", "adaptive.grow_batch.cap=361"], "cap must be .* at most 360, .*, got 361; .*cap=360"),
    (["adaptive=grow_batch", "batch_size=360"], "batch_size must be below 360, .*, got 360; type batch_size=18$"),
    (["adaptive=noise_scale", "adaptive.noise_scale.cap=361"], "cap must be .* at most 360, .*, got 361; .*cap=360"),
    (["adaptive=noise_scale", "adaptive.noise_scale.cap=40"], "cap must be at least 64, .*, got 40; .*cap=360"),
    (["adaptive=noise_scale", "batch_size=181"], "batch_size must be at most 180, .* got 181; type batch_size=18$"),
    (["adaptive=adabatch", "batch_size=400"], "batch_size must be below 360, .*, got 400; type batch_size=18$"),
    (["adaptive=grow_batch", *CAP, "schedule=constant"], "needs a schedule that lowers .*; type schedule=multistep$"),
    (["adaptive=grow_batch", *CAP, "schedule.gamma=1"], "needs a schedule that lowers .*; type schedule.gamma=0.1$"),
    (["adaptive=grow_batch", *CAP, "schedule.milestones=[]"], r"lowers .*; type schedule.milestones=\[0.5,0.8333\]$"),
    (["adaptive=grow_batch", *CAP, "schedule=cosine", "schedule.final=1"], "lowers .*; type schedule.final=0$"),
    (["adaptive=noise_scale", "sync=local_sgd"], "noise_scale needs sync=every_step, got sync=local_sgd, .*; type"),
    (["adaptive=noise_scale", "sync=post_local_sgd"], "noise_scale needs sync=every_step, got sync=post_local_sgd"),
    (["adaptive=[adabatch,grow_batch]"], "adabatch and grow_batch, which both drive the batch; type adaptive=grow_b"),
]


@pytest.mark.sample(5)
@pytest.mark.parametrize("overrides, told", REFUSED, ids=[" ".join(o) for o, _ in REFUSED])
def test_refused_before_the_run(overrides, told):
    with pytest.raises(ConfigError, match=told) as refused:
        components(*overrides)
    advice = str(refused.value).rpartition("; type ")[2]
    if overrides[0] != "adaptive=adabatch" or "batch_size" in advice:  # there it is one of two
        typed = {item.partition("=")[0]: item for item in [*overrides, *advice.split()]}
        components(*typed.values())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            ["batch_size=200", "factor=1000"],
            "at most 45 .* enlarge it 8 times.*, got 200; type batch_size=45 .*factor=8",
        ),
        (["batch_size=400", "large_batch=800"], "batch_size must be below 360 .*, got 400; .*=45 .*large_batch=360"),
        (["batch_size=400", "large_batch=100"], "batch_size must be below 360 .*, got 400; type batch_size=45$"),
        (["batch_size=360", "large_batch=360"], "batch_size must be below 360 .*, got 360; type batch_size=45$"),
        (["batch_size=100", "large_batch=100"], "large_batch must be above batch_size=100 .*, got 100; .*=360"),
        (["batch_size=2", "factor=1000"], "factor must be at most 180 .*, got 1000; type .*factor=180"),
    ],
)
def test_refused_large_batches(options, told):
    typed = [o if o.startswith("batch_size") else f"adaptive.accordion_batch.{o}" for o in options]
    cfg = {o.partition("=")[0]: o for o in typed}
    with pytest.raises(ConfigError) as caught:
        components("adaptive=accordion_batch", *cfg.values())
    sentence = str(caught.value)
    assert re.search(told, sentence), sentence
    assert "8 times" not in sentence or not any("large_batch" in o for o in options)
    again = {o.partition("=")[0]: o for o in sentence.rpartition("; type ")[2].split()}
    components("adaptive=accordion_batch", *(cfg | again).values())


def test_one_worker_has_no_noise_to_measure():
    cfg = composed.cfg("adaptive=noise_scale")
    with pytest.raises(ConfigError, match=r"workers must be at least 2 .*, got 1; type workers=2"):
        build_components(RunConfig.from_dict(cfg), workers=1)


@pytest.mark.parametrize("name", ["accordion_batch", "adabatch", "noise_scale"])
def test_the_default_run_is_not_refused(name):
    components(f"adaptive={name}")


# ---- runs of 96 samples, 4 workers, batches of 4 per worker: 6 steps per epoch

ACCORDION = ["adaptive=accordion_batch", "adaptive.accordion_batch.factor=3", "adaptive.accordion_batch.fixed_switch=2"]
ADABATCH = ["adaptive=adabatch", "adaptive.adabatch.freq=1"]
GROW = ["adaptive=grow_batch", "adaptive.grow_batch.cap=20", "schedule.milestones=[1,3]", "schedule.gamma=0.4"]
GROW += ["schedule.warmup_epochs=0"]
STILL = "adaptive.noise_scale.threshold=1e30"
NOISE = ["adaptive=noise_scale", "adaptive.noise_scale.every=4", "adaptive.noise_scale.threshold=0.001"]


def rows_of(runs, *overrides) -> list[dict]:
    train.run(composed.run(runs, *overrides))
    return RunFolder(tiny.only(runs)).read_metrics()


def steps(rows) -> list[int]:
    """Per epoch."""
    ends = [row["step"] for row in rows]
    return [b - a for a, b in zip([0, *ends], ends, strict=False)]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "arm, per_epoch, sizes",
    [
        (ACCORDION, [6, 6, 2, 2], [4, 4, 12, 12]),
        (ADABATCH, [6, 3, 2, 1], [4, 8, 16, 24]),
        (GROW, [6, 3, 3, 2], [4, 10, 10, 20]),
        (NOISE, [6, 3, 2, 2], [4, 8, 16, 16]),
        ([*ACCORDION, "micro_batch_size=5"], [6, 6, 2, 2], [4, 4, 12, 12]),
        ([*ACCORDION, "bn=recompute"], [6, 6, 2, 2], [4, 4, 12, 12]),
        ([*NOISE, "compressor=topk"], [6, 3, 2, 2], [4, 8, 16, 16]),
    ],
)
def test_steps_per_epoch_and_learning_rates(arm, per_epoch, sizes, tmp_path):
    rows = rows_of(tmp_path, *arm)
    assert steps(rows) == per_epoch and [row["plan"]["batch_size"] for row in rows] == sizes
    schedule = build_components(RunConfig.from_dict(composed.run(tmp_path, *arm)), 4).schedule
    rates = [0.02 * schedule(row["epoch"]) * row["plan"]["lr_factor"] for row in rows]
    assert [row["lr"] for row in rows] == pytest.approx(rates)
    assert all(row["decisions"] for row in rows) or arm[0] != NOISE[0]


def test_before_the_switch_nothing_differs(tmp_path):
    """Not even the loss of the epoch at whose end the batch grows."""
    plain, grown = rows_of(tmp_path / "a"), rows_of(tmp_path / "b", *ACCORDION)
    told = ("train_loss", "test_loss", "accuracy", "lr", "step")
    assert [[row[key] for key in told] for row in plain[:2]] == [[row[key] for key in told] for row in grown[:2]]
    assert 0.5 < grown[2]["train_loss"] / plain[2]["train_loss"] < 2


def test_the_live_detector_in_a_run(tmp_path):
    options = [f"adaptive.accordion_batch.{option}" for option in ("interval=1", "eta=1000", "factor=2")]
    rows = rows_of(tmp_path, "adaptive=accordion_batch", *options, "schedule=constant")
    assert steps(rows) == [6, 6, 3, 3]
    assert [row["decisions"]["accordion_batch"]["reason"] for row in rows[:2]] == ["first check", "norm"]
    assert not any("accordion_batch" in row["decisions"] for row in rows[2:])  # after the switch nobody looks


@pytest.mark.sample(2)
@pytest.mark.parametrize("arm", [ADABATCH, GROW, NOISE])
def test_stopped_and_resumed(arm, tmp_path):
    """In the second epoch, with another batch than at the start: bit for bit the run that was not stopped."""
    train.run({**composed.run(tmp_path / "straight", *arm), "checkpoint": tiny.saving(1)})
    cfg = start(tmp_path / "stopped", *arm)
    folder = stop(cfg, 8, every=1)
    saved = torch.load(checkpoint.latest(folder) / "shared.pt", weights_only=True)
    assert saved["plan"]["batch_size"] > 4 and saved["step_in_epoch"] == 2
    resume(folder, {**cfg, "checkpoint": tiny.saving(1)})
    assert differences(state(folder), state(tiny.only(tmp_path / "straight"))) == []


def test_other_policies_see_the_rate_that_is_decided(tmp_path):
    """Where the batch grows instead, the learning rate does not drop, whatever the order of the list."""
    own = ["compressor=powersgd", "adaptive.accordion.interval=1", "adaptive.accordion.eta=9", *GROW[1:]]
    own += ["schedule.milestones=[2]", "adaptive.accordion.lr_drop_ratio=1"]
    rows, swapped = [
        rows_of(tmp_path / order[0], f"adaptive=[{order}]", *own)
        for order in ("grow_batch,accordion", "accordion,grow_batch")
    ]
    assert [row["plan"]["batch_size"] for row in rows] == [4, 4, 10, 10]
    assert rows[1]["decisions"]["accordion"]["reason"] == "norm"
    assert all(a[key] == b[key] for a, b in zip(rows, swapped, strict=True) for key in ("plan", "decisions", "lr"))


def test_local_methods_count_their_period_in_steps(tmp_path):
    """Growing batches make fewer steps, hence fewer averagings: after steps 4, 8 and 12 of 12."""
    rows = rows_of(tmp_path, *ADABATCH, "sync=local_sgd", "sync.period=4")
    assert steps(rows) == [6, 3, 2, 1]
    dense = 4 * RunFolder(tiny.only(tmp_path)).read_json("summary.json")["parameters"]
    assert [row["payload_bytes"] // dense for row in rows] == [1, 2, 2, 3]


def test_nobody_pays_for_what_nobody_needs(tmp_path, monkeypatch):
    """Without the policy no squares are taken; with it, 8 bytes and a plan of 3 numbers per measurement."""
    with monkeypatch.context() as patched:
        patched.setattr(policy_runner, "square_norms", lambda *_: pytest.fail("measured for nobody"))
        still = rows_of(tmp_path / "a", *ADABATCH, "adaptive.adabatch.freq=9")
    measured = rows_of(tmp_path / "b", *NOISE, STILL, "schedule=constant")
    taken = len(range(0, 24, 4))
    assert measured[-1]["control_bytes"] - still[-1]["control_bytes"] == taken * (8 + 4 * 3)
    assert [row["test_loss"] for row in measured] == [row["test_loss"] for row in still]


def test_the_last_batch_of_an_epoch_counts_its_own_samples(tmp_path, monkeypatch):
    seen = []
    original = square_norms
    monkeypatch.setattr(policy_runner, "square_norms", lambda *given: seen.append(given[3]) or original(*given))
    rows_of(tmp_path, *NOISE, "adaptive.noise_scale.every=1", STILL, "batch_size=5", "epochs=2")
    assert seen == [5, 5, 5, 5, 4] * 2


@pytest.mark.slow
def test_two_processes_measure_the_same(tmp_path):
    one = rows_of(tmp_path / "one", *NOISE, "epochs=2")
    two = rows_of(tmp_path / "two", *NOISE, "epochs=2", "comm=gloo", "comm.processes=2")
    assert steps(one) == steps(two) == [6, 3]
    for a, b in zip(one, two, strict=True):
        a, b = a["decisions"]["noise_scale"], b["decisions"]["noise_scale"]
        assert a == pytest.approx(b, rel=1e-4)
    assert one[-1]["control_bytes"] == two[-1]["control_bytes"]


@pytest.mark.parametrize("workers", [1, 2])
def test_micro_batches_add_up_in_the_same_storage(workers):
    net, comm = tiny.Net(3, 10), Comm(workers)
    axis = WorkerAxis(net, comm, seed=0)
    places: list[list[int]] = []

    def losses(micro: int):
        if micro:
            places.append([p.grad.data_ptr() for p in axis.params])
        generator = torch.Generator().manual_seed(micro)
        return net(torch.randn(4, 3, 8, 8, generator=generator)).square().mean()

    for row in range(workers):
        places.clear()
        axis.backward(row, 0, Batch(losses, 5))
        places.append([p.grad.data_ptr() for p in axis.params])
        assert len(places) == 5 and places.count(places[0]) == 5


def test_the_bar_ends_at_the_steps_that_were_taken(tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.setattr("sys.stdout", Terminal())
    totals = []
    original = progress.Progress.step

    def noted(self, *of):
        original(self, *of)
        totals.append((self.bar.total, self.bar.n))

    monkeypatch.setattr(progress.Progress, "step", noted)
    rows_of(tmp_path, *ADABATCH)
    assert [total for total, _ in totals] == [24] * 6 + [6 + 9] * 3 + [9 + 4] * 2 + [12]
    assert totals[-1] == (12, 12)
