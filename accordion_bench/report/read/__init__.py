"""Discovery and loading of runs, finished or not, as objects and as pandas tables."""

import gc
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from accordion_bench.methods.labels import label
from accordion_bench.options import instantiate
from accordion_bench.options.override import translate_renamed_config
from accordion_bench.report.parallel import each
from accordion_bench.report.read.metrics_rows import (
    ENDING,
    MetricsRows,
    derive_run_files,
    foreign_rows_problem,
    is_rows_file,
    why_not,
)
from accordion_bench.report.read.schema import EnvironmentFile, problem, problem_of_rows, wrong_keys
from accordion_bench.run_config import is_label
from accordion_bench.runs import untrusted
from accordion_bench.runs.untrusted import TEXT, is_printable_json, masked, masked_command, plain, printable

METRICS_FILE = "metrics.jsonl"
FILES = ("config.yaml", METRICS_FILE, "summary.json", "environment.json")
Paths = str | Path | Iterable[str | Path]  # one path or several
DEEPEST = 50  # levels of nested folders that are searched
RECORD = "sweep.jsonl"  # next to run folders: one line per cell of a sweep, the newest last


def find_runs(paths: Paths) -> list[Path]:
    """Find the run folders and files of metrics rows among `paths` and at any depth below, each once, in this order."""
    found: dict[Path, Path] = {}
    for path in map(Path, [paths] if isinstance(paths, str | Path) else paths):
        for run in _inside(path):
            found.setdefault(Path(os.path.realpath(run)), run)
    return list(found.values())


def _inside(path: Path) -> list[Path]:
    """Return the runs under `path`, including itself; run folders and hidden folders are not searched.

    A link to a folder is followed only if it was given as `path`, so that circular links end. A given file of metrics
    rows may have any name; a found one must end in .jsonl.
    """
    if os.path.isfile(path):
        return [path] if is_rows_file(path) else []
    found = []
    for name, folders, files in os.walk(path):
        here = Path(name)
        if run := is_run(here):
            found.append(here)
        else:
            named = (here / file for file in sorted(files) if file.endswith(ENDING) and file[0] != ".")
            found += filter(is_rows_file, named)
        if run or len(here.parts) - len(path.parts) >= DEEPEST:
            folders.clear()
        folders[:] = sorted(folder for folder in folders if not folder.startswith("."))
    return found


def is_run(path: Path) -> bool:
    """Whether a folder is a run folder, finished or not: it contains one of FILES.

    A file of metrics rows that is named metrics.jsonl does not make its folder a run folder.
    """
    found = [path / name for name in FILES if os.path.isfile(path / name)]
    return bool(found) and (found != [path / METRICS_FILE] or not is_rows_file(path / METRICS_FILE))


def no_runs(paths: Iterable[str | Path]) -> list[tuple[str, str]]:
    """List the paths, and the folders and recorded sweep cells directly inside, that contain no run.

    Returns:
        (name of the folder or options of the cell, reason), both printable.
    """
    found: list[tuple[str, str]] = []
    for path in map(Path, paths):
        if path.name == RECORD:
            found += _cells_without_a_run(path)
        elif os.path.isfile(path):
            found += [(path.name, why)] if (why := why_not(path)) else []
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
    """Return the entries of a folder that are not hidden; none if it cannot be read."""
    try:
        return [path for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError:
        return []


def _cells_without_a_run(record: Path) -> list[tuple[str, str]]:
    """Return the cells of a sweep without a folder, or whose folder was removed, by the newest line of each cell."""
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
            found.append((Path(folder).name, f"{said}, but no longer here"))
    return found


def _lines(file: Path, damaged: list[str]) -> list[dict[str, Any]]:
    """Return the complete lines of a JSONL file that contain a mapping; [] if it cannot be read.

    A sentence for each line whose checksum does not match is appended to `damaged`.
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
        except ValueError:  # incomplete line
            pass
    return [line for line in lines if isinstance(line, dict)]


# ---- runs


@dataclass(frozen=True)
class Run:
    """One run folder, or one file of metrics rows.

    Args:
        path: path of the folder or file.
        config, environment, summary: content of its files; empty if a file is missing or unreadable. All texts in them
            and in the rows are printable lines, and secrets are masked. For a file of metrics rows they are derived
            from its rows.
        rows: complete lines of metrics.jsonl, one per epoch.
        problem: why the run counts as unfinished; "" for a finished run.
        attached: whether the rows were written by a user's own training loop.
    """

    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    rows: Sequence[Mapping[str, Any]] = ()
    problem: str = ""
    attached: bool = False

    @property
    def name(self) -> str:
        """Printable name of the folder or file."""
        return printable(self.path.name)

    @property
    def environments(self) -> list[dict[str, Any]]:
        """Environment at the start, followed by one for each resumption."""
        return [self.environment, *({**self.environment, **changes} for changes in self.environment.get("resumed", []))]

    @property
    def label(self) -> str:
        """The user's label of its arm, else its method."""
        return self.called or self.method

    @property
    def called(self) -> str:
        """The user's label of its arm, given as `label=`; "" if it is missing or invalid."""
        given = self.config.get("label")
        return given if is_label(given) else ""

    @property
    def method(self) -> str:
        """Name of its method: `PowerSGD rank 2`; of a user's own loop `PowerSGD rank 2, attached` or `NAME (...)`."""
        choices = self.config.get("choices")
        if not choices:
            return "?"
        try:
            method = label(self.config)
        except Exception:  # only for an unfinished run, whose problem is reported
            return "?"
        if not self.attached:
            return printable(method)
        return printable(f"{choices['arm']} ({method}, attached)" if choices.get("arm") else f"{method}, attached")

    @property
    def finished(self) -> bool:
        return not self.problem

    @property
    def seed(self) -> int | None:
        seed = self.config.get("seed")
        return seed if isinstance(seed, int) else None

    @property
    def last_epoch(self) -> int | None:
        """Last epoch with a metrics row, counted from 0; None = no epoch was completed."""
        epoch = self.rows[-1]["epoch"] if self.rows else None
        return epoch if isinstance(epoch, int) else None


def read_runs(paths: Paths) -> list[Run]:
    """Read every run found under `paths`."""
    enabled = gc.isenabled()
    gc.disable()  # reading creates millions of objects and no garbage, so collections would be slow and useless
    try:
        return each(read_run, find_runs(paths), "reading")
    finally:
        if enabled:
            gc.enable()


def trust_classes(paths: Paths) -> None:
    """Trust the classes named in the runs under `paths`, so that labels and level maps import them from now on."""
    for path in find_runs(paths):
        config = _mapping(path / "config.yaml", [])
        if os.path.isfile(path) and (rows := _rows(path, [])):
            config = derive_run_files(rows).config
        instantiate.trust(translate_renamed_config(config))


def read_run(path: Path) -> Run:
    """Read one untrusted run; missing, incomplete or invalid content never raises but becomes its `problem`."""
    return _read_file(path) if os.path.isfile(path) else _read_folder(path)


def _read_folder(path: Path) -> Run:
    refused: list[str] = []
    config, environment, summary = (
        _mapping(path / name, refused) for name in ("config.yaml", "environment.json", "summary.json")
    )
    config = masked(translate_renamed_config(config))
    rows = _rows(path / METRICS_FILE, refused)
    why = refused[0] if refused else problem(config, summary, rows, os.path.exists(path / "done"))
    return Run(path, config, _shown(environment), summary, MetricsRows.of(rows), printable(why, longest=500))


def _read_file(path: Path) -> Run:
    refused: list[str] = []
    found = _rows(path, refused)
    if refused or not found or not isinstance(found[0].get("run"), dict):
        why = refused[0] if refused else "its first line is not a row of metrics"
        return Run(path, problem=printable(why, longest=500), attached=True)
    config, environment, summary, rows = derive_run_files(found)
    config, summary = masked(translate_renamed_config(config)), masked(summary)
    why = foreign_rows_problem(path, found) or problem_of_rows(config, summary, rows, path.name)
    return Run(
        path, config, _shown(environment), summary, MetricsRows.of(rows), printable(why, longest=500), attached=True
    )


def _shown(environment: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a valid type, also for each resumption, with secrets masked."""
    wrong = wrong_keys(EnvironmentFile, environment, present=True)
    known = masked({key: value for key, value in environment.items() if key not in wrong})
    if command := known.get("command"):
        known["command"] = masked_command(command)
    if "resumed" in known:
        known["resumed"] = [_shown(changes) for changes in known["resumed"] if isinstance(changes, dict)]
    return known


def _mapping(file: Path, refused: list[str]) -> dict[str, Any]:
    """Read a JSON or YAML file with a mapping; {} if it is missing or invalid; a refusal is appended to `refused`."""
    try:
        content = untrusted.read_json(file) if file.suffix == ".json" else untrusted.read_yaml(file)
    except untrusted.Refused as error:
        refused.append(str(error))
        return {}
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return plain(content) if isinstance(content, dict) else {}


def _rows(file: Path, refused: list[str]) -> list[dict[str, Any]]:
    """Read the rows of a file up to the first incomplete or damaged one; a refusal is appended to `refused`."""
    rows = []
    try:
        for line, row in untrusted.read_lines(file):
            if not isinstance(row, dict) or not isinstance(row.get("epoch"), int):
                break
            rows.append(row if is_printable_json(line) else plain(row))
    except untrusted.Refused as error:
        refused.append(str(error))
    except OSError:
        pass
    return rows


def load_runs(paths: Paths) -> pd.DataFrame:
    """Load one row per run: its state, label and seed, the summary, and the configuration by dotted keys.

    Returns:
        columns `run`, `label`, `seed`, `finished`, `problem`, `last_epoch`, the chosen name of each group (`model`,
        `compressor`, ...), `commit`, every key of summary.json, and every other option, such as `optimizer.lr`.
    """
    rows = []
    for run in read_runs(paths):
        ended = {"problem": run.problem, "last_epoch": run.last_epoch, "commit": run.environment.get("commit", "")}
        choices = run.config.get("choices")
        named = choices if isinstance(choices, dict) else {}
        rows.append({**flat(run.config), **named, **run.summary, **_head(run), **ended})
    return pd.DataFrame(rows)


def _head(run: Run) -> dict[str, Any]:
    return {"run": printable(str(run.path), TEXT), "label": run.label, "seed": run.seed, "finished": run.finished}


def load_metrics(paths: Paths) -> pd.DataFrame:
    """Load one row per run and epoch: `run`, `label`, `seed`, `finished`, and every column of metrics.jsonl.

    Returns:
        cumulative bytes and seconds as in the run folder; the plan as `plan.batch_size`, `plan.lr_factor` and
        `plan.levels` (a dict from layer to rank, density or bits); `decisions` as a dict.
    """
    rows = []
    for run in read_runs(paths):
        head = _head(run)
        for row in run.rows:
            whole = row.get("plan")
            plan = {f"plan.{key}": value for key, value in whole.items()} if isinstance(whole, dict) else {}
            rows.append({**head, **{key: value for key, value in row.items() if key != "plan"}, **plan})
    return pd.DataFrame(rows)


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of a nested dict by dotted key, without `choices`; an empty dict is not a leaf."""
    leaves: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            leaves |= flat(value, f"{prefix}{key}.") if prefix or key != "choices" else {}
        else:
            leaves[prefix + key] = value
    return leaves
