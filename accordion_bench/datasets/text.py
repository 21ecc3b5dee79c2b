"""Text as one long sequence of words: segments for truncated backpropagation, strands for evaluation."""

import collections
from collections.abc import Iterable, Mapping
from itertools import repeat

import numpy as np
import torch
from torch import Tensor

from accordion_bench.datasets.dataset import IGNORED, Batches, LanguageDataset, part_only
from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.tensors import keyed_rng

EOS, UNKNOWN = "<eos>", "<unk>"
STRANDS = 32  # pieces of an evaluation split, each read from a zero state
STRETCH = 32  # words of a strand per forward pass; bounds the memory of the logits


class TextData:
    """Words as numbers on the device.

    Training sample i is the segment of `bptt` words from word i x bptt; targets are the words shifted by one. A partial
    segment at the end is dropped.

    Args:
        train, test, valid: word numbers [n], int64.
        bptt: words per segment.
        device: device of all tensors.
    """

    splits = ("test", "valid")

    def __init__(self, train: Tensor, test: Tensor, valid: Tensor, bptt: int, device: torch.device) -> None:
        self.words = {"train": train.to(device), "test": test.to(device), "valid": valid.to(device)}
        self.bptt, self.device = bptt, device
        self.indexed_on = device
        self.train_size, self.test_size = (len(train) - 1) // bptt, len(test) - 1
        self.offsets = torch.arange(bptt + 1, device=device)

    def train_batches(self, epoch: int, batches: Iterable[Tensor]) -> Batches:
        """Yield words [B, bptt] and the following words, for each tensor of segment indices."""
        for indices in batches:
            yield self.train_batch(indices.to(self.device))

    def train_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return words [B, bptt] and the following words."""
        words = self.words["train"][indices[:, None] * self.bptt + self.offsets]
        return words[:, :-1], words[:, 1:]

    def strands(self, split: str, worker: int, workers: int) -> Batches:
        """Yield one worker's share of a split's strands, `STRETCH` words at a time, independent of bptt.

        Strands are consecutive pieces of the split, of equal length; the last ones are padded.

        Yields:
            words [strands, STRETCH] and the following words; past the end of the split these are `IGNORED`.
        """
        words = self.words[split]
        count = len(words) - 1
        length = -(-count // STRANDS)
        mine = torch.arange(STRANDS, device=self.device)[worker::workers, None] * length
        for start in range(0, length if len(mine) else 0, STRETCH):
            at = mine + torch.arange(start, min(start + STRETCH, length), device=self.device)
            inside = at < count
            y = torch.where(inside, words[(at + 1).clamp_max(count)], IGNORED)
            yield words[at.clamp_max(count)], y


@with_options
class TextDataset(LanguageDataset):
    """Text for next-word prediction.

    Gradients are truncated after `bptt` words. Accordion's published perplexities are of the split `valid`.
    """

    bptt: int = option("words per training segment", default=30, at_least=1)
    metric_split: str = option("split of the perplexity", default="test", choices=("test", "valid"))
    subset: int | None = part_only("use only the first N training words")
    limit_eval: int | None = part_only("use only the first N words of each evaluation split")

    task = "text"
    sharding = "consecutive"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.subset is not None and self.subset <= self.bptt:
            raise ValueRefused("subset", f"more than bptt={self.bptt} words", self.subset, 100 * self.bptt)

    @property
    def whole(self) -> int:
        return self.train_words

    @property
    def train_size(self) -> int:  # type: ignore[override]
        return (self.train_words - 1) // self.bptt

    @property
    def train_count(self) -> int:
        """Number of training segments of a run."""
        words = min(self.subset or self.train_words, self.train_words)
        if words <= self.bptt:
            rule = f"below {words}, the words of the training split"
            raise ValueRefused("dataset.bptt", rule, self.bptt, max(1, min(30, words - 1)))
        return (words - 1) // self.bptt

    def example(self, samples: int) -> tuple[Tensor, Tensor]:
        words = torch.zeros(samples, self.bptt, dtype=torch.int64)
        return words, words

    def numbered(self, splits: Mapping[str, Tensor], device: torch.device) -> TextData:
        """Return the splits `train`, `test`, `valid` as numbers, cut to `subset` and `limit_eval`."""
        return TextData(**self.cut(splits), bptt=self.bptt, device=device)


def numbers(texts: Mapping[str, list[str]], words: list[str]) -> dict[str, Tensor]:
    """Convert each split to word numbers; a word that is not in `words` becomes `<unk>`.

    Raises:
        ConfigError: a word is unknown, and `words` has no `<unk>`.
    """
    number = {word: i for i, word in enumerate(words)}
    unknown = number.get(UNKNOWN, -1)
    found = {}
    for split, tokens in texts.items():
        ids = np.fromiter(map(number.get, tokens, repeat(unknown)), np.int64, len(tokens))
        if unknown < 0 and (strange := np.flatnonzero(ids < 0)).size:
            raise ConfigError(
                f"dataset must be made of known words, got {tokens[strange[0]]!r} in its {split} split and no "
                f"{UNKNOWN} in the training split; type another paths.data"
            )
        found[split] = torch.from_numpy(ids)
    return found


def by_frequency(tokens: Iterable[str]) -> list[tuple[str, int]]:
    """Return the distinct words with their counts, most frequent first, ties in alphabetical order."""
    counts = collections.Counter(tokens)
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


@with_options
class SyntheticText(TextDataset):
    """Each word is followed by one of `branches` words with equal probability; for speed measurements and tests.

    The best possible perplexity is about 8 with the defaults, and about `branches` without noise.
    """

    vocabulary: int = option("number of different words", default=200, at_least=2)
    branches: int = option("number of words that may follow a word", default=4, at_least=1)
    noise: float = option("share of words drawn at random", default=0.1, at_least=0, at_most=1)
    train_words: int = option(default=20000, at_least=2)
    test_words: int = option("words of the test split, and of the validation split", default=2000, at_least=2)

    reads_files = False
    chosen_as = {"synthetic_text": Choice("words of a random Markov chain: for speed measurements and tests")}

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer("train_words", self.train_words, at_least=self.bptt + 1, instead=20000)

    def load(self, root: str, seed: int, device: torch.device) -> TextData:
        generator = keyed_rng.generator(seed, "synthetic text")
        total = self.train_words + 2 * self.test_words
        followers = torch.randint(self.vocabulary, (self.vocabulary, self.branches), generator=generator).tolist()
        choices = torch.randint(self.branches, (total,), generator=generator).tolist()
        strays = torch.randint(self.vocabulary, (total,), generator=generator).tolist()
        noisy = (torch.rand(total, generator=generator) < self.noise).tolist()
        words, word = [], 0
        for choice, stray, stray_now in zip(choices, strays, noisy, strict=True):
            word = stray if stray_now else followers[word][choice]
            words.append(word)
        train, test, valid = torch.tensor(words).split([self.train_words, self.test_words, self.test_words])
        return self.numbered({"train": train, "test": test, "valid": valid}, device)
