"""The Accordion paper's experiments: presets compose, are coherent at every scale, and have the paper's volumes."""

import functools
import math
from pathlib import Path

import pytest
import torch
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from accordion_bench import train
from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.ledger import Ledger
from accordion_bench.compressors.compressor import Compressor
from accordion_bench.compressors.description import paper_floats
from accordion_bench.compressors.probe import payload_bytes
from accordion_bench.config import validate
from accordion_bench.config.components import build_model
from accordion_bench.config.compose import SCALES, compose, resolve
from accordion_bench.exchange.dry_exchange import probe_exchange
from accordion_bench.exchange.exchange import Exchange, SendOptions
from accordion_bench.optimizers.elementwise import SGDPlusGradient
from accordion_bench.optimizers.inner import without_dynamo
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.instantiate import build
from accordion_bench.plan import Ladder, Plan, Signals, TensorSpec
from accordion_bench.position import StepInfo
from accordion_bench.runs.folder import RunFolder
from tests.kit import composed
from tests.kit.composed import parts_of, swept, unresolved
from tests.kit.helpers import compressor as wrapped
from tests.kit.helpers import exchange_for, gradients, yaml_names, yaml_node
from tests.kit.paths import SHARED

PARTS = ["accordion/base", "accordion/base_images", "accordion/faithful"]
PRESETS = [f"accordion/{name}" for name in yaml_names("experiment/accordion") if f"accordion/{name}" not in PARTS]
FAMILIES = {  # one preset of each family, which has all its arms
    "accordion/table1_senet18": ["powersgd_weak", "powersgd_strong", "accordion_powersgd"],
    "accordion/table3_resnet18": ["topk_weak", "topk_strong", "accordion_topk"],
    "accordion/table5_resnet18": ["batch_large", "accordion_batch"],
    "accordion/fig2_resnet18": ["schedule_critical_weak", "schedule_critical_strong"],
    "accordion/lstm": ["topk_weak", "topk_strong", "accordion_topk"],
}
OFFICIAL = yaml_node("experiment/accordion", "faithful")["setup"]["official"]
TABLES = {
    1: ["resnet18", "vgg19", "senet18"],
    2: ["resnet18", "densenet", "senet18"],
    3: ["resnet18", "googlenet", "senet18"],
    4: ["resnet18", "googlenet", "senet18"],
    5: ["resnet18", "googlenet", "densenet"],
    6: ["resnet18", "googlenet", "densenet"],
}


def compressor(name: str, **options) -> Compressor:
    """A compressor in its wrappers, of a YAML file with some options replaced."""
    return wrapped(name, **options).compressor


@functools.cache
def official(preset: str, arm: str = "") -> DictConfig:
    """The same as if `accordion/faithful` were listed, too."""
    full = unresolved(preset, arm).copy()
    with open_dict(full):
        full.setup = OmegaConf.merge(full.setup, {"faithful": True, "official": OFFICIAL})
    return full


@functools.cache
def cfg_of(preset: str, arm: str = "", at: str = "full", faithful: bool = False) -> dict:
    """The configuration of one cell."""
    full = official(preset, arm) if faithful else unresolved(preset, arm)
    full.scale = at
    return resolve(full, full.hydra.runtime.choices)


def setup(preset: str, at: str = "full") -> DictConfig:
    """What a preset tells its arms."""
    full = unresolved(preset).copy()
    full.scale = at
    return full.setup


def at_path(cfg: dict, path: str):
    return functools.reduce(lambda node, key: node[key], path.split("."), cfg)


def paper_arm(preset: str) -> str:
    """The arm of Accordion itself, or of the ablation's."""
    return swept(preset)["+arm"][-1] if "fig2" not in preset else "schedule_critical_strong"


@functools.cache
def model_specs(preset: str, faithful: bool = True) -> list[TensorSpec]:
    """The tensors of a preset's network, at full scale."""
    cfg = cfg_of(preset, faithful=faithful)
    with torch.device("meta"):
        named = list(build_model(cfg["model"], parts_of(cfg).dataset).named_parameters())
    return [TensorSpec(name, tuple(p.shape)) for name, p in named]


# ---- presets


ROWS = {f"accordion/table{number}_{model}": (number, model) for number, models in TABLES.items() for model in models}


def test_every_row_of_the_tables_is_there():
    assert set(PRESETS) == {*ROWS, "accordion/fig2_resnet18", "accordion/lstm"}


@pytest.mark.sample(5)
@pytest.mark.parametrize("preset", ROWS)
def test_a_row_is_of_its_model_and_data_set(preset):
    (number, model), choices = ROWS[preset], cfg_of(preset)["choices"]
    assert (choices["model"], choices["dataset"]) == (model, "cifar10" if number % 2 else "cifar100")


@pytest.mark.sample(7)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_a_whole_sweep(preset):
    full = unresolved(preset)
    assert full.hydra.mode == RunMode.MULTIRUN and full.setup.experiment == preset
    for at in SCALES:
        params = swept(preset, at)
        assert set(params) - {"+experiment"} == {"+arm", "seed"} and params["seed"][0] == "0"
        assert "dense" in params["+arm"] and set(params["+arm"]) <= set(yaml_names("arm"))
    assert len(swept(preset)["seed"]) == 3 and swept(preset, "tiny")["seed"] == ["0"]


@pytest.mark.sample(7)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_coherent_at_every_scale(preset):
    """Shares of the run stay: cuts, interval, warm-up, batches; and Accordion has norms to compare before a cut."""
    whole = parts_of(cfg_of(preset))
    before = math.inf
    for at in SCALES:
        cfg, told = cfg_of(preset, at=at), setup(preset, at)
        parts = parts_of(cfg)
        interval, cuts = told.interval, parts.schedule.milestones
        checks = [epoch for epoch in range(cuts[0]) if epoch % interval == 0]
        assert len(checks) >= 3 and cfg["epochs"] % interval == 0 and cuts[0] % interval == 0
        for cut, original in zip(cuts, whole.schedule.milestones, strict=True):
            assert cut == round(original / whole.run.epochs * cfg["epochs"])
        assert 0 < cuts[0] < cuts[1] < cfg["epochs"] and parts.schedule.warmup_epochs <= interval
        ratio = cfg["batch_size"] / whole.run.batch_size
        assert cfg["optimizer"]["lr"] == cfg_of(preset)["optimizer"]["lr"] * ratio
        assert parts.run.steps_per_epoch() >= 2
        size = cfg["epochs"] * parts.run.train_size
        assert size < before / 5 and (at == "full" or cfg["dataset"]["limit_eval"])
        before = size
        if "large_batch" in told:
            assert told.large_batch == told.factor * cfg["batch_size"] <= parts.run.per_worker
            assert told.large_lr == told.factor * cfg["optimizer"]["lr"]
            full = official(preset)
            full.scale = at
            assert full.setup.fixed_switch == max(1, round(cfg["epochs"] / 15))
        if "critical" in told:
            policy = build(yaml_node("adaptive", "schedule"), "adaptive.schedule")
            assert policy.default_critical(parts.run) == told.critical


FEW = [(preset, arm) for preset, arms in FAMILIES.items() for arm in ["dense", "dense_fp16", *arms]]
MANY = [(preset, paper_arm) for preset in PRESETS if preset not in FAMILIES]


def check_cell(preset: str, arm: str, monkeypatch) -> None:
    """At tiny with the official code's quirks, too; at the other scales without a model."""
    monkeypatch.setattr(validate, "build_model", small_model)
    for faithful in (False, True):
        cfg = cfg_of(preset, arm, "tiny", faithful)
        composed.validated(cfg)
        names = cfg["choices"]
        assert names["experiment"] == preset + ", faithful" * faithful and names["arm"] == arm
    for at in ("full", "small"):
        parts_of(cfg_of(preset, arm, at))


def small_model(*_) -> torch.nn.Module:
    """In place of the network, which is built once, elsewhere."""
    return torch.nn.Linear(1, 1)


@pytest.mark.sample(7)
@pytest.mark.parametrize("preset, arm", FEW, ids=[f"{preset[10:]}-{arm}" for preset, arm in FEW])
def test_an_arm_is_valid(preset, arm, monkeypatch):
    check_cell(preset, arm, monkeypatch)


@pytest.mark.sample(7)
@pytest.mark.parametrize("preset, arm", MANY, ids=[preset[10:] for preset, _ in MANY])
def test_a_preset_is_valid(preset, arm, monkeypatch):
    check_cell(preset, arm(preset), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_every_cell_is_valid(preset, monkeypatch):
    for arm in swept(preset)["+arm"]:
        check_cell(preset, arm, monkeypatch)


@pytest.mark.parametrize("preset", [*PARTS, "accordion/families/powersgd"])
def test_a_part_is_no_experiment(preset):
    with pytest.raises(ConfigError) as refused:
        compose([f"+experiment={preset}"])
    assert str(refused.value) == (
        f"experiment must be a whole one, got {preset}, a part of others; type +experiment=accordion/table1_resnet18, "
        "or another of docs/experiments.md"
    )


# ---- quirks of the official code


QUIRKS = {  # where each is read: preset, arm, option, our value
    "topk_error_feedback": ("table3_resnet18", "topk_weak", "compressor.error_feedback", True),
    "topk_reduce": ("table3_resnet18", "accordion_topk", "compressor.reduce", "mean"),
    "topk_count": ("lstm", "topk_strong", "compressor.count", "at_least_one"),
    "sharding": ("table3_resnet18", "dense", "dataset.sharding", "reshuffled"),
    "on_switch": ("table1_senet18", "accordion_powersgd", "compressor.on_switch", "keep"),
    "orthonormalisation": ("table1_senet18", "powersgd_weak", "compressor.orthonormalisation", "qr"),
    "eps": ("table1_senet18", "powersgd_strong", "compressor.eps", 1e-8),
    "min_compression_rate": ("table1_senet18", "accordion_powersgd", "compressor.min_compression_rate", 2),
    "residual": ("table1_senet18", "powersgd_weak", "compressor.residual", "local"),
    "lag": ("table5_resnet18", "batch_large", "schedule.lag", False),
    "lr_drop_ratio": ("table1_senet18", "accordion_powersgd", "adaptive.accordion.lr_drop_ratio", 0.5),
    "min_hold": ("table3_resnet18", "accordion_topk", "adaptive.accordion.min_hold", None),
    "fixed_switch": ("table5_resnet18", "accordion_batch", "adaptive.accordion_batch.fixed_switch", None),
    "bn": ("table5_resnet18", "dense", "bn", "pooled"),
    "senet_stage4": ("table1_senet18", "dense", "model.stage4", 512),
    "lm_optimizer": ("lstm", "dense", "optimizer._target_", "torch.optim.SGD"),
    "lm_second_cut": ("lstm", "topk_weak", "schedule.milestones", [0.6667, 0.8889]),
}


def test_every_quirk_is_named_once():
    ours = {key for key, value in yaml_node("experiment/accordion", "base")["setup"].items() if "official" in value}
    assert set(QUIRKS) == set(OFFICIAL) == ours


@pytest.mark.sample(4)
@pytest.mark.parametrize("quirk", QUIRKS)
def test_faithful_changes_it(quirk):
    name, arm, option, ours = QUIRKS[quirk]
    by_scale = {"fixed_switch": 20, "eps": 0.0, "lm_second_cut": [0.6667, 0.8778]}
    official = by_scale.get(quirk, OFFICIAL[quirk])
    assert at_path(cfg_of(f"accordion/{name}", arm), option) == ours != official
    assert at_path(cfg_of(f"accordion/{name}", arm, faithful=True), option) == official


def test_the_same_where_the_paper_and_the_code_agree():
    """Local statistic, threshold 0.5: also where the YAML's defaults would change."""
    accordion = cfg_of("accordion/table1_senet18", "accordion_powersgd", faithful=True)["adaptive"]["accordion"]
    assert (accordion["statistic"], accordion["eta"], accordion["interval"]) == ("local", 0.5, 10)
    assert cfg_of("accordion/lstm", "accordion_topk")["adaptive"]["accordion"]["interval"] == 5


def test_experiments_may_be_listed_in_any_order():
    both = ["accordion/table1_senet18", "accordion/faithful"]
    found = [
        compose([f"+experiment=[{','.join(order)}]", "+arm=accordion_powersgd", "scale=tiny"])
        for order in (both, both[::-1])
    ]
    assert found[0] == found[1]
    expected = cfg_of(both[0], "accordion_powersgd", "tiny", faithful=True)
    assert found[0] == expected and expected["choices"]["experiment"] == "accordion/table1_senet18, faithful"


def rates(preset: str, faithful: bool) -> list[float]:
    """The learning rate of each epoch."""
    cfg = cfg_of(preset, faithful=faithful)
    schedule = parts_of(cfg).schedule
    return [cfg["optimizer"]["lr"] * schedule(epoch) for epoch in range(cfg["epochs"])]


RISE = [(rate, 1) for rate in (0.16, 0.22, 0.28, 0.34)]
LM_RISE = [(rate, 1) for rate in (4, 5.5, 7, 8.5)]


@pytest.mark.parametrize(
    "preset, faithful, spans",
    [
        ("table1_senet18", True, [(0.1, 2), *RISE, (0.4, 146), (0.04, 100), (0.004, 48)]),
        ("table1_senet18", False, [(0.1, 1), *RISE, (0.4, 145), (0.04, 100), (0.004, 50)]),
        ("lstm", True, [(2.5, 2), *LM_RISE, (10, 56), (1, 19), (0.1, 9)]),
        ("lstm", False, [(2.5, 1), *LM_RISE, (10, 55), (1, 20), (0.1, 10)]),
    ],
)
def test_learning_rates(preset, faithful, spans):
    """The official code's rates, off by one twice (cuts at 152 and 252, 62 and 81), and ours: (rate, epochs)."""
    expected = [rate for rate, epochs in spans for _ in range(epochs)]
    assert rates(f"accordion/{preset}", faithful) == pytest.approx(expected)


def test_a_step_with_gradient_and_momentum():
    """v <- 0.9 v + g; x <- x - lr (g + v), against plain numbers, as the trainer builds it."""
    x = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = without_dynamo(SGDPlusGradient)([x], lr=0.1, momentum=0.9, weight_decay=0.01)
    value, v = x.detach().clone(), torch.zeros(2, dtype=torch.float64)
    for step in range(5):
        optimizer.param_groups[0]["lr"] = lr = 0.1 / (step + 1)
        x.grad = torch.tensor([0.3 * step, -1.0], dtype=torch.float64)
        g = x.grad + 0.01 * value
        v = 0.9 * v + g
        value = value - lr * (g + v)
        optimizer.step()
        torch.testing.assert_close(x.detach(), value)
    with pytest.raises(ValueRefused, match="nesterov must be false"):
        SGDPlusGradient([x], nesterov=True, momentum=0.9)


# ---- volumes, without training


def static(preset: str, level: float | None = None) -> dict:
    """A run at one level with the official code's quirks on; dense where there is none."""
    if level is None:
        return cfg_of(preset, faithful=True)
    cfg = cfg_of(preset, paper_arm(preset), faithful=True)
    knob = "density" if "density" in cfg["compressor"] else "rank"
    return {**cfg, "compressor": {**cfg["compressor"], knob: level}, "adaptive": {}}


def floats_per_step(preset: str, level: float | None = None) -> int:
    """What the ledger counts in one step."""
    cfg = static(preset, level)
    parts, specs, comm = parts_of(cfg), model_specs(preset), Comm(cfg["workers"])
    like = torch.zeros((), device="meta")  # residuals of 20 million parameters need no memory then
    sending = SendOptions(**parts.wrapped.for_exchange)
    exchange = Exchange(parts.wrapped.compressor, specs, parts.ladder, comm, like, sending)
    comm.ledger.paper_count(exchange.paper_floats(exchange.levels(StepInfo(parts.plan_for(specs)))))
    return comm.ledger.columns()["paper_floats"]


@pytest.mark.parametrize("preset", ["accordion/table1_senet18", "accordion/table3_resnet18", "accordion/lstm"])
def test_static_arms_are_accordion_s_without_accordion(preset):
    for arm, level in zip(FAMILIES[preset][:2], ("weak", "strong"), strict=True):
        cfg, same = cfg_of(preset, arm, faithful=True), static(preset, setup(preset)[level])
        assert {**cfg, "choices": 0} == {**same, "choices": 0}


@pytest.mark.parametrize(
    "preset, ones, powersgd, topk, dense",
    [
        ("table1_resnet18", 9_610, (45_935, 82_260, 154_910), (262.87, 656.75, 2599.88), 328.51),
        ("table3_googlenet", 23_722, (71_327, 118_932, 214_142), (145.16, 361.88, 1430.97), 181.29),
        ("table2_resnet18", 9_700, (46_115, 82_530, 155_360), (263.95, 659.46, 2610.61), 329.87),
    ],
)
def test_floats_per_step(preset, ones, powersgd, topk, dense):
    """PowerSGD at ranks 1, 2, 4 per step; TopK at 10, 25, 99 % and dense in billions over 300 epochs of 98 steps."""
    specs = model_specs(f"accordion/{preset}")
    assert sum(spec.numel for spec in specs if spec.ndim == 1) == ones
    low, kept = compressor("powersgd"), compressor("topk")
    assert tuple(sum(paper_floats(low, spec, rank, 4) for spec in specs) for rank in (1, 2, 4)) == powersgd
    run = [29_400 * sum(paper_floats(kept, spec, density, 4) for spec in specs) for density in (0.10, 0.25, 0.99)]
    assert [floats / 1e9 for floats in run] == pytest.approx(topk, abs=0.005)
    assert floats_per_step(f"accordion/{preset}") * 29_400 / 1e9 == pytest.approx(dense, abs=0.005)


M, G = 1e6, 1e9
STATIC = {  # volumes of the weak and the strong level as printed, and what they are printed in
    "table1_resnet18": (2418.4, 1350.4, M),
    "table1_vgg19": (6752.0, 2074.9, M),
    "table2_resnet18": (2426.3, 1355.7, M),
    "table2_densenet": (3387.4, 2155.6, M),
    "table2_senet18": (2878.1, 1683.1, M),
    "table3_resnet18": (None, 262.8, G),
    "table3_googlenet": (1430.9, 145.2, G),
    "table3_senet18": (2648.7, 267.9, G),
    "table4_resnet18": (None, 659.4, G),
    "table4_googlenet": (1452.4, 367.3, G),
    "table4_senet18": (2659.5, 671.9, G),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", STATIC)
def test_static_volumes_of_tables_1_to_4(name):
    """Within one unit of the last printed digit: most cells are cut off, some are rounded."""
    (*cells, unit), preset = STATIC[name], f"accordion/{name}"
    for level, printed in zip(("weak", "strong"), cells, strict=True):
        if printed is not None:
            assert floats_per_step(preset, setup(preset)[level]) * 98 * 300 / unit == pytest.approx(printed, abs=0.1)


def test_senet_249():
    """The SENet row of table 1 counts 249 epochs; 300 would be another volume."""
    for level, printed in (("weak", 4361.3), ("strong", 1392.6)):
        floats = floats_per_step("accordion/table1_senet18", setup("accordion/table1_senet18")[level])
        assert floats * 98 * 249 / 1e6 == pytest.approx(printed, abs=0.1)
        assert floats * 98 * 300 / 1e6 > 1.2 * printed


def test_topk99_is_100():
    """What ResNet-18's rows call 99 % is the volume of 100 %."""
    for table, printed, at_99 in ((3, 2626.1, 2599.9), (4, 2636.9, 2610.6)):
        preset = f"accordion/table{table}_resnet18"
        everything = floats_per_step(preset, 1.0)
        assert everything * 98 * 300 / 1e9 == pytest.approx(printed, abs=0.1)
        assert floats_per_step(preset, setup(preset).weak) * 98 * 300 / 1e9 == pytest.approx(at_99, abs=0.1)


def batch_floats(preset: str) -> float:
    """Billions of floats of the Accordion row, batch by batch as the policy decides, without partial batches."""
    cfg = cfg_of(preset, "accordion_batch", faithful=True)
    parts, per_step = parts_of(cfg), floats_per_step(preset)
    (policy,), plan, total = parts.policies.values(), parts.plan_for([]), 0
    for epoch in range(cfg["epochs"]):
        policy.begin_epoch(epoch, 0, plan)
        assert plan.lr_factor == plan.batch_size / cfg["batch_size"]
        total += per_step * (50_000 // 4 // plan.batch_size)
        plan = policy.update(Signals(epoch, 0.1, 0.1), plan)
    return total / 1e9


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "name, steps, small, large, accordion",
    [
        ("table5_resnet18", 98, None, 40.22, 59.22),
        ("table5_googlenet", 98, 181.28, 22.19, 32.68),
        ("table5_densenet", 98, 29.4, 3.6, 5.3),
        ("table6_resnet18", 97, 326.5, 40.39, None),
        ("table6_googlenet", 97, 182.1, 22.5, 33.1),
        ("table6_densenet", 97, 30.126, 3.72, 5.48),
    ],
)
def test_volumes_of_tables_5_and_6(name, steps, small, large, accordion):
    """512 images: 97 or 98 steps per epoch; 4096: 12; Accordion: 20 epochs of 97 and 280 of 12."""
    preset = f"accordion/{name}"
    runs = [
        (small, floats_per_step(preset) * steps * 300 / 1e9),
        (large, floats_per_step(preset) * 12 * 300 / 1e9),
        (accordion, batch_floats(preset)),
    ]
    for printed, floats in runs:
        if printed is not None:
            digits = len(str(printed).partition(".")[2])
            assert floats == pytest.approx(printed, abs=10.0**-digits)


def test_swap_54_96():
    """54.96 contradicts the ratio of 5.5 printed beside it; the schedule of the other rows gives 59.47."""
    assert batch_floats("accordion/table6_resnet18") == pytest.approx(59.467, abs=1e-3)
    ratios = [326.5 / 54.96, 326.5 / 59.467]
    assert ratios == pytest.approx([5.9, 5.5], abs=0.05)


def test_c100_in_c10():
    """ResNet-18's volume in table 5 is that of CIFAR-100."""
    ten, hundred = (floats_per_step(f"accordion/table{t}_resnet18") * 300 / 1e9 for t in (5, 6))
    assert 97 * hundred == pytest.approx(326.5, abs=0.1)
    assert (97 * ten, 98 * ten) == pytest.approx((325.16, 328.51), abs=0.01)


def test_volume_of_figure_2():
    """Rank 1 in 40 critical epochs, dense in the other 260: about 2.85e11 floats, as read off the figure."""
    cfg = cfg_of("accordion/fig2_resnet18", "schedule_critical_strong", faithful=True)
    specs, parts = model_specs("accordion/fig2_resnet18"), parts_of(cfg)
    (policy,), plan, total = parts.policies.values(), parts.plan_for(specs), 0
    like = torch.zeros((), device="meta")
    exchange = Exchange(parts.wrapped.compressor, specs, parts.ladder, Comm(4), like)
    for epoch in range(300):
        levels = exchange.levels(StepInfo(plan, 0))
        total += 98 * exchange.paper_floats(levels)
        critical = epoch < 20 or 150 <= epoch < 170
        dense = sum(4 * spec.numel for spec in specs)
        assert (exchange.predicted_bytes(StepInfo(plan, 0)) < dense / 200) is critical
        assert critical or exchange.predicted_bytes(StepInfo(plan, 0)) == dense  # full rank is sent as it is
        plan = policy.update(Signals(epoch, 0.1, 0.1), plan)
    assert total == 98 * (40 * 46_115 + 260 * 11_220_132) and total == pytest.approx(2.85e11, rel=0.01)


# ---- volumes, in training

QUICK = ["model=resnet8", "dataset=synthetic", "dataset.size=8", "scale=tiny", "comm=simulated", "hydra.mode=RUN"]


def trained(runs: Path, preset: str, arm: str, *overrides: str) -> RunFolder:
    """A run of a second or two."""
    known = {path for path in runs.glob("2*")} if runs.exists() else set()
    cfg = compose([f"+experiment={preset}", f"+arm={arm}", f"paths.runs={runs}", *QUICK, *overrides])
    train.run(cfg)
    (folder,) = set(runs.glob("2*")) - known
    return RunFolder(folder)


@pytest.mark.parametrize("arms", [("powersgd_strong", "accordion_powersgd"), pytest.param((), marks=pytest.mark.slow)])
def test_a_preset_trains(tmp_path, arms):
    """Arms of table 1, () = all, with a small network; paper_floats is the formula, summed over the levels in force."""
    preset = "accordion/table1_resnet18"
    count, floats = functools.partial(paper_floats, compressor("powersgd")), {}
    for arm in arms or swept(preset, "tiny")["+arm"]:
        folder = trained(tmp_path, preset, arm)
        rows, summary = folder.read_metrics(), folder.read_json("summary.json")
        specs = resnet8_specs()
        assert len(rows) == 6 and summary["steps"] == 12
        floats[arm] = summary["paper_floats"]
        levels = {"powersgd_weak": 2, "powersgd_strong": 1}
        if arm in ("dense", "dense_fp16"):  # numbers are counted, not bits
            assert floats[arm] == 12 * summary["parameters"] == 12 * sum(spec.numel for spec in specs)
        elif arm in levels:
            assert floats[arm] == 12 * sum(count(spec, levels[arm], 4) for spec in specs)
        else:
            in_force = [row["plan"]["levels"] for row in rows]
            assert floats[arm] == 2 * sum(count(spec, rank.get(spec.name), 4) for rank in in_force for spec in specs)
    assert floats["powersgd_strong"] < floats["accordion_powersgd"]
    assert arms or floats["accordion_powersgd"] <= floats["powersgd_weak"] < floats["dense"]


@functools.cache
def resnet8_specs() -> list[TensorSpec]:
    named = build(yaml_node("model", "resnet8"), "model", in_channels=3, num_classes=10).named_parameters()
    return [TensorSpec(name, tuple(p.shape)) for name, p in named]


def test_topk_and_batches_train(tmp_path):
    folder = trained(tmp_path, "accordion/table4_resnet18", "topk_strong")
    kept = functools.partial(paper_floats, compressor("topk"))
    assert folder.read_json("summary.json")["paper_floats"] == 12 * sum(kept(s, 0.25, 4) for s in resnet8_specs())
    faithful = "+experiment=[accordion/table5_resnet18,accordion/faithful]"
    cfg = compose([faithful, "+arm=accordion_batch", f"paths.runs={tmp_path / 'batch'}", *QUICK])
    train.run(cfg)
    (found,) = (tmp_path / "batch").glob("2*")
    rows = RunFolder(found).read_metrics()
    assert [row["plan"]["batch_size"] for row in rows] == [2, 4, 4, 4, 4, 4] and rows[-1]["step"] == 7
    assert rows[-1]["paper_floats"] == 7 * sum(spec.numel for spec in resnet8_specs())


def test_the_language_model_trains(tmp_path):
    small = ["dataset=synthetic_text", "dataset.subset=1000", "comm=simulated", f"paths.runs={tmp_path}"]
    train.run(compose(["+experiment=accordion/lstm", "+arm=accordion_topk", "scale=tiny", *small]))
    (found,) = tmp_path.glob("2*")
    summary = RunFolder(found).read_json("summary.json")
    assert summary["metric_name"] == "perplexity" and summary["metric"] == summary["valid_perplexity"]
    assert summary["test_perplexity"] != summary["valid_perplexity"] and summary["paper_floats"] > 0


# ---- the count itself


def test_the_count_is_the_paper_s_whatever_is_sent():
    """Small matrices go dense, indices are packed, 16 workers' TopK falls back to dense: the count does not know."""
    spec = TensorSpec("w", (4, 64))
    low = compressor("powersgd")
    assert (
        paper_floats(low, spec, 4, 4) == (4 + 64) * 4 > spec.numel and payload_bytes(low, spec, 4, 4) == 4 * spec.numel
    )
    assert paper_floats(low, spec, 1_000_000, 4) == paper_floats(low, spec, None, 4) == spec.numel
    assert paper_floats(low, TensorSpec("b", (7,)), 1, 4) == 7
    kept = compressor("topk")
    assert paper_floats(kept, spec, 0.1, 16) == 2 * 25 * 16 and paper_floats(kept, spec, 0.001, 4) == 0
    for name in yaml_names("compressor"):
        counted = paper_floats(compressor(name), spec, compressor(name).level or 1, 4)
        assert (counted is None) is (name not in ("none", "fp16", "bf16", "powersgd", "topk"))
        assert paper_floats(compressor(name), spec, None, 4) == spec.numel  # dense, before its start


def test_the_count_passes_through_wrappers():
    specs = [TensorSpec("w", (6, 9)), TensorSpec("b", (6,))]
    bare = compressor("topk", error_feedback=False)
    for options in ({"error_feedback": True}, {"collective": "two_way"}):
        around = compressor("topk", **options)
        assert type(around) is not type(bare)
        assert [paper_floats(around, s, 0.5, 4) for s in specs] == [paper_floats(bare, s, 0.5, 4) for s in specs]


def test_one_exchange_is_counted_once():
    exchange, plan = exchange_for("powersgd", level=1)
    once = sum(paper_floats(compressor("powersgd"), s, 1 if s.name in plan.levels else None, 4) for s in exchange.specs)
    for step in range(3):
        exchange(gradients(step=step).tensors, StepInfo(plan, step, 0.1))
        probe_exchange(exchange, gradients().tensors, StepInfo(plan, step))
        assert exchange.comm.ledger.columns()["paper_floats"] == (step + 1) * once
    exchange.ladder = Ladder("rank", (2,))  # another plan, another count
    exchange(gradients().tensors, StepInfo(Plan(plan.levels, 1), 3, 0.1))
    assert exchange.comm.ledger.columns()["paper_floats"] > 4 * once


def test_one_exchange_without_a_count_leaves_none():
    ledger = Ledger(4)
    assert ledger.columns()["paper_floats"] == 0
    ledger.paper_count(5)
    ledger.paper_count(None)
    ledger.paper_count(7)
    assert ledger.columns()["paper_floats"] is None


def test_groups_side_by_side_count_as_one_worker():
    ledger, inner = Ledger(8), [Ledger(4), Ledger(4)]
    for group in inner:
        group.paper_count(10)
    ledger.absorb(inner)
    assert ledger.columns()["paper_floats"] == 10 and inner[0].counts["paper_floats"] == 0
    inner[0].paper_count(None)
    inner[1].paper_count(None)
    ledger.absorb(inner)
    assert ledger.columns()["paper_floats"] is None


# ---- minutes


@pytest.mark.slow
@pytest.mark.skipif(not (SHARED / "cifar-10-batches-py").is_dir(), reason="no CIFAR-10 beside the checkout")
def test_table_1_trains_on_real_images(tmp_path):
    """ResNet-18 on CIFAR-10 at scale=tiny, all arms, from the command line that docs/experiments.md gives."""
    import subprocess
    import sys

    command = [sys.executable, "-m", "accordion_bench", "+experiment=accordion/table1_resnet18", "scale=tiny"]
    done = subprocess.run([*command, f"paths.data={SHARED}", f"paths.runs={tmp_path}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = {}
    for path in tmp_path.glob("2*"):
        folder = RunFolder(path)
        summary = folder.read_json("summary.json")
        assert summary["steps"] == 12 and summary["parameters"] == 11_173_962
        found[folder.read_config()["choices"]["arm"]] = summary["paper_floats"]
    assert found["dense"] == found["dense_fp16"] == 12 * 11_173_962
    assert (found["powersgd_strong"], found["powersgd_weak"]) == (12 * 45_935, 12 * 82_260)
    assert 12 * 45_935 <= found["accordion_powersgd"] <= 12 * 82_260
