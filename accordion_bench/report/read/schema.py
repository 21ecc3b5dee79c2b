"""Validation of a run's files: one schema per file, and the decision whether a run enters the means.

The same checks apply to run folders and to files of metrics rows: the run must be finished, and contain everything that
tables and figures need.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from types import UnionType
from typing import Annotated, Any, ParamSpec, Union, get_args, get_origin, get_type_hints

from accordion_bench.comm.ledger import KINDS
from accordion_bench.methods.labels import hook_of, label
from accordion_bench.network.link_model import Network
from accordion_bench.run_config import LONGEST_NOTE, is_label
from accordion_bench.runs.metrics import LOSSES, METRICS, is_number, metric, wrong_in_rows, wrong_in_summary
from accordion_bench.runs.untrusted import NAME

P = ParamSpec("P")
LARGEST = 1e100  # bound of numbers that are squared and multiplied; no run comes near it
MOST_WORKERS = 1_000_000
CHOICES = ("model", "dataset", "compressor")
COLUMNS = ("epoch", "lr", "payload_bytes", "wire_bytes", "seconds")  # numbers, in every row
COUNTED = ("payload_bytes", "wire_bytes")  # null in every row if a third-party hook has sent the bytes
FINITE = ("_bytes", "_seconds", "rounds", "step")  # suffixes of columns that are finite numbers or null
NUMBERS = ("_error",)  # suffixes of columns that are any numbers or null
PARTS = tuple(f"{part}_seconds" for part in ("data", "compute", "update", "policy"))  # measured by every run


def is_count(value: Any) -> bool:
    """Whether a value is an integer above 0."""
    return is_number(value) and isinstance(value, int) and value > 0


def is_batch_size(value: Any) -> bool:
    """Whether a value is a batch size per worker: a number, or a list with one for each worker."""
    return is_count(value) or (isinstance(value, list) and value != [] and all(map(is_count, value)))


def is_finite(value: Any) -> bool:
    """Whether a value is a number that can be squared and multiplied without overflow."""
    return is_number(value) and -LARGEST < value < LARGEST


def is_finite_or_none(value: Any) -> bool:
    """Whether a value is None, or finite as in `is_finite`."""
    return value is None or is_finite(value)


# ---- the schema


Count = Annotated[int, is_count]
BatchSize = Annotated[int, is_batch_size]
Number = Annotated[float, is_number]
Finite = Annotated[float, is_finite]
Name = Annotated[str, lambda value: isinstance(value, str) and len(value) <= NAME]
Label = Annotated[str, is_label]
Note = Annotated[str, functools.partial(is_label, longest=LONGEST_NOTE)]
Tags = Annotated[list[str], lambda tags: isinstance(tags, list) and all(map(is_label, tags))]
Options = dict[str, Any]
Workers = Annotated[int, lambda value: is_count(value) and value <= MOST_WORKERS]
SentByKind = Annotated[
    dict[str, Any],
    lambda sent: (
        not sent
        or (isinstance(sent, dict) and sent.keys() <= set(KINDS) and _is_of(dict[str, tuple[Finite, Finite]], sent))
    ),
]
Bucket = tuple[Finite, Finite, Finite, Finite, Finite]
Buckets = list[Bucket | tuple[Finite, Finite, Finite, Finite, Finite, SentByKind]]
Exchange = tuple[Workers, Finite, Finite, Buckets] | tuple[Workers, Finite, Finite, Buckets, Finite]
Phase = Annotated[
    list[Any],
    lambda phase: (
        _is_of(tuple[str, int | list[Any], Finite, Finite], phase)
        and (phase[0] != "compute" or isinstance(phase[1], int))
    ),
]
# columns of lists, as read by `network.exchanges_from`, read by `compare.times`, and written by `Score.look`
LISTS = {"seconds_by_bucket": list[Exchange], "seconds_by_phase": list[Phase], "looks": list[dict[str, Number | None]]}


@dataclass(frozen=True)
class SummaryFile:
    """Schema of summary.json; all its other bytes, seconds, rounds and steps are finite numbers or null."""

    epochs: Count
    workers: Count
    metric_name: Name | None
    selected_by: Name | None
    test_size: Count | None
    processes: Count = 1


@dataclass(frozen=True)
class ChoicesEntry:
    """Schema of `choices` in config.yaml; all others are names or null."""

    model: str
    dataset: str
    compressor: str


@dataclass(frozen=True)
class ConfigFile:
    """Schema of config.yaml."""

    epochs: Count
    batch_size: BatchSize
    seed: int | None
    compressor: Options
    adaptive: Options | None
    sync: Options | None
    comm: Options | None
    dataset: Options | None
    target: Number | None
    target_every: Number | None
    scale: str | None
    label: Label | None
    tags: Tags | None
    note: Note | None


@dataclass(frozen=True)
class NetworkEntry:
    """Schema of `network` in config.yaml, if a run has modelled times."""

    bandwidth: Finite
    latency: Finite
    jitter: Finite | None
    burst: Finite | None
    slow_bandwidth: Finite | None


@dataclass(frozen=True)
class EnvironmentFile:
    """Schema of environment.json; a value of another type is omitted."""

    command: str
    commit: str
    started: str
    python: str
    processor: str
    cpu_cores: int
    threads: int
    kernels: str
    load: float
    host: str
    versions: Options
    gpus: list[Any]
    resumed: list[Any]


def wrong_keys(schema: type, content: Mapping[str, Any], present: bool = False) -> list[str]:
    """Return the keys whose values do not match a schema; a missing key counts as null.

    Args:
        schema: a schema class of this module; a key with a default may be missing.
        content: content of the file.
        present: check only keys that are present.
    """
    kinds, may_lack = _kinds(schema)
    return [
        key
        for key, kind in kinds.items()
        if not (key not in content and (present or key in may_lack)) and not _is_of(kind, content.get(key))
    ]


@functools.cache
def _kinds(schema: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the type of each key, and the keys that may be missing."""
    return get_type_hints(schema, include_extras=True), frozenset(
        f.name for f in fields(schema) if f.default != MISSING
    )


def _is_of(kind: Any, value: Any) -> bool:
    """Whether a JSON value matches a type: an annotated type is decided by its check, and a tuple is a list."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return bool(kind.__metadata__[0](value))
    if origin in (Union, UnionType):
        return any(_is_of(one, value) for one in args)
    if origin is tuple:
        return isinstance(value, list) and len(value) == len(args) and all(map(_is_of, args, value))
    inside = value.values() if isinstance(value, dict) else value
    whole = isinstance(value, origin or kind) if kind is not Any else True
    return whole and (origin is None or args[-1] is Any or all(_is_of(args[-1], one) for one in inside))


def _wrong_in_summary(summary: Mapping[str, Any]) -> list[str]:
    found = wrong_keys(SummaryFile, summary)
    found += [
        key for key, value in summary.items() if key.endswith(("seconds", *FINITE)) and not is_finite_or_none(value)
    ]
    counts = found or 1 <= summary.get("processes", 1) <= summary["workers"] <= MOST_WORKERS
    return found if counts else ["workers"]


def _wrong_in_config(config: Mapping[str, Any], summary: Mapping[str, Any]) -> list[str]:
    choices = config["choices"]
    found = wrong_keys(ChoicesEntry, choices)
    found += [key for key, name in choices.items() if key not in CHOICES and not isinstance(name, str | None)]
    found = [*(f"choices.{key}" for key in found), *wrong_keys(ConfigFile, config)]
    if isinstance(policies := config.get("adaptive"), dict):
        found += [f"adaptive.{name}" for name, policy in policies.items() if not isinstance(policy, dict)]
    if isinstance(data := config.get("dataset"), dict) and not is_finite_or_none(data.get("validation")):
        found.append("dataset.validation")
    if summary.get("modelled_seconds") is not None:
        network = config.get("network")
        wrong = wrong_keys(NetworkEntry, network) if isinstance(network, dict) else ["bandwidth"]
        found += ["network" if key in ("bandwidth", "latency") else f"network.{key}" for key in wrong]
    return found


# ---- whether a run enters the means


def _never_raises(find: Callable[P, str]) -> Callable[P, str]:
    """Return an exception as a problem: the invalid files of one run must not break the report of the others."""

    @functools.wraps(find)
    def found(*args: P.args, **kwargs: P.kwargs) -> str:
        try:
            return find(*args, **kwargs)
        except Exception as error:
            return _no_sense(error)

    return found


def _no_sense(error: Exception) -> str:
    return f"cannot be understood ({type(error).__name__}: {error})"


@_never_raises
def problem(
    config: Mapping[str, Any], summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], done: bool
) -> str:
    """Return why a run does not enter the means; "" if it does.

    The content of a missing or unreadable file is empty; `done` is whether the done marker exists.
    """
    if not isinstance(config.get("choices"), dict):
        return "no readable config.yaml"
    if "stopped_by" in summary:
        return f"stopped by {summary['stopped_by']}"
    if not done:
        return "no done marker: still running, or killed"
    if not is_number(summary.get("metric")):
        return "no readable summary.json"
    if not math.isfinite(summary["metric"]):
        return f"the last {summary.get('metric_name', 'metric')} is {summary['metric']}"
    missing = [f"{key} of summary.json" for key in _wrong_in_summary(summary)]
    missing += [f"{key} of config.yaml" for key in _wrong_in_config(config, summary)]
    if missing:
        return f"{missing[0]} is missing or of the wrong type"
    if len(rows) < summary["epochs"]:
        return "metrics.jsonl is incomplete"
    hooked = bool(hook_of(dict(config)))
    if hooked and any(row.get(column) is not None for row in rows for column in COUNTED):
        return "metrics.jsonl has a row with bytes of a hook, which are not counted"
    needed = [column for column in COLUMNS if not (hooked and column in COUNTED)]
    if strange := _strange_row(rows, (str(summary.get("metric_name", "accuracy")), *needed), PARTS, "metrics.jsonl"):
        return strange
    if wrong := wrong_in_rows(rows):
        return f"metrics.jsonl has {wrong}"
    if summary["epochs"] != len(rows) or summary["epochs"] != config["epochs"]:
        said = f"summary.json {summary['epochs']}, metrics.jsonl has {len(rows)}"
        return f"config.yaml says {config['epochs']} epochs, {said}"
    modelled = summary.get("modelled_seconds") is not None
    return wrong_in_summary(summary, rows) or _not_understood(config, modelled, "config.yaml")


@_never_raises
def problem_of_rows(
    config: Mapping[str, Any], summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], file: str
) -> str:
    """Return why a file of metrics rows does not enter the means; "" if it does, possibly from its first row on.

    It has no done marker, so it counts as unfinished only if its rows give the loop's number of epochs. Any column but
    the epoch may be null or missing; the metric may be missing in all rows but the last. The other arguments than
    `file`, its name, are derived from it, see `metrics_rows.derive_run_files`.
    """
    judged = metric(summary["metric_name"])
    values = [row[judged.name] for row in rows if is_number(row.get(judged.name))]
    if not values:
        return f"{file} has no number for any of {', '.join((*METRICS, *LOSSES))}; type comm.metrics(accuracy=0.91)"
    if not is_number(summary["metric"]):
        return f"the last row of {file} has no {judged.name}, which earlier ones have"
    if not math.isfinite(summary["metric"]):
        return f"the last {judged.name} is {summary['metric']}"
    if judged.percent and (far := [value for value in values if not 0 <= value <= 1]):
        return f"{judged.name} must be a share from 0 to 1, got {far[0]}; type comm.metrics({judged.name}=0.91)"
    if config["batch_size"] is None:  # a loop need not report it
        config = {**config, "batch_size": 1}
    if missing := [*_wrong_in_summary(summary), *_wrong_in_config(config, summary)]:
        return f"{missing[0].removeprefix('choices.')} is missing in the rows of {file}, or of the wrong type"
    if summary["epochs"] < config["epochs"]:
        return f"{file} has rows up to epoch {summary['epochs']} of {config['epochs']}: still running, or stopped"
    if strange := _strange_row(rows, ("epoch",), (), file):
        return strange
    if wrong := wrong_in_rows(rows, whole=False):
        return f"{file} has {wrong}; a resumed loop restores its sums with comm.load_state_dict()"
    return _not_understood(config, summary.get("modelled_seconds") is not None, file)


def _strange_row(rows: Sequence[Mapping[str, Any]], needed: Sequence[str], measured: Sequence[str], file: str) -> str:
    """Return what is wrong with the first invalid row; rows with the same columns of the same types are checked once.

    `needed` columns must be numbers; `measured` columns must not be null, if a row has them.
    """
    seen = set()
    for row in rows:
        plan = row.get("plan")
        levels = plan.get("levels") if isinstance(plan, dict) else None
        kind = (*row, *map(type, row.values()), type(levels))
        if kind not in seen and (told := _strange(row, levels, needed, measured)):
            return f"{file} has a row {told}"
        seen.add(kind)
    return ""


def _strange(row: Mapping[str, Any], levels: Any, needed: Sequence[str], measured: Sequence[str]) -> str:
    for column in needed:
        if not is_number(row.get(column)):
            return f"without {column}"
    for column, value in row.items():
        fine = value is None and column not in measured
        if column in COLUMNS or column.endswith(FINITE):
            fine = fine or is_finite(value)
        elif column.endswith(NUMBERS):
            fine = is_number(value, or_none=True)
        else:
            continue
        if not fine:
            return f"whose {column} is not a number"
    if not all(isinstance(group, dict | None) for group in (levels, *map(row.get, ("plan", "decisions", "norms")))):
        return "whose plan, decisions or norms are of the wrong type"
    for column, kind in LISTS.items():
        if not _is_of(kind, row.get(column) or []):
            return f"whose {column} is of the wrong type"
    return ""


def _not_understood(config: Mapping[str, Any], modelled: bool, file: str) -> str:
    try:
        label(dict(config))
        if modelled:
            network_of(config)
    except Exception as error:  # options may be of any type
        return f"{file} {_no_sense(error)}"
    return ""


def network_of(config: Mapping[str, Any]) -> Network:
    """Return the network on which a run was modelled."""
    return Network(**{key: value for key, value in config["network"].items() if key != "_target_"})
