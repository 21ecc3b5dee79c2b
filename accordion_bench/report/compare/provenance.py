"""Provenance of runs: commands, commit, hardware, versions, and unequal measuring conditions."""

import math
import shlex
import statistics
from collections.abc import Sequence
from typing import Any

from accordion_bench.options import checks
from accordion_bench.processes.waiting import BUSY
from accordion_bench.report.compare.arms import HOOK, Arm
from accordion_bench.report.compare.show import listed, show_seeds
from accordion_bench.report.compare.times import machine, waited
from accordion_bench.report.read.load import Run


def facts(runs: Sequence[Run]) -> dict[str, str]:
    """Return the number of runs, their seeds, commit, hardware and versions, by name."""

    def said(key: str) -> str:
        return ", ".join(dict.fromkeys(str(environment.get(key) or "unknown") for environment in environments))

    environments = [environment for run in runs for environment in run.environments]
    versions: dict[str, Any] = {}
    for environment in environments:
        versions |= {f"{name} {version}": None for name, version in (environment.get("versions") or {}).items()}
    said_by_users = {
        "tags": ", ".join(dict.fromkeys(tag for run in runs for tag in run.config.get("tags") or [])),
        "notes": "; ".join(f"{run.name}: {note}" for run in runs if (note := run.config.get("note"))),
    }
    return {
        "runs": f"{len(runs)}; seeds: {show_seeds([run.seed for run in runs])}",
        **{key: text for key, text in said_by_users.items() if text},
        "commit": said("commit"),
        "hardware": "; ".join(dict.fromkeys(machine(run) for run in runs)),
        "versions": ", ".join([f"Python {said('python')}", *versions]),
    }


def own_commands(runs: Sequence[Run]) -> list[str]:
    """Return the commands of some runs, merged if only the seed differs; for a user's own loop a comment naming it."""
    own = list(dict.fromkeys(f"# {run.name}: a training loop of its own" for run in runs if run.attached))
    alike: dict[tuple[Any, ...], list[Run]] = {}
    for run in [run for run in runs if not run.attached]:
        words = _typed(run)
        others = [word for word in words if _key(word) != "seed"]
        alike.setdefault((len(words) > len(others), *others), []).append(run)
    return own + [_as_one(members) for members in alike.values()]


def _as_one(runs: Sequence[Run]) -> str:
    """Merge the commands of runs that differ only in their seed."""
    typed = list(dict.fromkeys(map(command, runs)))
    if len(typed) == 1:
        return typed[0]
    words = _typed(runs[0])
    others = [word for word in words if _key(word) != "seed"]
    seeds = [word.partition("=")[2] for run in runs for word in _typed(run) if _key(word) == "seed"]
    sweep = [] if {"-m", "--multirun"} & set(words) else ["-m"]
    return shlex.join(["python", "-m", "accordion_bench", *sweep, *others, f"seed={','.join(dict.fromkeys(seeds))}"])


def command(run: Run) -> str:
    """Return the command of a run as `python -m accordion_bench ...`, without paths, which do not change the result."""
    return shlex.join(["python", "-m", "accordion_bench", *_typed(run)])


def dense_command(arm: Arm) -> str:
    """Return the command of an arm's runs, made dense; for an arm of an experiment, that of its dense arm."""
    replaced = ("compressor", "adaptive", "sync", "seed", "resume", "arm", "label", "-m", "--multirun")
    typed = _typed(arm.runs[0])
    kept = [word for word in typed if _key(word).split(".")[0] not in replaced and not _key(word).startswith(HOOK)]
    sweep = ["-m"] if arm.n > 1 or {"-m", "--multirun"} & set(typed) else []
    seeds = f"seed={','.join(map(str, arm.seeds))}"
    dense = ["compressor=none", "adaptive=none", *kept]
    if any(_key(word) == "experiment" for word in typed):
        dense = [*kept, "+arm=dense"]  # after the experiment, which would override it
        config, own = arm.config, {_key(word) for word in kept}
        if arm.workers == 1:  # a control, for which the experiment's dense arm has other sizes
            sizes = {"workers": 1, "batch_size": checks.show(config["batch_size"]), "epochs": config["epochs"]}
            dense += [f"{key}={value}" for key, value in sizes.items() if key not in own]
    return shlex.join(["python", "-m", "accordion_bench", *sweep, *dense, seeds])


def dense_attached() -> str:
    """Describe how to add a dense run to those of a user's own loop."""
    return 'the same loop with attach(..., compressor="none"), its rows in a file of their own'


def unequal(arms: Sequence[Arm]) -> list[str]:
    """Return sentences about unequal conditions of the arms' time measurements: threads, and other load."""
    return [*_unequal_threads(arms), *(_waited(arms) or _unequal_load(arms))]


def _waited(arms: Sequence[Arm]) -> list[str]:
    """Report processes that waited for cores, on a busy machine or because they were too many for it."""
    shares = {arm.label: max((waited(run) or 0.0 for run in arm.runs), default=0.0) for arm in arms}
    busy = [f"{label} {share:.0%}" for label, share in shares.items() if share >= BUSY]
    if not busy:
        return []
    return [
        f"The machine was busy: processes waited for a core for part of their time ({listed(busy)}), so times are too "
        "long."
    ]


def _unequal_threads(arms: Sequence[Arm]) -> list[str]:
    said = {
        arm.label: sorted({str(seen.get("threads") or "unknown") for run in arm.runs for seen in run.environments})
        for arm in arms
    }
    if len(set(map(tuple, said.values()))) == 1:
        return []
    if len({count for counts in said.values() for count in counts} - {"unknown"}) == 1:
        unknown = listed([label for label, counts in said.items() if "unknown" in counts])
        return [f"With how many threads per process {unknown} computed is not known: the times may differ by that."]
    each = listed([f"{label} {' and '.join(counts)}" for label, counts in said.items()])
    return [f"The arms differ in threads per process ({each}): so do their times."]


def _unequal_load(arms: Sequence[Arm]) -> list[str]:
    """Report mean loads at the start of the runs that differ by at least half a process per core between arms."""
    known = {arm.label: [run.environment.get("load", math.nan) for run in arm.runs] for arm in arms}
    means = {label: mean for label, loads in known.items() if not math.isnan(mean := statistics.fmean(loads))}
    cores = min((run.environment.get("cpu_cores") or 1 for arm in arms for run in arm.runs), default=1)
    if len(means) < 2 or max(means.values()) - min(means.values()) < cores / 2:
        return []
    least, most = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
    return [
        f"Other work ran beside some arms (mean load at the start from {means[least]:.1f}, {least}, to "
        f"{means[most]:.1f}, {most}, on {cores} cores): their times are too long."
    ]


def _typed(run: Run) -> list[str]:
    """Return the arguments after the program's name, without paths."""
    typed = run.environment.get("command", "")
    try:
        words = shlex.split(typed)
    except ValueError:  # an unclosed quotation mark
        words = typed.split()
    names = ("accordion_bench", "accordion-bench", "__main__.py")
    start = next((i + 1 for i, word in enumerate(words) if word.endswith(names)), len(words))
    return [word for word in words[start:] if not _key(word).startswith("paths.")]


def _key(word: str) -> str:
    return word.lstrip("+~").split("=")[0] if "=" in word else word
