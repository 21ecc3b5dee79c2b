"""Pictures sorted into one folder per class, or listed with their classes in a table; ImageNet."""

import csv
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

import numpy as np

from accordion_bench.datasets import pictures
from accordion_bench.datasets.counted import BY_OWN, name_or_null, part_of
from accordion_bench.datasets.fetch import refusal, why
from accordion_bench.datasets.pictures import SIZE, WORKERS, DecodedImages, Files, PicturesByPart
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.option import Choice, option, with_options

USUAL = ("labels.csv", "train.csv", "metadata.csv")
FILE = ("file_name", "filename", "file", "image", "image_id", "img", "path", "id", "name")
LABEL = ("label", "labels", "class", "category", "target", "y")
PART = ("split", "part", "set", "subset")
DELIMITERS = (",", ";", "\t")
Row = tuple[int, str, str, str]  # line, part, file, class


def table_in(place: Path) -> Path | None:
    """Return the table in a folder, found by its usual name and columns; None if there is none."""
    for table in (place / name for name in USUAL):
        try:
            with table.open(encoding="utf-8-sig", newline="") as stream:
                names = _names(_reader(stream))
        except (OSError, UnicodeDecodeError, csv.Error):
            continue
        if _column(names, FILE) and _column(names, LABEL):
            return table
    return None


def sorted_files(table: Path) -> tuple[Path, dict[str, Files], list[str]]:
    """Return the folder of a .csv table, the pictures that it lists, by part, and the names of the classes.

    Parts are train, and test or validation if a column names them. The pictures are in the folder or its subfolders.
    Classes are numbered in the order of their names; integer names in numeric order.

    Raises:
        ConfigError: a column is missing; a row names no picture, one of several, or one that another row names; or a
            class has no row of train.
    """
    rows, place = list(_rows(table)), table.parent
    paths = _paths(table, rows)
    classes = sorted({name for *_, name in rows}, key=lambda name: (not name.isdecimal(), len(name), name))
    if not all(name.isdecimal() for name in classes):
        classes.sort()
    number = {name: label for label, name in enumerate(classes)}
    found = {}
    for part in dict.fromkeys(part for _, part, *_ in rows):
        own = [(path, number[name]) for path, (_, of, _, name) in zip(paths, rows, strict=True) if of == part]
        found[part] = Files(place, np.array([os.fsencode(path) for path, _ in own]), np.array([y for _, y in own]))
    if "train" not in found:
        got = f"only {' and '.join(found)}" if found else "none"
        raise ConfigError(f"paths.data must hold rows of train in {table}, got {got}; add some, or rename these")
    trained = {name for _, part, _, name in rows if part == "train"}
    for line, _, _, name in rows:
        if name not in trained:
            raise ConfigError(
                f"paths.data must hold rows of train for each class, got only others for {name}, such as line {line} "
                f"of {table}; leave them out"
            )
    return place, found, classes


def _paths(table: Path, rows: Sequence[Row]) -> list[str]:
    """Return the picture of each row, relative to the table's folder.

    A name that several folders contain is that of the folder of its part, such as `train`.
    """
    known, paths, missing = _pictures_below(table.parent), list[str](), list[str]()
    lines: dict[str, int] = {}
    for line, part, file, _ in rows:
        fitting = known.get(os.path.normpath(file), [])
        if len(fitting) > 1:
            of_part = [path for path in fitting if part in map(part_of, Path(path).parts[:-1])]
            fitting = of_part if len(of_part) == 1 else fitting
        if len(fitting) > 1:
            raise ConfigError(
                f"paths.data must hold one picture for each row, got line {line} of {table} with {file}, which is "
                f"{' and '.join(sorted(fitting)[:2])}; write its folder into the table"
            )
        if not fitting:
            missing.append(file)
        elif (before := lines.setdefault(fitting[0], line)) != line:
            raise ConfigError(
                f"paths.data must hold one row for each picture, got {fitting[0]} in the lines {before} and {line} of "
                f"{table}; remove one of them"
            )
        paths += fitting
    if missing:
        more = f" and {len(missing) - 1:,} more" if missing[1:] else ""
        raise ConfigError(
            f"paths.data must hold the pictures that {table} names, got {table.parent} without {missing[0]}{more}; "
            "remove these rows, or add the files"
        )
    return paths


def _rows(table: Path) -> Iterator[Row]:
    try:
        with table.open(encoding="utf-8-sig", newline="") as stream:
            reader = _reader(stream)
            names = _names(reader)
            file, label, part = (_column(names, usual) for usual in (FILE, LABEL, PART))
            if file is None or label is None:
                raise ConfigError(
                    f"paths.data must hold a table with columns file and label, got {', '.join(names) or 'none'} in "
                    f"{table}; rename its first line"
                )
            said = ((row.get(part or "") or "train", row[file] or "", row[label] or "") for row in reader)
            rows = [(reader.line_num, *row) for row in said]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise refusal("a table that can be read", table, why(table, error)) from None
    for line, of, name, label in rows:
        known = part_of(of.strip())
        if not name.strip() or not label.strip() or known is None:
            rule = "a file, a class, and train, test or val in each row"
            got = "" if known else f" ({of})"
            raise ConfigError(
                f"paths.data must hold {rule}, got line {line} of {table} without{got}; correct that line"
            )
        yield line, known, name.strip(), label.strip()


def _reader(stream: TextIO) -> "csv.DictReader[str]":
    """Return a reader of the table, whose columns are divided by commas, semicolons or tabs."""
    first = stream.readline()
    stream.seek(0)
    return csv.DictReader(stream, delimiter=max(DELIMITERS, key=first.count))


def _names(reader: "csv.DictReader[str]") -> dict[str, str]:
    """Return column names, keyed by their stripped lower-case form."""
    return {name.strip().lower(): name for name in reader.fieldnames or () if name}


def _column(names: Mapping[str, str], usual: Sequence[str]) -> str | None:
    return next((names[name] for name in usual if name in names), None)


def _pictures_below(place: Path) -> dict[str, list[str]]:
    """Return pictures in a folder and its subfolders by relative path and by name, each with and without extension.

    A relative path is that of one picture; other keys may be those of several.
    """
    exact: dict[str, list[str]] = {}
    found: dict[str, list[str]] = {}
    for here, folders, files in os.walk(place):
        folders[:] = sorted(name for name in folders if not pictures.is_hidden(name))
        for name in sorted(files):
            if name.lower().endswith(pictures.ENDINGS) and not pictures.is_hidden(name):
                path = os.path.relpath(os.path.join(here, name), place)
                exact[path] = [path]
                for key in {name, os.path.splitext(path)[0], os.path.splitext(name)[0]}:
                    found.setdefault(key, []).append(path)
    return found | exact


@with_options
class ImageFolder(DecodedImages):
    """Pictures in one folder per class, also within `train` and `test` or `val`; or in any folders, with a table.

    Names of the parts: train, training; test, testing; val, valid, validation. If both a test and a validation part
    exist, the validation pictures choose the best epoch. If neither exists, a share of each class is held out.
    """

    folder: str | None = option("folder in paths.data; null = paths.data itself", default=None)
    labels: str | None = option(
        "a .csv file in it with a picture and its class per row; null = labels.csv or a similar name, if it exists",
        default=None,
    )
    instead = ""
    chosen_as = {
        "folder": Choice(
            "your own pictures in paths.data: a folder per class, in train and test (or val), or without "
            "these; or a .csv file with their classes",
            comments=BY_OWN | SIZE,
        )
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        name_or_null("folder", self.folder)
        name_or_null("labels", self.labels)

    def wanted(self) -> str:
        """Return the phrase that error messages use for the expected files."""
        return "pictures in a folder for each class, or folders train and test that contain these"

    def sorted(self, root: str) -> PicturesByPart:
        own = Path(root, self.folder or "")
        table = table_in(own) if self.labels is None else own / self.labels
        if self.labels is not None and not (own / self.labels).is_file():
            raise ValueRefused("dataset.labels", f"the name of a .csv file in {own}", self.labels, None)
        if table is not None:
            return PicturesByPart.of(*sorted_files(table), table.read_bytes())
        try:
            place, folders = parts(own)
        except OSError as error:
            why = error.strerror and f"{error.strerror}: {error.filename}"
            raise ConfigError(
                f"paths.data must hold {self.wanted()}, got {root} without them ({why or error}); type "
                f"paths.data=FOLDER{self.instead and f', or {self.instead}'}"
            ) from None
        train = folders["train"]
        for other in folders.values():
            if (names := classes_of(other)) != classes_of(train):
                strange = sorted({*names} ^ {*classes_of(train)})[0]
                raise ConfigError(
                    f"{place} must have the same classes in {train.name} and {other.name}, got {strange} in one only; "
                    f"sort the images of {other.name} into folders of classes"
                )
        found = {part: files_of(place, folder) for part, folder in folders.items()}
        return PicturesByPart.of(place, found, classes_of(train))


@with_options
class ImageNet(ImageFolder):
    """1,281,167 training and 50,000 evaluation images of 1,000 classes (Russakovsky et al. 2015, arXiv 1409.0575).

    The files are never downloaded. For another folder of this form set `classes` and `train_size`, or use
    `dataset=folder`, which counts them.
    """

    classes: int = option(default=1000, at_least=2)
    train_size: int = option(default=1_281_167, at_least=1)
    image_size: int = option(default=224, at_least=1)
    folder: str = option(default="imagenet")
    workers: int = option(WORKERS, default=4, at_least=0)

    counted = ()
    instead = "dataset=cifar10"
    chosen_as = {
        "imagenet": Choice(
            "paths.data/imagenet/{train,val}/CLASS/*.JPEG; another folder of pictures: dataset=folder",
            leaves_out=("test_share", "fingerprint", "labels"),
        )
    }

    def wanted(self) -> str:
        return f"the images {self.folder}/{{train,val}}/CLASS/*.JPEG"


def parts(place: Path) -> tuple[Path, dict[str, Path]]:
    """Find the folders of the parts, each of which contains one folder per class, by their usual names.

    Returns:
        their parent, and the folders of train, test and validation; only `place` as train if there are no parts.

    Raises:
        OSError: the folder does not exist, or contains no part.
    """
    folders = _folders(place)
    if len(folders) == 1 and part_of(folders[0].name) is None and (inner := _folders(folders[0])):
        place, folders = folders[0], inner  # an unpacked archive often has one top-level folder
    named: dict[str, Path] = {}
    for folder in folders:
        part = part_of(folder.name)
        if part and part in named:
            raise OSError(f"{named[part].name} and {folder.name} both exist")
        if part and (part == "train" or _folders(folder)):  # contests publish test pictures without classes
            named[part] = folder
    others = [folder for folder in folders if part_of(folder.name) is None]
    if "train" in named and others and not _folders(named["train"]):
        return place, {"train": place}  # `train` is one of several classes: bus, car, train
    if "train" not in named:
        if any(part_of(folder.name) for folder in folders):
            raise OSError(f"there is no folder train in {place}")
        if not folders:
            raise OSError(f"there are no folders in {place}")
        return place, {"train": place}
    if not _folders(named["train"]):
        raise OSError(f"there are no folders of classes in {named['train']}")
    return place, named


def _folders(place: Path) -> list[Path]:
    """Return the subfolders sorted by name, without hidden ones."""
    with os.scandir(place) as entries:
        return sorted(Path(entry.path) for entry in entries if not pictures.is_hidden(entry.name) and entry.is_dir())


def classes_of(part: Path) -> list[str]:
    """Return the names of the classes; the index is the class number."""
    return [folder.name for folder in _folders(part)]


def files_of(place: Path, part: Path) -> Files:
    """Return all pictures of a part, in the order of torchvision's ImageFolder.

    Raises:
        ConfigError: a class has no pictures, or a folder cannot be read.
    """
    try:
        folders = _folders(part)
        return _scanned(place, part, tuple((own.name, own.stat().st_mtime_ns) for own in folders))
    except OSError as error:
        raise ConfigError(
            f"paths.data must hold folders that can be read, got {error.filename}: {error.strerror}; type "
            "paths.data=FOLDER"
        ) from None


@functools.lru_cache(maxsize=8)
def _scanned(place: Path, part: Path, versions: Sequence[tuple[str, int]]) -> Files:
    """Return the result of `files_of`, cached in this process while no folder changes."""
    names: list[bytes] = []
    labels: list[int] = []
    class_of: dict[tuple[int, int], str] = {}
    for label, (name, _) in enumerate(versions):
        found = _pictures(part / name, class_of)
        if not found:
            raise ConfigError(
                f"paths.data must hold pictures of each class, got {part / name} without one; type paths.data=FOLDER, "
                f"or remove that folder (names of pictures end in {', '.join(pictures.ENDINGS)})"
            )
        names += [os.fsencode(os.path.relpath(file, place)) for file in found]
        labels += [label] * len(found)
    return Files(place, np.array(names), np.array(labels))


def _pictures(folder: Path, class_of: dict[tuple[int, int], str]) -> list[str]:
    """Return the pictures of a class, including subfolders; a folder reached again through a link is read once.

    `class_of` maps (device, inode) of each folder read so far to its class; folders of this class are added.
    """
    found: list[tuple[str, list[str]]] = []
    todo = [str(folder)]
    while todo:
        here = todo.pop()
        own = os.stat(here)
        known = class_of.get((own.st_dev, own.st_ino))
        if known == folder.name:
            continue
        if known is not None:
            raise ConfigError(
                f"paths.data must hold each folder of pictures in one class, got {here} in {known} and {folder.name}; "
                "remove the link that leads there"
            )
        class_of[own.st_dev, own.st_ino] = folder.name
        with os.scandir(here) as entries:
            shown = [entry for entry in entries if not pictures.is_hidden(entry.name)]
        inner = {entry.path for entry in shown if entry.is_dir()}
        todo += inner
        files = [e.path for e in shown if e.path not in inner and e.name.lower().endswith(pictures.ENDINGS)]
        found.append((here, sorted(files)))
    return [file for _, files in sorted(found) for file in files]
