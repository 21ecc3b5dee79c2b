"""Run folders as data: whatever a run has left behind can be read, finished or not."""

import contextlib
import gc
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from accordion_bench.report.progress import told
from accordion_bench.report.read.completeness import problem
from accordion_bench.report.read.labels import label
from accordion_bench.runs.folder import RunFolder
from accordion_bench.runs.old_folders import in_todays_words

FILES = ("config.yaml", "metrics.jsonl", "summary.json", "environment.json")
YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where PyYAML was built with libyaml
ENVIRONMENT = {
    "command": str,
    "commit": str,
    "started": str,
    "python": str,
    "processor": str,
    "cpu_cores": int,
    "threads": int,
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
        config, environment, summary: its files; empty where a file is missing or cannot be read.
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
    def label(self) -> str:
        try:
            return label(self.config) if self.config.get("choices") else "?"
        except Exception:  # of an unfinished run, whose problem stands beside it
            return "?"

    @property
    def finished(self) -> bool:
        return not self.problem

    @property
    def seed(self) -> int | None:
        return self.config.get("seed")

    @property
    def last_epoch(self) -> int | None:
        """Last epoch with a metrics row, counted from 0; None = no epoch was finished."""
        epoch = self.rows[-1]["epoch"] if self.rows else None
        return epoch if isinstance(epoch, int) else None


def find_runs(paths: Iterable[str | Path]) -> list[Path]:
    """The run folders among `paths` and at any depth inside them, each once, in the order given."""
    found: dict[Path, Path] = {}
    for path in map(Path, paths):
        found.update((p.resolve(), p) for p in _inside(path) if p.resolve() not in found)
    return list(found.values())


def _inside(path: Path) -> list[Path]:
    """The run folders under `path`, itself included; nothing is looked for inside a run, nor in hidden folders."""
    found = []
    for name, folders, _ in os.walk(path):
        here = Path(name)
        if is_run(here):
            found.append(here)
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


def read_run(path: Path) -> Run:
    """One run folder; never raises for what is missing or torn."""
    config, environment, summary = (
        _mapping(path / name) for name in ("config.yaml", "environment.json", "summary.json")
    )
    config = in_todays_words(config)
    try:
        rows = [row for row in RunFolder(path).read_metrics() if isinstance(row, dict) and "epoch" in row]
    except (OSError, UnicodeDecodeError):
        rows = []
    environment = {key: value for key, value in environment.items() if isinstance(value, ENVIRONMENT.get(key, object))}
    return Run(path, config, environment, summary, rows, problem(config, summary, rows, (path / "done").exists()))


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
        head = {"run": str(run.path), "label": run.label, "seed": run.seed, "finished": run.finished}
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
        head = {"run": str(run.path), "label": run.label, "seed": run.seed, "finished": run.finished}
        for row in run.rows:
            plan = {f"plan.{key}": value for key, value in (row.get("plan") or {}).items()}
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
    return path.is_dir() and any((path / name).is_file() for name in FILES)


def _mapping(file: Path) -> dict[str, Any]:
    """A JSON or YAML file that holds a mapping; {} where it is missing or torn."""
    try:
        text = file.read_text()
        content = json.loads(text) if file.suffix == ".json" else yaml.load(text, YAML_LOADER)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}
