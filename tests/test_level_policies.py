"""Policies of levels: decisions on recorded signals, L-GreCo against trying everything, real runs."""

import contextlib
import copy
import functools
import itertools
import math
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

from accordion_bench import checkpoint, config, train
from accordion_bench.adaptive.accordion import Accordion
from accordion_bench.adaptive.accordion_batch import AccordionBatch
from accordion_bench.adaptive.adaqs import AdaQS
from accordion_bench.adaptive.base import tell_followers
from accordion_bench.adaptive.gravac import GraVAC
from accordion_bench.adaptive.level_schedule import LevelSchedule
from accordion_bench.adaptive.lgreco import CELLS, LGreCo, choose, fewest_bytes, total
from accordion_bench.check import ConfigError
from accordion_bench.comm import Comm
from accordion_bench.decisions import Decisions
from accordion_bench.plan import Ladder, Measured, Plan, Run, Signals
from accordion_bench.record import RunFolder
from accordion_bench.schedules.constant import Constant
from accordion_bench.schedules.cosine import Cosine
from accordion_bench.schedules.multistep import MultiStep
from accordion_bench.signals import GradientSums
from accordion_bench.trainer import Trainer
from accordion_bench.validate import without_effect
from tests import tiny
from tests.helpers import SPECS, compressor, exchange_for, gradients, yaml_names
from tests.test_resume import differences, state, without_times

PAIRS = {"rank": (1, 2), "density": (0.1, 0.99), "bits": (3, 8)}


def started(policy, knob, names="ab", run=None):
    """A policy with its plan before the first step, on a ladder of its own."""
    ladder = Ladder(knob, policy.ladder(knob, PAIRS[knob]), PAIRS[knob])
    plan = policy.start(Plan(dict.fromkeys(names, len(ladder.values) - 1), 8), ladder, run or Run())
    return policy, ladder, plan


def values(plan, ladder):
    return [ladder.values[level] for level in plan.levels.values()]


composed = functools.cache(lambda *choices: config.compose(choices))


def components(*overrides):
    """As composed on the command line, but choices of names only once (a tenth of a second each)."""
    options = [override for override in overrides if "." in override.partition("=")[0]]
    cfg = copy.deepcopy(composed(*(override for override in overrides if override not in options)))
    for option in options:
        key, _, value = option.partition("=")
        *path, last = key.split(".")
        functools.reduce(dict.__getitem__, path, cfg)[last] = yaml.safe_load(value)
    return config.components(cfg, workers=4)


def refused(*overrides) -> str:
    with pytest.raises(ConfigError) as caught:
        components(*overrides)
    told = str(caught.value)
    assert "\n" not in told and "; type " in told
    return told


# ---- by the calendar


def by_epoch(knob="rank", epochs=300, schedule=lambda _: 1.0, **options):
    """The level of each epoch, decision by decision."""
    policy, ladder, plan = started(LevelSchedule(**options), knob, run=Run(epochs=epochs, schedule=schedule))
    out = []
    for epoch in range(epochs):
        (level,) = set(values(plan, ladder))
        out.append(level)
        plan = policy.update(Signals(epoch, 0.1, 0.1), plan)
    return out


CRITICAL = [*range(20), *range(150, 170)]


@pytest.mark.parametrize(
    ("inside", "outside", "levels"),
    [
        ("weak", "weak", (2, 2)),
        ("weak", "strong", (2, 1)),
        ("strong", "weak", (1, 2)),
        ("strong", "strong", (1, 1)),
        ("strong", "dense", (1, 1_000_000)),
        (4, 3, (4, 3)),
        (None, None, (2, 1)),
    ],
)
def test_the_arms_of_the_ablation(inside, outside, levels):
    """The level is in force from the first step of an epoch; by default in the paper's 20 + 20 of 300 epochs."""
    expected = [levels[0] if epoch in CRITICAL else levels[1] for epoch in range(300)]
    assert by_epoch(schedule=MultiStep(300, 4), inside=inside, outside=outside) == expected
    assert by_epoch(critical=[[0, 20], [150, 170]], inside=inside, outside=outside) == expected
    ranges = [[0, 20, inside], [20, 150, outside], [150, 170, inside], [170, None, outside]]
    if inside is not None:
        assert by_epoch(ranges=ranges) == expected


def test_the_default_critical_epochs_know_sudden_drops_alone():
    def critical(schedule, epochs=60):
        levels = by_epoch(epochs=epochs, schedule=schedule)
        return [epoch for epoch, level in enumerate(levels) if level == 2]

    assert critical(Cosine(60, 4)) == critical(Constant(60, 4)) == list(range(4))  # a cosine ends in steep epochs
    assert critical(MultiStep(60, 4, milestones=[2])) == list(range(6))  # one range where they overlap
    assert critical(MultiStep(60, 4, milestones=[58])) == [*range(4), 58, 59]
    assert critical(MultiStep(60, 4, gamma=0.8)) == list(range(4))  # no drop to 0.7


def test_words_and_numbers_of_a_density():
    ranges = [[0, 1, "weak"], [1, 3, 0.5], [3, 4, "strong"], [4, 6, "dense"]]
    assert by_epoch("density", 6, ranges=ranges) == [0.99, 0.5, 0.5, 0.1, 1.0, 1.0]
    assert by_epoch("density", 3, critical=[]) == [0.1] * 3
    assert by_epoch("density", 3, critical=[[0, None]]) == [0.99] * 3


def test_a_level_that_the_compressor_refuses_is_named_by_its_own_key(monkeypatch):
    for last, key in ((9, "adaptive.adaqs.cap"), (8, "adaptive.adaqs.initial")):
        monkeypatch.setattr(AdaQS, "ladder", lambda self, knob, pair, last=last: (2 if last == 9 else 1, last))
        with pytest.raises(ConfigError, match=f"^{key} must be an integer from 2 to 8, got "):
            components("adaptive=adaqs", "compressor=qsgd")
    with pytest.raises(ConfigError, match=r"^compressor.p must be so large .*; type compressor.p=0.5$"):
        components("adaptive=schedule", "compressor=qsgd", "compressor.levels=exponential", "compressor.p=0.0001")


SCHEDULE = ["adaptive=schedule", "compressor=powersgd", "epochs=60"]


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("ranges=[[0,20,weak],[30,null,strong]]", r"epoch 20 has none.*type .*ranges=\[\[0,30,weak\],\[30,null,strong"),
        ("ranges=[[0,20,weak],[10,60,strong]]", r"epoch 10 has two.*=\[\[0,10,weak\],\[10,null,strong\]\]"),
        ("ranges=[[0,20,weak],[20,70,strong]]", r"\[20,70,strong\] goes beyond the run.*=\[\[0,20,weak\],\[20,null,"),
        ("ranges=[[0,20,weak],[20,59,strong]]", "gives each of the 60 epochs one level .epoch 59 has none"),
        ("ranges=[[5,null,weak]]", r"epoch 0 has none.*type .*=\[\[0,null,weak\]\]"),
        ("ranges=[[0,60,feeble]]", "ranges must be null or a list of .first epoch, end, level., got"),
        ("ranges=[[0,60,1.5]]", r"ranges must be an integer from 1 .*, as a rank, got 1.5; .*ranges=\[\[0,60,weak\]\]"),
        ("ranges=[]", "ranges must be null or a list"),
        ("critical=[[0,20],[10,30]]", r"epoch 10 has two.*type .*critical=\[\[0,10\],\[10,30\]\]"),
        ("critical=[[0,20],[50,70]]", r"\[50,70\] goes beyond the run.*critical=\[\[0,20\],\[50,null\]\]"),
        ("critical=[[20,10]]", "critical must be null or a list"),
        ("inside=strng", "inside must be one of weak, strong, dense"),
        ("outside=0", "outside must be .* number above 0, got 0"),
    ],
)
def test_refused_schedules(option, told):
    sentence = refused(*SCHEDULE, f"adaptive.schedule.{option}")
    assert sentence.startswith("adaptive.schedule.") and re.search(told, sentence), sentence


def test_a_suggested_schedule_is_accepted():
    """What a refusal says to type is not refused."""
    for option in (
        "ranges=[[3,20,weak],[10,70,1],[65,80,2]]",
        "ranges=[[70,90,weak]]",
        "critical=[[0,20],[10,70]]",
        "critical=[[60,70]]",
    ):
        again = refused(*SCHEDULE, f"adaptive.schedule.{option}").rpartition("; type ")[2]
        components(*SCHEDULE, again)


def test_other_refusals():
    told = refused(*SCHEDULE, "adaptive.schedule.ranges=[[0,null,weak]]", "adaptive.schedule.inside=strong")
    assert "inside must be null where ranges say it" in told
    told = refused("adaptive=schedule", "compressor=qsgd", "adaptive.schedule.outside=dense")
    assert "outside must be made of weak, strong and a number of bits" in told
    assert "an integer from 2 to 8, as a number of bits" in refused(
        "adaptive=schedule", "compressor=qsgd", "adaptive.schedule.outside=9"
    )


# ---- AdaQS-style


def ratios(policy, plan, ladder, history):
    """Bits after each look at a recorded ratio per tensor."""
    out = []
    for epoch, seen in enumerate(history):
        assert policy.needs(epoch) == {"msdr_local"}
        plan = policy.update(Signals(epoch, 0.1, 0.1, {"msdr_local": seen}), plan)
        out.append(values(plan, ladder))
    return out


def test_one_more_bit_when_the_ratio_has_halved():
    policy, ladder, plan = started(AdaQS(interval=1, cap=4), "bits")
    assert values(plan, ladder) == [2, 2]
    a = [8.0, 4.1, 4.0, 3.0, 9.0, 2.0, 1.0, 0.1]  # against 8, 8, 8, then 4, then 2; then the cap
    b = [1.0, math.nan, 2.0, 0.6, math.inf, 0.5, 0.3, 0.25]  # against 1, then 0.5
    found = ratios(policy, plan, ladder, [{"a": x, "b": y, "model": 1.0} for x, y in zip(a, b, strict=True)])
    assert [bits[0] for bits in found] == [2, 2, 3, 3, 3, 4, 4, 4]
    assert [bits[1] for bits in found] == [2, 2, 2, 2, 2, 3, 3, 4]
    assert policy.decision()["msdr"] == [0.1, 0.25] and policy.decision()["raised"] == [False, True]


def test_one_ratio_for_the_whole_model():
    policy, ladder, plan = started(AdaQS(interval=1, scope="model", factor=4, initial=3), "bits")
    seen = [{"a": 1.0, "b": 1.0, "model": model} for model in (1.0, 0.3, 0.25, 0.2, 0.0625)]
    assert ratios(policy, plan, ladder, seen) == [[3, 3], [3, 3], [4, 4], [4, 4], [5, 5]]


def test_the_last_epoch_of_each_interval_is_looked_at():
    policy = AdaQS(interval=3)
    assert [epoch for epoch in range(10) if policy.needs(epoch)] == [2, 5, 8]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["adaptive.adaqs.initial=1"], "adaqs.initial must be an integer from 2 to 8, got 1; type .*initial=2"),
        (["adaptive.adaqs.initial=5", "adaptive.adaqs.cap=4"], "adaqs.cap must be an integer from 5 to 8.*, got 4"),
        (["adaptive.adaqs.cap=9"], "adaqs.cap must be .*, got 9; type adaptive.adaqs.cap=8"),
        (["adaptive.adaqs.factor=1"], "adaqs.factor must be a number above 1, got 1"),
        (["adaptive.adaqs.scope=layer"], "adaqs.scope must be one of tensor, model"),
        (["compressor=powersgd"], "adaptive=adaqs needs a compressor with the knob bits to .*, got .*=powersgd"),
    ],
)
def test_refused_adaqs(options, told):
    assert re.search(told, refused("adaptive=adaqs", "compressor=qsgd", *options))


class TestMeanToDeviation:
    needs = frozenset(["msdr_local", "norm_of_sum_local"])

    def sums(self, workers=4, dtype=torch.float64):
        sums = GradientSums(SPECS, Comm(workers), torch.zeros((), dtype=dtype))
        sums.begin(self.needs)
        return sums

    def test_equals_its_definition_on_worker_0(self):
        steps = [gradients(step=s).tensors for s in range(5)]
        sums = self.sums()
        for xs_W in steps:
            sums.add_gradients(xs_W)
        read, means, spreads = sums.read()["msdr_local"], 0.0, 0.0
        for i, spec in enumerate(SPECS):
            own = torch.stack([xs_W[i][0] for xs_W in steps])
            mean, spread = own.mean(0).square().sum(), own.var(0, unbiased=False).sum()
            assert read[spec.name] == pytest.approx(float((mean / spread).sqrt()), rel=1e-9)
            means, spreads = means + float(mean), spreads + float(spread)
        assert read["model"] == pytest.approx(math.sqrt(means / spreads), rel=1e-9)
        assert set(sums.read()) == set(self.needs)

    def test_without_spread_or_without_gradient_there_is_no_ratio(self):
        sums, zero = self.sums(), self.sums()
        xs_W = [torch.ones(4, *spec.shape, dtype=torch.float64) for spec in SPECS]
        for _ in range(4):
            sums.add_gradients(xs_W)
            zero.add_gradients([x * 0 for x in xs_W])
        assert all(value == math.inf or value > 1e6 for value in sums.read()["msdr_local"].values())
        assert all(math.isnan(value) for value in zero.read()["msdr_local"].values())

    def test_goes_on_bit_for_bit(self):
        steps = [gradients(step=s, dtype=torch.float32).tensors for s in range(6)]
        straight, first, second = (self.sums(dtype=torch.float32) for _ in range(3))
        for xs_W in steps:
            straight.add_gradients(xs_W)
        for xs_W in steps[:4]:
            first.add_gradients(xs_W)
        second.add_state(first.state_dict())
        for xs_W in steps[4:]:
            second.add_gradients(xs_W)
        assert second.read() == straight.read()

    def test_other_processes_collect_nothing(self):
        follower = SimpleNamespace(leader=False, workers=4, local_workers=4)
        sums = GradientSums(SPECS, follower, torch.zeros((), dtype=torch.float64))
        sums.begin(self.needs)
        sums.add_gradients(gradients().tensors)
        assert sums.read() == {} and sums.state_dict() == {}


# ---- GraVAC


def probes(ladder, **gains):
    """What every level would keep: `gains` by density (as d0_1 for 0.1) of norms 1 and 3; bytes = 1000 x density."""

    def one(density, norm):
        kept = gains.get("d" + f"{density:g}".replace(".", "_"), 1.0)
        return Measured(0.0, norm, kept * norm, 1000 * density)

    return {i: {"a": one(d, 1.0), "b": one(d, 3.0)} for i, d in enumerate(ladder.values)}


def densities(policy, plan, ladder, history):
    """Density after each recorded exchange; only what the policy has asked for is shown to it."""
    out = []
    for exchange, gains in enumerate(history):
        asked = {int(name.removeprefix("probe:")) for name in policy.needs_at(exchange)}
        seen = {i: found for i, found in probes(ladder, **gains).items() if i in asked}
        if policy.due(exchange):
            plan = policy.update(Signals(0, 0.1, 0.1, exchange=exchange, probes=seen), plan)
        (density,) = set(values(plan, ladder))
        out.append(density)
    return out


GRAVAC = {"mildest": 0.4, "smallest": 0.1, "smoothing": 1.0, "window": 2, "interval": 3}


def test_the_ladder_of_densities():
    policy = GraVAC()
    assert policy.ladder("density", (0.1, 0.99)) == (*reversed([0.1 * 0.5**i for i in range(10)]), 1.0)
    assert GraVAC(mildest=0.1, smallest=0.001, step=0.1).densities == pytest.approx([0.1, 0.01, 0.001])


def test_current_then_mildest_then_dense():
    policy, ladder, plan = started(GraVAC(**GRAVAC), "density")
    assert ladder.values == (0.1, 0.2, 0.4, 1.0) and values(plan, ladder) == [0.4, 0.4]
    low, good = {"d0_4": 0.5, "d0_2": 0.4}, {"d0_4": 0.9, "d0_2": 0.8}
    between = {"d0_4": 0.75, "d0_2": 0.74}
    # the window keeps the mildest; from then on its gain is too low; 0.2 is the candidate from exchange 6 on
    history = [low, low, good, low, good, good, good, between, low, good]
    expected = [0.4, 1.0, 0.4, 1.0, 0.4, 0.4, 0.2, 0.4, 1.0, 0.2]
    policy.interval = 6
    assert densities(policy, plan, ladder, history) == expected


def test_the_search_goes_on_while_scores_grow_and_keeps_the_smaller_of_two_equal_ones():
    gains = {"d0_4": 0.96, "d0_2": 0.9, "d0_1": 0.8}
    policy, ladder, plan = started(GraVAC(**GRAVAC), "density")
    found = densities(policy, plan, ladder, [gains] * 12)
    assert found == [0.4] * 3 + [0.2] * 3 + [0.1] * 6  # a new candidate is used once it is measured
    assert not policy.searching and policy.scores[0] == pytest.approx(0.96 * 1e9 / (8 * 800))
    # with a second of computation, bytes do not count any more: scores are the gains
    policy, ladder, plan = started(GraVAC(**GRAVAC, compute_seconds=1.0, eps=0.7), "density")
    found = densities(policy, plan, ladder, [{"d0_4": 0.96, "d0_2": 0.93, "d0_1": 0.8}] * 12)
    assert found == [0.4] * 3 + [0.2] * 9 and not policy.searching
    assert policy.scores == pytest.approx({0: 0.96, 1: 0.93}, rel=1e-4)
    # no two alike: the best of all stays
    policy, ladder, plan = started(GraVAC(**GRAVAC, compute_seconds=1.0, eps=0.7), "density")
    found = densities(policy, plan, ladder, [{"d0_4": 0.99, "d0_2": 0.85, "d0_1": 0.75}] * 12)
    assert found == [0.4] * 3 + [0.2] * 3 + [0.1] * 3 + [0.4] * 3 and policy.candidate == 0


def test_a_candidate_that_keeps_too_little_ends_the_search():
    policy, ladder, plan = started(GraVAC(**GRAVAC), "density")
    found = densities(policy, plan, ladder, [{"d0_4": 0.96, "d0_2": 0.9, "d0_1": 0.6}] * 12)
    assert found == [0.4] * 3 + [0.2] * 3 + [0.4] * 3 + [0.2] * 3 and set(policy.scores) == {0, 1}
    # but a mildest density that does is tried again
    policy, ladder, plan = started(GraVAC(**GRAVAC), "density")
    early = [{"d0_4": 0.5}] * 3 + [{"d0_4": 0.9, "d0_2": 0.8, "d0_1": 0.7}] * 6
    assert densities(policy, plan, ladder, early) == [0.4, 1.0, 1.0] + [0.4] * 3 + [0.2] * 3


def test_gain_is_a_ratio_of_smoothed_sums():
    policy, _, plan = started(GraVAC(**{**GRAVAC, "smoothing": 0.25}), "density")
    for exchange, norms in enumerate(((4.0, 2.0), (8.0, 6.0))):
        seen = {2: {"a": Measured(0.0, norms[0], norms[1], 1.0)}}
        policy.update(Signals(0, 0.1, 0.1, exchange=exchange, probes=seen), plan)
    assert policy.gain(0) == (2 + 0.25 * 4) / (4 + 0.25 * 4)


def test_decisions_every_so_many_exchanges():
    policy, ladder, plan = started(GraVAC(**GRAVAC, every=2), "density")
    assert [x for x in range(6) if policy.needs_at(x)] == [x for x in range(6) if policy.due(x)] == [1, 3, 5]
    found = densities(policy, plan, ladder, [{"d0_4": 0.9, "d0_2": 0.8}] * 8)
    assert found == [0.4] * 5 + [0.2] * 3  # scored after exchange 3, measured in exchange 5


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["adaptive.gravac.mildest=1"], "gravac.mildest must be a number above 0 and below 1, got 1"),
        (["adaptive.gravac.smallest=0.2"], "gravac.smallest must be .* at most 0.1, got 0.2; type .*=0.01"),
        (["adaptive.gravac.step=1"], "gravac.step must be a number above 0 and at most 0.9"),
        (["adaptive.gravac.every=0"], "gravac.every must be an integer of at least 1"),
        (["adaptive.gravac.bandwidth=0"], "gravac.bandwidth must be a number above 0"),
        (["compressor=powersgd"], "adaptive=gravac needs a compressor with the knob density to choose from, got"),
        (["adaptive=[accordion,gravac]"], "adaptive must not drive the same thing twice"),
    ],
)
def test_refused_gravac(options, told):
    assert re.search(told, refused("adaptive=gravac", "compressor=topk", *options))


# ---- L-GreCo


def instance(seed, tensors=4, levels=4):
    """Errors that fall and bytes that rise with the level, at random."""
    draw = np.random.default_rng(seed)
    errors = np.sort(draw.exponential(size=(tensors, levels)), axis=1)[:, ::-1].copy()
    return errors, np.sort(draw.integers(1, 1000, size=(tensors, levels)), axis=1).astype(float)


@pytest.mark.parametrize("seed", range(40))
def test_dynamic_programming_equals_trying_everything(seed):
    errors, payload = instance(seed)
    limit = [50, 100, 400, CELLS][seed % 4]
    cells = np.maximum(np.ceil(errors / (errors.max() / limit * 1.5)), 1)
    found = fewest_bytes(cells, payload, limit)
    all_choices = itertools.product(range(4), repeat=4)
    feasible = [c for c in all_choices if total(cells, c) <= limit]
    if not feasible:
        assert found is None
        return
    best = min((total(payload, c), total(cells, c)) for c in feasible)
    assert found is not None and (total(payload, found), total(cells, found)) == best


@pytest.mark.parametrize("seed", range(40))
def test_never_more_bytes_nor_more_error_than_what_is_refined(seed):
    errors, payload = instance(seed, tensors=6)
    refined = np.random.default_rng(seed).integers(0, 4, 6).tolist()
    before = math.inf
    for alpha in (0.25, 1.0, 1.5, 4.0):
        limit = alpha * total(errors, refined)
        found = choose(errors, payload, refined, limit)
        if total(errors, errors.argmin(1)) <= limit * (1 - len(refined) / CELLS):
            assert total(errors, found) <= limit * (1 + 1e-12)
        if alpha >= 1:
            assert total(payload, found) <= total(payload, refined)
            assert total(payload, found) <= before  # more error allowed, never more bytes
            before = total(payload, found)


def test_within_the_cells_of_the_true_optimum():
    """Rounding up costs at most one cell per tensor: it is as good as the exact optimum of a limit less that much."""
    for seed in range(20):
        errors, payload = instance(seed)
        limit = total(errors, [1] * 4)
        found = choose(errors, payload, [1] * 4, limit)
        smaller = limit * (1 - 4 / CELLS)
        exact = min(total(payload, c) for c in itertools.product(range(4), repeat=4) if total(errors, c) <= smaller)
        assert total(payload, found) <= exact


def test_edges_of_the_limit():
    errors, payload = np.array([[2.0, 1.0], [2.0, 1.0]]), np.array([[1.0, 5.0], [2.0, 5.0]])
    assert choose(errors, payload, [1, 1], 1.5) == [1, 1]  # below what the levels can reach
    assert choose(errors, payload, [0, 1], 3.0) == [1, 0] or total(payload, choose(errors, payload, [0, 1], 3.0)) == 6
    assert choose(errors * 0, payload, [1, 0], 0.0) == [1, 0]  # nothing to lose
    # what is refined fills the limit exactly, although rounding would hide it
    third = np.array([[1 / 3, 0.0]] * 3)
    assert choose(third, np.array([[1.0, 9.0]] * 3), [0, 0, 0], total(third, [0, 0, 0])) == [0, 0, 0]


def test_is_fast():
    errors, payload = instance(0, tensors=60, levels=8)
    began = time.perf_counter()
    choose(errors, payload, [4] * 60, total(errors, [4] * 60))
    assert time.perf_counter() - began < 0.3


def measured(ladder, errors):
    """Probes of every level from errors per tensor and level; bytes = 10 x level."""
    return {
        i: {name: Measured(e[i] ** 2, 1.0, 1.0, 10 * ladder.values[i]) for name, e in errors.items()}
        for i in range(len(ladder.values))
    }


ERRORS = {"a": [4.0, 2.0, 1.9, 1.8], "b": [4.0, 3.9, 1.0, 0.5]}  # at ranks 1, 2, 3, 4


def test_uniform_reference_by_hand():
    """Ranks 2, 2 lose 5.9 at 40 bytes; of all pairs within that, (1, 3) and (2, 2) cost 40, and (1, 3) loses 5.0."""
    policy, ladder, plan = started(LGreCo(reference=2, samples=2, every=4), "rank")
    assert ladder.values == (1, 2, 3, 4) and values(plan, ladder) == [2, 2]
    plan = policy.update(Signals(0, 0.1, 0.1, exchange=1, probes=measured(ladder, ERRORS)), plan)
    assert values(plan, ladder) == [1, 3]
    decision = policy.decision()
    assert (decision["error_limit"], decision["error"]) == pytest.approx((5.9, 5.0))
    assert (decision["wire_bytes_before"], decision["wire_bytes"]) == (40, 40)
    assert decision["errors"]["3"] == pytest.approx([1.9, 1.0]) and decision["refined"] == [2, 2]
    # the limit is the reference's, not that of its own decision
    plan = policy.update(Signals(0, 0.1, 0.1, exchange=5, probes=measured(ladder, ERRORS)), plan)
    assert values(plan, ladder) == [1, 3] and policy.decision()["error_limit"] == pytest.approx(5.9)


def test_what_it_asks_for():
    policy, _, _ = started(LGreCo(samples=2, every=5), "rank")
    probing = {f"probe:{i}" for i in range(4)} | {"recent"}
    asked = [policy.needs_at(exchange) for exchange in range(7)]
    assert asked == [{"recent"}, probing, set(), set(), set(), {"recent"}, probing]
    assert [exchange for exchange in range(7) if policy.due(exchange)] == [1, 6]


def refinements(per_epoch, **options):
    """Per epoch the exchanges (counted in it) that refine, and how many exchanges each of them looks at."""
    run = Run(epochs=len(per_epoch), train_size=45 * 8, batch_size=8)
    policy, _, plan = started(LGreCo(**options), "rank", run=run)
    out, done, counted = [], 0, 0
    for epoch, exchanges in enumerate(per_epoch):
        policy.begin_epoch(epoch, done, plan)
        found = []
        for exchange in range(done, done + exchanges):
            counted += "recent" in policy.needs_at(exchange)
            assert policy.due(exchange) == ("probe:0" in policy.needs_at(exchange))
            if policy.due(exchange):
                found.append((exchange - done, counted))
                counted = 0
        out.append(found)
        done += exchanges
    return out


def test_once_per_epoch_however_often_is_exchanged():
    """Exchanges per epoch as with every_step, local_sgd, post_local_sgd, hierarchical; a batch that grows; every=7."""
    assert refinements([45] * 3) == [[(9, 10)]] * 3
    local, _, plan = started(LGreCo(), "rank", run=Run(train_size=45 * 8, batch_size=8))
    local.start(replace(plan, period=8), Ladder("rank", (1, 2, 3, 4), (1, 2)), Run(train_size=45 * 8, batch_size=8))
    assert [exchange for exchange in range(5) if local.due(exchange)] == [4]
    assert refinements([5] * 4) == [[], [(0, 6)], [(4, 5)], [(4, 5)]]
    assert refinements([45, 45, 5, 5, 5]) == [[(9, 10)], [(9, 10)], [], [(0, 6)], [(4, 5)]]
    assert refinements([11, 11, 11]) == [[(9, 10)]] * 3
    assert refinements([45, 6, 6, 6]) == [[(9, 10)], [], [(0, 7)], [(5, 6)]]
    assert refinements([0, 1, 0, 0, 1, 1], samples=3) == [[], [(0, 1)], [], [], [(0, 1)], [(0, 1)]]
    assert refinements([10, 4], samples=2, every=7) == [[(1, 2), (8, 2)], []]


def test_refines_in_every_epoch_of_every_scheme(tmp_path):
    """6 steps per epoch: synchronous, then local from step 12 on; groups that meet every 2 steps; and all processes
    would agree, because `update` has no part in it."""
    common = ["adaptive=lgreco", "compressor=topk", "adaptive.lgreco.samples=2", "epochs=4"]
    schemes = {
        "post": ["sync=post_local_sgd", "sync.switch_step=12", "sync.period=2"],
        "groups": ["sync=hierarchical", "sync.groups=[[2,2],[6,4]]"],
        "seldom": ["sync=local_sgd", "sync.period=6"],
    }
    for name, scheme in schemes.items():
        train.run(tiny.cfg(tmp_path / name, *common, *scheme))
        rows = RunFolder(tiny.only(tmp_path / name)).read_metrics()
        assert [len(row["decisions"]["lgreco"]["updates"]) for row in rows] == [1] * 4, name


@pytest.mark.parametrize(
    ("knob", "options", "ladder"),
    [
        ("rank", {}, (1, 2, 3, 4)),
        ("rank", {"reference": 4}, (2, 3, 4, 5, 6, 7, 8)),
        ("rank", {"reference": 32}, (16, 19, 23, 27, 32, 38, 45, 54, 64)),
        ("rank", {"levels": [8, 1]}, (1, 2, 8)),
        ("density", {}, (0.025, 0.05, 0.1, 0.2, 0.4, 0.8)),
        ("density", {"reference": 0.5}, (0.125, 0.25, 0.5, 1.0)),
        ("density", {"reference": 0.001}, (0.00025, 0.001, 0.004, 0.016, 0.064, 0.256)),
        ("bits", {}, (2, 3, 4, 5, 6, 7, 8)),
    ],
)
def test_levels_to_choose_from(knob, options, ladder):
    assert LGreCo(**options).ladder(knob, PAIRS[knob]) == ladder


def test_on_top_of_accordion_the_limit_is_accordions_error():
    """Through decisions of both: refined levels never become the limit, Accordion's new ones do at once."""
    accordion, lgreco = Accordion(interval=1, min_hold=0), LGreCo(samples=1, every=2)
    both = [accordion, lgreco]
    ladder = Ladder("rank", tuple(sorted({1, 2} | set(lgreco.ladder("rank", (1, 2))))), (1, 2))
    plan = Plan({"a": 3, "b": 3}, 8)
    for policy in both:
        plan = policy.start(plan, ladder, Run())
        tell_followers(both, policy, plan)
    assert values(plan, ladder) == [2, 2]

    def decide(policy, signals):
        nonlocal plan
        before, plan = plan, policy.update(signals, plan)
        if plan is not before:
            tell_followers(both, policy, plan)
        return values(plan, ladder)

    def refine(exchange):
        return decide(lgreco, Signals(0, 0.1, 0.1, exchange=exchange, probes=measured(ladder, ERRORS)))

    def check(epoch, a, b):
        return decide(accordion, Signals(epoch, 0.1, 0.1, {accordion.signal: {"a": a, "b": b}}))

    assert refine(0) == [1, 3] and check(0, 1.0, 1.0) == [1, 3]  # the first check decides nothing
    assert refine(2) == [1, 3] and lgreco.decision()["refined"] == [2, 2]
    assert check(1, 1.0, 0.1) == [1, 2]
    # as cheap as (1, 2), at an error of 6.0 instead of 7.9
    assert refine(4) == [2, 1] and lgreco.decision()["error_limit"] == pytest.approx(7.9)
    # the detector says what the refinement has said already: that is the limit now
    assert check(2, 0.1, 0.1) == [2, 1]
    assert refine(6) == [2, 1] and lgreco.decision()["error_limit"] == pytest.approx(6.0)
    assert check(3, 0.1, 0.1) == [1, 1]
    assert refine(8) == [1, 1] and lgreco.decision()["refined"] == [1, 1]


def test_a_decision_equal_to_the_refined_levels_is_a_decision():
    """The driver may decide exactly what the refinement has made: from then on that is the limit."""
    driver = LevelSchedule(ranges=[[0, 1, 2], [1, 2, 1]])
    lgreco = LGreCo(samples=1, every=1)
    ladder = Ladder("rank", (1, 2, 3, 4), (1, 2))
    plan = driver.start(Plan({"a": 3}, 8), ladder, Run(epochs=2))
    tell_followers([driver, lgreco], driver, plan)
    plan = lgreco.start(plan, ladder, Run(epochs=2))
    alike = {"a": [2.0, 2.0, 2.0, 2.0]}
    plan = lgreco.update(Signals(0, 0.1, 0.1, probes=measured(ladder, alike)), plan)
    assert values(plan, ladder) == [1] and lgreco.decision()["refined"] == [2]
    decided = driver.update(Signals(0, 0.1, 0.1), plan)
    assert decided is not plan and decided == plan
    tell_followers([driver, lgreco], driver, decided)
    lgreco.update(Signals(1, 0.1, 0.1, probes=measured(ladder, alike)), decided)
    assert lgreco.decision()["refined"] == [1]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["adaptive.lgreco.alpha=0"], "lgreco.alpha must be a number above 0, got 0; type adaptive.lgreco.alpha=1"),
        (["adaptive.lgreco.reference=0.5"], "lgreco.reference must be an integer .* as a rank, got 0.5; type .*=2"),
        (["adaptive.lgreco.reference=x"], "lgreco.reference must be null or a number above 0"),
        (["adaptive.lgreco.levels=[1,2.5]"], r"lgreco.levels must be an integer from 1 .*, got 2.5; .*levels=\[1,2\]"),
        (["adaptive.lgreco.levels=[]"], "lgreco.levels must be null or a list of numbers"),
        (["adaptive.lgreco.samples=0"], "lgreco.samples must be an integer of at least 1"),
        (["adaptive.lgreco.every=0"], "lgreco.every must be an integer of at least 1"),
        (["adaptive=[lgreco,accordion]"], r"drive the level; type adaptive=\[accordion,lgreco\]"),
        (["compressor=signsgd"], "adaptive=lgreco needs a compressor with levels"),
    ],
)
def test_refused_lgreco(options, told):
    assert re.search(told, refused("adaptive=lgreco", "compressor=powersgd", *options))


# ---- what they measure

WIRE = {
    "topk": [{"density": d} for d in (0.001, 0.02, 0.3, 1.0)],
    "powersgd": [{"rank": r} for r in (1, 4, 64)],
    "qsgd": [{"bits": b, "collective": c} for b in (2, 4, 8) for c in ("all_gather", "two_way")],
    "demo": [{"k": k} for k in (1, 32, 4096)],
}
SIZED = [name for name in yaml_names("compressor") if compressor(name).compressor.fixed_size]
WIRE = {name: WIRE.get(name, [{}]) for name in SIZED}


@pytest.mark.parametrize("workers", [4, 16])
@pytest.mark.parametrize(("name", "options"), [(name, o) for name, found in WIRE.items() for o in found], ids=str)
def test_wire_bytes_are_the_ledgers(name, options, workers):
    exchange, plan = exchange_for(name, workers, dtype=torch.float32, **options)
    exchange(gradients(workers=workers, dtype=torch.float32).tensors, plan, 0, 0.1)
    levels = zip(exchange.sent, exchange.levels(plan, 0), strict=True)
    said = sum(exchange.compressor.wire_bytes(spec, level, workers) for spec, level in levels)
    assert said * workers == pytest.approx(exchange.comm.ledger.counts["wire"], rel=1e-12)
    if exchange.compressor.knob:
        probed = exchange.measured(gradients(workers=workers, dtype=torch.float32).tensors, 0, plan, 1)
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
        exchange(gradients(step=step).tensors, plan, step, 0.3)
    xs_W = gradients(step=3).tensors
    before = copy.deepcopy(exchange.state)
    fed = exchange.fed(xs_W, plan, 3, lr=0.3)
    direct = exchange.compressor.probe(
        [x_W[:1] for x_W in xs_W], exchange.context(plan, 3, 0.3), exchange._of_first(), 4
    ).measured
    again = exchange.compressor.probe_fed(fed, exchange.context(plan, 3, 1.0), exchange._of_first(), 4).measured
    assert again == direct
    assert [found.norm for found in again] == pytest.approx([float(p.norm()) for p in fed])
    if exchange.compressor.knob:
        assert exchange.measured(fed, 0, plan, 3, fed=True) == exchange.measured(xs_W, 0, plan, 3, 0, 0.3)
    for name_, entries in before.items():
        assert all(torch.equal(value, exchange.state[name_][key]) for key, value in entries.items())


def test_demo_is_fed_its_momentum_and_the_learning_rate():
    exchange, plan = exchange_for("demo", k=4)
    exchange(gradients().tensors, plan, 0, 0.3)
    xs_W = gradients(step=1).tensors
    demo = exchange.compressor
    for spec, x_W, p in zip(SPECS, xs_W, exchange.fed(xs_W, plan, 1, lr=0.3), strict=True):
        d = demo.chunks(spec).inverse(exchange.state[spec.name]["delta_W"][:1]).view(p.shape)
        assert torch.allclose(p, 0.999 * d + 0.3 * x_W[:1])


def test_dgc_is_fed_all_that_it_has_not_sent():
    """Of what it is fed, entries are sent (rounded to float32) or stay as they are."""
    exchange, plan = exchange_for("dgc", density=0.05, warmup_epochs=0)
    exchange(gradients().tensors, plan, 0, 0.3)
    xs_W = gradients(step=1).tensors
    fed = exchange.fed(xs_W, plan, 1)
    exchange(xs_W, plan, 1, 0.3)
    for spec, p in zip(SPECS, fed, strict=True):
        left = exchange.state[spec.name]["v_W"][:1]
        assert bool(((left == p) | (left.abs() <= 1e-6 * p.abs())).all())


def test_a_lone_worker_sends_nothing_and_gains_decide():
    assert GraVAC().throughput({"a": Measured(0.0, 1.0, 1.0, 0.0)}) == 1.0


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
    tell_followers(both, gravac, decided)
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
    train.run(tiny.cfg(tmp_path, "adaptive=[accordion_batch,accordion]", *options, "epochs=5"))
    rows = RunFolder(tiny.only(tmp_path)).read_metrics()
    told = [row["decisions"]["accordion"] for row in rows]
    assert [found["reason"] for found in told] == ["first check", "norm", "other batch size", "norm", "norm"]
    # a ratio of 6 would have been critical in all tensors
    assert all(new < 0.4 * old for old, new in zip(told[2]["norm_before"], told[2]["norm"], strict=True))
    assert told[2]["critical"] is None and rows[3]["plan"]["levels"] == rows[2]["plan"]["levels"]
    assert told[3]["norm_before"] == told[2]["norm"]


def test_a_ratio_of_another_batch_is_not_compared():
    policy, ladder, plan = started(AdaQS(interval=1), "bits", "a")
    seen, found = [(8.0, 6), (1.0, 1), (0.9, 1), (0.5, 1)], []
    for epoch, (ratio, steps) in enumerate(seen):
        signals = Signals(epoch, 0.1, 0.1, {"msdr_local": {"a": ratio, "model": ratio}}, epoch_steps=steps)
        plan = policy.update(signals, plan)
        found += values(plan, ladder)
    assert found == [2, 2, 2, 3]


def test_after_the_switch_of_the_batch_nobody_collects(tmp_path):
    """On all processes alike: what `update` has seen is known to the leader alone, the plan to everybody."""
    leader, follower = AccordionBatch(interval=1, factor=2), AccordionBatch(interval=1, factor=2)
    run = Run(epochs=9, train_size=64, batch_size=4)
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
        config.components(config.compose(["adaptive=accordion_batch", *cfg.values()]), workers=4)
    sentence = str(caught.value)
    assert re.search(told, sentence), sentence
    assert "8 times" not in sentence or not any("large_batch" in o for o in options)
    again = {o.partition("=")[0]: o for o in sentence.rpartition("; type ")[2].split()}
    config.components(config.compose(["adaptive=accordion_batch", *(cfg | again).values()]), workers=4)


FIXED = ["compressor=qsgd", "compressor.levels=[-1,0,1]"]


@pytest.mark.parametrize("policy", ["accordion", "adaqs", "lgreco", "alq"])
@pytest.mark.parametrize("bits", [[], ["compressor.bits=null"]])
def test_fixed_levels_leave_nothing_to_choose(policy, bits):
    typed = [f"adaptive={policy}", *FIXED, *(bits or ["compressor.bits=2"])]
    with pytest.raises(ConfigError, match=r"levels .*; type compressor\.levels=uniform") as caught:
        config.components(config.compose(typed), workers=4)
    again = {o.partition("=")[0]: o for o in str(caught.value).rpartition("; type ")[2].split()}
    merged = {o.partition("=")[0]: o for o in typed} | again
    config.components(config.compose(list(merged.values())), workers=4)


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
        told
        for told in without_effect(config.compose([*overrides, "workers=4"]), typed)
        if told.startswith("adaptive.")
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
    train.run(tiny.cfg(runs, f"checkpoint.every={4 * tiny.STEPS}", *ARMS[arm]))
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


@pytest.mark.parametrize("arm", ARMS)
def test_trains_and_goes_on_bit_for_bit(arm, straight, tmp_path):
    """Levels change; a run that is stopped in mid-epoch and mid-window and continued is the same run."""
    rows = straight(arm).read_metrics()
    used = {level for row in rows for level in row["plan"]["levels"].values()}
    assert len(used) > 1 and all(math.isfinite(row["train_loss"]) for row in rows)
    assert any(row["decisions"] for row in rows)
    cfg = tiny.cfg(tmp_path, f"checkpoint.every={4 * tiny.STEPS}", *ARMS[arm])
    original, stop = Trainer.train_step, 9 if arm == "lgreco local" else 7

    def train_step(self):
        if self.step == stop:
            raise KeyboardInterrupt
        original(self)

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(Trainer, "train_step", train_step)
        train.run({**cfg, "checkpoint": {"every": stop}})
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


def test_only_worker_0_is_asked(straight, tmp_path, monkeypatch):
    """Other workers' gradients may be anything: the probes that decide are those of the first row."""
    expected = {arm: straight(arm).read_metrics() for arm in ("gravac", "lgreco")}
    original, seen = Decisions.look_at, []

    def look_at(self, trainer, exchanges, xs_W, lr):
        poisoned = [[torch.cat([x_W[:1], x_W[1:] * 100 + 7]) for x_W in own] for own in xs_W]
        original(self, trainer, exchanges, poisoned, lr)
        seen.append(trainer.step)

    monkeypatch.setattr(Decisions, "look_at", look_at)
    for arm, rows in expected.items():
        again = trained(tmp_path / arm, arm).read_metrics()
        assert [without_times(row) for row in again] == [without_times(row) for row in rows]
    assert seen == 2 * list(range(4 * tiny.STEPS))


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
        train.run(tiny.cfg(tmp_path / name, *overrides, *processes, "schedule.warmup_epochs=0"))
        rows[name] = RunFolder(tiny.only(tmp_path / name)).read_metrics()
    for one, two in zip(rows["one"], rows["two"], strict=True):
        assert one["plan"] == two["plan"] and one["control_bytes"] == two["control_bytes"]
        assert one["decisions"].keys() == two["decisions"].keys()
