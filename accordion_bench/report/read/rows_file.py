"""Files of metrics rows: what a user's own training loop has written with `comm.metrics()`, one line per epoch.

Such a loop leaves no run folder. What config.yaml, environment.json and summary.json would say is made of the rows, and
nothing else is known of the loop.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from accordion_bench.options.conf_dir import read_options, yaml_files
from accordion_bench.report.read.schema import is_batch_size
from accordion_bench.runs import untrusted
from accordion_bench.runs.metrics import LOSSES, METRICS, OF_AN_EPOCH, Metric, is_number, metric

ENDING = ".jsonl"
UNKNOWN_MODEL, UNKNOWN_DATA, UNKNOWN_METHOD = "unknown model", "unknown data", "unknown method"
LINK = "1gbit"  # of conf/network: what the modelled columns are modelled on where `run` does not say
JUDGED_BY = (*METRICS, *LOSSES)  # the first of these columns that the rows have
# of one loop the same in all rows
SAME = ("name", "compressor", "adaptive", "sync", "options", "workers", "seed", "model", "parameters", "dataset")


class RowsAsFiles(NamedTuple):
    """What the files of a run folder would hold."""

    config: dict[str, Any]
    environment: dict[str, Any]
    summary: dict[str, Any]
    rows: list[dict[str, Any]]


def is_rows_file(path: Path) -> bool:
    """Whether a file is one of metrics rows; its first line tells."""
    return not why_not(path)


def why_not(path: Path) -> str:
    """Why a file is none of metrics rows; "" where it is one."""
    try:
        first = untrusted.parse_json(untrusted.read_first_line(path), path.name)
    except (OSError, ValueError):  # a refusal is one of the latter
        return "no folder, and no file of metrics rows: its first line cannot be read as JSON"
    if not isinstance(first, dict) or not is_epoch(first.get("epoch")) or not isinstance(first.get("run"), dict):
        return "no folder, and no file of metrics rows: its first line lacks an epoch or the run of comm.metrics()"
    return ""


def is_epoch(value: Any) -> bool:
    """Whether it counts epochs from 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def made_of(rows: Sequence[dict[str, Any]]) -> RowsAsFiles:
    """What a run folder would hold, from at least one row.

    A loop that was stopped and begun again writes epochs again: from there on its later rows count.

    Args:
        rows: as read, texts printable; the first one has its `run`, each one an epoch.
    """
    kept: list[dict[str, Any]] = []
    for row in rows:
        while kept and kept[-1]["epoch"] >= row["epoch"]:
            kept.pop()
        kept.append({key: value for key, value in row.items() if key != "run"})
    first, run = rows[0], rows[0]["run"]
    return RowsAsFiles(_config(first, kept), _environment(run), summary_of(run, kept), kept)


def cut_short(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    """Why the rows of a file are not one whole loop's; "" where they are, but for a last line that is torn.

    Args:
        path: of the file.
        rows: as read, up to the first line that is damaged.
    """
    own = _who(rows[0])
    for number, row in enumerate(rows, 1):
        if row.get("run", rows[0]["run"]) != rows[0]["run"] and _who(row) != own:
            return f"line {number} of {path.name} is another run's than line 1: write each run into a file of its own"
    try:
        lines = untrusted.read_bytes(path, untrusted.LARGE).decode("utf-8", errors="replace").splitlines()
    except (OSError, untrusted.Refused) as error:
        return str(error)
    if any(line.strip() for line in lines[len(rows) + 1 :]):
        return f"line {len(rows) + 1} of {path.name} is no row of metrics, and others follow it: delete it"
    return ""


def _who(row: Mapping[str, Any]) -> list[Any]:
    return [_told(row, key) for key in SAME]


def _told(row: Mapping[str, Any], key: str) -> Any:
    """What a row says of its run: what the user has passed to `comm.metrics()`, beside `run`, comes first."""
    run = row.get("run")
    by_attach = run.get(key) if isinstance(run, dict) else None
    return by_attach if row.get(key) is None else row[key]


def _config(first: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Options in the bench's words; kinds are looked at later, see `schema.problem_of_rows`."""
    run = first["run"]
    options = run["options"] if isinstance(run.get("options"), dict) else {}
    names = [name for name in _list(run.get("adaptive")) if isinstance(name, str)]
    model, dataset = _told(first, "model"), _told(first, "dataset")
    plan, sizes = first.get("plan"), [_told(first, "batch_size")]
    if isinstance(plan, dict):
        sizes.append(plan.get("batch_size"))
    epochs = _told(first, "epochs")
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


def _environment(run: Mapping[str, Any]) -> dict[str, Any]:
    device = run.get("device")
    gpus = [device] if isinstance(device, str) and device != "cpu" else []
    return {"gpus": gpus, **run}


def summary_of(run: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What summary.json would say after these rows.

    Args:
        run: `workers`, and `processes` and `parameters` where they are known.
        rows: at least one.
    """
    judged, last = _judged(rows), rows[-1]
    values = [(row[judged.name], row["epoch"]) for row in rows if is_number(row.get(judged.name))]
    best, best_epoch = judged.worst, None
    for value, epoch in values:
        if judged.better(value, best):
            best, best_epoch = value, epoch
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


def _judged(rows: Sequence[Mapping[str, Any]]) -> Metric:
    """What the rows are judged by: accuracy, where they have none of all."""
    known = [name for name in JUDGED_BY if any(is_number(row.get(name)) for row in rows)]
    return metric(known[0] if known else JUDGED_BY[0])


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
