"""The answer on top of a setting: who keeps what dense reaches, and nobody before others within noise."""

import math
from pathlib import Path

import pytest
from scipy.special import stdtrit

from accordion_bench.report.compare import times
from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.compare.intervals import ComparisonOutcome, apart, beaten, standing
from accordion_bench.report.compare.verdicts import answers
from accordion_bench.report.read import Run, read_run
from tests.report.test_report import grouped, run_folder
from tests.report.test_tables import edited, one_worker, perplexed, preset
from tests.report.test_uncounted import both

SPREAD = (0.0, 0.002, 0.001)  # what a seed adds, in every arm
OWN = (0.001, -0.001, 0.0)  # what a seed adds in one arm only


def arm(root, compressor="none", accuracy=0.9, own=1.0, seeds=3, **options):
    """An arm of several seeds, its interval as wide as `own` says."""
    for seed in range(seeds):
        value = accuracy + SPREAD[seed] + (own * OWN[seed] if compressor != "none" else 0)
        run_folder(root, compressor, seed=seed, accuracy=value, **options)


def said(root):
    """The answer, which never has more than two sentences."""
    found = answers(grouped(root))
    assert 1 <= len(found) <= 2 and all(sentence.endswith(".") for sentence in found)
    return found


def test_the_one_with_the_fewest_bytes_among_those_that_keep_denses(tmp_path):
    arm(tmp_path)
    arm(tmp_path, "powersgd", 0.898, payload=100)
    arm(tmp_path, "topk", 0.899, payload=200)
    arm(tmp_path, "signsgd", 0.8, payload=30)
    first, second = said(tmp_path)
    assert first == (
        "PowerSGD rank 2 keeps dense's accuracy (-0.20 ± 0.25 points, n = 3) at 10 times fewer bytes on the wire; "
        "no difference in time was measured, because workers share a process."
    )
    assert second.startswith("TopK 10 % cannot be told apart from it in accuracy; ")
    assert second.endswith(" is worse by 10.00 ± 0.25 points.")


def test_one_that_sends_more_and_is_shown_better_is_told(tmp_path):
    arm(tmp_path)
    arm(tmp_path, "powersgd", 0.9, payload=100)
    arm(tmp_path, "topk", 0.95, payload=200, own=2.0)
    first, second = said(tmp_path)
    assert first.startswith("PowerSGD rank 2 keeps")
    assert second == "TopK 10 % is better than it by 5.00 ± 0.25 points at 5 times fewer bytes on the wire."


def test_better_than_dense(tmp_path):
    arm(tmp_path)
    arm(tmp_path, "topk", 0.95, payload=200)
    assert said(tmp_path)[0].startswith("TopK 10 % is better than dense in accuracy (+5.00 ± 0.25 points, n = 3) at 5 ")


def test_wide_intervals_decide_nothing(tmp_path):
    arm(tmp_path)
    arm(tmp_path, "powersgd", 0.9, payload=100, own=30)
    arm(tmp_path, "topk", 0.9, payload=200, own=15)
    (sentence,) = said(tmp_path)
    assert sentence == (
        "Undecided: no arm is shown to keep dense's accuracy within 2 points; the narrowest interval, of TopK 10 % "
        "(n = 3), reaches from -3.73 to +3.73 points at 5 times fewer bytes on the wire; no difference in time was "
        "measured, because workers share a process."
    )


def test_all_lose(tmp_path):
    arm(tmp_path)
    arm(tmp_path, "powersgd", 0.85, payload=100)
    arm(tmp_path, "topk", 0.8, payload=2000)
    assert said(tmp_path) == [
        "No arm keeps dense's accuracy: PowerSGD rank 2 is worse by 5.00 ± 0.25 points at 10 times fewer bytes on the "
        "wire and TopK 10 % is worse by 10.00 ± 0.25 points at 2 times more bytes on the wire."
    ]


def test_a_shown_loss_within_the_margin_is_not_passed_over(tmp_path):
    arm(tmp_path)
    arm(tmp_path, "powersgd", 0.899, own=20, payload=100)
    arm(tmp_path, "topk", 0.88, payload=200)
    assert said(tmp_path)[0].startswith("Undecided: no arm is shown to keep dense's accuracy within 2 points; ")
    arm(tmp_path, "fp16", 0.895, payload=500)
    first, second = said(tmp_path)
    assert first.startswith("Undecided: no arm without a shown loss is shown to keep dense's accuracy within 2 points;")
    assert "fp16 is worse by 0.50 ± 0.25 points" in second


def test_one_seed_ranks_nothing(tmp_path):
    arm(tmp_path, seeds=1)
    arm(tmp_path, "powersgd", 0.899, payload=100, seeds=1)
    assert said(tmp_path) == [
        "One seed: nothing is ranked.",
        "PowerSGD rank 2 ended equal to dense at 10 times fewer bytes on the wire.",
    ]
    arm(tmp_path, "topk", 0.879, seeds=1)
    arm(tmp_path, "qsgd", 0.8, seeds=1, payload=400)
    arm(tmp_path, "fp16", 0.8, seeds=1, payload=500)
    sentence = said(tmp_path)[1]
    assert sentence.startswith("TopK 10 % ended ") and ", fp16 ended " in sentence and sentence.endswith(" and 2 more.")


def test_a_second_seed_of_the_arm_alone_is_no_interval(tmp_path):
    arm(tmp_path, seeds=1)
    arm(tmp_path, "powersgd", 0.8, payload=100, seeds=2)
    assert said(tmp_path)[0] == "No interval: nothing is ranked."


def test_perplexity_has_no_points(tmp_path):
    for seed in range(3):
        perplexed(tmp_path, 97 + seed / 10, seed=seed)
        perplexed(tmp_path, 97.1 + seed / 20, seed=seed, compressor="topk", payload=100)
        perplexed(tmp_path, 105 + seed / 20, seed=seed, compressor="powersgd", payload=50)
        perplexed(tmp_path, 97 + 8 * (seed == 1), seed=seed, compressor="fp16", payload=500)
    first, second = said(tmp_path)
    assert first.startswith("TopK 10 % keeps dense's perplexity (+0.05 ± 0.124, n = 3) at 10 times fewer bytes")
    assert second.startswith("PowerSGD rank 2 is worse by 7.95 ± 0.124; fp16 is undecided (from -")
    assert "points" not in first + second


def bare(name, *values):
    """An arm of which only the metric is known."""
    runs = [Run(Path(), {"seed": i}, summary={"metric_name": name, "metric": v}) for i, v in enumerate(values)]
    return Arm("bare", tuple(runs))


@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("name", ["perplexity", "bits_per_byte", "test_loss"])
def test_margins_of_what_has_no_upper_end_are_relative(name, scale):
    """An interval up to 1 % above dense's value is within the margin, one up to 3 % is not, whatever the number is."""
    dense = bare(name, *[scale] * 3)
    ends = {0.01: ComparisonOutcome.KEEPS, 0.03: ComparisonOutcome.UNDECIDED}
    for end, expected in ends.items():
        step = end / (stdtrit(2, 0.975) / math.sqrt(3))  # values of mean 1 whose interval ends there
        assert standing(bare(name, *(scale * (1 + step * k) for k in (-1, 0, 1))), dense) is expected
    assert standing(bare(name, *(scale * value for value in (1.009, 1.01, 1.011))), dense) is ComparisonOutcome.LOSES
    assert standing(bare(name, *(scale * value for value in (0.989, 0.99, 0.991))), dense) is ComparisonOutcome.KEEPS
    assert standing(bare(name, scale), bare(name, scale)) is ComparisonOutcome.NO_INTERVAL


def test_measured_time_is_told_where_communication_was_measured(tmp_path):
    arm(tmp_path, comm_seconds=0.5, seconds=2.0)
    arm(tmp_path, "powersgd", payload=100, comm_seconds=0.1, seconds=1.0)
    (sentence,) = said(tmp_path)
    assert sentence.endswith("; it takes 0.50 times dense's time (measured).")


def modelled(root):
    for path in root.iterdir():
        seconds = 4.0 if path.name.startswith("none") else 2.0
        edited(path, "config.yaml", network={"bandwidth": 1e9, "latency": 5e-5})
        edited(path, "summary.json", modelled_seconds=seconds, modelled_comm_seconds=seconds / 2)


def test_else_modelled_time_is_told_with_its_link(tmp_path):
    arm(tmp_path)
    arm(tmp_path, "powersgd", payload=100)
    modelled(tmp_path)
    (sentence,) = said(tmp_path)
    assert sentence.endswith("; it takes 0.50 times dense's time (modelled on 1 Gbit/s and 50 µs per round).")


def test_times_of_runs_that_moved_do_not_compare(tmp_path):
    arm(tmp_path)
    arm(tmp_path, "powersgd", payload=100)
    for path in tmp_path.iterdir():
        edited(path, "environment.json", processor="P", cpu_cores=2, resumed=[{"processor": "Q"}, "torn", {"gpus": 3}])
    assert said(tmp_path)[0].endswith("; their times do not compare, because the runs come from different machines.")
    assert times.machine(read_run(path)) == "P, 2 cores, then Q, 2 cores"


def test_times_of_other_machines_or_threads_do_not_compare(tmp_path):
    arm(tmp_path)
    arm(tmp_path, "powersgd", payload=100)
    for path in tmp_path.glob("powersgd*"):
        edited(path, "environment.json", threads=1)
    for path in tmp_path.glob("none*"):
        edited(path, "environment.json", threads=2)
    assert said(tmp_path)[0].endswith("; their times do not compare, because the runs differ in threads per process.")
    edited(path, "environment.json", processor="Q")
    assert said(tmp_path)[0].endswith("because the runs come from different machines.")


def test_without_a_dense_run_the_command_that_adds_one(tmp_path):
    arm(tmp_path, "powersgd", payload=100)
    (sentence,) = answers(grouped(tmp_path))
    assert sentence.startswith("No dense run of this setting") and "compressor=none" in sentence


def test_dense_alone(tmp_path):
    arm(tmp_path)
    assert said(tmp_path) == ["Only dense has run: there is nothing to compare it with."]


def test_a_control_of_one_worker_is_no_answer(tmp_path):
    for seed in (0, 1):
        preset(tmp_path, arm="dense", seed=seed, accuracy=0.9 + seed / 1000)
        preset(tmp_path, "topk", arm="topk", seed=seed, accuracy=0.9 + seed / 900, payload=100)
        one_worker(tmp_path, arm="one_worker", seed=seed, accuracy=0.9 + seed / 1000)
    assert said(tmp_path)[0].startswith("TopK 10 % keeps")


def test_bytes_that_nobody_counted_come_last():
    first, second = answers(both())
    assert first.startswith("TopK 10 %") and "not counted" not in first
    assert second.startswith("DDP, bf16_compress_hook cannot be told apart")
    (only,) = answers([arm for arm in both() if "TopK" not in arm.label])
    assert "at bytes that are not counted" in only


# ---- what may be ranked


def test_beaten_needs_a_shown_difference(tmp_path):
    """An arm that sends more and has a lower mean is not beaten until the intervals say so."""
    arm(tmp_path / "noise")
    arm(tmp_path / "noise", "powersgd", 0.899, payload=2000)
    assert beaten(grouped(tmp_path / "noise"), "wire_bytes") == [] and not apart(grouped(tmp_path / "noise"))
    arm(tmp_path / "shown")
    arm(tmp_path / "shown", "powersgd", 0.85, payload=2000)
    arm(tmp_path / "shown", "topk", 0.85, payload=100)
    found = grouped(tmp_path / "shown")
    assert [found[i].label for i in beaten(found, "wire_bytes")] == ["PowerSGD rank 2"] and apart(found)


def test_one_seed_beats_nobody(tmp_path):
    arm(tmp_path, seeds=1)
    arm(tmp_path, "powersgd", 0.5, payload=2000, seeds=1)
    assert beaten(grouped(tmp_path), "wire_bytes") == [] and not apart(grouped(tmp_path))


def test_noise_of_time_beats_nobody(tmp_path):
    for seed, extra in enumerate((0.0, 0.5, 1.0)):
        run_folder(tmp_path, seed=seed, accuracy=0.9 + SPREAD[seed], seconds=2 + extra)
        run_folder(tmp_path, "topk", seed=seed, accuracy=0.8 + SPREAD[seed] + OWN[seed], seconds=2.1 + extra)
    assert beaten(grouped(tmp_path), "seconds") == []
    assert beaten(grouped(tmp_path), "wire_bytes") == [1]


# ---- several dense arms


def two_dense(root):
    """The one with the larger learning rate is ten points better."""
    arm(root, accuracy=0.801, optimizer__lr=0.1)
    for seed, own in enumerate(OWN):
        run_folder(root, seed=seed, accuracy=0.901 + SPREAD[seed] + own, optimizer__lr=0.3)


def test_a_better_dense_arm_than_the_baseline_is_named(tmp_path):
    two_dense(tmp_path)
    arm(tmp_path, "powersgd", 0.8013, payload=100, own=2, optimizer__lr=0.1)
    first, second = said(tmp_path)
    assert first.startswith("PowerSGD rank 2 keeps dense, lr=0.1's accuracy (+0.03 ")
    assert second == "dense, lr=0.3 is better than dense, lr=0.1 by 10.00 ± 0.25 points."


def test_two_dense_arms_alone_are_told_apart(tmp_path):
    two_dense(tmp_path)
    first, second = said(tmp_path)
    assert first.startswith("Only dense arms have run")
    assert second == "dense, lr=0.3 is better than dense, lr=0.1 by 10.00 ± 0.25 points."


# ---- numbers that are nearly the same, or 0


@pytest.mark.parametrize("payload", [998, 1002])
def test_nearly_as_many_bytes_are_no_times_more_or_fewer(tmp_path, payload):
    arm(tmp_path)
    arm(tmp_path, "powersgd", payload=payload)
    assert " at as many bytes on the wire, to within 0.5 %;" in said(tmp_path)[0]


def test_a_gap_below_what_is_written_is_not_0(tmp_path):
    run_folder(tmp_path)
    run_folder(tmp_path, "powersgd", accuracy=0.89999, payload=100)
    assert said(tmp_path)[1].startswith("PowerSGD rank 2 ended less than 0.01 points below dense at")


def test_a_dense_arm_that_sends_nothing_takes_no_other_out(tmp_path):
    arm(tmp_path, payload=0)
    arm(tmp_path, "powersgd", payload=100)
    assert " at 150 B on the wire, where dense sends nothing;" in said(tmp_path)[0]
