"""WikiText-2 and the Penn Treebank from their files."""

from pathlib import Path

import torch

from accordion_bench import check
from accordion_bench.check import ConfigError
from accordion_bench.datasets.text import EOS, TextData, TextDataset, numbers

SPLITS = ("train", "valid", "test")


class TextFiles(TextDataset):
    """Three files of words with blanks between them, one sentence or paragraph per line; `<eos>` ends each line.

    The vocabulary is that of the training split, most frequent word first.

    Args:
        folder: under paths.data.
        files: names of the training, validation and test split; `*` as in shells.
        vocabulary: number of different words in the training split, `<eos>` included; checked when the files are read.
        train_words: words of the training split, `<eos>` included; checked as well.
        lower: change all letters to lower case (Accordion's runs).
        bptt, metric_split, subset, limit_eval: see `TextDataset`.
    """

    def __init__(
        self, folder: str, files: list[str], vocabulary: int, train_words: int, lower: bool = False, **options
    ) -> None:
        super().__init__(**options)
        self.folder, self.files = folder, files
        if not isinstance(files, list) or len(files) != 3:
            raise check.ValueRefused("files", "three names: training, validation, test", files, list(SPLITS))
        self.vocabulary = check.integer("vocabulary", vocabulary, at_least=2, instead=33278)
        self.train_words = check.integer("train_words", train_words, at_least=2, instead=2088628)
        self.lower = check.boolean("lower", lower, instead=False)

    def _paths(self, root: str) -> dict[str, Path]:
        found = zip(SPLITS, (sorted(Path(root, self.folder).glob(name)) for name in self.files), strict=True)
        return {split: paths[0] for split, paths in found if paths}

    def prepare(self, root: str) -> None:
        there = self._paths(root)
        missing = [name for split, name in zip(SPLITS, self.files, strict=True) if split not in there]
        if missing:
            raise ConfigError(
                f"paths.data must hold the files {', '.join(missing)} in the folder {self.folder}, got {root} without "
                "them; type paths.data=FOLDER, or dataset=pydocs, which needs no files"
            )

    def load(self, root: str, seed: int, device: torch.device) -> TextData:
        texts = {split: read_words(path, self.lower) for split, path in self._paths(root).items()}
        counts = dict.fromkeys(texts["train"], 0)
        for word in texts["train"]:
            counts[word] += 1
        words = sorted(counts, key=lambda word: (-counts[word], word))
        for key, declared, found in (
            ("vocabulary", self.vocabulary, len(words)),
            ("train_words", self.train_words, len(texts["train"])),
        ):
            if declared != found:
                raise check.ValueRefused(f"dataset.{key}", f"what is in {self.folder}, {found}", declared, found)
        return self.numbered(numbers(texts, words), device)


def read_words(path: Path, lower: bool = False) -> list[str]:
    """The words of a file, with `<eos>` at the end of each line."""
    text = path.read_text(encoding="utf-8")
    lines = (text.lower() if lower else text).splitlines()
    return [word for line in lines for word in [*line.split(), EOS]]
