"""The verdict on advice that is made up: the answer first, and nobody ranked within noise."""

import itertools
from dataclasses import replace

import pytest

from accordion_bench.advising.verdict import as_good, stretches, verdict
from tests.advising import made_up

EVERY_STEP = tuple(name for name, method in made_up.METHODS.items() if method.period == 1)


def every_step(advice):
    return [row for row in advice.rows if not row.local]


def test_where_the_link_is_fast_the_answer_is_not_to_compress():
    said = verdict(made_up.advice(bandwidth=1e11))
    assert said[0].startswith("On THIS CPU, 100 ms a step, at 100 Gbit/s do not compress: ")
    assert "take 1.00 of computing alone; from 12 Gbit/s down PowerSGD rank 4 is fastest." in said[0]


def test_where_the_link_is_slow_the_answer_names_the_method_and_what_it_gains():
    advice = made_up.advice(bandwidth=1e9)
    said = verdict(advice)
    gain = advice.row("PowerSGD rank 1").over_bf16.value
    where = "On THIS CPU, 100 ms a step, at 1 Gbit/s"
    assert said[0].startswith(f"{where} compress: PowerSGD rank 1 takes 1.13 of computing alone")
    assert f"{gain:.3g} times as fast as dense bf16" in said[0]
    assert said[0].endswith("from 12 Gbit/s up do not compress.")


def test_methods_whose_intervals_overlap_are_named_together():
    said = verdict(made_up.advice(bandwidth=8e9, noise=0.03))
    assert "PowerSGD rank 4 and PowerSGD rank 1, alike within noise, take" in said[0]
    assert not any("PowerSGD rank 4 is fastest" in sentence for sentence in said[:2])


def test_with_noise_as_large_as_any_gain_nothing_is_recommended():
    said = verdict(made_up.advice(bandwidth=1.1e10, noise=0.2))
    assert "do not compress" in said[0]


def test_a_gain_of_less_than_two_percent_is_none():
    advice = made_up.advice(methods=("dense", "bf16", "PowerSGD rank 4"), noise=1e-6)
    bf16 = advice.row("bf16").step.value
    rows = tuple(
        replace(row, step=made_up.around(bf16 * 0.99, 1e-6)) if row.method == "PowerSGD rank 4" else row
        for row in advice.rows
    )
    assert {row.method for row in as_good(rows)} == {"bf16", "PowerSGD rank 4"}
    assert "do not compress" in verdict(replace(advice, rows=rows))[0]


def test_where_no_method_ever_gains_it_is_said():
    said = verdict(made_up.advice(methods=("dense", "bf16", "QSGD 4 bits"), workers=64))
    assert said[0].endswith("and no method gains 2 % or more down to 10 Mbit/s.")


def test_where_a_method_always_wins_no_bandwidth_is_given_for_dense():
    advice = made_up.advice(methods=("dense", "bf16", "PowerSGD rank 4"), bandwidth=1e9)
    slow = {name: tuple(10 * step for step in steps) for name, steps in advice.by_bandwidth.steps.items()}
    slow["PowerSGD rank 4"] = advice.by_bandwidth.steps["PowerSGD rank 4"]
    said = verdict(replace(advice, by_bandwidth=replace(advice.by_bandwidth, steps=slow)))
    assert "compress: PowerSGD rank 4" in said[0] and "up do not compress" not in said[0]


def test_local_methods_are_named_apart():
    said = verdict(made_up.advice(bandwidth=5e9))
    assert not any("SGD H 32" in sentence or "DiLoCo" in sentence for sentence in said[:-1])
    assert said[-1].startswith("If accuracy allows local steps: DiLoCo H 64")


def test_without_local_methods_nothing_is_said_of_them():
    assert not any("local" in sentence for sentence in verdict(made_up.advice(methods=EVERY_STEP)))


@pytest.mark.parametrize("noise", [1e-4, 0.01, 0.1])
@pytest.mark.parametrize("axis", ["by_bandwidth", "by_workers"])
def test_stretches_cover_the_axis_and_their_winner_is_as_good_as_the_fastest(noise, axis):
    advice = made_up.advice(noise=noise)
    regions, rows = getattr(advice, axis), every_step(advice)
    found = stretches(regions, rows, from_above=axis == "by_bandwidth")
    ordered = sorted(found, key=lambda stretch: stretch.low)
    assert ordered[0].low == min(regions.at) and ordered[-1].high == max(regions.at)
    for below, above in itertools.pairwise(ordered):
        assert below.high == above.low and below.method != above.method
    for i, place in enumerate(regions.at):
        here = next(stretch for stretch in ordered if stretch.low <= place <= stretch.high)
        fastest = min(regions.steps[row.method][i] for row in rows)
        ends = {stretch.method for stretch in ordered if place in (stretch.low, stretch.high)} or {here.method}
        best = min(regions.steps[name][i] for name in ends)
        assert best <= fastest * max(1.02, (1 + noise) / (1 - noise)) * (1 + 1e-12)


def test_winners_here_are_those_of_the_axis_at_this_place():
    advice = made_up.advice(bandwidth=made_up.BANDWIDTHS[40])
    found = stretches(advice.by_bandwidth, every_step(advice), from_above=True)
    here = next(s for s in found if s.low < advice.by_bandwidth.here < s.high)
    assert here.method in {row.method for row in as_good(every_step(advice))}
