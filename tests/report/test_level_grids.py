"""Level maps: colours and shapes, the same in figures in files and on the page."""

import base64
import json
import sys
from dataclasses import replace

import matplotlib as mpl
import numpy as np
import pytest

from accordion_bench.config.components import build_model
from accordion_bench.options.instantiate import build
from accordion_bench.report import parallel
from accordion_bench.report.render.figures import layers
from accordion_bench.report.render.figures.layers import DENSE, level_colours, level_grid, with_levels
from accordion_bench.report.render.page import Section, levels, page
from tests.kit.figures import arms_of, run
from tests.kit.helpers import yaml_node

TASKS = {"resnet8": "digits", "vit_tiny": "cifar10", "gpt_nano": "pydocs_bytes", "lstm_small": "synthetic_text"}


@pytest.mark.parametrize("model", TASKS)
def test_shapes_are_the_models_own_and_need_no_compiler(model, monkeypatch):
    """Random values on the device `meta` would make torch import its compiler: seconds, for values that nobody sees."""
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)  # an import of it fails
    task = {"model": yaml_node("model", model), "dataset": yaml_node("dataset", TASKS[model])}
    parallel._shapes.cache_clear()
    found = {spec.name: spec.shape for spec in parallel._shapes(json.dumps(task))}
    monkeypatch.undo()
    built = build_model(task["model"], build(task["dataset"], "dataset"))
    assert found == {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}


LAYERS = ("conv.weight", "stages.0.0.conv1.weight")  # of ResNet-8; rank 4 saves nothing of the first one


def moved(*used, seed=0, **options):
    """An Accordion run of six epochs at these levels; the first layer is one that goes dense at rank 4."""
    made = run("powersgd", adaptive="accordion", seed=seed, **options)
    config = {**made.config, "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1}}
    weak, strong = max(used), min(used)
    config["adaptive"] = {"accordion": {**config["adaptive"]["accordion"], "weak": weak, "strong": strong}}
    rows = [
        {**row, "plan": {**row["plan"], "levels": dict.fromkeys(LAYERS, used[i % len(used)])}}
        for i, row in enumerate(made.rows)
    ]
    return replace(made, config=config, rows=rows)


def colours_of_png(figure, panel):
    """Hex colours of a map, per layer and epoch."""
    (image,) = figure.axes[panel].images
    return [[mpl.colors.to_hex(square) for square in row] for row in np.asarray(image.get_array())]


def colours_of_page(drawn):
    """The same of what the page's script gets, in which every epoch is kept."""
    places = [np.frombuffer(base64.b64decode(row), np.float32) for row in drawn["places"]]
    return [[drawn["colours"][int(place)].lower() for place in row] for row in places]


@pytest.fixture
def arms():
    return arms_of(run(), moved(4, 1), moved(8, 2, batch_size=32), moved(4, 2))


def test_the_page_and_the_png_have_the_same_colours(arms):
    figure = layers.level_maps(arms)
    page_maps = levels(arms, most=100)
    assert len(page_maps) == len(with_levels(arms)) == 3
    for panel, drawn in enumerate(page_maps):
        on_page, in_file = colours_of_page(drawn), colours_of_png(figure, panel)
        assert on_page == in_file
        legend = figure.axes[panel].get_legend()
        named = {text.get_text(): mpl.colors.to_hex(patch.get_facecolor()) for patch, text in entries(legend)}
        assert named == dict(zip(drawn["names"], map(str.lower, drawn["colours"]), strict=True))


def test_maps_whose_layers_differ_are_drawn_first():
    """A picture has few maps: those of schedules, alike in all layers, left out the policy that chooses by layer."""
    alike = [moved(4, 1), moved(4, 2), moved(8, 2), moved(8, 1), moved(8, 4)]
    rows = [
        {**row, "plan": {**row["plan"], "levels": dict(zip(LAYERS, (16, 2), strict=True))}} for row in moved(16, 2).rows
    ]
    arms = arms_of(run(), *alike, replace(moved(16, 2), rows=rows))
    drawn = with_levels(arms)
    assert len(drawn) == 6 and "16/2" in drawn[0].label
    assert [arm.label for arm in drawn[1:]] == [arm.label for arm in arms if arm in drawn[1:]]
    notes = [text.get_text() for text in layers.level_maps(arms).texts]
    assert any("2 more arms have level maps, too." in " ".join(note.split()) for note in notes)


def entries(legend):
    pairs = zip(legend.legend_handles, legend.get_texts(), strict=True)
    return [pair for pair in pairs if isinstance(pair[0], mpl.patches.Patch)]


def test_dense_layers_have_a_colour_of_their_own(arms):
    grid = level_grid(arms[1], arms)
    assert {"rank 4", "rank 8"} & {name.split(" (")[0] for name in grid.names}
    first, second = ([grid.colours[place] for place in row] for row in grid.places)
    assert first[0] == DENSE != second[0] and grid.names[-1].startswith("dense: rank ")
    assert DENSE not in level_colours(arms).values()


def test_a_level_has_one_colour_in_all_arms_of_a_setting(arms):
    fixed = level_colours(arms)
    assert len(set(fixed.values())) == len(fixed) == 4
    for arm in with_levels(arms):
        grid = level_grid(arm, arms)
        for name, colour in zip(grid.names, grid.colours, strict=True):
            if not name.startswith("dense"):
                assert fixed["rank", float(name.split()[1])] == colour


def test_the_comparison_has_the_colours_of_the_level_maps(arms):
    beside = colours_of_png(layers.side_by_side(arms), 1)
    assert beside == colours_of_png(layers.level_maps(arms), 0)


def test_a_level_that_nobody_knows_is_white_in_both():
    made = moved(4, 1)
    made.rows[2]["plan"]["levels"] = {}
    arms = arms_of(made)
    assert level_grid(arms[0], arms).places[0][2] is None
    assert colours_of_png(layers.level_maps(arms), 0)[0][2] == "#ffffff"
    assert "heatmap" in page([Section(arms, [])], [], {})


def test_an_arm_without_classes_of_ours_has_no_dense_layers(monkeypatch):
    monkeypatch.setattr(parallel, "look", lambda *_: pytest.fail("looked"))
    made = moved(4, 1)
    made.config["model"] = {"_target_": "somebodys.Model"}
    arms = arms_of(made)
    assert not any(name.startswith("dense") for name in level_grid(arms[0], arms).names)
