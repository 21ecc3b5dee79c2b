"""What level maps ask a model for: its shapes, at once."""

import json
import sys

import pytest

from accordion_bench.config.components import build_model
from accordion_bench.options.instantiate import build
from accordion_bench.report.render import rebuilt
from tests.kit.helpers import yaml_node

TASKS = {"resnet8": "digits", "vit_tiny": "cifar10", "gpt_nano": "pydocs_bytes", "lstm_small": "synthetic_text"}


@pytest.mark.parametrize("model", TASKS)
def test_shapes_are_the_models_own_and_need_no_compiler(model, monkeypatch):
    """Random values on the device `meta` would make torch import its compiler: seconds, for values that nobody sees."""
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)  # an import of it fails
    task = {"model": yaml_node("model", model), "dataset": yaml_node("dataset", TASKS[model])}
    rebuilt._shapes.cache_clear()
    found = {spec.name: spec.shape for spec in rebuilt._shapes(json.dumps(task))}
    monkeypatch.undo()
    built = build_model(task["model"], build(task["dataset"], "dataset"))
    assert found == {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}
