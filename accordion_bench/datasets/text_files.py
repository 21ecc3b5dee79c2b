"""WikiText-2 and the Penn Treebank, read from their files as words or as bytes."""

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from accordion_bench.datasets import fetch
from accordion_bench.datasets.fetch import refusal, why
from accordion_bench.datasets.text import EOS, TextData, TextDataset, by_frequency, numbers
from accordion_bench.datasets.token_windows import ByteDataset
from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.option import Choice, option, with_options

SPLITS = ("train", "valid", "test")
USUAL_NAMES = ("*train*", "*valid*", "*test*")
WHAT = "texts that can be read"


@with_options
class TextFiles(TextDataset):
    """Three files of words separated by blanks, one sentence or paragraph per line; `<eos>` ends each line.

    The vocabulary is that of the training split, most frequent word first. `vocabulary` and `train_words`, which
    includes `<eos>`, are checked when the files are read. File names may contain `*`, as in shells.
    """

    folder: str = option("in paths.data", default="wikitext-2")
    files: Sequence[str] = option("training, validation and test split", default=USUAL_NAMES)
    vocabulary: int = option("different words of the training split", default=33278, at_least=2)
    train_words: int = option("words of the training split", default=2088628, at_least=2)
    lower: bool = option("convert to lower case, as in the Accordion runs; use vocabulary=28912", default=False)

    chosen_as = {
        "wikitext2": Choice("2,088,628 training words (Merity et al. 2016), from the files in paths.data"),
        "ptb": Choice(
            "the Penn Treebank in the form of Mikolov et al. 2010: ptb.train.txt, ptb.valid.txt, ptb.test.txt in "
            "paths.data",
            {"folder": "ptb", "vocabulary": 10000, "train_words": 929589},
            comments={"lower": "convert to lower case"},
        ),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unless_three(self.files)

    def prepare(self, root: str) -> None:
        self.load(root, 0, torch.device("cpu"))  # checks the files; `read_splits` caches the result

    def load(self, root: str, seed: int, device: torch.device) -> TextData:
        paths = paths_of_splits(root, self.folder, self.files, "pydocs")
        versions = tuple((split, path, path.stat().st_mtime_ns) for split, path in paths.items())
        vocabulary, splits = read_splits(versions, self.lower)
        for key, declared, found in (
            ("vocabulary", self.vocabulary, vocabulary),
            ("train_words", self.train_words, len(splits["train"])),
        ):
            if declared != found:
                raise ValueRefused(f"dataset.{key}", f"what is in {self.folder}, {found}", declared, found)
        return self.numbered(splits, device)


@with_options
class ByteFiles(ByteDataset):
    """Three files, read as unmodified bytes; `train_bytes` is checked when they are read."""

    folder: str = option("in paths.data", default="wikitext-2")
    files: Sequence[str] = option("training, validation and test split", default=USUAL_NAMES)
    train_bytes: int = option("bytes of the training split", default=10797148, at_least=2)

    chosen_as = {
        "wikitext2_bytes": Choice(
            "WikiText-2 (Merity et al. 2016) as 10,797,148 training bytes, from the files in paths.data"
        )
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unless_three(self.files)
        self.train_tokens = self.train_bytes

    def prepare(self, root: str) -> None:
        self.texts(root)  # checks the files

    def texts(self, root: str) -> dict[str, bytes]:
        paths = paths_of_splits(root, self.folder, self.files, "pydocs_bytes")
        texts = {split: _bytes(path) for split, path in paths.items()}
        if (found := len(texts["train"])) != self.train_bytes:
            rule = f"what is in {self.folder}, {found}"
            raise ValueRefused("dataset.train_bytes", rule, self.train_bytes, found)
        return texts


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise refusal(WHAT, path, why(path, error)) from None


def refuse_unless_three(files: Sequence[str]) -> None:
    """Refuse names of files that are not three non-empty ones."""
    names = isinstance(files, list | tuple) and all(isinstance(name, str) and name for name in files)
    if not names or len(files) != 3:
        raise ValueRefused("files", "three names: training, validation, test", files, [*USUAL_NAMES])


def paths_of_splits(root: str, folder: str, files: Sequence[str], instead: str) -> dict[str, Path]:
    """Return the file of each split; `instead` is a data set without files, for the message.

    Raises:
        ConfigError: a name matches no file, or several.
    """
    where = fetch.find(root, folder, files) or Path(root, folder)
    found = [sorted(path for path in where.glob(name) if path.is_file()) for name in files]
    if missing := [name for name, paths in zip(files, found, strict=True) if not paths]:
        raise ConfigError(
            f"paths.data must hold the files {', '.join(missing)} in the folder {folder}, got {root} without "
            f"them; type paths.data=FOLDER, or dataset={instead}, which needs no files"
        )
    if several := next((paths for paths in found if len(paths) > 1), None):
        named = checks.show([paths[0].name for paths in found])
        raise ConfigError(
            f"dataset.files must name one file each, got {' and '.join(path.name for path in several)} for one of "
            f"them in {several[0].parent}; type 'dataset.files={named}', or other names"
        )
    return {split: path for split, (path,) in zip(SPLITS, found, strict=True)}


@functools.lru_cache(maxsize=1)
def read_splits(files: tuple[tuple[str, Path, int], ...], lower: bool) -> tuple[int, dict[str, Tensor]]:
    """Return the number of distinct words in the training split, and each split as word numbers.

    `files` has the name of each split, its file, and the file's modification time.
    """
    texts = {split: read_words(path, lower) for split, path, _ in files}
    for split, path, _ in files:
        if set(texts[split]) <= {EOS}:
            raise ConfigError(
                f"paths.data must hold files with words in them, got {path}, which is empty; type paths.data=FOLDER, "
                "or unpack the original file again"
            )
    words = [word for word, _ in by_frequency(texts["train"])]
    return len(words), numbers(texts, words)


def read_words(path: Path, lower: bool = False) -> list[str]:
    """Return the words of a UTF-8 file, with `<eos>` at the end of each line; a byte order mark is skipped."""
    words: list[str] = []
    try:
        with open(path, encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if "\0" in line:
                    raise _no_text(f"a zero byte in line {number} of {path}")
                words += (line.lower() if lower else line).split()
                words.append(EOS)
    except UnicodeDecodeError:
        raise _no_text(_first_strange_byte(path)) from None
    except OSError as error:
        raise refusal(WHAT, path, why(path, error)) from None
    return words


def _no_text(found: str) -> ConfigError:
    return ConfigError(f"dataset.files must be text in UTF-8, got {found}; type another paths.data")


def _first_strange_byte(path: Path) -> str:
    """Describe the first byte that is not UTF-8; errors of buffered reading give its position in the buffer only."""
    content = path.read_bytes()
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        return f"UTF-16 in {path}"
    try:
        content.decode()
    except UnicodeDecodeError as error:
        return f"the byte {content[error.start]:#04x} at {error.start:,} in {path}"
    return f"a text that has just changed in {path}"
