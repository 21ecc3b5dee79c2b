"""Figures of advice: who wins where is named, few curves are drawn, and nothing lies on something else."""

import itertools

import pytest

from accordion_bench.advising.winners import stretches
from accordion_bench.report.render.figures import advice as figures
from accordion_bench.report.render.figures.style import styled
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


def test_break_evens_lie_on_the_curve_of_dense_bf16():
    advice = made_up.advice(1e9)
    axes = figures.over_bandwidth(advice).axes[0]
    marks = [line for line in axes.lines if line.get_markerfacecolor() == "white" and len(line.get_xdata()) == 1]
    assert marks
    for mark in marks:
        (bits,), (seconds,) = mark.get_xdata(), mark.get_ydata()
        assert seconds == pytest.approx(made_up.step(made_up.METHODS["bf16"], bits, 16), rel=0.02)


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
    assert [file.name for file in written] == ["step_over_bandwidth.png", "step_over_workers.png"]
    assert all(file.with_suffix(".pdf").is_file() for file in written)
