"""With what the codecs of a run compute: kernels, or torch where those are not installed; and who is told."""

from collections.abc import Callable
from typing import NamedTuple

from accordion_bench.config.components import Components
from accordion_bench.tensors import kernels
from accordion_bench.tensors.kernels import on_gpu


class Compiler(NamedTuple):
    """What compiles the kernels of a kind of device, whether it is there, and what installs it."""

    name: str
    installed: Callable[[], bool]
    install: str


COMPILERS = {
    "cpu": Compiler("numba", lambda: kernels.installed(), "pip install 'accordion-bench[fast]'"),
    "cuda": Compiler("triton", lambda: on_gpu.installed(), "pip install triton"),
}


def computed_with(device: str, parts: Components) -> str:
    """The compiler's name, or `torch` in its place; "" where the run uses no codec that has kernels.

    Args:
        device: of the run, `cpu` or `cuda`.
        parts: its components.
    """
    compiler = COMPILERS.get(device)
    own = parts.wrapped.compressor.description.kernels
    if compiler is None or parts.exchange.engine == "ddp" or device not in own:
        return ""
    return compiler.name if compiler.installed() else "torch"


def missing(device: str, parts: Components) -> str:
    """The sentence for a run that would be faster with what is not installed; "" for others."""
    if computed_with(device, parts) != "torch":
        return ""
    name, _, install = COMPILERS[device]
    return f"without {name} the compressor computes in torch, with the same codes and slower; type {install}"


def other_than(began: str, now: str) -> str:
    """The warning of a run that goes on with something else than it began with; "" where that is not known.

    Args:
        began, now: as `computed_with` says it.
    """
    if not began or not now or began == now:
        return ""
    known = {compiler.name: compiler.install for compiler in COMPILERS.values()}
    advice = f"; type {known[began]} to go on as it began" if began in known else ""
    return (
        f"this run's codecs have computed with {began} and go on with {now}: codes are the same, norms and sums may "
        f"differ in their last bits{advice}"
    )
