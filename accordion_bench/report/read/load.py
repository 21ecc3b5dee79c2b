"""Run folders as data: whatever a run has left behind can be read, finished or not."""

import contextlib
import gc
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from accordion_bench.options import trusted
from accordion_bench.report.progress import told
from accordion_bench.report.read.completeness import problem
from accordion_bench.report.read.labels import label
from accordion_bench.report.read.printable import TEXT, needs_no_look, plain, printable
from accordion_bench.runs import untrusted
from accordion_bench.runs.old_folders import in_todays_words
from accordion_bench.runs.secrets import masked, masked_command

FILES = ("config.yaml", "metrics.jsonl", "summary.json", "environment.json")
DEEPEST = 50  # folders inside each other that are looked into
ENVIRONMENT = {
    "command": str,
    "commit": str,
    "started": str,
    "python": str,
    "processor": str,
    "cpu_cores": int,
    "threads": int,
    "kernels": str,
    "load": float,
    "host": str,
    "versions": dict,
    "gpus": list,
}


@dataclass(frozen=True)
class Run:
    """One run folder.

    Args:
        path: the folder.
        config, environment, summary: its files; empty where a file is missing or cannot be read. All texts in them and
            in the rows are printable lines, secrets are masked.
        rows: whole lines of metrics.jsonl, one per epoch.
        problem: why the run counts as unfinished; "" for a finished run.
    """

    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    problem: str = ""

    @property
    def name(self) -> str:
        """Of the folder, printable."""
        return printable(self.path.name)

    @property
    def label(self) -> str:
        try:
            return printable(label(self.config)) if self.config.get("choices") else "?"
        except Exception:  # of an unfinished run, whose problem stands beside it
            return "?"

    @property
    def finished(self) -> bool:
        return not self.problem

    @property
    def seed(self) -> int | None:
        seed = self.config.get("seed")
        return seed if isinstance(seed, int) else None

    @property
    def last_epoch(self) -> int | None:
        """Last epoch with a metrics row, counted from 0; None = no epoch was finished."""
        epoch = self.rows[-1]["epoch"] if self.rows else None
        return epoch if isinstance(epoch, int) else None


def find_runs(paths: Iterable[str | Path]) -> list[Path]:
    """The run folders among `paths` and at any depth inside them, each once, in the order given."""
    found: dict[Path, Path] = {}
    for path in map(Path, paths):
        for run in _inside(path):
            found.setdefault(Path(os.path.realpath(run)), run)
    return list(found.values())


def _inside(path: Path) -> list[Path]:
    """The run folders under `path`, itself included; nothing is looked for inside a run, nor in hidden folders.

    A link to a folder is followed where it was given, and nowhere below, so that a circle of links has an end.
    """
    found = []
    for name, folders, _ in os.walk(path):
        here = Path(name)
        if run := is_run(here):
            found.append(here)
        if run or len(here.parts) - len(path.parts) >= DEEPEST:
            folders.clear()
        folders[:] = sorted(folder for folder in folders if not folder.startswith("."))
    return found


def read_runs(paths: Iterable[str | Path]) -> list[Run]:
    """Every run found under `paths`."""
    with _no_collection():
        folders = find_runs(paths)
        return [read_run(path) for path in told(folders, len(folders), "reading")]


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Reading makes millions of objects and no garbage: the collector would look through them again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def trust_classes(paths: Iterable[str | Path]) -> None:
    """Trust the classes that the runs under `paths` name: their labels and level maps import them from now on."""
    for folder in find_runs(paths):
        trusted.trust(in_todays_words(_mapping(folder / "config.yaml", [])))


def read_run(path: Path) -> Run:
    """One run folder, of anybody; never raises for what is missing, torn or strange."""
    refused: list[str] = []
    config, environment, summary = (
        _mapping(path / name, refused) for name in ("config.yaml", "environment.json", "summary.json")
    )
    config = masked(in_todays_words(config))
    environment = {key: value for key, value in environment.items() if isinstance(value, ENVIRONMENT.get(key, object))}
    environment = masked(environment)
    if command := environment.get("command"):
        environment["command"] = masked_command(command)
    rows = _rows(path / "metrics.jsonl", refused)
    why = refused[0] if refused else problem(config, summary, rows, os.path.exists(path / "done"))
    return Run(path, config, environment, summary, rows, printable(why, longest=500))


def _mapping(file: Path, refused: list[str]) -> dict[str, Any]:
    """A JSON or YAML file that holds a mapping; {} where it is missing, torn, or refused, which is added to a list."""
    try:
        content = untrusted.read_json(file) if file.suffix == ".json" else untrusted.read_yaml(file)
    except untrusted.Refused as error:
        refused.append(str(error))
        return {}
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return plain(content) if isinstance(content, dict) else {}


def _rows(file: Path, refused: list[str]) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl up to the first that is torn or damaged; a refusal is added to a list."""
    rows = []
    try:
        for line, row in untrusted.read_lines(file):
            if not isinstance(row, dict) or not isinstance(row.get("epoch"), int):
                break
            rows.append(row if needs_no_look(line) else plain(row))
    except untrusted.Refused as error:
        refused.append(str(error))
    except OSError:
        pass
    return rows


def load_runs(paths: Iterable[str | Path]) -> pd.DataFrame:
    """One row per run: where it stands, its label and seed, the summary, and the configuration by dotted keys.

    Args:
        paths: run folders, or folders that contain some.

    Returns:
        columns `run`, `label`, `seed`, `finished`, `problem`, `last_epoch`, the chosen name of each group (`model`,
        `compressor`, ...), `commit`, every key of summary.json, and every other option, such as `optimizer.lr`.
    """
    rows = []
    for run in read_runs(paths):
        head = {"run": printable(str(run.path), TEXT), "label": run.label, "seed": run.seed, "finished": run.finished}
        head |= {"problem": run.problem, "last_epoch": run.last_epoch, "commit": run.environment.get("commit", "")}
        chosen = run.config.get("choices")
        choices = chosen if isinstance(chosen, dict) else {}
        rows.append({**flat(run.config), **choices, **run.summary, **head})
    return pd.DataFrame(rows)


def load_metrics(paths: Iterable[str | Path]) -> pd.DataFrame:
    """One row per run and epoch: `run`, `label`, `seed`, `finished`, and every column of metrics.jsonl.

    Args:
        paths: run folders, or folders that contain some.

    Returns:
        cumulative bytes and seconds as in the run folder; the plan as `plan.batch_size`, `plan.lr_factor` and
        `plan.levels` (a dict from layer to rank, density or bits); `decisions` as a dict.
    """
    rows = []
    for run in read_runs(paths):
        head = {"run": printable(str(run.path), TEXT), "label": run.label, "seed": run.seed, "finished": run.finished}
        for row in run.rows:
            whole = row.get("plan")
            plan = {f"plan.{key}": value for key, value in whole.items()} if isinstance(whole, dict) else {}
            rows.append({**head, **{key: value for key, value in row.items() if key != "plan"}, **plan})
    return pd.DataFrame(rows)


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of a nested dict by dotted key, without `choices`; an empty dict is no leaf."""
    leaves: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            leaves |= flat(value, f"{prefix}{key}.") if prefix or key != "choices" else {}
        else:
            leaves[prefix + key] = value
    return leaves


def is_run(path: Path) -> bool:
    """Whether a folder is a run's, finished or not: it has one of the files."""
    return any(os.path.isfile(path / name) for name in FILES)
