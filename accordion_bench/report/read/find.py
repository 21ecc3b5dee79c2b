"""Where runs lie: run folders and files of metrics rows under some paths, and what was given and holds none."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from accordion_bench.report.read import rows_file
from accordion_bench.runs import untrusted
from accordion_bench.runs.secrets import masked_command
from accordion_bench.runs.untrusted import plain, printable

METRICS_FILE = "metrics.jsonl"
FILES = ("config.yaml", METRICS_FILE, "summary.json", "environment.json")
Paths = str | Path | Iterable[str | Path]  # one path, or several
DEEPEST = 50  # folders inside each other that are looked into
RECORD = "sweep.jsonl"  # beside run folders: a line per cell of a sweep, the newest last


def find_runs(paths: Paths) -> list[Path]:
    """The run folders and files of metrics rows among `paths` and at any depth inside, each once, in this order."""
    found: dict[Path, Path] = {}
    for path in map(Path, [paths] if isinstance(paths, str | Path) else paths):
        for run in _inside(path):
            found.setdefault(Path(os.path.realpath(run)), run)
    return list(found.values())


def _inside(path: Path) -> list[Path]:
    """The runs under `path`, itself included; nothing is looked for inside a run folder, nor in hidden folders.

    A link to a folder is followed where it was given, and nowhere below, so that a circle of links has an end. Files of
    metrics rows have any name where they are given, and end in .jsonl where they are found.
    """
    if os.path.isfile(path):
        return [path] if rows_file.is_rows_file(path) else []
    found = []
    for name, folders, files in os.walk(path):
        here = Path(name)
        if run := is_run(here):
            found.append(here)
        else:
            named = (here / file for file in sorted(files) if file.endswith(rows_file.ENDING) and file[0] != ".")
            found += filter(rows_file.is_rows_file, named)
        if run or len(here.parts) - len(path.parts) >= DEEPEST:
            folders.clear()
        folders[:] = sorted(folder for folder in folders if not folder.startswith("."))
    return found


def is_run(path: Path) -> bool:
    """Whether a folder is a run's, finished or not: it has one of the files.

    A file of metrics rows may have the name of one of them.
    """
    found = [path / name for name in FILES if os.path.isfile(path / name)]
    return bool(found) and (found != [path / METRICS_FILE] or not rows_file.is_rows_file(path / METRICS_FILE))


def no_runs(paths: Iterable[str | Path]) -> list[tuple[str, str]]:
    """What among `paths`, and which folders and recorded cells directly inside them, hold no run; and why not.

    Args:
        paths: run folders, files of metrics rows, folders that contain some, or records of sweeps.

    Returns:
        (name of the folder or options of the cell, reason), both printable.
    """
    found: list[tuple[str, str]] = []
    for path in map(Path, paths):
        if path.name == RECORD:
            found += _cells_without_a_run(path)
        elif os.path.isfile(path):
            found += [(path.name, why)] if (why := rows_file.why_not(path)) else []
        elif not os.path.isdir(path):
            found.append((path.name, "no folder" if os.path.lexists(path) else "does not exist"))
        elif not is_run(path):
            inside = [p for p in sorted(_visible(path)) if os.path.isdir(p)]
            empty = [p for p in inside if not find_runs([p])]
            found += [(p.name, f"no run: has none of {', '.join(FILES)}") for p in empty]
            found += [] if find_runs([path]) else [(path.name, "holds no run")]
            found += _cells_without_a_run(path / RECORD)
    return [(printable(name), printable(why, longest=500)) for name, why in found]


def _visible(folder: Path) -> list[Path]:
    """What is in a folder and not hidden; nothing where it must not be read."""
    try:
        return [path for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError:
        return []


def _cells_without_a_run(record: Path) -> list[tuple[str, str]]:
    """Cells that have left no folder, or whose folder is gone, by the newest line of each."""
    cells, damaged = {}, list[str]()
    for line in _lines(record, damaged):
        if isinstance(line.get("overrides"), list):
            typed = [word for word in map(str, line["overrides"]) if not word.startswith("paths.")]
            cells[masked_command(" ".join(typed))] = line
    found = [(record.name, why) for why in damaged]
    for cell, line in cells.items():
        said, folder, error = f"{line.get('status', 'unknown')} in {record.name}", line.get("folder"), line.get("error")
        if not isinstance(folder, str):
            found.append((cell, f"{said}: {error}" if error and isinstance(error, str) else said))
        elif not os.path.isdir(record.parent / Path(folder).name):
            found.append((Path(folder).name, f"{said}, but not here any more"))
    return found


def _lines(file: Path, damaged: list[str]) -> list[dict[str, Any]]:
    """The whole lines of a JSONL file that hold a mapping; [] where it cannot be read.

    Args:
        file: to read.
        damaged: gets a sentence for each line that is not as it was written.
    """
    try:
        texts = untrusted.split_lines(file)
    except (OSError, untrusted.Refused):
        return []
    lines = []
    for number, text in enumerate(texts, 1):
        try:
            lines.append(plain(untrusted.parse_json(text, f"line {number}")))
        except untrusted.NotAsWritten as error:
            damaged.append(str(error))
        except ValueError:  # torn
            pass
    return [line for line in lines if isinstance(line, dict)]
