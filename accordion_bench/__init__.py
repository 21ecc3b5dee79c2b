"""What communicating less costs in accuracy and saves in bytes and time, in data-parallel training."""

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

__version__ = "0.3.0"

_API = dict.fromkeys(["attach", "attach_shards", "local"], "accordion_bench.attaching.api")
_API["advice"] = "accordion_bench.advising.api"
_API["load_weights"] = "accordion_bench.runs.weights"


def __getattr__(name: str) -> Any:
    """A door or a submodule, imported when it is first asked for: `import accordion_bench` loads none.

    Raises:
        AttributeError: there is nothing of that name.
    """
    if name in _API:
        return getattr(import_module(_API[name]), name)
    if name not in _submodules():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    """Doors, submodules and the version; nothing of what is imported here."""
    return sorted({"__version__", "__doc__", "__name__", "__path__", *_API, *_submodules()})


def _submodules() -> set[str]:
    return {module.name for module in iter_modules(__path__)}
