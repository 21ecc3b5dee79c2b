"""Text as tokens or bytes, in independent windows for next-token prediction, also from .bin files of tokens.

The formats of .bin files are those of nanoGPT and llm.c.
"""

import hashlib
import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accordion_bench.datasets.counted import NULL, check_fingerprint, check_unchanged_files, name_or_null, part_of
from accordion_bench.datasets.dataset import IGNORED, Batches, LanguageDataset, known, part_only
from accordion_bench.datasets.fetch import refusal, why
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.options.units import counted
from accordion_bench.tensors import keyed_rng

SYMBOLS = 256
UNSIGNED = {torch.int16: 0xFFFF, torch.int32: 0xFFFFFFFF}  # torch indexes no unsigned integers but uint8
EVALUATED_AT_ONCE = 16384  # tokens per evaluation batch; bounds the memory of the logits


class TokenData:
    """Tokens on the device.

    Training sample i of an epoch is the window of `context` tokens from token o + i x context; targets are the tokens
    shifted by one. The offset o < `context` is keyed by the epoch, so that epochs cut the text differently.

    Args:
        splits: tokens [n] of `train`, `test` and `valid`, uint8, or unsigned integers stored in int16 or int32.
        context: tokens per window.
        seed: key of the offsets.
        reshuffled: whether each epoch has another offset; False = all epochs use that of the first.
        device: device of all tensors.
    """

    splits = ("test", "valid")
    by_device = True

    def __init__(
        self, splits: Mapping[str, Tensor], context: int, seed: int, reshuffled: bool, device: torch.device
    ) -> None:
        self.tokens = {name: split.to(device) for name, split in splits.items()}
        self.context, self.seed, self.reshuffled = context, seed, reshuffled
        self.device = self.indexed_on = device
        self.train_size, self.test_size = windows(len(splits["train"]), context), len(splits["test"]) - 1
        self.steps = torch.arange(context + 1, device=device)
        self.offset = torch.zeros((), dtype=torch.int64, device=device)

    def begin_epoch(self, epoch: int) -> None:
        """Draw the offset of this epoch's windows."""
        offset = keyed_rng.key(self.seed, "offset", epoch if self.reshuffled else 0) % self.context
        self.offset.fill_(offset)

    def train_batches(self, epoch: int, batches: Iterable[Tensor]) -> Batches:
        """Yield tokens [B, context] and the following tokens, for each tensor of window indices."""
        self.begin_epoch(epoch)
        for indices in batches:
            yield self.train_batch(indices)

    def train_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens [B, context] and the following tokens, at the offset of the last `begin_epoch`."""
        starts = self.offset + indices.to(self.device) * self.context
        window = _numbers(self.tokens["train"][starts[:, None] + self.steps])
        return window[:, :-1], window[:, 1:]

    def test_windows(self, split: str, worker: int, workers: int) -> Batches:
        """Yield one worker's share of the consecutive windows of a split.

        Yields:
            tokens [B, context] and the following tokens; past the end of the split these are `IGNORED`.
        """
        text = self.tokens[split]
        count = len(text) - 1
        starts = torch.arange(0, count, self.context, device=self.device)[worker::workers]
        for some in starts.split(max(1, EVALUATED_AT_ONCE // self.context)):
            at = some[:, None] + self.steps[:-1]
            y = torch.where(at < count, _numbers(text[(at + 1).clamp_max(count)]), IGNORED)
            yield _numbers(text[at.clamp_max(count)]), y


def _numbers(stored: Tensor) -> Tensor:
    mask = UNSIGNED.get(stored.dtype)
    return stored.long() if mask is None else stored.long() & mask


def windows(count: int, context: int) -> int:
    """Return how many windows of `context` tokens fit into `count` tokens for every offset below `context`."""
    return count // context - 1


@with_options
class TokenDataset(LanguageDataset):
    """Text for next-token prediction in independent windows.

    Class attributes:
        metric: evaluation metric, see `runs.metrics`.
    """

    context: int = option("tokens per window; at most the model's positions", default=256, at_least=1)
    metric_split: str = option("split of the metric", default="valid", choices=("valid", "test"))
    subset: int | None = part_only("use only the first N training tokens")
    limit_eval: int | None = part_only("use only the first N tokens of each evaluation split")
    sharding: str = option("reshuffled in every epoch, static", default="reshuffled", choices=("reshuffled", "static"))

    task = "tokens"
    token = "token"
    metric = "token_perplexity"

    @property
    def whole(self) -> int:
        return known(self, "train_tokens")

    @property
    def train_size(self) -> int:  # type: ignore[override]
        return windows(self.whole, self.context)

    @property
    def train_count(self) -> int:
        """Number of training windows of a run."""
        count = min(self.subset or self.whole, self.whole)
        if count < 2 * self.context:
            rule = f"at most half of the {counted(count, self.token)} that are trained on"
            raise ValueRefused("dataset.context", rule, self.context, max(1, count // 2))
        return windows(count, self.context)

    def example(self, samples: int) -> tuple[Tensor, Tensor]:
        window = torch.zeros(samples, self.context, dtype=torch.int64)
        return window, window

    def stored(self, root: str) -> Mapping[str, Tensor]:
        """Return the splits `train`, `valid` and `test` in the form that `TokenData` takes."""
        raise NotImplementedError

    def load(self, root: str, seed: int, device: torch.device) -> TokenData:
        return TokenData(self.cut(self.stored(root)), self.context, seed, self.sharding == "reshuffled", device)


@with_options
class ByteDataset(TokenDataset):
    """Text in which each byte is a token."""

    vocabulary = SYMBOLS
    token = "byte"
    metric = "bits_per_byte"

    @property
    def chance(self) -> float:
        return 8.0  # bits per byte of a uniform prediction

    def texts(self, root: str) -> dict[str, bytes]:
        """Return the splits `train`, `valid` and `test`."""
        raise NotImplementedError

    def stored(self, root: str) -> Mapping[str, Tensor]:
        return {name: torch.tensor(np.frombuffer(text, np.uint8)) for name, text in self.texts(root).items()}


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
