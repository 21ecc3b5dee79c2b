"""Images and texts read by Hugging Face's `datasets`, from its Hub, its cache or local files."""

import functools
import hashlib
import importlib.util
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image
from torch import Tensor

from accordion_bench.datasets import pictures
from accordion_bench.datasets.counted import (
    BY_OWN,
    NULL,
    check_fingerprint,
    check_unchanged_files,
    name_or_null,
    part_of,
)
from accordion_bench.datasets.dataset import known
from accordion_bench.datasets.fetch import refusal
from accordion_bench.datasets.image_folder import LABEL
from accordion_bench.datasets.pictures import SIZE, DecodedImages, PicturesByPart
from accordion_bench.datasets.token_windows import ByteDataset
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.options.units import counted as number_of

Table = Any  # a datasets.Dataset
NAME = "name on the Hub, OWNER/NAME; null = the files in paths.data (parquet, csv, json, or saved by datasets)"
CONFIG, REVISION = "configuration on the Hub; null = the only one", "branch, tag or commit on the Hub; null = newest"
COLUMN = "null = the only one of its kind"
ALONE = 20  # if only train exists: of every 20 rows the last is for the test, the one before it for validation


@dataclass(frozen=True)
class Origin:
    """Location of tables: a data set on the Hub, or `paths.data` (`root`) if `name` is None."""

    name: str | None
    config: str | None
    revision: str | None
    root: str

    def __str__(self) -> str:
        return self.name or self.root


@functools.lru_cache(maxsize=2)
def tables(source: Origin) -> Mapping[str, Table]:
    """Load the table of each part: train, and test or validation if they exist.

    Raises:
        ConfigError: `datasets` is not installed or cannot read the files, or there is no part train.
    """
    if importlib.util.find_spec("datasets") is None:
        raise ConfigError(
            "dataset=huggingface needs the package datasets, got none; type pip install 'accordion-bench[hf]'"
        )
    import datasets

    place = Path(source.root)
    try:
        if source.name is not None:
            found = datasets.load_dataset(source.name, source.config, revision=source.revision)
        elif (place / "dataset_dict.json").is_file() or (place / "state.json").is_file():
            found = datasets.load_from_disk(str(place))
        else:
            found = datasets.load_dataset(str(place))
    except Exception as error:  # it may raise anything
        told = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        rule = f"dataset.name must be on the Hub or in its cache, got {source.name}"
        if source.name is None:
            rule = f"paths.data must hold files that datasets reads, got {source.root}"
        raise ConfigError(f"{rule} ({told}); type dataset.name=OWNER/NAME, or paths.data=FOLDER") from error
    parts = {"train": found} if isinstance(found, datasets.Dataset) else dict(found)
    named = {part: table for name, table in parts.items() if (part := part_of(name))}
    if "train" not in named:
        raise ConfigError(
            f"dataset must have a part train, got {', '.join(parts) or 'none'} in {source}; type another dataset.config"
        )
    return named


def _column(key: str, typed: str | None, source: Origin, fitting: Sequence[str], table: Table) -> str:
    """Return the given column, or the only fitting one."""
    names = list(table.column_names)
    if typed is not None:
        if typed not in names:
            raise ValueRefused(f"dataset.{key}", f"one of {', '.join(names)}", typed, fitting[0] if fitting else None)
        return typed
    if len(fitting) != 1:
        raise ConfigError(
            f"dataset.{key} must name a column of {source}, since {len(fitting)} fit, got null; type "
            f"dataset.{key}={fitting[0] if fitting else 'NAME'} (its columns: {', '.join(names)})"
        )
    return fitting[0]


def classes_of_rows(table: Table, column: str, source: Origin, part: str) -> np.ndarray:
    """Return the class of each row, -1 in all rows of a test or validation part without classes."""
    values = list(table[column])
    if none := [row for row, value in enumerate(values) if value is None or value != value or not str(value).strip()]:
        if part != "train" and len(none) == len(values):
            return np.full(len(values), -1)
        raise ConfigError(
            f"{source} must have a class in each row, got row {none[0]} of {part} without; leave out its "
            f"{number_of(len(none), 'row')} without a class"
        )
    return np.asarray(values)


@dataclass(frozen=True)
class EncodedRows:
    """Encoded pictures and their classes [n] in rows of a table; implements `Pictures`. `place` is for messages."""

    table: Table
    column: str
    labels: np.ndarray
    place: str

    def only(self, indices: Tensor) -> "EncodedRows":
        chosen = indices.numpy()
        return EncodedRows(self.table.select(chosen), self.column, self.labels[chosen], self.place)

    def with_others(self, others: "EncodedRows") -> "EncodedRows":
        import datasets

        both = datasets.concatenate_datasets([self.table, others.table])
        return EncodedRows(both, self.column, np.concatenate([self.labels, others.labels]), self.place)

    def _encoded(self, index: int) -> Path | BinaryIO:
        held = self.table[int(index)][self.column]
        return Path(held["path"]) if held["bytes"] is None else io.BytesIO(held["bytes"])

    def open(self, index: int) -> Image.Image:
        try:
            with Image.open(self._encoded(index)) as image:
                return pictures.in_colour(image)
        except Exception as error:  # a broken picture may raise anything
            row = Path(f"{self.place}, row {index}")
            raise refusal(pictures.WHAT, row, pictures.reason(row, error)) from error

    def sides(self, indices: Sequence[int]) -> Iterator[int]:
        return pictures.sides(map(self._encoded, indices))

    def to_examine(self, indices: Sequence[int]) -> Iterable[Path]:
        """Return no files: pictures are stored in the table's file, which `datasets` checks."""
        return ()

    def identities(self) -> Iterator[bytes]:
        """Yield the classes and the total size of all columns."""
        yield self.labels.astype("<i8").tobytes()
        yield b"%d\n" % self.table.data.nbytes


@with_options
class HuggingFaceImages(DecodedImages):
    """Images with classes in a data set that Hugging Face's `datasets` reads.

    Parts are found by their usual names: train; test; val, valid, validation. If there is only train, a share of each
    class is held out. Rows whose class is -1 are dropped, and so is a part that has only such rows.
    """

    name: str | None = option(NAME, default=None)
    config: str | None = option(CONFIG, default=None)
    revision: str | None = option(REVISION, default=None)
    image: str | None = option(f"column of the pictures; {COLUMN}", default=None)
    label: str | None = option(f"column of the classes; {COLUMN}", default=None)

    chosen_as = {
        "huggingface": Choice(
            "images read by Hugging Face's datasets: dataset.name=OWNER/NAME, or parquet files in paths.data",
            comments=BY_OWN | SIZE,
        )
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("name", "config", "revision", "image", "label"):
            name_or_null(key, getattr(self, key))

    def sorted(self, root: str) -> PicturesByPart:
        source = Origin(self.name, self.config, self.revision, root)
        parts = tables(source)
        import datasets  # `tables` has checked that it is installed

        features = parts["train"].features
        images = [name for name, kind in features.items() if isinstance(kind, datasets.Image)]
        classes = [name for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
        image = _column("image", self.image, source, images, parts["train"])
        usual = [name for name in features if name.lower() in LABEL]
        label = _column(
            "label", self.label, source, classes if len(classes) == 1 else usual[:1] or classes, parts["train"]
        )
        values = {part: classes_of_rows(table, label, source, part) for part, table in parts.items()}
        kinds = np.unique(values["train"])
        kinds = kinds[kinds != -1] if kinds.dtype.kind in "iu" else kinds
        found = {}
        for part, own in values.items():
            kept = np.flatnonzero(own != -1) if own.dtype.kind in "iu" else np.arange(len(own))
            if (strange := own[kept][~np.isin(own[kept], kinds)]).size:
                raise ConfigError(
                    f"{source} must have the classes of its training part in all parts, got {strange[0]} in {part} "
                    "alone; leave those rows out"
                )
            if len(kept):
                table = parts[part] if len(kept) == len(own) else parts[part].select(kept)
                table = table.cast_column(image, datasets.Image(decode=False))
                found[part] = EncodedRows(table, image, np.searchsorted(kinds, own[kept]), str(source))
        kind = features[label]
        names = [kind.int2str(int(i)) if isinstance(kind, datasets.ClassLabel) else str(i) for i in kinds]
        return PicturesByPart.of(Path(str(source)), found, names)


@with_options
class HuggingFaceText(ByteDataset):
    """Texts in a data set that Hugging Face's `datasets` reads, as UTF-8 bytes; each row ends with a line break.

    Parts are found by their usual names. If there is one part besides train, it is both the test and the validation
    split. If there is none, one row in twenty is for the test, and the one before it for validation.
    """

    name: str | None = option(NAME, default=None)
    config: str | None = option(CONFIG, default=None)
    revision: str | None = option(REVISION, default=None)
    column: str | None = option(f"column of the texts; {COLUMN}", default=None)
    train_bytes: int | None = option(NULL, default=None, at_least=2)
    fingerprint: str | None = option("of the texts, recorded by a run; null = not checked", default=None)

    counted = ("train_bytes", "fingerprint")
    chosen_as = {
        "huggingface_text": Choice(
            "texts read by Hugging Face's datasets, as bytes: dataset.name=OWNER/NAME, or parquet files in paths.data"
        )
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("name", "config", "revision", "column"):
            name_or_null(key, getattr(self, key))
        check_fingerprint(self.fingerprint)

    @property
    def train_tokens(self) -> int:  # type: ignore[override]
        return known(self, "train_bytes")

    def texts(self, root: str) -> dict[str, bytes]:
        source = Origin(self.name, self.config, self.revision, root)
        return dict(_texts(source, self.column))

    def count(self, root: str) -> dict[str, Any]:
        texts = self.texts(root)
        self.train_bytes = self.train_bytes or len(texts["train"])
        return {"train_bytes": self.train_bytes, "fingerprint": self.fingerprint or _fingerprint(texts)}

    def prepare(self, root: str) -> None:
        texts = self.texts(root)
        if self.fingerprint is not None:
            check_unchanged_files(self.name or root, self.fingerprint, _fingerprint(texts))
        if self.train_bytes not in (None, found := len(texts["train"])):
            raise ValueRefused("dataset.train_bytes", f"those of the texts, {found}", self.train_bytes, found)


@functools.lru_cache(maxsize=1)
def _texts(source: Origin, typed: str | None) -> Mapping[str, bytes]:
    parts = tables(source)
    strings = [name for name, kind in parts["train"].features.items() if getattr(kind, "dtype", "").endswith("string")]
    column = _column("column", typed, source, strings, parts["train"])
    rows = {part: [str(text) for text in table[column] if text is not None] for part, table in parts.items()}
    every = rows["train"]
    if len(rows) == 1:
        rows["test"], rows["validation"] = every[ALONE - 1 :: ALONE], every[ALONE - 2 :: ALONE]
        rows["train"] = [text for i, text in enumerate(every) if i % ALONE < ALONE - 2]
    either = rows.get("test") or rows["validation"]
    named = {"train": rows["train"], "valid": rows.get("validation", either), "test": rows.get("test", either)}
    return {part: "".join(f"{text.removesuffix(chr(10))}\n" for text in some).encode() for part, some in named.items()}


def _fingerprint(texts: Mapping[str, bytes]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part, text in sorted(texts.items()):
        digest.update(f"{part} {len(text)} ".encode() + text)
    return digest.hexdigest()
