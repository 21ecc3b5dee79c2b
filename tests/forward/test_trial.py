"""Trials before a run: how much a step computes, and whether this processor can."""

import math
import time

import pytest
import torch
from torch import nn

from accordion_bench.config.validate import options_without_effect
from accordion_bench.datasets.dataset import Dataset
from accordion_bench.datasets.images import Digits
from accordion_bench.datasets.text import SyntheticText
from accordion_bench.forward import trial
from accordion_bench.forward.trial import Slowdown
from accordion_bench.models.lstm import LSTM
from accordion_bench.options.checks import ConfigError
from accordion_bench.run_config import RunConfig
from tests.kit import composed


def test_work_is_counted():
    """A linear layer takes 2 operations per weight and sample forward, twice as many backward."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    assert trial.flops_per_kernel(model, Digits(), batch_size=32) == 3 * 32 * 2 * 64 * 10 / 2


class Half(nn.Linear):
    """A layer that this processor has not in 16 bits."""

    def forward(self, x):
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("could not create a primitive\nat some place")
        return super().forward(x)


def test_what_the_processor_cannot_do_is_refused_in_one_sentence():
    model = nn.Sequential(nn.Flatten(), Half(64, 10))
    told = "precision must be float32 for model=mine on this processor, which has failed in bfloat16 .could not create "
    told += "a primitive., got bfloat16; type precision=float32$"
    with pytest.raises(ConfigError, match=told):
        trial.slowdown(model, Digits(), "bfloat16", "mine")


def test_a_language_model_is_tried_as_it_is_trained():
    """Where oneDNN has a bfloat16 LSTM, the trial gives a ratio; without AVX-512 it has none."""
    data = SyntheticText()
    model = LSTM(data.vocabulary, hidden=16, layers=1)
    try:
        found = trial.slowdown(model, data, "bfloat16")
        assert found is not None and found.times > 0
    except ConfigError as refused:
        assert "primitive" in str(refused)


SLOWER = "precision=bfloat16 is slower here: a trial step of two samples "
UNKNOWN = "precision=bfloat16 may be slower here than float32: a trial step of two samples takes more than 3 s even in "
TOLD = [
    (Slowdown(14.0), f"{SLOWER}has taken 14 times as long as one in float32"),
    (Slowdown(2.1, False, 6.4), f"{SLOWER}was stopped after 6.4 s, 2.1 times as long as one in float32 takes"),
    (Slowdown(0.0, False, 3.1), f"{UNKNOWN}float32, so that they are not compared"),
    (Slowdown(1.0), ""),
    (Slowdown(0.5), ""),
    (None, ""),
]


@pytest.mark.parametrize(("slowdown", "told"), TOLD)
def test_16_bits_that_cost_time_are_told(tmp_path, monkeypatch, slowdown, told):
    monkeypatch.setattr(trial, "slowdown", lambda *args: slowdown)
    cfg = composed.run(tmp_path, "precision=bfloat16")
    parts = composed.validated(cfg)
    warnings = [said for said in options_without_effect(RunConfig.from_dict(cfg), set(), parts) if "precision" in said]
    assert warnings == [told] * bool(told)


class Slow(nn.Linear):
    """A layer that takes longer in some precision: in front of its product, or in the backward pass."""

    def __init__(self, size: int, seconds: dict[bool, float], backward: bool = False) -> None:
        super().__init__(size, size)
        self.seconds, self.backward = seconds, backward

    def forward(self, x):
        seconds = self.seconds[torch.is_autocast_enabled("cpu")]
        if self.backward and x.requires_grad:
            x.register_hook(lambda gradient: time.sleep(seconds))
        elif not self.backward:
            time.sleep(seconds)
        return super().forward(x)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    "usual, half, known, whole", [(0.001, 0.2, True, False), (0.001, 0.001, True, True), (0.2, 0.2, False, False)]
)
def test_a_trial_is_given_up(monkeypatch, backward, usual, half, known, whole):
    """Ten layers, of which each is looked at; what is told of one that was given up is true of a whole one."""
    monkeypatch.setattr(trial, "PATIENCE", 0.5)
    layers = [Slow(64, {False: usual, True: half}, backward) for _ in range(10)]
    model = nn.Sequential(nn.Flatten(), *layers, nn.Linear(64, 10))
    began = time.perf_counter()
    found = trial.slowdown(model, Digits(), "bfloat16")
    assert time.perf_counter() - began < 4 * 0.5 + 2
    assert found is not None and found.whole == whole and (found.times > 0) == known
    if known and not whole:
        assert found.times < 10 * half / (10 * usual) and found.times >= 2
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not any(param._backward_hooks for param in model.parameters())


class Bare(Digits):
    """A data set of one's own that says nothing of its shapes."""

    example = Dataset.example


def test_a_data_set_without_an_example_is_not_tried():
    model = nn.Sequential(nn.Flatten(), Half(64, 10))
    assert trial.flops_per_kernel(model, Bare(), 32) == math.inf
    assert trial.slowdown(model, Bare(), "bfloat16") is None


def test_a_model_that_fails_anyway_is_no_matter_of_precision():
    with pytest.raises(RuntimeError, match="shapes"):
        trial.slowdown(nn.Sequential(nn.Flatten(), nn.Linear(65, 10)), Digits(), "bfloat16")


def test_float32_is_not_tried(tmp_path):
    assert composed.validated(composed.run(tmp_path)).slowdown is None


SMALL = ["model=resnet8", "dataset=synthetic", "dataset.train_size=60", "workers=4", "device=cpu"]


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (["batch_size=1"], r"batch_size must be .*\(15 per worker\), BatchNorm .* two, got 1; type batch_size=3"),
        (["batch_size=7"], "batch_size must be .* got 7; type batch_size=8"),
        (["dataset.train_size=4", "batch_size=1"], "workers must be at most 2, .* two .* got 4; type workers=2$"),
        (["batch_size=8", "micro_batch_size=2"], "micro_batch_size must .* 7 or 8, .* got 2; .* micro_batch_size=null"),
    ],
)
def test_one_sample_is_refused_where_batch_norm_needs_two(typed, told):
    """The last maps of ResNet-8 are 1 x 1 where images are 4 x 4."""
    with pytest.raises(ConfigError, match=told):
        composed.validated(composed.cfg(*SMALL, "dataset.size=4", *typed))


GROWING = {
    "adabatch": (["batch_size=3", "adaptive.adabatch.freq=1", "adaptive.adabatch.beta=1.5"], "type batch_size=6"),
    "accordion_batch": (["batch_size=3", "adaptive.accordion_batch.large_batch=4"], "type adaptive=none"),
    "grow_batch": (
        ["batch_size=3", "adaptive.grow_batch.cap=9", "schedule.gamma=0.75", "schedule.warmup_epochs=0"],
        "type batch_size=5",
    ),
    "noise_scale": (["batch_size=5", "micro_batch_size=3"], "type batch_size=6"),
}


@pytest.mark.parametrize("policy", GROWING)
def test_a_batch_that_may_grow_to_one_that_leaves_one_sample_is_refused(policy):
    """17 samples per worker, of which a batch of 4 leaves one; 10 leave one by three."""
    typed, instead = GROWING[policy]
    constant = ["schedule=constant"] * (policy == "adabatch")
    options = [*SMALL, "dataset.train_size=68", f"adaptive={policy}", *constant, *typed]
    told = rf"^batch_size must be a number that grows to none .* \((4|10) does, with 17 per worker\).*; {instead}$"
    with pytest.raises(ConfigError, match=told):
        composed.validated(composed.cfg(*options, "dataset.size=4", "epochs=4"))
    composed.validated(composed.cfg(*options, "dataset.size=8", "epochs=4"))


@pytest.mark.parametrize("typed", [["dataset.size=4", "batch_size=8"], ["dataset.size=8", "batch_size=1"]])
def test_one_sample_is_no_fault_elsewhere(typed):
    composed.validated(composed.cfg(*SMALL, *typed))
