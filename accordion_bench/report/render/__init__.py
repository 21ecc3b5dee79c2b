"""Rendering of reports: tables, figures and the HTML page. Importing this package first imports matplotlib safely.

A notebook exports its own MPLBACKEND to child processes, where that backend may be missing. Reports do not draw with
it; if it can be imported, it remains the backend of the user's own figures.
"""

import contextlib
import importlib
import os
import sys


def _load() -> None:
    named = os.environ.pop("MPLBACKEND", None)
    try:
        matplotlib = importlib.import_module("matplotlib")
    finally:
        if named is not None:
            os.environ["MPLBACKEND"] = named
    if named:
        with contextlib.suppress(ValueError):
            matplotlib.rcParams["backend"] = named


if "matplotlib" not in sys.modules:
    _load()
