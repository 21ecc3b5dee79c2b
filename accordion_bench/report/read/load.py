"""Run folders as data: whatever a run has left behind can be read, finished or not.

Metrics rows are kept by column: a thousand runs of 300 epochs are 13 million values, and a dict for each row has no
room.
"""

import contextlib
import gc
import marshal
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import pandas as pd
import yaml

from accordion_bench.methods.labels import label
from accordion_bench.options import instantiate
from accordion_bench.options.override import config_in_todays_words
from accordion_bench.report.parallel import each
from accordion_bench.report.read import rows_file
from accordion_bench.report.read.find import METRICS_FILE, Paths, find_runs
from accordion_bench.report.read.schema import EnvironmentFile, problem, problem_of_rows, wrong_keys
from accordion_bench.run_config import is_label
from accordion_bench.runs import untrusted
from accordion_bench.runs.secrets import masked, masked_command
from accordion_bench.runs.untrusted import TEXT, needs_no_look, plain, printable

Values = Sequence[Any]


class MetricsRow(Mapping[str, Any]):
    """One row, read as a dict is."""

    __slots__ = ("_at", "_rows")

    def __init__(self, rows: "MetricsRows", at: int) -> None:
        self._rows, self._at = rows, at

    def __getitem__(self, name: str) -> Any:
        if name not in self._rows.names[self._at]:
            raise KeyError(name)
        return self._rows.columns[name][self._at]

    def get(self, name: str, default: Any = None) -> Any:
        return self._rows.columns[name][self._at] if name in self._rows.names[self._at] else default

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows.names[self._at])

    def __len__(self) -> int:
        return len(self._rows.names[self._at])


class MetricsRows(Sequence[MetricsRow]):
    """Rows that cannot be changed.

    Args:
        columns: by name, one value per row; None where a row has none.
        names: the columns that each row has, in its order.
    """

    def __init__(self, columns: Mapping[str, Values], names: Sequence[Mapping[str, None]]) -> None:
        self.columns, self.names = columns, names

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]]) -> "MetricsRows":
        """Rows as they were read, or such already."""
        if isinstance(rows, cls):
            return rows
        kinds: dict[tuple[str, ...], dict[str, None]] = {}
        names = [kinds.setdefault(tuple(row), dict.fromkeys(row)) for row in rows]
        every = dict.fromkeys(name for kind in kinds.values() for name in kind)
        return cls({name: small([row.get(name) for row in rows]) for name in every}, names)

    def replaced(self, **columns: Sequence[Any]) -> "MetricsRows":
        """The same rows with other values in columns that they have."""
        return MetricsRows({**self.columns, **{name: small(values) for name, values in columns.items()}}, self.names)

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, at: int) -> MetricsRow: ...
    @overload
    def __getitem__(self, at: slice) -> list[MetricsRow]: ...
    def __getitem__(self, at: int | slice) -> MetricsRow | list[MetricsRow]:
        found = range(len(self))[at]
        return [MetricsRow(self, i) for i in found] if isinstance(found, range) else MetricsRow(self, found)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(map(dict, self)) == list(map(dict, other))


class Packed(Sequence[Any]):
    """Lists and mappings as bytes, a tenth of what they take as objects; equal ones once."""

    def __init__(self, values: Sequence[Any]) -> None:
        different: dict[bytes, bytes] = {}
        self._values = [different.setdefault(packed, packed) for packed in map(marshal.dumps, values)]

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, at: Any) -> Any:
        return marshal.loads(self._values[at])


def small(values: Sequence[Any]) -> Values:
    """The same values in as little memory as their kind allows."""
    kinds = set(map(type, values))
    if kinds == {float}:
        return array("d", values)
    if kinds == {int} and max(map(abs, values)) < 2**63:
        return array("q", values)
    return Packed(values) if kinds & {dict, list} else list(values)


@dataclass(frozen=True)
class Run:
    """One run folder, or one file of metrics rows.

    Args:
        path: the folder, or the file.
        config, environment, summary: its files; empty where a file is missing or cannot be read. All texts in them and
            in the rows are printable lines, secrets are masked. Of a file of metrics rows they are made of its rows.
        rows: whole lines of metrics.jsonl, one per epoch.
        problem: why the run counts as unfinished; "" for a finished run.
        attached: a user's own training loop has written the rows.
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
        """Of the folder or file, printable."""
        return printable(self.path.name)

    @property
    def environments(self) -> list[dict[str, Any]]:
        """The environment at its start, and each in which it was resumed."""
        return [self.environment, *({**self.environment, **changes} for changes in self.environment.get("resumed", []))]

    @property
    def label(self) -> str:
        """What the user calls its arm, else its method."""
        return self.called or self.method

    @property
    def called(self) -> str:
        """What the user calls its arm by `label=`; "" where that is nothing, or no label."""
        given = self.config.get("label")
        return given if is_label(given) else ""

    @property
    def method(self) -> str:
        """`PowerSGD rank 2`; of a user's own loop `PowerSGD rank 2, attached`, or `its name (..., attached)`."""
        choices = self.config.get("choices")
        if not choices:
            return "?"
        try:
            method = label(self.config)
        except Exception:  # of an unfinished run, whose problem stands beside it
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
        """Last epoch with a metrics row, counted from 0; None = no epoch was finished."""
        epoch = self.rows[-1]["epoch"] if self.rows else None
        return epoch if isinstance(epoch, int) else None


def read_runs(paths: Paths) -> list[Run]:
    """Every run found under `paths`."""
    with _no_collection():
        folders = find_runs(paths)
        return each(read_run, folders, "reading")


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


def trust_classes(paths: Paths) -> None:
    """Trust the classes that the runs under `paths` name: their labels and level maps import them from now on."""
    for path in find_runs(paths):
        config = _mapping(path / "config.yaml", [])
        if os.path.isfile(path) and (rows := _rows(path, [])):
            config = rows_file.made_of(rows).config
        instantiate.trust(config_in_todays_words(config))


def read_run(path: Path) -> Run:
    """One run, from anywhere; never raises for what is missing, torn or strange."""
    return _read_file(path) if os.path.isfile(path) else _read_folder(path)


def _read_folder(path: Path) -> Run:
    refused: list[str] = []
    config, environment, summary = (
        _mapping(path / name, refused) for name in ("config.yaml", "environment.json", "summary.json")
    )
    config = masked(config_in_todays_words(config))
    rows = _rows(path / METRICS_FILE, refused)
    why = refused[0] if refused else problem(config, summary, rows, os.path.exists(path / "done"))
    return Run(path, config, _shown(environment), summary, MetricsRows.of(rows), printable(why, longest=500))


def _read_file(path: Path) -> Run:
    """A file of metrics rows."""
    refused: list[str] = []
    found = _rows(path, refused)
    if refused or not found or not isinstance(found[0].get("run"), dict):
        why = refused[0] if refused else "its first line is no row of metrics"
        return Run(path, problem=printable(why, longest=500), attached=True)
    config, environment, summary, rows = rows_file.made_of(found)
    config, summary = masked(config_in_todays_words(config)), masked(summary)
    why = rows_file.cut_short(path, found) or problem_of_rows(config, summary, rows, path.name)
    return Run(
        path, config, _shown(environment), summary, MetricsRows.of(rows), printable(why, longest=500), attached=True
    )


def _shown(environment: dict[str, Any]) -> dict[str, Any]:
    """What is known of the kinds that it must have, secrets masked, and the same of each resumption."""
    known = _known(environment)
    if "resumed" in known:
        known["resumed"] = [_known(changes) for changes in known["resumed"] if isinstance(changes, dict)]
    return known


def _known(environment: dict[str, Any]) -> dict[str, Any]:
    wrong = wrong_keys(EnvironmentFile, environment, present=True)
    known = {key: value for key, value in environment.items() if key not in wrong}
    known = masked(known)
    if command := known.get("command"):
        known["command"] = masked_command(command)
    return known


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
    """The rows of a file up to the first that is torn or damaged; a refusal is added to a list."""
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


def load_runs(paths: Paths) -> pd.DataFrame:
    """One row per run: where it stands, its label and seed, the summary, and the configuration by dotted keys.

    Args:
        paths: run folders, files of metrics rows, or folders that contain some.

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


def load_metrics(paths: Paths) -> pd.DataFrame:
    """One row per run and epoch: `run`, `label`, `seed`, `finished`, and every column of metrics.jsonl.

    Args:
        paths: run folders, files of metrics rows, or folders that contain some.

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
