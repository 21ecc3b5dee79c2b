"""Determine whether a run's codecs use compiled kernels or torch, and the messages about it."""

from collections.abc import Callable
from typing import NamedTuple

from accordion_bench.config.components import Components
from accordion_bench.tensors import kernels
from accordion_bench.tensors.kernels import on_gpu


class Compiler(NamedTuple):
    """Compiler of a device's kernels: name, whether it is installed, and the command that installs it."""

    name: str
    installed: Callable[[], bool]
    install: str


COMPILERS = {
    "cpu": Compiler("numba", lambda: kernels.installed(), "pip install 'accordion-bench[fast]'"),
    "cuda": Compiler("triton", lambda: on_gpu.installed(), "pip install triton"),
}


def computed_with(device: str, parts: Components) -> str:
    """Return the compiler's name, or `torch` if it is not installed; "" if the run uses no codec with kernels."""
    compiler = COMPILERS.get(device)
    own = parts.wrapped.compressor.description.kernels
    if compiler is None or parts.exchange.engine == "ddp" or device not in own:
        return ""
    return compiler.name if compiler.installed() else "torch"


def missing(device: str, parts: Components) -> str:
    """Return a hint for a run that would be faster with a package that is not installed; "" otherwise."""
    if computed_with(device, parts) != "torch":
        return ""
    name, _, install = COMPILERS[device]
    return f"without {name} the compressor uses torch, with the same codes but slower; type {install}"


def other_than(began: str, now: str) -> str:
    """Return the warning for a resumed run that uses other kernels than it began with; "" if equal or unknown."""
    if not began or not now or began == now:
        return ""
    known = {compiler.name: compiler.install for compiler in COMPILERS.values()}
    advice = f"; type {known[began]} to continue as before" if began in known else ""
    return (
        f"this run's codecs have used {began} and continue with {now}: codes are the same, norms and sums may "
        f"differ in their last bits{advice}"
    )
