"""Synthetic text: words of a random Markov chain."""

import torch

from accordion_bench.datasets.text import TextData, TextDataset
from accordion_bench.options import checks
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.tensors import keyed_rng


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
