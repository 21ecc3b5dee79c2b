"""Figures of advice: who wins where is named, few curves are drawn, and nothing lies on something else."""

import itertools

import numpy as np
import pytest

from accordion_bench.advising.verdict import GAIN, stretches
from accordion_bench.report.render.figures import speed_ups as figures
from accordion_bench.report.render.figures.sheet import styled
from tests.advising import made_up


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize("bandwidth", [1e7, 1e9, 4e11])
def test_winners_are_drawn_and_named(bandwidth):
    advice = made_up.advice(bandwidth, noise=0.01)
    figure = figures.over_bandwidth(advice)
    found = stretches(advice.by_bandwidth, [row for row in advice.rows if not row.local], from_above=True)[::-1]
    named = [label for label in legend(figure) if label.endswith(")") and label[-2].isupper()]
    assert len(named) == len({stretch.method for stretch in found})
    assert 3 <= len(legend(figure)) <= figures.MOST


def test_the_reader_s_own_place_is_told():
    advice = made_up.advice(2.5e10, workers=64)
    texts = [text.get_text() for text in figures.over_bandwidth(advice).axes[0].texts]
    assert "yours: 25 Gbit/s" in texts
    assert "yours: 64 workers" in [text.get_text() for text in figures.over_workers(advice).axes[0].texts]


def curves(axes):
    """The curves over the axis, without marks and the line of the reader's own place."""
    return [line for line in axes.lines if len(line.get_xdata()) > 2]


def test_break_evens_lie_where_a_curve_crosses_dense_bf16():
    advice = made_up.advice(1e9)
    axes = figures.over_bandwidth(advice).axes[0]
    marks = [line for line in axes.lines if line.get_markerfacecolor() == "white" and len(line.get_xdata()) == 1]
    assert marks
    for mark in marks:
        (bits,), (ratio,) = mark.get_xdata(), mark.get_ydata()
        (own,) = [line for line in curves(axes) if line.get_color() == mark.get_color()]
        there = np.interp(np.log(bits), np.log(own.get_xdata()), own.get_ydata())
        assert ratio == 1 and there == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("over", [figures.over_bandwidth, figures.over_workers])
@pytest.mark.parametrize("bandwidth", [1e8, 1e9, 1e10, 1e11])
def test_strip_and_curves_agree(over, bandwidth):
    """At every place no drawn curve of a ranked method lies above that of the strip's winner, but for the 2 %."""
    advice = made_up.advice(bandwidth, noise=0.0)
    axes = over(advice).axes[0]
    regions = advice.by_bandwidth if over is figures.over_bandwidth else advice.by_workers
    found = stretches(regions, [row for row in advice.rows if not row.local], over is figures.over_bandwidth)
    strip = [bar for bar in axes.patches if bar.get_height() == figures.STRIP]
    assert len(strip) == len(found)
    ranked = {row.method for row in advice.rows if not row.local}
    for bar in strip:
        middle = [i for i, at in enumerate(regions.at) if bar.get_x() < at < bar.get_x() + bar.get_width()]
        winners = [one.method for one in found if any(one.low <= regions.at[i] < one.high for i in middle)]
        for i in middle:
            best = max(figures.speed_ups(regions, name)[i] for name in ranked)
            assert any(figures.speed_ups(regions, name)[i] * (1 + GAIN) >= best for name in winners)


def test_curves_are_speed_ups_on_a_linear_axis():
    advice = made_up.advice(1e9)
    axes = figures.over_bandwidth(advice).axes[0]
    assert axes.get_yscale() == "linear" and axes.get_ylabel() == "times as fast as dense bf16"
    place = advice.by_bandwidth.at.index(advice.by_bandwidth.here)
    drawn = [line.get_ydata()[place] for line in curves(axes)]
    for name in ("dense", "PowerSGD rank 1"):
        assert any(ratio == pytest.approx(advice.row(name).over_bf16.value, rel=1e-6) for ratio in drawn)
    assert max(advice.row(name).over_bf16.value for name in made_up.METHODS if name[-4:] != "H 32") < axes.get_ylim()[1]


def test_local_methods_are_told_not_to_be_ranked():
    figure = figures.over_bandwidth(made_up.advice(1e9))
    assert any(label.replace("\n", " ").endswith("(not ranked)") for label in legend(figure))
    assert "not ranked" in " ".join(figure.texts[0].get_text().split())
    without = figures.over_bandwidth(made_up.advice(1e9, methods=("dense", "bf16", "PowerSGD rank 1")))
    assert "not ranked" not in " ".join(without.texts[0].get_text().split())


@pytest.mark.parametrize("over", [figures.over_bandwidth, figures.over_workers])
def test_no_text_lies_on_another(over):
    with styled():
        figure = over(made_up.advice(1e9, noise=0.01))
        figure.canvas.draw()
    axes, renderer = figure.axes[0], figure.canvas.get_renderer()
    low, high = axes.get_xlim()
    numbers = [
        text
        for place, text in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
        if low <= place <= high and text.get_text()
    ]
    texts = [*axes.texts, *numbers, axes.xaxis.label, *figure.texts, *figure.legends[0].get_texts()]
    boxes = [text.get_window_extent(renderer) for text in texts]
    assert not [(a, b) for a, b in itertools.combinations(boxes, 2) if a.overlaps(b)]
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)


def test_files(tmp_path):
    written = figures.draw_advice(made_up.advice(), tmp_path)
    assert [file.name for file in written] == ["speed_up_over_bandwidth.png", "speed_up_over_workers.png"]
    assert all(file.with_suffix(".pdf").is_file() for file in written)
