"""Two wings: the library works on tensors in anybody's loop, the bench runs experiments with it; never vice versa."""

import subprocess
import sys
import tomllib
from pathlib import Path
from pkgutil import iter_modules

import pytest

import accordion_bench

ROOT = Path(accordion_bench.__file__).parents[1]
CONTRACTS = {
    contract["id"]: contract
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
}
LIBRARY = CONTRACTS["wings"]["source_modules"]
BENCH = CONTRACTS["wings"]["forbidden_modules"]

WALK = """
import importlib, pkgutil, sys
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    for inner in pkgutil.walk_packages(getattr(module, "__path__", []), name + "."):
        importlib.import_module(inner.name)
print(*sys.modules)
"""

# every module first, so that one with a door's name would stand in its place; then a training of one process
DOORS = """
import importlib, pkgutil, sys
import accordion_bench as ab
for module in [name for name in sys.argv[2:]]:
    package = importlib.import_module(module)
    for inner in pkgutil.walk_packages(getattr(package, "__path__", []), module + "."):
        importlib.import_module(inner.name)
import torch
torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
def trained(model, optimizer):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
comm = ab.attach(model, optimizer, compressor="powersgd", adaptive="accordion", rank=1)
trained(model, optimizer)
comm.detach()
with ab.local(model, optimizer, sync="diloco", period=2, compressor="topk", density=0.5):
    trained(model, optimizer)
torch.distributed.destroy_process_group()
print(*sys.modules)
"""


def printed(script, *arguments):
    """The words that a fresh process prints."""
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


def test_contracts():
    """Imports that only the type checker follows count too. In a process of its own: the linter silences loggers."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"]
    linted = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert linted.returncode == 0, linted.stdout
    assert f"Contracts: {len(CONTRACTS)} kept, 0 broken." in linted.stdout


def test_every_module_stands_in_one_wing():
    ours = {f"accordion_bench.{module.name}" for module in iter_modules(accordion_bench.__path__)}
    assert ours == {*LIBRARY, *BENCH} - {"hydra", "omegaconf"}
    assert not {*LIBRARY} & {*BENCH}


def test_the_library_loads_nothing_of_the_bench():
    """What is imported within functions, or by name, is seen only by importing it."""
    modules = printed(WALK, *LIBRARY)
    assert "accordion_bench.compressors.powersgd" in modules  # it did walk
    assert [module for module in modules for name in BENCH if f"{module}.".startswith(f"{name}.")] == []


@pytest.mark.sample(2)
@pytest.mark.parametrize("first", [[], LIBRARY], ids=["nothing", "every module"])
def test_doors_load_nothing_of_the_bench(tmp_path, first):
    modules = printed(DOORS, str(tmp_path / "store"), *first)
    assert "accordion_bench.attaching.api" in modules
    assert [module for module in modules for name in BENCH if f"{module}.".startswith(f"{name}.")] == []


class TestRoot:
    def test_imports_nothing(self):
        version, *modules = printed("import sys, accordion_bench as bench; print(bench.__version__, *sys.modules)")
        assert version == accordion_bench.__version__
        assert [module for module in modules if module.startswith(("accordion_bench.", "torch"))] == []

    def test_a_submodule_is_imported_when_asked_for(self):
        asked = printed("import accordion_bench as bench; print(bench.compressors.__name__, 'sync' in dir(bench))")
        assert asked == ["accordion_bench.compressors", "True"]

    def test_no_module_has_the_name_of_a_door(self):
        modules = {module.name for module in iter_modules(accordion_bench.__path__)}
        assert not {*accordion_bench._API} & modules
        shown = {name for name in dir(accordion_bench) if name[0] != "_"}
        assert shown == {*accordion_bench._API} | modules - {"__main__"}

    def test_an_unknown_name(self):
        with pytest.raises(AttributeError, match="no attribute 'powersdg'"):
            _ = accordion_bench.powersdg
