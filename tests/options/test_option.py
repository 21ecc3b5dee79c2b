"""Options that a class declares: its constructor, what it refuses, what its YAML file says."""

import dataclasses
import inspect
import math
import types
from typing import Any

import pytest
import yaml

from accordion_bench.options.checks import ValueRefused
from accordion_bench.options.component import Component
from accordion_bench.options.conf_dir import conf_dir, read_yaml, yaml_files
from accordion_bench.options.option import Choice, check_options, option, options_of, with_options
from accordion_bench.run_config import GROUPS, PARTS, RunConfig
from scripts import options as files

DECLARED = [(group, name, cls, choice) for group in files.PACKAGES for name, cls, choice in files.declared(group)]
BY_HAND: set[str] = set()  # `compressor=new`: files whose classes have constructors of their own still
UNDECLARED = {"search", "arm", "experiment"}  # groups
NAMES = [f"{group}={name}" for group, name, _, _ in DECLARED]


@with_options
class Base(Component):
    rank: int = option("lower rank = more compression", default=2, at_least=1)
    share: float = option(default=0.1, above=0, at_most=1)


@with_options
class Example(Base):
    mode: str = option("how", default="keep", choices=("keep", "redraw"))
    bits: int | None = option("null = float32", default=None, choices=(2,))
    feedback: bool | str = option(default=True, choices=(True, False, "ef21"))
    size: int | None = option(default=None, at_least=1, instead=64)
    given: float = option(default=0.9, shown=False)
    levels: Any = option(default="uniform")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.twice = 2 * self.rank


def refusal(**given) -> str:
    with pytest.raises(ValueRefused) as refused:
        Example(**given)
    return str(refused.value)


def test_the_constructor_has_the_options_of_the_bases_first():
    made = Example(3, 1, "redraw", bits=2, levels=[-1, 1])
    assert (made.rank, made.share, made.mode, made.bits, made.twice) == (3, 1.0, "redraw", 2, 6)
    assert isinstance(made.share, float) and Example().feedback is True
    with pytest.raises(TypeError, match="unexpected keyword argument 'rang'"):
        Example(rang=3)


def test_refusals():
    assert refusal(rank=0) == "rank must be an integer of at least 1, got 0; type rank=2"
    assert refusal(rank=True).startswith("rank must be an integer of at least 1, got true")
    assert refusal(share=0) == "share must be a number above 0 and at most 1, got 0; type share=0.1"
    assert refusal(share=math.nan).startswith("share must be a number above 0 and at most 1, got nan")
    assert refusal(share=None).startswith("share must be a number")
    assert refusal(mode="redrawn") == "mode must be one of keep, redraw, got redrawn; type mode=redraw"
    assert refusal(bits=3) == "bits must be null or 2, got 3; type bits=null"
    assert refusal(feedback=1) == "feedback must be true, false or ef21, got 1; type feedback=true"
    assert refusal(size=0) == "size must be an integer of at least 1, got 0; type size=64"


def test_what_the_yaml_file_says():
    choice = Choice("what it is", {"mode": "redraw"}, leaves_out=("levels",), comments={"size": "of a tile"})
    assert files.yaml_text("", "example", Example, choice).splitlines() == [
        "# what it is",
        f"_target_: {__name__}.Example",
        "rank: 2                    # lower rank = more compression",
        "share: 0.1",
        "mode: redraw               # keep, redraw: how",
        "bits: null                 # null = float32",
        "feedback: true",
        "size: null                 # of a tile",
    ]
    with pytest.raises(ValueError, match="Example has no option rang"):
        files.yaml_text("", "example", Example, Choice("", {"rang": 3}))


@pytest.mark.parametrize("value", [1e-8, 1e11, 0.5, 2, None, True, "qr", ["*a*", "a"], [-1, 0, 1], [[4, 2], [16, 4]]])
def test_yaml_reads_back_what_was_declared(value):
    assert yaml.safe_load(files.as_yaml(value)) == value


@pytest.mark.parametrize("case", DECLARED, ids=NAMES)
def test_the_yaml_file_is_what_the_class_declares(case):
    group, name, cls, choice = case
    file = conf_dir() / group / f"{name}.yaml"
    assert file.read_text(encoding="utf-8") == files.yaml_text(group, name, cls, choice), (
        "run python -m scripts.options"
    )


def test_the_table_in_the_docs_is_what_the_classes_declare():
    assert files.DOCS.read_text(encoding="utf-8") == files.tables(), "run python -m scripts.options"


@pytest.mark.parametrize("group", list(files.PACKAGES))
def test_every_yaml_file_is_declared(group):
    alone = group == "comm"
    with_class = [name for name, file in yaml_files(group).items() if alone or "_target_" in read_yaml(file)]
    written = [name for of, name, _, _ in DECLARED if of == group]
    assert sorted(written) == [name for name in with_class if f"{group}={name}" not in BY_HAND]


def test_every_group_is_declared():
    assert {path.name for path in conf_dir().iterdir() if path.is_dir()} - files.PACKAGES.keys() == UNDECLARED


def test_the_options_of_every_run_are_what_the_run_declares():
    assert files.CONFIG.read_text(encoding="utf-8") == files.config_text(), "run python -m scripts.options"
    assert {field.name for field in dataclasses.fields(RunConfig)} - options_of(RunConfig).keys() == {
        *GROUPS,
        *PARTS,
        "choices",
    }


def test_arguments_of_a_constructor_of_its_own():
    @with_options
    class Net:
        def __init__(self, inputs: int, depth: int = option("layers", default=8, at_least=2), **rest: Any) -> None:
            self.built = (inputs, depth, rest)

    class Inherits(Net):
        pass

    assert Net(3).built == (3, 8, {}) and Inherits(3, 4, bias=True).built == (3, 4, {"bias": True})
    assert inspect.signature(Net).parameters["depth"].default == 8
    assert options_of(Inherits)["depth"].kinds == (int,) and list(options_of(Net)) == ["depth"]
    with pytest.raises(ValueRefused, match="depth must be an integer of at least 2, got 1; type depth=8"):
        Inherits(3, depth=1)
    with pytest.raises(TypeError, match="missing a required argument: 'inputs'"):
        Net()


def _classes():
    return list(dict.fromkeys(cls for _, _, cls, _ in DECLARED))


@pytest.mark.parametrize("cls", _classes(), ids=lambda cls: cls.__name__)
def test_a_class_checks_each_of_its_options(cls):
    """No `__post_init__` forgets its base class's."""
    arguments = inspect.signature(cls).parameters.values()
    needed = {one.name: 3 for one in arguments if one.default is one.empty and one.kind is not one.VAR_KEYWORD}
    for name, one in options_of(cls).items():
        if one.choices or (
            set(one.kinds) & {int, float, bool} and not (one.kinds == (int, types.NoneType) and one.at_least is None)
        ):
            with pytest.raises(ValueRefused) as refused:
                made = cls(**{**needed, name: "no such value"})
                if cls in PARTS.values():  # checked by those who read the run's configuration
                    check_options(made)
            assert refused.value.key == name
