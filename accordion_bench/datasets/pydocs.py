"""Python's own documentation: the topics behind `help()`, which ship with every CPython."""

import collections
import functools
import re

import torch

from accordion_bench import check
from accordion_bench.datasets.text import EOS, TextData, TextDataset, numbers

UNKNOWN = "<unk>"
WORD = re.compile(r"[A-Za-z_]+|\d|[^\w\s]")
PART = 8  # one topic in so many is for validation, and one for the test


class PyDocs(TextDataset):
    """About 80,000 words on the Python language; a real corpus for small models, without a download.

    Paragraphs that occur in several topics count once. Words, single digits and punctuation marks are words here, lower
    case; `<eos>` ends each paragraph. The text differs a little between Python versions: compare runs of one version.

    Args:
        min_count: words that are rarer in the training topics become `<unk>`; higher = smaller vocabulary.
        bptt, metric_split, subset, limit_eval: see `TextDataset`.
    """

    def __init__(self, min_count: int = 2, **options) -> None:
        super().__init__(**options)
        self.min_count = check.integer("min_count", min_count, at_least=1, instead=2)

    @functools.cached_property
    def words(self) -> list[str]:
        """The vocabulary, most frequent word first."""
        counts = collections.Counter(splits()["train"])
        often = sorted((word for word, n in counts.items() if n >= self.min_count), key=lambda w: (-counts[w], w))
        return [UNKNOWN, *often]

    @property
    def vocabulary(self) -> int:  # type: ignore[override]
        return len(self.words)

    @property
    def train_words(self) -> int:  # type: ignore[override]
        return len(splits()["train"])

    def load(self, root: str, seed: int, device: torch.device) -> TextData:
        return self.numbered(numbers(splits(), self.words), device)


@functools.cache
def splits() -> dict[str, list[str]]:
    """The words of the `train`, `valid` and `test` topics."""
    from pydoc_data.topics import topics

    seen: set[str] = set()
    found: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
    for i, name in enumerate(sorted(topics)):
        split = {PART - 2: "valid", PART - 1: "test"}.get(i % PART, "train")
        for paragraph in topics[name].split("\n\n"):
            if paragraph not in seen:
                seen.add(paragraph)
                found[split] += [*WORD.findall(paragraph.lower()), EOS]
    return found
