"""The Accordion paper's experiments: presets compose, are coherent at every scale, and train."""

import functools
import math
from pathlib import Path

import pytest
import torch
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from accordion_bench import train
from accordion_bench.compressors.compressor import Compressor
from accordion_bench.compressors.description import paper_floats
from accordion_bench.config import validate
from accordion_bench.config.components import build_model
from accordion_bench.config.compose import SCALES, compose, resolve
from accordion_bench.optimizers.elementwise import SGDPlusGradient
from accordion_bench.optimizers.inner import without_dynamo
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.instantiate import build
from accordion_bench.plan import TensorSpec
from accordion_bench.runs.folder import RunFolder
from tests.kit import composed
from tests.kit.composed import parts_of, swept, unresolved
from tests.kit.helpers import compressor as wrapped
from tests.kit.helpers import yaml_names, yaml_node
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
