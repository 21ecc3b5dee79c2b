"""Read a .csv table that lists picture files and their classes."""

import csv
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from accordion_bench.datasets import pictures
from accordion_bench.datasets.counted import part_of
from accordion_bench.datasets.fetch import refusal, why
from accordion_bench.datasets.pictures import Files
from accordion_bench.options.checks import ConfigError

USUAL = ("labels.csv", "train.csv", "metadata.csv")
FILE = ("file_name", "filename", "file", "image", "image_id", "img", "path", "id", "name")
LABEL = ("label", "labels", "class", "category", "target", "y")
PART = ("split", "part", "set", "subset")
Row = tuple[str, str, str]  # part, file, class


def table_in(place: Path) -> Path | None:
    """Return the table in a folder, found by its usual name and columns; None if there is none."""
    for table in (place / name for name in USUAL):
        try:
            with table.open(encoding="utf-8-sig", newline="") as stream:
                names = _names(csv.DictReader(stream))
        except (OSError, UnicodeDecodeError, csv.Error):
            continue
        if _column(names, FILE) and _column(names, LABEL):
            return table
    return None


def sorted_files(table: Path) -> tuple[Path, dict[str, Files]]:
    """Return the folder of a .csv table and the pictures that it lists, by part, with their classes.

    Parts are train, and test or validation if a column names them. The pictures are in the folder or its subfolders.
    Classes are numbered in the order of their names; integer names in numeric order.

    Raises:
        ConfigError: a column is missing, or a listed file does not exist.
    """
    rows = list(_rows(table))
    known = _pictures_below(table.parent)
    place = table.parent
    missing = [file for _, file, _ in rows if _found(known, file) is None]
    if missing:
        more = f" and {len(missing) - 1:,} more" if missing[1:] else ""
        raise ConfigError(
            f"paths.data must hold the pictures that {table} names, got {place} without {missing[0]}{more}; remove "
            "these rows, or add the files"
        )
    classes = sorted({name for _, _, name in rows}, key=lambda name: (not name.isdecimal(), len(name), name))
    if not all(name.isdecimal() for name in classes):
        classes.sort()
    number = {name: label for label, name in enumerate(classes)}
    found = {}
    for part in dict.fromkeys(part for part, _, _ in rows):
        own = [(_found(known, file), number[name]) for of, file, name in rows if of == part]
        found[part] = Files(
            place, np.array([os.fsencode(file or "") for file, _ in own]), np.array([y for _, y in own])
        )
    if "train" not in found:
        raise ConfigError(f"paths.data must hold rows of train in {table}, got {', '.join(found)}; rename these")
    return place, found


def _rows(table: Path) -> Iterator[Row]:
    try:
        with table.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.DictReader(stream)
            names = _names(reader)
            file, label, part = (_column(names, usual) for usual in (FILE, LABEL, PART))
            if file is None or label is None:
                raise ConfigError(
                    f"paths.data must hold a table with columns file and label, got {', '.join(names) or 'none'} in "
                    f"{table}; rename its first line"
                )
            rows = [(row.get(part or "") or "train", row[file] or "", row[label] or "") for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise refusal("a table that can be read", table, why(table, error)) from None
    for number, (said, name, of) in enumerate(rows, 2):
        known = part_of(said.strip())
        if not name.strip() or not of.strip() or known is None:
            rule = "a file, a class, and train, test or val in each row"
            got = "" if known else f" ({said})"
            raise ConfigError(
                f"paths.data must hold {rule}, got line {number} of {table} without{got}; correct that line"
            )
        yield known, name.strip(), of.strip()


def _names(reader: "csv.DictReader[str]") -> dict[str, str]:
    """Return column names, keyed by their stripped lower-case form."""
    return {name.strip().lower(): name for name in reader.fieldnames or () if name}


def _column(names: Mapping[str, str], usual: Sequence[str]) -> str | None:
    return next((names[name] for name in usual if name in names), None)


def _pictures_below(place: Path) -> dict[str, str]:
    """Map pictures in a folder and its subfolders by relative path and by name, each with and without extension."""
    found: dict[str, str] = {}
    for here, folders, files in os.walk(place):
        folders[:] = sorted(name for name in folders if not pictures.is_hidden(name))
        for name in sorted(files):
            if name.lower().endswith(pictures.ENDINGS) and not pictures.is_hidden(name):
                path = os.path.relpath(os.path.join(here, name), place)
                for key in (path, name, os.path.splitext(path)[0], os.path.splitext(name)[0]):
                    found.setdefault(key, path)
    return found


def _found(known: Mapping[str, str], file: str) -> str | None:
    return known.get(os.path.normpath(file))
