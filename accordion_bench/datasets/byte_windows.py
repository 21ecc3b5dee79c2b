"""Text as bytes: independent windows, of which every next byte is to be predicted."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accordion_bench.datasets.base import Batches, Dataset
from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.units import counted
from accordion_bench.tensors import keyed_rng

SYMBOLS = 256
EVALUATED_AT_ONCE = 16384  # bytes; bounds the memory of the logits
IGNORED = -100  # the target that no loss counts


class ByteData:
    """Bytes on the device.

    Training sample i of an epoch is the window of `context` bytes from byte o + i x context, with the bytes one further
    as targets. The offset o below `context` is keyed by the epoch, so that no epoch cuts the text where another did.

    Args:
        splits: bytes [n] of `train`, `test` and `valid`, uint8.
        context: bytes per window.
        seed: keys the offsets.
        reshuffled: false = every epoch has the offset of the first one.
        device: where everything lives.
    """

    splits = ("test", "valid")
    by_device = True

    def __init__(
        self, splits: Mapping[str, Tensor], context: int, seed: int, reshuffled: bool, device: torch.device
    ) -> None:
        self.bytes = {name: split.to(device) for name, split in splits.items()}
        self.context, self.seed, self.reshuffled = context, seed, reshuffled
        self.device = self.indexed_on = device
        self.train_size, self.test_size = windows(len(splits["train"]), context), len(splits["test"]) - 1
        self.steps = torch.arange(context + 1, device=device)
        self.offset = torch.zeros((), dtype=torch.int64, device=device)

    def begin_epoch(self, epoch: int) -> None:
        """Draw where this epoch's windows begin."""
        offset = keyed_rng.key(self.seed, "offset", epoch if self.reshuffled else 0) % self.context
        self.offset.fill_(offset)

    def train_batches(self, epoch: int, batches: Iterable[Tensor]) -> Batches:
        """Bytes [B, context] and the bytes after them, for each tensor of window numbers in turn."""
        self.begin_epoch(epoch)
        for indices in batches:
            yield self.train_batch(indices)

    def train_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Bytes [B, context] and the bytes after them; from where the epoch says that has begun last."""
        starts = self.offset + indices.to(self.device) * self.context
        window = self.bytes["train"][starts[:, None] + self.steps].long()
        return window[:, :-1], window[:, 1:]

    def test_windows(self, split: str, worker: int, workers: int) -> Batches:
        """One worker's share of the windows of a split, side by side from its first byte; whatever its context is.

        Yields:
            bytes [B, context] and the bytes after them; past the end of the split these are `IGNORED`.
        """
        text = self.bytes[split]
        count = len(text) - 1
        starts = torch.arange(0, count, self.context, device=self.device)[worker::workers]
        for some in starts.split(max(1, EVALUATED_AT_ONCE // self.context)):
            at = some[:, None] + self.steps[:-1]
            y = torch.where(at < count, text[(at + 1).clamp_max(count)].long(), IGNORED)
            yield text[at.clamp_max(count)].long(), y


def windows(count: int, context: int) -> int:
    """How many windows of `context` bytes there are among `count` from every offset below `context`."""
    return count // context - 1


class ByteDataset(Dataset):
    """Text of which every next byte is to be predicted, in windows that know nothing of each other.

    Args:
        context: bytes per window; at most the model's `positions`.
        metric_split: the split that `bits_per_byte` is of: `valid` or `test`.
        subset: use only the first so many training bytes; null = all.
        limit_eval: evaluate on the first so many bytes of each split, 2 at least; null = all.
        sharding: see `Dataset`.

    Attributes:
        train_bytes: in the whole training split.
    """

    task = "bytes"
    train_bytes: int

    def __init__(self, context: int = 256, metric_split: str = "valid", **options: Any) -> None:
        super().__init__(**options)
        self.context = checks.integer("context", context, at_least=1, instead=256)
        self.metric_split = checks.choice("metric_split", metric_split, ["valid", "test"])
        if self.limit_eval == 1:
            raise ValueRefused("limit_eval", "at least 2, a byte and the one after it", self.limit_eval, 10000)

    @property
    def whole(self) -> int:
        return self.train_bytes

    @property
    def train_size(self) -> int:  # type: ignore[override]
        return windows(self.train_bytes, self.context)

    @property
    def train_count(self) -> int:
        """Training windows of a run."""
        count = min(self.subset or self.train_bytes, self.train_bytes)
        if count < 2 * self.context:
            rule = f"at most half of the {counted(count, 'byte')} that are trained on"
            raise ValueRefused("dataset.context", rule, self.context, max(1, count // 2))
        return windows(count, self.context)

    @property
    def chance(self) -> float:
        return 8.0  # bits per byte where all are equally likely

    def model_arguments(self) -> dict[str, int]:
        return {"vocabulary": SYMBOLS}

    def example(self, samples: int) -> tuple[Tensor, Tensor]:
        window = torch.zeros(samples, self.context, dtype=torch.int64)
        return window, window

    def texts(self, root: str) -> dict[str, bytes]:
        """The splits `train`, `valid` and `test`."""
        raise NotImplementedError

    def load(self, root: str, seed: int, device: torch.device) -> ByteData:
        return ByteData(dict(self._cut(self.texts(root))), self.context, seed, self.sharding == "reshuffled", device)

    def _cut(self, texts: Mapping[str, bytes]) -> Iterator[tuple[str, Tensor]]:
        """Each split, cut to `subset` or `limit_eval`."""
        for name, text in texts.items():
            if len(text) < 2:
                raise ConfigError(
                    f"dataset must have at least 2 bytes in its {name} split, got {len(text)}; type another paths.data"
                )
            whole = np.frombuffer(text, np.uint8)
            yield name, torch.tensor(whole[: self.subset if name == "train" else self.limit_eval])
