"""Command `accordion-bench show RUN`: print a run's settings, end, result, costs and files on one screen."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from accordion_bench.options.advice import explain
from accordion_bench.options.checks import ConfigError, as_typed
from accordion_bench.options.presets import named
from accordion_bench.options.units import counted, human_bytes, human_seconds, samples
from accordion_bench.runs.metrics import METRICS, metric

USAGE = "accordion-bench show RUN: print a run's settings, end, result, costs and files"
COLUMN = 11  # width of the names of lines
SENT = {"payload": ("payload_bytes", "dense_bytes"), "wire": ("wire_bytes", "dense_wire_bytes")}


def main(words: Sequence[str]) -> int:
    """Print one screen for each run folder after `show` on the command line, and return the exit status."""
    if {"-h", "--help"} & set(words):
        print(USAGE)
        return 0
    try:
        if not words:
            raise ConfigError("show must stand before a run's folder, got none; type show results/runs/RUN")
        screens = ["\n".join(screen(_run_folder(word))) for word in words]
    except Exception as error:
        if (sentence := explain(error)) is None:
            raise
        print(sentence, file=sys.stderr)
        return 2
    print("\n\n".join(screens))
    return 0


def _run_folder(word: str) -> Path:
    """Return the folder of a run, or the rows file of a user's own loop."""
    from accordion_bench.report.read import find_runs

    found = find_runs(word)
    if found == [Path(word)]:
        return found[0]
    if not found:
        raise ConfigError(f"RUN must be a run's folder, got {word}, which holds none; type show results/runs/RUN")
    newest = max(found, key=lambda path: path.name)
    raise ConfigError(
        f"RUN must be one run's folder, got {word}, which holds {counted(len(found), 'run')}; type show {newest}"
    )


def screen(path: Path) -> Iterator[str]:
    """Yield the lines on one run, finished or not: its folder, or a file of metrics rows."""
    from accordion_bench.report.read import read_run

    run = read_run(path)
    config, last = run.config, dict(run.rows[-1]) if run.rows else {}
    summary = {**last, **run.summary}
    yield _line("run", str(path))
    yield _line("what", f"{named(config, 'model') or '?'} on {named(config, 'dataset', ('fingerprint',)) or '?'}")
    yield _line("method", run.method if run.method == run.label else f"{run.label} ({run.method})")
    yield _line("size", ", ".join(_size(config)))
    for key, value in (("tags", ", ".join(config.get("tags") or [])), ("note", config.get("note"))):
        if value:
            yield _line(key, str(value))
    if "command" in run.environment:
        yield _line("command", run.environment["command"])
        yield _line("started", f"{run.environment.get('started', '?')} on {run.environment.get('host', '?')}")
    yield from _ending(run)
    yield from _result(summary)
    yield from _spent(summary)
    yield from _files(path)


def _line(name: str, text: str) -> str:
    return f"{name:<{COLUMN}}{text}".rstrip()


def _size(config: dict[str, Any]) -> Iterator[str]:
    for key, noun in (("workers", "worker"), ("epochs", "epoch")):
        if isinstance(count := config.get(key), int):
            yield counted(count, noun)
    if isinstance(batch := config.get("batch_size"), int | list) and batch:
        yield f"{samples(batch)} per worker and step"
    yield f"seed {config.get('seed', '?')}"


def _ending(run: Any) -> Iterator[str]:
    """Yield lines on the end of the run, and the command that resumes it if possible."""
    epochs = counted(len(run.rows), "epoch")
    yield _line("ended", f"after {epochs}" if run.finished else f"not yet, after {epochs}: {run.problem}")
    if reason := run.summary.get("reason"):
        yield _line("", f"{run.summary.get('stopped_by', 'stopped')}: {reason}")
    if not run.finished and any(run.path.glob("checkpoint/*")):
        yield _line("", f"go on with: python -m accordion_bench {as_typed('resume', str(run.path))}")


def _result(summary: dict[str, Any]) -> Iterator[str]:
    name = summary.get("metric_name") or next((name for name in METRICS if name in summary), "")
    value = summary.get("metric", summary.get(name))
    if not isinstance(value, int | float):
        return
    judged, best, epoch = metric(str(name)), summary.get("best_metric"), summary.get("best_epoch")
    text = f"{judged.show(value)} in the last epoch"
    if isinstance(best, int | float) and isinstance(epoch, int):
        text += f", {judged.show(best)} in the best ({epoch + 1})"
    yield _line(judged.words, text)


def _spent(summary: dict[str, Any]) -> Iterator[str]:
    for name, (key, of_dense) in SENT.items():
        sent, dense = summary.get(key), summary.get(of_dense)
        if isinstance(sent, int | float):
            ratio = f" (dense {human_bytes(dense)})" if isinstance(dense, int | float) else ""
            yield _line(name, f"{human_bytes(sent)} per worker{ratio}")
    if isinstance(seconds := summary.get("seconds"), int | float):
        modelled = summary.get("modelled_seconds")
        told = f", {human_seconds(modelled)} modelled" if isinstance(modelled, int | float) else ""
        yield _line("time", f"{human_seconds(seconds)} of training{told}")


def _files(path: Path) -> Iterator[str]:
    for at, file in enumerate(sorted(path.iterdir()) if path.is_dir() else [path]):
        inside = [each for each in file.rglob("*") if each.is_file()] if file.is_dir() else [file]
        size = sum(each.lstat().st_size for each in inside)
        what = f"{file.name}/ ({counted(len(inside), 'file')}, " if file.is_dir() else f"{file.name} ("
        if size or file.is_dir():
            yield _line("" if at else "files", f"{what}{human_bytes(size)})")
