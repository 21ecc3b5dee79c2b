"""A class that cannot be imported is refused with the true cause."""

import pytest

from accordion_bench.options import advice, conf_dir
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.instantiate import build, check_value_kinds, target


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)

    return write


def told(path: str) -> str:
    with pytest.raises(ConfigError) as refused:
        target({"_target_": path}, "model")
    return str(refused.value)


def test_the_missing_module_is_named(own_module):
    own_module("own_a", "import not_installed_here.part\n\nclass Net: pass\n")
    assert told("own_a.Net").endswith(
        "got own_a.Net: own_a imports not_installed_here, which is not installed; type pip install "
        "not_installed_here, or model=NAME instead"
    )


def test_a_module_that_is_not_there():
    assert "got nowhere.at.All: there is no module nowhere here; type" in told("nowhere.at.All")


def test_a_name_that_is_not_in_another_module(own_module):
    own_module("own_b", "from math import nonsense\n")
    assert "own_b.Net: cannot import name 'nonsense' from 'math'" in told("own_b.Net")


def test_a_class_that_is_not_there(own_module):
    own_module("own_c", "")
    assert "got own_c.Net: own_c has no Net; type model=NAME instead" in told("own_c.Net")


def test_a_fault_inside_the_module_keeps_its_traceback(own_module):
    own_module("own_d", "import math\nmath.nonsense\n")
    with pytest.raises(AttributeError, match="nonsense"):
        target({"_target_": "own_d.Net"}, "model")


@pytest.mark.parametrize("group", ["compressor", "adaptive.mine"])
def test_an_option_that_only_the_users_file_has_is_a_mistake_of_the_file(group, tmp_path, monkeypatch):
    path = "accordion_bench.compressors.topk.TopK"
    file = tmp_path / group.partition(".")[0] / "mine.yaml"
    file.parent.mkdir()
    package = "" if "." not in group else f"# @package {group}\n"
    file.write_text(f"{package}_target_: {path}\ndensty: 0.3\n", encoding="utf-8")
    monkeypatch.setattr(conf_dir, "_own", [tmp_path])
    advice.known_keys.cache_clear()
    with pytest.raises(ConfigError) as refused:
        build({"_target_": path, "densty": 0.3}, group)
    assert str(refused.value) == f"{group}.densty is no option of TopK, got it in {file}; correct that file"


def test_the_group_of_a_missing_class_is_named():
    path = "accordion_bench.compressors.topk.Nothing"
    with pytest.raises(ConfigError, match=r"^compressor\._target_ must be .* type compressor=NAME instead$"):
        check_value_kinds({"_target_": path, "density": 0.1}, {"density": 0.1}, "compressor.")
