"""What was given, or is recorded as a cell of a sweep, and holds no run."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from accordion_bench.report.read import rows_file
from accordion_bench.report.read.load import FILES, find_runs, is_run
from accordion_bench.report.read.printable import plain, printable
from accordion_bench.runs import untrusted
from accordion_bench.runs.secrets import masked_command

RECORD = "sweep.jsonl"  # beside run folders: a line per cell of a sweep, the newest last


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
