"""Where runs come from: commands, commit, hardware, versions."""

import shlex
import time
from collections.abc import Sequence
from typing import Any

from accordion_bench.report.arms import Arm
from accordion_bench.report.load import Run


def provenance(runs: Sequence[Run], commands: Sequence[str] = ()) -> str:
    """Commands, commit, hardware and versions of some runs, as Markdown.

    Args:
        runs: whose.
        commands: that say the same as the runs' own in fewer lines.
    """

    def said(key: str) -> str:
        return ", ".join(dict.fromkeys(str(run.environment.get(key) or "unknown") for run in runs))

    versions: dict[str, Any] = {}
    for run in runs:
        versions |= {f"{name} {version}": None for name, version in (run.environment.get("versions") or {}).items()}
    lines = [
        "## Where this comes from\n",
        f"- runs: {len(runs)}; seeds: {', '.join(dict.fromkeys(str(run.seed) for run in runs))}",
        f"- commit: {said('commit')}",
        f"- hardware: {'; '.join(dict.fromkeys(machine(run) for run in runs))}",
        f"- versions: Python {said('python')}, {', '.join(versions)}",
        f"- reported on {time.strftime('%Y-%m-%d')}\n",
        "```",
        *(commands or dict.fromkeys(command(run) for run in runs)),
        "```",
    ]
    return "\n".join(lines)


def command(run: Run) -> str:
    """What was typed, as `python -m accordion_bench ...`, without the folders, which change no result."""
    return shlex.join(["python", "-m", "accordion_bench", *_typed(run)])


def dense_command(arm: Arm) -> str:
    """The command of an arm's runs, made dense."""
    replaced = ("compressor", "adaptive", "sync", "seed", "resume", "-m", "--multirun")
    kept = [word for word in _typed(arm.runs[0]) if _key(word).split(".")[0] not in replaced]
    sweep = ["-m"] if arm.n > 1 or {"-m", "--multirun"} & set(_typed(arm.runs[0])) else []
    seeds = f"seed={','.join(map(str, arm.seeds))}"
    return shlex.join(["python", "-m", "accordion_bench", *sweep, "compressor=none", "adaptive=none", *kept, seeds])


def machine(run: Run) -> str:
    """Processor and GPUs of a run."""
    environment = run.environment
    cores = f"{environment.get('processor') or 'unknown processor'}, {environment.get('cpu_cores', '?')} cores"
    return ", ".join([cores, *(environment.get("gpus") or [])])


def _typed(run: Run) -> list[str]:
    """The words after the program's name."""
    words = shlex.split(run.environment.get("command", ""))
    names = ("accordion_bench", "accordion-bench", "__main__.py")
    start = next((i + 1 for i, word in enumerate(words) if word.endswith(names)), len(words))
    return [word for word in words[start:] if not _key(word).startswith("paths.")]


def _key(word: str) -> str:
    return word.lstrip("+~").split("=")[0] if "=" in word else word
