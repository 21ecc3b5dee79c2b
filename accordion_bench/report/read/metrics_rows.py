"""Rows of metrics: compact storage in memory, and files that a user's own loop has written with `comm.metrics()`.

In memory the rows are stored by column: a thousand runs of 300 epochs have 13 million values, too many for a dict per
row. A user's own loop has no run folder. The content of config.yaml, environment.json and summary.json is derived from
its rows, one line per epoch; nothing else is known about the loop.
"""

import marshal
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

from accordion_bench.options.conf_dir import read_options, yaml_files
from accordion_bench.report.read.schema import is_batch_size
from accordion_bench.runs import untrusted
from accordion_bench.runs.metrics import LOSSES, METRICS, OF_AN_EPOCH, is_number, metric

Values = Sequence[Any]


class MetricsRow(Mapping[str, Any]):
    """One row, a read-only mapping."""

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
    """Immutable sequence of rows, stored by column.

    Args:
        columns: values by column name, one per row; None if a row lacks the column.
        names: names of the columns of each row, in order.
    """

    def __init__(self, columns: Mapping[str, Values], names: Sequence[Mapping[str, None]]) -> None:
        self.columns, self.names = columns, names

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]]) -> "MetricsRows":
        """Convert rows; an instance of this class is returned unchanged."""
        if isinstance(rows, cls):
            return rows
        kinds: dict[tuple[str, ...], dict[str, None]] = {}
        names = [kinds.setdefault(tuple(row), dict.fromkeys(row)) for row in rows]
        every = dict.fromkeys(name for kind in kinds.values() for name in kind)
        return cls({name: small([row.get(name) for row in rows]) for name in every}, names)

    def replaced(self, **columns: Sequence[Any]) -> "MetricsRows":
        """Return the same rows with new values in existing columns."""
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
    """Sequence of lists and mappings as bytes, a tenth of the size of the objects; equal values are stored once."""

    def __init__(self, values: Sequence[Any]) -> None:
        different: dict[bytes, bytes] = {}
        self._values = [different.setdefault(packed, packed) for packed in map(marshal.dumps, values)]

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, at: Any) -> Any:
        return marshal.loads(self._values[at])


def small(values: Sequence[Any]) -> Values:
    """Return the values in the most compact container for their type."""
    kinds = set(map(type, values))
    if kinds == {float}:
        return array("d", values)
    if kinds == {int} and max(map(abs, values)) < 2**63:
        return array("q", values)
    return Packed(values) if kinds & {dict, list} else list(values)


# ---- files of rows


ENDING = ".jsonl"
UNKNOWN_MODEL, UNKNOWN_DATA, UNKNOWN_METHOD = "unknown model", "unknown data", "unknown method"
LINK = "1gbit"  # of conf/network: default link of the modelled columns if `run` does not name one
JUDGED_BY = (*METRICS, *LOSSES)  # the first of these columns in the rows is the metric
# keys that are equal in all rows of one loop
SAME = ("name", "compressor", "adaptive", "sync", "options", "workers", "seed", "model", "parameters", "dataset")


class RowsAsFiles(NamedTuple):
    """Content that the files of a run folder would have."""

    config: dict[str, Any]
    environment: dict[str, Any]
    summary: dict[str, Any]
    rows: list[dict[str, Any]]


def is_rows_file(path: Path) -> bool:
    """Whether a file contains metrics rows, judged by its first line."""
    return not why_not(path)


def why_not(path: Path) -> str:
    """Return why a file does not contain metrics rows; "" if it does."""
    try:
        first = untrusted.parse_json(untrusted.read_first_line(path), path.name)
    except (OSError, ValueError):  # including untrusted.Refused
        return "neither a folder nor a file of metrics rows: its first line cannot be read as JSON"
    epoch = first.get("epoch") if isinstance(first, dict) else None
    if type(epoch) is not int or epoch < 0 or not isinstance(first.get("run"), dict):
        return "neither a folder nor a file of metrics rows: its first line lacks an epoch or the run of comm.metrics()"
    return ""


def derive_run_files(rows: Sequence[dict[str, Any]]) -> RowsAsFiles:
    """Derive the content of a run folder from at least one row; the first one has its `run`, each one an epoch.

    A loop that was stopped and restarted repeats epochs; the later rows of an epoch replace the earlier ones.
    """
    kept: list[dict[str, Any]] = []
    for row in rows:
        while kept and kept[-1]["epoch"] >= row["epoch"]:
            kept.pop()
        kept.append({key: value for key, value in row.items() if key != "run"})
    first, run = rows[0], rows[0]["run"]
    device = run.get("device")
    gpus = [device] if isinstance(device, str) and device != "cpu" else []
    return RowsAsFiles(_config(first, kept), {"gpus": gpus, **run}, summary_of(run, kept), kept)


def foreign_rows_problem(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    """Return why the rows of a file are not those of one loop; "" if they are. An incomplete last line is ignored.

    `rows` are the rows as read, up to the first damaged line.
    """
    first = rows[0]
    for number, row in enumerate(rows, 1):
        other = row.get("run", first["run"]) != first["run"]
        if other and any(_told(row, key) != _told(first, key) for key in SAME):
            return f"line {number} of {path.name} belongs to another run than line 1: write each run to a separate file"
    try:
        lines = untrusted.read_bytes(path, untrusted.LARGE).decode("utf-8", errors="replace").splitlines()
    except (OSError, untrusted.Refused) as error:
        return str(error)
    if any(line.strip() for line in lines[len(rows) + 1 :]):
        return f"line {len(rows) + 1} of {path.name} is not a row of metrics, and others follow it: delete it"
    return ""


def _told(row: Mapping[str, Any], key: str) -> Any:
    """Return what a row says about its run; a value passed by the user to `comm.metrics()` overrides that in `run`."""
    run = row.get("run")
    by_attach = run.get(key) if isinstance(run, dict) else None
    return by_attach if row.get(key) is None else row[key]


def _config(first: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the derived configuration; its types are checked later, see `schema.problem_of_rows`."""
    run = first["run"]
    options = run["options"] if isinstance(run.get("options"), dict) else {}
    adaptive = run.get("adaptive")
    names = [name for name in adaptive if isinstance(name, str)] if isinstance(adaptive, list) else []
    model, dataset = _told(first, "model"), _told(first, "dataset")
    plan, epochs = first.get("plan"), _told(first, "epochs")
    sizes = [_told(first, "batch_size"), plan.get("batch_size") if isinstance(plan, dict) else None]
    config = {
        "choices": {
            "model": UNKNOWN_MODEL if model is None else model,
            "dataset": UNKNOWN_DATA if dataset is None else dataset,
            "compressor": UNKNOWN_METHOD if run.get("compressor") is None else run["compressor"],
            "adaptive": ",".join(names) or "none",
            "sync": "every_step" if run.get("sync") is None else run["sync"],
            "arm": run.get("name"),
        },
        "model": {"name": model, "parameters": run.get("parameters")},
        "dataset": {"name": dataset},
        "compressor": options.get("compressor") or {},
        "adaptive": options.get("adaptive") or {name: {} for name in names},
        "sync": options.get("sync") or {},
        "seed": _told(first, "seed"),
        "epochs": rows[-1]["epoch"] + 1 if epochs is None else epochs,
        "batch_size": next(filter(is_batch_size, sizes), None),
        "workers": run.get("workers"),
    }
    if any(row.get("modelled_seconds") is not None for row in rows):
        links = yaml_files("network")
        link = next((name for name in links if name == run.get("network")), LINK)
        config["network"] = read_options(links[link])
        config["choices"]["network"] = link
    return config


def summary_of(run: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the content of summary.json after at least one row.

    `run` contains `workers`, and `processes` and `parameters` if known.
    """
    known = [name for name in JUDGED_BY if any(is_number(row.get(name)) for row in rows)]
    judged, last = metric((known or JUDGED_BY)[0]), rows[-1]  # accuracy, if they have none of these
    values = [(row[judged.name], row["epoch"]) for row in rows if is_number(row.get(judged.name))]
    best, best_epoch = judged.best(values)
    processes = {} if run.get("processes") is None else {"processes": run["processes"]}
    return {
        **{key: value for key, value in last.items() if key not in (*OF_AN_EPOCH, judged.name)},
        "metric_name": judged.name,
        "metric": last.get(judged.name),
        "best_metric": None if best_epoch is None else best,
        "best_epoch": best_epoch,
        "selected_by": judged.name,
        "steps": last.get("step"),
        "epochs": last["epoch"] + 1,
        "parameters": run.get("parameters"),
        "workers": run.get("workers"),
        **processes,
    }
