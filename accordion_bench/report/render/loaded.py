"""Matplotlib, imported although MPLBACKEND names what is not here: a notebook exports its own to all that it starts.

Nothing is drawn with that backend; one that is here stays the one of the user's own figures.
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
