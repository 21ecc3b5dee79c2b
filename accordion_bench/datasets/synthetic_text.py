"""Synthetic text: words of a random Markov chain."""

import torch

from accordion_bench.datasets.text import TextData, TextDataset
from accordion_bench.options import checks
from accordion_bench.tensors import keyed_rng


class SyntheticText(TextDataset):
    """Each word is followed by one of `branches` words with equal chance; for speed measurements and tests.

    The best possible perplexity is about 8 with the defaults, and about `branches` without noise.

    Args:
        vocabulary: number of different words.
        branches: words that may follow a word; fewer = easier.
        noise: share of words drawn from the whole vocabulary instead; higher = harder.
        train_words, test_words: words of the training split, and of the test and the validation split each.
        bptt, metric_split, subset, limit_eval: see `TextDataset`.
    """

    reads_files = False

    def __init__(
        self,
        vocabulary: int = 200,
        branches: int = 4,
        noise: float = 0.1,
        train_words: int = 20000,
        test_words: int = 2000,
        **options,
    ) -> None:
        super().__init__(**options)
        self.vocabulary = checks.integer("vocabulary", vocabulary, at_least=2, instead=200)
        self.branches = checks.integer("branches", branches, at_least=1, instead=4)
        self.noise = checks.number("noise", noise, at_least=0, at_most=1, instead=0.1)
        self.train_words = checks.integer("train_words", train_words, at_least=self.bptt + 1, instead=20000)
        self.test_words = checks.integer("test_words", test_words, at_least=2, instead=2000)

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
