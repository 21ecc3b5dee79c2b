"""GRACE's compressors, from a checkout of it, for `bench.codec`; no code of GRACE is included here.

GRACE (Xu et al. 2021, sands-lab/grace) compresses tensor by tensor. Its all-gather would then decompress and sum the
messages of all workers. Only `compress` and `decompress` are timed, and their results are dropped at once, which is a
lower bound of its time.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from accordion_bench.options.checks import ConfigError

BUCKET = {"bucket_size": 512}
# by the rows of `bench.codec`: module, class, options
COMPRESSORS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "fp16": ("fp16", "FP16Compressor", {}),
    "bf16": ("fp16", "FP16Compressor", {}),
    "signsgd": ("signsgd", "SignSGDCompressor", {}),
    "efsignsgd": ("efsignsgd", "EFSignSGDCompressor", {"lr": 0.1}),
    "onebit": ("onebit", "OneBitCompressor", {}),
    "qsgd, 2 bits": ("qsgd", "QSGDCompressor", {"quantum_num": 1, **BUCKET}),
    "qsgd, 3 bits": ("qsgd", "QSGDCompressor", {"quantum_num": 3, **BUCKET}),
    "ALQ levels, 3 bits": ("qsgd", "QSGDCompressor", {"quantum_num": 3, **BUCKET}),
    "qsgd": ("qsgd", "QSGDCompressor", {"quantum_num": 7, **BUCKET}),
    "terngrad": ("terngrad", "TernGradCompressor", {}),
    "trn": ("terngrad", "TernGradCompressor", {}),
    "topk": ("topk", "TopKCompressor", {"compress_ratio": 0.1}),
    "topk, 1 %": ("topk", "TopKCompressor", {"compress_ratio": 0.01}),
    "randomk": ("randomk", "RandomKCompressor", {"compress_ratio": 0.1}),
    "randomk, 1 %": ("randomk", "RandomKCompressor", {"compress_ratio": 0.01}),
}


def check_checkout(folder: str) -> None:
    """Add GRACE's modules to the import path.

    Args:
        folder: checkout of GRACE.

    Raises:
        ConfigError: the folder is no checkout of GRACE.
    """
    if not (Path(folder) / "grace_dl" / "dist" / "compressor").is_dir():
        raise ConfigError(
            f"--grace must be a checkout of GRACE (sands-lab/grace), got {folder}, which has no folder "
            "grace_dl/dist/compressor; type --grace FOLDER"
        )
    sys.path.insert(0, str(Path(folder).resolve()))


def twin(name: str, xs: Sequence[Tensor]) -> tuple[Callable[[], None], float] | None:
    """Return GRACE's counterpart of one of our rows, and the bytes that it would send; None if there is no counterpart.

    Args:
        name: name of the row.
        xs: tensors of one worker.
    """
    if name not in COMPRESSORS:
        return None
    module, cls, options = COMPRESSORS[name]
    compressor = getattr(importlib.import_module(f"grace_dl.dist.compressor.{module}"), cls)(**options)
    names = [f"tensor{i}" for i in range(len(xs))]

    def both() -> None:
        for x, own in zip(xs, names, strict=True):
            compressor.decompress(*compressor.compress(x, own))

    sent = [tensor for x, own in zip(xs, names, strict=True) for tensor in compressor.compress(x, own)[0]]
    return both, sum(tensor.numel() * tensor.element_size() for tensor in sent)
