"""Figures of the report, from made-up runs: as objects, not as pixels."""

import functools
import itertools
import math
import re
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.legend import Legend
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from accordion_bench.report import PAPERS, Print, render
from accordion_bench.report.compare.grouping import settings
from accordion_bench.report.compare.times import modelled_seconds
from accordion_bench.report.render import figures
from accordion_bench.report.render.figures import curves, draw, finals, layers, sheet
from accordion_bench.report.render.figures.finals import DDP, EXCHANGE, STEP, bars, breakdown, by_method, parts
from accordion_bench.report.render.figures.layers import (
    critical_share,
    level_maps,
    levels_by_epoch,
    norms,
    norms_by_layer,
    side_by_side,
    told_apart,
)
from accordion_bench.report.render.figures.sheet import styled
from accordion_bench.report.render.page import step_times
from tests.kit.figures import LAYERS, across, arms_of, everything, figures_of, run

WORDS_AS_AXES = ("layer", "method", "method and bytes sent")  # axes whose numbers are names
OF_ENDS = {"accuracy_modelled", "tradeoff", "period", "bits_bucket", "forest"}


@functools.cache
def all_figures(paper):
    """Every figure of one setting by name, and the one across settings."""
    with styled(paper):
        return figures_of(everything()) | {"workers": figures.workers(across())}


@pytest.fixture(scope="module", params=PAPERS)
def printed(request):
    """(Paper, every figure)."""
    return request.param, all_figures(request.param)


@pytest.fixture(scope="module")
def drawn():
    return all_figures("two-column")


def texts(figure):
    return [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]


def all_legends(figure):
    return figure.findobj(Legend)


# ---- all figures


def test_every_figure_is_written_in_every_format(tmp_path, drawn, monkeypatch):
    assert set(drawn) == set(figures.NAMES)
    for name in figures.OF_A_SETTING:
        made = drawn[name] if name in ("comparison", "norms") else None
        monkeypatch.setitem(figures.KINDS, name, figures.FigureKind(lambda *_, made=made: made))
    every = Print(formats=("png", "pdf", "svg"))
    ((pngs, failed),) = draw([everything()], tmp_path, figures.OF_A_SETTING, every)
    assert failed == []
    pngs += figures.draw_across(across(), tmp_path, every)
    assert [png.name for png in pngs] == ["comparison.png", "norms.png", "workers.png"]
    assert [png.name for png in figures.draw_all(everything(), tmp_path, "-7")] == ["comparison-7.png", "norms-7.png"]
    assert not (tmp_path / "norms-7.pdf").exists()
    for png in pngs:
        pdf = png.with_suffix(".pdf").read_bytes()
        assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 5000
        assert pdf.startswith(b"%PDF") and b"/CIDFontType2" in pdf
        assert b"/Type3" not in pdf  # which some publishers refuse
        assert "<svg" in png.with_suffix(".svg").read_text()[:2000]


def test_a_figure_is_as_wide_as_its_paper(printed):
    paper, found = printed
    for name, figure in found.items():
        assert figure.get_figwidth() == PAPERS[paper], name
        assert figure.get_figheight() < 11, name  # a page


def test_every_axis_has_a_name_and_a_unit(drawn):
    for name, figure in drawn.items():
        for axes in figure.axes:
            names = (axes.get_xlabel(), axes.get_ylabel())
            for text in names if name != "breakdown" or axes is figure.axes[0] else names[:1]:
                assert re.search(r"\[.+\]", text) or text in WORDS_AS_AXES, (name, text)


def test_letters_can_be_read(printed):
    _, found = printed
    for name, figure in found.items():
        sizes = {text.get_fontsize(): text.get_text() for text in texts(figure)}
        assert min(sizes) >= 7, (name, sizes)
        for axes in figure.axes:
            assert axes.get_position().width * figure.get_figwidth() > 1.1, name


def test_nothing_is_cut_off_or_on_top_of_another(printed):
    _, found = printed
    for name, figure in found.items():
        width, height = figure.get_size_inches() * figure.dpi
        renderer = figure.canvas.get_renderer()
        boxes = [axes.bbox for axes in figure.axes]
        axis_boxes = [[axis.get_tightbbox(renderer) for axis in (axes.xaxis, axes.yaxis)] for axes in figure.axes]
        boxes = [Bbox.union([box, *filter(None, own)]) for box, own in zip(boxes, axis_boxes, strict=True)]
        boxes += [legend.get_window_extent(renderer) for legend in all_legends(figure)]
        boxes += [text.get_window_extent(renderer) for text in figure.texts if text.get_text()]
        titles = [axes._left_title for axes in figure.axes if axes.get_title("left")]
        boxes += [title.get_window_extent(renderer) for title in titles]
        for box in boxes:
            assert box.x0 > -1 and box.x1 < width + 1 and box.y0 > -1 and box.y1 < height + 1, name
        for a, b in itertools.combinations(boxes, 2):
            across = min(a.x1, b.x1) - max(a.x0, b.x0)
            along = min(a.y1, b.y1) - max(a.y0, b.y0)
            assert across < 1 or along < 1, (name, a, b)


def test_the_label_beside_two_rows_fits():
    with styled():
        figure = figures.forest(everything()[:2])
        figure.canvas.draw()
    (axes,) = figure.axes
    box = axes.yaxis.label.get_window_extent(figure.canvas.get_renderer())
    assert box.y0 > 0 and box.y1 < figure.get_figheight() * figure.dpi


def overlapping(boxes):
    return [(a, b) for a, b in itertools.combinations(boxes, 2) if a.overlaps(b)]


def tick_boxes(figure, name):
    """Boxes of the visible tick labels of each panel's axis."""
    renderer = figure.canvas.get_renderer()
    for axes in figure.axes:
        axis, (low, high) = getattr(axes, name), sorted(getattr(axes, f"get_{name[0]}lim")())
        labels = zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=False)  # none of a panel without names
        yield [text.get_window_extent(renderer) for at, text in labels if low <= at <= high and text.get_text()]


@pytest.mark.parametrize("draw_rows", [figures.forest, breakdown])
@pytest.mark.parametrize("paper", PAPERS)
def test_names_of_rows_never_overlap_however_many_lines_they_have(draw_rows, paper):
    """Equal distances between rows gave a name of three lines no more room than one of a single line."""
    arms = everything()
    long = "DiLoCo (outer_momentum=0.0, outer_nesterov=false), H 30, TopK 1.5625 % of tiles, 2 bits"
    arms = [replace(arm, label=f"{long}, {i}") if i in (3, 4) else arm for i, arm in enumerate(arms)]
    with styled(paper):
        figure = draw_rows(arms)
        figure.canvas.draw()
    assert not any(map(overlapping, tick_boxes(figure, "yaxis")))


def test_numbers_of_arms_far_behind_are_not_written_over_each_other():
    """Arms that send the same bytes are at one place of the lower edge."""
    far = [
        run("topk", seed=seed, end=0.3 + 0.1 * i, density=0.1, error_feedback=i > 0) for i in (0, 1) for seed in (0, 1)
    ]
    far += [run("randomk", seed=seed, end=0.2) for seed in (0, 1)]
    arms = arms_of(*(run(seed=seed) for seed in (0, 1)), *far)
    with styled():
        figure = curves.tradeoff(arms)
        figure.canvas.draw()
    for axes in figure.axes:
        boxes = [text.get_window_extent(figure.canvas.get_renderer()) for text in axes.texts]
        assert len(boxes) == 3 and not overlapping(boxes)
        assert all(box.y1 < axes.bbox.y1 for box in boxes)


@pytest.mark.filterwarnings("error:constrained_layout")
@pytest.mark.parametrize("draw_points", [curves.tradeoff, layers.side_by_side])
def test_an_arm_far_behind_whose_seeds_sent_different_bytes_leaves_the_layout_alone(draw_points):
    """Arrows of its interval along the axis of bytes were far below the figure, and the panel lost its layout."""
    far = [run("topk", seed=seed, end=0.2, cost=cost) for seed, cost in ((0, 0.01), (1, 0.9))]
    arms = arms_of(*(run(seed=seed) for seed in (0, 1)), *far)
    with styled():
        figure = draw_points(arms)
        figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    boxes = [legend.get_window_extent(renderer) for legend in all_legends(figure)]
    boxes += [line.get_window_extent(renderer) for line in figure.findobj(match=lambda part: part.get_gid() == "cut")]
    assert boxes and all(figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1 for box in boxes)


@pytest.mark.parametrize("slower", [1, 1e3, 1e6])
@pytest.mark.parametrize("paper", PAPERS)
def test_numbers_on_an_axis_of_time_never_touch(paper, slower):
    with styled(paper):
        found = [figures.accuracy_modelled(everything(), (1e6 / slower, 1e8)), figures.tradeoff(everything())]
        for figure in found:
            figure.canvas.draw()
            assert not any(map(overlapping, tick_boxes(figure, "xaxis")))


def test_no_title_is_repeated_over_the_figures_and_each_says_what_was_trained(drawn):
    for name, figure in drawn.items():
        assert not figure.get_suptitle(), name
        assert not any("resnet8" in axes.get_title("left") for axes in figure.axes), name
        (note,) = [text.get_text() for text in figure.texts]
        assert note.startswith("resnet8 on digits"), name


def test_a_method_has_one_colour_in_all_figures(drawn):
    arms = everything()
    expected = {arm.label: look for arm, look in zip(arms, render.looks(arms), strict=True)}
    seen = dict.fromkeys(expected, 0)
    for name, figure in drawn.items():
        for legend in all_legends(figure):
            for handle, text in zip(legend.legend_handles, legend.get_texts(), strict=True):
                label = text.get_text().partition(":")[0]
                if label in expected and name != "workers":
                    seen[label] += 1
                    assert mpl.colors.to_hex(handle.get_color()) == expected[label].colour.lower(), (name, label)
                    assert handle.get_marker() == expected[label].marker, (name, label)
    assert min(seen.values()) >= 5
    assert expected["dense"].colour == render.BLACK


def test_small_scales_are_told_in_every_figure(perplexing):
    there = settings(arms_of(run(workers=2, scale="small"), run(workers=4, scale="small")))
    with styled():
        found = {("small", "workers"): figures.workers(there)}
    found |= {("tiny", name): figure for name, figure in perplexing.items()}
    for (scale, name), figure in found.items():
        assert f"scale={scale}" in " ".join(text.get_text() for text in figure.texts).replace("\n", " "), name


def test_what_would_say_nothing_is_not_drawn():
    one = arms_of(run())
    assert not {"forest", "tradeoff", "codebooks", "period", "bits_bucket", "levels", "norms", "variance"} & set(
        figures_of(one)
    )
    short = figures_of(arms_of(run(epochs=1), run("topk", epochs=1)))
    assert not {"accuracy_epoch", "accuracy_bytes", "accuracy_wire", "accuracy_time", "accuracy_modelled"} & set(short)
    assert "accuracy_time" not in figures_of(arms_of(run(), run("topk", shared=True)))
    assert figures.workers(settings(everything())) is None
    assert figures.draw_across([], Path("nowhere")) == []


# ---- perplexity


@pytest.fixture(scope="module")
def perplexing():
    with styled():
        yield figures_of(everything("perplexity", scale="tiny"))


def metric_axes(found):
    for name, figure in found.items():
        for axes in figure.axes:
            for label, limits, axis in (
                (axes.get_xlabel(), axes.get_xlim(), axes.xaxis),
                (axes.get_ylabel(), axes.get_ylim(), axes.yaxis),
            ):
                if label.startswith("test "):
                    yield name, label, limits, axis


def test_perplexity_is_lower_better_and_no_percent(perplexing):
    found = list(metric_axes(perplexing))
    assert {name for name, *_ in found} >= OF_ENDS | {"comparison", "accuracy_epoch", "accuracy_time"}
    arms = everything("perplexity")
    means = [arm.mean("metric") for arm in arms]
    for name, label, limits, _ in found:
        assert label.replace("\n", " ") == "test perplexity [-], lower is better"
        assert limits[0] < limits[1], name  # numbers rise: the best ends are at the bottom, or on the left
        assert 0 <= limits[0] <= min(means), name
        assert max(means) <= limits[1] or name in ("period", "bits_bucket"), name  # which are of some arms only
    for figure in perplexing.values():
        assert not any(
            re.search(r"\d %", text.get_text()) for text in texts(figure) if "t-interval" not in text.get_text()
        )


def test_early_epochs_are_cut_off_at_the_bad_end(perplexing, drawn):
    first, best = 1000, 97
    _, top = perplexing["accuracy_epoch"].axes[0].get_ylim()
    assert best < top < first
    bottom, top = drawn["accuracy_epoch"].axes[0].get_ylim()
    assert 40 < bottom < 88 and 93 < top <= 100.5


def test_nothing_of_perplexity_is_told_in_points(perplexing):
    for name, figure in perplexing.items():
        assert not any("point" in text.get_text() for text in texts(figure)), name


# ---- numbers


def test_modelled_seconds():
    (arm,) = arms_of(run(cost=0.5))
    column = sheet.column(arm, "modelled_seconds")
    assert modelled_seconds(arm, [1e9])[0] == pytest.approx(column)
    row = arm.runs[0].rows[2]
    expected = 0.6 + 8 * (row["wire_bytes"] + 30) / 1e8 + (row["rounds"] + 3) * 5e-5
    assert modelled_seconds(arm, [1e8])[0, 0, 2] == pytest.approx(expected)


def test_columns_are_nan_where_rows_have_none():
    (arm,) = arms_of(run(seed=0), run(seed=1, epochs=6))
    arm.runs[0].rows.pop()
    assert sheet.column(arm, "seconds").shape == (2, 5)
    assert np.isnan(sheet.column(arm, "compression_error")).all()


def test_the_step_is_split_where_communication_was_measured():
    own, shared = arms_of(run(), run("topk", shared=True))
    step = 1.0 * 6 / 59  # seconds of 6 epochs over the steps that are on the clock
    for arm in (own, shared):
        assert sum(spent for part, spent in parts(arm).items() if part in STEP) == pytest.approx(step)
        assert parts(arm)["waiting for the exchange"] == pytest.approx(0.12 * 6 / 59)
    assert parts(own)["communication"] == pytest.approx(0.06 * 6 / 59)
    assert not any(parts(shared)[part] for part in EXCHANGE)


def test_of_ddp_computation_holds_the_exchange():
    other = run()
    config = {**other.config, "comm": {"engine": "ddp"}}
    unmeasured = dict.fromkeys(f"{part}_seconds" for part in ("exposed", "encode", "comm", "decode"))
    (arm,) = arms_of(replace(other, config=config, rows=[{**row, **unmeasured} for row in other.rows]))
    assert parts(arm)[DDP] == pytest.approx(0.8 * 6 / 59)
    assert not any(parts(arm)[part] for part in ("compute", "waiting for the exchange", *EXCHANGE))
    with styled():
        assert breakdown([arm]) is not None


def test_regimes_share_out_the_steps():
    """An adaptive arm has a bar for its critical epochs and one for the others."""
    (arm,) = arms_of(run("powersgd", adaptive="accordion"))
    whole, *regimes = bars(arm)
    assert [bar.name for bar in regimes] == ["… critical epochs", "… other epochs"]
    share = critical_share(arm.runs[0])
    inside = sum(part > 0.5 for part in share)
    assert 0 < inside < 6
    steps = [10 * inside - 1, 10 * (6 - inside)]  # the first step is on no clock
    for part, spent in whole.parts.items():
        total = sum(n * bar.parts[part] for n, bar in zip(steps, regimes, strict=True))
        assert total == pytest.approx(59 * spent)
    (dense,) = arms_of(run())
    assert len(bars(dense)) == 1


def test_what_the_exchange_did_stands_beside_the_step_and_what_was_not_measured_says_so():
    arms = arms_of(run(), run("topk", shared=True))
    with styled():
        step, exchange = breakdown(arms).axes
    assert step.get_xlabel() == "step [ms]" and exchange.get_xlabel() == "its exchange [ms]"
    assert [text.get_text() for text in exchange.texts] == ["not measured"]
    assert exchange.texts[0].xy[1] == 1
    with styled():
        (alone,) = breakdown(arms_of(run("topk", shared=True))).axes
    assert alone.get_xlabel() == "step of all workers [ms]"


@pytest.mark.parametrize("count", [1, 8, 9, 21, 30])
def test_many_curves_are_shared_out_with_dense_in_each_panel(count):
    made = [run("powersgd", rank=rank) for rank in range(1, count)]
    arms = arms_of(run(), *made)
    panes = curves.panes(list(zip(arms, render.looks(arms), strict=True)))
    labels = [arm.label for pane in panes for arm, _ in pane]
    assert all(pane[0][0].dense and len(pane) <= curves.TOGETHER for pane in panes)
    assert sorted(set(labels)) == sorted(arm.label for arm in arms)
    assert labels.count("dense") == len(panes)


def test_sweeps_are_lines_of_arms_that_differ_in_one_option():
    made = [run("qsgd", bits=b, bucket_size=k) for b in (4, 2, 8) for k in (512, 64, None)]
    arms = arms_of(*made, run("powersgd"), run())
    lines = dict(finals.along(arms, finals.BITS))
    assert set(lines) == {"QSGD, bucket 64", "QSGD, bucket 512", "QSGD, bucket tensor"}
    assert [bits for bits, _ in lines["QSGD, bucket 64"]] == [2, 4, 8]
    lines = dict(finals.along(arms, finals.BUCKET))
    assert set(lines) == {"QSGD 2 bits", "QSGD 4 bits", "QSGD 8 bits"}
    assert [size for size, _ in lines["QSGD 2 bits"]] == [64, 512, finals.WHOLE]
    local = [run(sync=s, period=h) for s in ("local_sgd", "post_local_sgd") for h in (16, 4)]
    lines = dict(finals.along(arms_of(*local, run()), finals.PERIOD))
    assert {name: [h for h, _ in points] for name, points in lines.items()} == {
        "local SGD": [4, 16],
        "post-local SGD": [4, 16],
    }


def test_layers_whose_norms_are_rounding_errors_are_left_out_and_named():
    arms = arms_of(run(), run("powersgd", adaptive="accordion", rank=2), run("topk", adaptive="accordion"))
    for row in (row for arm in arms[1:] for row in arm.runs[0].rows):
        row["norms"] = {"conv.bias": 1e-7, **row["norms"]}
    figure = norms(arms)
    first, second = figure.axes
    assert all(len([line for line in axes.lines if line.get_color() != "black"]) == len(LAYERS) for axes in figure.axes)
    assert first.get_ylim() == second.get_ylim() and first.get_ylim()[0] > 1e-4
    assert all(axes.get_legend() is None for axes in figure.axes) and len(figure.legends) == 1
    note = " ".join(text.get_text().replace("\n", " ") for text in figure.texts)
    assert "Left out, because they are rounding errors and no gradients: 1 layer such as conv.bias" in note
    assert told_apart([{"a": [1.0, 2.0], "b": [0.01, math.nan]}, {"a": [1e-5]}]) == (["a", "b"], [])
    assert told_apart([{}]) == ([], [])


@pytest.mark.parametrize("epochs", [1, 2, 3, 5, 12, 300])
def test_only_whole_epochs_are_numbered(epochs):
    arms = arms_of(run("powersgd", adaptive="accordion", epochs=epochs))
    for figure in filter(None, (norms(arms), level_maps(arms), curves.accuracy_against(arms, "epoch"))):
        for axes in figure.axes:
            low, high = axes.get_xlim()
            shown = [tick for tick in axes.get_xticks() if low <= tick <= high]
            assert shown and all(tick == int(tick) for tick in shown)


def test_the_comparison_shows_where_arms_end_and_the_bytes_of_the_table():
    figure = side_by_side(everything())
    axes = figure.axes[0]
    assert (
        axes.get_xlabel() == "sent per worker [bytes, log scale]" == figures.tradeoff(everything()).axes[0].get_xlabel()
    )
    of = {
        kind: [line for line in axes.lines if line.get_gid() == kind]
        for kind in ("curve", "end", "outside", "interval")
    }
    assert len(of["end"]) + len(of["outside"]) == len(of["curve"]) == len(everything())
    assert all(line.get_alpha() < 0.5 for line in of["curve"]) and {line.get_alpha() for line in of["interval"]} == {
        None
    }
    note = " ".join(text.get_text().replace("\n", " ") for text in figure.texts)
    assert f"the axis starts at {axes.get_ylim()[0]:.0f} %" in note


@pytest.mark.parametrize("gone", [float("nan"), 0.0])
def test_an_arm_without_usable_norms_leaves_the_others_their_axis(gone, recwarn):
    arms = arms_of(run(), run("powersgd", adaptive="accordion", rank=2), run("topk", adaptive="accordion"))
    for row in arms[-1].runs[0].rows:
        row["norms"] = dict.fromkeys(row["norms"], gone)
    figure = norms(arms)
    limits = {axes.get_ylim() for axes in figure.axes if axes.get_yscale() == "log"}
    assert len(limits) == 1 and min(limits)[0] > 0
    assert not [warned for warned in recwarn if "log" in str(warned.message)]


def test_critical_regimes_and_norms():
    (arm,) = arms_of(run("powersgd", adaptive="accordion"))
    own = arm.runs[0]
    assert critical_share(own) == pytest.approx([1, 1, 4 / 6, 2 / 6, 0, 0])
    epochs, by_layer = norms_by_layer(own)
    assert epochs == list(range(6)) and list(by_layer) == LAYERS
    for row in own.rows:
        row["norms"] = None
    own.rows[1]["decisions"] = {}
    epochs, by_layer = norms_by_layer(own)
    assert epochs == [0, 2, 3, 4, 5] and by_layer[LAYERS[0]] == [1, 3, 4, 5, 6]


def test_lines_across_numbers_of_workers():
    arms = [arm for arms in across() for arm in arms]
    lines = by_method(arms)
    assert {name: [count for count, _ in points] for name, points in lines} == {
        "local SGD, H 2": [2, 4, 8],
        "local SGD, H 8": [2, 4, 8],
        "dense": [2, 4, 8],
    }
    two_batches = [*arms, *arms_of(run(workers=2, batch_size=64), run(workers=4, batch_size=64))]
    assert {name for name, _ in by_method(two_batches)} >= {"dense, 32 samples each", "dense, 64 samples each"}


def note_of(settings):
    figure = figures.workers(settings)
    return figure and " ".join(text.get_text() for text in figure.texts).replace("\n", " ")


def of_data(workers, **data):
    one = run(workers=workers)
    return replace(one, config={**one.config, "dataset": {**one.config["dataset"], **data}})


def test_no_line_joins_runs_of_other_data_or_another_metric():
    plain = run(workers=2)
    for other in (of_data(4, subset=1000), of_data(4, validation=500), run(workers=4, metric="perplexity", end=90)):
        assert note_of(settings(arms_of(plain, other))) is None
    same = settings(arms_of(of_data(2, subset=1000), of_data(4, subset=1000)))
    assert "6 epochs, accuracy, 1,000 training samples" in note_of(same)


def test_a_method_with_two_arms_at_one_number_of_workers_has_no_line_and_is_named():
    twice = [of_data(workers, augment=augment) for workers in (2, 4) for augment in (False, True)]
    made = arms_of(*(run("fp16", workers=workers) for workers in (2, 4)), *twice)
    arms = [replace(arm, apart="") for arm in made]
    assert {arm.label: sum(other.label == arm.label for other in arms) for arm in arms} == {"fp16": 2, "dense": 4}
    with styled():
        (axes,) = figures.workers([arms]).axes
        assert sum(line.get_gid() == "curve" for line in axes.lines) == 1
    said = "Not drawn, as several of its arms have one number of workers: dense, 32 samples each."
    assert said in note_of([arms])


@pytest.mark.parametrize("told", [{}, {"compute_seconds": None}])
def test_an_arm_that_does_not_tell_its_times_is_not_told_on_the_page_and_others_are(told):
    """Of a user's own loop: without the column, and with null in it."""
    bench, own = arms_of(run(), run("topk"))
    rows = [{key: value for key, value in row.items() if key != "compute_seconds"} | told for row in own.runs[0].rows]
    own = replace(own, runs=(replace(own.runs[0], attached=True, rows=rows),))
    found = step_times([bench, own])
    assert all(part["values"][0] is not None and part["values"][1] is None for part in found["parts"])
    assert found["beside"][1] == "not told" and step_times([own]) is None
    with styled():
        assert len(breakdown([bench, own]).axes[0].get_yticks()) == 1


def test_codebooks_are_drawn_where_a_policy_has_moved_them():
    arms = arms_of(run("qsgd", adaptive="alq", bits=2), run("qsgd", bits=2))
    fitted, fixed = arms
    assert levels_by_epoch(fitted.runs[0]) == {"2": [[0.2, 1.0]] * 2 + [[pytest.approx(0.3), 1.0]] * 4}
    assert levels_by_epoch(fixed.runs[0]) == {}
    with styled():
        (axes,) = figures_of(arms, only=["codebooks"])["codebooks"].axes
    assert axes.get_title("left") == "ALQ (QSGD 2 bits), 2 bits" and len(axes.lines) == 2
    assert sorted(max(line.get_ydata()) for line in axes.lines) == pytest.approx([0.3, 1.0])


def with_column(run_, name, values):
    """A run whose rows, and summary, have one more column."""
    rows = [{**row, name: value} for row, value in zip(run_.rows, values, strict=True)]
    return replace(run_, rows=rows, summary={**run_.summary, name: values[-1]})


def curve_of(axes):
    (line,) = [line for line in axes.lines if line.get_gid() == "curve"]
    return line.get_xdata().tolist(), line.get_ydata().tolist()


def test_simulated_time_is_drawn_of_arms_that_have_it():
    seconds = [3.0, 7.0, 9.0, 14.0, 15.0, 20.0]
    arms = arms_of(run(), with_column(run(sync="drawn_times"), "simulated_seconds", seconds))
    (axes,) = curves.accuracy_against(arms, "simulated_seconds").axes
    xs, ys = curve_of(axes)
    assert xs == seconds and axes.get_xlabel() == "simulated time, computing alone [s]"
    assert ys == [100 * row["accuracy"] for row in arms[1].runs[0].rows]
    assert curves.accuracy_against(arms[:1], "simulated_seconds") is None


def test_the_consensus_distance_is_drawn_over_steps():
    distances = [0.5, 0.4, 0.2, 0.3, 0.1, 0.05]
    arms = arms_of(run(), with_column(run(sync="gossip"), "consensus_distance", distances))
    (axes,) = curves.consensus_distance(arms).axes
    assert curve_of(axes) == ([10.0, 20.0, 30.0, 40.0, 50.0, 60.0], distances)
    assert axes.get_yscale() == "log" and curves.consensus_distance(arms[:1]) is None
