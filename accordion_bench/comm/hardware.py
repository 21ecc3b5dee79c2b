"""What a machine is, by name: machines of one name have times that compare."""

import platform
from pathlib import Path

import torch


def processor() -> str:
    """The model of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def gpus() -> list[str]:
    """The models of all GPUs that this process sees."""
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
