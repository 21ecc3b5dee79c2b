"""A run that ends where a guess would, or above its start, says so; one that has learned does not."""

import json

import pytest

from accordion_bench import train
from accordion_bench.runs.metrics import metric, not_learned
from tests.kit import tiny

ACCURACY, PERPLEXITY = metric("accuracy"), metric("perplexity")


@pytest.mark.parametrize("value, told", [(0.05, True), (0.1, True), (0.13, True), (0.14, False), (0.9, False)])
def test_accuracy_within_the_noise_of_chance(value, told):
    """Ten classes, 360 samples: two standard errors are 3.2 points."""
    said = not_learned(ACCURACY, value, [2.3, 2.2], 0.1, 360)
    assert (said is not None) == told
    assert not told or "that of a guess (10.00 %)" in str(said)


@pytest.mark.parametrize("value, told", [(200.0, True), (500.0, True), (199.0, False)])
def test_perplexity_of_the_whole_vocabulary(value, told):
    assert (not_learned(PERPLEXITY, value, [5.0], 200.0, 1000) is not None) == told


def test_a_loss_above_its_start():
    said = not_learned(ACCURACY, 0.5, [2.0, 1.0, 2.1], 0.1, 360)
    assert said == "the training loss ended above its start (2.1 after 2); type a smaller optimizer.lr"
    assert not_learned(ACCURACY, 0.5, [2.0, 3.0, 1.9], 0.1, 360) is None
    assert not_learned(ACCURACY, 0.5, [2.0], 0.1, 360) is None


def test_chance_that_is_unknown():
    assert not_learned(ACCURACY, 0.0, [2.0, 1.0]) is None


@pytest.mark.parametrize("rate, told", [("1e-9", True), ("0.02", False)])
def test_the_end_of_a_run_says_so(tmp_path, capsys, rate, told):
    options = ["epochs=2", "dataset.test_size=400", "dataset.noise=0.1", "workers=2"]
    train.run(tiny.cfg(tmp_path, *options, f"optimizer.lr={rate}", "schedule.warmup_epochs=0"))
    summary = json.loads((tiny.only(tmp_path) / "summary.json").read_text())
    lines = capsys.readouterr().out.splitlines()
    assert (summary["not_learned"] is not None) == told == lines[-2].startswith("warning    the accuracy is that of a")
    assert lines[-1] == str(tiny.only(tmp_path))
