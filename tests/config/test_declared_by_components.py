"""Components declare themselves: one from outside is treated as our own, and no central module names any."""

import ast
import functools
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from accordion_bench import train
from accordion_bench.cli import smoke
from accordion_bench.config import value_checks
from accordion_bench.config.compose import compose
from accordion_bench.methods import compatibility, labels
from accordion_bench.options import conf_dir as where_conf_is
from accordion_bench.options.conf_dir import conf_dir, package_dir
from tests.kit import composed
from tests.kit.helpers import yaml_names, yaml_node

# ---- two files, no edit elsewhere

CODE = '''
from dataclasses import replace

from accordion_bench.adaptive.policy import Policy
from accordion_bench.compressors.uncoded import Dense
from accordion_bench.datasets.images import Synthetic
from accordion_bench.sync.round import Round
from accordion_bench.sync.when import When


def _idle_of_dithered(cls, options, context):
    yield from Dense.description.idle(cls, options, context)
    if not options.get("table", True):
        yield "entries", "compressor.table is false"


class Dithered(Dense):
    """A compressor with a knob of its own kind, which wants no momentum beside it."""

    traits = replace(Dense.traits, knob="strength", pair=(1, 2))
    description = replace(
        Dense.description,
        requires={"optimizer": {"momentum": 0.0, "nesterov": False}},
        idle=_idle_of_dithered,
        smoke_options=lambda options, knob: {"entries": 16},
    )

    def __init__(self, strength=2, table=True, entries=4096):
        self.strength = self.check_level("strength", strength)

    def check_level(self, key, value):
        return int(value)


def _idle_of_seldom(cls, options, context):
    yield from Policy.description.idle(cls, options, context)
    if options.get("most") is not None:
        yield "sync.period", f"{context.group}.most sets it for {context.workers} workers"


class Seldom(Policy):
    """A policy of the batch that says the first period, too, and wants a schedule without drops beside it."""

    drives = "batch"
    intervals = 2
    description = replace(
        Policy.description,
        requires={"schedule": {"milestones": []}},
        idle=_idle_of_seldom,
        smoke_options=lambda options, knob: {"interval": 1, "most": {"strength": 3}.get(knob)},
    )

    def __init__(self, interval=7, most=None):
        self.interval = interval


class Halfway(Round):
    """Every `period` steps workers go half of the way to their mean."""

    description = replace(
        Round.description,
        display_names={"halfway": "Half-way SGD"},
        smoke_options=lambda options, knob: {"period": 3},
    )

    def __init__(self, period=5, pull=0.5):
        super().__init__(When(period), pull=pull)


class Dots(Synthetic):
    reads_files = False
'''

NODES = {
    "compressor/dithered": {"_target_": "outside.Dithered", "strength": 2, "table": True, "entries": 4096},
    "adaptive/seldom": {"_target_": "outside.Seldom", "interval": 7, "most": None},
    "sync/halfway": {"_target_": "outside.Halfway", "period": 5, "pull": 0.5},
    "dataset/dots": {"_target_": "outside.Dots", "size": 8, "train_size": 32, "test_size": 8},
}
CACHED = (where_conf_is.conf_dir, smoke.names, smoke._node, compatibility.knobs, value_checks._yaml)


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """The four components, each a class in a third-party module and a YAML file beside ours."""
    shutil.copytree(conf_dir(), tmp_path / "installed" / "conf")
    for path, node in NODES.items():
        head = "# @package adaptive.seldom\n" if path == "adaptive/seldom" else ""
        (tmp_path / "installed" / "conf" / f"{path}.yaml").write_text(head + yaml.safe_dump(node, sort_keys=False))
    (tmp_path / "outside.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(where_conf_is, "package_dir", lambda: tmp_path / "installed")
    for cached in CACHED:
        cached.cache_clear()
    yield
    for cached in CACHED:
        cached.cache_clear()
    sys.modules.pop("outside", None)


def warned(*overrides: str) -> list[str]:
    """What is said of a configuration of which all these keys were typed."""
    cfg = compose([*overrides, "workers=4"])
    composed.validated(cfg)
    return composed.warnings(cfg, {override.partition("=")[0] for override in overrides})


def test_idle_options_warn(outside):
    typed = ["compressor.table=false", "compressor.entries=9", "adaptive.seldom.interval=30"]
    assert warned("compressor=dithered", "adaptive=seldom", *typed) == [
        "compressor.entries has no effect here: compressor.table is false",
        "adaptive.seldom.interval has no effect here: the run has 60 epochs",
    ]
    assert warned("compressor=dithered", "adaptive=seldom", "compressor.entries=9", "adaptive.seldom.interval=2") == []


def test_a_knob_that_a_policy_steers_warns(outside):
    told = ["compressor.strength has no effect here: adaptive=accordion sets the strength"]
    assert warned("compressor=dithered", "adaptive=accordion", "compressor.strength=3") == told
    assert warned("compressor=dithered", "adaptive=seldom", "compressor.strength=3") == []


def test_an_option_of_another_group_warns(outside):
    told = ["sync.period has no effect here: adaptive.seldom.most sets it for 4 workers"]
    assert warned("sync=halfway", "adaptive=seldom", "adaptive.seldom.most=3", "sync.period=4") == told
    assert warned("sync=halfway", "adaptive=seldom", "sync.period=4") == []


def test_data_that_needs_no_files_says_so(outside):
    told = ["paths.data has no effect here: dataset=dots does not use it"]
    assert warned("dataset=dots", "paths.data=elsewhere") == told


def test_a_class_without_a_yaml_file_is_heard_too(outside):
    cfg = compose(["compressor=topk", "workers=4"])
    cfg["compressor"] = {"_target_": "outside.Dithered", "table": False, "entries": 9}
    (told,) = composed.warnings(cfg, {"compressor.entries"})
    assert told.endswith("compressor.table is false")


def test_what_is_needed_beside_it_and_what_shortens_it(outside):
    base = compose(["+experiment=smoke"])
    cfg = smoke.composed_cell(base, "dithered", "halfway", ["seldom"])
    assert (cfg["optimizer"]["momentum"], cfg["schedule"]["milestones"]) == (0.0, [])
    assert base["optimizer"]["momentum"] != 0 and base["schedule"]["milestones"]
    short = smoke.shortened(cfg)
    assert (short["compressor"]["entries"], short["sync"]["period"]) == (16, 3)
    assert short["adaptive"] == {"seldom": {"_target_": "outside.Seldom", "interval": 1, "most": 3}}
    other = smoke.shortened(smoke.composed_cell(base, "topk", "halfway", ["seldom"]))
    assert other["adaptive"]["seldom"]["most"] is None


def test_smoke_runs_them(outside, tmp_path):
    base = compose(["+experiment=smoke", f"paths.runs={tmp_path / 'runs'}"])
    typed = {"compressor": "dithered", "sync": "halfway"}
    chosen = {**base, "choices": {**base["choices"], **typed}}
    assert ("dithered", "halfway", ("seldom",)) in {
        (compressor, sync, (policy,))
        for compressor, sync, policies in smoke.cells(chosen, typed)
        for policy in policies
    }
    cfg = smoke.shortened(smoke.composed_cell(base, "dithered", "halfway", ["seldom"]))
    assert 0 <= train.run(cfg) <= 1


def test_the_report_writes_its_name(outside):
    assert labels.label(compose(["sync=halfway"])) == "Half-way SGD, H 5"


# ---- nobody else names them

GROUPS = ("adaptive", "compressor", "sync", "dataset")
OWN = ("adaptive", "compressors", "datasets", "sync")  # packages in which components may name each other
DEFAULTS = {"none", "every_step"}  # of their groups in conf/config.yaml: what a run is without a component
# also a config group; this project and its paper; the number of a signal; where a run is; what NumPy has
WORDS = {"schedule", "accordion", "Accordion", "signum", "folder", "arrays"}
ALLOWED = {
    "config/engine_rules.py": "torch has hooks for these three compressors, and for no others",
    "exchange/ddp.py": "the same",
    "conformance/subject.py": "the tensors of the kit are gradients on one data set",
    "options/override.py": "where classes have moved since version 0.2",
    "optimizers/elementwise.py": "an optimizer and a compressor have that name",
    "attaching/fsdp.py": "a reduction without a code is a cast, or none",
    "signals/statistics.py": "a dense exchange has the mean at hand",
    **dict.fromkeys(
        ["advising/text.py", "advising/verdict.py", "report/render/figures/speed_ups.py"],
        "dense bf16 is the baseline beside dense fp32",
    ),
    "codecs/coding.py": "int8 is a format of numbers, too",
    **dict.fromkeys(["__main__.py", "cli/demo.py", "cli/help.py"], "the command `demo`, which shows Accordion"),
    "network/link_model.py": "hierarchical collectives are a kind of their own",
    "cli/example.py": "the data of a model whose user names none",
    "cli/advice_command.py": "`advised` is a word",
    "models/torchvision.py": "the same: networks of torchvision are made for it",
}


def test_no_central_module_names_a_component():
    found = {}
    for file in sorted(package_dir().rglob("*.py")):
        path = file.relative_to(package_dir())
        if path.parts[0] not in OWN and (named := sorted(set(names_in(file)))):
            found[path.as_posix()] = named
    assert {path: named for path, named in found.items() if path not in ALLOWED} == {}
    assert set(ALLOWED) <= set(found), "allowed, and no longer needed"


def names_in(file: Path) -> Iterator[str]:
    """Every component that a module names in code or text, beside what a sentence tells the user to type."""
    words, paths = components()
    tree = ast.parse(file.read_text())
    documentation = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    chosen_instead = {  # `{"compressor": "topk"}`, as refusals have it
        id(value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant) and key.value in GROUPS
    }
    skipped = documentation | chosen_instead
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            text = re.sub(rf"\b({'|'.join(GROUPS)})=[\w\[\],]+", "", node.value)
            yield from (word for word in re.findall(r"(?<![\w/-])[A-Za-z]\w*(?![\w/-])", text) if word in words)
        elif isinstance(node, ast.ImportFrom):
            yield from (name.name for name in node.names if f"{node.module}.{name.name}" in paths)


@functools.cache
def components() -> tuple[set[str], set[str]]:
    """(Names of YAML files and classes, paths of classes) of the groups."""
    nodes = [(name, yaml_node(group, name).get("_target_", "")) for group in GROUPS for name in yaml_names(group)]
    words = {name for name, _ in nodes} | {path.rpartition(".")[2] for _, path in nodes}
    return words - DEFAULTS - WORDS - {""}, {path for _, path in nodes}


def test_a_list_of_components_would_be_found(tmp_path):
    file = tmp_path / "central.py"
    file.write_text('"""AdaQS."""\nSHORT = {"adaqs": 1}\nKEY = "adaptive.qsr.alpha"\nSAID = "type compressor=topk"\n')
    assert sorted(names_in(file)) == ["adaqs", "qsr"]
    file.write_text("from accordion_bench.compressors.powersgd import PowerSGD\n")
    assert list(names_in(file)) == ["PowerSGD"]
