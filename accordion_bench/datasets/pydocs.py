"""Python's own documentation, the topics of `help()`, which are part of CPython."""

import functools
import re
from collections.abc import Mapping

import torch

from accordion_bench.datasets.text import EOS, UNKNOWN, TextData, TextDataset, by_frequency, numbers
from accordion_bench.datasets.token_windows import ByteDataset
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.option import Choice, option, with_options

WORD = re.compile(r"[A-Za-z_]+|\d|[^\w\s]")
PART = 8  # of every 8 topics one is for validation and one for the test


@with_options
class PyDocs(TextDataset):
    """About 80,000 words on the Python language; a real corpus for small models, without a download.

    Paragraphs that occur in several topics are kept once. Tokens are words, single digits and punctuation marks in
    lower case; `<eos>` ends each paragraph. The text depends on the Python version: compare runs of one version.
    """

    min_count: int = option("rarer words become <unk>", default=2, at_least=1)

    reads_files = False
    chosen_as = {"pydocs": Choice("Python's own documentation topics: about 80,000 words, no download")}

    @functools.cached_property
    def words(self) -> list[str]:
        """Vocabulary, most frequent word first."""
        counts = by_frequency(splits()["train"])
        most = counts[0][1]
        if self.min_count > most:
            rule = f"at most {most}, the count of the most frequent word"
            raise ValueRefused("dataset.min_count", rule, self.min_count, 2)
        return [UNKNOWN, *(word for word, count in counts if count >= self.min_count)]

    @property
    def vocabulary(self) -> int:  # type: ignore[override]
        return len(self.words)

    @property
    def train_words(self) -> int:  # type: ignore[override]
        return len(splits()["train"])

    def load(self, root: str, seed: int, device: torch.device) -> TextData:
        return self.numbered(numbers(splits(), self.words), device)


@with_options
class PyDocsBytes(ByteDataset):
    """The same documentation as about 300,000 training bytes, including spaces, line breaks and capitals."""

    reads_files = False
    chosen_as = {
        "pydocs_bytes": Choice("Python's own documentation topics as bytes: about 300,000 for training, no download")
    }

    @property
    def train_tokens(self) -> int:  # type: ignore[override]
        return len(byte_splits()["train"])

    def texts(self, root: str) -> dict[str, bytes]:
        return byte_splits()


@functools.cache
def splits() -> dict[str, list[str]]:
    """Return the words of the `train`, `valid` and `test` topics."""
    return split(topics_of_python("pydocs", "synthetic_text"))


@functools.cache
def byte_splits() -> dict[str, bytes]:
    """Return the paragraphs of the `train`, `valid` and `test` topics as UTF-8, with an empty line after each."""
    found = paragraphs(topics_of_python("pydocs_bytes", "wikitext2_bytes"))
    return {part: "".join(f"{one}\n\n" for one in some).encode() for part, some in found.items()}


def topics_of_python(dataset: str, instead: str) -> Mapping[str, str]:
    """Return the text that `help()` prints for each topic.

    Raises:
        ConfigError: this Python does not include the documentation; names the calling data set and an alternative.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ConfigError(
            f"dataset={dataset} needs the standard library's pydoc_data, got a Python without it; type "
            f"dataset={instead}"
        ) from None
    return topics


def split(topics: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the words of each part's paragraphs, see `paragraphs`."""
    found = paragraphs(topics)
    return {part: [word for one in some for word in (*words_of(one), EOS)] for part, some in found.items()}


def paragraphs(topics: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the paragraphs of each part; of every `PART` topics the last is for the test, the previous for validation.

    Topics are sorted by name. Only the first of equal paragraphs is kept; whitespace and case are ignored.
    """
    seen: set[tuple[str, ...]] = set()
    found: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
    for i, name in enumerate(sorted(topics)):
        part = {PART - 2: "valid", PART - 1: "test"}.get(i % PART, "train")
        for paragraph in topics[name].split("\n\n"):
            words = words_of(paragraph)
            if words and words not in seen:
                seen.add(words)
                found[part].append(paragraph)
    return found


def words_of(text: str) -> tuple[str, ...]:
    """Return words, single digits and punctuation marks, in lower case."""
    return tuple(WORD.findall(text.lower()))
