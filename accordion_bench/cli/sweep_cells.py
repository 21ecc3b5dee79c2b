"""Cells of a sweep: their number and labels such as `7 of 12: compressor=topk`, and the table of their results."""

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from accordion_bench.options.checks import ConfigError
from accordion_bench.options.override import key_of
from accordion_bench.options.units import human_bytes, human_seconds
from accordion_bench.runs.folder import RunFolder
from accordion_bench.runs.metrics import Metric, metric

LONGEST = 48  # maximum characters of the label in front of each line; the cell's number is unique
Line = Mapping[str, Any]  # line of sweep.jsonl


@dataclass(frozen=True)
class Cells:
    """Information on a sweep's cells before the first one runs.

    Args:
        total: number of cells; 0 = unknown, since the sweeper decides.
        swept: keys of the overrides that vary.
        first: overrides of the first cell; empty = unknown.
    """

    total: int = 0
    swept: tuple[str, ...] = ()
    first: tuple[str, ...] = ()

    def numbered(self, number: int) -> str:
        """Return `7 of 12`, or `7` if the total is unknown."""
        return f"{number} of {self.total}" if self.total else f"{number}"

    def words(self, overrides: Iterable[str]) -> str:
        """Return the swept overrides of a cell: `compressor=topk seed=2`."""
        return " ".join(item for item in overrides if key_of(item) in self.swept)

    def in_front(self, number: int, overrides: Iterable[str]) -> str:
        """Return the prefix of each output line of a cell, for cells that print at the same time."""
        words = self.words(overrides)
        short = words if len(words) <= LONGEST else f"{words[: LONGEST - 3]}..."
        return f"{self.numbered(number)} {short} | "


def cells_of(hydra: DictConfig) -> Cells:
    """Return the cells that Hydra will run: those of its basic sweeper, or the trials of a search.

    Args:
        hydra: Hydra's node of the configuration.
    """
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser

    sweeper, typed = hydra.get("sweeper") or {}, OmegaConf.select(hydra, "overrides.task") or []
    params = OmegaConf.to_container(sweeper.get("params") or OmegaConf.create({}), resolve=True)
    assert isinstance(params, dict)
    running = GlobalHydra.instance()
    parser = OverridesParser.create(config_loader=running.config_loader() if running.is_initialized() else None)
    parsed = parser.parse_overrides([*(f"{key!s}={value}" for key, value in params.items()), *typed])
    typed_last = {key_of(each.get_key_element()): each for each in parsed}  # the last one counts, as in Hydra
    swept = {key: each for key, each in typed_last.items() if each.is_sweep_override()}
    if (trials := sweeper.get("n_trials")) is not None:
        return Cells(int(trials), tuple(swept))
    discrete = all(each.is_discrete_sweep() for each in swept.values())
    if not discrete:
        return Cells(0, tuple(swept))
    values = {key: list(each.sweep_string_iterator()) for key, each in swept.items()}
    first = [
        f"{each.get_key_element()}={values[key][0]}" if key in swept else str(each.input_line)
        for key, each in typed_last.items()
    ]
    return Cells(math.prod(map(len, values.values())), tuple(swept), tuple(first))


def table(cells: Cells, lines: Sequence[Line]) -> list[str]:
    """Return a table with a line per cell that has run: final metric, payload, training time and swept overrides.

    Args:
        cells: cells of the sweep.
        lines: lines of its record.
    """
    rows = [_row(cells, line) for line in sorted(lines, key=lambda line: line.get("cell", 0))]
    names = {row[1] for row in rows if row[1]}
    shown = names.pop() if len(names) == 1 else "metric"
    columns: list[Sequence[str]] = [("", shown, "payload", "time", "cell")]
    columns += [(number, f"{name} {value}" if names and name else value, *rest) for number, name, value, *rest in rows]
    widths = [max(len(row[i]) for row in columns) for i in range(4)]
    return [
        "  ".join([*(text.rjust(width) for text, width in zip(row, widths, strict=False)), row[4]]).rstrip()
        for row in columns
    ]


def _row(cells: Cells, line: Line) -> tuple[str, ...]:
    """Return number, name and value of the metric (or the status), payload, time, swept overrides."""
    number, words = str(line.get("cell", "")), cells.words(line["overrides"])
    found = _summary(line)
    judged = _judged(found)
    if line["exit_status"] or judged is None:
        return number, "", str(line["status"]), "", "", words
    payload, seconds = found.get("payload_bytes"), found.get("seconds")
    sent = human_bytes(payload) if isinstance(payload, int | float) else "-"
    took = human_seconds(seconds) if isinstance(seconds, int | float) else "-"
    return number, judged.words, judged.show(found["metric"]), sent, took, words


def _summary(line: Line) -> Mapping[str, Any]:
    """Return the summary of a cell's run; empty if it cannot be read."""
    with contextlib.suppress(ConfigError):
        if line.get("folder"):
            return RunFolder(line["folder"]).read_json("summary.json")
    return {}


def _judged(summary: Mapping[str, Any]) -> Metric | None:
    return metric(str(summary.get("metric_name"))) if isinstance(summary.get("metric"), int | float) else None


def best(cells: Cells, lines: Sequence[Line], higher: bool) -> str | None:
    """Return the sentence on the best cell so far of a search; None if no cell has finished.

    Args:
        cells: cells of the sweep.
        lines: lines of its record.
        higher: whether a higher metric is better.
    """
    done = [line for line in lines if isinstance(line.get("metric"), int | float) and not line["exit_status"]]
    if not done:
        return None
    line = (max if higher else min)(done, key=lambda line: line["metric"])
    judged = _judged(_summary(line))
    value = f"{judged.words} {judged.show(line['metric'])}" if judged else f"{line['metric']:g}"
    trial = f", in trial {cells.numbered(line['cell'])}" if "cell" in line else ""
    return f"best so far: {value} with {cells.words(line['overrides'])}{trial}"


# the extra that brings each of a group
