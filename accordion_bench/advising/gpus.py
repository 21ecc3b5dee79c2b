"""For which device advice and dry runs are computed, and what GPUs sustain.

The device is the one at hand, unless `gpu` or `compute_ms` says another. `gpus.yaml` says where each number is from.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from accordion_bench.options import checks
from accordion_bench.options.advice import OF_ADVICE
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.conf_dir import read_yaml
from accordion_bench.options.override import taken

HALF = ("bfloat16", "float16")
GPU, COMPUTE = OF_ADVICE


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU.

    Args:
        key: as one types it: `h100`.
        name: as one says it: `NVIDIA H100`.
        memory: bytes/s.
        half, tf32, float32: operations/s that trainings sustain, in 16 bits, in TF32 and without it.
        source: of these numbers.
    """

    key: str
    name: str
    memory: float
    half: float
    tf32: float
    float32: float
    source: str

    def rates(self, precision: str | None, deterministic: bool = False) -> tuple[float, float]:
        """(Rate of convolutions, of other products), operations/s; torch uses TF32 for convolutions alone.

        Args:
            precision: of the forward pass; null = float32.
            deterministic: without TF32.
        """
        if precision in HALF:
            return self.half, self.half
        return (self.float32 if deterministic else self.tf32), self.float32

    @property
    def in_words(self) -> str:
        """In a sentence: `an NVIDIA H100 (estimated)`."""
        return f"an {self.name} (estimated)"

    @property
    def copies(self) -> float:
        """Bytes/s that a copy moves: those of the GPU that was measured, by the memory's speed."""
        return float(_table()["codecs"]["copy"]) * self.memory / measured_gpu().memory


class CodecTime(NamedTuple):
    """Seconds of encode and decode on the GPU that was measured: once + each tensor + each number.

    once, tensor: the host's, whatever the GPU.
    number: by the memory.
    """

    once: float
    tensor: float
    number: float

    def on(self, gpu: Gpu, tensors: int, numbers: float) -> float:
        """Seconds for so many tensors and numbers."""
        return self.once + self.tensor * tensors + self.number * numbers * measured_gpu().memory / gpu.memory


def named(key: str) -> Gpu:
    """The GPU with this key.

    Raises:
        ValueRefused: none is.
    """
    return gpus()[checks.choice("gpu", str(key).lower(), list(gpus()))]


def measured_gpu() -> Gpu:
    """The one on which codecs were measured."""
    return gpus()[_table()["codecs"]["measured_on"]]


def operation_seconds() -> float:
    """Seconds that the host needs to start one operation."""
    return float(_table()["operation"])


@functools.cache
def gpus() -> dict[str, Gpu]:
    """All GPUs of the table, by key."""
    table = _table()

    def gpu(key: str, said: Mapping[str, Any]) -> Gpu:
        half, tf32 = (_sustained(said[name], table["networks"]) for name in ("half", "tf32"))
        plain = min(tf32, table["share_of_peak"] * said["peak_float32"])
        return Gpu(key, said["name"], said["memory"], half, tf32, plain, " ".join(said["source"].split()))

    return {str(key): gpu(str(key), said) for key, said in table["gpus"].items()}


@functools.cache
def codec_times() -> dict[str, CodecTime]:
    """Codec times of each compressor that was timed, by the name of its YAML file."""
    return {
        name: CodecTime(1e-6 * once, 1e-6 * tensor, 1e-12 * million)
        for name, (once, tensor, million) in _table()["codecs"]["microseconds"].items()
    }


def _sustained(samples: Mapping[str, float], flops: Mapping[str, float]) -> float:
    """The geometric mean over networks."""
    logs = [math.log(rate * flops[network]) for network, rate in samples.items()]
    return math.exp(math.fsum(logs) / len(logs))


@functools.cache
def _table() -> dict[str, Any]:
    return read_yaml(Path(__file__).with_name("gpus.yaml"))


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
    """The device that is asked for.

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
            f"{GPU} must stand without {COMPUTE}, got {gpu} and {told}",
            {GPU: gpu},
            {COMPUTE: told},
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
    """The typed number; the text itself if it is not a number, which `asked_device` then refuses."""
    try:
        return float(text)
    except ValueError:
        return text


def codecs_told() -> str:
    """The GPUs that are meant if none is named."""
    return f"GPUs with codecs as on an {measured_gpu().name}"
