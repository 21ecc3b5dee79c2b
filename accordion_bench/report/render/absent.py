"""What is in no mean, and why: one line each, and of very many only the first."""

from collections.abc import Sequence

from accordion_bench.report.compare.markdown import line
from accordion_bench.report.read.load import Run

MOST = 20  # lines of a list that are shown


def left_out(
    runs: Sequence[Run], repeats: Sequence[Run], folders: Sequence[tuple[str, str]]
) -> dict[str, Sequence[str]]:
    """Heading -> lines, all of them.

    Args:
        runs: finished and unfinished ones.
        repeats: of seeds; see `grouping.group`.
        folders: those without a run, and why; see `missing_runs.no_runs`.
    """
    found = {
        "Unfinished, in no mean": unfinished([run for run in runs if not run.finished]),
        "Repeats of a seed, in no mean (the newest run counts)": repeated(repeats),
        "Skipped: no run in it": skipped(folders),
    }
    return {heading: lines for heading, lines in found.items() if lines}


def notes(absent: dict[str, Sequence[str]]) -> list[str]:
    """The same as Markdown."""
    return [
        f"{heading}:\n\n" + "\n".join(f"- {line(said)}" for said in first(lines)) for heading, lines in absent.items()
    ]


def first(lines: Sequence[str]) -> list[str]:
    """The first lines of a long list, and how many more there are; a short list whole."""
    if len(lines) <= MOST + 1:
        return list(lines)
    return [*lines[:MOST], f"... and {len(lines) - MOST:,} more"]


def unfinished(runs: Sequence[Run]) -> list[str]:
    """One line for each run that is in no mean."""
    lines = []
    for run in runs:
        epochs = run.config.get("epochs", "?")
        done = 0 if run.last_epoch is None else run.last_epoch + 1
        last = f"epoch {done} of {epochs} was the last" if done else f"no epoch of {epochs} was finished"
        lines.append(f"{run.name} ({run.label}, seed {run.seed}): {run.problem}; {last}")
    return lines


def repeated(runs: Sequence[Run]) -> list[str]:
    """One line for each run whose seed a newer run of the same arm has."""
    return [f"{run.name} ({run.label}, seed {run.seed})" for run in runs]


def skipped(folders: Sequence[tuple[str, str]]) -> list[str]:
    """One line for each folder or cell without a run."""
    return [f"{name}: {why}" for name, why in folders]
