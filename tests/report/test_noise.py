"""No figure ranks within noise: fronts, pale arms and near axes only where intervals separate arms."""

import functools
import itertools
import re

import numpy as np
import pytest
from matplotlib.figure import Figure

from accordion_bench.report.compare.intervals import beaten, half_width, pareto_front
from accordion_bench.report.render import looks
from accordion_bench.report.render.figures import sheet
from accordion_bench.report.render.figures.curves import tradeoff
from accordion_bench.report.render.figures.sheet import ends, styled
from accordion_bench.runs.metrics import METRICS
from tests.kit.figures import arms_of, figures_of, run

ENDS = ["tradeoff", "forest", "period", "bits_bucket"]
CURVES = ["comparison", "accuracy_epoch", "accuracy_bytes", "accuracy_wire", "accuracy_modelled"]


def three(end, other, spread=0.004, seeds=(0, 1, 2)):
    """Dense and a cheap compressor, whose metric ends here and there."""
    dense = [run(seed=s, end=end, spread=spread) for s in seeds]
    return arms_of(*dense, *(run("topk", seed=s, end=other, cost=0.1, spread=spread) for s in seeds))


def drawn(arms, names):
    with styled():
        return figures_of(arms, only=names)


def gids(figure, gid):
    return [line for axes in figure.axes for line in axes.lines if line.get_gid() == gid]


def note(figure):
    return " ".join(text.get_text() for text in figure.texts).replace("\n", " ")


# ---- fronts


def test_a_front_is_drawn_where_intervals_separate_its_arms():
    figure = drawn(three(0.95, 0.90), ["tradeoff"])["tradeoff"]
    (wire, _) = gids(figure, "front")
    assert list(wire.get_ydata()) == sorted(wire.get_ydata()) and "line: arms that are shown better" in note(figure)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"spread": 0.02, "other": 0.949}, "no front: no arm is shown better than all that cost less"),
        ({"seeds": (0,), "other": 0.5}, "one run of each arm, so nothing is ranked"),
    ],
)
def test_within_noise_and_with_one_seed_there_is_no_front_and_nothing_pale(changes, said):
    figure = drawn(three(0.95, **changes), ["tradeoff"])["tradeoff"]
    assert not gids(figure, "front") and said in note(figure)
    assert {line.get_alpha() for axes in figure.axes for line in axes.lines} == {None}


@pytest.mark.parametrize("other", ["network", "processor"])
def test_modelled_times_of_two_networks_or_machines_rank_nothing(other):
    arms = three(0.90, 0.95)
    for one in arms[1].runs:
        if other == "network":
            one.config["network"] = {"bandwidth": 1e8, "latency": 5e-5}
        one.environment["processor"] = "A"
    for one in arms[0].runs:
        one.environment["processor"] = "A" if other == "network" else "B"
    figure = drawn(arms, ["tradeoff"])["tradeoff"]
    wire, time = figure.axes
    assert any(line.get_alpha() for line in wire.lines) and not any(line.get_alpha() for line in time.lines)
    assert not [line for line in time.lines if line.get_gid() == "front"]
    assert "Modelled times do not compare, because the" in note(figure)


def test_an_arm_is_pale_where_another_is_shown_better_and_costs_no_more():
    made = [
        (run(seed=s, end=0.9), run("topk", seed=s, end=0.95, cost=0.1), run("powersgd", seed=s, end=0.9, cost=0.05))
        for s in (0, 1, 2)
    ]
    arms = arms_of(*itertools.chain(*made))
    assert [arms[i].label for i in beaten(arms, "wire_bytes")] == ["dense"]
    assert [arm.label for arm in pareto_front(arms, "wire_bytes")] == ["PowerSGD rank 2", "TopK 10 %"]
    figure = drawn(arms, ["tradeoff"])["tradeoff"]
    pale = [line for line in figure.axes[0].lines if line.get_gid() == "end" and line.get_alpha()]
    assert [line.get_color() for line in pale] == ["#000000"] and "pale: another arm is shown better" in note(figure)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("seed", range(4))
def test_no_arm_of_the_front_is_beaten_and_each_is_separated_from_all_cheaper_ones(metric, seed):
    random = np.random.default_rng(seed)
    costs, scores = random.integers(1, 9, 12) / 10, random.integers(60, 99, 12) / 100
    made = [
        run("powersgd", rank=i + 1, seed=s, cost=c, end=e, metric=metric)
        for i, (c, e) in enumerate(zip(costs, scores, strict=True))
        for s in (0, 1, 2)
    ]
    arms = arms_of(*made)
    losers = {arms[i].label for i in beaten(arms, "wire_bytes")}
    corners = pareto_front(arms, "wire_bytes")
    assert losers and not losers & {arm.label for arm in corners}
    for arm, other in itertools.product(corners, arms):
        if other is not arm and other.mean("wire_bytes") <= arm.mean("wire_bytes"):
            gap = METRICS[metric].better(arm.mean("metric"), other.mean("metric"))
            differences = [a - b for a, b in zip(arm.values("metric"), other.values("metric"), strict=True)]
            assert gap and abs(np.mean(differences)) > half_width(differences)


def test_times_within_noise_make_nobody_cheaper():
    made = []
    for s in (0, 1, 2):
        for name, end, factor in (("none", 0.95, 1.0), ("topk", 0.9, 1.001)):
            one = run(name, seed=s, end=end, cost=1.0)
            one.summary["modelled_seconds"] *= factor * (1 + 0.05 * ((s * 3 + len(name)) % 4))
            made.append(one)
    arms = arms_of(*made)
    assert beaten(arms, "modelled_seconds") == []


# ---- axes


def metric_spans(found):
    for name, figure in found.items():
        for axes in figure.axes:
            for label, (low, high) in ((axes.get_xlabel(), axes.get_xlim()), (axes.get_ylabel(), axes.get_ylim())):
                if label.startswith("test "):
                    yield name, low, high


@pytest.mark.parametrize("images", [None, 10_000, 360, 50])
def test_axes_of_accuracy_span_five_points_and_ten_images(images):
    made = [run(sync="local_sgd", period=h, seed=s, end=0.9, spread=1e-5) for h in (2, 8) for s in (0, 1)]
    made += [run(seed=s, end=0.9001, spread=1e-5) for s in (0, 1)]
    for one in made:
        one.summary["test_size"] = images
    spans = list(metric_spans(drawn(arms_of(*made), [*ENDS, *CURVES])))
    assert {name for name, *_ in spans} >= {"tradeoff", "forest", "period", "comparison", "accuracy_modelled"}
    least = max(5, 1000 / images if images else 0)
    assert all(high - low >= least - 1e-9 and low >= 0 and high <= 100.5 for _, low, high in spans), spans


def test_an_axis_of_perplexity_spans_a_share_of_the_best():
    of = functools.partial(run, metric="perplexity", end=100, spread=0)
    arms = arms_of(*(of(name, seed=s) for name in ("none", "topk") for s in (0, 1)))
    assert all(high - low >= 0.05 * 90 for _, low, high in metric_spans(drawn(arms, ENDS)))


def test_early_epochs_are_cut_off_only_where_intervals_separate_arms():
    first = 46
    apart, alike = three(0.95, 0.90), three(0.95, 0.949, spread=0.02)
    assert sheet.apart(apart) and not sheet.apart(alike)
    names = ["accuracy_epoch", "accuracy_bytes"]
    assert all(low > 60 for _, low, _ in metric_spans(drawn(apart, names)))
    assert all(low < first for _, low, _ in metric_spans(drawn(alike, names)))
    assert all(low < first for _, low, _ in metric_spans(drawn(three(0.95, 0.9, seeds=(0,)), names)))
    for arms, said in ((apart, True), (alike, False)):
        assert ("early epochs are cut off" in note(drawn(arms, names)["accuracy_epoch"])) == said


@pytest.mark.parametrize("metric", ["accuracy", "perplexity"])
def test_an_arm_far_behind_does_not_stretch_the_axes_and_stands_at_the_edge_with_its_number(metric):
    good, bad = {"accuracy": ((0.9, 0.85), 0.2), "perplexity": ((100, 110), 900)}[metric]
    of = functools.partial(run, metric=metric)
    near = [of(name, end=end, seed=s) for name, end in zip(("none", "topk"), good, strict=True) for s in (0, 1)]
    far = [of("powersgd", end=bad, seed=s) for s in (0, 1)]
    with_bad = arms_of(*near, *far)
    assert sheet.end_limits(with_bad) == pytest.approx(sheet.end_limits(arms_of(*near)))
    for name, figure in drawn(with_bad, ["tradeoff", "forest", "accuracy_bytes"]).items():
        outside = gids(figure, "outside")
        numbers = [text.get_text() for axes in figure.axes for text in axes.texts]
        assert len(outside) == len(numbers) == len(figure.axes) and not outside[0].get_clip_on(), name
        expected = {"accuracy": r"\d\d\.\d\d ± .* %", "perplexity": r"9\d\d(\.\d)? ± "}[metric]
        assert all(re.match(expected, text) for text in numbers), numbers


# ---- intervals


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize(
    ("at", "half", "cut"), [(5, 2, []), (5, 7, [0, 10]), (1, 2, [0]), (9, 3, [10]), (12, 1, None), (5, None, None)]
)
def test_an_interval_that_leaves_the_axes_is_cut_with_an_arrow(at, half, cut, across):
    axes = Figure().subplots()
    axes.set(xlim=(0, 10), ylim=(0, 10))
    sheet.interval_bar(axes, (at, 3) if across else (3, at), half, "red", across=across)
    along = [list(line.get_xdata() if across else line.get_ydata()) for line in axes.lines]
    if cut is None:
        assert along == []
        return
    assert along[0] == [max(at - half, 0), min(at + half, 10)]
    arrows = [line for line in axes.lines if line.get_gid() == "cut"]
    assert [float((line.get_xdata() if across else line.get_ydata())[0]) for line in arrows] == cut
    expected = {0: "<" if across else "v", 10: ">" if across else "^"}
    assert [line.get_marker() for line in arrows] == [expected[edge] for edge in cut]


def test_in_no_figure_does_an_interval_leave_the_axes():
    arms = three(0.95, 0.9, spread=0.03, seeds=(0, 1))
    for name, figure in drawn(arms, [*ENDS, *CURVES]).items():
        seen = gids(figure, "interval")
        assert name == "accuracy_epoch" or seen, name
        for line in seen:
            (left, right), (low, high) = sorted(line.axes.get_xlim()), sorted(line.axes.get_ylim())
            assert left <= min(line.get_xdata()) and max(line.get_xdata()) <= right, name
            assert low <= min(line.get_ydata()) and max(line.get_ydata()) <= high, name
    assert gids(figure, "cut")


# ---- words


def test_with_one_seed_every_figure_says_that_nothing_is_ranked():
    arms = arms_of(run(target=0.7), run("topk", target=0.7, end=0.5))
    found = drawn(arms, ())
    assert {"comparison", "tradeoff", "time_to_target", "forest"} <= set(found)
    for name, figure in found.items():
        assert "one run of each arm, so nothing is ranked" in note(figure), name


def test_time_to_target_has_numbers_at_its_bars_and_the_order_of_the_table():
    made = [(run(seed=s, target=0.85), run("topk", seed=s, target=0.85, end=0.99)) for s in (0, 1)]
    arms = arms_of(*itertools.chain(*made), run("powersgd", target=0.85, end=0.5))
    (axes,) = drawn(arms, ["time_to_target"])["time_to_target"].axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [arm.label for arm in arms]
    numbers = [text.get_text() for text in axes.texts]
    assert re.fullmatch(r"[\d.]+( ± [\d.]+)? s", numbers[0]) and numbers[2] == "not reached"


def test_an_end_below_another_is_seen_around_it():
    figure = drawn(arms_of(run(), run("powersgd", cost=0.1), run("topk", cost=0.1, density=0.2)), ["tradeoff"])[
        "tradeoff"
    ]
    below, above = [line for line in figure.axes[0].lines if line.get_gid() == "end"][1:]
    assert below.get_xdata() == above.get_xdata() and below.get_markersize() > above.get_markersize() + 1


def test_ends_carry_their_looks():
    arms = three(0.95, 0.9)
    figure = drawn(arms, ["tradeoff"])["tradeoff"]
    points = [line for line in figure.axes[0].lines if line.get_gid() == "end"]
    assert [(line.get_color(), line.get_marker()) for line in points] == [(k.colour, k.marker) for k in looks(arms)]
    assert [float(line.get_ydata()[0]) for line in points] == pytest.approx([np.mean(ends(arm)) for arm in arms])
    assert tradeoff(arms[:1]) is None
