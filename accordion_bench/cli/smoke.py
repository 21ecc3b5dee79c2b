"""+experiment=smoke: every compressor, policy and synchronisation scheme, in all pairs, for a handful of steps each."""

import contextlib
import functools
import io
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accordion_bench import train
from accordion_bench.cli import pairwise, sweep
from accordion_bench.cli.pairwise import Cell
from accordion_bench.config.components import with_counts
from accordion_bench.config.validate import validate
from accordion_bench.options.instantiate import Config
from accordion_bench.options.units import counted
from accordion_bench.processes.placement import place
from accordion_bench.run_config import RunConfig

NAME = "smoke"


def cells(base: Config, typed: Mapping[str, Any]) -> list[Cell]:
    """The cells: all that are needed, or those of the choices that were typed.

    Args:
        base: the configuration around the cells.
        typed: the keys on the command line; `compressor`, `sync` and `adaptive` narrow the cells down.
    """

    @functools.cache
    def runs(cell: Cell) -> bool:
        return pairwise.refusal(pairwise.cell(base, *cell), base["workers"]) is None

    chosen = {"adaptive": list(base["adaptive"]) or ["none"]}
    chosen |= {group: [base["choices"][group]] for group in ("compressor", "sync")}
    groups = ("compressor", "sync", "adaptive")
    return pairwise.cover(runs, *(chosen[group] if group in typed else pairwise.names(group) for group in groups))


def run(base: Config, typed: Mapping[str, Any], tell: Callable[[Exception, str], int]) -> float:
    """Train all cells in this process: one line for each, run folders and a record under `paths.runs`/smoke.

    Args:
        base: the configuration around the cells.
        typed: the keys on the command line.
        tell: tells the user of an error in a cell, which is named; returns the exit status.

    Returns:
        share of the cells that came to their end.

    Raises:
        ConfigError: the configuration around the cells breaks a rule.
        KeyboardInterrupt: stopped.
    """
    base = {**base, "paths": {**base["paths"], "runs": str(Path(base["paths"]["runs"], NAME))}}
    config = with_counts(RunConfig.from_dict(base))
    base = {**base, "dataset": config.dataset}
    validate(config, place(config))
    began, todo, ran = time.monotonic(), cells(base, typed), 0
    sweep.current.begin(base["paths"]["runs"])
    for number, cell in enumerate(todo, 1):
        compressor, scheme, policies = cell
        adaptive = policies[0] if len(policies) == 1 else f"[{','.join(policies)}]"
        overrides = [f"+experiment={NAME}", f"compressor={compressor}", f"sync={scheme}", f"adaptive={adaptive}"]
        ended: list[bool] = []

        def train_cell(note: dict[str, Any], cell: Cell = cell, ended: list[bool] = ended) -> float:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                metric = train.run(pairwise.shortened(pairwise.cell(base, *cell)), {}, note)
            ended.append(True)
            return metric

        def tell_named(error: Exception, named: str = " ".join(overrides[1:])) -> int:
            return tell(error, f"{named}: ")

        start = time.monotonic()
        sweep.run_cell(overrides, train_cell, tell_named)
        ran += bool(ended)
        seconds, said = time.monotonic() - start, "ran" if ended else "FAILED"
        print(f"{number:>3} of {len(todo)}  {said:<6} {seconds:5.2f} s  {' '.join(overrides[1:])}", flush=True)
    told = f"{ran} of {counted(len(todo), 'cell')} ran, in {time.monotonic() - began:.0f} s"
    print(f"{told}: {base['paths']['runs']}", flush=True)
    return ran / len(todo)
