"""Figures are drawn whatever MPLBACKEND says; a notebook exports its own to all that it starts."""

import os
import subprocess
import sys

import pytest

from tests.kit.paths import ROOT

CODE = """
import importlib, os, sys
importlib.import_module(sys.argv[1])
import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
figure = Figure()
FigureCanvasAgg(figure).print_png(os.devnull)
print(matplotlib.rcParams._get_backend_or_none(), os.environ.get("MPLBACKEND"))
"""


@pytest.mark.parametrize("module", ["figures", "page", "figures.speed_ups", "page.build"])
@pytest.mark.parametrize(
    "named, backend", [("module://not_here.backend", None), ("TkAgg", "TkAgg"), ("nonsense", None), ("", None)]
)
def test_every_door_to_matplotlib(module, named, backend):
    """A name that is no backend's is passed over; another one stays, for the user's own figures."""
    command = [sys.executable, "-c", CODE, f"accordion_bench.report.render.{module}"]
    environ = {**os.environ, "MPLBACKEND": named}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    # matplotlib takes any name of a module, and looks for it when a window is wanted
    found = (named, "None") if named.startswith("module:") else (str(backend),)
    assert done.returncode == 0 and done.stdout in {f"{name} {named}\n" for name in found}, done.stderr
