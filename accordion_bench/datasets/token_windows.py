"""Text as tokens or bytes, in independent windows for next-token prediction."""

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from accordion_bench.datasets.dataset import IGNORED, Batches, LanguageDataset, known, part_only
from accordion_bench.options.checks import ValueRefused
from accordion_bench.options.option import option, with_options
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
