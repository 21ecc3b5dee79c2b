"""A class that cannot be imported is refused with the true cause."""

import pytest

from accordion_bench.options.checks import ConfigError
from accordion_bench.options.instantiate import target


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
