"""The volumes of the Accordion paper's tables come out of its presets, and the count behind them."""

import pytest
import torch

from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.ledger import Ledger
from accordion_bench.compressors.description import paper_floats
from accordion_bench.compressors.probe import payload_bytes
from accordion_bench.exchange.dry_exchange import probe_exchange
from accordion_bench.exchange.exchange import Exchange, SendOptions
from accordion_bench.plan import Ladder, Plan, Signals, TensorSpec
from accordion_bench.position import StepInfo
from tests.cli.test_experiments_accordion import (
    FAMILIES,
    cfg_of,
    compressor,
    model_specs,
    paper_arm,
    setup,
)
from tests.kit.composed import parts_of
from tests.kit.helpers import exchange_for, gradients, yaml_names

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
