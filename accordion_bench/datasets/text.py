"""Text as one long sequence of words: segments for truncated backpropagation, strands for evaluation."""

from collections.abc import Iterable, Mapping
from typing import NoReturn

import torch
from torch import Tensor

from accordion_bench import check
from accordion_bench.check import ConfigError, ValueRefused
from accordion_bench.datasets.base import Batches, Dataset

EOS = "<eos>"
STRANDS = 32  # in which an evaluation split is read, each from a zero state
IGNORED = -100  # the target that no loss counts


class TextData:
    """Words as numbers on the device.

    Training sample i is the segment of `bptt` words from word i x bptt, with the words one further as targets; what
    does not fill a segment at the end is left out.

    Args:
        train, test, valid: word numbers [n], int64.
        bptt: words per segment.
        device: where everything lives.
        shards: of an evaluation split; 1 reads each split in `STRANDS` strands, any worker its share of them.
    """

    splits = ("test", "valid")

    def __init__(self, train: Tensor, test: Tensor, valid: Tensor, bptt: int, device: torch.device) -> None:
        self.words = {"train": train.to(device), "test": test.to(device), "valid": valid.to(device)}
        self.bptt, self.device = bptt, device
        self.train_size, self.test_size = (len(train) - 1) // bptt, len(test) - 1
        self.offsets = torch.arange(bptt + 1, device=device)

    def train_batches(self, epoch: int, batches: Iterable[Tensor]) -> Batches:
        """Words [B, bptt] and the words after them, for each tensor of segment numbers in turn."""
        for indices in batches:
            yield self.train_batch(indices.to(self.device))

    def train_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Words [B, bptt] and the words after them."""
        words = self.words["train"][indices[:, None] * self.bptt + self.offsets]
        return words[:, :-1], words[:, 1:]

    def test_batches(self, batches: Iterable[Tensor]) -> NoReturn:
        """Text is evaluated in order, see `strands`."""
        raise NotImplementedError("text is evaluated by strands")

    def strands(self, split: str, worker: int, workers: int) -> Batches:
        """One worker's share of a split's strands, segment by segment; targets past the end are `IGNORED`."""
        words = self.words[split]
        count = len(words) - 1
        length = -(-count // STRANDS)
        mine = torch.arange(worker, STRANDS, workers, device=self.device)[:, None] * length
        for start in range(0, length, self.bptt):
            at = mine + torch.arange(start, min(start + self.bptt, length), device=self.device)
            if not at.numel():
                return
            inside = at < count
            y = torch.where(inside, words[(at + 1).clamp_max(count)], IGNORED)
            yield words[at.clamp_max(count)], y


class TextDataset(Dataset):
    """Text of which every next word is to be predicted.

    Args:
        bptt: words per training segment; gradients reach no further back.
        metric_split: the split that `perplexity` is of: `test`, or `valid` (Accordion's published perplexities).
        subset: use only the first so many training words; null = all.
        limit_eval: evaluate on the first so many words of each split; null = all.

    Attributes:
        vocabulary: number of different words.
        train_words: in the whole training split.
    """

    task = "text"
    vocabulary: int
    train_words: int

    def __init__(
        self, bptt: int = 30, metric_split: str = "test", subset: int | None = None, limit_eval: int | None = None
    ) -> None:
        super().__init__(subset, limit_eval)
        self.bptt = check.integer("bptt", bptt, at_least=1, instead=30)
        self.metric_split = check.choice("metric_split", metric_split, ["test", "valid"])
        self.sharding = "consecutive"
        if subset is not None and subset <= bptt:
            raise ValueRefused("subset", f"more than bptt={bptt} words", subset, 100 * bptt)

    @property
    def train_size(self) -> int:  # type: ignore[override]
        return (self.train_words - 1) // self.bptt

    @property
    def train_count(self) -> int:
        """Training segments of a run."""
        return (min(self.subset or self.train_words, self.train_words) - 1) // self.bptt

    def model_arguments(self) -> dict[str, int]:
        return {"vocabulary": self.vocabulary}

    def numbered(self, splits: Mapping[str, Tensor], device: torch.device) -> TextData:
        """The splits `train`, `test`, `valid` as numbers, cut to `subset` and `limit_eval`."""
        train = splits["train"][: self.subset]
        test, valid = (splits[name][: self.limit_eval] for name in ("test", "valid"))
        return TextData(train, test, valid, self.bptt, device)


def numbers(texts: Mapping[str, list[str]], words: list[str]) -> dict[str, Tensor]:
    """Each split as word numbers; a word that is not among `words` is `<unk>`.

    Raises:
        ConfigError: there is such a word, and no `<unk>`.
    """
    number = {word: i for i, word in enumerate(words)}
    unknown = number.get("<unk>")
    found = {}
    for split, tokens in texts.items():
        ids = [number.get(token, unknown) for token in tokens]
        if None in ids:
            raise ConfigError(
                f"dataset must be made of known words, got {tokens[ids.index(None)]!r} in its {split} split and no "
                "<unk> in the training split; type another paths.data"
            )
        found[split] = torch.tensor(ids, dtype=torch.int64)
    return found
