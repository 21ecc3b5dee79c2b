"""Tokenised text in .bin files, in the formats of nanoGPT and llm.c."""

import hashlib
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accordion_bench.datasets.counted import NULL, check_fingerprint, check_unchanged_files, name_or_null, part_of
from accordion_bench.datasets.fetch import refusal, why
from accordion_bench.datasets.token_windows import TokenDataset
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.option import Choice, option, with_options

MAGIC, HEADER = 20240520, 1024  # header of llm.c: 256 numbers in int32 (1024 bytes), of which the first is MAGIC
BLOCK = 1 << 24  # tokens per block when searching for the largest token
LOOKED_AT = 64  # positions of a shard that its fingerprint samples
Shards = Mapping[str, list[np.ndarray]]  # by part: train, test, validation


@with_options
class TokenShards(TokenDataset):
    """Tokens of 16 or 32 bits, stored consecutively in files such as train.bin and val.bin.

    File names contain the name of their part: train; val, valid, validation; test. Several files of a part are read in
    the order of their names. Files of llm.c have a header, those of nanoGPT do not. If there is one part besides train,
    it is both the test and the validation split. On a CPU, a single file is memory-mapped, not read.
    """

    folder: str | None = option("folder in paths.data; null = paths.data itself", default=None)
    dtype: str = option("dtype of the numbers in the files", default="uint16", choices=("uint16", "uint32"))
    vocabulary: int | None = option(  # type: ignore[assignment]
        f"{NULL}, one more than the largest token", default=None, at_least=2, instead=50257
    )
    train_tokens: int | None = option(NULL, default=None, at_least=2)  # type: ignore[assignment]
    fingerprint: str | None = option("of the files, recorded by a run; null = not checked", default=None)

    counted = ("vocabulary", "train_tokens", "fingerprint")
    chosen_as = {
        "token_files": Choice("your own tokenised text in paths.data: train.bin and val.bin, as nanoGPT writes them")
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        name_or_null("folder", self.folder)
        check_fingerprint(self.fingerprint)

    def shards(self, root: str) -> Shards:
        """Memory-map the tokens of each part."""
        place = Path(root, self.folder or "")
        found: dict[str, list[np.ndarray]] = {}
        for file in sorted(place.glob("*.bin")):
            words = file.stem.lower().replace("-", "_").replace(".", "_").split("_")
            if part := next(filter(None, map(part_of, words)), None):
                found.setdefault(part, []).append(_opened(file, np.dtype(self.dtype)))
        if "train" not in found or len(found) == 1:
            there = ", ".join(found) or "none"
            raise ConfigError(
                f"paths.data must hold train.bin and val.bin or test.bin, got {place} with {there}; type "
                "paths.data=FOLDER, or dataset=pydocs_bytes, which needs no files"
            )
        return found

    def count(self, root: str) -> dict[str, Any]:
        shards = self.shards(root)
        self.vocabulary = self.vocabulary or 1 + _largest(shards)
        self.train_tokens = self.train_tokens or sum(map(len, shards["train"]))
        noted = self.fingerprint or _fingerprint(shards)
        return {"vocabulary": self.vocabulary, "train_tokens": self.train_tokens, "fingerprint": noted}

    def prepare(self, root: str) -> None:
        shards = self.shards(root)
        if self.fingerprint is not None:
            check_unchanged_files(root, self.fingerprint, _fingerprint(shards))
        if self.vocabulary is not None and (least := 1 + _largest(shards)) > self.vocabulary:
            raise ValueRefused("dataset.vocabulary", f"above the largest token, {least - 1}", self.vocabulary, least)
        if self.train_tokens not in (None, found := sum(map(len, shards["train"]))):
            raise ValueRefused("dataset.train_tokens", f"those of {root}, {found}", self.train_tokens, found)

    def stored(self, root: str) -> Mapping[str, Tensor]:
        shards = self.shards(root)
        parts = {"train": "train", "valid": "validation", "test": "test"}
        either = shards.get("test") or shards["validation"]
        return {name: _joined(shards.get(part, either)) for name, part in parts.items()}


def _opened(file: Path, kind: np.dtype) -> np.ndarray:
    """Memory-map the tokens of a file."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            first = np.frombuffer(stream.read(HEADER), np.uint8)
        headed = len(first) == HEADER and int(first[:4].view(np.int32)[0]) == MAGIC
        start = HEADER if headed else 0
        if (size - start) % kind.itemsize or size <= start:
            raise ValueError(f"its {size:,} bytes are not whole {kind.name} numbers")
        return np.memmap(file, kind, "c", start)  # copy-on-write; nothing writes to it
    except (OSError, ValueError) as error:
        raise refusal("tokens that can be read", file, why(file, error)) from None


def _largest(shards: Shards) -> int:
    """Return the largest token, cached in this process while the files do not change."""
    key = _fingerprint(shards)
    if key not in _known:
        files = itertools.chain.from_iterable(shards.values())
        blocks = (tokens[at : at + BLOCK] for tokens in files for at in range(0, len(tokens), BLOCK))
        _known[key] = max(int(block.max()) for block in blocks)
    return _known[key]


_known: dict[str, int] = {}


def _fingerprint(shards: Shards) -> str:
    """Return the fingerprint of the sizes of all files and of tokens at some positions of each."""
    digest = hashlib.blake2b(digest_size=8)
    for part, files in sorted(shards.items()):
        for tokens in files:
            digest.update(f"{part} {len(tokens)} {tokens.dtype}".encode())
            for i in range(LOOKED_AT):
                at = i * len(tokens) // LOOKED_AT
                digest.update(tokens[at : at + 1024].tobytes())
    return digest.hexdigest()


def _joined(files: list[np.ndarray]) -> Tensor:
    """Concatenate files, as signed integers with the same bits, see `TokenData`."""
    tokens = files[0] if len(files) == 1 else np.concatenate(files)
    return torch.from_numpy(tokens.view(np.int16 if tokens.dtype.itemsize == 2 else np.int32))
