"""For which device advice and dry runs are computed: the one at hand, unless `gpu` or `compute_ms` says another."""

from collections.abc import Sequence
from dataclasses import dataclass

from accordion_bench.advising.gpus import Gpu, gpus, measured_gpu, named
from accordion_bench.options import checks
from accordion_bench.options.advice import OF_ADVICE
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.override import taken

GPU, COMPUTE = OF_ADVICE
TOLD = {  # what one types, and what it means
    f"{GPU}=NAME": f"for this GPU, whose step is counted and estimated: {', '.join(gpus())}",
    f"{COMPUTE}=MS": "for a GPU on which a worker's forward and backward pass take so many milliseconds",
}


@dataclass(frozen=True)
class AskedDevice:
    """A device that is not at hand.

    Args:
        gpu: of the table; None = none is named.
        compute: seconds of a step's forward and backward pass; None = not told.
    """

    gpu: Gpu | None = None
    compute: float | None = None

    def __bool__(self) -> bool:
        return self.gpu is not None or self.compute is not None

    @property
    def codecs_of(self) -> Gpu:
        """The GPU whose codecs are taken where none is at hand."""
        return self.gpu or measured_gpu()


def asked_device(gpu: str | None = None, compute_ms: float | str | None = None) -> AskedDevice:
    """The device that somebody asks for.

    Args:
        gpu: a name of the table; None = none.
        compute_ms: of a step's forward and backward pass; None = not told.

    Raises:
        ConfigError: no such GPU, no time, or both.

    Example:
        asked_device(gpu="h100")
    """
    if gpu is not None and compute_ms is not None:
        told = f"{compute_ms:g}" if isinstance(compute_ms, int | float) else compute_ms
        raise ConfigError(
            f"{GPU} must stand without {COMPUTE}, got {gpu} and {told}; type {GPU}={gpu}, or {COMPUTE}={told}"
        )
    if compute_ms is not None:
        return AskedDevice(compute=checks.number(COMPUTE, compute_ms, above=0, instead=12) / 1000)
    return AskedDevice(None if gpu is None else named(gpu))


def split(words: Sequence[str]) -> tuple[AskedDevice, list[str]]:
    """The device that a command line asks for, and its other words.

    Raises:
        ConfigError: as for `asked_device`; one is typed twice.
    """
    said, rest = taken(words, (GPU, COMPUTE))
    return asked_device(said.get(GPU), _number(said[COMPUTE]) if COMPUTE in said else None), rest


def _number(text: str) -> float | str:
    """What was typed as a number; the text where it is none, for `asked_device` to refuse."""
    try:
        return float(text)
    except ValueError:
        return text


def codecs_told() -> str:
    """The GPUs that are meant where none is named."""
    return f"GPUs with codecs as on an {measured_gpu().name}"
