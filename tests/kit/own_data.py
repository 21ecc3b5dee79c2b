"""Substitutes for the files of users' own data sets."""

from pathlib import Path

import numpy as np
import pytest

from accordion_bench.datasets.huggingface import HuggingFaceImages, HuggingFaceText


def written_tokens(folder: Path) -> None:
    """Write files of tokens."""
    for part in ("train", "val"):
        np.arange(40000, dtype=np.uint16).tofile(folder / f"{part}.bin")


def huggingface_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the counts of the package `datasets`, which is not installed."""
    found = {"classes": 2, "train_size": 64, "image_size": 16, "fingerprint": "0" * 16, "train_bytes": 40000}
    for kind in (HuggingFaceImages, HuggingFaceText):
        monkeypatch.setattr(kind, "count", lambda *_: found)
