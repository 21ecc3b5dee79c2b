"""Accuracies that are known from runs, and the commands that would measure the others."""

import shlex
from dataclasses import replace

from accordion_bench.cli.advice_command import command, with_accuracies
from accordion_bench.report.compare.verdicts import known_accuracies
from tests.advising import made_up
from tests.kit import composed
from tests.report.test_report import node, run_folder


def runs(root, seeds=(0, 1, 2), drop=0.02, **options):
    """Dense and PowerSGD rank 2, which loses `drop` and a little more or less."""
    for seed in seeds:
        run_folder(root, seed=seed, accuracy=0.9 + 0.001 * seed, **options)
        run_folder(root, "powersgd", seed=seed, accuracy=0.9 + 0.001 * seed - drop + 1e-4 * seed, **options)


def test_the_difference_to_dense_with_interval_and_seeds(tmp_path):
    runs(tmp_path)
    known = known_accuracies([tmp_path], "", 4)
    (said,) = known.values()
    assert said.startswith("-1.99 ± 0.02 points, n = 3 (") and "4 workers)" in said
    assert known_accuracies([tmp_path], "resnet110", 4) == {}


def test_of_two_learning_rates_that_of_dense_counts_and_is_told(tmp_path):
    run_folder(tmp_path, accuracy=0.9, optimizer__lr=0.3)
    run_folder(tmp_path, "powersgd", accuracy=0.5, optimizer__lr=0.1)
    run_folder(tmp_path, "powersgd", accuracy=0.89, optimizer__lr=0.3)
    (said,) = known_accuracies([tmp_path], "", 4).values()
    assert said == "-1.00 points, n = 1 (resnet8 on digits, 4 workers, lr=0.3)"


def test_a_local_method_that_compresses_is_another_method(tmp_path):
    local = {"sync": node("sync", "local_sgd"), "choices__sync": "local_sgd"}
    run_folder(tmp_path, accuracy=0.9)
    run_folder(tmp_path, "topk", accuracy=0.5, **local)
    assert "local SGD" not in known_accuracies([tmp_path], "", 4)
    run_folder(tmp_path, accuracy=0.89, **local)
    run_folder(tmp_path, "topk", accuracy=0.5, seed=1, **local)
    known = known_accuracies([tmp_path], "", 4)
    assert known["local SGD"] == "at H 8: -1.00 points, n = 1 (resnet8 on digits, 4 workers)"
    assert known["local SGD, H 8, TopK 10 %"].startswith("-40.00 points, n = 2 (")


def test_one_seed_has_no_interval(tmp_path):
    runs(tmp_path, seeds=(0,))
    (said,) = known_accuracies([tmp_path], "", 4).values()
    assert said.startswith("-2.00 points, n = 1 (")


def test_without_a_dense_run_nothing_is_known(tmp_path):
    run_folder(tmp_path, "powersgd", accuracy=0.9)
    assert known_accuracies([tmp_path], "", 4) == {}


def test_rows_have_what_is_known_and_a_command_that_is_taken():
    advice = with_accuracies(
        made_up.advice(), {"PowerSGD rank 4": "-0.10 points, n = 1"}, ["model=resnet8", "dataset=digits", "workers=16"]
    )
    assert advice.row("PowerSGD rank 4").accuracy == "-0.10 points, n = 1"
    assert advice.row("PowerSGD rank 1").accuracy == ""
    assert advice.row("DiLoCo, H 64").command.endswith("sync=diloco sync.period=64")
    for row in advice.rows:
        assert row.command.startswith("python -m accordion_bench model=resnet8 dataset=digits workers=16 ")
        composed.cfg(*shlex.split(row.command)[3:])


def test_what_a_method_needs_wins_over_what_was_typed():
    (row, *_) = made_up.advice().rows
    typed = ["model=lstm", "optimizer=sgd", "optimizer.momentum=0.9", "optimizer.weight_decay=0.1"]
    needs = replace(row, overrides=("compressor=demo", "optimizer.momentum=0.0"), local=False)
    kept = "model=lstm optimizer=sgd optimizer.weight_decay=0.1 compressor=demo optimizer.momentum=0.0"
    assert command(needs, typed) == f"python -m accordion_bench {kept}"
    other = replace(needs, overrides=("compressor=dion", "optimizer=adamw"))
    assert command(other, typed) == "python -m accordion_bench model=lstm compressor=dion optimizer=adamw"


def test_of_a_timeline_nobody_knows_what_to_train():
    assert {row.command for row in with_accuracies(made_up.advice(), {}, []).rows} == {""}
