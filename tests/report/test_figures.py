"""Figures of the report, from made-up runs: as objects, not as pixels."""

import copy
import functools
import itertools
import math
import re
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
import yaml
from matplotlib.legend import Legend
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from accordion_bench.options.conf_dir import conf_dir
from accordion_bench.report.compare.grouping import group, settings
from accordion_bench.report.compare.other_links import modelled_seconds
from accordion_bench.report.read.load import Run
from accordion_bench.report.render import colours, figures
from accordion_bench.report.render.draw import draw
from accordion_bench.report.render.figures import curves, series, style, sweeps, tradeoff
from accordion_bench.report.render.figures.breakdown import BESIDE, PARTS, bars, breakdown, parts
from accordion_bench.report.render.figures.norms import critical_share, norms_by_layer
from accordion_bench.report.render.figures.tradeoff import front
from accordion_bench.report.render.figures.workers import by_method
from accordion_bench.runs.metrics import METRICS
from tests.kit.figures import figures_of

LAYERS = [f"stages.0.{i}.conv.weight" for i in range(6)]
WORDS_AS_AXES = ("layer", "method", "method and payload")  # axes whose numbers are names
WITHIN_ONE = {"accuracy_time", "accuracy_modelled", "breakdown", "tradeoff", "pareto", "period", "bits_bucket"}


@functools.cache
def yaml_node(group, name):
    return yaml.safe_load((conf_dir() / group / f"{name}.yaml").read_text())


def node(group, name, **options):
    return {**copy.deepcopy(yaml_node(group, name)), **options}


def run(compressor="none", seed=0, adaptive=None, sync="every_step", period=None, end=0.9, cost=1.0, **changes):
    """A finished run of 6 epochs that has every column; `changes` are options of the compressor or of the run.

    Args:
        end: the metric after the last epoch.
        cost: bytes, compared with dense.
    """
    metric = changes.pop("metric", "accuracy")
    epochs, shared = changes.pop("epochs", 6), changes.pop("shared", False)
    of_run = {key: changes.pop(key) for key in ("workers", "batch_size", "scale", "target") if key in changes}
    policy = {adaptive: node("adaptive", adaptive)} if adaptive else {}
    config = {
        "model": node("model", "resnet8"),
        "dataset": node("dataset", "digits"),
        "compressor": node("compressor", compressor, **changes),
        "sync": node("sync", sync, **({"period": period} if period else {})),
        "adaptive": policy,
        "network": {"bandwidth": 1e9, "latency": 5e-5},
        "seed": seed,
        "epochs": epochs,
        "batch_size": 32,
        "workers": 4,
        "choices": {"model": "resnet8", "dataset": "digits", "compressor": compressor, "sync": sync},
        **of_run,
    }
    noise = 0.004 * ((seed * 7919) % 5 - 2)
    rows = []
    for epoch in range(epochs):
        away = math.exp(-epoch)
        value = end + noise - 0.5 * away if metric == "accuracy" else (end + 10 * noise) * (1 + 9 * away)
        wire, rounds = int(1.5e6 * cost * (epoch + 1)), 60 * (epoch + 1)
        compute, comm = 0.2 * (epoch + 1), 8 * (wire + 30) / 1e9 + (rounds + 3) * 5e-5
        parts = {"data": 0.01, "compute": 0.8, "exposed": 0.12, "update": 0.04, "policy": 0.03}
        inside = {"encode": 0.05, "comm": None if shared else 0.06, "decode": 0.01}
        spent = {f"{k}_seconds": None if v is None else v * (epoch + 1) for k, v in (parts | inside).items()}
        rows.append(
            {
                "epoch": epoch,
                "step": 10 * (epoch + 1),
                "lr": 0.1 if epoch < 3 else 0.01,
                metric: value,
                "payload_bytes": int(1e6 * cost * (epoch + 1)),
                "wire_bytes": wire,
                "rounds": rounds,
                "control_wire_bytes": 30,
                "control_rounds": 3,
                **spent,
                "seconds": (epoch + 1) * sum(parts.values()),
                "modelled_seconds": compute + comm,
                "modelled_comm_seconds": comm,
                "plan": {"batch_size": 32, "levels": levels(epoch) if adaptive == "accordion" else {}},
                "decisions": {"accordion": {"names": LAYERS, "norm": [1.0 + epoch] * 6}} if adaptive else {},
                "norms": {layer: math.exp(-epoch) * (1 + i) for i, layer in enumerate(LAYERS)} if policy else None,
                "compression_error": 0.1 / (epoch + 1) if compressor == "qsgd" else None,
            }
        )
    keep = {key: value for key, value in rows[-1].items() if key.endswith(("_bytes", "seconds", "rounds"))}
    summary = {**keep, "metric_name": metric, "metric": rows[-1][metric], "best_metric": rows[-1][metric]}
    summary |= {"epochs": epochs, "workers": config["workers"]}
    return Run(Path(f"{compressor}-{seed}"), config, {}, summary, rows)


def levels(epoch):
    return {layer: 2 if epoch < 2 + i % 3 else 1 for i, layer in enumerate(LAYERS)}


def arms_of(*runs):
    return group(runs)[0]


def everything(metric="accuracy", **changes):
    """Nine arms with two seeds, whose runs allow every figure of one setting."""
    scale = {"accuracy": (0.9, 1), "perplexity": (100, -100)}[metric]

    def score(bonus):
        return scale[0] + scale[1] * bonus

    made = []
    for seed in (0, 1):
        target = {"accuracy": 0.7, "perplexity": 150}[metric]
        of = functools.partial(run, seed=seed, metric=metric, target=target, **changes)
        made += [
            of(end=score(0.03)),
            of("powersgd", rank=1, end=score(0.0), cost=0.02),
            of("powersgd", rank=2, end=score(0.02), cost=0.04),
            of("powersgd", adaptive="accordion", end=score(0.02), cost=0.03),
            of("qsgd", bits=2, bucket_size=64, end=score(-0.02), cost=0.1),
            of("qsgd", bits=4, bucket_size=64, end=score(0.01), cost=0.2),
            of("qsgd", bits=4, bucket_size=512, end=score(0.0), cost=0.19),
            of(sync="local_sgd", period=2, end=score(0.02), cost=0.5),
            of(sync="local_sgd", period=8, end=score(0.01), cost=0.12),
        ]
    return arms_of(*made)


@pytest.fixture(scope="module")
def drawn():
    """Every figure of one setting by name, and the one across settings."""
    arms = everything()
    with mpl.rc_context(figures.STYLE):
        found = figures_of(arms) | {"workers": figures.workers(across())}
        for figure in found.values():
            figure.draw_without_rendering()
        yield found


def across():
    made = [run(sync="local_sgd", period=h, workers=w, seed=s) for h in (2, 8) for w in (2, 4, 8) for s in (0, 1)]
    return settings(arms_of(*made, *(run(workers=w) for w in (2, 4, 8))))


def texts(figure):
    return [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]


def all_legends(figure):
    return figure.findobj(Legend)


# ---- all figures


def test_every_figure_is_written_as_png_and_pdf(tmp_path, drawn, monkeypatch):
    assert set(drawn) == set(figures.NAMES)
    made = {name: lambda name=name: drawn[name] if name in ("comparison", "norms") else None for name in drawn}
    monkeypatch.setattr(figures, "rooms", lambda *_: made)
    ((pngs, failed),) = draw([everything()], tmp_path, figures.OF_A_SETTING, figures.BANDWIDTHS, pdf=True)
    assert failed == []
    pngs += figures.draw_across(across(), tmp_path, pdf=True)
    assert [png.name for png in pngs] == ["comparison.png", "norms.png", "workers.png"]
    assert [png.name for png in figures.draw_all(everything(), tmp_path, "-7")] == ["comparison-7.png", "norms-7.png"]
    assert not (tmp_path / "norms-7.pdf").exists()
    for png in pngs:
        pdf = png.with_suffix(".pdf").read_bytes()
        assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 5000
        assert pdf.startswith(b"%PDF") and b"/CIDFontType2" in pdf
        assert b"/Type3" not in pdf  # which some publishers refuse


def test_every_axis_has_a_name_and_a_unit(drawn):
    for name, figure in drawn.items():
        for axes in figure.axes:
            for text in (axes.get_xlabel(), axes.get_ylabel()):
                assert re.search(r"\[.+\]", text) or text in WORDS_AS_AXES, (name, text)


def test_letters_can_be_read_at_a_paper_columns_width(drawn):
    for name, figure in drawn.items():
        assert figure.get_figwidth() <= 2 * style.PANEL + 1e-9, name
        sizes = {text.get_fontsize(): text.get_text() for text in texts(figure)}
        assert min(sizes) >= 7, (name, sizes)
        for axes in figure.axes:
            assert axes.get_position().width * figure.get_figwidth() > 1.5, name


def test_nothing_is_cut_off_or_on_top_of_another(drawn):
    for name, figure in drawn.items():
        width, height = figure.get_size_inches() * figure.dpi
        renderer = figure.canvas.get_renderer()
        boxes = [
            Bbox.union([axes.bbox, axes.xaxis.get_tightbbox(renderer), axes.yaxis.get_tightbbox(renderer)])
            for axes in figure.axes
        ]
        boxes += [legend.get_window_extent(renderer) for legend in all_legends(figure)]
        boxes += [text.get_window_extent(renderer) for text in figure.texts if text.get_text()]
        for box in boxes:
            assert box.x0 > -1 and box.x1 < width + 1 and box.y0 > -1 and box.y1 < height + 1, name
        for a, b in itertools.combinations(boxes, 2):
            across = min(a.x1, b.x1) - max(a.x0, b.x0)
            along = min(a.y1, b.y1) - max(a.y0, b.y0)
            assert across < 1 or along < 1, (name, a, b)


def test_a_method_has_one_colour_in_all_figures(drawn):
    arms = everything()
    expected = {arm.label: look for arm, look in zip(arms, colours.looks(arms), strict=True)}
    seen = dict.fromkeys(expected, 0)
    for name, figure in drawn.items():
        for legend in all_legends(figure):
            for handle, text in zip(legend.legend_handles, legend.get_texts(), strict=True):
                label = text.get_text().partition(":")[0]
                if label in expected and name != "workers":
                    seen[label] += 1
                    assert mpl.colors.to_hex(handle.get_color()) == expected[label].colour.lower(), (name, label)
                    assert handle.get_marker() == expected[label].marker, (name, label)
    assert min(seen.values()) >= 6
    assert expected["dense"].colour == colours.BLACK


def test_small_scales_are_told_in_every_figure(perplexing):
    there = settings(arms_of(run(workers=2, scale="small"), run(workers=4, scale="small")))
    with mpl.rc_context(figures.STYLE):
        found = {("small", "workers"): figures.workers(there)}
    found |= {("tiny", name): figure for name, figure in perplexing.items()}
    for (scale, name), figure in found.items():
        assert f"scale={scale}" in " ".join(text.get_text() for text in figure.texts).replace("\n", " "), name


def test_what_would_say_nothing_is_not_drawn():
    one = arms_of(run())
    assert not {"forest", "pareto", "period", "bits_bucket", "levels", "norms", "variance"} & set(figures_of(one))
    short = figures_of(arms_of(run(epochs=1), run("topk", epochs=1)))
    assert not {"accuracy_epoch", "accuracy_bytes", "accuracy_wire", "accuracy_time", "accuracy_modelled"} & set(short)
    assert "accuracy_time" not in figures_of(arms_of(run(), run("topk", shared=True)))
    assert figures.workers(settings(everything())) is None
    assert figures.draw_across([], Path("nowhere")) == []


# ---- colours


def test_every_method_of_conf_has_its_own_colour_and_marker():
    there = {file.stem for g in ("compressor", "sync", "adaptive") for file in (conf_dir() / g).glob("*.yaml")}
    assert there - {"none", "every_step"} <= set(colours.METHODS)
    looks = [(hue, marker) for hue, markers in colours.METHODS.values() for marker in markers]
    doubles = {look for look in looks if looks.count(look) > 1}
    assert doubles <= {(colours.ORANGE, "d"), (colours.SKY, "d"), (colours.ORANGE, "D"), (colours.SKY, "D")}
    assert {hue for hue, _ in colours.METHODS.values()} == set(colours.HUES)


def test_looks_do_not_depend_on_order_or_company():
    arms = everything()
    looks = dict(zip((arm.label for arm in arms), colours.looks(arms), strict=True))
    backwards = colours.looks(arms[::-1])
    assert [looks[arm.label] for arm in arms[::-1]] == backwards
    for arm in arms:
        (alone,) = colours.looks([arm])
        assert (alone.colour, alone.marker) == (looks[arm.label].colour, looks[arm.label].marker)
    assert len(set(looks.values())) == len(looks)


def test_a_family_has_one_hue_its_levels_lines_and_accordion_another():
    arms = arms_of(*(run("powersgd", rank=rank) for rank in (1, 2, 4, 8)), run("powersgd", adaptive="accordion"))
    *ranks, accordion = colours.looks(arms)
    assert {look.colour for look in ranks} == {colours.BLUE} and accordion.colour == colours.VERMILION
    assert len({str(look.line) for look in ranks}) == len({look.fill for look in ranks}) == 4


def test_twins_get_different_lines():
    arms = arms_of(*(run("topk", error_feedback=on) for on in (True, False)), run("topk", density=0.01))
    looks = colours.looks(arms)
    assert len({(str(look.line), look.fill) for look in looks}) == 3 and len({look.colour for look in looks}) == 1


def test_an_unknown_method_keeps_its_colour():
    config = {"compressor": {"_target_": "gone.Other"}, "choices": {"compressor": "other"}}
    assert colours.method(config) == colours.method(copy.deepcopy(config))
    assert colours.method(config)[0] in colours.HUES


# Machado, Oliveira, Fernandes (2009): what is left of linear RGB without one kind of cones
VISION = {
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "full": np.eye(3),
}


def lab(colour, vision):
    """CIE L*a*b* of a colour as somebody sees it."""
    rgb = np.array(mpl.colors.to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(np.array(vision) @ linear, 0, 1) / [0.9505, 1, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def levels_of_maps():
    from accordion_bench.report.render.figures.level_map import DENSE, LADDER

    return [DENSE, mpl.colormaps[LADDER](0.15), mpl.colormaps[LADDER](0.75)]


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("palette", ["methods", "levels", "parts"])
def test_colours_are_apart_under_colour_blindness(palette, vision):
    """A difference of 2.3 in L*a*b* can just be seen; parts of a bar need only differ from their neighbours."""
    palettes = {"methods": (colours.BLACK, *colours.HUES), "levels": levels_of_maps()}
    palettes["parts"] = list(dict.fromkeys(PARTS.values()))
    seen = [lab(colour, VISION[vision]) for colour in palettes[palette]]
    pairs = itertools.pairwise(seen) if palette == "parts" else itertools.combinations(seen, 2)
    assert min(float(np.linalg.norm(a - b)) for a, b in pairs) > 15


# ---- perplexity


@pytest.fixture(scope="module")
def perplexing():
    with mpl.rc_context(figures.STYLE):
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
    assert {name for name, *_ in found} >= WITHIN_ONE - {"breakdown"} | {"forest", "comparison", "accuracy_epoch"}
    arms = everything("perplexity")
    means = [arm.mean("metric") for arm in arms]
    for name, label, limits, _ in found:
        assert label == "test perplexity [-], lower is better"
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


def test_a_bad_arm_is_drawn_at_the_edge_with_its_number():
    with mpl.rc_context(figures.STYLE):
        figure = tradeoff.tradeoff(
            arms_of(run(metric="perplexity", end=100), run("topk", metric="perplexity", end=900))
        )
    (text,) = figure.axes[0].texts
    assert re.fullmatch(r"↑ 9\d\d", text.get_text())
    assert figure.axes[0].get_ylim()[1] < 200


# ---- numbers


def test_modelled_seconds():
    (arm,) = arms_of(run(cost=0.5))
    column = series.column(arm, "modelled_seconds")
    assert modelled_seconds(arm, [1e9])[0] == pytest.approx(column)
    row = arm.runs[0].rows[2]
    expected = 0.6 + 8 * (row["wire_bytes"] + 30) / 1e8 + (row["rounds"] + 3) * 5e-5
    assert modelled_seconds(arm, [1e8])[0, 0, 2] == pytest.approx(expected)


def test_columns_are_nan_where_rows_have_none():
    (arm,) = arms_of(run(seed=0), run(seed=1, epochs=6))
    arm.runs[0].rows.pop()
    assert series.column(arm, "seconds").shape == (2, 5)
    assert np.isnan(series.column(arm, "compression_error")).all()


@pytest.mark.parametrize("metric", METRICS)
def test_the_front_is_what_nothing_beats(metric):
    random = np.random.default_rng(0)
    places = [(float(cost), float(score)) for cost, score in random.integers(1, 9, (40, 2))]
    of = METRICS[metric]
    slow = set()
    for i, (cost, score) in enumerate(places):
        cheaper = [s for c, s in places if c < cost]
        equal = [s for c, s in places if c == cost]
        if not any(of.reaches(s, score) for s in cheaper) and not any(of.better(s, score) for s in equal):
            slow.add(i)
    arms = arms_of(run(metric=metric, end=0.5))
    assert front(arms, places) == slow


def test_the_step_is_split_where_communication_was_measured():
    own, shared = arms_of(run(), run("topk", shared=True))
    step = 1.0 * 6 / 59  # seconds of 6 epochs over the steps that are on the clock
    for arm in (own, shared):
        assert sum(spent for part, spent in parts(arm).items() if part not in BESIDE) == pytest.approx(step)
        assert parts(arm)["exchange not hidden"] == pytest.approx(0.12 * 6 / 59)
    assert parts(own)["communication"] == pytest.approx(0.06 * 6 / 59)
    assert not any(parts(shared)[part] for part in BESIDE)


def test_of_ddp_computation_holds_the_exchange():
    other = run()
    config = {**other.config, "comm": {"engine": "ddp"}}
    unmeasured = dict.fromkeys(f"{part}_seconds" for part in ("exposed", "encode", "comm", "decode"))
    (arm,) = arms_of(replace(other, config=config, rows=[{**row, **unmeasured} for row in other.rows]))
    assert parts(arm)["compute and exchange"] == pytest.approx(0.8 * 6 / 59)
    assert not any(parts(arm)[part] for part in ("compute", "exchange not hidden", *BESIDE))
    with mpl.rc_context(figures.STYLE):
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


def test_ends_are_inside_the_axis_and_a_diverged_arm_does_not_stretch_it():
    good = arms_of(run(end=0.9), run("topk", end=0.85))
    bottom, top = curves.limits_of([(arm, None) for arm in good])
    assert bottom < 85 and top > 90
    with_bad = arms_of(run(end=0.9), run("topk", end=0.85), run("powersgd", end=0.51))
    assert curves.limits_of([(arm, None) for arm in with_bad])[0] == pytest.approx(bottom)


@pytest.mark.parametrize("count", [1, 8, 9, 21, 30])
def test_many_curves_are_shared_out_with_dense_in_each_panel(count):
    made = [run("powersgd", rank=rank) for rank in range(1, count)]
    arms = arms_of(run(), *made)
    panes = curves.panes(list(zip(arms, colours.looks(arms), strict=True)))
    labels = [arm.label for pane in panes for arm, _ in pane]
    assert all(pane[0][0].dense and len(pane) <= curves.TOGETHER for pane in panes)
    assert sorted(set(labels)) == sorted(arm.label for arm in arms)
    assert labels.count("dense") == len(panes)


def test_sweeps_are_lines_of_arms_that_differ_in_one_option():
    made = [run("qsgd", bits=b, bucket_size=k) for b in (4, 2, 8) for k in (512, 64, None)]
    arms = arms_of(*made, run("powersgd"), run())
    lines = dict(sweeps.along(arms, sweeps.BITS))
    assert set(lines) == {"qsgd, bucket 64", "qsgd, bucket 512", "qsgd, bucket tensor"}
    assert [bits for bits, _ in lines["qsgd, bucket 64"]] == [2, 4, 8]
    lines = dict(sweeps.along(arms, sweeps.BUCKET))
    assert set(lines) == {"qsgd 2 bits", "qsgd 4 bits", "qsgd 8 bits"}
    assert [size for size, _ in lines["qsgd 2 bits"]] == [64, 512, sweeps.WHOLE]
    local = [run(sync=s, period=h) for s in ("local_sgd", "post_local_sgd") for h in (16, 4)]
    lines = dict(sweeps.along(arms_of(*local, run()), sweeps.PERIOD))
    assert {name: [h for h, _ in points] for name, points in lines.items()} == {
        "local SGD": [4, 16],
        "post-local SGD": [4, 16],
    }


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
