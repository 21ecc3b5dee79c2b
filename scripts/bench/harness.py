"""Common parts of all benches: interleaved arms, medians with quartiles, tables, the environment, stored results.

    found = interleaved({"ours": our_step, "plain": plain_step}, rounds=9)
    print(spread(*ratio(found["ours"], found["plain"])))       # 1.004 (0.998 to 1.011)

This module imports torch only when something is timed on a GPU, so benches that start others do not wait for the
import.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from accordion_bench.report.render.tables import folded
from accordion_bench.runs.folder import environment

Arm = TypeVar("Arm", bound=Hashable)
Found = TypeVar("Found")
WARM_UP = 3  # calls of an arm before it is timed: memory is allocated, buckets are arranged, hooks begin


# ---- rounds


def in_rounds(arms: Iterable[Arm], rounds: int, measure: Callable[[Arm], Found]) -> dict[Arm, list[Found]]:
    """Return the measurement of each arm in each round: all arms run once per round, and the order alternates."""
    found: dict[Arm, list[Found]] = {arm: [] for arm in arms}
    for number in range(rounds):
        for arm in list(found) if number % 2 else list(found)[::-1]:
            found[arm].append(measure(arm))
    return found


def interleaved(
    arms: Mapping[str, Callable[[], object]],
    rounds: int,
    steps: int = 3,
    device: str = "cpu",
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the seconds per call of each arm in each round, after a warm-up.

    Args:
        arms: by name.
        rounds: number of rounds.
        steps: number of calls of an arm in a round.
        device: device of the arms; `cuda` is synchronised.
        clock: clock on a CPU.
    """
    for run in arms.values():
        for _ in range(WARM_UP):
            run()
    return in_rounds(arms, rounds, lambda name: seconds_of(arms[name], steps, device, clock))


def seconds_of(
    run: Callable[[], object], times: int = 1, device: str = "cpu", clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the mean seconds of a call; on a GPU until all work that the calls have launched is done."""
    if not device.startswith("cuda"):
        begin = clock()
        for _ in range(times):
            run()
        return (clock() - begin) / times
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(times):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000 / times


# ---- numbers


def ratio(ours: Sequence[float], theirs: Sequence[float], factor: float = 1.0) -> tuple[float, float, float]:
    """Return quartiles of ours / (factor x theirs), round by round: (median, lower, upper)."""
    return quartiles([a / (factor * b) for a, b in zip(ours, theirs, strict=True)])


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return (median, lower, upper); for one value, that value three times."""
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return median, lower, upper


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of a median."""
    import numpy as np

    drawn = np.median(np.random.default_rng(0).choice(values, (2000, len(values))), axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(low), float(high)


def spread(median: float, lower: float, upper: float) -> str:
    """Return `1.004 (0.998 to 1.011)`."""
    return f"{median:.3f} ({lower:.3f} to {upper:.3f})"


# ---- what is printed and saved


def where(head: str = "") -> str:
    """Return `commit 0123456, AMD EPYC, 2 cores, {versions}` of this checkout and machine."""
    about = environment()
    return f"{head}commit {about['commit']}, {about['processor']}, {about['cpu_cores']} cores, {about['versions']}"


def print_head(*heads: str) -> None:
    """Print the first two lines of a table in Markdown."""
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}", flush=True)


def print_row(*cells: object) -> None:
    """Print one line of a table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def save(folder: Path, page: str, name: str, records: Mapping[str, Any]) -> None:
    """Store the printed text as README.md, and the numbers behind it as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(folded(page) + "\n", encoding="utf-8")
    (folder / name).write_text(json.dumps(records), encoding="utf-8")


# ---- the command line


def command_line(description: str | None, rounds: int | None = None) -> argparse.ArgumentParser:
    """Return a parser that shows a module's docstring verbatim, with --rounds if a default is given."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds)
    return parser


# ---- ratios with targets


def line(what: str, setting: str, ours: str, measured: float, target: float, unit: str = "", more: str = "") -> None:
    """Print one line of a table of targets; smaller ratios are better.

    Args:
        what, setting: measured quantity and its setting.
        ours: number behind the ratio.
        measured, target: ratio, and its largest accepted value.
        unit: unit of both.
        more: further text, such as the quartiles.
    """
    met = "yes" if measured <= target else "NO"
    print_row(what, setting, ours, f"{measured:.3f}{unit}{more}", f"{target}{unit}", met)


def row(
    what: str, setting: str, times: Mapping[str, list[float]], arms: tuple[str, str], target: float, factor: float = 1.0
) -> None:
    """Print one line for the ratio of two arms: the first one's times over `factor` x the second one's."""
    ours, theirs = arms
    median, lower, upper = ratio(times[ours], times[theirs], factor)
    milliseconds = 1000 * statistics.median(times[ours])
    line(what, setting, f"{milliseconds:.2f} ms", median, target, more=f" ({lower:.3f} to {upper:.3f})")


def run_benches(benches: Mapping[str, Callable[[int], None]], description: str | None, rounds: int) -> None:
    """Run the benches named on the command line, or all, and print the environment.

    Args:
        benches: benches by name; each takes the number of rounds and prints lines of the table.
        description: text of --help.
        rounds: default number of rounds.
    """
    parser = command_line(description, rounds)
    parser.add_argument("which", nargs="*", choices=[*benches, []], default=[])
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error(f"--rounds must be at least 2, quartiles need them, got {arguments.rounds}; type --rounds 2")
    print(f"{where()}\n")
    print_head("what", "setting", "ours", "measured: ratio, median (quartiles)", "target", "met")
    for name in arguments.which or benches:
        benches[name](arguments.rounds)
