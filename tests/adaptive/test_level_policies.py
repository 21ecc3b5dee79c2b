"""Policies of levels together: what they measure, side by side, in real runs; each alone has a file of its own."""

import contextlib
import copy
import itertools
import math
from pathlib import Path

import pytest
import torch

from accordion_bench import train
from accordion_bench.adaptive.level_policies import AdaQS, GraVAC
from accordion_bench.adaptive.lgreco import LGreCo
from accordion_bench.adaptive.policy import notify_refiners
from accordion_bench.adaptive.schedule import LevelSchedule
from accordion_bench.compressors.probe import probe, probe_input, wire_bytes
from accordion_bench.exchange.dry_exchange import compressor_input, measure_level, state_of_first
from accordion_bench.options.checks import ConfigError
from accordion_bench.plan import Signals
from accordion_bench.position import StepInfo
from accordion_bench.runs import checkpoint
from accordion_bench.runs.folder import RunFolder
from accordion_bench.signals.policy_runner import PolicyRunner
from accordion_bench.training.trainer import Trainer
from tests.kit import composed, tiny
from tests.kit.helpers import SPECS, compressor, exchange_for, gradients, yaml_names
from tests.kit.policies import ERRORS, GRAVAC, components, measured, probes, started, values
from tests.runs.test_resume import differences, state, without_times

# ---- what they measure

WIRE = {
    "topk": [{"density": d} for d in (0.001, 0.02, 0.3, 1.0)],
    "powersgd": [{"rank": r} for r in (1, 4, 64)],
    "qsgd": [{"bits": b, "collective": c} for b in (2, 4, 8) for c in ("all_gather", "two_way")],
    "demo": [{"k": k} for k in (1, 32, 4096)],
}
SIZED = [name for name in yaml_names("compressor") if compressor(name).compressor.traits.fixed_size]
WIRE = {name: WIRE.get(name, [{}]) for name in SIZED}


@pytest.mark.sample(5)
@pytest.mark.parametrize("workers", [4, 16])
@pytest.mark.parametrize(("name", "options"), [(name, o) for name, found in WIRE.items() for o in found], ids=str)
def test_wire_bytes_are_the_ledgers(name, options, workers):
    exchange, plan = exchange_for(name, workers, dtype=torch.float32, **options)
    turns = exchange.compressor.traits.cycle
    for step in range(turns):
        exchange(gradients(workers=workers, dtype=torch.float32).tensors, StepInfo(plan, step, 0.1))
    levels = zip(exchange.sent, exchange.levels(StepInfo(plan, 0)), strict=True)
    said = sum(wire_bytes(exchange.compressor, spec, level, workers) for spec, level in levels)
    assert said * workers * turns == pytest.approx(exchange.comm.ledger.counts["wire"], rel=1e-12)
    if exchange.compressor.traits.knob:
        probed = measure_level(exchange, gradients(workers=workers, dtype=torch.float32).tensors, 0, StepInfo(plan, 1))
        dense = sum(4 * s.numel for s in exchange.sent if s.name not in probed) * 2 * (workers - 1) / workers
        assert sum(found.wire_bytes for found in probed.values()) + dense == pytest.approx(said)


FED = {
    "topk": {},
    "powersgd": {},
    "qsgd": {"collective": "two_way", "error_feedback": True},
    "demo": {"k": 4},
    "dgc": {"clip": 1.0},
    "distefblocksgd": {},
    "efsignsgd": {},
    "signum": {},
}


@pytest.mark.parametrize("name", FED)
def test_what_is_measured_is_what_would_be_sent(name):
    """With residual, momentum and learning rate, applied once: a mean over one exchange is that exchange."""
    exchange, plan = exchange_for(name, **FED[name])
    for step in range(3):
        exchange(gradients(step=step).tensors, StepInfo(plan, step, 0.3))
    xs_W = gradients(step=3).tensors
    before = copy.deepcopy(exchange.state)
    fed = compressor_input(exchange, xs_W, StepInfo(plan, 3, 0.3))
    direct = probe(
        exchange.compressor,
        [x_W[:1] for x_W in xs_W],
        exchange.context(StepInfo(plan, 3, 0.3)),
        state_of_first(exchange),
        4,
    ).measured
    again = probe_input(
        exchange.compressor, fed, exchange.context(StepInfo(plan, 3, 1.0)), state_of_first(exchange), 4
    ).measured
    assert again == direct
    assert [found.norm for found in again] == pytest.approx([float(p.norm()) for p in fed])
    if exchange.compressor.traits.knob:
        assert measure_level(exchange, fed, 0, StepInfo(plan, 3), is_input=True) == measure_level(
            exchange, xs_W, 0, StepInfo(plan, 3, 0.3, 0)
        )
    for name_, entries in before.items():
        assert all(torch.equal(value, exchange.state[name_][key]) for key, value in entries.items())


def test_demo_is_fed_its_momentum_and_the_learning_rate():
    exchange, plan = exchange_for("demo", k=4)
    exchange(gradients().tensors, StepInfo(plan, 0, 0.3))
    xs_W = gradients(step=1).tensors
    demo = exchange.compressor
    for spec, x_W, p in zip(SPECS, xs_W, compressor_input(exchange, xs_W, StepInfo(plan, 1, 0.3)), strict=True):
        d = demo.chunks(spec).inverse(exchange.state[spec.name]["delta_W"][:1]).view(p.shape)
        assert torch.allclose(p, 0.999 * d + 0.3 * x_W[:1])


def test_dgc_is_fed_all_that_it_has_not_sent():
    """Of what it is fed, entries are sent (rounded to float32) or stay as they are."""
    exchange, plan = exchange_for("dgc", density=0.05, warmup_epochs=0)
    exchange(gradients().tensors, StepInfo(plan, 0, 0.3))
    xs_W = gradients(step=1).tensors
    fed = compressor_input(exchange, xs_W, StepInfo(plan, 1))
    exchange(xs_W, StepInfo(plan, 1, 0.3))
    for spec, p in zip(SPECS, fed, strict=True):
        left = exchange.state[spec.name]["v_W"][:1]
        assert bool(((left == p) | (left.abs() <= 1e-6 * p.abs())).all())


# ---- side by side


def test_gravac_leaves_refined_levels_alone():
    """Its own density has not changed, whatever another policy has made of it since."""
    gravac, ladder, plan = started(GraVAC(**GRAVAC), "density")
    lgreco = LGreCo()
    both = [gravac, lgreco]
    refined = plan.with_levels({"b": 0})
    seen = probes(ladder, d0_4=0.9, d0_2=0.85)
    assert gravac.update(Signals(0, 0.1, 0.1, exchange=0, probes=seen), refined) is refined
    decided = gravac.update(Signals(0, 0.1, 0.1, exchange=1, probes=probes(ladder, d0_4=0.1)), refined)
    assert decided is not refined and values(decided, ladder) == [1.0, 1.0]
    notify_refiners(both, gravac, decided)
    assert lgreco.budget == decided.levels
    other, _, _ = started(GraVAC(**GRAVAC), "density")
    other.load_state_dict(gravac.state_dict())
    refined = decided.with_levels({"a": 0})
    low = probes(ladder, d0_4=0.1)
    assert other.update(Signals(0, 0.1, 0.1, exchange=2, probes=low), refined) is refined


def test_another_batch_is_no_critical_regime(tmp_path):
    """6 steps per epoch, then 1: sums of 6 gradients and of 1 are not compared, neither by levels nor by periods."""
    switch = [f"adaptive.accordion_batch.{o}" for o in ("fixed_switch=2", "factor=6", "lr_scaling=none")]
    options = [f"adaptive.accordion.{o}" for o in ("interval=1", "min_hold=0", "eta=0.6")]
    options += ["compressor=powersgd", "compressor.min_compression_rate=0", "schedule=constant", *switch, *options]
    train.run(composed.run(tmp_path, "adaptive=[accordion_batch,accordion]", *options, "epochs=5"))
    rows = RunFolder(tiny.only(tmp_path)).read_metrics()
    told = [row["decisions"]["accordion"] for row in rows]
    assert [found["reason"] for found in told] == ["first check", "norm", "other batch size", "norm", "norm"]
    # a ratio of 6 would have been critical in all tensors
    assert all(new < 0.4 * old for old, new in zip(told[2]["norm_before"], told[2]["norm"], strict=True))
    assert told[2]["critical"] is None and rows[3]["plan"]["levels"] == rows[2]["plan"]["levels"]
    assert told[3]["norm_before"] == told[2]["norm"]


def test_a_level_that_the_compressor_refuses_is_named_by_its_own_key(monkeypatch):
    for last, key in ((9, "adaptive.adaqs.cap"), (8, "adaptive.adaqs.initial")):
        monkeypatch.setattr(AdaQS, "ladder", lambda self, knob, pair, last=last: (2 if last == 9 else 1, last))
        with pytest.raises(ConfigError, match=f"^{key} must be an integer from 2 to 8, got "):
            components("adaptive=adaqs", "compressor=qsgd")
    with pytest.raises(ConfigError, match=r"^compressor.p must be so large .*; type compressor.p=0.5$"):
        components("adaptive=schedule", "compressor=qsgd", "compressor.levels=exponential", "compressor.p=0.0001")


@pytest.mark.sample(2)
@pytest.mark.parametrize("policy", ["alq", "alqg", "alqn", "amq", "amqn"])
def test_two_bits_with_a_zero_level_leave_nothing_to_fit(policy):
    typed = ["compressor=qsgd", "compressor.bits=2", f"adaptive={policy}"]
    with pytest.raises(ConfigError, match=r"^compressor\.zero_level must be false .*; type compressor") as caught:
        components(*typed)
    assert components(*typed, str(caught.value).rpartition("type ")[2]).codebooks
    chosen = ["adaptive.accordion.strong=2", "adaptive.accordion.weak=3"]  # with 3 bits there is something to fit
    assert set(components(*typed[:2], f"adaptive=[accordion,{policy}]", *chosen).codebooks) == {2, 3}


FIXED = ["compressor=qsgd", "compressor.levels=[-1,0,1]"]


@pytest.mark.parametrize("policy", ["accordion", "adaqs", "lgreco", "alq"])
@pytest.mark.parametrize("bits", [[], ["compressor.bits=null"]])
def test_fixed_levels_leave_nothing_to_choose(policy, bits):
    typed = [f"adaptive={policy}", *FIXED, *(bits or ["compressor.bits=2"])]
    with pytest.raises(ConfigError, match=r"levels .*; type compressor\.levels=uniform") as caught:
        components(*typed)
    again = {o.partition("=")[0]: o for o in str(caught.value).rpartition("; type ")[2].split()}
    merged = {o.partition("=")[0]: o for o in typed} | again
    components(*merged.values())


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["adaptive=adaqs", "compressor=qsgd", "adaptive.adaqs.interval=4", "epochs=8"], "adaptive.adaqs.interval"),
        (["adaptive=accordion_sync", "adaptive.accordion_sync.interval=8", "epochs=8"], "accordion_sync.interval"),
        (["adaptive=accordion_batch", "adaptive.accordion_batch.interval=9", "epochs=8"], "accordion_batch.interval"),
        (["adaptive=adaqs", "compressor=qsgd", "adaptive.adaqs.initial=8"], "adaptive.adaqs.initial"),
        (["adaptive=adaqs", "compressor=qsgd", "adaptive.adaqs.cap=2"], "adaptive.adaqs.cap"),
        (["adaptive=gravac", "compressor=topk", "adaptive.gravac.interval=2000", "epochs=8"], ""),
        (["adaptive=adaqs", "compressor=qsgd", "adaptive.adaqs.interval=3", "epochs=8"], ""),
    ],
)
def test_policies_that_never_decide_warn(overrides, key):
    typed = {o.partition("=")[0] for o in overrides if "." in o.partition("=")[0]}
    found = [
        told for told in composed.warnings(composed.cfg(*overrides, "workers=4"), typed) if told.startswith("adaptive.")
    ]
    assert len(found) == bool(key) and all(key in told for told in found)


# ---- all of them


ARMS = {
    "schedule": ["adaptive=schedule", "compressor=powersgd", "adaptive.schedule.ranges=[[0,1,weak],[1,3,1],[3,4,4]]"],
    "schedule dense": ["adaptive=schedule", "compressor=topk", "adaptive.schedule.outside=dense"],
    "adaqs": ["adaptive=adaqs", "compressor=qsgd", "adaptive.adaqs.interval=1", "adaptive.adaqs.factor=1.02"],
    "gravac": ["adaptive=gravac", "compressor=topk", *(f"adaptive.gravac.{o}" for o in ("interval=5", "window=3"))],
    "lgreco": ["adaptive=lgreco", "compressor=powersgd", "adaptive.lgreco.samples=3"],
    "lgreco bits": ["adaptive=lgreco", "compressor=qsgd", "adaptive.lgreco.samples=3"],
    "lgreco local": ["adaptive=lgreco", "compressor=topk", "sync=local_sgd", "sync.period=2"],
    "accordion lgreco": [
        "adaptive=[accordion,lgreco]",
        "compressor=powersgd",
        *(f"adaptive.accordion.{o}" for o in ("interval=1", "eta=0.2", "min_hold=0")),
        "adaptive.lgreco.samples=2",
    ],
}
ARMS = {arm: [*o, "compressor.min_compression_rate=0"] if "compressor=powersgd" in o else o for arm, o in ARMS.items()}
ARMS["gravac"] += ["adaptive.gravac.mildest=0.4", "adaptive.gravac.eps=0.3"]


def trained(runs: Path, arm: str) -> RunFolder:
    train.run(composed.run(runs, f"checkpoint.every={4 * tiny.STEPS}", *ARMS[arm]))
    return RunFolder(tiny.only(runs))


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Arm -> its run, trained once."""
    kept: dict[str, RunFolder] = {}

    def of(arm: str) -> RunFolder:
        if arm not in kept:
            kept[arm] = trained(tmp_path_factory.mktemp("straight"), arm)
        return kept[arm]

    return of


@pytest.mark.sample(7)
@pytest.mark.parametrize("arm", ARMS)
def test_trains_and_goes_on_bit_for_bit(arm, straight, tmp_path):
    """Levels change; a run that is stopped in mid-epoch and mid-window and continued is the same run."""
    rows = straight(arm).read_metrics()
    used = {level for row in rows for level in row["plan"]["levels"].values()}
    assert len(used) > 1 and all(math.isfinite(row["train_loss"]) for row in rows)
    assert any(row["decisions"] for row in rows)
    cfg = composed.run(tmp_path, f"checkpoint.every={4 * tiny.STEPS}", *ARMS[arm])
    original, stop = Trainer.train_step, 9 if arm == "lgreco local" else 7

    def train_step(self):
        if self.position.step == stop:
            raise KeyboardInterrupt
        original(self)

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(Trainer, "train_step", train_step)
        train.run({**cfg, "checkpoint": tiny.saving(stop)})
    folder = tiny.only(tmp_path)
    saved = torch.load(checkpoint.latest(folder) / "worker-0.pt", weights_only=True)
    assert bool(saved["recent"]) == ("lgreco" in arm)
    assert bool(saved["signals"]) == (arm in ("adaqs", "accordion lgreco"))
    train.run({**cfg, "resume": str(folder)}, {"checkpoint.every": None})
    assert differences(state(folder), state(straight(arm).path)) == []


def test_the_calendar_is_in_force_from_the_first_step(straight):
    levels = [set(row["plan"]["levels"].values()) for row in straight("schedule").read_metrics()]
    assert levels == [{2}, {1}, {1}, {4}]
    payload = [row["payload_bytes"] for row in straight("schedule").read_metrics()]
    steps = [b - a for a, b in itertools.pairwise([0, *payload])]
    assert steps[1] == steps[2] < steps[0] < steps[3]


def test_accordions_decisions_are_what_is_refined(straight):
    rows = straight("accordion lgreco").read_metrics()
    critical, checked = None, 0
    for row in rows:
        (update,) = row["decisions"]["lgreco"]["updates"]
        expected = [1 if critical and not flag else 2 for flag in critical or [True] * len(update["names"])]
        assert update["refined"] == expected
        assert update["wire_bytes"] <= update["wire_bytes_before"]
        assert update["error"] <= update["error_limit"] * (1 + 1e-9)
        found = row["decisions"]["accordion"]["critical"]
        if found is True:
            found = [True] * len(update["names"])
        checked += found is not None
        critical = found or critical
    assert checked >= 2


@pytest.mark.sample(2)
@pytest.mark.parametrize("arm", ["gravac", "lgreco"])
def test_only_worker_0_is_asked(arm, straight, tmp_path, monkeypatch):
    """Other workers' gradients may be anything: the probes that decide are those of the first row."""
    rows = straight(arm).read_metrics()
    original, seen = PolicyRunner.inspect_before, []

    def inspect_before(self, exchanges, xs_W, info):
        poisoned = [[torch.cat([x_W[:1], x_W[1:] * 100 + 7]) for x_W in own] for own in xs_W]
        original(self, exchanges, poisoned, info)
        seen.append(info.step)

    monkeypatch.setattr(PolicyRunner, "inspect_before", inspect_before)
    again = trained(tmp_path / arm, arm).read_metrics()
    assert [without_times(row) for row in again] == [without_times(row) for row in rows]
    assert seen == list(range(4 * tiny.STEPS))


def test_state_round_trips():
    """What a checkpoint keeps is plain, and enough."""
    policies = [
        started(AdaQS(interval=1), "bits"),
        started(GraVAC(**GRAVAC), "density"),
        started(LGreCo(samples=1, every=1), "rank"),
        started(LevelSchedule(), "rank"),
    ]
    for policy, ladder, plan in policies:
        for exchange in range(8):
            seen = Signals(
                exchange,
                0.1,
                0.1,
                {"msdr_local": {"a": 2.0**-exchange, "b": 1.0, "model": 1.0}},
                exchange=exchange,
                probes=measured(ladder, ERRORS) if ladder.knob == "rank" else probes(ladder, d0_4=0.9, d0_2=0.85),
            )
            plan = policy.update(seen, plan)
        other, _, _ = started(type(policy)(**GRAVAC) if isinstance(policy, GraVAC) else type(policy)(), ladder.knob)
        other.load_state_dict(policy.state_dict())
        assert other.state_dict() == policy.state_dict()
        for other_key, value in policy.state_dict().items():
            assert isinstance(value, dict | int | float | bool), other_key


SWITCH = ("interval=1", "eta=9", "factor=2", "statistic=mean")


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["adaptive=accordion_batch", *(f"adaptive.accordion_batch.{o}" for o in SWITCH)],
        ["adaptive=lgreco", "compressor=topk", "sync=post_local_sgd", "sync.switch_step=7", "sync.period=2"],
    ],
    ids=["accordion_batch", "lgreco"],
)
def test_two_processes_ask_for_the_same(overrides, tmp_path):
    """Only the leader decides; all know when to collect and when not, or they would wait for each other for ever."""
    rows = {}
    for name, processes in (("one", ["comm=simulated"]), ("two", ["comm=gloo", "comm.processes=2"])):
        train.run(composed.run(tmp_path / name, *overrides, *processes, "schedule.warmup_epochs=0"))
        rows[name] = RunFolder(tiny.only(tmp_path / name)).read_metrics()
    for one, two in zip(rows["one"], rows["two"], strict=True):
        assert one["plan"] == two["plan"] and one["control_bytes"] == two["control_bytes"]
        assert one["decisions"].keys() == two["decisions"].keys()
