"""How arms are drawn: each in its own way, the same in every report, also for those who see fewer colours."""

import itertools

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure

from accordion_bench.report import render
from accordion_bench.report.render import ArmLook, looks_of, preferences
from accordion_bench.report.render.figures import curves
from accordion_bench.report.render.figures.finals import EXCHANGE, PARTS, STEP
from accordion_bench.report.render.figures.layers import DARK, DENSE, LADDER, LIGHT
from tests.kit.figures import arms_of, everything, run

NAMES = [f"method {i}" for i in range(40)]


def named(*names):
    return [(name, name, name == "dense") for name in names]


@pytest.mark.parametrize("count", [1, 5, 10, 11, 40, 300])
def test_no_two_arms_have_the_same_look(count):
    found = looks_of(named(*(f"method {i}" for i in range(count))))
    assert len(set(found)) == count
    assert len({look.colour for look in found[:10]}) == min(count, 10) or count > 10
    if count <= 10:
        for part in ("colour", "marker", "line", "symbol", "dash"):
            assert len({getattr(look, part) for look in found}) == count, part


@pytest.mark.parametrize("few", range(30))
def test_of_ten_arms_none_has_denses_marker_or_dash(few):
    found = looks_of(named("dense", *(f"another {few} {i}" for i in range(9))))
    for part in ("marker", "line"):
        assert len({getattr(look, part) for look in found}) == 10, part


def test_looks_do_not_depend_on_the_order():
    arms = everything()
    assert render.looks(arms[::-1]) == render.looks(arms)[::-1]


def test_only_an_arm_of_the_same_first_preference_takes_an_arms_colour():
    """Alone an arm has its first preference; beside others it keeps it, unless one before it has the same."""
    for me in NAMES[12:24]:
        (alone,) = looks_of(named(me))
        assert alone.colour == render.COLOURS[preferences(me)[0]]
        for company in itertools.combinations(NAMES[:12], 3):
            beside = looks_of(named(me, *company))[0]
            rivals = [name for name in company if preferences(name)[0] == preferences(me)[0] and name < me]
            assert (beside == alone) != bool(rivals)


def test_preferences_are_spread_over_all_colours():
    first = [preferences(f"method {i}")[0] for i in range(1000)]
    assert np.bincount(first, minlength=len(render.COLOURS)).min() > 60


def test_dense_is_black_and_solid_and_nothing_else_is():
    arms = everything()
    for arm, look in zip(arms, render.looks(arms), strict=True):
        assert (look.colour == render.BLACK) == (look.line == "-") == arm.dense
    two = looks_of([("dense, batch 128", "dense", True), ("dense, batch 256", "dense", True)])
    assert {look.colour for look in two} == {render.BLACK} and len(set(two)) == 2


def test_levels_of_one_method_are_arms_of_their_own():
    arms = arms_of(*(run("powersgd", rank=rank) for rank in (1, 2, 4, 8)), run("powersgd", adaptive="accordion"))
    assert len({look.colour for look in render.looks(arms)}) == 5


def test_arms_of_one_method_have_shades_of_its_colour():
    """Whatever else is in the figure, and in whatever order; the hue is what stays, lighter or darker."""
    ranks = [run("powersgd", rank=rank) for rank in (1, 2, 4)]
    others = [run(), run("topk"), run("topk", error_feedback=False), run("powersgd", adaptive="accordion")]
    arms = arms_of(*ranks, *others)
    of = dict(zip((arm.label for arm in arms), render.looks(arms), strict=True))
    hues = {label: hue(look.colour) for label, look in of.items() if look.colour != render.BLACK}
    powersgd = [hues[f"PowerSGD rank {rank}"] for rank in (1, 2, 4)]
    assert max(powersgd) - min(powersgd) < 0.02
    assert all(abs(hues[other] - powersgd[0]) > 0.02 for other in hues if not other.startswith("PowerSGD"))
    topk = [value for label, value in hues.items() if label.startswith("TopK")]
    assert len(topk) == 2 and abs(topk[0] - topk[1]) < 0.02
    for part in ("colour", "marker", "line"):
        assert len({getattr(look, part) for look in of.values()}) == len(arms), part


def hue(colour):
    return mpl.colors.rgb_to_hsv(mpl.colors.to_rgb(colour))[0]


@pytest.mark.parametrize("base", render.COLOURS)
def test_shades_can_be_seen_on_white_and_are_not_denses_black(base):
    shades = [render._shade(base, turn) for turn in range(len(render.SHADES))]
    assert len(set(shades)) == len(shades) and shades[0] == base
    for shade in shades:
        assert 1.05 / (float(TO_XYZ[1] @ linear(shade)) + 0.05) > 1.9
        assert np.linalg.norm(lab(shade, VISION["full"]) - lab(render.BLACK, VISION["full"])) > 20


def test_plotly_knows_every_symbol_and_dash():
    go = pytest.importorskip("plotly.graph_objects")
    for look in [*looks_of(named("dense", *NAMES)), ArmLook(render.BLACK, "P", "-", "none")]:
        go.Scatter(marker={"symbol": look.symbol}, line={"dash": look.dash, "color": look.colour})  # else ValueError


# ---- what lies below another


def covered(dash, phase):
    """Which tenths of a width of a line are drawn, over its whole length of 200 widths."""
    on = np.concatenate([np.full(round(10 * length), i % 2 == 0) for i, length in enumerate(dash)])
    return np.resize(np.roll(on, phase), 2000)


def test_a_curve_below_another_shows_through_its_gaps():
    for below, above in itertools.permutations(render.DASHES, 2):
        seen = covered(below, 0) & ~covered(above, 0)
        assert seen.mean() > 0.09, (below, above)
    assert min((~covered(dash, 0)).mean() for dash in render.DASHES) > 0.1  # of dense, which is solid and below all


def test_arms_with_the_same_curve_are_all_seen():
    arms = arms_of(run(), run("powersgd", rank=1), run("powersgd", rank=2), run("topk"))
    shown = list(zip(arms, render.looks(arms), strict=True))
    axes = Figure().subplots()
    costs = {arm.label: np.arange(1.0, 25.0)[None] for arm in arms}
    for arm in arms:
        arm.runs[0].rows[:] = [{**arm.runs[0].rows[-1], "epoch": i} for i in range(24)]
    curves.curves(axes, shown, costs, (80, 100))
    lines = [line for line in axes.lines if line.get_gid() == "curve"]
    assert lines[0].get_color() == render.BLACK and lines[0].get_zorder() < min(line.get_zorder() for line in lines[1:])
    marks = [line for line in axes.lines if line.get_markevery() is not None]
    places = [set(range(line.get_markevery()[0], 24, line.get_markevery()[1])) for line in marks]
    assert len(marks) == 4 and all(not a & b for a, b in itertools.combinations(places, 2))


# ---- colours

# Machado, Oliveira, Fernandes (2009): what is left of linear RGB without one kind of cones
VISION = {
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
    "full": np.eye(3),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour):
    rgb = np.array(mpl.colors.to_rgb(colour))
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lab(colour, vision):
    """CIE L*a*b* of a colour as somebody sees it."""
    xyz = TO_XYZ @ np.clip(np.array(vision) @ linear(colour), 0, 1) / [0.9505, 1, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


PALETTES = {
    "arms": (render.BLACK, "#FFFFFF", *render.COLOURS),
    "levels": (DENSE, mpl.colormaps[LADDER](DARK), mpl.colormaps[LADDER](LIGHT)),
    "step": tuple(dict.fromkeys(STEP.values())),
    "exchange": tuple(EXCHANGE.values()),
}


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("palette", PALETTES)
def test_colours_are_apart_under_colour_blindness(palette, vision):
    """A difference of 2.3 in L*a*b* can just be seen; parts of a bar need only differ from their neighbours."""
    seen = [lab(colour, VISION[vision]) for colour in PALETTES[palette]]
    pairs = itertools.pairwise(seen) if palette in ("step", "exchange") else itertools.combinations(seen, 2)
    assert min(float(np.linalg.norm(a - b)) for a, b in pairs) > 15


def test_no_two_parts_share_a_colour_but_those_of_which_a_bar_has_one():
    assert len(set(PARTS.values())) == len(PARTS) - 1


def test_thin_lines_can_be_seen_on_white():
    luminance = [float(TO_XYZ[1] @ linear(colour)) for colour in render.COLOURS]
    assert min(1.05 / (value + 0.05) for value in luminance) > 2.2  # WCAG's contrast
