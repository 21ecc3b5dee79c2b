"""A validation split: held out of the training set, and what target and best epoch go by."""

import pytest
import torch

from accordion_bench import train
from accordion_bench.datasets.text import SyntheticText
from accordion_bench.forward.task import task_of
from accordion_bench.options.checks import ConfigError
from accordion_bench.runs.folder import RunFolder
from accordion_bench.training.trainer import Trainer
from tests.kit import composed, tiny
from tests.kit.local import trainer_for
from tests.runs.test_resume import differences, resume, state, stop

HELD_OUT = "dataset.validation=20"


def used(trainer: Trainer) -> list[int]:
    """Sample numbers of an epoch, over all workers."""
    trainer.sampler.begin_epoch(0, 4)
    steps = range(trainer.position.steps_per_epoch)
    return [int(i) for worker in range(4) for step in steps for i in trainer.sampler.batch(worker, step)]


def test_nothing_that_is_held_out_is_trained_on(tmp_path):
    trainer = trainer_for(tmp_path, HELD_OUT)
    held_out = set(trainer.task.validation.tolist())
    assert len(held_out) == 20 and len(set(used(trainer))) == 76
    assert not held_out & set(used(trainer)) and held_out | set(used(trainer)) == set(range(96))
    assert trainer.position.steps_per_epoch == 5 and trainer.policy_runner.position is trainer.position
    other, twin = trainer_for(tmp_path, HELD_OUT, "seed=1"), trainer_for(tmp_path, HELD_OUT)
    assert set(other.task.validation.tolist()) != held_out == set(twin.task.validation.tolist())


def test_a_share_is_of_the_subset(tmp_path):
    trainer = trainer_for(tmp_path, "dataset.validation=0.25", "dataset.subset=40", "dataset.limit_eval=7")
    assert trainer.sampler.size == 30 and len(trainer.task.validation) == 7
    assert trainer.position.steps_per_epoch == 2


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run with a validation split and a target, and what was typed."""
    runs = tmp_path_factory.mktemp("runs")
    typed = ["dataset.train_size=160", "dataset.validation=0.25", "target=0.1"]
    train.run(cfg := composed.run(runs, "checkpoint.every=1000", *typed))
    return tiny.only(runs), cfg


def test_best_and_target_go_by_it(run):
    folder, _ = run
    rows, summary = RunFolder(folder).read_metrics(), RunFolder(folder).read_json("summary.json")
    seen = [row["validation_accuracy"] for row in rows]
    best = max(range(4), key=seen.__getitem__)
    assert seen != [row["accuracy"] for row in rows]
    assert summary["selected_by"] == "validation_accuracy"
    assert (summary["best_metric"], summary["best_epoch"]) == (seen[best], best)
    assert (summary["metric"], summary["test_at_best"]) == (rows[-1]["accuracy"], rows[best]["accuracy"])
    first = next(row for row in rows if row["validation_accuracy"] >= 0.1)
    assert summary["seconds_to_target"] == first["seconds"]
    assert 0 < summary["validation_loss"] == rows[-1]["validation_loss"]


def test_it_is_told_at_the_end(run):
    folder, cfg = run
    summary = RunFolder(folder).read_json("summary.json")
    line = train.footer(summary, train.RunConfig.from_dict(cfg), folder).splitlines()[0]
    best = f"{100 * summary['best_metric']:.2f} % in epoch {summary['best_epoch'] + 1}"
    assert f"best of the validation split {best}, when the test had" in line


def test_held_out_images_are_evaluated_as_they_are(tmp_path):
    """Each worker takes its share, and the shares add up to what one worker finds in all."""
    trainer = trainer_for(tmp_path, HELD_OUT)
    model, task, data = trainer.axis.model.eval(), trainer.task, trainer.data
    with torch.no_grad():
        shares = sum(task.totals(model, data, worker, 3) for worker in range(3))
        columns = task.columns(shares.tolist())
        output = model(trainer.data.train_images[task.validation])  # synthetic images need no normalisation
        labels = trainer.data.train_labels[task.validation]
    assert columns["validation_loss"] == pytest.approx(torch.nn.functional.cross_entropy(output, labels).item())
    assert columns["validation_accuracy"] == (output.argmax(1) == labels).double().mean().item()


def test_a_resumed_run_holds_out_the_same(run, tmp_path):
    straight, _ = run
    cfg = {**run[1], "paths": {**run[1]["paths"], "runs": str(tmp_path)}}
    folder = stop(cfg, 13, every=5)
    resume(folder, cfg)
    assert RunFolder(folder).read_json("summary.json")["test_at_best"] is not None
    found, expected = state(folder)["rows"], state(straight)["rows"]
    assert differences(found, expected) == []


@pytest.mark.parametrize(
    ("value", "rule"),
    [("0", "above 0"), ("96", "leaves some on both sides"), ("0.001", "leaves some"), ("3.5", "an integer")],
)
def test_what_cannot_be_held_out_is_refused(value, rule, tmp_path):
    with pytest.raises(ConfigError, match=f"dataset.validation must be .*{rule}"):
        trainer_for(tmp_path, f"dataset.validation={value}")


def test_a_language_model_goes_by_its_metric_split():
    for split in ("test", "valid"):
        task = task_of(SyntheticText(metric_split=split))
        assert (task.selected_by, task.tested) == (f"{split}_perplexity", "test_perplexity")
