"""What GPUs sustain, from published and from own measurements, for estimates: `gpus.yaml` says where each is from."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from accordion_bench.options import checks
from accordion_bench.options.conf_dir import read_yaml

HALF = ("bfloat16", "float16")


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
        """(Of convolutions, of other products), operations/s; torch uses TF32 for convolutions alone.

        Args:
            precision: of the forward pass; null = float32.
            deterministic: without TF32.
        """
        if precision in HALF:
            return self.half, self.half
        return (self.float32 if deterministic else self.tf32), self.float32

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
    """The GPU that is typed so.

    Raises:
        ValueRefused: none is.
    """
    return gpus()[checks.choice("gpu", str(key).lower(), list(gpus()))]


def measured_gpu() -> Gpu:
    """The one on which codecs were measured."""
    return gpus()[_table()["codecs"]["measured_on"]]


def operation_seconds() -> float:
    """What the host needs to start one operation."""
    return float(_table()["operation"])


@functools.cache
def gpus() -> dict[str, Gpu]:
    """All of the table, by what one types."""
    table = _table()

    def gpu(key: str, said: Mapping[str, Any]) -> Gpu:
        half, tf32 = (_sustained(said[name], table["networks"]) for name in ("half", "tf32"))
        plain = min(tf32, table["share_of_peak"] * said["peak_float32"])
        return Gpu(key, said["name"], said["memory"], half, tf32, plain, " ".join(said["source"].split()))

    return {str(key): gpu(str(key), said) for key, said in table["gpus"].items()}


@functools.cache
def codec_times() -> dict[str, CodecTime]:
    """Of each compressor that was timed, by the name of its YAML file."""
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
