"""Tables, figures and the page. Matplotlib is imported here first, whatever backend MPLBACKEND names.

A notebook exports its own backend to all that it starts, which may not have it. Nothing is drawn with that backend; one
that can be imported stays the one of the user's own figures.
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
