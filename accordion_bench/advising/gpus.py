"""Target device of advice and dry runs, and the table of sustained rates of GPUs.

The target is the available device, unless `gpu` or `compute_ms` selects another. `gpus.yaml` gives the source of each
number.
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
    """One kind of GPU."""

    key: str  # option value, such as `h100`
    name: str  # full name, such as `NVIDIA H100`
    memory: float  # memory bandwidth in bytes/s
    # half, tf32, float32: operations/s sustained in training, in 16 bits, with TF32 and in float32 without TF32
    half: float
    tf32: float
    float32: float
    source: str  # source of these numbers

    def rates(self, precision: str | None, deterministic: bool = False) -> tuple[float, float]:
        """Return (rate of convolutions, rate of other products) in operations/s; arguments as for `step_on`.

        torch uses TF32 only for convolutions, and not if `deterministic`.
        """
        if precision in HALF:
            return self.half, self.half
        return (self.float32 if deterministic else self.tf32), self.float32

    @property
    def in_words(self) -> str:
        """The GPU's name in a sentence: `an NVIDIA H100 (estimated)`."""
        return f"an {self.name} (estimated)"

    @property
    def copies(self) -> float:
        """Rate of a copy in bytes/s: that of the measured GPU, scaled by the memory bandwidth."""
        return float(_table()["codecs"]["copy"]) * self.memory / measured_gpu().memory


class CodecTime(NamedTuple):
    """Seconds of encode and decode on the measured GPU: once + tensor x tensors + number x elements."""

    # once, tensor: seconds on the host, independent of the GPU
    once: float
    tensor: float
    number: float  # seconds per element, proportional to 1 / memory bandwidth

    def on(self, gpu: Gpu, tensors: int, numbers: float) -> float:
        """Return the seconds on a GPU for this number of tensors and of elements."""
        return self.once + self.tensor * tensors + self.number * numbers * measured_gpu().memory / gpu.memory


def named(key: str) -> Gpu:
    """Return the GPU with this key, in either case; ValueRefused if it is unknown."""
    return gpus()[checks.choice("gpu", str(key).lower(), list(gpus()))]


def measured_gpu() -> Gpu:
    """Return the GPU on which codec times were measured."""
    return gpus()[_table()["codecs"]["measured_on"]]


def operation_seconds() -> float:
    """Return the seconds in which the host starts one operation."""
    return float(_table()["operation"])


@functools.cache
def gpus() -> dict[str, Gpu]:
    """Return all GPUs of the table, by key."""
    table = _table()

    def gpu(key: str, said: Mapping[str, Any]) -> Gpu:
        half, tf32 = (_sustained(said[name], table["networks"]) for name in ("half", "tf32"))
        plain = min(tf32, table["share_of_peak"] * said["peak_float32"])
        return Gpu(key, said["name"], said["memory"], half, tf32, plain, " ".join(said["source"].split()))

    return {str(key): gpu(str(key), said) for key, said in table["gpus"].items()}


@functools.cache
def codec_times() -> dict[str, CodecTime]:
    """Return the measured codec times by compressor, named as its YAML file."""
    return {
        name: CodecTime(1e-6 * once, 1e-6 * tensor, 1e-12 * million)
        for name, (once, tensor, million) in _table()["codecs"]["microseconds"].items()
    }


def _sustained(samples: Mapping[str, float], flops: Mapping[str, float]) -> float:
    """Return the sustained operations/s: the geometric mean over networks of samples/s times operations per sample."""
    logs = [math.log(rate * flops[network]) for network, rate in samples.items()]
    return math.exp(math.fsum(logs) / len(logs))


@functools.cache
def _table() -> dict[str, Any]:
    return read_yaml(Path(__file__).with_name("gpus.yaml"))


TOLD = {  # help text by option
    f"{GPU}=NAME": f"estimate the step on this GPU by counting operations: {', '.join(gpus())}",
    f"{COMPUTE}=MS": "assume a GPU on which the forward and backward pass of a worker take MS milliseconds",
}


@dataclass(frozen=True)
class AskedDevice:
    """Requested target device other than the available one; false if there is none."""

    gpu: Gpu | None = None
    compute: float | None = None  # seconds of a forward and backward pass

    def __bool__(self) -> bool:
        return self.gpu is not None or self.compute is not None

    @property
    def codecs_of(self) -> Gpu:
        """GPU of the codec times if no GPU is available."""
        return self.gpu or measured_gpu()


def asked_device(gpu: str | None = None, compute_ms: float | str | None = None) -> AskedDevice:
    """Return the requested target device: a key of the table, or the milliseconds of a forward and backward pass.

    Raises:
        ConfigError: the GPU is unknown, the time is not a positive number, or both arguments are given.
    """
    if gpu is not None and compute_ms is not None:
        told = f"{compute_ms:g}" if isinstance(compute_ms, int | float) else compute_ms
        raise ConfigError(f"{GPU} must stand without {COMPUTE}, got {gpu} and {told}", {GPU: gpu}, {COMPUTE: told})
    if compute_ms is not None:
        return AskedDevice(compute=checks.number(COMPUTE, compute_ms, above=0, instead=12) / 1000)
    return AskedDevice(None if gpu is None else named(gpu))


def split(words: Sequence[str]) -> tuple[AskedDevice, list[str]]:
    """Return the target device that a command line requests, and its other words; errors as `asked_device`."""
    said, rest = taken(words, (GPU, COMPUTE))
    return asked_device(said.get(GPU), _number(said[COMPUTE]) if COMPUTE in said else None), rest


def _number(text: str) -> float | str:
    """Return the number, or the text itself if it is none, which `asked_device` then refuses."""
    try:
        return float(text)
    except ValueError:
        return text
