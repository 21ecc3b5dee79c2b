"""Data-parallel training with compressed communication: what it costs in accuracy and saves in bytes and time."""

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

__version__ = "0.3.0"

_API = dict.fromkeys(["attach", "attach_shards", "local"], "accordion_bench.attaching.api")
_API["advice"] = "accordion_bench.advising.api"
_API["load_weights"] = "accordion_bench.runs.weights"


def __getattr__(name: str) -> Any:
    """Import a public function or a submodule on first access; `import accordion_bench` itself imports none.

    Raises:
        AttributeError: there is nothing of that name.
    """
    if name in _API:
        return getattr(import_module(_API[name]), name)
    if name not in _submodules():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    """Return public functions, submodules and the version, without this module's own imports."""
    return sorted({"__version__", "__doc__", "__name__", "__path__", *_API, *_submodules()})


def _submodules() -> set[str]:
    return {module.name for module in iter_modules(__path__)}
