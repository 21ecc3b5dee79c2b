"""Figures are drawn whatever MPLBACKEND says; a notebook exports its own to all that it starts."""

import functools
import json
import subprocess
import sys

import pytest

from tests.kit.paths import ROOT

MODULES = ("figures", "page", "figures.speed_ups")
NAMED = {"module://not_here.backend": None, "TkAgg": "TkAgg", "nonsense": None, "": None}
# each case in a process of its own that has imported everything but matplotlib
CODE = """
import importlib, json, multiprocessing, os, sys
import jinja2, pandas, scipy.special, sklearn, yaml
import accordion_bench.report.compare.verdicts, accordion_bench.options.instantiate

def door(case):
    module, os.environ["MPLBACKEND"] = case
    importlib.import_module(f"accordion_bench.report.render.{module}")
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    figure = Figure()
    FigureCanvasAgg(figure).print_png(os.devnull)
    return matplotlib.rcParams._get_backend_or_none(), os.environ.get("MPLBACKEND")

if __name__ == "__main__":
    assert "matplotlib" not in sys.modules
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        print(json.dumps([pool.apply(door, [case]) for case in json.loads(sys.argv[1])]))
"""


CASES = [(module, named) for module in MODULES for named in NAMED]
USUAL = [(MODULES[i % len(MODULES)], named) for i, named in enumerate(NAMED)]  # each module and each name


@functools.cache
def doors(usual: bool) -> dict[tuple[str, str], list[str | None]]:
    """By module and name of a backend: the backend of matplotlib afterwards, and the variable."""
    cases = [case for case in CASES if (case in USUAL) == usual]
    done = subprocess.run([sys.executable, "-c", CODE, json.dumps(cases)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(zip(cases, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize(
    ("module", "named"), [pytest.param(*case, marks=[] if case in USUAL else [pytest.mark.slow]) for case in CASES]
)
def test_every_door_to_matplotlib(module, named):
    """A name that is no backend's is passed over; another one stays, for the user's own figures."""
    # matplotlib takes any name of a module, and looks for it when a window is wanted
    found = (named, None) if named.startswith("module:") else (NAMED[named],)
    shown, variable = doors((module, named) in USUAL)[module, named]
    assert shown in found and variable == named
